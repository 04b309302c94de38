"""FakeDriver: devices that load anything and launch nothing, and say what was asked of them."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlaprep.clients.errors import DriverError
from mlaprep.clients.launch import LoadedKernel


@dataclass
class FakeDriver:
    device_type = "cuda"

    capabilities: tuple[tuple[int, int], ...] = ((9, 0), (9, 0))
    capturing: set[int] = field(default_factory=set)
    loads: list[int] = field(default_factory=list)
    launches: list[int] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)
    load_s: float = 0.0

    def capability(self, device: int) -> tuple[int, int]:
        if device >= len(self.capabilities):
            raise DriverError(f"asked the CUDA driver to find device {device}, found no such device", code=101)
        return self.capabilities[device]

    def load(self, cubin: bytes, entry: str, device: int) -> LoadedKernel:
        time.sleep(self.load_s)
        self.loads.append(device)
        self.threads.add(threading.current_thread().name)
        return LoadedKernel(function=1, context=100 + device, multiprocessors=132)

    def prepare(self, kernel: LoadedKernel, parameters: Sequence[tuple[str, str]], pdl: bool) -> Any:
        return lambda config, stream, arguments: self.launches.append(kernel.context - 100)

    def current_stream(self, device: int) -> int:
        return 7 + device

    def is_capturing(self, device: int) -> bool:
        return device in self.capturing
