"""KernelArtifacts whose cubin is a well-formed ELF file that carries the rendered source instead of SASS."""

import hashlib
import struct

from mlaprep.kernels_cache.artifact import KernelArtifact, Manifest
from mlaprep.kernels_cache.key import cache_key
from mlaprep.templates.render import KernelSource, render
from mlaprep.templates.spec import KernelSpec

ARCH = "sm_90a"
_FLAGS = 0x5A0D5A
_HEADER = struct.Struct("<4sBBBBB7xHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")


def emulated_artifact(spec: KernelSpec, source: KernelSource | None = None) -> KernelArtifact:
    """What the service would hand out for a spec, runnable by :class:`EmulatedDriver`; it verifies in full.

    ``source`` stands for the rendered one.
    """
    source = source or render(spec)
    cubin = _carry(f"{spec.dtype}\n{source.text}".encode())
    key = cache_key(source=source.text, options=(), arch=ARCH, nvrtc_version="0.emulated")
    manifest = Manifest(
        variant_id=spec.variant_id,
        spec=spec.to_dict(),
        arch=ARCH,
        key=key,
        cubin_sha256=hashlib.sha256(cubin).hexdigest(),
        cubin_size=len(cubin),
        source_sha256=source.sha256,
        entry=source.entry,
        launch=source.launch,
        registers=0,
        spill_stores=0,
        spill_loads=0,
        stack_bytes=0,
        shared_bytes=0,
        nvrtc_version="0.emulated",
        options=(),
        compile_ms=0.0,
        created_at="2026-01-01T00:00:00Z",
    )
    return KernelArtifact(manifest, cubin, source.text)


def carried_source(cubin: bytes) -> tuple[str, str]:
    """Input dtype and source text that :func:`emulated_artifact` put into a cubin."""
    dtype, _, source = cubin[_HEADER.size : -(_SECTION.size + _PROGRAM.size)].decode().partition("\n")
    return dtype, source


def _carry(payload: bytes) -> bytes:
    sections = _HEADER.size + len(payload)
    programs = sections + _SECTION.size
    sizes = (_HEADER.size, _PROGRAM.size, 1, _SECTION.size, 1, 0)
    header = _HEADER.pack(b"\x7fELF", 2, 1, 1, 0x33, 7, 2, 190, 0x81, 0, programs, sections, _FLAGS, *sizes)
    section = _SECTION.pack(0, 1, 0, 0, _HEADER.size, len(payload), 0, 0, 1, 0)
    program = _PROGRAM.pack(1, 4, _HEADER.size, 0, 0, len(payload), len(payload), 1)
    return header + payload + section + program
