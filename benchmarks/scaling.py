"""Tables of ``docs/scaling.md`` and ``docs/operations.md``: what one process does, and what a fleet then takes."""

from collections.abc import Iterator
from typing import Any

WORKERS, KERNELS = 10_000, 40
"""The fleet that the page plans for."""
_ENTRY_BYTES = 32_000
_ARCHS = 4


def run_facts(record: dict[str, Any]) -> Iterator[str]:
    machine, versions = record["machine"], record["versions"]
    yield f"`{record['file']}`, {record['date']}, {record['wall_s']} s."
    yield ""
    yield "| | |\n|---|---|"
    yield f"| processor | {machine['cpu']}, {machine['cores']} cores for servers, compilers and clients together |"
    yield f"| Python, uvicorn | {versions['python']}, {versions['uvicorn']} |"
    yield f"| httptools, uvloop | {versions.get('httptools', 'absent')}, {versions.get('uvloop', 'absent')} |"
    yield f"| NVRTC, nginx, wrk | {versions['nvrtc']}, {versions['nginx']}, {versions['wrk']} |"


def goals(record: dict[str, Any]) -> Iterator[str]:
    yield "| goal | limit | found | |\n|---|---|---|---|"
    for goal in record["goals"]:
        limit = f"{'≥' if goal['at_least'] else '≤'} {goal['limit']:g}"
        found = "" if goal["found"] is None else f"{goal['found']:g}"
        yield f"| {goal['goal']} | {limit} | {found} | {_VERDICTS[goal['pass']]} |"


def artifacts(record: dict[str, Any]) -> Iterator[str]:
    """Requests a second and times, contender by contender."""
    found = record["figures"]["artifacts"]
    told = f"{found['bytes']} bytes, {found['connections']} connections, {found['rounds']} rounds"
    yield f"{told}: median (least to most)."
    yield ""
    yield "| | requests a second | p50 ms | p99 ms |\n|---|---|---|---|"
    for name, measures in found["servers"].items():
        cells = (f"{m['median']:g} ({m['least']:g} to {m['most']:g})" for m in measures.values())
        yield f"| {_NAMES.get(name, name)} | " + " | ".join(cells) + " |"
    yield ""
    parsers = record["figures"]["parsers"]["ratios"]["with/without"]["rps"]
    yield f"With httptools and uvloop the service answers {parsers:g} times the requests a second that it does without."


def capacity(record: dict[str, Any]) -> Iterator[str]:
    """What a fleet takes, from the figures of this run."""
    figures = record["figures"]
    rps = figures["artifacts"]["servers"]["service"]["rps"]["median"]
    nginx = figures["artifacts"]["servers"]["nginx"]["rps"]["median"]
    size = figures["artifacts"]["bytes"]
    compiles = figures["warmup"]["kernels_a_second"]["service"]["median"]
    built = figures["herd"]["built"]["answers_a_second"]
    fetches = WORKERS * KERNELS
    rows = (
        (f"building {KERNELS} variants for {_ARCHS} architectures", f"{KERNELS * _ARCHS} ÷ {compiles:.0f} a second",
         _time(KERNELS * _ARCHS / compiles)),
        ("disk for that, source and manifest included", f"{KERNELS * _ARCHS} × {_ENTRY_BYTES // 1000} KB",
         f"{KERNELS * _ARCHS * _ENTRY_BYTES / 1e6:.1f} MB"),
        (f"{WORKERS:,} workers, {KERNELS} cubins each", f"{fetches:,} × {size / 1000:.1f} KB",
         f"{fetches * size / 1e9:.1f} GB"),
        ("the same by digest from one process", f"{fetches:,} ÷ {rps:.0f} a second", _time(fetches / rps)),
        ("the same from one nginx in front", f"{fetches:,} ÷ {nginx:.0f} a second", _time(fetches / nginx)),
        ("the same in one whole reply a kernel (`PUT …?inline=true`), new connections",
         f"{fetches:,} ÷ {built:.0f} a second", _time(fetches / built)),
        ("the same with 8 workers a node on one disk cache", f"{fetches // 8:,} ÷ {built:.0f} a second",
         _time(fetches / 8 / built)),
    )  # fmt: skip
    yield "| question | sum | answer |\n|---|---|---|"
    yield from (f"| {question} | {total} | {answer} |" for question, total, answer in rows)


def herd(record: dict[str, Any]) -> Iterator[str]:
    found = record["figures"]["herd"]
    yield f"{found['workers']:,} connections at once for {found['kernels']} kernels, one whole kernel each."
    yield ""
    yield "| cache | compiles | errors | p50 s | p99 s | all answered after s |\n|---|---|---|---|---|---|"
    for name in ("cold", "built"):
        part = found[name]
        cells = (part[key] for key in ("compiles", "errors", "p50_s", "p99_s", "wall_s"))
        yield f"| {'empty' if name == 'cold' else 'built'} | " + " | ".join(f"{cell:g}" for cell in cells) + " |"


def soak(record: dict[str, Any]) -> Iterator[str]:
    """What a process takes while traffic of every kind goes on."""
    found, machine = record["figures"], record["machine"]
    answers = sum(found["answers"].values())
    yield f"`{record['file']}`, {record['date']}, {machine['cpu']}, {machine['cores']} cores."
    yield ""
    yield (
        f"{answers:,} answers in {found['seconds']} s, {len(record['problems'])} of them wrong; after the first third "
        f"memory grew by {found['mb_an_hour']:.1f} MB an hour."
    )
    yield ""
    yield "| | at the start | after a third | in the middle | at the end | highest |\n|---|---|---|---|---|---|"
    for name, told in _SOAKED.items():
        cells = (found[name][moment] for moment in ("start", "third", "middle", "end", "highest"))
        yield f"| {told} | " + " | ".join(f"{cell:g}" for cell in cells) + " |"


_SOAKED = {
    "rss_mb": "resident memory of the service, MB",
    "children_rss_mb": "of its compile processes, MB",
    "descriptors": "open files and sockets",
    "threads": "threads",
}
_VERDICTS = {True: "met", False: "**missed**", None: "not measured"}
_NAMES = {"service": "the service", "bare": "a bare ASGI application, same uvicorn", "nginx": "nginx, the same file"}

PARTS = {
    "service-run": ("service", run_facts),
    "service-goals": ("service", goals),
    "service-artifacts": ("service", artifacts),
    "service-herd": ("service", herd),
    "service-capacity": ("service", capacity),
    "soak": ("soak", soak),
}


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
