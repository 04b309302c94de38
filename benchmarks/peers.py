"""Peers: what their kernels have in common: where they lie, what they are built against, how they are built.

Nothing of a peer is part of this repository. ``fetch_peers.py`` puts what is needed into ``.peers/``, which git
ignores; an installed package serves as well. Whatever fails is an exception with a reason that ends up in the
result beside the peer's name.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PEERS = Path(__file__).resolve().parent.parent / ".peers"


class PeerMissing(RuntimeError):
    """A peer that is not there, or does not build or load here; the text says why."""


class Once:
    """Results by key, made at first use. A failure's reason is kept too, so that nothing is built twice in vain."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` returned.

        Raises:
            PeerMissing: ``make`` raised, now or before.
        """
        if key not in self._made:
            try:
                self._made[key] = make()
            except Exception as error:
                self._made[key] = PeerMissing(f"{type(error).__name__}: {error}"[:800])
        if isinstance(self._made[key], PeerMissing):
            raise self._made[key]
        return self._made[key]


@dataclass(frozen=True)
class TvmFfi:
    """The runtime that SGLang's and FlashInfer's kernels are built against, as unpacked on disk."""

    site: Path
    version: str

    @property
    def includes(self) -> list[Path]:
        root = self.site / "tvm_ffi"
        return [path for path in (root / "include", root / "3rdparty/dlpack/include") if path.is_dir()]

    @property
    def libraries(self) -> Path:
        return self.site / "tvm_ffi/lib"


def find_tvm_ffi(tag: str | None = None) -> TvmFfi:
    """tvm-ffi for an interpreter tag such as ``cp312``: the fetched one, else the installed one.

    Raises:
        PeerMissing: there is none.
    """
    tag = tag or interpreter_tag()
    for path in sorted(PEERS.glob(f"site-{tag}/apache_tvm_ffi-*.dist-info")):
        return TvmFfi(path.parent, path.name.removeprefix("apache_tvm_ffi-").removesuffix(".dist-info"))
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        distribution = importlib.metadata.distribution("apache-tvm-ffi")
        return TvmFfi(Path(str(distribution.locate_file(""))), distribution.version)
    raise PeerMissing(f"no tvm-ffi for {tag}; run benchmarks/fetch_peers.py, or install apache-tvm-ffi")


def import_tvm_ffi() -> Any:
    """The module ``tvm_ffi`` of this interpreter.

    Raises:
        PeerMissing: there is none.
    """
    # torch first: it brings the CUDA runtime that the libraries were linked against.
    import torch  # noqa: F401

    found = find_tvm_ffi()
    if str(found.site) not in sys.path:
        sys.path.append(str(found.site))
    import tvm_ffi

    return tvm_ffi


def interpreter_tag() -> str:
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def digest_of(root: Path, files: Iterable[Path]) -> str:
    """sha256 over files: their paths below ``root``, sizes and contents."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def target_of(capability: tuple[int, int]) -> str:
    """``90a`` and the like: the target that both packages' own loaders choose."""
    major, minor = capability
    return f"{major}{minor}{'f' if capability == (12, 0) else 'a' if major >= 9 else ''}"


def build_library(
    name: str,
    sources: dict[str, str],
    flags: Sequence[str],
    includes: Sequence[str],
    tvm_ffi: TvmFfi,
    digest: str,
) -> Path:
    """A shared library built with nvcc against tvm-ffi, or the one built before.

    It holds C++ only, so one built under another Python serves.

    Args:
        sources: file name to text.
        includes: include flags; paths of this machine, which do not enter the library's name.
        digest: of whatever the sources include.

    Raises:
        PeerMissing: nvcc is not there or refuses; the text holds the end of what it said.
    """
    flags = ["-shared", "-cudart", "shared", "-Xcompiler", "-fPIC", *flags]
    inputs = "\0".join([*sources, *sources.values(), *flags, digest, tvm_ffi.version])
    library = PEERS / "build" / f"{name}-{hashlib.sha256(inputs.encode()).hexdigest()[:16]}.so"
    if library.is_file():
        return library

    folder = library.with_suffix(f".{os.getpid()}.part")
    folder.mkdir(parents=True)
    try:
        for file, text in sources.items():
            (folder / file).write_text(text)
        command = [nvcc(), *flags, *includes, *(f"-I{path}" for path in tvm_ffi.includes)]
        command += [str(folder / file) for file in sources]
        command += [f"-L{tvm_ffi.libraries}", "-ltvm_ffi", "-o", str(folder / "library.so")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise PeerMissing(f"nvcc refused {name}: {done.stderr.strip()[-600:]}")
        (folder / "library.so").replace(library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerMissing(f"nvcc did not run: {type(error).__name__}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return library


def nvcc() -> str:
    """The CUDA compiler. Raises PeerMissing where there is none."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [f"{home}/bin/nvcc" for home in homes if home] + [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    for path in candidates:
        if path and os.access(path, os.X_OK):
            return path
    raise PeerMissing("no nvcc; put it on PATH or set CUDA_HOME")


def version_beside(directory: Path, package: str) -> str | None:
    """The version that a wheel's unpacked metadata in ``directory`` gives."""
    for path in sorted(directory.glob(f"{package}-*.dist-info")):
        return path.name.removeprefix(f"{package}-").removesuffix(".dist-info")
    return None
