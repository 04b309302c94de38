"""SGLang's fused prepare kernel, and the scatter it took the place of, built from its released sources.

``fetch_peers.py`` brings the sources; ``--sglang``, ``MLAPREP_BENCH_SGLANG`` or an installed sglang serve as well.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers
from peers import (
    Once,
    PeerMissing,
    TvmFfi,
    build_library,
    digest_of,
    find_tvm_ffi,
    import_tvm_ffi,
    target_of,
    version_beside,
)

ENVIRON = "MLAPREP_BENCH_SGLANG"
KERNEL = "jit/csrc/elementwise/set_mla_kv_concat_q.cuh"
SCATTER = "jit/csrc/elementwise/set_mla_kv_buffer.cuh"
HEADERS = "jit/include"
WRAPPER = "ops/attention/set_mla_kv_concat_q.py"
HELPERS = "jit/utils/common.py"
"""Paths under ``sglang/kernels`` in SGLang's wheel."""

_FFI_HEADERS = ("container/tensor", "dtype", "error", "extra/c_env_api", "function")


@dataclass(frozen=True)
class SglangSources:
    """SGLang's released sources. ``root`` is its ``sglang/kernels`` directory."""

    root: Path
    version: str

    @functools.cached_property
    def digest(self) -> str:
        """sha256 over the kernels and every header they may include."""
        headers = sorted(path for path in (self.root / HEADERS).rglob("*") if path.is_file())
        return digest_of(self.root, [self.root / KERNEL, self.root / SCATTER, *headers])


def find_sglang(directory: Path | None = None) -> SglangSources:
    """SGLang's sources: in the directory given, the one the environment names, ``.peers``, or as installed.

    Raises:
        PeerMissing: in none of them, each named.
    """
    named = [Path(p) for p in (directory, os.environ.get(ENVIRON)) if p]
    for path in named or [peers.PEERS]:
        for root in (path / "sglang/kernels", path / "kernels", path):
            if (root / KERNEL).is_file():
                version = version_beside(root.parent.parent, "sglang") or version_beside(path, "sglang")
                return SglangSources(root, version or "unknown")
    if named:
        raise PeerMissing(f"the directory given for SGLang holds no {KERNEL}")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        distribution = importlib.metadata.distribution("sglang")
        root = Path(str(distribution.locate_file("sglang/kernels")))
        if (root / KERNEL).is_file():
            return SglangSources(root, distribution.version)
    raise PeerMissing("SGLang's sources are not there; run benchmarks/fetch_peers.py, or pass --sglang")


def build_sglang(
    sources: SglangSources,
    tvm_ffi: TvmFfi,
    kernel: str,
    exports: Sequence[tuple[str, str]],
    capability: tuple[int, int],
) -> Path:
    """A shared library of one kernel file with those (name, C++ function) exports.

    Compiler, flags and headers are those SGLang's own loader uses.

    Raises:
        PeerMissing: nvcc is not there or refuses.
    """
    lines = [f"#include <tvm/ffi/{name}.h>" for name in _FFI_HEADERS]
    lines += [f'#include "{kernel.removeprefix("jit/csrc/")}"', "namespace sglang {"]
    lines += [f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({name}, ({function}));" for name, function in exports]
    target = target_of(capability)
    flags = [
        "-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-gencode=arch=compute_{target},code=sm_{target}",
        f"-DSGL_CUDA_ARCH={capability[0] * 100 + capability[1] * 10}",
    ]  # fmt: skip
    includes = [f"-I{sources.root / HEADERS}", f"-I{sources.root / 'jit/csrc'}"]
    name = f"sglang-{sources.version}-{exports[0][0]}-sm_{target}"
    text = "\n".join([*lines, "}", ""])
    return build_library(name, {"module.cu": text}, flags, includes, tvm_ffi, sources.digest)


def fused_export(pdl: bool) -> tuple[str, str]:
    """What SGLang's own wrapper asks its loader for, so that a library can be built ahead of it."""
    return "set_mla_kv_concat_q_fp8", f"SetMlaKVConcatQFp8Kernel<{str(pdl).lower()}>::run"


SCATTER_EXPORT = ("set_mla_kv_buffer", "SetMlaKVBufferKernel<512, 64, true>::run")
"""Rows of 512 + 64 bytes, with PDL."""


class Sglang:
    """SGLang's kernels; the fused one through its own Python wrapper.

    Every method raises PeerMissing where the sources, tvm-ffi or a build are missing.
    """

    def __init__(self, directory: Path | None, capability: tuple[int, int]) -> None:
        self._directory = directory
        self._capability = capability
        self._once = Once()

    def facts(self) -> dict[str, Any]:
        """Version and digest of what is measured, for the record."""
        try:
            sources = find_sglang(self._directory)
            return {"version": sources.version, "sources_sha256": sources.digest, "tvm_ffi": find_tvm_ffi().version}
        except (PeerMissing, OSError) as error:
            return {"error": str(error)}

    def wrapper(self, pdl: bool) -> types.ModuleType:
        """SGLang's module ``set_mla_kv_concat_q``, its kernel built and loaded with or without PDL."""
        module: types.ModuleType = self._once(pdl, lambda: self._load(pdl))
        return module

    def kernel(self, pdl: bool) -> Callable[..., None]:
        """The compiled function: (cache, loc, k_nope, k_rope, q_nope, q_rope, out, warps, world, rank)."""
        function: Callable[..., None] = self.wrapper(pdl).set_mla_kv_concat_q_fp8_module(pdl).set_mla_kv_concat_q_fp8
        return function

    def warps(self, items: int) -> int:
        """Warps a block for that many rows, by SGLang's own rule."""
        return int(self.wrapper(True)._pick_num_warps(items))

    def scatter(self) -> Callable[..., None]:
        """The compiled scatter, with PDL: (cache, loc, nope, rope, warps, skipped slot), one dtype for all four."""
        function: Callable[..., None] = self._once("scatter", self._load_scatter).set_mla_kv_buffer
        return function

    def _load_scatter(self) -> Any:
        library = build_sglang(
            find_sglang(self._directory), find_tvm_ffi(), SCATTER, [SCATTER_EXPORT], self._capability
        )
        return import_tvm_ffi().load_module(str(library))

    def _load(self, pdl: bool) -> types.ModuleType:
        sources = find_sglang(self._directory)
        tvm_ffi = find_tvm_ffi()

        def load_jit(*_: str, cuda_wrappers: Sequence[tuple[str, str]], **__: Any) -> Any:
            # Stands in for SGLang's loader, which needs all of SGLang: same flags, one library a module.
            library = build_sglang(sources, tvm_ffi, KERNEL, cuda_wrappers, self._capability)
            return import_tvm_ffi().load_module(str(library))

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
