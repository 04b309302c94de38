"""FlashInfer's two ways to rotate, quantise and cache MLA's rows, built from its released sources.

Its Python package needs a dozen others at import, so the compiled functions are called as its own wrappers call
them: ``rope_quantize`` as ``mla_rope_quantize_fp8`` does, and ``rope_quantize_append_paged_kv_cache`` as
``rope_quantize_fp8_append_paged_kv_cache`` does. ``fetch_peers.py`` brings the sources; ``--flashinfer`` or an
installed flashinfer-python serve as well.
"""

import contextlib
import functools
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peers
import torch
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
from torch import Tensor
from workload import RANK, ROW, Layer

CSRC = ("rope.cu", "flashinfer_rope_binding.cu", "tvm_ffi_utils.h")
INCLUDE = "include/flashinfer"
CCCL = "cccl/libcudacxx/include"
"""Under ``flashinfer/data`` in FlashInfer's wheel."""

PAGE = 64
"""Cache rows a page, as its MLA attention takes them."""


@dataclass(frozen=True)
class FlashinferSources:
    """FlashInfer's released sources. ``root`` is its ``flashinfer/data`` directory."""

    root: Path
    version: str

    @functools.cached_property
    def digest(self) -> str:
        """sha256 over the two sources and FlashInfer's own headers."""
        headers = sorted(path for path in (self.root / INCLUDE).glob("*") if path.is_file())
        return digest_of(self.root, [*(self.root / "csrc" / name for name in CSRC), *headers])


def find_flashinfer(directory: Path | None = None) -> FlashinferSources:
    """FlashInfer's sources: in the directory given, ``.peers``, or as installed.

    Raises:
        PeerMissing: in none of them.
    """
    for root in ((directory or peers.PEERS) / "flashinfer/data",):
        if (root / "csrc" / CSRC[0]).is_file():
            return FlashinferSources(root, version_beside(root.parent.parent, "flashinfer_python") or "unknown")
    if directory is None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            distribution = importlib.metadata.distribution("flashinfer-python")
            root = Path(str(distribution.locate_file("flashinfer/data")))
            if (root / "csrc" / CSRC[0]).is_file():
                return FlashinferSources(root, distribution.version)
    raise PeerMissing("FlashInfer's sources are not there; run benchmarks/fetch_peers.py, or pass --flashinfer")


def build_flashinfer(sources: FlashinferSources, tvm_ffi: TvmFfi, capability: tuple[int, int]) -> Path:
    """A shared library of its module ``rope``: compiler flags and headers are those of its own loader.

    Raises:
        PeerMissing: nvcc is not there or refuses.
    """
    target = target_of(capability)
    flags = [
        "-std=c++17", "-use_fast_math", "-DNDEBUG", "-O3", "--expt-relaxed-constexpr",
        "-static-global-template-stub=false", "-Xfatbin=-compress-all", "--compress-mode=size",
        "-DPy_LIMITED_API=0x03090000", "-D_GLIBCXX_USE_CXX11_ABI=1",
        *(f"-DFLASHINFER_ENABLE_{kind}" for kind in ("F16", "BF16", "FP8_E4M3", "FP8_E5M2", "FP8_E8M0", "FP4_E2M1")),
        f"-gencode=arch=compute_{target},code=sm_{target}",
    ]  # fmt: skip
    includes = [f"-I{sources.root / CCCL}"] if (sources.root / CCCL).is_dir() else []
    for path in (sources.root / "include", sources.root / "csrc"):
        includes += ["-isystem", str(path)]
    texts = {name: (sources.root / "csrc" / name).read_text() for name in CSRC if name.endswith(".cu")}
    name = f"flashinfer-{sources.version}-rope-sm_{target}"
    return build_library(name, texts, flags, includes, tvm_ffi, sources.digest)


class Flashinfer:
    """FlashInfer's compiled functions. Every method raises PeerMissing where they cannot be had."""

    def __init__(self, directory: Path | None, capability: tuple[int, int]) -> None:
        self._directory = directory
        self._capability = capability
        self._once = Once()

    def facts(self) -> dict[str, Any]:
        """Version and digest of what is measured, for the record."""
        try:
            sources = find_flashinfer(self._directory)
            return {"version": sources.version, "sources_sha256": sources.digest, "tvm_ffi": find_tvm_ffi().version}
        except (PeerMissing, OSError) as error:
            return {"error": str(error)}

    def quantise_then(self, scatter: Callable[..., None]) -> Callable[[Layer], Tensor]:
        """A body of two launches: rope-quantise into a row a token, then ``scatter`` (SGLang's) into the cache."""
        quantise = self._module.rope_quantize

        def run(layer: Layer) -> Tensor:
            rows = torch.empty((len(layer.loc), ROW), dtype=torch.float8_e4m3fn, device=layer.loc.device)
            out = layer.out
            quantise(
                layer.q_rope, layer.k_rope, layer.q_nope, layer.k_nope,
                out[..., RANK:], rows[:, RANK:], out[..., :RANK], rows[:, :RANK],
                layer.cos_sin, layer.positions, 1.0, 1.0, True, True,
            )  # fmt: skip
            scatter(layer.cache.view(torch.float8_e4m3fn), layer.loc, rows[:, :RANK], rows[:, RANK:], 0, -1)
            return out

        return run

    def append(self, layers: list[Layer]) -> Callable[[Layer], Tensor]:
        """A body of one launch: its append, into the two halves of our pool seen as pages.

        Each token is a request of its own, as in decode. The page tables are made here, ahead of the launches.
        """
        append = self._module.rope_quantize_append_paged_kv_cache
        tables = {layer.loc.data_ptr(): PageTable.of(layer) for layer in layers}

        def run(layer: Layer) -> Tensor:
            table, out = tables[layer.loc.data_ptr()], layer.out
            append(
                layer.q_rope, layer.k_rope.unsqueeze(1), layer.q_nope, layer.k_nope.unsqueeze(1), table.no_values,
                out[..., RANK:], out[..., :RANK], layer.cos_sin, layer.positions,
                table.no_cache, table.no_cache, table.latent, table.rotary,
                table.indices, table.indptr, table.requests, table.positions,
                0, PAGE, 1.0, 1.0, True, True,
            )  # fmt: skip
            return out

        return run

    @property
    def _module(self) -> Any:
        return self._once("rope", self._load)

    def _load(self) -> Any:
        library = build_flashinfer(find_flashinfer(self._directory), find_tvm_ffi(), self._capability)
        return import_tvm_ffi().load_module(str(library))


@dataclass(frozen=True)
class PageTable:
    """A layer's cache as FlashInfer's append takes it: pages of two arrays, and where each token's row is."""

    latent: Tensor
    """``[pages, 64, 512]`` e4m3, a view of the pool."""
    rotary: Tensor
    """``[pages, 64, 64]`` e4m3, a view of the pool."""
    indices: Tensor
    """``[T]`` int32: the one page of each request."""
    indptr: Tensor
    """``[T + 1]`` int32."""
    requests: Tensor
    """``[T]`` int32: token t belongs to request t."""
    positions: Tensor
    """``[T]`` int32: the row in the page."""
    no_cache: Tensor
    no_values: Tensor

    @classmethod
    def of(cls, layer: Layer) -> "PageTable":
        loc, device = layer.loc, layer.loc.device
        pages = layer.cache.view(torch.float8_e4m3fn).view(-1, PAGE, ROW)
        return cls(
            pages[..., :RANK],
            pages[..., RANK:],
            (loc // PAGE).int(),
            torch.arange(len(loc) + 1, dtype=torch.int32, device=device),
            torch.arange(len(loc), dtype=torch.int32, device=device),
            (loc % PAGE).int(),
            torch.empty(0, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(0, dtype=torch.bfloat16, device=device),
        )
