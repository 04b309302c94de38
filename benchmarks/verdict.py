"""Verdict: how a contender's bytes compare with those due."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from workload import RANK, Due, Layer

EQUAL, NEAR, OVERFLOW, WRONG = "equal", "near", "overflow", "WRONG"
_NAN = 0x7F


@dataclass(frozen=True, slots=True)
class Check:
    """The comparison, over all layers of a chain."""

    query_bytes_wrong: int = 0
    cache_bytes_wrong: int = 0
    overflow_only: bool = True
    """Every wrong byte is a NaN where the due one is ±448: torch's own cast before 2.13."""
    rotated_only: bool = True
    """Every wrong byte stands in a rotary column of a written row or query."""
    ulps: int = 0
    """The largest distance in e4m3 steps between a byte and the one due."""
    rotates: bool = False

    @property
    def verdict(self) -> str:
        """``equal``; ``near``; ``overflow``, equal but for values e4m3 cannot hold; or ``WRONG``.

        ``near`` is for rotated columns alone: one step of e4m3 apart, as where a fused multiply-add rounds once
        what the reference rounds twice.
        """
        if not self.query_bytes_wrong and not self.cache_bytes_wrong:
            return EQUAL
        if self.overflow_only:
            return OVERFLOW
        return NEAR if self.rotates and self.rotated_only and self.ulps <= 1 else WRONG

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "verdict": self.verdict,
            "query_bytes_wrong": self.query_bytes_wrong,
            "cache_bytes_wrong": self.cache_bytes_wrong,
        }
        return found | ({"ulps": self.ulps} if self.verdict in (NEAR, WRONG) else {})


def check(layers: list[Layer], queries: list[Tensor], due: list[Due]) -> Check:
    """Compare results with the bytes due: whole queries, and whole caches, rows that must stay untouched too."""
    wrong = {"query": 0, "cache": 0}
    overflow_only = rotated_only = True
    ulps = 0
    for layer, query, wanted in zip(layers, queries, due, strict=True):
        for name, found, expected in (
            ("query", query.view(torch.uint8), wanted.query),
            ("cache", layer.cache, wanted.cache),
        ):
            if found.shape != expected.shape:
                wrong[name] += expected.numel()
                overflow_only = rotated_only = False
                continue
            if torch.equal(found, expected):
                continue
            differs = found != expected
            overflow = ((found & _NAN) == _NAN) & ((expected & _NAN) == _NAN - 1)
            wrong[name] += int(differs.sum())
            overflow_only &= not bool((differs & ~overflow).any())
            rotated_only &= not bool(differs[..., :RANK].any())
            ulps = max(ulps, int((_steps(found) - _steps(expected)).abs()[differs].max()))
    return Check(wrong["query"], wrong["cache"], overflow_only, rotated_only, ulps, bool(layers and layers[0].rotation))


def _steps(codes: Tensor) -> Tensor:
    """e4m3 codes as integers in the order of their values: -0 and +0 are one."""
    magnitude = (codes & _NAN).short()
    return torch.where(codes >= 0x80, -magnitude, magnitude)
