"""Calls of prepare and fused_prepare, and a client of the emulation to make them through."""

from typing import Any

import torch
from emulation.artifact import emulated_artifact
from emulation.driver import EmulatedDriver
from kernel.calls import TENSORS, Call, moved
from kernel.checks import chain_options

from mlaprep.clients.handle import KernelHandle
from mlaprep.clients.prepared import PreparedLaunch
from mlaprep.templates.spec import KernelSpec


def given(call: Call, place: torch.device) -> tuple[tuple[Any, ...], torch.Tensor | None, dict[str, Any]]:
    """Positional operands on a device, the pool's whole buffer, and the options."""
    whole = cache = None
    if call.pool is not None:
        whole, view = call.pool.allocate(place)
        cache = view.view(call.cache_dtype if call.pool.itemsize == 1 else call.lead.dtype)
    tensors = {name: moved(getattr(call, name), place) for name in TENSORS}
    positional = (*(tensors.pop(name) for name in ("q_nope", "q_rope", "k_nope", "k_rope")), cache, tensors.pop("loc"))
    rules = {"reserved_slot": call.reserved_slot, "dcp_rank": call.dcp_rank}
    return positional, whole, tensors | rules | chain_options(call)


class EmulatedSupply:
    """A client of the emulation, which remembers launches as a client does."""

    def __init__(self, driver: EmulatedDriver) -> None:
        self.prepared: dict[tuple[object, ...], PreparedLaunch] = {}
        self.fallbacks: list[str] = []
        self.asked = 0
        self._driver = driver

    def serving_handle(self, spec: KernelSpec, device: int) -> KernelHandle:
        self.asked += 1
        return KernelHandle(emulated_artifact(spec), self._driver)

    def fall_back(self, reason: str, found: str, decision: object) -> None:
        self.fallbacks.append(reason)
