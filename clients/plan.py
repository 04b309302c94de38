"""LaunchConfig: how many blocks of what shape a launch takes. A pure function of its arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

MAX_ROWS: Final = 2**31 - 1024
"""Rows (query heads and cache rows of all tokens) that one launch can number.

The kernel counts rows in 32 bits and its grid has one x dimension of at most 2**31 - 1 blocks; the
margin keeps the last block's surplus rows from wrapping.
"""


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Grid of ``blocks``, each ``threads_per_row`` x ``rows_per_block`` threads."""

    blocks: int
    threads_per_row: int
    rows_per_block: int


@dataclass(frozen=True, slots=True)
class RowShape:
    """What a plan must know of a kernel; read once from its manifest."""

    threads_per_row: int
    rows_per_token: int
    max_threads_per_block: int

    @classmethod
    def from_launch(cls, launch: Mapping[str, Any]) -> "RowShape":
        return cls(launch["threads_per_row"], launch["rows_per_token"], launch["max_threads_per_block"])

    @property
    def max_tokens(self) -> int:
        """The largest T that one launch takes."""
        return MAX_ROWS // self.rows_per_token


def plan_launch(shape: RowShape, tokens: int, multiprocessors: int) -> LaunchConfig:
    """The launch for ``tokens`` tokens on a device of that many multiprocessors.

    Small launches take the smallest blocks, so that every multiprocessor gets work and the last row
    is not queued behind others; large ones take large blocks, which keep the block scheduler out of
    the way. The thresholds were measured on an H200 (``benchmarks/results``).

    Raises:
        ValueError: ``tokens`` below 1 or above ``shape.max_tokens``.
    """
    if not 1 <= tokens <= shape.max_tokens:
        raise ValueError(f"tokens is {tokens}; one launch of this kernel takes 1 to {shape.max_tokens}")
    rows = tokens * shape.rows_per_token
    rows_per_block = -(-_MIN_THREADS // shape.threads_per_row)
    while rows > _ROWS_PER_MULTIPROCESSOR * multiprocessors * rows_per_block and (
        2 * rows_per_block * shape.threads_per_row <= min(_MAX_THREADS, shape.max_threads_per_block)
    ):
        rows_per_block *= 2
    return LaunchConfig(-(-rows // rows_per_block), shape.threads_per_row, rows_per_block)


_MIN_THREADS: Final = 64
_MAX_THREADS: Final = 576
_ROWS_PER_MULTIPROCESSOR: Final = 8
