"""What the tests of the kernel cache share: stores in fresh directories, and real cubins without a GPU."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from mlaprep.kernels_cache.disk import DiskStore

TINY_SOURCE = 'extern "C" __global__ void mla_prepare(float* row, int n) { row[threadIdx.x] += n; }'


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path / "cache")


@pytest.fixture(scope="session")
def compile_raw() -> Callable[[str], bytes]:
    """Compiles a tiny kernel for an architecture and gives the bytes exactly as CuPy hands them out."""
    from cupy.cuda import nvrtc

    @cache
    def compile_for(arch: str) -> bytes:
        program = nvrtc.createProgram(TINY_SOURCE, "tiny.cu", [], [])
        try:
            nvrtc.compileProgram(program, [f"-arch={arch}"])
            cubin: bytes = nvrtc.getCUBIN(program)
            return cubin
        finally:
            nvrtc.destroyProgram(program)

    return compile_for
