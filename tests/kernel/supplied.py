"""Clients that have their kernels from a test's device, whatever is asked for."""

from collections.abc import Sequence
from typing import Any

import pytest
from emulation.artifact import emulated_artifact
from emulation.driver import EmulatedDriver
from kernel.devices import Gpu

from mlaprep.clients import KernelClient, dispatch, specialise
from mlaprep.clients.handle import KernelHandle
from mlaprep.templates.spec import KernelSpec


class EmulatedClient(KernelClient):
    """A client whose kernels run on the emulation; ``specs`` are those it was asked for."""

    def __init__(self) -> None:
        super().__init__(on_miss="error", offline=True)
        self.driver = EmulatedDriver()
        self.specs: list[KernelSpec] = []

    def serving_handle(self, spec: KernelSpec, device: int, general: KernelSpec | None = None) -> KernelHandle:
        self.specs.append(spec)
        return KernelHandle(emulated_artifact(spec), self.driver)


class GpuClient(KernelClient):
    """A client of the GPU's kernels, compiled here; ``specs`` are those it was asked for."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(on_miss="error", offline=True)
        self.specs: list[KernelSpec] = []
        self._gpu = gpu

    def serving_handle(self, spec: KernelSpec, device: int, general: KernelSpec | None = None) -> KernelHandle:
        self.specs.append(spec)
        return self._gpu.handle(spec)


def emulate(client: EmulatedClient, monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
    """Take CPU tensors for what a kernel takes; launches of ``client`` may touch a call's operands alone.

    ``modules`` are those that hold ``prepare`` under a name of their own.
    """
    prepare = dispatch.prepare

    def within_memory(*operands: Any, **options: Any) -> Any:
        # Opened here, inside of what is tested: a torch operation's allocations are not seen from outside.
        scales = [options.get(name) for name in ("q_scale_inv", "kv_scale_inv", "positions", "cos_sin_cache")]
        reads: Sequence[Any] = [*operands[:4], operands[5], *scales]
        with client.driver.memory(reads, [operands[4], options.get("out")]):
            return prepare(*operands, **options)

    monkeypatch.setattr(specialise, "DEVICE_TYPE", "cpu")
    for module in (dispatch, *modules):
        monkeypatch.setattr(module, "prepare", within_memory)
