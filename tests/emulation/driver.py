"""EmulatedDriver: the driver protocol of ``clients/launch.py`` over kernels compiled by g++, on CPU tensors."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from emulation.artifact import carried_source
from emulation.compile import compile_source
from torch.overrides import TorchFunctionMode

from mlaprep.clients.launch import LoadedKernel
from mlaprep.clients.plan import LaunchConfig

TYPES = {"pointer": ctypes.c_void_p, "i64": ctypes.c_longlong, "u32": ctypes.c_uint}
MULTIPROCESSORS = 4
"""Few, so that small batches already reach the larger blocks of a plan."""


class EmulationFault(AssertionError):
    """The kernel touched memory it must not, or out of order."""


class Region(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_size_t), ("end", ctypes.c_size_t), ("writable", ctypes.c_int))


class Launch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")),
        ("pdl", ctypes.c_int),
        ("region_count", ctypes.c_uint),
        ("regions", ctypes.POINTER(Region)),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("argument_count", ctypes.c_uint),
        ("fault", ctypes.c_char_p),
        ("fault_size", ctypes.c_uint),
        ("loads", ctypes.c_ulonglong),
        ("stores", ctypes.c_ulonglong),
    )


@dataclass(frozen=True)
class Launched:
    """One launch as the driver saw it."""

    config: LaunchConfig
    pdl: bool
    stream: int
    loads: int
    stores: int


@dataclass
class EmulatedDriver:
    """Runs every launch at once, on one thread, inside the memory that :meth:`memory` allows."""

    device_type = "cpu"

    launches: list[Launched] = field(default_factory=list)
    capturing: bool = False
    loads: int = 0
    device_capability: tuple[int, int] = (9, 0)
    _kernels: list[ctypes.CDLL] = field(default_factory=list)
    _regions: list[Region] = field(default_factory=list)

    def capability(self, device: int) -> tuple[int, int]:
        return self.device_capability

    def load(self, cubin: bytes, entry: str, device: int) -> LoadedKernel:
        assert entry == "mla_prepare"
        dtype, source = carried_source(cubin)
        self.loads += 1
        self._kernels.append(compile_source(source, dtype))
        return LoadedKernel(function=len(self._kernels) - 1, context=1, multiprocessors=MULTIPROCESSORS)

    def prepare(self, kernel: LoadedKernel, parameters: Sequence[tuple[str, str]], pdl: bool) -> "EmulatedLauncher":
        return EmulatedLauncher(self, self._kernels[kernel.function], [TYPES[kind] for _, kind in parameters], pdl)

    @property
    def current_stream(self) -> Callable[[int], int]:
        return lambda device: 0

    def is_capturing(self, device: int) -> bool:
        return self.capturing

    @contextmanager
    def memory(self, inputs: Sequence[object], outputs: Sequence[object]) -> Iterator[None]:
        """Allow launches to read ``inputs``, and to read and write ``outputs`` and whatever torch allocates."""
        regions = [region(tensor, writable=False) for tensor in inputs if holds_memory(tensor)]
        self._regions = regions + [region(tensor, writable=True) for tensor in outputs if holds_memory(tensor)]
        try:
            with _Allocations(self._regions):
                yield
        finally:
            self._regions = []


class EmulatedLauncher:
    def __init__(self, driver: EmulatedDriver, library: ctypes.CDLL, types: Sequence[Any], pdl: bool) -> None:
        self._driver, self._library, self._types, self._pdl = driver, library, types, pdl

    def __call__(self, config: LaunchConfig, stream: int, arguments: Sequence[int]) -> None:
        boxed = [kind(value) for kind, value in zip(self._types, arguments, strict=True)]
        for box, value in zip(boxed, arguments, strict=True):
            assert (box.value or 0) == value, f"argument {value} does not fit its type"
        addresses = (ctypes.c_void_p * len(boxed))(*(ctypes.addressof(box) for box in boxed))
        regions = self._driver._regions
        fault = ctypes.create_string_buffer(256)
        launch = Launch(
            *config.grid, *config.block, int(self._pdl), len(regions),
            (Region * len(regions))(*regions), addresses, len(boxed), ctypes.addressof(fault), len(fault), 0, 0,
        )  # fmt: skip
        assert self._library.emulate(ctypes.byref(launch)) == 0, "the kernel takes another number of arguments"
        self._driver.launches.append(Launched(config, self._pdl, stream, launch.loads, launch.stores))
        if fault.value:
            raise EmulationFault(fault.value.decode())

    def native(self) -> None:
        return None

    def refuse(self, result: int) -> None:
        raise AssertionError(result)


class _Allocations(TorchFunctionMode):
    """Adds what torch allocates meanwhile to the regions that may be written."""

    def __init__(self, regions: list[Region]) -> None:
        super().__init__()
        self._regions = regions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "").startswith(("empty", "new_empty", "resolve_")) and holds_memory(result):
            self._regions.append(region(result, writable=True))
        return result


def holds_memory(tensor: object) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.numel() > 0


def region(tensor: torch.Tensor, *, writable: bool) -> Region:
    """From the first to the last byte that the tensor's elements occupy."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return Region(begin, begin + (last + 1) * tensor.element_size(), int(writable))
