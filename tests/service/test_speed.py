"""What building costs. Goals hold on a quiet core; the bounds leave room for a busy one, figures are printed."""

import os
import statistics
import time
from pathlib import Path

from service_kit import wait_for

from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.service.builder import Builder
from mlaprep.service.compiler import Compiler
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import render
from mlaprep.templates.spec import KernelSpec

ARCH = Arch("sm_100a")


def test_spec_to_cubin() -> None:
    """Goal: 60 ms on one core."""
    with Compiler(processes=1) as compiler:
        compiler.compile(render(KernelSpec(num_heads=200)), ARCH)
        taken = []
        for heads in range(201, 216):
            began = time.perf_counter()
            compiler.compile(render(KernelSpec(num_heads=heads)), ARCH)
            taken.append((time.perf_counter() - began) * 1000)
    median = statistics.median(taken)
    print(f"spec to cubin: {median:.1f} ms in the median")
    assert median <= 180


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
        taken = []
        for index in range(200):
            began = time.perf_counter()
            assert builder.get(specs[index % len(specs)], ARCH) is not None
            taken.append((time.perf_counter() - began) * 1000)
    median = statistics.median(taken)
    print(f"disk hit: {median:.2f} ms in the median")
    assert median <= 3
