"""RevokedKernels: what a worker must not load any more, learned from its service and kept beside its kernels."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from mlaprep.clients.errors import ArtifactRejected, MlaprepError, ServiceRefused
from mlaprep.clients.rest import RestTransport
from mlaprep.kernels_cache.artifact import KernelArtifact, Manifest
from mlaprep.kernels_cache.revocation import Revocation, Revocations, revocations_digest
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec

REFRESH_S: Final = 60.0
"""Seconds for which a list that was had from the service will do."""
WAIT_S: Final = 0.25
"""Seconds that the first kernel of a process which is at hand already waits for the service's list."""
TIMEOUT_S: Final = 3.0
SILENCE_S: Final = 300.0
"""Seconds for which a service that has no such list, as one of an older release, is not asked."""

_log: Final = logging.getLogger(__name__)


class RevokedKernels:
    """Revocations of the local store, kept up with those of the service.

    The service is asked in a thread of its own, when a kernel is wanted and the list is ``REFRESH_S`` old. Only the
    first kernel of a process waits for the answer, for ``WAIT_S`` at most. Without a service, or without its answer,
    what is known from before holds.

    Args:
        open_revocations: opens those of the local store, on first use.
        transport: the service, or None.
    """

    def __init__(self, open_revocations: Callable[[], Revocations], transport: RestTransport | None) -> None:
        self._open = open_revocations
        self._transport = transport
        self.forget()

    def forget(self) -> None:
        """Back to nothing, with a lock that nobody holds; a parent's thread is the parent's."""
        self._lock = threading.Lock()
        self._known: Revocations | None = None
        self._answered = threading.Event()
        self._asking = False
        self._waited = False
        self._due = float("-inf")
        self._tag = ""
        self._told: set[str] = set()

    def learn(self, *, again: bool = False) -> None:
        """Have the service asked if that is due, or in any case; returns at once. Never raises."""
        if self._transport is None:
            return
        with self._lock:
            if self._asking or (time.monotonic() < self._due and not again):
                return
            thread = threading.Thread(target=self._ask, args=(self._transport,), name="mlaprep-revoked", daemon=True)
            self._answered.clear()
            try:
                thread.start()
            except RuntimeError:  # the interpreter ends, or there are no threads left
                self._answered.set()
                return
            self._asking = True

    def of(self, manifest: Manifest) -> Revocation | None:
        """What revokes a kernel, as far as is known; asks and waits for nobody."""
        return self._revocations().of(manifest)

    def named(self, spec: KernelSpec, arch: Arch) -> str:
        """What is revoked of a kernel's builds, in words, "" where nothing is: for messages that tell of no kernel."""
        name = (spec.variant_id, str(arch))
        found = [each for each in self._revocations().list() if (each.variant_id, each.arch) == name]
        return f"a build of it is {found[-1]}" if found else ""

    def refusal(self, artifact: KernelArtifact, place: str, *, fresh: bool = False) -> str:
        """Why a kernel that is at hand must not be used, "" where it may; logged once a kernel.

        ``fresh``: it was given out or compiled just now. Nobody is waited for then, but before it is refused the
        service is asked anew: it may have lifted what it told before.
        """
        if not (self._transport is None or self._waited or fresh):
            self._answered.wait(WAIT_S)
            self._waited = True
        found = self._revocations().of(artifact.manifest)
        if found is not None and fresh and found.origin:
            self.learn(again=True)
            self._answered.wait(WAIT_S)
            found = self._revocations().of(artifact.manifest)
        if found is None:
            return ""
        name = f"{artifact.manifest.variant_id} for {artifact.manifest.arch}"
        if artifact.key not in self._told:
            self._told.add(artifact.key)
            _log.warning("revoked kernel: %s has %s, %s; it is not loaded", place, name, found)
        return f"{place}: {name} is {found}"

    def _revocations(self) -> Revocations:
        with self._lock:
            if self._known is None:
                self._known = self._open()
            return self._known

    def _ask(self, transport: RestTransport) -> None:
        pause = REFRESH_S
        try:
            known = self._revocations()
            ours = [each for each in known.list() if each.origin == transport.url]
            reply = transport.revocations(self._tag or revocations_digest(ours), TIMEOUT_S)
            if reply is not None:
                told = _read(reply, transport.url)
                new = known.adopt(transport.url, told)
                self._tag = revocations_digest(told)
                if new:
                    _log.warning(
                        "revoked kernels: %d new ones, told by %s; what is loaded stays until this process ends",
                        len(new),
                        transport.url,
                    )
        except MlaprepError as error:
            pause = SILENCE_S if isinstance(error, ServiceRefused | ArtifactRejected) else REFRESH_S
            _log.debug("the kernel service told of no revocations; asked again in %.0f s: %s", pause, error)
        except Exception:  # a defect here must not show as a thread of the engine that died
            _log.debug("revocations were not learned", exc_info=True)
        finally:
            with self._lock:
                self._due = time.monotonic() + pause
                self._asking = False
            self._answered.set()


def _read(reply: Any, origin: str) -> list[Revocation]:
    """A service's list. Raises ArtifactRejected for anything else: half a list would lift what is in the other half."""
    try:
        return [Revocation.from_dict(document, origin) for document in reply["revocations"]]
    except (TypeError, KeyError, ValueError):
        raise ArtifactRejected(f"{origin} sent no list of revocations; is it an mlaprep service?") from None
