"""Kernels: our own, from a directory of compiled ones or built here, and small sources compiled for the occasion."""

import contextlib
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers import nvcc
from workload import RANK, ROPE_DIM, Layer, fixed_strides

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


def spec_of(heads: int, *, pdl: bool, fixed: bool, rope: bool = False, elements: int | None = None) -> KernelSpec:
    """The bf16 → fp8 spec of H heads: strides dynamic, or those that do not depend on T compiled in."""
    fields: dict[str, Any] = {"num_heads": heads, "kv_lora_rank": RANK, "rope_dim": ROPE_DIM, "pdl": pdl}
    fields |= {"rope": "interleaved"} if rope else {}
    fields |= {"elements_per_thread": elements} if elements else {}
    return KernelSpec.from_dict(fields | (fixed_strides(heads) if fixed else {}))


def argument_values(layer: Layer) -> dict[str, int]:
    """Every argument that a kernel of :func:`spec_of` can have, by its name."""
    tensors = {name: getattr(layer, name) for name in ("q_nope", "q_rope", "k_nope", "k_rope", "loc")}
    tensors |= {"q_out": layer.out, "kv_cache": layer.cache} | layer.rotation
    values = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    values |= {"tokens": len(layer.loc), "cache_rows": len(layer.cache), "cache_row_stride": layer.cache.stride(0)}
    values["cos_sin_rows"] = 0 if layer.cos_sin is None else len(layer.cos_sin)
    for name in ("q_nope", "q_rope", "out"):
        token, head, _ = getattr(layer, name).stride()
        values |= {f"{name}_token_stride": token, f"{name}_head_stride": head}
    for name in ("k_nope", "k_rope"):
        values[f"{name}_token_stride"] = getattr(layer, name).stride(0)
    return values


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
    """A cubin of the empty kernel, and which compiler made it.

    Raises:
        RuntimeError: neither compiler works; both reasons are given.
    """
    return compile_cubin(_FLOOR % (_FLOOR_PDL if pdl else ""), arch)


def compile_cubin(source: str, arch: Arch, defines: Sequence[str] = ()) -> tuple[bytes, str]:
    """A cubin of a source, and which compiler made it: NVRTC where CuPy is, else nvcc.

    Raises:
        RuntimeError: neither compiler works; both reasons are given.
    """
    options = [f"-D{define}" for define in defines]
    try:
        return _by_nvrtc(source, arch, options), "nvrtc"
    except Exception as nvrtc:
        try:
            return _by_nvcc(source, arch, options), "nvcc"
        except Exception as error:
            raise RuntimeError(f"NVRTC: {nvrtc}; nvcc: {error}") from error


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


def _by_nvrtc(source: str, arch: Arch, options: list[str]) -> bytes:
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source, "source.cu", [], [])
    try:
        nvrtc.compileProgram(program, [f"-arch={arch}", *options])
        return complete_cubin(bytes(nvrtc.getCUBIN(program)))
    finally:
        nvrtc.destroyProgram(program)


def _by_nvcc(source: str, arch: Arch, options: list[str]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        text, cubin = Path(folder, "source.cu"), Path(folder, "source.cubin")
        text.write_text(source)
        command = [nvcc(), "-cubin", f"-arch={arch}", *options, "-o", str(cubin), str(text)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip()[-400:])
        return cubin.read_bytes()
