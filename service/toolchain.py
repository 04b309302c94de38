"""Toolchain: which NVRTC compiles, what it is told, and what of it is installed."""

import functools
import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from mlaprep.templates.arch import ARCHS, Arch

_FAMILY_TARGETS_SINCE: Final = (12, 9)
_NVRTC_WHEELS: Final = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc")
_CUPY_PREFIX: Final = "cupy-"


@dataclass(frozen=True, slots=True)
class Toolchain:
    """A compiler at work: exact version, compute capabilities times ten, the library's path."""

    version: str
    capabilities: tuple[int, ...]
    library: str


def compile_options(arch: Arch) -> tuple[str, ...]:
    """Every option the compiler is given, in order; all of them enter the key.

    ``-lineinfo`` is not among them: with it the program's name ends in the cubin.
    """
    return (f"-arch={arch}", "-std=c++17", "--ptxas-options=-v")


def buildable_archs(toolchain: Toolchain) -> tuple[Arch, ...]:
    """The allow-list met with what a compiler knows.

    Neither alone will do: NVRTC also builds architectures that lack the e4m3 conversion, and an older one
    does not know every target of the list.
    """
    release = tuple(int(part) for part in toolchain.version.split(".")[:2])
    return tuple(
        arch
        for arch in ARCHS
        if arch.capability[0] * 10 + arch.capability[1] in toolchain.capabilities
        and (not arch.name.endswith("f") or release >= _FAMILY_TARGETS_SINCE)
    )


@functools.cache
def installed_nvrtc_version() -> str | None:
    """Version of the NVRTC wheel, without loading it; None where there is none, or more than one.

    It names the build (``12.9.86``), as a compile process does once it runs, and that one has the last word.
    """
    found = {version for wheel in _NVRTC_WHEELS if (version := _version_of(wheel)) is not None}
    return found.pop() if len(found) == 1 else None


def conflicts(names: Iterable[str] | None = None) -> tuple[str, ...]:
    """Warnings on installed packages that break each other, in words; empty where all is well.

    Args:
        names: distribution names to judge; by default those installed.
    """
    if names is None:
        names = (str(dist.metadata["Name"]) for dist in importlib.metadata.distributions())
    installed = {name.lower().replace("_", "-") for name in names}
    cupy = sorted(name for name in installed if name == "cupy" or name.startswith(_CUPY_PREFIX))
    if len(cupy) < 2:
        return ()
    return (
        f"{' and '.join(cupy)} are installed together and overwrite each other's files; "
        "uninstall all of them, then install the one that fits your CUDA version",
    )


def _version_of(wheel: str) -> str | None:
    try:
        return importlib.metadata.version(wheel)
    except importlib.metadata.PackageNotFoundError:
        return None
