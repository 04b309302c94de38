"""MissReporter: tells the service what was asked for and lacking, in the background and in few words."""

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from typing import Any, Final, Literal

from mlaprep.clients.errors import DriverError, MlaprepError, ServiceRefused
from mlaprep.clients.rest import RestTransport
from mlaprep.clients.stats import Tally
from mlaprep.templates.arch import Arch
from mlaprep.templates.environment import read_switch
from mlaprep.templates.spec import KernelSpec

MissReason = Literal["built", "compiled", "unavailable", "rejected", "refused"]
"""What was met: the service had to build it, it was compiled on this machine, no place had it, what was found was not
the kernel asked for, or the process had too many specialisations to ask for one more."""

GATHER_S: Final = 2.0
"""Seconds from a miss to its report, so that those of one start go together."""
PAUSE_S: Final = 5.0
"""Seconds at least between two reports."""
TIMEOUT_S: Final = 3.0
"""Seconds that one report may take."""
SILENCE_S: Final = 300.0
"""Seconds for which a service that did not take a report is told nothing."""
EXIT_S: Final = 0.5
"""Seconds that the end of the process or of the client waits for what is still to be told."""
MAX_PENDING: Final = 1024
"""Different misses that wait; more are dropped."""
MAX_ENTRIES: Final = 128
"""Misses of one report; a service takes 256, and 64 KiB."""
MAX_COUNT: Final = 10_000

_log: Final = logging.getLogger(__name__)


class MissReporter:
    """Reports misses to ``POST /v1/misses``.

    :meth:`report` notes a miss and returns: no I/O, and no thread but for the first of a batch. One daemon thread
    gathers, sends and ends when nothing is left. A miss that cannot be told is dropped and counted, never an error,
    and a service that takes no report is left alone for ``SILENCE_S`` seconds. A forked child starts with nothing.

    Args:
        transport: the service; None reports to nobody.
        tally: where to count what was reported and dropped.
    """

    def __init__(self, transport: RestTransport | None, tally: Tally) -> None:
        self._transport = transport
        self._tally = tally
        self.forget()

    def forget(self) -> None:
        """Back to nothing, with a lock that nobody holds; a parent's thread is the parent's."""
        self._changed = threading.Condition()
        self._pending: dict[tuple[str, str, MissReason], int] = {}
        self._thread: threading.Thread | None = None
        self._ends_with_process = False
        self._refused: set[tuple[KernelSpec, int]] = set()
        self._closing = False
        self._told_at = float("-inf")
        self._silent_until = float("-inf")

    def report(self, spec: KernelSpec, arch: Arch, reason: MissReason) -> None:
        """Note a kernel that was asked for and lacking. Never raises, never waits for the service."""
        if self._transport is None:
            return
        key = (spec.variant_id, str(arch), reason)
        with self._changed:
            full = key not in self._pending and len(self._pending) >= MAX_PENDING
            if full or self._closing or time.monotonic() < self._silent_until or not self._runs():
                self._tally.add("misses_dropped")
                return
            self._pending[key] = min(MAX_COUNT, self._pending.get(key, 0) + 1)

    def refused(self, spec: KernelSpec, device: int) -> None:
        """Note, once, a specialisation that was one too many on a device. Never during a capture there."""
        from mlaprep.clients.launch import cuda_driver

        if (spec, device) in self._refused or len(self._refused) >= MAX_PENDING:
            return
        with contextlib.suppress(DriverError):
            driver = cuda_driver()
            arch = Arch.for_device(driver.capability(device))
            if arch is not None and not driver.is_capturing(device):
                self._refused.add((spec, device))
                self.report(spec, arch, "refused")

    def close(self) -> None:
        """Tell what is left, within ``EXIT_S`` seconds, and end the thread. A later miss starts a new one."""
        with self._changed:
            thread = self._thread
            self._closing = True
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(EXIT_S)
        with self._changed:
            self._closing = False
            self._drop_all()

    def _runs(self) -> bool:
        """Whether there is a thread, started if need be; none can be when the interpreter ends."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="mlaprep-misses", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
            if not self._ends_with_process:
                self._ends_with_process = True
                atexit.register(_close, weakref.ref(self))
        return True

    def _run(self) -> None:
        try:
            while (batch := self._gather()) is not None:
                self._send(batch)
        except Exception:  # a defect here must not show as a thread of the engine that died
            _log.debug("the report of misses ended early", exc_info=True)
            with self._changed:
                self._thread = None

    def _gather(self) -> dict[tuple[str, str, MissReason], int] | None:
        """The next batch, once it is due; None, and no thread any more, when nothing is left."""
        with self._changed:
            if not self._pending:
                self._thread = None
                return None
            due = max(time.monotonic() + GATHER_S, self._told_at + PAUSE_S)
            while not self._closing and (left := due - time.monotonic()) > 0:
                self._changed.wait(left)
            self._told_at = time.monotonic()
            keys = list(self._pending)[:MAX_ENTRIES]
            return {key: self._pending.pop(key) for key in keys}

    def _send(self, batch: dict[tuple[str, str, MissReason], int]) -> None:
        assert self._transport is not None
        entries: list[dict[str, Any]] = [
            {"variant_id": variant_id, "arch": arch, "count": count, "reason": reason}
            for (variant_id, arch, reason), count in batch.items()
        ]
        try:
            self._transport.post("/v1/misses", {"misses": entries}, EXIT_S if self._closing else TIMEOUT_S)
        except MlaprepError as error:
            what = "does not take" if isinstance(error, ServiceRefused) else "did not answer"
            _log.debug("the kernel service %s reports of misses; none for %.0f s: %s", what, SILENCE_S, error)
            with self._changed:
                self._silent_until = time.monotonic() + SILENCE_S
                self._tally.add("misses_dropped", sum(batch.values()))
                self._drop_all()
        else:
            self._tally.add("misses_reported", sum(batch.values()))

    def _drop_all(self) -> None:
        if self._pending:
            self._tally.add("misses_dropped", sum(self._pending.values()))
            self._pending.clear()


def reports_by_environment() -> bool:
    """Whether ``MLAPREP_REPORT_MISSES`` allows reports, as it does where it is not set. Raises SpecError for a word
    that is no switch."""
    return not os.environ.get("MLAPREP_REPORT_MISSES") or read_switch("MLAPREP_REPORT_MISSES", os.environ)


def _close(reference: "weakref.ref[MissReporter]") -> None:
    reporter = reference()
    if reporter is not None:
        reporter.close()
