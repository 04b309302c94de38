"""What building costs. Goals hold on a quiet core; the bounds leave room for a busy one, figures are printed."""

import os
import statistics
import time
from pathlib import Path

from service_kit import cpu_seconds, wait_for

from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.service.builder import Builder
from mlaprep.service.compiler import Compiler
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import render
from mlaprep.templates.spec import KernelSpec

ARCH = Arch("sm_100a")


def test_spec_to_cubin() -> None:
    """Goal: 60 ms of one core. Time on the core is what counts, however many others want it."""
    with Compiler(processes=1) as compiler:
        compiler.compile(render(KernelSpec(num_heads=200)), ARCH)
        (pid,) = compiler.state().pids
        specs = [KernelSpec(num_heads=heads) for heads in range(201, 217)]
        began, before = time.perf_counter(), cpu_seconds(pid) + time.process_time()
        for spec in specs:
            compiler.compile(render(spec), ARCH)
        cpu = (cpu_seconds(pid) + time.process_time() - before) / len(specs) * 1000
        wall = (time.perf_counter() - began) / len(specs) * 1000
    print(f"spec to cubin: {cpu:.1f} ms of processor, {wall:.1f} ms by the clock, a variant")
    assert cpu <= 120


def test_two_processes_against_one() -> None:
    """Goal: 1.5 times as fast on two cores."""
    if len(os.sched_getaffinity(0)) < 2:
        return
    sources = [render(KernelSpec(num_heads=heads)) for heads in range(1, 17)]

    def seconds(processes: int) -> float:
        with Compiler(processes=processes) as compiler:
            compiler.start()
            wait_for(lambda: len(compiler.state().pids) == processes)
            for future in [compiler.submit(sources[0], ARCH) for _ in range(4 * processes)]:
                future.result()
            began = time.perf_counter()
            for future in [compiler.submit(source, ARCH) for source in sources]:
                future.result()
            return time.perf_counter() - began

    ratios = []
    for _ in range(4):
        ratios.append(seconds(1) / seconds(2))
        if ratios[-1] >= 1.5:
            break
    print("two processes against one:", ", ".join(f"{ratio:.2f}" for ratio in ratios))
    assert max(ratios) >= 1.2


def test_a_disk_hit(tmp_path: Path, compiler: Compiler) -> None:
    """Goal: 1 ms, verification included."""
    with Builder(DiskStore(tmp_path / "cache"), compiler) as builder:
        specs = [KernelSpec(num_heads=heads) for heads in range(1, 9)]
        for spec in specs:
            builder.get_or_compile(spec, ARCH)
        taken, began = [], time.thread_time()
        for index in range(200):
            start = time.perf_counter()
            assert builder.get(specs[index % len(specs)], ARCH) is not None
            taken.append((time.perf_counter() - start) * 1000)
        cpu = (time.thread_time() - began) / len(taken) * 1000
    median = statistics.median(taken)
    print(f"disk hit: {median:.2f} ms in the median, {cpu:.2f} ms of processor")
    assert median <= 3 or cpu <= 1
