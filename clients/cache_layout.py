"""CacheLayout: what a cache row and a query hold, and the pool seen as rows of it."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, get_args

from mlaprep.clients.tensors import dense, kind_of, overlaps, shape_error
from mlaprep.templates.fields import TILE, Layout

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """A layout with its derived options settled; :func:`cache_layout` makes it."""

    name: Layout
    query_dtype: Literal["e4m3", "input"]
    """Element type of the query result."""
    tile_scale: Literal["none", "raw", "pow2"]
    """How a tile of 128 latent elements is scaled; ``none`` but for ``ds_mla``."""

    def width(self, rank: int, rope_dim: int) -> int:
        """Elements of a cache row: R + D, or the bytes of a ``ds_mla`` row."""
        return rank + rope_dim if self.name != "ds_mla" else rank + 4 * (rank // TILE) + 2 * rope_dim

    def cache_dtypes(self, inputs: "torch.dtype") -> "tuple[torch.dtype, ...]":
        """Element types a pool may have."""
        import torch

        return (inputs,) if self.name == "same" else (torch.uint8, torch.float8_e4m3fn)

    def result_dtype(self, inputs: "torch.dtype") -> "torch.dtype":
        """Element type of the query."""
        import torch

        return torch.float8_e4m3fn if self.query_dtype == "e4m3" else inputs


class CacheRows(NamedTuple):
    """A pool as the kernel walks it. Strides are in elements of the pool."""

    cache: "Tensor"
    """``[S, width]`` where all rows are evenly spaced, else ``[pages, page, width]``; the caller's memory."""
    rows: int
    """S."""
    page: int
    """Rows of a page where the pool came as ``[pages, page, width]``, else 1."""
    row_stride: int
    page_stride: int
    """Between the first rows of two pages; ``page * row_stride`` where rows are evenly spaced."""


def cache_layout(layout: object, query_dtype: object = None, tile_scale: object = None) -> CacheLayout:
    """The layout of that name, ``None`` being what follows from it.

    Raises:
        TypeError: not a string.
        ValueError: no such layout, or an option that the layout does not have.
    """
    for name, value in (("layout", layout), ("query_dtype", query_dtype), ("tile_scale", tile_scale)):
        if type(value) is not str and (value is not None or name == "layout"):
            raise TypeError(f"{name}: found a {kind_of(value)}; pass a string, one of {', '.join(_WORDS[name])}")
    return _settled(layout, query_dtype, tile_scale)


@functools.lru_cache(maxsize=64)
def _settled(layout: Layout, query_dtype: str | None, tile_scale: str | None) -> CacheLayout:
    if layout not in _WORDS["layout"]:
        raise ValueError(f"layout: found a name of none; pass one of {', '.join(_WORDS['layout'])}")
    query = _QUERY_DTYPES[layout]
    tile = ("raw", "pow2") if layout == "ds_mla" else ("none",)
    for name, value, allowed in (("query_dtype", query_dtype, query), ("tile_scale", tile_scale, tile)):
        if value is not None and value not in allowed:
            raise ValueError(f"{name}: found one that layout {layout} has not; pass {' or '.join(allowed)}")
    return CacheLayout(layout, query_dtype or query[0], tile_scale or tile[0])  # type: ignore[arg-type]  # checked just above


def cache_rows(value: object, layout: CacheLayout, inputs: "torch.dtype", rank: int, rope_dim: int) -> CacheRows:
    """Check a pool and see it as rows.

    Raises:
        TypeError: no dense tensor, or of a dtype that the layout does not store.
        ValueError: another shape or width, or rows that share memory.
    """
    cache = dense("kv_cache", value, layout.cache_dtypes(inputs), _SHAPES, written=True)
    width, shape, strides = layout.width(rank, rope_dim), cache.shape, cache.stride()
    if len(shape) == 2 and shape[1] == width and strides[1] == 1 and strides[0] >= width:  # the usual pool
        return CacheRows(cache, shape[0], 1, strides[0], strides[0])
    if len(shape) not in (2, 3):
        raise shape_error("kv_cache", cache, _SHAPES)
    if shape[-1] != width:
        words = "R + 4 R/128 + 2 D" if layout.name == "ds_mla" else "R + D"
        wider = f" (pool[..., :{width}] where the rest of a row is padding)" if shape[-1] > width else ""
        raise shape_error("kv_cache", cache, f"rows of {words} = {width} elements{wider} for layout {layout.name}")
    if overlaps(cache):
        raise ValueError("kv_cache: rows that share memory; pass a pool whose rows are distinct")
    if len(shape) == 2:
        return CacheRows(cache, shape[0], 1, strides[0], strides[0])
    pages, page, _ = shape
    page_stride, row_stride, _ = strides
    rows = pages * page
    if page == 1:
        return CacheRows(cache.select(1, 0), rows, 1, page_stride, page_stride)
    if pages == 1:
        return CacheRows(cache.select(0, 0), rows, page, row_stride, page * row_stride)
    if rows and page_stride != page * row_stride:
        return CacheRows(cache, rows, page, row_stride, page_stride)
    return CacheRows(cache.flatten(0, 1), rows, page, row_stride, page * row_stride)


_SHAPES: Final = "[S, W], [S, 1, W] or [pages, page, W]"
_QUERY_DTYPES: Final[dict[str, tuple[str, ...]]] = {
    "fp8": ("e4m3",),
    "fp8-q16": ("input",),
    "same": ("input",),
    "ds_mla": ("e4m3", "input"),
}
_WORDS: Final = {"layout": get_args(Layout), "query_dtype": ("e4m3", "input"), "tile_scale": ("none", "raw", "pow2")}
