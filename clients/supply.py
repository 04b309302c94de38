"""KernelSupply: a kernel from the nearest place that has it: process memory, local store, bundles, service, compile."""

import contextlib
import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Final

from mlaprep.clients.building import KernelBuilder, Obtained
from mlaprep.clients.bundles import Bundles
from mlaprep.clients.errors import ArtifactRejected, KernelUnavailable, MlaprepError, ServiceError
from mlaprep.clients.misses import MissReason
from mlaprep.clients.rest import RestTransport
from mlaprep.clients.revoked import RevokedKernels
from mlaprep.clients.stats import Tally, Tier
from mlaprep.clients.tracing import span
from mlaprep.kernels_cache.artifact import KernelArtifact, Manifest
from mlaprep.kernels_cache.errors import ArtifactError
from mlaprep.kernels_cache.key import request_key
from mlaprep.kernels_cache.opening import folder_of
from mlaprep.kernels_cache.origin import find_own, require_own
from mlaprep.kernels_cache.revocation import Revocations
from mlaprep.kernels_cache.store import KernelStore, MemoryStore
from mlaprep.kernels_cache.trust import UNTRUSTED, TrustedKeys
from mlaprep.templates.arch import Arch
from mlaprep.templates.errors import SpecError
from mlaprep.templates.render import check_target, render, templates_fingerprint
from mlaprep.templates.spec import KernelSpec

MEMORY_ARTIFACTS: Final = 512
LOCK_TIMEOUT_S: Final = 40.0
"""Seconds for which another process that brings the same kernel is waited for: a service's deadline and a compile."""

_SIGNING_ADVICE: Final = "; pin the key that the service signs with (MLAPREP_TRUSTED_KEYS), or have it sign"

_log: Final = logging.getLogger(__name__)


class KernelSupply:
    """Finds, fetches or builds verified kernels; a place further away fills the nearer ones.

    One kernel is brought once however many threads ask for it; processes that share the store take turns.

    Args:
        open_store: opens the local store, on first use.
        transport: the service, or None.
        open_builder: opens what compiles here; None where a miss is not to be compiled.
        no_service: why ``transport`` is None, for error messages.
        tally: where to count; by default a tally of its own.
        trusted_keys: a kernel that none of them signed is refused, from wherever it comes; all are taken where
            this is None. What is compiled here is ours: it is used, and since nobody signed it, kept in memory only.
        on_miss: told of each kernel that was built in no place, and what came of it.
        bundles: archives to look in below the local store; what is had from them is not copied there.
    """

    _lock: threading.Lock
    _memory: OrderedDict[tuple[KernelSpec, Arch], KernelArtifact]
    _flights: "dict[tuple[KernelSpec, Arch], Future[Obtained]]"
    _store: KernelStore | None
    _builder: KernelBuilder | None

    def __init__(
        self,
        open_store: Callable[[], KernelStore],
        transport: RestTransport | None,
        open_builder: Callable[[KernelStore], KernelBuilder] | None,
        *,
        no_service: str = "no service is configured",
        tally: Tally | None = None,
        trusted_keys: TrustedKeys | None = None,
        on_miss: Callable[[KernelSpec, Arch, MissReason], None] = lambda spec, arch, reason: None,
        bundles: Bundles | None = None,
    ) -> None:
        self._open_store = open_store
        self._transport = transport
        self._open_builder = open_builder
        self._no_service = no_service
        self.tally = tally or Tally()
        self._trusted_keys = trusted_keys
        self._on_miss = on_miss
        self.bundles = bundles or Bundles()
        self._revoked = RevokedKernels(lambda: Revocations(folder_of(self.store)), transport)
        self.forget()

    def forget(self) -> None:
        """Back to the configuration alone; what a parent process still uses is left to it."""
        self._lock = threading.Lock()
        self._memory = OrderedDict()
        self._flights = {}
        self.tally.forget()
        self._store = None
        self._builder = None
        self._revoked.forget()

    @property
    def store(self) -> KernelStore:
        """Where kernels are kept on this machine, opened on first use."""
        with self._lock:
            if self._store is None:
                self._store = self._open_store()
            return self._store

    def obtain(self, spec: KernelSpec, arch: Arch) -> Obtained:
        """The verified kernel of ``spec`` for ``arch``, and where it came from.

        Raises as :meth:`mlaprep.clients.client.KernelClient.obtain` does.
        """
        key = (spec, arch)
        while True:
            with self._lock:
                known = self._memory.get(key)
                if known is not None:
                    self._memory.move_to_end(key)
            if known is not None:
                self._revoked.learn()
                if not self._revoked.refusal(known, "memory"):
                    return self._count("memory", known, cached=True)
            with self._lock:
                if known is not None and self._memory.get(key) is known:
                    del self._memory[key]
                flight = self._flights.get(key)
                leads = flight is None
                if flight is None:
                    flight = self._flights[key] = Future()
            if leads:
                return self._lead(key, flight)
            with contextlib.suppress(CancelledError):  # the leader was interrupted: ask again
                return self._count("memory", flight.result().artifact, cached=True)

    def nearest(self, spec: KernelSpec, arch: Arch, *, store_exists: bool = True) -> Tier | None:
        """The first place that has the kernel, or that would be asked for it next; None where all there are lack it.

        Looks at memory, at the local store's links and the bundles' indices, reads no kernel and asks nobody. Where
        ``store_exists`` is false, a store that is not open is not opened, which would make it.
        """
        with self._lock:
            if (spec, arch) in self._memory:
                return "memory"
        if store_exists or self._store is not None:
            request = request_key(arch=str(arch), spec=spec.to_dict(), generator=templates_fingerprint())
            if self.store.resolve(request) is not None:
                return "disk"
        if self.bundles.paths and (spec.variant_id, str(arch)) in self.bundles.names():
            return "bundle"
        if self._transport is not None:
            return "service"
        return "compiled" if self._open_builder is not None else None

    def close(self) -> None:
        """End connections and compile processes."""
        with self._lock:
            builder, self._builder = self._builder, None
        if builder is not None:
            builder.close()
        if self._transport is not None:
            self._transport.close()

    def _lead(self, key: tuple[KernelSpec, Arch], flight: "Future[Obtained]") -> Obtained:
        try:
            with span("obtain", *key) as note:
                obtained = self._walk(*key)
                note("tier", obtained.tier)
        except Exception as error:
            self._land(key)
            flight.set_exception(error)
            raise
        except BaseException:
            self._land(key)
            flight.cancel()
            raise
        self._land(key, obtained.artifact)
        flight.set_result(obtained)
        return obtained

    def _land(self, key: tuple[KernelSpec, Arch], artifact: KernelArtifact | None = None) -> None:
        with self._lock:
            self._flights.pop(key, None)
            if artifact is not None:
                self._memory[key] = artifact
                while len(self._memory) > MEMORY_ARTIFACTS:
                    self._memory.popitem(last=False)

    def _walk(self, spec: KernelSpec, arch: Arch) -> Obtained:
        check_target(spec, arch)
        request = request_key(arch=str(arch), spec=spec.to_dict(), generator=templates_fingerprint())
        refusals: list[ArtifactRejected] = []
        troubles: list[str] = []
        self._revoked.learn()
        linked = self.store.resolve(request)
        if (artifact := self._from_store(linked, spec, arch, refusals, troubles)) is not None:
            return self._count("disk", artifact, cached=True)
        if (artifact := self._from_bundles(spec, arch, refusals, troubles)) is not None:
            return self._count("bundle", artifact, cached=True)
        render(spec)  # while another process may be bringing the kernel, not after
        while (obtained := self._bring(request, linked, spec, arch, refusals, troubles)) is None:
            linked = self.store.resolve(request)
            if (artifact := self._from_store(linked, spec, arch, refusals, troubles)) is not None:
                return self._count("disk", artifact, cached=True)
        return obtained

    def _bring(
        self,
        request: str,
        linked: str | None,
        spec: KernelSpec,
        arch: Arch,
        refusals: list[ArtifactRejected],
        troubles: list[str],
    ) -> Obtained | None:
        """The kernel from further away, by one process at a time; None where another has linked one meanwhile."""

        def linked_anew() -> bool:
            return self.store.resolve(request) not in (None, linked)

        # Eight ranks wait for one: what they wait for is the link, and they read and verify side by side.
        with self.store.key_lock(request, LOCK_TIMEOUT_S, unless=linked_anew):
            if linked_anew():
                return None
            if (artifact := self._from_store(linked, spec, arch, refusals, troubles)) is not None:
                return self._count("disk", artifact, cached=True)
            cause: MlaprepError | None = refusals[-1] if refusals else None
            attempts = [*dict.fromkeys([*map(str, refusals), *troubles])] or ["not in the local store"]
            try:
                if (obtained := self._from_service(spec, arch, attempts)) is not None:
                    self._keep(request, obtained.artifact)
                    if not obtained.cached:
                        self._on_miss(spec, arch, "built")
                    return obtained
            except ArtifactRejected as error:
                attempts.append(str(error))
                cause = error
            if self._open_builder is None:
                attempts.append("not to be compiled here")
            else:
                try:
                    obtained = self._compile(spec, arch, self._open_builder)
                except SpecError:
                    raise
                except MlaprepError as error:
                    attempts.append(str(error).partition("\n")[0])
                    cause = error
                else:
                    if self._trusted_keys is None:
                        self.store.link(request, obtained.artifact.key)  # found by the builder where the link was lost
                    if not obtained.cached:
                        self._on_miss(spec, arch, "compiled")
                    return obtained
            # Reads every manifest, so only before giving up.
            check = functools.partial(self._require_usable, place="local store", refusals=refusals)
            if (artifact := find_own(self.store, render(spec), str(arch), check)) is not None:
                self.store.link(request, artifact.key)
                return self._count("disk", artifact, cached=True)
            if cause is None and refusals:
                cause = refusals[-1]
                attempts.append(str(cause))
        if (told := self._revoked.named(spec, arch)) and not any("revoked" in attempt for attempt in attempts):
            attempts.append(told)
        self.tally.add("unavailable")
        self._on_miss(spec, arch, "rejected" if isinstance(cause, ArtifactRejected) else "unavailable")
        if isinstance(cause, ArtifactRejected):
            raise ArtifactRejected("; ".join(attempts), reason=cause.reason) from cause.__cause__
        raise KernelUnavailable(
            f"no kernel {spec.variant_id} for {arch}: {'; '.join(attempts)}. Build it ahead with "
            f"`mlaprep compile --variant {spec.variant_id} --arch {arch}`, or set MLAPREP_URL to a service that has it",
            variant_id=spec.variant_id,
            arch=str(arch),
            attempts=attempts,
        ) from cause

    def _require_trusted(self, manifest: Manifest, place: str, refusals: list[ArtifactRejected]) -> None:
        """Raises ArtifactError for what no pinned key vouches for, and tells it in ``refusals``."""
        try:
            if self._trusted_keys is not None:
                self._trusted_keys.require(manifest)
        except ArtifactError as error:
            refusals.append(ArtifactRejected(f"{place}: {error}", reason=error.reason))
            raise

    def _require_usable(self, manifest: Manifest, place: str, refusals: list[ArtifactRejected]) -> None:
        """Raises ArtifactError as :meth:`_require_trusted` does, or for a kernel that is revoked."""
        if (revoked := self._revoked.of(manifest)) is not None:
            raise ArtifactError("revoked", f"{manifest.variant_id} is {revoked}")
        self._require_trusted(manifest, place, refusals)

    def _from_store(
        self, key: str | None, spec: KernelSpec, arch: Arch, refusals: list[ArtifactRejected], troubles: list[str]
    ) -> KernelArtifact | None:
        """The kernel that a link leads to; one that no pinned key vouches for is told in ``refusals``, one that is
        revoked in ``troubles``, and it is removed."""
        store = self.store
        artifact = None if key is None else store.get(key)
        if artifact is None:
            return None
        try:
            require_own(artifact, render(spec), str(arch), key=key)
            self._require_trusted(artifact.manifest, "local store", refusals)
        except ArtifactError as error:
            # The link is a hint that anybody may have written; the entry is for something else.
            _log.warning("local store: the entry for %s on %s was refused: %s", spec.variant_id, arch, error)
            self.tally.add("rejected")
            return None
        if self._refused(artifact, "local store", troubles):
            store.delete(artifact.key)
            return None
        return artifact

    def _refused(self, artifact: KernelArtifact, place: str, troubles: list[str], *, fresh: bool = False) -> bool:
        """Whether a kernel is revoked, which ``troubles`` is told."""
        if told := self._revoked.refusal(artifact, place, fresh=fresh):
            self.tally.add("rejected")
            troubles.append(told)
        return bool(told)

    def _from_bundles(
        self, spec: KernelSpec, arch: Arch, refusals: list[ArtifactRejected], troubles: list[str]
    ) -> KernelArtifact | None:
        """The first that is this release's and trusted, among the archives' kernels of the spec."""
        for artifact in self.bundles.find(spec.variant_id, str(arch), troubles):
            try:
                require_own(artifact, render(spec), str(arch))
                self._require_trusted(artifact.manifest, "bundle", refusals)
            except ArtifactError as error:
                if error.reason not in UNTRUSTED:
                    troubles.append(f"bundle: {error}")
                _log.warning("bundle: the kernel %s for %s was refused: %s", spec.variant_id, arch, error)
                self.tally.add("rejected")
            else:
                if not self._refused(artifact, "bundle", troubles):
                    return artifact
        return None

    def _from_service(self, spec: KernelSpec, arch: Arch, attempts: list[str]) -> Obtained | None:
        if self._transport is None:
            attempts.append(self._no_service)
            return None
        try:
            with span("fetch", spec, arch, tier="service"):
                reply = self._transport.fetch_reply(spec, arch)
            self._require_trusted_reply(self._transport, reply.artifact.manifest)
        except ServiceError as error:
            _log.warning("kernel service: %s", error)
            attempts.append(str(error))
            self.tally.add("service_errors")
            return None
        except ArtifactRejected as error:
            _log.error("kernel service: %s", error)
            self.tally.add("rejected")
            raise
        if self._refused(reply.artifact, f"kernel service {self._transport.url}", attempts, fresh=True):
            return None
        return self._count("service", reply.artifact, cached=reply.cached)

    def _require_trusted_reply(self, transport: RestTransport, manifest: Manifest) -> None:
        try:
            if self._trusted_keys is not None:
                self._trusted_keys.require(manifest)
        except ArtifactError as error:
            told = f"{transport.url} sent a kernel that is not trusted: {error}{_SIGNING_ADVICE}"
            raise ArtifactRejected(told, reason=error.reason) from error

    def _compile(self, spec: KernelSpec, arch: Arch, open_builder: Callable[[KernelStore], KernelBuilder]) -> Obtained:
        # With keys pinned the builder must neither believe nor fill a store of unsigned kernels.
        store = self.store if self._trusted_keys is None else MemoryStore()
        with self._lock:
            if self._builder is None:
                self._builder = open_builder(store)
            builder = self._builder
        with span("compile", spec, arch, tier="compiled"):
            built = builder.get_or_compile(spec, arch)
        try:
            require_own(built.artifact, render(spec), str(arch))
        except ArtifactError as error:
            raise ArtifactRejected(f"compiled here: {error}", reason=error.reason) from error
        if told := self._revoked.refusal(built.artifact, "compiled here", fresh=True):
            raise KernelUnavailable(told, variant_id=spec.variant_id, arch=str(arch))
        kept: Tier = "disk" if self._trusted_keys is None else "memory"
        return self._count(kept if built.cached else "compiled", built.artifact, cached=built.cached)

    def _keep(self, request: str, artifact: KernelArtifact) -> None:
        self.store.publish(artifact)
        self.store.link(request, artifact.key)

    def _count(self, tier: Tier, artifact: KernelArtifact, *, cached: bool) -> Obtained:
        self.tally.add(tier)
        _log.debug("%s for %s: had from %s", artifact.manifest.variant_id, artifact.manifest.arch, tier)
        return Obtained(artifact, tier, cached)
