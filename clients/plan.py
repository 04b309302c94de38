"""LaunchConfig: the grid and block of a launch. A pure function of its arguments."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MAX_TOKENS: Final = 2**31 - 1
"""Tokens that one launch can number: the kernel counts them in 32 bits."""

_GRID_Y: Final = 65535
"""Largest y and z extents of a grid; x goes to 2**31 - 1."""


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Extents (x, y, z) of the grid, in blocks, and of a block, in threads.

    x of a block runs over the elements of a row, y over the rows of a token, z over tokens; x of the grid
    runs over the rows of a token, y and then z over tokens.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class RowShape:
    """What a plan must know of a kernel; read once from its manifest."""

    threads_per_row: int
    rows_per_token: int
    max_threads_per_block: int

    @classmethod
    def from_launch(cls, launch: Mapping[str, Any]) -> "RowShape":
        return cls(launch["threads_per_row"], launch["rows_per_token"], launch["max_threads_per_block"])


@dataclass(frozen=True, slots=True)
class Bucket:
    """The block size that measured fastest for tokens of up to so many rows, and up to so many tokens, with rotation
    or without."""

    rows_per_token_max: int
    tokens_max: int
    threads_per_block: int


@functools.cache
def measured_buckets(arch: str, rotates: bool) -> tuple[Bucket, ...]:
    """The buckets that ``benchmarks/tune_prepare.py`` measured on a GPU of this architecture for kernels that rotate,
    or for those that do not, in the order to look in; empty where none was measured."""
    measured = read_measured().get(arch, {"buckets": []})
    return tuple(
        Bucket(bucket["rows_per_token_max"], bucket["tokens_max"], bucket["threads_per_block"])
        for bucket in measured["buckets"]
        if bucket["rotates"] is rotates
    )


@functools.cache
def read_measured() -> Mapping[str, Any]:
    """What was measured, by architecture."""
    archs: Mapping[str, Any] = json.loads(_MEASURED.read_text("utf-8"))["archs"]
    return archs


def plan_launch(shape: RowShape, tokens: int, multiprocessors: int, buckets: Sequence[Bucket] = ()) -> LaunchConfig:
    """The launch for ``tokens`` tokens on a device of that many multiprocessors.

    A block holds several rows of one token, since the block scheduler, not bandwidth, bounds a launch of
    many small blocks. Where a token has too few rows to fill a block, it holds several tokens. How many
    threads a block aims at comes from the first of ``buckets`` that fits. Without one it is 288, and 468
    once there are more tokens than multiprocessors: the best single choices on an H200, taken to hold
    where a device differs in little but its number of multiprocessors.

    Raises:
        ValueError: ``tokens`` below 1 or above ``MAX_TOKENS``.
    """
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"tokens is {tokens}; one launch takes 1 to {MAX_TOKENS}")
    threads = _LARGE_BLOCK if tokens > multiprocessors else _SMALL_BLOCK
    for bucket in buckets:
        if shape.rows_per_token <= bucket.rows_per_token_max and tokens <= bucket.tokens_max:
            threads = bucket.threads_per_block
            break
    threads = min(threads, shape.max_threads_per_block)
    # Spread the rows evenly over as many blocks as it takes, so that the last block is not a thin one.
    groups = -(-shape.rows_per_token // max(1, threads // shape.threads_per_row))
    rows = -(-shape.rows_per_token // groups)
    tokens_per_block = max(1, min(threads // (rows * shape.threads_per_row), tokens, _BLOCK_Z)) if groups == 1 else 1
    blocks = -(-tokens // tokens_per_block)
    y = min(blocks, _GRID_Y)
    return LaunchConfig((groups, y, -(-blocks // y)), (shape.threads_per_row, rows, tokens_per_block))


_MEASURED: Final = Path(__file__).with_name("launch_plans.json")
_SMALL_BLOCK: Final = 288
_LARGE_BLOCK: Final = 468
_BLOCK_Z: Final = 64
