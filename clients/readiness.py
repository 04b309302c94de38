"""Readiness: every kernel that a worker will launch, loaded before it serves or captures a graph."""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from mlaprep.clients import launch
from mlaprep.clients.errors import DriverError, KernelNotReady, KernelUnavailable, MlaprepError
from mlaprep.clients.stats import Tier
from mlaprep.clients.wanted import Wanted, wanted_specs
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec

if TYPE_CHECKING:
    from mlaprep.clients.client import KernelClient

MAX_THREADS: Final = 16
"""Kernels fetched or built at once, at most; waiting for a service or a compile process takes no core."""

Progress = Callable[["KernelReadiness", int, int], object]
"""Called with a kernel's outcome, how many are done, and how many there are."""


@dataclass(frozen=True, slots=True)
class KernelReadiness:
    """One kernel on one device."""

    spec: KernelSpec
    arch: Arch | None
    """None where the device has none, or could not be asked."""
    device: int | None
    """Ordinal; None where the kernel was brought to this machine and loaded nowhere."""
    tier: Tier | Literal["loaded"] | None
    """The place that had it; ``loaded`` where it was ready already; None where it could not be had."""
    ms: float
    """Milliseconds from its turn to ready or refused."""
    error: MlaprepError | None = None
    """Why it could not be had."""

    @property
    def ready(self) -> bool:
        return self.error is None

    def __str__(self) -> str:
        place = f"{self.spec.variant_id} for {self.arch or 'an unknown architecture'}"
        if self.device is not None:
            place += f" on device {self.device}"
        if self.error is not None:
            return f"{place}: {self.error}"
        return f"{place}: {self.tier}, {self.ms:.1f} ms"


@dataclass(frozen=True, slots=True)
class ReadinessReport:
    """What :meth:`KernelClient.ensure_ready` found: one entry a kernel and device, in the order asked."""

    kernels: tuple[KernelReadiness, ...]
    ms: float
    """Milliseconds in all."""

    @property
    def complete(self) -> bool:
        """Whether every kernel is ready."""
        return all(kernel.ready for kernel in self.kernels)

    @property
    def ready(self) -> tuple[KernelReadiness, ...]:
        return tuple(kernel for kernel in self.kernels if kernel.ready)

    @property
    def missing(self) -> tuple[KernelReadiness, ...]:
        return tuple(kernel for kernel in self.kernels if not kernel.ready)

    def __str__(self) -> str:
        head = f"{len(self.ready)} of {len(self.kernels)} kernels ready in {self.ms:.1f} ms"
        return "\n".join([head, *(f"  missing: {kernel}" for kernel in self.missing)])


@dataclass(frozen=True, slots=True)
class _Turn:
    """One kernel to bring to one device, or none."""

    spec: KernelSpec
    arch: Arch | None
    device: int | None

    def done(
        self, began: float, tier: Tier | Literal["loaded"] | None, error: MlaprepError | None = None
    ) -> KernelReadiness:
        ms = (time.perf_counter() - began) * 1e3
        return KernelReadiness(self.spec, self.arch, self.device, tier, ms, error)


def make_ready(
    client: "KernelClient",
    what: "Wanted | Iterable[Wanted] | None",
    tp: "int | Iterable[int] | None",
    fields: Mapping[str, Any],
    devices: Any,
    arch: Arch | None,
    progress: Progress | None,
    strict: bool,
) -> ReadinessReport:
    """Bring every spec to every device, several at once; see :meth:`KernelClient.ensure_ready`."""
    began = time.perf_counter()
    _check_devices(devices)
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: found a {type(progress).__name__}; pass a function of an outcome and two counts")
    turns, refused = _turns(wanted_specs(what, tp, **fields), devices, arch)
    done: dict[int, KernelReadiness] = {}

    def tell(place: int, outcome: KernelReadiness) -> None:
        done[place] = outcome
        if progress is not None:
            progress(outcome, len(done), len(turns))

    cold = []
    for place, turn in enumerate(turns):
        if turn.device in refused:
            tell(place, turn.done(time.perf_counter(), None, refused[turn.device]))
        elif turn.device is not None and client.is_loaded(turn.spec, turn.device):
            tell(place, turn.done(time.perf_counter(), "loaded"))
        else:
            cold.append(place)
    capturing = {device: _is_capturing(device) for device in {turns[place].device for place in cold}}
    calls: dict[int, Callable[[], KernelReadiness]] = {}
    for place in cold:
        turn = turns[place]
        if capturing[turn.device]:
            error = KernelNotReady(
                f"asked for {turn.spec.variant_id} on device {turn.device} while its stream is being captured; "
                "make it ready before the capture"
            )
            tell(place, turn.done(time.perf_counter(), None, error))
        else:
            calls[place] = functools.partial(_bring, client, turn)
    for place, outcome in _all_at_once(calls):
        tell(place, outcome)
    kernels = tuple(done[place] for place in range(len(turns)))
    report = ReadinessReport(kernels, (time.perf_counter() - began) * 1e3)
    if strict and report.missing:
        lines = [str(kernel) for kernel in report.missing]
        raise KernelUnavailable(
            f"asked for {len(kernels)} kernels, {len(lines)} could not be had: {'; '.join(lines)}", attempts=lines
        ) from report.missing[0].error
    return report


def _turns(
    specs: Sequence[KernelSpec], devices: Any, arch: Arch | None
) -> "tuple[list[_Turn], dict[int | None, MlaprepError]]":
    """What to bring where, and the devices that can be brought nothing."""
    if arch is not None and devices is None:
        return [_Turn(spec, arch, None) for spec in specs], {}
    refused: dict[int | None, MlaprepError] = {}
    try:
        driver = launch.cuda_driver()
        ordinals: list[int | None] = [*_ordinals(devices)]
    except DriverError as error:
        # Named devices are told of one by one, all the same.
        ordinals = [device if isinstance(device, int) else None for device in _listed(devices)]
        return [_Turn(spec, arch, device) for device in ordinals for spec in specs], dict.fromkeys(ordinals, error)
    turns = []
    for device in ordinals:
        assert device is not None
        target = arch
        try:
            target = target or Arch.for_device(driver.capability(device))
        except DriverError as error:
            refused[device] = error
        else:
            if target is None:
                refused[device] = KernelUnavailable(
                    "none is built for this device's compute capability; use the unfused chain, as prepare does"
                )
        turns += [_Turn(spec, target, device) for spec in specs]
    return turns, refused


def _check_devices(devices: Any) -> None:
    """Raises TypeError or ValueError for what names no device, whether or not there is a driver to ask."""
    listed = _listed(devices)
    if not listed:
        raise ValueError("devices: found none; pass an int, a torch.device, several of them, 'all', or leave it out")
    for device in listed:
        if device != "all" or device is not devices:
            launch.check_device(device)


def _ordinals(devices: Any) -> list[int]:
    if devices == "all":
        import torch

        return list(range(torch.cuda.device_count()))
    return list(dict.fromkeys(launch.device_ordinal(device) for device in _listed(devices)))


def _listed(devices: Any) -> list[Any]:
    return list(devices) if isinstance(devices, list | tuple | set | range) else [devices]


def _bring(client: "KernelClient", turn: _Turn) -> KernelReadiness:
    began = time.perf_counter()
    try:
        assert turn.arch is not None
        if turn.device is None:
            return turn.done(began, client.obtain(turn.spec, turn.arch).tier)
        return turn.done(began, client.bring(turn.spec, turn.arch, turn.device)[1])
    except MlaprepError as error:
        return turn.done(began, None, error)


def _all_at_once(calls: Mapping[int, Callable[[], KernelReadiness]]) -> Iterator[tuple[int, KernelReadiness]]:
    """Outcomes as they come."""
    if len(calls) == 1:
        for place, call in calls.items():
            yield place, call()
        return
    if not calls:
        return
    pool = ThreadPoolExecutor(min(len(calls), MAX_THREADS), "mlaprep-ready")
    try:
        places = {pool.submit(call): place for place, call in calls.items()}
        for future in as_completed(places):
            yield places[future], future.result()
    finally:
        # On an interrupt those that have not begun are not begun.
        pool.shutdown(wait=True, cancel_futures=True)


def _is_capturing(device: int | None) -> bool:
    # Asked in the caller's thread: the stream that torch works on is a thread's own.
    return device is not None and launch.cuda_driver().is_capturing(device)
