"""KernelSpec: what one prepare kernel is generated for, and its name.

A spec is a frozen value. It never depends on the number of tokens, the number of cache rows or the
context-parallel rank: those are launch scalars, so one variant serves every batch.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from mlaprep.templates.errors import FieldProblem, SpecError
from mlaprep.templates.fields import (
    CHOICES,
    DYNAMIC,
    FLAGS,
    MAX_STRIDE,
    RANGES,
    SIZES,
    STRIDE_FIELDS,
    STRIDES,
    TILE,
    Dtype,
    IndexDtype,
    Layout,
    QueryDtype,
    QueryScale,
    Rope,
    Scale,
    Stride,
    TileScale,
    allowed_values,
    describe,
)


class _HashedOnce:
    """Room for a hash beside the fields, which neither comparison nor pickling looks at."""

    __slots__ = ("_hash",)
    _hash: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec(_HashedOnce):
    """Everything a prepare kernel is specialised for, the architecture apart.

    R is ``kv_lora_rank``, D is ``rope_dim``, W = R + D. Omitted, ``None`` and the default are the same
    value. Strides are in elements; those that cannot matter (size-1 or absent dimensions, operands a
    write mode leaves out) are set back to their default, so that one kernel has one name.

    Raises:
        SpecError: a field of the wrong type, out of range, or at odds with another; all are listed.
    """

    num_heads: int
    """Query heads on this rank, H."""
    kv_lora_rank: int = 512
    """Width of the latent row, R: 16 to 1024, a multiple of 16."""
    rope_dim: int = 64
    """Width of the rotary columns, D: 0 to 128, even."""
    dtype: Dtype = "bf16"
    """Element type of query and key inputs."""
    layout: Layout = "fp8"
    """What a cache row holds."""
    query_dtype: QueryDtype = None  # type: ignore[assignment]  # derived from layout when omitted
    """Element type of the query result; follows from the layout except for ``ds_mla``."""
    tile_scale: TileScale = None  # type: ignore[assignment]  # derived from layout when omitted
    """How ``ds_mla`` scales a tile of 128 elements; ``none`` for every other layout."""
    rope: Rope = "none"
    """Rotation applied to the rotary columns of query and key."""
    loc_dtype: IndexDtype = "i64"
    position_dtype: IndexDtype = "i64"
    q_scale: QueryScale = "none"
    """What queries are multiplied by before rounding: ``scalar``, one fp32 on the device; ``token``, one
    fp32 for each token."""
    kv_scale: Scale = "none"
    """``scalar``: latent rows are multiplied by an fp32 device scalar before rounding."""
    dcp_world: int = 1
    """Ranks that share one cache under decode context parallelism; the rank is a launch scalar."""
    dcp_interleave: int = 1
    """Consecutive slots on one rank before the next rank's turn."""
    reserved_slot: bool = False
    """Whether a slot value given at launch is never written."""
    pad_heads_to: int = None  # type: ignore[assignment]  # num_heads when omitted
    """Heads of the query result; those from ``num_heads`` on are zeroed."""
    page_size: int = 1
    """Rows of a cache page, where pages lie apart by a stride of their own; 1 for evenly spaced rows."""
    pdl: bool = True
    """Whether the kernel waits for and releases its neighbours by programmatic dependent launch."""
    write_kv: bool = True
    write_q: bool = True
    elements_per_thread: int = None  # type: ignore[assignment]  # the most that the widths allow when omitted
    """Elements that one thread moves, 2 to 16: 16 is fastest. Inputs are loaded and rows stored in pieces of
    this size (16 bytes at most), which addresses and strides must then be multiples of."""
    load_bytes: int = 16
    """Bytes of one load: 32 asks for the wider loads of sm_100 and later."""
    q_nope_token_stride: Stride = DYNAMIC
    q_nope_head_stride: Stride = DYNAMIC
    q_rope_token_stride: Stride = DYNAMIC
    q_rope_head_stride: Stride = DYNAMIC
    k_nope_token_stride: Stride = DYNAMIC
    k_rope_token_stride: Stride = DYNAMIC
    cache_page_stride: Stride = DYNAMIC
    cache_row_stride: Stride = DYNAMIC
    out_token_stride: Stride = None  # type: ignore[assignment]  # H * W when omitted
    out_head_stride: Stride = None  # type: ignore[assignment]  # W when omitted

    def __post_init__(self) -> None:
        self._fill_defaults()
        problems = [problem for name in FIELDS for problem in self._check_field(name)]
        if problems:
            raise SpecError(problems)
        self._settle_derived()
        problems = self._check_together()
        if problems:
            raise SpecError(problems)

    def __hash__(self) -> int:
        # Specs are looked up at every call, and to hash all fields takes longer than the rest of that.
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", hash(tuple(getattr(self, name) for name in FIELDS)))
            return self._hash

    @property
    def row_width(self) -> int:
        """Elements of one query or latent row, W = R + D."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def cache_width(self) -> int:
        """Cache elements of one row: W, or the bytes of a ``ds_mla`` row."""
        if self.layout != "ds_mla":
            return self.row_width
        return self.kv_lora_rank + 4 * (self.kv_lora_rank // TILE) + 2 * self.rope_dim

    @property
    def quantised_query(self) -> bool:
        """Whether the query result is e4m3; otherwise it keeps the input dtype."""
        return self.query_dtype == "e4m3"

    @property
    def variant_id(self) -> str:
        """The spec in words, e.g. ``mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl``.

        :func:`parse_variant_id` reads it back to an equal spec.
        """
        words = [
            "mla_prepare",
            f"h{self.num_heads}",
            f"r{self.kv_lora_rank}",
            f"d{self.rope_dim}",
            self.dtype,
            _LAYOUT_WORDS[self.layout],
            _ROPE_WORDS[self.rope],
            self.loc_dtype,
            "pdl" if self.pdl else "nopdl",
        ]
        default = _derived_defaults(self)
        if self.query_dtype != default["query_dtype"]:
            words.append(f"q{self.query_dtype}")
        if self.tile_scale != default["tile_scale"]:
            words.append(f"ts{self.tile_scale}")
        if self.position_dtype != "i64":
            words.append(f"pos{self.position_dtype}")
        words += {"none": [], "scalar": ["qs"], "token": ["qst"]}[self.q_scale] + ["kvs"] * (self.kv_scale != "none")
        if self.dcp_world > 1:
            words.append(f"dcp{self.dcp_world}x{self.dcp_interleave}")
        words += ["res"] * self.reserved_slot
        if self.pad_heads_to != self.num_heads:
            words.append(f"pad{self.pad_heads_to}")
        if self.page_size > 1:
            words.append(f"pg{self.page_size}")
        words += ["qonly"] * (not self.write_kv) + ["kvonly"] * (not self.write_q)
        if self.elements_per_thread != default["elements_per_thread"]:
            words.append(f"e{self.elements_per_thread}")
        if self.load_bytes != 16:
            words.append(f"ld{self.load_bytes}")
        for field, word in STRIDES.items():
            stride = getattr(self, field)
            if stride != default[field]:
                words.append(f"{word}{'dyn' if stride == DYNAMIC else stride}")
        return "-".join(words)

    def stride_is_moot(self, field: str) -> bool:
        """Whether a stride cannot matter: its operand is left out, or its dimension has size 1."""
        absent = not (self.write_q if field.startswith(("q_", "out_")) else self.write_kv)
        if field.startswith(("q_rope", "k_rope")):
            absent = absent or self.rope_dim == 0
        heads = self.pad_heads_to if field.startswith("out") else self.num_heads
        return (
            absent
            or (field.endswith("_head_stride") and heads == 1)
            or (field == "cache_page_stride" and self.page_size == 1)
        )

    def to_dict(self) -> dict[str, Any]:
        """Every field, JSON types only; :meth:`from_dict` reads it back."""
        return {name: getattr(self, name) for name in FIELDS}

    @classmethod
    def from_dict(cls, document: object) -> Self:
        """A spec from parsed JSON. Unknown fields are refused by name, ``null`` means the default.

        Raises:
            SpecError: not an object, an unknown or missing field, or any fault of the constructor.
        """
        if not isinstance(document, Mapping):
            raise SpecError(FieldProblem("spec", describe(document), "an object of kernel spec fields"))
        unknown = [key for key in document if key not in FIELDS]
        if unknown:
            names = ", ".join(sorted(FIELDS))
            shown = [
                key if isinstance(key, str) and _PLAIN_NAME.fullmatch(key) else "(unprintable name)"
                for key in unknown[:8]
            ]
            raise SpecError([FieldProblem(name, "an unknown field", f"one of {names}") for name in shown])
        if document.get("num_heads") is None:
            raise SpecError(FieldProblem("num_heads", "nothing", allowed_values("num_heads")))
        return cls(**{str(key): value for key, value in document.items()})

    def _set(self, field: str, value: object) -> None:
        object.__setattr__(self, field, value)

    def _fill_defaults(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is None and field.name != "num_heads":
                self._set(field.name, field.default)

    def _check_field(self, name: str) -> list[FieldProblem]:
        value = getattr(self, name)
        if value is None and name in _DERIVED:
            return []
        if name in RANGES:
            low, high, multiple = RANGES[name]
            good = type(value) is int and low <= value <= high and value % multiple == 0
        elif name in CHOICES:
            good = type(value) is str and value in CHOICES[name]
        elif name in SIZES:
            good = type(value) is int and value in SIZES[name]
        elif name in FLAGS:
            good = type(value) is bool
        else:
            good = (type(value) is str and value == DYNAMIC) or (type(value) is int and 0 <= value <= MAX_STRIDE)
        return [] if good else [FieldProblem(name, describe(value), allowed_values(name))]

    def _settle_derived(self) -> None:
        default = _derived_defaults(self)
        for field in _DERIVED:
            if getattr(self, field) is None:
                self._set(field, default[field])
        for field in STRIDE_FIELDS:
            if self.stride_is_moot(field):
                self._set(field, default[field])

    def _check_together(self) -> list[FieldProblem]:
        return [
            *self._check_modes(),
            *self._check_rope(),
            *self._check_layout(),
            *self._check_access(),
        ]

    def _check_modes(self) -> Iterator[FieldProblem]:
        if not self.write_kv and not self.write_q:
            yield FieldProblem("write_q", "false beside write_kv false", "at least one of write_kv and write_q true")
        if not self.write_q:
            if self.q_scale != "none":
                yield FieldProblem("q_scale", "a scale beside write_q false", "none")
            if self.pad_heads_to != self.num_heads:
                yield FieldProblem("pad_heads_to", "padding beside write_q false", "omitted")
        if not self.write_kv:
            for field, off in (("kv_scale", "none"), ("reserved_slot", False), ("dcp_world", 1), ("page_size", 1)):
                if getattr(self, field) != off:
                    yield FieldProblem(field, "a cache option beside write_kv false", str(off).lower())
        if self.dcp_world == 1 and self.dcp_interleave != 1:
            yield FieldProblem("dcp_interleave", "an interleave with dcp_world 1", "1, or a dcp_world above 1")
        if self.dcp_world > 1 and self.page_size > 1 and self.page_size % self.dcp_interleave:
            yield FieldProblem("dcp_interleave", "an interleave that breaks a page", "a divisor of page_size")
        if self.pad_heads_to < self.num_heads:
            yield FieldProblem("pad_heads_to", "fewer than num_heads", f"{self.num_heads} or more")

    def _check_rope(self) -> Iterator[FieldProblem]:
        if self.rope != "none" and self.rope_dim == 0:
            yield FieldProblem("rope", f"{self.rope} with rope_dim 0", "none, or a rope_dim above 0")
        if self.rope == "none" and self.position_dtype != "i64":
            yield FieldProblem("position_dtype", "a value without rope", "omitted when rope is none")

    def _check_layout(self) -> Iterator[FieldProblem]:
        if self.layout != "ds_mla":
            default = _derived_defaults(self)
            if self.query_dtype != default["query_dtype"]:
                found = f"{self.query_dtype} with layout {self.layout}"
                yield FieldProblem("query_dtype", found, default["query_dtype"])
            if self.tile_scale != "none":
                yield FieldProblem("tile_scale", f"{self.tile_scale} with layout {self.layout}", "none")
        else:
            if self.kv_lora_rank % TILE:
                yield FieldProblem("kv_lora_rank", "a rank with a broken tile under ds_mla", f"a multiple of {TILE}")
            if self.rope_dim % 4:
                yield FieldProblem("rope_dim", "a width that ds_mla cannot store", "a multiple of 4")
            if self.tile_scale == "none":
                yield FieldProblem("tile_scale", "none with layout ds_mla", "raw or pow2")
        if self.kv_scale != "none" and self.layout in ("same", "ds_mla"):
            yield FieldProblem("kv_scale", f"a scale with layout {self.layout}", "none: no single scale quantises it")

    def _check_access(self) -> Iterator[FieldProblem]:
        elements = self.elements_per_thread
        if self.rope_dim % elements:
            yield FieldProblem("elements_per_thread", "a number that does not divide rope_dim", "a divisor of rope_dim")
        if self.layout == "ds_mla" and elements < 4:
            yield FieldProblem("elements_per_thread", "too few for a tile's threads to be one warp", "4, 8 or 16")
        if self.load_bytes == 32 and elements != 16:
            yield FieldProblem("load_bytes", "32 with fewer than 16 elements a thread", "16, or elements_per_thread 16")
        for field in STRIDE_FIELDS:
            stride = getattr(self, field)
            if stride == DYNAMIC or self.stride_is_moot(field):
                continue
            unit = self.stride_unit(field)
            if stride % unit:
                yield FieldProblem(field, "a stride that vector accesses cannot use", f"a multiple of {unit}")
            smallest = _smallest_stride(self, field)
            if stride < smallest:
                yield FieldProblem(field, "a stride that makes rows overlap", f"{smallest} or more")

    def stride_unit(self, field: str) -> int:
        """Elements that a stride must be a multiple of, so that every row starts where it can be accessed.

        Inputs are loaded and 2-byte results stored 16 bytes at a time at most, the e4m3 ones 16 elements.
        """
        two_bytes = min(self.elements_per_thread, 8)
        if field.startswith("out"):
            return self.elements_per_thread if self.quantised_query else two_bytes
        if field.startswith("cache"):
            return two_bytes if self.layout == "same" else self.elements_per_thread
        return self.elements_per_thread if self.load_bytes == 32 else two_bytes


FIELDS: Final = tuple(field.name for field in fields(KernelSpec))
"""Names of a spec's fields, in their order."""
_DERIVED: Final = (
    "query_dtype",
    "tile_scale",
    "pad_heads_to",
    "elements_per_thread",
    "out_token_stride",
    "out_head_stride",
)
_LAYOUT_WORDS: Final[Mapping[str, str]] = {"fp8": "fp8", "fp8-q16": "fp8q16", "same": "same", "ds_mla": "dsmla"}
_ROPE_WORDS: Final[Mapping[str, str]] = {"none": "norope", "interleaved": "interleaved", "neox": "neox"}
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def _derived_defaults(spec: KernelSpec) -> dict[str, Any]:
    """Defaults that follow from other fields, beside the dynamic default of every input stride."""
    defaults: dict[str, Any] = dict.fromkeys(STRIDE_FIELDS, DYNAMIC)
    defaults["query_dtype"] = "e4m3" if spec.layout in ("fp8", "ds_mla") else "input"
    defaults["page_size"] = 1
    defaults["tile_scale"] = "raw" if spec.layout == "ds_mla" else "none"
    defaults["elements_per_thread"] = max(size for size in SIZES["elements_per_thread"] if spec.rope_dim % size == 0)
    defaults["pad_heads_to"] = spec.num_heads
    heads = spec.num_heads if spec.pad_heads_to is None else spec.pad_heads_to
    defaults["out_token_stride"] = heads * spec.row_width
    defaults["out_head_stride"] = spec.row_width
    return defaults


def _smallest_stride(spec: KernelSpec, field: str) -> int:
    """The stride below which rows that are written would overlap; inputs may."""
    if field.startswith("out"):
        return spec.row_width
    if field == "cache_row_stride":
        return spec.cache_width
    return 0


MAX_VARIANT_ID: Final = 400
_NUMBER: Final = r"(0|[1-9][0-9]{0,12})"
_VARIANT_ID: Final = re.compile(
    rf"mla_prepare-h{_NUMBER}-r{_NUMBER}-d{_NUMBER}"
    r"-(?P<dtype>bf16|fp16)-(?P<layout>fp8|fp8q16|same|dsmla)-(?P<rope>norope|interleaved|neox)"
    r"-(?P<loc>i32|i64)-(?P<pdl>pdl|nopdl)"
    r"(?:-q(?P<query>e4m3|input))?(?:-ts(?P<tile>raw|pow2))?(?:-pos(?P<position>i32|i64))?"
    rf"(?P<qs>-qs|-qst)?(?P<kvs>-kvs)?(?:-dcp(?P<world>{_NUMBER})x(?P<interleave>{_NUMBER}))?"
    r"(?P<res>-res)?"
    rf"(?:-pad(?P<pad>{_NUMBER}))?(?:-pg(?P<page>{_NUMBER}))?"
    r"(?P<qonly>-qonly)?(?P<kvonly>-kvonly)?(?:-e(?P<elements>[248]|16))?(?:-ld(?P<load>32))?"
    + "".join(rf"(?:-{word}(?P<{field}>dyn|{_NUMBER}))?" for field, word in STRIDES.items()),
    re.ASCII,
)

VARIANT_ID_PATTERN: Final = f"^{re.sub(r'[(][?]P<[a-z_]+>|[(](?![?])', '(?:', _VARIANT_ID.pattern)}$"
"""The grammar of variant ids as JSON Schema has patterns. Which fields go together it cannot say."""


def parse_variant_id(variant_id: str) -> KernelSpec:
    """The spec that a variant id names.

    Only the canonical spelling is accepted: ``parse_variant_id(text).variant_id == text``.

    Raises:
        SpecError: not a variant id, or one whose fields are out of range.
    """
    allowed = "a variant id such as mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl"
    if not isinstance(variant_id, str):
        raise SpecError(FieldProblem("variant_id", describe(variant_id), allowed))
    match = _VARIANT_ID.fullmatch(variant_id) if len(variant_id) <= MAX_VARIANT_ID else None
    if match is None:
        raise SpecError(FieldProblem("variant_id", "a string that is not a variant id", allowed))
    words = match.groupdict()
    layouts = {word: layout for layout, word in _LAYOUT_WORDS.items()}
    ropes = {word: rope for rope, word in _ROPE_WORDS.items()}
    strides = {
        field: DYNAMIC if words[field] == "dyn" else int(words[field])
        for field in STRIDE_FIELDS
        if words[field] is not None
    }
    spec = KernelSpec.from_dict(
        {
            "num_heads": int(match[1]),
            "kv_lora_rank": int(match[2]),
            "rope_dim": int(match[3]),
            "dtype": words["dtype"],
            "layout": layouts[words["layout"]],
            "rope": ropes[words["rope"]],
            "loc_dtype": words["loc"],
            "pdl": words["pdl"] == "pdl",
            "query_dtype": words["query"],
            "tile_scale": words["tile"],
            "position_dtype": words["position"],
            "q_scale": {None: None, "-qs": "scalar", "-qst": "token"}[words["qs"]],
            "kv_scale": "scalar" if words["kvs"] else None,
            "reserved_slot": words["res"] is not None,
            "write_kv": words["qonly"] is None,
            "write_q": words["kvonly"] is None,
            **{
                field: int(words[word])
                for field, word in (
                    ("dcp_world", "world"),
                    ("dcp_interleave", "interleave"),
                    ("pad_heads_to", "pad"),
                    ("page_size", "page"),
                    ("elements_per_thread", "elements"),
                    ("load_bytes", "load"),
                )
                if words[word] is not None
            },
            **strides,
        }
    )
    if spec.variant_id != variant_id:
        raise SpecError(FieldProblem("variant_id", "a spelling that is not canonical", spec.variant_id))
    return spec
