"""ClientStats: what a client did in this process, counted away from the path of a call that launches."""

import dataclasses
import logging
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from mlaprep.clients.errors import ArtifactRejected, DriverError, MlaprepError

Tier = Literal["memory", "disk", "bundle", "service", "compiled"]
"""The place that had a kernel; ``compiled`` is this machine."""

FallbackReason = Literal[
    "disabled", "cpu", "uncovered", "no-kernel", "rejected", "no-driver", "driver-error", "cold-capture"
]
"""Why a call did not take the kernel."""

TIERS: Final[tuple[Tier, ...]] = get_args(Tier)
MAX_TOLD: Final = 256
"""Fallback decisions that are logged; a process with more of them logs no others."""
FALLBACK_REASONS: Final[tuple[FallbackReason, ...]] = get_args(FallbackReason)

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Milliseconds that a driver took to load modules, one load a kernel and device."""

    count: int = 0
    total_ms: float = 0.0
    max_ms: float = 0.0
    last_ms: float = 0.0


def _none_yet() -> dict[FallbackReason, int]:
    return dict.fromkeys(FALLBACK_REASONS, 0)


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Counts since the client was made, or since the fork that made this process. The first five are kernels by
    the place that had them."""

    memory: int = 0
    disk: int = 0
    bundle: int = 0
    service: int = 0
    compiled: int = 0
    unavailable: int = 0
    """Kernels that no place had."""
    rejected: int = 0
    """Entries and replies that were not the kernel asked for."""
    service_errors: int = 0
    """Fetches that the service did not answer with a kernel."""
    fallbacks: Mapping[FallbackReason, int] = field(default_factory=_none_yet)
    """Calls that did not take the kernel, by reason; every reason is there."""
    loads: LoadTimes = LoadTimes()
    specialisations: int = 0
    """Kernels with strides compiled in that ``prepare`` asked for."""
    specialisation_limit: int = 0
    """How many it may; beyond them strides are passed at launch."""
    layouts: int = 0
    """Layouts whose launch is remembered."""
    launches: int = 0
    """Calls that were launched from what is remembered."""
    verified: int = 0
    """Calls whose bytes were compared with the chain's and were the same."""
    verify_failures: int = 0
    """Calls whose bytes differed."""
    unverified: int = 0
    """Calls under ``MLAPREP_VERIFY`` that were not compared, since their stream was being captured."""
    misses_reported: int = 0
    """Kernels that the service was told to have been lacking."""
    misses_dropped: int = 0
    """Those it could not be told of: it was dead, slow or refused to hear."""

    @property
    def hits(self) -> int:
        """Kernels that were had without compiling here."""
        return self.memory + self.disk + self.bundle + self.service

    def to_dict(self) -> dict[str, Any]:
        """Every count by name, as JSON values."""
        document = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return document | {"fallbacks": dict(self.fallbacks), "loads": dataclasses.asdict(self.loads)}


class Tally:
    """Counts as they come. Its lock is taken where a kernel is looked for, loaded or gone without, never where a
    remembered launch is repeated."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Back to nothing, with a lock that nobody holds."""
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._fallbacks = _none_yet()
        self._loads = LoadTimes()
        self._told: set[Hashable] = set()

    def add(self, name: str, count: int = 1) -> None:
        """Count under the name of a field of :class:`ClientStats`."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + count

    def fall_back(self, reason: FallbackReason, found: str = "", decision: Hashable = None) -> None:
        """Count a call that did not take the kernel; what was ``found`` is logged where ``decision`` is a new one."""
        with self._lock:
            self._fallbacks[reason] += 1
            known = not found or (reason, decision) in self._told or len(self._told) >= MAX_TOLD
            if not known:
                self._told.add((reason, decision))
        if not known:
            level = logging.INFO if reason in ("disabled", "cpu") else logging.WARNING
            _log.log(level, "taking the unfused chain (%s): %s", reason, found)

    def load(self, ms: float) -> None:
        """Count a module loaded on a device."""
        with self._lock:
            before = self._loads
            self._loads = LoadTimes(before.count + 1, before.total_ms + ms, max(before.max_ms, ms), ms)

    def stats(self, **more: Any) -> ClientStats:
        """Counts so far, and ``more`` fields that are looked up rather than counted."""
        with self._lock:
            return ClientStats(**self._counts, fallbacks=dict(self._fallbacks), loads=self._loads, **more)


def reason_of(error: MlaprepError) -> FallbackReason:
    """Why a call goes without its kernel, by the error that kept it from being had."""
    if isinstance(error, ArtifactRejected):
        return "rejected"
    if isinstance(error, DriverError):
        return "no-driver" if error.code is None else "driver-error"
    return "no-kernel"
