"""The table of ``docs/client.md``: what a worker waits for before it serves."""

from collections.abc import Iterator
from typing import Any


def figures(record: dict[str, Any]) -> Iterator[str]:
    """Medians of fresh processes, with their spread, beside the goals."""
    found, goals, machine = record["figures"], record["goals"], record["machine"]
    ranks = found["ranks_with_service"]
    yield f"`{record['file']}`: {machine['gpu']}, driver {machine['driver']}, {record['runs']} fresh processes."
    yield ""
    yield "| | found: median (least to most) | goal |\n|---|---|---|"
    for name, told, unit in (
        ("import_ms", "`import mlaprep.clients`", "ms"),
        ("client_ms", "`KernelClient(...)`, its tables read", "ms"),
        ("cold_ms", "a kernel from a warm service, nothing on disk: fetched, proved, kept, loaded", "ms"),
        ("disk_ms", "a kernel from disk, the first of a process", "ms"),
        ("disk_next_ms", "the next one", "ms"),
        ("look_up_us", "a kernel that is loaded", "µs"),
    ):
        each = found[name]
        goal = f"≤ {goals[name]:g} {unit}" if name in goals else ""
        yield f"| {told} | {each['median']:.2f} {unit} ({each['least']:.2f} to {each['most']:.2f}) | {goal} |"
    times = f"{ranks['slowest_ms']['median']:.1f} ms, one alone {ranks['one_ms']['median']:.1f}"
    yield f"| {ranks['ranks']} ranks that start together over a cold cache, the slowest, one fetch | {times} | |"
    yield f"| the same, beside one alone | {ranks['over_one']:.2f} | ≤ {goals['ranks_over_one']:g} |"
    if ratio := (found.get("eager") or {}).get("ours/sglang"):
        yield f"| an eager call beside SGLang's, the same work | {ratio:.3f} | ≤ {goals['ours/sglang']:g} |"
