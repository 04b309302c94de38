"""Serving: which loaded kernel serves a spec on a device, and what is known of those that could not be had."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal

from mlaprep.clients.building import Obtained
from mlaprep.clients.errors import ArtifactRejected, DriverError, KernelNotReady, KernelUnavailable
from mlaprep.clients.misses import MissReporter
from mlaprep.clients.outlook import Outlook, known
from mlaprep.clients.specialise import Specialisations
from mlaprep.clients.stats import FallbackReason, Tally, Tier, reason_of
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec

if TYPE_CHECKING:
    from mlaprep.clients.handle import KernelHandle
    from mlaprep.clients.launch import KernelDriver

OnMiss = Literal["compile", "fallback", "error"]
OnColdCapture = Literal["error", "chain"]

_log: Final = logging.getLogger(__name__)


class Serving:
    """Handles by spec and device, each loaded once. Its look-up of what is known takes no lock and does no I/O.

    Args:
        obtain: brings a verified kernel; raises KernelUnavailable or ArtifactRejected.
        tally, misses: where calls that go without, and what could not be had, are told.
        on_miss, on_cold_capture: as for :class:`~mlaprep.clients.client.KernelClient`.
        specialisations: the kernels with strides compiled in that may be asked for.
    """

    def __init__(
        self,
        obtain: Callable[[KernelSpec, Arch], Obtained],
        tally: Tally,
        misses: MissReporter,
        *,
        on_miss: OnMiss,
        on_cold_capture: OnColdCapture,
        specialisations: Specialisations,
    ) -> None:
        self._obtain = obtain
        self._tally = tally
        self._misses = misses
        self._on_miss = on_miss
        self._on_cold_capture = on_cold_capture
        self.specialisations: Final = specialisations
        self.forget()

    def forget(self) -> None:
        """Back to no handle."""
        self._serving: dict[tuple[KernelSpec, int], KernelHandle | None] = {}
        self._refusals: dict[tuple[KernelSpec, int], FallbackReason] = {}
        self._handles: dict[tuple[KernelSpec, Arch], KernelHandle] = {}
        self.specialisations.forget()

    def made(self, spec: KernelSpec, obtained: Obtained, driver: "KernelDriver | None" = None) -> "KernelHandle":
        """A handle of a kernel that was brought for ``spec``, loaded on no device yet."""
        from mlaprep.clients.handle import KernelHandle

        return KernelHandle(obtained.artifact, driver, tier=obtained.tier, on_loaded=self._loaded, spec=spec)

    def bring(self, spec: KernelSpec, arch: Arch, device: int) -> "tuple[KernelHandle, Tier | Literal['loaded']]":
        """A kernel loaded on a device of its architecture, and the place that had it.

        Raises:
            KernelUnavailable, ArtifactRejected, DriverError, KernelNotReady: as ``KernelClient.load`` does.
        """
        from mlaprep.clients.launch import cuda_driver

        handle = self._serving.get((spec, device))
        if handle is not None:
            return handle, "loaded"
        # Threads that come first together get one handle, and a handle loads its module once a device.
        obtained = self._obtain(spec, arch)
        handle = self._handles.get((spec, arch))
        if handle is None:
            handle = self._handles.setdefault((spec, arch), self.made(spec, obtained, cuda_driver()))
        if handle.artifact.digest != obtained.artifact.digest:  # revoked since, so another build serves
            handle = self._handles[spec, arch] = self.made(spec, obtained, cuda_driver())
        handle = handle.load(device)
        self._serving[spec, device] = handle
        return handle, obtained.tier

    def is_loaded(self, spec: KernelSpec, device: int) -> bool:
        return self._serving.get((spec, device)) is not None

    def handle(self, spec: KernelSpec, device: int, general: KernelSpec | None = None) -> "KernelHandle | None":
        """See ``KernelClient.serving_handle``."""
        if general is not None and general != spec:
            if self.chosen(spec, device, general) == spec:
                handle = self._specialised(spec, device, general)
                if handle is not None:
                    return handle
            elif not self.specialisations.has_room_for(spec):
                self._misses.refused(spec, device)
            spec = general
        try:
            handle = self._serving[spec, device]
        except KeyError:
            return self._first(spec, device)
        if handle is None:
            self._tally.fall_back(self._refusals.get((spec, device), "no-kernel"))
        return handle

    def chosen(self, spec: KernelSpec, device: int, general: KernelSpec | None = None) -> KernelSpec:
        """Which of two specs :meth:`handle` would take, the first one's kernel being had."""
        if general is None or general == spec:
            return spec
        if (spec, device) in self._serving:
            return general if self._serving[spec, device] is None else spec
        if not self.specialisations.has_room_for(spec):
            return general
        try:
            # Nothing is loaded during a capture, and the general kernel is the one that is loaded ahead.
            return general if is_capturing(device) else spec
        except DriverError:
            return spec

    def known(self, spec: KernelSpec, device: int) -> Outlook | None:
        """What was found of a kernel that was asked for; None for one that was not."""
        try:
            handle = self._serving[spec, device]
        except KeyError:
            return None
        return known(handle, self._refusals.get((spec, device), "no-kernel"))

    def _specialised(self, spec: KernelSpec, device: int, general: KernelSpec) -> "KernelHandle | None":
        loaded = self._serving.get((spec, device))
        if loaded is not None:
            return loaded
        if not self.specialisations.admit(spec):
            return None
        try:
            return self._first(spec, device, quiet=True)
        except (KernelUnavailable, ArtifactRejected, DriverError) as error:
            _log.info("no kernel with strides compiled in, so %s serves: %s", general.variant_id, error)
            return self._serving.setdefault((spec, device), None)

    def _first(self, spec: KernelSpec, device: int, quiet: bool = False) -> "KernelHandle | None":
        try:
            if is_capturing(device):
                if self._on_cold_capture == "chain":
                    # Not remembered: the graph keeps the chain, and calls after the capture get their kernel.
                    found = f"{spec.variant_id} is not loaded on device {device}"
                    self._tally.fall_back("cold-capture", found, (spec, device))
                    return None
                self._tally.fall_back("cold-capture")
                raise KernelNotReady(
                    f"asked for {spec.variant_id} on device {device} for the first time while its stream is being "
                    "captured; load it before the capture: client.ensure_ready(...), or client.load(spec, device=...)"
                )
            return self.bring(spec, arch_of(spec, device), device)[0]
        except (KernelUnavailable, ArtifactRejected, DriverError) as error:
            if quiet or self._on_miss == "error":
                raise
            reason = self._refusals.setdefault((spec, device), reason_of(error))
            found = f"{error}; for every call of this shape until it is loaded"
            self._tally.fall_back(reason, found, (spec, device))
            return self._serving.setdefault((spec, device), None)

    def _loaded(self, handle: "KernelHandle", device: int, ms: float) -> None:
        self._tally.load(ms)
        name = handle.spec.variant_id
        _log.info("loaded %s for %s on device %d from %s in %.1f ms", name, handle.arch, device, handle.tier, ms)


def arch_of(spec: KernelSpec, device: int) -> Arch:
    """The architecture that kernels for a device are built for.

    Raises:
        KernelUnavailable: there is none; ``spec`` is named.
        DriverError: no driver, or no such device.
    """
    from mlaprep.clients.launch import cuda_driver

    own = Arch.for_device(cuda_driver().capability(device))
    if own is None:
        raise KernelUnavailable(
            f"no kernel {spec.variant_id} for device {device}: none is built for its compute capability. "
            "Use the unfused chain (mlaprep.clients.prepare does), or name an arch that the device can run",
            variant_id=spec.variant_id,
        )
    return own


def is_capturing(device: int) -> bool:
    """Whether torch's current stream of a device is being captured. Raises DriverError without a driver."""
    from mlaprep.clients.launch import cuda_driver

    return cuda_driver().is_capturing(device)
