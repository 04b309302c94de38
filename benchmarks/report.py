"""Report: the record that a run writes, and the tables that it prints of it."""

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from columns import (
    CHAIN,
    FLOOR_PDL,
    OURS,
    OURS_GENERAL_PDL,
    OURS_NOPDL,
    OURS_PDL,
    PEERS,
    PLAIN,
    ROPE,
    SGLANG_NOPDL,
    SGLANG_PDL,
    SHORT,
)

SMALL_TOKENS = 16
FLOOR_TOKENS = 4
BANDWIDTH_ROWS = 65536

# ratio: (above, below); BEST is the fastest peer of the cell
BEST = "best peer"
RATIOS = {
    "ours/sglang": (OURS_PDL, SGLANG_PDL),
    "general/sglang": (OURS_GENERAL_PDL, SGLANG_PDL),
    "ours/sglang, no PDL": (OURS_NOPDL, SGLANG_NOPDL),
    "ours/best": (OURS_PDL, BEST),
    "general/best": (OURS_GENERAL_PDL, BEST),
    "chain/ours": (CHAIN, OURS_PDL),
}
_RATIO_HEADS = {
    "ours/sglang": "ours/SGL",
    "ours/best": "ours/best",
    "general/best": "gen/best",
    "chain/ours": "chain/us",
}
_ROPE_RATIO_HEADS = {"ours/best": "ours/best", "general/best": "gen/best"}
_MARKS = {"equal": "=", "near": "≈", "overflow": "~", "WRONG": "!"}
LEGEND = (
    "µs a layer; -PDL: without PDL; general: strides at launch; vLLM*: its structure, re-created; grid: an empty\n"
    "kernel in as many blocks as ours. After each time: = its bytes are the reference's, ~ they are but for values\n"
    "beyond e4m3's range (torch's own cast before 2.13), ≈ they are but for rotated values one step of e4m3 apart,\n"
    "! WRONG: such a time counts nowhere."
)


def failure(error: BaseException) -> dict[str, str]:
    """An exception as a record has it: no paths of this machine in it."""
    text = re.sub(r"(?:/[\w.+@-]+)+/", "", f"{type(error).__name__}: {error}")
    return {"error": text[:800]}


def counted(results: dict[str, dict[str, Any]], name: str) -> float | None:
    """A contender's time where its bytes are right; ours must be the reference's to the last."""
    result = results.get(name, {})
    verdict = result.get("check", {}).get("verdict")
    wrong = verdict == "WRONG" or (name in OURS and verdict not in (None, "equal"))
    return None if wrong else result.get("us")


def best_peer(results: dict[str, dict[str, Any]]) -> str | None:
    """The fastest of the peers whose bytes are right."""
    times = {name: time for name in PEERS if (time := counted(results, name)) is not None}
    return min(times, key=lambda name: times[name]) if times else None


def ratios(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The ratios of one cell whose two times are there and whose bytes are right."""
    best = best_peer(results)
    found = {}
    for name, pair in RATIOS.items():
        above, below = (counted(results, best or "" if one == BEST else one) for one in pair)
        if above is not None and below is not None:
            found[name] = round(above / below, 4)
    return found


def over_floor(cell: dict[str, Any], name: str = OURS_PDL) -> float | None:
    """Microseconds beyond the empty kernel's, in the same chain."""
    time, floor = counted(cell["results"], name), cell["results"].get(FLOOR_PDL, {}).get("us")
    return None if time is None or floor is None else round(time - floor, 4)


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return round(math.exp(sum(logs) / len(logs)), 4) if logs else None


def summarise(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means of every ratio, for each table and mode."""
    summary: dict[str, Any] = {}
    for rope in (False, True):
        for mode in ("cold", "hot"):
            mine = [cell for cell in cells if (cell["rope"], cell["mode"]) == (rope, mode)]
            means = {name: _means(name, mine) for name in RATIOS if any(name in cell["ratios"] for cell in mine)}
            if means:
                summary[f"{'rope, ' if rope else ''}{mode}"] = means
    return summary


def _means(name: str, cells: list[dict[str, Any]]) -> dict[str, float | None]:
    every = [cell["ratios"][name] for cell in cells if name in cell["ratios"]]
    small = [c["ratios"][name] for c in cells if name in c["ratios"] and c["tokens"] <= SMALL_TOKENS]
    worst = (min if name == "chain/ours" else max)(every, default=None)
    return {f"T <= {SMALL_TOKENS}": geometric_mean(small), "all": geometric_mean(every), "worst": worst}


def table(cells: list[dict[str, Any]], copy_gb_per_s: float) -> str:
    """Every cell as a line: cold, then hot, then the same with rope."""
    lines = [LEGEND]
    for rope in (False, True):
        columns, heads = (ROPE, _ROPE_RATIO_HEADS) if rope else (PLAIN, _RATIO_HEADS)
        for mode in ("cold", "hot"):
            mine = [cell for cell in cells if (cell["rope"], cell["mode"]) == (rope, mode)]
            if not mine:
                continue
            names = [*(SHORT[name] for name in columns), "best", *heads.values(), "GB/s", "of copy"]
            lines += ["", f"{mode}{', interleaved rope' if rope else ''}:"]
            lines.append(f"{'H':>4}{'T':>5}" + "".join(f"{name:>10}" for name in names))
            for cell in mine:
                results = cell["results"]
                line = f"{cell['heads']:>4}{cell['tokens']:>5}"
                line += "".join(f"{shown(results.get(name, {})):>10}" for name in columns)
                line += f"{SHORT.get(best_peer(results) or '', '-'):>10}"
                line += "".join(f"{cell['ratios'].get(name, math.nan):>10.3f}" for name in heads)
                speed = results.get(OURS_PDL, {}).get("gb_per_s", math.nan)
                lines.append(f"{line}{speed:>10.0f}{speed / copy_gb_per_s:>10.1%}")
    return "\n".join(lines)


def eager_table(cells: list[dict[str, Any]]) -> str:
    """The cells without graphs."""
    columns = [name for name in SHORT if any(name in cell["results"] for cell in cells)]
    lines = ["eager, µs a call, host and device, result given:"]
    lines.append(f"{'H':>4}{'T':>5}  rope" + "".join(f"{SHORT[name]:>10}" for name in columns))
    for cell in cells:
        line = f"{cell['heads']:>4}{cell['tokens']:>5}  {'yes' if cell['rope'] else 'no':<4}"
        times = (shown(cell["results"][name]) if name in cell["results"] else "" for name in columns)
        lines.append(line + "".join(f"{time:>10}" for time in times))
    return "\n".join(lines)


def summary_lines(summary: dict[str, Any]) -> str:
    lines = []
    for where, found in summary.items():
        for name, means in found.items():
            values = ", ".join(f"{k} {v:.3f}" if v is not None else f"{k} none" for k, v in means.items())
            lines.append(f"{where:>11}  {name:<20} geometric mean: {values}")
    return "\n".join(lines)


def wrong_of_ours(cells: list[dict[str, Any]]) -> list[str]:
    """Cells in which a kernel of ours failed or wrote wrong bytes."""
    return [
        f"H {cell['heads']}, T {cell['tokens']}, {'rope, ' if cell['rope'] else ''}{cell['mode']}: "
        f"{name}: {result.get('error', 'wrong bytes')}"
        for cell in cells
        for name, result in cell["results"].items()
        if name in OURS and counted(cell["results"], name) is None
    ]


def failures(cells: list[dict[str, Any]]) -> list[str]:
    """Each reason why a time is missing, once."""
    found = {f"the cell: {cell['error']}" for cell in cells if "error" in cell}
    for cell in cells:
        found |= {f"{name}: {result['error']}" for name, result in cell["results"].items() if "error" in result}
    return sorted(found)


def shown(result: dict[str, Any]) -> str:
    """A time and the mark of its bytes."""
    if "us" not in result:
        return "failed "
    mark = _MARKS.get(result.get("check", {}).get("verdict"), " ")
    return f"{result['us']:.3f}{mark}"


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
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n  " + ",\n  ".join(json.dumps(item, ensure_ascii=False) for item in value) + "\n ]"
        else:
            text = json.dumps(value, indent=1, ensure_ascii=False).replace("\n", "\n ")
        members.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(members) + "\n}\n"
