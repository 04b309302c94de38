"""The structure of vLLM's one-launch decode epilogue, re-created from a description: ``peer_sources/one_launch.cu``.

It is a stand-in, not vLLM: no source of vLLM was read or built. H is compiled in, which favours it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kernels import argument_values, compile_cubin
from peers import Once
from torch import Tensor
from workload import Cell, Layer

from mlaprep.clients.launch import KernelDriver
from mlaprep.clients.plan import LaunchConfig
from mlaprep.templates.arch import Arch

SOURCE = Path(__file__).resolve().parent / "peer_sources/one_launch.cu"
ENTRY = "one_launch"
THREADS = 256
FEW_TOKENS = 64
"""Tokens up to which three warps share a row."""

_POINTERS = ("q_out", "kv_cache", "q_nope", "q_rope", "k_nope", "k_rope", "loc", "q_scale", "kv_scale")
_STRIDES = (
    "q_nope_token_stride", "q_nope_head_stride", "q_rope_token_stride", "q_rope_head_stride",
    "k_nope_token_stride", "k_rope_token_stride", "cache_row_stride",
)  # fmt: skip
PARAMETERS = [
    *((name, "pointer") for name in _POINTERS),
    ("tokens", "u32"),
    *((name, "i64") for name in _STRIDES),
]


def defines(heads: int, warps_a_row: int, pdl: bool) -> list[str]:
    """What the source wants defined."""
    return [f"HEADS={heads}", f"WARPS_A_ROW={warps_a_row}", f"PDL={int(pdl)}"]


def warps_a_row(tokens: int) -> int:
    return 3 if tokens <= FEW_TOKENS else 1


def launch_config(cell: Cell) -> LaunchConfig:
    """Blocks of 256 over the warps of all rows."""
    warps = cell.tokens * (cell.heads + 1) * warps_a_row(cell.tokens)
    return LaunchConfig((-(-warps * 32 // THREADS), 1, 1), (THREADS, 1, 1))


class OneLaunch:
    """The kernel, compiled for each H at first use."""

    def __init__(self, arch: Arch, driver: KernelDriver, device: int) -> None:
        self._arch, self._driver, self._device = arch, driver, device
        self._once = Once()

    def body(self, cell: Cell, *, pdl: bool) -> Callable[[Layer], Tensor]:
        """A body of one launch.

        Raises:
            PeerMissing: it does not compile or load here.
        """
        warps = warps_a_row(cell.tokens)
        launch = self._once((cell.heads, warps, pdl), lambda: self._load(cell.heads, warps, pdl))
        config, driver, device = launch_config(cell), self._driver, self._device
        ones = self._once("scale", lambda: torch.ones(1, dtype=torch.float32, device="cuda"))
        scales = {"q_scale": ones.data_ptr(), "kv_scale": ones.data_ptr()}

        def run(layer: Layer) -> Tensor:
            values = argument_values(layer) | scales
            launch(config, driver.current_stream(device), [values[name] for name, _ in PARAMETERS])
            return layer.out

        return run

    def _load(self, heads: int, warps: int, pdl: bool) -> Any:
        cubin, _ = compile_cubin(SOURCE.read_text("utf-8"), self._arch, defines(heads, warps, pdl))
        return self._driver.prepare(self._driver.load(cubin, ENTRY, self._device), PARAMETERS, pdl)
