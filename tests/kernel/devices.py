"""KernelDevice: where a test's kernels run. The emulation in CI, a GPU under the ``gpu`` marker."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from emulation.artifact import emulated_artifact
from emulation.driver import EmulatedDriver

from mlaprep.clients.handle import KernelHandle
from mlaprep.clients.launch import KernelDriver, cuda_driver
from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import render
from mlaprep.templates.spec import KernelSpec


class KernelDevice(Protocol):
    name: str
    device: torch.device
    driver: KernelDriver

    def handle(self, spec: KernelSpec) -> KernelHandle:
        """A loaded handle, one a spec and session."""

    def memory(self, inputs: Sequence[object], outputs: Sequence[object]) -> AbstractContextManager[None]:
        """What launches inside may read and write, checked where the device can."""

    def launches(self) -> int | None:
        """Launches so far, where the device counts them."""


class Emulation:
    name = "emulation"

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.driver = EmulatedDriver()
        self.handle = functools.cache(self._handle)

    def _handle(self, spec: KernelSpec) -> KernelHandle:
        return KernelHandle(emulated_artifact(spec), self.driver)

    def memory(self, inputs: Sequence[object], outputs: Sequence[object]) -> AbstractContextManager[None]:
        return self.driver.memory(inputs, outputs)

    def launches(self) -> int:
        return len(self.driver.launches)


class Gpu:
    name = "gpu"

    def __init__(self) -> None:
        from mlaprep.service.compiler import Compiler

        self.device = torch.device("cuda", torch.cuda.current_device())
        self.driver = cuda_driver()
        arch = Arch.for_device(self.driver.capability(self.device.index))
        assert arch is not None, "no kernel is built for this GPU"
        self.arch = arch
        self.compiler: Any = Compiler()
        self.handle = functools.cache(self._handle)

    def artifact(self, spec: KernelSpec) -> KernelArtifact:
        return self.compiler.compile(render(spec), self.arch)

    def _handle(self, spec: KernelSpec) -> KernelHandle:
        return KernelHandle(self.artifact(spec)).load(self.device)

    @contextmanager
    def memory(self, inputs: Sequence[object], outputs: Sequence[object]) -> Iterator[None]:
        yield

    def launches(self) -> None:
        return None

    def close(self) -> None:
        self.compiler.close()
