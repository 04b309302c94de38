"""Peers: SGLang's fused kernel, found at run time and built from its released sources.

Nothing of a peer is part of this repository. ``fetch_peers.py`` puts what is needed into ``.peers/``, which git
ignores; ``--sglang``, ``MLAPREP_BENCH_SGLANG`` or an installed sglang serve as well. Whatever fails here is an
exception with a reason that ends up in the result beside the peer's name.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PEERS = Path(__file__).resolve().parent.parent / ".peers"
ENVIRON = "MLAPREP_BENCH_SGLANG"

KERNEL = "jit/csrc/elementwise/set_mla_kv_concat_q.cuh"
HEADERS = "jit/include"
WRAPPER = "ops/attention/set_mla_kv_concat_q.py"
HELPERS = "jit/utils/common.py"
"""Paths under ``sglang/kernels`` in SGLang's wheel."""


class PeerMissing(RuntimeError):
    """A peer that is not there, or does not build or load here; the text says why."""


@dataclass(frozen=True)
class TvmFfi:
    """The runtime that SGLang's kernels are built against, as unpacked on disk."""

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


def interpreter_tag() -> str:
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


@dataclass(frozen=True)
class SglangSources:
    """SGLang's released sources. ``root`` is its ``sglang/kernels`` directory."""

    root: Path
    version: str

    @functools.cached_property
    def digest(self) -> str:
        """sha256 over the kernel and every header it may include."""
        digest = hashlib.sha256()
        for path in [self.root / KERNEL, *sorted(p for p in (self.root / HEADERS).rglob("*") if p.is_file())]:
            digest.update(f"{path.relative_to(self.root)} {path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
        return digest.hexdigest()


def find_sglang(directory: Path | None = None) -> SglangSources:
    """SGLang's sources: in the directory given, the one the environment names, ``.peers``, or as installed.

    Raises:
        PeerMissing: in none of them, each named.
    """
    named = [Path(p) for p in (directory, os.environ.get(ENVIRON)) if p]
    for path in named or [PEERS]:
        for root in (path / "sglang/kernels", path / "kernels", path):
            if (root / KERNEL).is_file():
                return SglangSources(root, _version_beside(root.parent.parent) or _version_beside(path) or "unknown")
    if named:
        raise PeerMissing(f"the directory given for SGLang holds no {KERNEL}")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        distribution = importlib.metadata.distribution("sglang")
        root = Path(str(distribution.locate_file("sglang/kernels")))
        if (root / KERNEL).is_file():
            return SglangSources(root, distribution.version)
    raise PeerMissing("SGLang's sources are not there; run benchmarks/fetch_peers.py, or pass --sglang")


def build(
    sources: SglangSources, tvm_ffi: TvmFfi, exports: Sequence[tuple[str, str]], capability: tuple[int, int]
) -> Path:
    """A shared library with those (name, C++ function) exports, built with nvcc, or the one built before.

    Compiler, flags and headers are those SGLang's own loader uses. The library holds C++ only, so one built
    under another Python serves.

    Raises:
        PeerMissing: nvcc is not there or refuses; the text holds the end of what it said.
    """
    lines = [f"#include <tvm/ffi/{name}.h>" for name in _FFI_HEADERS]
    lines += [f'#include "{KERNEL.removeprefix("jit/csrc/")}"', "namespace sglang {"]
    lines += [f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({name}, ({function}));" for name, function in exports]
    text = "\n".join([*lines, "}", ""])

    major, minor = capability
    target = f"{major}{minor}{'f' if capability == (12, 0) else 'a' if major >= 9 else ''}"
    flags = [
        "-shared", "-cudart", "shared", "-Xcompiler", "-fPIC", "-std=c++20", "-O3", "--expt-relaxed-constexpr",
        f"-gencode=arch=compute_{target},code=sm_{target}", f"-DSGL_CUDA_ARCH={major * 100 + minor * 10}",
    ]  # fmt: skip
    inputs = "\0".join([text, *flags, sources.digest, tvm_ffi.version])
    name = f"sglang-{sources.version}-{exports[0][0]}-sm_{target}-{hashlib.sha256(inputs.encode()).hexdigest()[:16]}"
    library = PEERS / "build" / f"{name}.so"
    if library.is_file():
        return library

    library.parent.mkdir(parents=True, exist_ok=True)
    source, partial = library.with_suffix(".cu"), library.with_suffix(f".{os.getpid()}.part")
    source.write_text(text)
    includes = [*tvm_ffi.includes, sources.root / HEADERS, sources.root / "jit/csrc"]
    command = [nvcc(), *flags, *(f"-I{path}" for path in includes), str(source)]
    command += [f"-L{tvm_ffi.libraries}", "-ltvm_ffi", "-o", str(partial)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerMissing(f"nvcc did not run: {type(error).__name__}") from error
    if done.returncode:
        raise PeerMissing(f"nvcc refused SGLang's kernel: {done.stderr.strip()[-600:]}")
    partial.replace(library)
    return library


def nvcc() -> str:
    """The CUDA compiler. Raises PeerMissing where there is none."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [f"{home}/bin/nvcc" for home in homes if home] + [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    for path in candidates:
        if path and os.access(path, os.X_OK):
            return path
    raise PeerMissing("no nvcc; put it on PATH or set CUDA_HOME")


class Sglang:
    """SGLang's fused prepare kernel, through its own Python wrapper.

    Every method raises PeerMissing where the sources, tvm-ffi or a build are missing; the first failure's
    reason is kept, so that nothing is built twice in vain.
    """

    def __init__(self, directory: Path | None, capability: tuple[int, int]) -> None:
        self._directory = directory
        self._capability = capability
        self._wrappers: dict[bool, types.ModuleType | PeerMissing] = {}

    def facts(self) -> dict[str, Any]:
        """Version and digest of what is measured, for the record."""
        try:
            sources = find_sglang(self._directory)
            return {"version": sources.version, "sources_sha256": sources.digest, "tvm_ffi": find_tvm_ffi().version}
        except (PeerMissing, OSError) as error:
            return {"error": str(error)}

    def wrapper(self, pdl: bool) -> types.ModuleType:
        """SGLang's module ``set_mla_kv_concat_q``, its kernel built and loaded with or without PDL."""
        if pdl not in self._wrappers:
            try:
                self._wrappers[pdl] = self._load(pdl)
            except Exception as error:
                self._wrappers[pdl] = PeerMissing(f"{type(error).__name__}: {error}"[:800])
        found = self._wrappers[pdl]
        if isinstance(found, PeerMissing):
            raise found
        return found

    def kernel(self, pdl: bool) -> Callable[..., None]:
        """The compiled function: (cache, loc, k_nope, k_rope, q_nope, q_rope, out, warps, world, rank)."""
        function: Callable[..., None] = self.wrapper(pdl).set_mla_kv_concat_q_fp8_module(pdl).set_mla_kv_concat_q_fp8
        return function

    def warps(self, items: int) -> int:
        """Warps a block for that many rows, by SGLang's own rule."""
        return int(self.wrapper(True)._pick_num_warps(items))

    def _load(self, pdl: bool) -> types.ModuleType:
        sources = find_sglang(self._directory)
        tvm_ffi = find_tvm_ffi()

        def load_jit(*_: str, cuda_wrappers: Sequence[tuple[str, str]], **__: Any) -> Any:
            # Stands in for SGLang's loader, which needs all of SGLang: same flags, one library a module.
            library = build(sources, tvm_ffi, cuda_wrappers, self._capability)
            return _import_tvm_ffi(tvm_ffi).load_module(str(library))

        helpers = _module_from("sglang_jit_common", sources.root / HELPERS)
        utils: Any = types.ModuleType("sglang.kernels.jit.utils")
        utils.cache_once = helpers.cache_once
        utils.is_arch_support_pdl = helpers.cache_once(lambda: pdl)
        utils.load_jit = load_jit
        utils.make_cpp_args = lambda *values: _CppArguments(str(value).lower() for value in values)
        with _standing_in(utils):
            wrapper = _module_from(f"sglang_set_mla_kv_concat_q_{pdl}", sources.root / WRAPPER)
        wrapper.set_mla_kv_concat_q_fp8_module(pdl)
        return wrapper


class _CppArguments(list[str]):
    """Template arguments; as text, separated by commas."""

    def __str__(self) -> str:
        return ", ".join(self)


_FFI_HEADERS = ("container/tensor", "dtype", "error", "extra/c_env_api", "function")


def _import_tvm_ffi(found: TvmFfi) -> Any:
    # torch first: it brings the CUDA runtime that the library was linked against.
    import torch  # noqa: F401

    if str(found.site) not in sys.path:
        sys.path.append(str(found.site))
    import tvm_ffi

    return tvm_ffi


def _module_from(name: str, path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PeerMissing(f"{path.name} is no Python module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _standing_in(module: types.ModuleType) -> Iterator[None]:
    """``module`` importable under its dotted name, its parents empty packages, for the block only."""
    parts = module.__name__.split(".")
    names = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    before = {name: sys.modules.get(name) for name in names}
    for name in names[:-1]:
        package = types.ModuleType(name)
        package.__path__ = []
        sys.modules[name] = package
    sys.modules[names[-1]] = module
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                del sys.modules[name]
            else:
                sys.modules[name] = old


def _version_beside(directory: Path) -> str | None:
    for path in sorted(directory.glob("sglang-*.dist-info")):
        found = re.fullmatch(r"sglang-(.+)\.dist-info", path.name)
        return found[1] if found else None
    return None
