"""Report: the record that a run writes, and the table that it prints of it."""

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from contenders import (
    CHAIN,
    FLOOR_NOPDL,
    FLOOR_PDL,
    OURS_FIXED_PDL,
    OURS_NOPDL,
    OURS_PDL,
    SGLANG_NOPDL,
    SGLANG_PDL,
)

SMALL_TOKENS = 16
FLOOR_TOKENS = 4
BANDWIDTH_ROWS = 65536

# ratio: (above, below)
RATIOS = {
    "ours/sglang": (OURS_PDL, SGLANG_PDL),
    "fixed/sglang": (OURS_FIXED_PDL, SGLANG_PDL),
    "ours/sglang, no PDL": (OURS_NOPDL, SGLANG_NOPDL),
    "chain/ours": (CHAIN, OURS_PDL),
}
_RATIO_HEADS = {"ours/sglang": "ours/SGL", "fixed/sglang": "fix/SGL", "chain/ours": "chain/us"}
_HEADS = {
    CHAIN: "chain",
    SGLANG_PDL: "SGL",
    SGLANG_NOPDL: "SGL -PDL",
    OURS_PDL: "ours",
    OURS_FIXED_PDL: "fixed",
    OURS_NOPDL: "our -PDL",
    FLOOR_PDL: "floor",
    FLOOR_NOPDL: "fl -PDL",
}
_MARKS = {"equal": "=", "overflow": "~", "WRONG": "!"}
LEGEND = (
    "µs a layer; -PDL: without PDL; fixed: strides compiled in. After each time: = its bytes are the reference's,\n"
    "~ they are but for values beyond e4m3's range (torch's own cast before 2.13), ! WRONG: such a time counts nowhere."
)


def failure(error: BaseException) -> dict[str, str]:
    """An exception as a record has it: no paths of this machine in it."""
    text = re.sub(r"(?:/[\w.+@-]+)+/", "", f"{type(error).__name__}: {error}")
    return {"error": text[:800]}


def ratios(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The ratios of one cell whose two times are there and whose bytes are right."""
    found = {}
    for name, (above, below) in RATIOS.items():
        times = [_time(results, contender) for contender in (above, below)]
        if None not in times:
            found[name] = round(times[0] / times[1], 4)
    return found


def summarise(cells: list[dict[str, Any]], copy_gb_per_s: float) -> dict[str, Any]:
    """Geometric means for each mode, and the other figures that goals are set for."""
    summary: dict[str, Any] = {}
    for mode in dict.fromkeys(cell["mode"] for cell in cells):
        mine = [cell for cell in cells if cell["mode"] == mode]
        means: dict[str, Any] = {}
        for name in RATIOS:
            small = [c["ratios"][name] for c in mine if name in c["ratios"] and c["tokens"] <= SMALL_TOKENS]
            every = [c["ratios"][name] for c in mine if name in c["ratios"]]
            means[name] = {
                f"T <= {SMALL_TOKENS}": _geometric_mean(small),
                "all": _geometric_mean(every),
                "worst": (min if name == "chain/ours" else max)(every, default=None),
            }
        above = [
            _time(c["results"], OURS_PDL) - c["results"][FLOOR_PDL]["us"]
            for c in mine
            if c["tokens"] <= FLOOR_TOKENS and _time(c["results"], OURS_PDL) and "us" in c["results"].get(FLOOR_PDL, {})
        ]
        share = [
            c["results"][OURS_PDL]["gb_per_s"] / copy_gb_per_s
            for c in mine
            if c["heads"] * c["tokens"] >= BANDWIDTH_ROWS and _time(c["results"], OURS_PDL)
        ]
        summary[mode] = {
            "geometric_means": means,
            f"us_over_floor_worst_T<={FLOOR_TOKENS}": round(max(above), 4) if above else None,
            f"share_of_copy_bandwidth_worst_TH>={BANDWIDTH_ROWS}": round(min(share), 4) if share else None,
        }
    return summary


def table(cells: list[dict[str, Any]], copy_gb_per_s: float) -> str:
    """Every cell as a line, cold then hot."""
    lines = [LEGEND]
    for mode in dict.fromkeys(cell["mode"] for cell in cells):
        heads = [*_HEADS.values(), *_RATIO_HEADS.values(), "GB/s", "of copy"]
        lines += ["", f"{mode}:", f"{'H':>4}{'T':>5}" + "".join(f"{head:>9}" for head in heads)]
        for cell in (cell for cell in cells if cell["mode"] == mode):
            line = f"{cell['heads']:>4}{cell['tokens']:>5}"
            line += "".join(f"{_shown(cell['results'].get(name, {})):>9}" for name in _HEADS)
            line += "".join(f"{cell['ratios'].get(name, math.nan):>9.3f}" for name in _RATIO_HEADS)
            speed = cell["results"].get(OURS_PDL, {}).get("gb_per_s", math.nan)
            lines.append(f"{line}{speed:>9.0f}{speed / copy_gb_per_s:>9.1%}")
    return "\n".join(lines)


def summary_lines(summary: dict[str, Any]) -> str:
    lines = []
    for mode, found in summary.items():
        for name, means in found["geometric_means"].items():
            shown = ", ".join(f"{k} {v:.3f}" if v is not None else f"{k} none" for k, v in means.items())
            lines.append(f"{mode:>5}  {name:<20} geometric mean: {shown}")
        rest = ", ".join(f"{key} {value}" for key, value in found.items() if key != "geometric_means")
        lines.append(f"{mode:>5}  {rest}")
    return "\n".join(lines)


def wrong_of_ours(cells: list[dict[str, Any]]) -> list[str]:
    """Cells in which a kernel of ours failed or wrote wrong bytes."""
    return [
        f"H {cell['heads']}, T {cell['tokens']}, {cell['mode']}: {name}: {result.get('error', 'wrong bytes')}"
        for cell in cells
        for name, result in cell["results"].items()
        if name in (OURS_PDL, OURS_FIXED_PDL, OURS_NOPDL) and _time(cell["results"], name) is None
    ]


def write(record: dict[str, Any], path: Path) -> None:
    """Replace the file whole, so that a run cut short leaves its last cells readable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(_json(record), "utf-8")
    partial.replace(path)


def _json(record: dict[str, Any]) -> str:
    """JSON text with a line for each cell: a whole run would else be ten thousand lines."""
    members = []
    for name, value in record.items():
        if name == "cells":
            text = "[\n  " + ",\n  ".join(json.dumps(cell, ensure_ascii=False) for cell in value) + "\n ]"
        else:
            text = json.dumps(value, indent=1, ensure_ascii=False).replace("\n", "\n ")
        members.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(members) + "\n}\n"


def _time(results: dict[str, dict[str, Any]], name: str) -> Any:
    result = results.get(name, {})
    wrong = result.get("check", {}).get("verdict") == "WRONG"
    return None if wrong else result.get("us")


def _shown(result: dict[str, Any]) -> str:
    if "us" not in result:
        return "failed "
    mark = _MARKS.get(result.get("check", {}).get("verdict"), " ")
    return f"{result['us']:.3f}{mark}"


def _geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return round(math.exp(sum(logs) / len(logs)), 4) if logs else None
