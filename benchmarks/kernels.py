"""Kernels: our own, from a directory of compiled ones or built here; and the empty one that sets the floor."""

import contextlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from workload import RANK, ROPE_DIM, fixed_strides

from mlaprep.kernels_cache.artifact import KernelArtifact, Manifest
from mlaprep.kernels_cache.elf import complete_cubin
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import render
from mlaprep.templates.spec import KernelSpec

FLOOR_ENTRY = "empty"
_FLOOR = """
extern "C" __global__ void empty(unsigned) {%s}
"""
_FLOOR_PDL = ' asm volatile("griddepcontrol.wait; griddepcontrol.launch_dependents;" ::: "memory"); '


def spec_of(heads: int, *, pdl: bool, fixed: bool) -> KernelSpec:
    """The bf16 → fp8 spec of H heads: strides dynamic, or those that do not depend on T compiled in."""
    fields = {"num_heads": heads, "kv_lora_rank": RANK, "rope_dim": ROPE_DIM, "pdl": pdl}
    return KernelSpec.from_dict(fields | (fixed_strides(heads) if fixed else {}))


def obtain(spec: KernelSpec, arch: Arch, directory: Path | None) -> KernelArtifact:
    """The kernel of a spec: from ``directory`` (a kernel cache, as ``mlaprep compile`` fills it), else compiled.

    A kernel whose code is not what today's templates make does not count. What is compiled is kept in
    ``directory`` where that can be written.

    Raises:
        MlaprepError: no such kernel, and it could not be compiled here.
    """
    found = None if directory is None else _find(spec, arch, directory)
    return found or _compile(spec, arch, directory)


def compile_floor(arch: Arch, *, pdl: bool) -> tuple[bytes, str]:
    """A cubin of the empty kernel, and which compiler made it: NVRTC where CuPy is, else nvcc.

    Raises:
        RuntimeError: neither compiler works; both reasons are given.
    """
    source = _FLOOR % (_FLOOR_PDL if pdl else "")
    try:
        return _by_nvrtc(source, arch), "nvrtc"
    except Exception as nvrtc:
        try:
            return _by_nvcc(source, arch), "nvcc"
        except Exception as nvcc:
            raise RuntimeError(f"NVRTC: {nvrtc}; nvcc: {nvcc}") from nvcc


def _find(spec: KernelSpec, arch: Arch, directory: Path) -> KernelArtifact | None:
    for path in sorted(directory.rglob("manifest.json")):
        try:
            manifest = Manifest.from_json(path.read_bytes())
            if (manifest.spec, manifest.arch) != (spec.to_dict(), str(arch)):
                continue
            cubin, source = (path.parent / name for name in ("kernel.cubin", "kernel.cu"))
            artifact = KernelArtifact(manifest, cubin.read_bytes(), source.read_text("utf-8"))
            artifact.verify(spec=spec.to_dict(), arch=str(arch))
            if _code(artifact.source) != _code(render(spec).text):
                continue
        except (OSError, ValueError):  # an ArtifactError is a ValueError
            continue
        return artifact
    return None


def _code(source: str) -> list[str]:
    """A source without its comment lines: its head names the jinja2 version, which another machine may not share."""
    return [line for line in source.splitlines() if not line.startswith("//")]


def _compile(spec: KernelSpec, arch: Arch, directory: Path | None) -> KernelArtifact:
    from mlaprep.clients.client import KernelClient
    from mlaprep.kernels_cache.disk import DiskStore
    from mlaprep.kernels_cache.errors import CacheError
    from mlaprep.kernels_cache.store import KernelStore, MemoryStore

    store: KernelStore = MemoryStore()
    if directory is not None:
        with contextlib.suppress(CacheError, OSError):  # not ours to write: then kept in memory
            store = DiskStore(directory)
    with KernelClient(store=store, offline=True, on_miss="compile") as client:
        return client.artifact(spec, arch)


def _by_nvrtc(source: str, arch: Arch) -> bytes:
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source, "floor.cu", [], [])
    try:
        nvrtc.compileProgram(program, [f"-arch={arch}"])
        return complete_cubin(bytes(nvrtc.getCUBIN(program)))
    finally:
        nvrtc.destroyProgram(program)


def _by_nvcc(source: str, arch: Arch) -> bytes:
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    with tempfile.TemporaryDirectory() as folder:
        text, cubin = Path(folder, "floor.cu"), Path(folder, "floor.cubin")
        text.write_text(source)
        command = [nvcc, "-cubin", f"-arch={arch}", "-o", str(cubin), str(text)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-400:])
        return cubin.read_bytes()
