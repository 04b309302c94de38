"""Artifacts to put into stores: tiny but whole ELF files that pass for cubins, and manifests to match."""

import hashlib
import struct
from typing import Any

from mlaprep.kernels_cache.artifact import KernelArtifact, Manifest
from mlaprep.kernels_cache.key import cache_key

NVRTC = "12.9.86"
CREATED = "2026-01-31T12:00:00Z"


def synthetic_cubin(arch: str = "sm_90a", text: bytes = b"code", machine: int = 190) -> bytes:
    """A minimal ELF file: header, one section of ``text``, section table, program table at the very end.

    The target is encoded as NVRTC 12.9 does: one way up to sm_90, another from sm_100 on.
    """
    number, accelerated = int(arch[3:].rstrip("af")), arch.endswith("a")
    if number < 100:
        abi, flags = 7, number << 16 | 0x500 | number | (0x800 if accelerated else 0)
    else:
        abi, flags = 8, 0x6000002 | number << 8 | (0x8 if accelerated else 0)
    sections = 64 + len(text)
    programs = sections + 2 * 64
    header = struct.pack("<4sBBBBB7xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 0x41, abi, 2, machine, 1, 0, programs,
                         sections, flags, 64, 56, 1, 64, 2, 0)  # fmt: skip
    nothing = bytes(64)
    section = struct.pack("<IIQQQQIIQQ", 0, 1, 6, 0, 64, len(text), 0, 0, 1, 0)
    program = struct.pack("<IIQQQQQQ", 1, 5, 64, 0, 0, len(text), len(text), 8)
    return header + text + nothing + section + program


def make_artifact(
    source: str = "extern void mla_prepare();\n",
    arch: str = "sm_90a",
    *,
    cubin: bytes | None = None,
    nvrtc_version: str = NVRTC,
    **changes: Any,
) -> KernelArtifact:
    """A whole artifact; ``changes`` replace members of the manifest."""
    options = (f"-arch={arch}", "-std=c++17")
    cubin = synthetic_cubin(arch, source.encode()) if cubin is None else cubin
    members: dict[str, Any] = {
        "variant_id": "mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl",
        "spec": {"num_heads": 12, "pdl": True, "layout": "fp8", "tile_scale": None},
        "arch": arch,
        "key": cache_key(source=source, options=options, arch=arch, nvrtc_version=nvrtc_version),
        "cubin_sha256": hashlib.sha256(cubin).hexdigest(),
        "cubin_size": len(cubin),
        "source_sha256": hashlib.sha256(source.encode()).hexdigest(),
        "entry": "mla_prepare",
        "launch": {"threads_per_row": 72, "parameters": [["q_out", "pointer"], ["tokens", "u32"]]},
        "registers": 32,
        "spill_stores": 0,
        "spill_loads": 0,
        "stack_bytes": 0,
        "shared_bytes": 0,
        "nvrtc_version": nvrtc_version,
        "options": options,
        "compile_ms": 48.5,
        "created_at": CREATED,
    }
    return KernelArtifact(Manifest(**members | changes), cubin, source)


def numbered(number: int, **changes: Any) -> KernelArtifact:
    """An artifact unlike that of any other number, all of one size."""
    return make_artifact(f"// kernel {number:06d}\n", **changes)
