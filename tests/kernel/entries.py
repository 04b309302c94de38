"""Calls of prepare and fused_prepare, and a client of the emulation to make them through."""

from dataclasses import replace
from typing import Any

import torch
from emulation.artifact import emulated_artifact
from emulation.driver import EmulatedDriver
from kernel.calls import TENSORS, Call, make, moved, paged_pool, values
from kernel.checks import chain_options
from kernel.devices import KernelDevice
from kernel.memory import Guarded

from mlaprep.clients.client import KernelClient
from mlaprep.clients.handle import KernelHandle
from mlaprep.kernels_cache.store import MemoryStore
from mlaprep.templates.spec import KernelSpec

T, H, R, D = 5, 3, 32, 16

VARIANTS = {
    "query kept": make(T, H, R, D, layout="fp8-q16", kv_scale_inv=torch.tensor(2.0)),
    "cache kept": make(T, H, R, D, layout="same", rope="neox", dtype="fp16"),
    "tiles": make(T, H, 128, 64, layout="ds_mla", tile_scale="pow2", rope="interleaved"),
    "tiles, query kept": make(T, H, 128, 64, layout="ds_mla", query_dtype="input", q_scale_inv=torch.ones(T)),
    "narrow positions": make(T, H, R, D, rope="interleaved", positions=torch.arange(T, dtype=torch.int32)),
    "padded": make(T, H, R, D, pad_heads_to=8),
    "pages apart": replace(make(T, H, R, D), pool=paged_pool("fp8", 4, 4, R, D, gap=16)),
    "query only": replace(make(T, H, R, D, rope="neox"), k_nope=None, k_rope=None, loc=None, pool=None),
    "cache only": replace(make(T, H, R, D, rope="neox"), q_nope=None, q_rope=None),
}

CALLS = {
    "packed": (make(T, H, R, D), True),
    "sharded, scaled, reserved": (
        make(4, H, R, D, loc=[0, 5, 6, 9], dcp_world=4, dcp_rank=1, reserved_slot=5, q_scale_inv=torch.tensor(3.0)),
        True,
    ),
    "pitch of 8": (make(T, H, R, D, pitch=56), True),
    "pitch of 1": (make(T, H, R, D, pitch=49), False),
    "pool off 8 bytes": (replace(make(T, H, R, D), pool=Guarded((16, 48), (48, 1), offset=3)), False),
    "last stride 2": (replace(make(T, H, R, D), q_nope=values(T, H, 2 * R)[..., ::2]), False),
    "strided loc": (replace(make(T, H, R, D), loc=torch.arange(2 * T)[::2]), False),
    "width of no kernel": (make(T, H, 20, D), False),
    "empty": (make(0, H, R, D), True),
    **{name: (call, True) for name, call in VARIANTS.items()},
}
"""Each with whether a kernel covers it."""


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


class EmulatedSupply(KernelClient):
    """A client whose kernels run on the emulation; everything else is the client's own."""

    def __init__(self, driver: EmulatedDriver) -> None:
        super().__init__(store=MemoryStore(), on_miss="error", offline=True)
        self.asked = 0
        self._driver = driver

    def serving_handle(self, spec: KernelSpec, device: int, general: KernelSpec | None = None) -> KernelHandle | None:
        self.asked += 1
        return KernelHandle(emulated_artifact(spec), self._driver)


class DeviceClient(KernelClient):
    """A client whose kernels are a test device's."""

    def __init__(self, device: KernelDevice) -> None:
        super().__init__(store=MemoryStore(), on_miss="error", offline=True)
        self._device = device

    def serving_handle(self, spec: KernelSpec, device: int, general: KernelSpec | None = None) -> KernelHandle | None:
        assert device == (self._device.device.index or 0)
        return self._device.handle(spec)
