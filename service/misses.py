"""Misses: which kernels workers asked for and lacked, counted, bounded, and kept over a restart."""

import contextlib
import heapq
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, Protocol, get_args

from mlaprep.kernels_cache.files import TEMPORARY, Folder, new_name
from mlaprep.kernels_cache.locks import LOCKS, file_lock
from mlaprep.kernels_cache.strict_json import parse_strict
from mlaprep.service.job_store import LATEST
from mlaprep.templates.arch import Arch
from mlaprep.templates.errors import SpecError
from mlaprep.templates.spec import KernelSpec, parse_variant_id

MissReason = Literal["built", "compiled", "unavailable", "rejected", "refused"]
"""What a worker met: the service had to build it, the worker compiled it itself, no place had it, what was found
was not the kernel asked for, or the process had too many specialisations to ask for one more."""

MISS_REASONS: Final[tuple[MissReason, ...]] = get_args(MissReason)
MAX_MISSES: Final = 10_000
"""Kernels remembered; those that were lacking longest ago go first."""
MAX_COUNT: Final = 10_000
"""Times that one entry of a report may stand for."""

FILE: Final = "misses.json"
SAVE_S: Final = 5.0
"""Seconds that a report may wait for the disk: what a killed process can lose."""
NEW_AT_ONCE: Final = 2_000
NEW_PER_S: Final = 2.0
"""Kernels not known yet that are taken at once, and each second after that: a flood of made-up ones takes an hour to
push out those that workers do ask for. Kernels that are known are always counted."""

_SCHEMA: Final = 1
_MAX_FILE_BYTES: Final = 16 * 2**20
MOST: Final = 2**53 - 1
_LOCK_TIMEOUT_S: Final = 2.0

_log = logging.getLogger(__name__)

Order = Literal["count", "last_seen"]
ORDERS: Final[tuple[Order, ...]] = get_args(Order)
Name = tuple[str, str]
"""Variant id and architecture."""
Place = tuple[int, int, str, str]
"""Where a miss stands in a listing: two numbers, the larger first, then its name."""


@dataclass(frozen=True, slots=True)
class Miss:
    """A kernel that was lacking: how often in all and by reason, and when first and last, in Unix seconds."""

    count: int
    reasons: Mapping[MissReason, int]
    first_seen: int
    last_seen: int

    def plus(self, other: "Miss") -> "Miss":
        """Both together."""
        reasons = {
            reason: min(MOST, self.reasons.get(reason, 0) + other.reasons.get(reason, 0))
            for reason in MISS_REASONS
            if reason in self.reasons or reason in other.reasons
        }
        return Miss(
            min(MOST, self.count + other.count),
            reasons,
            min(self.first_seen, other.first_seen),
            max(self.last_seen, other.last_seen),
        )


@dataclass(frozen=True, slots=True)
class MissReport:
    """One entry of a worker's report."""

    spec: KernelSpec
    arch: Arch
    count: int
    reason: MissReason


@dataclass(frozen=True, slots=True)
class MissPage:
    """Some misses in order, how many there are from the cursor on, and the place of the last where more follow."""

    misses: tuple[tuple[KernelSpec, Arch, Miss], ...]
    total: int
    next: Place | None


class MissExchange(Protocol):
    """Where replicas tell each other of misses."""

    def tell(self, new: Mapping[Name, Miss]) -> Collection[Name]:
        """Add these to the sum over replicas; the names of those that are in it."""

    def known(self) -> Mapping[Name, Miss] | None:
        """The sum over replicas, the one seen longest ago first; None where it cannot be had."""


class Misses:
    """What workers lacked, of this process and of all others that share the directory, or the exchange.

    Each keeps what it was told in memory and adds it to one file, under a lock, at most every ``SAVE_S`` seconds.
    A file that cannot be read is no error: it is written anew. Without a directory, or with one that cannot be written,
    misses live as long as the process.

    Args:
        folder: where the file is kept; None keeps it nowhere.
        shared: lists show its sum in place of the file's, as long as it can be had.
        clock: Unix seconds.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        shared: MissExchange | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._shared = shared
        self._untold: dict[Name, Miss] = {}
        """What the exchange has not been told yet."""
        self._clock = clock
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._known: OrderedDict[Name, Miss] = OrderedDict()
        """As of the file; the one seen longest ago comes first."""
        self._new: dict[Name, Miss] = {}
        """What is not in the file yet."""
        self._stamp: tuple[int, int, int] | None = None
        self._timer: threading.Timer | None = None
        self._closed = False
        self._warned = False
        self._allowance = float(NEW_AT_ONCE)
        self._counted = time.monotonic()

    def record(self, reports: Iterable[MissReport]) -> tuple[int, int]:
        """Count a worker's report; how many entries were taken, and how many unknown kernels were too many."""
        self._refresh()
        now, taken, ignored = int(self._clock()), 0, 0
        with self._lock:
            for report in reports:
                name = (report.spec.variant_id, str(report.arch))
                unknown = name not in self._new and name not in self._known
                if unknown and (len(self._new) >= MAX_MISSES or not self._may_add()):
                    ignored += 1
                    continue
                miss = Miss(report.count, {report.reason: report.count}, now, now)
                for kept in (self._new, self._untold) if self._shared is not None else (self._new,):
                    kept[name] = kept[name].plus(miss) if name in kept else miss
                taken += 1
            if taken:
                self._save_later()
        return taken, ignored

    def page(self, order: Order, limit: int, arch: Arch | None = None, after: Place | None = None) -> MissPage:
        """The first misses in an order, the largest first, behind a place."""
        self._refresh()
        shared = None if self._shared is None else self._shared.known()
        with self._lock:
            merged = _merged(self._known, self._new) if shared is None else _merged(shared, self._untold)
        wanted = None if arch is None else str(arch)
        placed = ((place_of(name, miss, order), name) for name, miss in merged.items() if wanted in (None, name[1]))
        behind = [pair for pair in placed if after is None or pair[0] > after]
        found: list[tuple[KernelSpec, Arch, Miss]] = []
        first = heapq.nsmallest(limit, behind)
        for _, name in first:
            with contextlib.suppress(SpecError):  # of a release that knew more
                found.append((parse_variant_id(name[0]), Arch(name[1]), merged[name]))
        return MissPage(tuple(found), len(behind), first[-1][0] if len(behind) > len(first) else None)

    def save(self) -> None:
        """Add what is new to the file and to the exchange now. What cannot be written stays in memory."""
        with self._lock:
            self._timer = None
        self._write_new()
        self._tell()

    def _write_new(self) -> None:
        with self._saving:
            with self._lock:
                new = dict(self._new)
            if not new:
                return
            known = self._write(new)
            if known is None:
                return
            with self._lock:
                self._known = known
                # Reports went on meanwhile: only what was written is no longer new.
                self._new = {
                    name: left
                    for name, miss in self._new.items()
                    if (left := _without(miss, new.get(name))) is not None
                }

    def close(self) -> None:
        """Save, and take no timer any more."""
        with self._lock:
            self._closed = True
            timer = self._timer
        if timer is not None:
            timer.cancel()
        self.save()

    def _save_later(self) -> None:
        if self._timer is None and not self._closed:
            self._timer = threading.Timer(SAVE_S, self.save)
            self._timer.daemon = True
            self._timer.start()

    def _tell(self) -> None:
        with self._lock:
            untold = dict(self._untold)
        if self._shared is None or not untold:
            return
        told = self._shared.tell(untold)
        with self._lock:
            self._untold = {
                name: left
                for name, miss in self._untold.items()
                if (left := _without(miss, untold[name] if name in told else None)) is not None
            }
            if self._untold:
                self._save_later()

    def _may_add(self) -> bool:
        now = time.monotonic()
        self._allowance = min(float(NEW_AT_ONCE), self._allowance + (now - self._counted) * NEW_PER_S)
        self._counted = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True

    def _refresh(self) -> None:
        """Read the file where it is not the one that was read or written last."""
        if self._folder is None or not self._saving.acquire(blocking=False):
            return
        try:
            with Folder.at(self._folder) as root:
                stamp = _stamp(root)
                if stamp == self._stamp:
                    return
                known = _read(root)
            with self._lock:
                self._known, self._stamp = known, stamp
        except OSError:
            return
        finally:
            self._saving.release()

    def _write(self, new: Mapping[Name, Miss]) -> OrderedDict[Name, Miss] | None:
        """The file's misses and the new ones, written together; None where that is not possible."""
        folder = self._folder
        if folder is None:
            return _merged(self._known, new)
        try:
            with (
                file_lock(lambda: _locks(folder), FILE, _LOCK_TIMEOUT_S),
                Folder.at(folder) as root,
                root.make(TEMPORARY) as temporary,
            ):
                # Reading 10,000 misses takes 150 ms: only what another process wrote is read.
                known = _merged(self._known if _stamp(root) == self._stamp else _read(root), new)
                name = new_name("misses-")
                try:
                    temporary.write(name, _encode(known))
                    temporary.move(name, root, FILE)
                except OSError:
                    with contextlib.suppress(OSError):
                        temporary.remove(name)
                    raise
                self._stamp = _stamp(root)
        except OSError as error:
            if not self._warned:
                self._warned = True
                _log.warning("misses are kept in memory only, they cannot be written: %s", error.strerror)
            return None
        return known


def place_of(name: Name, miss: Miss, order: Order) -> Place:
    """Where a miss stands: by that number, then by the other, the largest first, then by name."""
    numbers = (miss.count, miss.last_seen) if order == "count" else (miss.last_seen, miss.count)
    return -numbers[0], -numbers[1], *name


def _merged(known: Mapping[Name, Miss], new: Mapping[Name, Miss]) -> OrderedDict[Name, Miss]:
    merged = OrderedDict(known)
    for name, miss in new.items():
        merged[name] = merged[name].plus(miss) if name in merged else miss
        merged.move_to_end(name)
    while len(merged) > MAX_MISSES:
        merged.popitem(last=False)
    return merged


def _without(miss: Miss, written: Miss | None) -> Miss | None:
    """What of a miss is left to write."""
    if written is None:
        return miss
    if miss.count <= written.count:
        return None
    reasons = {reason: count - written.reasons.get(reason, 0) for reason, count in miss.reasons.items()}
    left = {reason: count for reason, count in reasons.items() if count > 0}
    return replace(miss, count=miss.count - written.count, reasons=left)


def _locks(folder: Path) -> Folder:
    with Folder.at(folder) as root:
        return root.make(LOCKS)


def _stamp(root: Folder) -> tuple[int, int, int] | None:
    try:
        status = root.status(FILE)
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _encode(misses: Mapping[Name, Miss]) -> bytes:
    rows = [[*name, miss.first_seen, miss.last_seen, dict(miss.reasons)] for name, miss in misses.items()]
    return json.dumps({"schema": _SCHEMA, "misses": rows}, separators=(",", ":")).encode()


def _read(root: Folder) -> OrderedDict[Name, Miss]:
    """The file's misses, those that make sense; whatever else it holds is passed over."""
    try:
        document = parse_strict(root.read(FILE, _MAX_FILE_BYTES), max_bytes=_MAX_FILE_BYTES)
    except FileNotFoundError:
        return OrderedDict()
    except (OSError, ValueError) as error:
        _log.warning("the list of misses cannot be read and starts anew: %s", error)
        return OrderedDict()
    rows = document.get("misses") if isinstance(document, dict) and document.get("schema") == _SCHEMA else None
    found = (_row(row) for row in (rows if isinstance(rows, list) else [])[:MAX_MISSES])
    return OrderedDict(pair for pair in found if pair is not None)


def _row(row: Any) -> tuple[Name, Miss] | None:
    if not (isinstance(row, list) and len(row) == 5):
        return None
    variant_id, arch, first_seen, last_seen, reasons = row
    if not (isinstance(variant_id, str) and isinstance(arch, str) and isinstance(reasons, dict) and reasons):
        return None
    if not all(reason in MISS_REASONS and _is_count(count) for reason, count in reasons.items()):
        return None
    if not (_is_count(first_seen) and _is_count(last_seen) and max(first_seen, last_seen) <= LATEST):
        return None
    return (variant_id, arch), Miss(min(MOST, sum(reasons.values())), reasons, first_seen, last_seen)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST
