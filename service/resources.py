"""ResourceUsage: what a kernel takes of a multiprocessor, as the compiler's log tells it."""

import re
from dataclasses import dataclass
from typing import Final

_FRAME: Final = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS: Final = re.compile(r"Used (\d+) registers")
_SHARED: Final = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """Per thread (registers, spills, stack) and per block (static shared memory); sizes in bytes."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack_bytes: int
    shared_bytes: int


def parse_resources(log: str, entry: str) -> ResourceUsage:
    """The usage of one kernel from a log written with ``--ptxas-options=-v``.

    Functions that were not inlined have a frame line of their own; only the entry's counts.

    Raises:
        ValueError: the log says nothing about this entry.
    """
    compiling = re.search(rf"Compiling entry function '{re.escape(entry)}'", log)
    section = log[compiling.end() :] if compiling else ""
    section = section.partition("Compiling entry function")[0]
    properties = section.partition(f"Function properties for {entry}\n")[2]
    frame = _FRAME.search(properties)
    used = _REGISTERS.search(section)
    if frame is None or used is None:
        raise ValueError("the compiler's log holds no resource figures for the kernel")
    line = section[used.start() :].partition("\n")[0]
    shared = _SHARED.search(line)
    stack, stores, loads = map(int, frame.groups())
    return ResourceUsage(
        registers=int(used[1]),
        spill_stores=stores,
        spill_loads=loads,
        stack_bytes=stack,
        shared_bytes=int(shared[1]) if shared else 0,
    )
