"""Fields: the vocabulary of a specification: what each field may hold, and the words for it."""

from collections.abc import Mapping
from typing import Final, Literal, get_args

Dtype = Literal["bf16", "fp16"]
Layout = Literal["fp8", "fp8-q16", "same", "ds_mla"]
Rope = Literal["none", "interleaved", "neox"]
IndexDtype = Literal["i32", "i64"]
Scale = Literal["none", "scalar"]
QueryScale = Literal["none", "scalar", "token"]
QueryDtype = Literal["e4m3", "input"]
TileScale = Literal["none", "raw", "pow2"]

DYNAMIC: Final = "dynamic"
Stride = int | Literal["dynamic"]
"""A stride in elements: a constant, or ``"dynamic"`` for one passed at launch."""

MAX_STRIDE: Final = 2**40

TILE: Final = 128
"""Elements of a latent row that share one scale under ``ds_mla``."""

RANGES: Final[Mapping[str, tuple[int, int, int]]] = {
    # field: (smallest, largest, multiple of)
    "num_heads": (1, 256, 1),
    "kv_lora_rank": (16, 1024, 16),
    "rope_dim": (0, 128, 2),
    "dcp_world": (1, 1024, 1),
    "dcp_interleave": (1, 65536, 1),
    "pad_heads_to": (1, 256, 1),
    "page_size": (1, 65536, 1),
}
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "dtype": get_args(Dtype),
    "layout": get_args(Layout),
    "query_dtype": get_args(QueryDtype),
    "tile_scale": get_args(TileScale),
    "rope": get_args(Rope),
    "loc_dtype": get_args(IndexDtype),
    "position_dtype": get_args(IndexDtype),
    "q_scale": get_args(QueryScale),
    "kv_scale": get_args(Scale),
}
SIZES: Final[Mapping[str, tuple[int, ...]]] = {"elements_per_thread": (2, 4, 8, 16), "load_bytes": (16, 32)}
FLAGS: Final = ("reserved_slot", "pdl", "write_kv", "write_q")
STRIDES: Final[Mapping[str, str]] = {
    # field: token in a variant id
    "q_nope_token_stride": "qnt",
    "q_nope_head_stride": "qnh",
    "q_rope_token_stride": "qrt",
    "q_rope_head_stride": "qrh",
    "k_nope_token_stride": "knt",
    "k_rope_token_stride": "krt",
    "cache_page_stride": "page",
    "cache_row_stride": "row",
    "out_token_stride": "ot",
    "out_head_stride": "oh",
}
STRIDE_FIELDS: Final = tuple(STRIDES)


def describe(value: object) -> str:
    """The class of a value in JSON's words, without the value itself."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int):
        return "an integer that is not allowed"
    if isinstance(value, float):
        return "a number with a fraction or exponent"
    if isinstance(value, str):
        return "a string that is not allowed"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "an array"
    return f"a {type(value).__name__}"


def allowed_values(field: str) -> str:
    """What a field of :class:`KernelSpec` accepts, in words."""
    if field in RANGES:
        low, high, multiple = RANGES[field]
        return f"an integer from {low} to {high}" + (f", a multiple of {multiple}" if multiple > 1 else "")
    if field in CHOICES:
        return "one of " + ", ".join(CHOICES[field])
    if field in SIZES:
        return "one of " + ", ".join(map(str, SIZES[field]))
    if field in FLAGS:
        return "true or false"
    return f'"dynamic", or an integer from 0 to {MAX_STRIDE}'
