"""Goals: what the kernel is held to, judged from a run's record."""

from collections.abc import Callable, Iterable
from typing import Any

from columns import OURS_GENERAL_PDL, OURS_PDL
from report import BANDWIDTH_ROWS, FLOOR_TOKENS, SMALL_TOKENS, counted, geometric_mean, over_floor

Cells = list[dict[str, Any]]


def evaluate(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Every goal with its limit and what was found, over cold and hot cells together.

    ``found`` is of the kernel with strides compiled in, as ``prepare()`` loads it; ``general`` of the one
    that takes every stride at launch. ``pass`` is None where nothing was measured.
    """
    cells = record["cells"]
    plain, rope = ([cell for cell in cells if cell["rope"] == which] for which in (False, True))
    small, small_rope = ([cell for cell in some if cell["tokens"] <= SMALL_TOKENS] for some in (plain, rope))
    least = [cell for cell in plain if cell["tokens"] <= FLOOR_TOKENS]
    wide = [cell for cell in plain if cell["heads"] * cell["tokens"] >= BANDWIDTH_ROWS]
    copy = record["copy_gb_per_s"]["median"]
    host = record.get("host", {}).get("ours/sglang")

    return [
        _goal("ours / SGLang's fused kernel, both PDL, geometric mean", 0.82, _mean(plain, "/sglang")),
        _goal(f"the same at T <= {SMALL_TOKENS}", 0.77, _mean(small, "/sglang")),
        _goal("ours / best peer of each cell, geometric mean", 0.90, _mean(plain, "/best")),
        _goal("the same, worst cell", 1.00, _extreme(max, plain, "/best")),
        _goal(f"five launches / ours at T <= {SMALL_TOKENS}, worst cell", 7.0, _of_chain(small), at_least=True),
        _goal(f"µs over the empty kernel at T <= {FLOOR_TOKENS}, worst cell", 0.35, _over_floor(least)),
        _goal("share of a device copy's bandwidth at T·H >= 64k, worst cell", 0.97, _share(wide, copy), at_least=True),
        _goal(f"rope: ours / FlashInfer's better form at T <= {SMALL_TOKENS}, geometric mean", 0.65,
              _mean(small_rope, "/best")),
        _goal("rope: the same over all T, worst cell", 1.00, _extreme(max, rope, "/best")),
        _goal("whole eager call of a handle / SGLang's", 0.4, (host, None, int(host is not None))),
    ]  # fmt: skip


def lines(goals: list[dict[str, Any]]) -> str:
    """The goals as a table; ``general`` is of the kernel that takes strides at launch."""
    shown = [f"{'goal':<76}{'limit':>8}{'found':>9}{'general':>9}  cells"]
    for goal in goals:
        limit = f"{'>=' if goal['at_least'] else '<='} {goal['limit']:.2f}"
        found, general = ("-" if goal[key] is None else f"{goal[key]:.3f}" for key in ("found", "general"))
        verdict = {True: "pass", False: "FAIL", None: "not measured"}[goal["pass"]]
        shown.append(f"{goal['goal']:<76}{limit:>8}{found:>9}{general:>9}{goal['cells']:>7}  {verdict}")
    return "\n".join(shown)


Found = tuple[float | None, float | None, int]
"""Of ours, of ours with strides at launch, and over how many cells."""


def _goal(text: str, limit: float, found: Found, *, at_least: bool = False) -> dict[str, Any]:
    ours, general, cells = found
    passed = None if ours is None else ours >= limit if at_least else ours <= limit
    return {
        "goal": text,
        "limit": limit,
        "at_least": at_least,
        "found": ours,
        "general": general,
        "cells": cells,
        "pass": passed,
    }


def _ratios(cells: Cells, name: str) -> list[float]:
    return [cell["ratios"][name] for cell in cells if name in cell["ratios"]]


def _mean(cells: Cells, over: str) -> Found:
    ours, general = (_ratios(cells, which + over) for which in ("ours", "general"))
    return geometric_mean(ours), geometric_mean(general), len(ours)


def _extreme(pick: Callable[..., Any], cells: Cells, over: str) -> Found:
    ours, general = (_ratios(cells, which + over) for which in ("ours", "general"))
    return pick(ours, default=None), pick(general, default=None), len(ours)


def _of_chain(cells: Cells) -> Found:
    found = _ratios(cells, "chain/ours")
    return min(found, default=None), None, len(found)


def _over_floor(cells: Cells) -> Found:
    ours, general = (_present(over_floor(cell, name) for cell in cells) for name in (OURS_PDL, OURS_GENERAL_PDL))
    return max(ours, default=None), max(general, default=None), len(ours)


def _share(cells: Cells, copy_gb_per_s: float) -> Found:
    ours, general = (
        [cell["results"][name]["gb_per_s"] for cell in cells if counted(cell["results"], name)]
        for name in (OURS_PDL, OURS_GENERAL_PDL)
    )
    shares = [round(min(values) / copy_gb_per_s, 4) if values else None for values in (ours, general)]
    return shares[0], shares[1], len(ours)


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
