"""Driver calls: loading a cubin into a device's primary context and launching its kernel.

Straight ctypes over libcuda, since the worker's process already holds the driver and a call must cost
microseconds. Nothing here allocates device memory or synchronises.
"""

import ctypes
import functools
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from mlaprep.clients.errors import DriverError, ForkedProcessError
from mlaprep.clients.plan import LaunchConfig
from mlaprep.clients.tensors import kind_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel in one device's primary context. It stays loaded for the life of the process."""

    function: int
    context: int
    multiprocessors: int


class KernelDriver(Protocol):
    """What a handle needs of a device runtime; the CUDA driver is one, a test's emulation another."""

    device_type: str
    """The torch device type whose tensors this driver launches on."""

    def capability(self, device: int) -> tuple[int, int]:
        """Compute capability (major, minor) of a device, by torch's ordinal.

        Raises:
            DriverError: no such device.
        """

    def load(self, cubin: bytes, entry: str, device: int) -> LoadedKernel:
        """Load a verified cubin.

        Raises:
            DriverError: the driver refuses it.
        """

    def prepare(self, kernel: LoadedKernel, parameters: Sequence[tuple[str, str]], pdl: bool) -> "Launcher":
        """A launcher for a loaded kernel whose arguments have those names and types."""

    @property
    def current_stream(self) -> Callable[[int], int]:
        """Gives the raw stream that torch works on for a device."""

    def is_capturing(self, device: int) -> bool:
        """Whether that stream is being captured into a graph."""


class Launcher(Protocol):
    def __call__(self, config: LaunchConfig, stream: int, arguments: Sequence[int]) -> None:
        """Enqueue one launch; arguments in the order the launcher was prepared with.

        Raises:
            DriverError: the launch was refused.
        """

    def native(self) -> tuple[int, ...] | None:
        """How C code makes this launch: the addresses of the driver's launch, get, push and pop of a context,
        the function, its context, and 1 for a programmatic launch. None where only Python can."""

    def refuse(self, result: int) -> None:
        """Raises DriverError for the driver's answer to a launch."""


_CAPTURE_ACTIVE: Final = 1
_CAPTURE_IMPLICIT: Final = 906
_RELAXED: Final = 2
_ATTRIBUTE_PROGRAMMATIC_SERIALIZATION: Final = 6
_CAPABILITY_MAJOR: Final = 75
_CAPABILITY_MINOR: Final = 76
_MULTIPROCESSORS: Final = 16


class _LaunchAttribute(ctypes.Structure):
    # CUlaunchAttribute: an id padded to 8 bytes, then a 64-byte value
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


class CudaDriver:
    """The CUDA driver, for tensors that torch placed in primary contexts."""

    device_type = "cuda"

    def __init__(self) -> None:
        self.pid = os.getpid()
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(
                "asked to use a GPU, but libcuda.so.1 cannot be loaded; "
                "install the NVIDIA driver, or use the unfused chain"
            ) from error
        self._check(self._cuda.cuInit(0), "initialise the CUDA driver")
        self._contexts: dict[int, int] = {}

    def capability(self, device: int) -> tuple[int, int]:
        """Compute capability (major, minor) of a device, by torch's ordinal."""
        handle = self._device(device)
        return self._attribute(handle, _CAPABILITY_MAJOR), self._attribute(handle, _CAPABILITY_MINOR)

    def load(self, cubin: bytes, entry: str, device: int) -> LoadedKernel:
        context = self._context(device)
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        # The context comes first: without one, the driver makes device 0's for the next call.
        self._check(self._cuda.cuCtxPushCurrent_v2(ctypes.c_void_p(context)), "enter the device's context")
        try:
            # A load is illegal while any thread captures in the default mode; relaxed mode, for this thread
            # and this call, leaves such a capture valid.
            mode = ctypes.c_int(_RELAXED)
            self._check(self._cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "change the capture mode")
            try:
                image = ctypes.create_string_buffer(cubin, len(cubin))
                self._check(
                    self._cuda.cuModuleLoadData(ctypes.byref(module), image), f"load a cubin on device {device}"
                )
                self._check(
                    self._cuda.cuModuleGetFunction(ctypes.byref(function), module, entry.encode()),
                    f"find the kernel {entry}",
                )
            finally:
                self._cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        finally:
            self._cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        if not function.value:
            raise DriverError(f"asked for the kernel {entry}, the driver returned none")
        return LoadedKernel(function.value, context, self._attribute(self._device(device), _MULTIPROCESSORS))

    def prepare(self, kernel: LoadedKernel, parameters: Sequence[tuple[str, str]], pdl: bool) -> Launcher:
        return _CudaLauncher(self, kernel, parameters, pdl)

    @functools.cached_property
    def current_stream(self) -> Callable[[int], int]:
        # torch's own function: a call of it costs 0.1 µs, one of torch.cuda.current_stream 6.
        import torch

        raw: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        return raw

    def is_capturing(self, device: int) -> bool:
        status = ctypes.c_int()
        # The legacy stream is resolved in the current context, so ask in the device's own; torch's first look
        # for a stream would otherwise make device 0's.
        self._check(
            self._cuda.cuCtxPushCurrent_v2(ctypes.c_void_p(self._context(device))), "enter the device's context"
        )
        try:
            stream = ctypes.c_void_p(self.current_stream(device))
            result = self._cuda.cuStreamIsCapturing(stream, ctypes.byref(status))
        finally:
            self._cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        if result == _CAPTURE_IMPLICIT:  # the legacy stream, while a stream that waits for it is captured
            return True
        self._check(result, "ask whether the stream is captured")
        return status.value == _CAPTURE_ACTIVE

    def _device(self, device: int) -> int:
        handle = ctypes.c_int()
        self._check(self._cuda.cuDeviceGet(ctypes.byref(handle), device), f"find device {device}")
        return handle.value

    def _attribute(self, handle: int, attribute: int) -> int:
        value = ctypes.c_int()
        self._check(self._cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle), "read a device attribute")
        return value.value

    def _context(self, device: int) -> int:
        if device not in self._contexts:
            context = ctypes.c_void_p()
            result = self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), self._device(device))
            self._check(result, f"enter device {device}")
            assert context.value is not None
            self._contexts[device] = context.value
        return self._contexts[device]

    def _check(self, result: int, action: str) -> None:
        if result == 0:
            return
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        self._cuda.cuGetErrorName(result, ctypes.byref(name))
        self._cuda.cuGetErrorString(result, ctypes.byref(text))
        found = f"{(name.value or b'an unknown error').decode()} ({result}): {(text.value or b'').decode()}"
        raise DriverError(f"asked the CUDA driver to {action}, found {found}", code=result)


def cuda_driver() -> CudaDriver:
    """The process's CUDA driver, opened at first use.

    Raises:
        DriverError: no driver, or it does not initialise.
        ForkedProcessError: this process is a fork of the one that opened it.
    """
    driver = _opened_driver()
    if driver.pid != os.getpid():
        raise ForkedProcessError(
            f"asked to use a GPU in process {os.getpid()}, found the CUDA driver opened in pid {driver.pid} before "
            "the fork; CUDA does not survive a fork: start the process with spawn, or fork before using a GPU"
        )
    return driver


_opened_driver: Final = functools.cache(CudaDriver)


def check_device(device: object) -> None:
    """Whether this can be a CUDA device, told without a driver.

    Raises:
        TypeError: neither None, an int nor a torch.device.
        ValueError: a negative ordinal, or a device that is no CUDA device.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        if device < 0:
            raise ValueError(f"device: found {device}; pass 0 or more, or a torch.device")
    elif device is not None:
        import torch

        if not isinstance(device, torch.device):
            raise TypeError(f"device: found a {kind_of(device)}; pass an int or a torch.device")
        if device.type != "cuda":
            raise ValueError(f"device: found {device}; pass a CUDA device, or an int")


def device_ordinal(device: "int | torch.device | None") -> int:
    """A device's ordinal among those that CUDA sees: torch's current one for none, or for ``cuda`` alone.

    Raises:
        TypeError: neither an int nor a torch.device.
        ValueError: a device that is no CUDA device.
    """
    import torch

    check_device(device)
    if isinstance(device, int):
        return device
    if device is None or device.index is None:
        return int(torch.cuda.current_device())
    return int(device.index)


class _Frame:
    """One launch's memory: packed arguments, their addresses, and the launch configuration."""

    def __init__(self, layout: struct.Struct, offsets: Sequence[int], function: int, pdl: bool) -> None:
        self.arguments = bytearray(layout.size)
        self._memory = (ctypes.c_char * layout.size).from_buffer(self.arguments)
        base = ctypes.addressof(self._memory)
        self.addresses = (ctypes.c_void_p * len(offsets))(*(base + offset for offset in offsets))
        self.attribute = _LaunchAttribute(id=_ATTRIBUTE_PROGRAMMATIC_SERIALIZATION)
        self.attribute.value[0] = 1
        self.config = _LaunchConfig()
        self.config.attributes = ctypes.pointer(self.attribute)
        self.config.attribute_count = 1 if pdl else 0
        self.call = (ctypes.byref(self.config), ctypes.c_void_p(function), self.addresses, None)


class _CudaLauncher:
    def __init__(
        self, driver: CudaDriver, kernel: LoadedKernel, parameters: Sequence[tuple[str, str]], pdl: bool
    ) -> None:
        self._driver = driver
        self._cuda = driver._cuda
        self._kernel = kernel
        self._layout, self._offsets = argument_layout(parameters)
        self._pdl = pdl
        # Frames are taken and put back, so that threads launching at once never share one: list's pop
        # and append are atomic.
        self._frames: list[_Frame] = []

    def __call__(self, config: LaunchConfig, stream: int, arguments: Sequence[int]) -> None:
        try:
            frame = self._frames.pop()
        except IndexError:
            frame = _Frame(self._layout, self._offsets, self._kernel.function, self._pdl)
        self._layout.pack_into(frame.arguments, 0, *arguments)
        launch = frame.config
        launch.grid_x, launch.grid_y, launch.grid_z = config.grid
        launch.block_x, launch.block_y, launch.block_z = config.block
        launch.stream = stream
        current = ctypes.c_void_p()
        self._cuda.cuCtxGetCurrent(ctypes.byref(current))
        if current.value == self._kernel.context:
            result = self._cuda.cuLaunchKernelEx(*frame.call)
        else:
            result = self._launch_in_context(frame)
        self._frames.append(frame)
        if result:
            self.refuse(result)

    def native(self) -> tuple[int, ...]:
        cuda, kernel = self._cuda, self._kernel
        calls = (cuda.cuLaunchKernelEx, cuda.cuCtxGetCurrent, cuda.cuCtxPushCurrent_v2, cuda.cuCtxPopCurrent_v2)
        return (*map(_address, calls), kernel.function, kernel.context, int(self._pdl))

    def refuse(self, result: int) -> None:
        self._driver._check(result, "launch a prepare kernel")

    def _launch_in_context(self, frame: _Frame) -> int:
        self._driver._check(
            self._cuda.cuCtxPushCurrent_v2(ctypes.c_void_p(self._kernel.context)), "enter the device's context"
        )
        try:
            return int(self._cuda.cuLaunchKernelEx(*frame.call))
        finally:
            self._cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


_CODES: Final = {"pointer": ("Q", 8), "i64": ("q", 8), "u32": ("I", 4)}


def argument_layout(parameters: Sequence[tuple[str, str]]) -> tuple[struct.Struct, tuple[int, ...]]:
    """How arguments lie in one buffer, and the offset of each, naturally aligned.

    Raises:
        ValueError: a type that is not ``pointer``, ``i64`` or ``u32``.
    """
    code, offset, offsets = "=", 0, []
    for name, kind in parameters:
        if kind not in _CODES:
            raise ValueError(f"kernel parameter {name} has type {kind!r}; known are {', '.join(_CODES)}")
        letter, size = _CODES[kind]
        pad = -offset % size
        code += f"{pad}x{letter}"
        offsets.append(offset + pad)
        offset += pad + size
    return struct.Struct(code), tuple(offsets)
