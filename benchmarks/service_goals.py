"""Arithmetic of ``bench_service.py``: medians, percentiles, ratios of rounds, and the goals."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "least": round(min(values), 3),
        "most": round(max(values), 3),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` percent of all do not exceed."""
    ordered = sorted(values)
    return round(ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)], 3)


def paired(rounds: Sequence[Mapping[str, Mapping[str, float]]], one: str, other: str, key: str) -> float:
    """The median over the rounds of one contender's figure over another's in the same round."""
    return round(statistics.median(each[one][key] / each[other][key] for each in rounds), 3)


def judge(figures: Mapping[str, Any], cores: int) -> list[dict[str, Any]]:
    """Each goal with its limit and what was found; None where the part was left out."""

    def found(part: str, *path: str) -> Any:
        value = figures.get(part)
        for name in path:
            value = None if value is None else value[name]
        return value

    rate = found("warmup", "service/one_core")
    cold = found("herd", "cold")
    rss = [
        value for value in (found("start", "rss_mb", "most"), found("artifacts", "service_rss_mb")) if value is not None
    ]
    ratio = ("ratios", "service/bare")
    return [
        _goal("artifact hits: requests a second / bare application's", 0.7, found("artifacts", *ratio, "rps"), True),
        _goal("artifact hits: p99 / bare application's", 3.0, found("artifacts", *ratio, "p99_ms")),
        _goal("first page of 100,000 variants, ms", 15.0, found("listing", "page", "p50_ms")),
        _goal(
            "warm-up / cores × NVRTC alone on one core", 0.85, None if rate is None else round(rate / cores, 3), True
        ),
        _goal("/healthz while every core compiles, p99 ms", 50.0, found("warmup", "healthz", "p99_ms")),
        _goal("start to ready with 10,000 entries, s", 1.5, found("start", "ready_s", "median")),
        _goal("resident memory with 10,000 entries and after load, MB", 150.0, max(rss, default=None)),
        _goal("herd: compiles a kernel", 1.0, cold and round(cold["compiles"] / found("herd", "kernels"), 3)),
        _goal("herd: errors", 0.0, cold and cold["errors"]),
    ]


def lines(goals: Sequence[Mapping[str, Any]]) -> str:
    """The goals as a table."""
    shown = []
    for goal in goals:
        limit = f"{'>=' if goal['at_least'] else '<='} {goal['limit']:g}"
        verdict = {True: "pass", False: "FAIL", None: "not measured"}[goal["pass"]]
        value = "-" if goal["found"] is None else f"{goal['found']:g}"
        shown.append(f"{goal['goal']:<62}{limit:>10}{value:>10}  {verdict}")
    return "\n".join(shown)


def _goal(text: str, limit: float, found: float | None, at_least: bool = False) -> dict[str, Any]:
    passed = None if found is None else found >= limit if at_least else found <= limit
    return {"goal": text, "limit": limit, "at_least": at_least, "found": found, "pass": passed}
