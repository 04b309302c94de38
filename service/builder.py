"""Builder: get a kernel from the store, or compile it, once for all who ask."""

import dataclasses
import functools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Self

from mlaprep.kernels_cache.artifact import KernelArtifact, Manifest
from mlaprep.kernels_cache.errors import ArtifactError
from mlaprep.kernels_cache.forks import forget_when_forked
from mlaprep.kernels_cache.key import cache_key, request_key
from mlaprep.kernels_cache.opening import folder_of
from mlaprep.kernels_cache.origin import require_own
from mlaprep.kernels_cache.revocation import Revocations
from mlaprep.kernels_cache.store import KernelStore
from mlaprep.service.compiler import DEFAULT_QUEUE_LIMIT, Compiler
from mlaprep.service.errors import BuildError, CompileFailed, CompilerUnavailable, KernelRevoked, KernelSpills
from mlaprep.service.toolchain import compile_options, installed_nvrtc_version
from mlaprep.service.workers import PassedOn, Workers, running_future
from mlaprep.templates.arch import Arch
from mlaprep.templates.errors import FieldProblem, SpecError
from mlaprep.templates.render import KernelSource, check_target, render, templates_fingerprint
from mlaprep.templates.spec import KernelSpec

NEGATIVE_TTL_S: Final = 60.0
LOCK_TIMEOUT_S: Final = 10.0
"""How long another process may hold a key before this one compiles all the same.

A compile takes a fraction of a second, with the start of the compiler a few; whoever holds a key for longer hangs.
"""

_MAX_FAILURES: Final = 1024
_MAX_USES: Final = 65536
_THREADS_BEYOND_PROCESSES: Final = 4  # so that a compiler need not wait for the store
_MAX_LOCK_WAITERS: Final = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Built:
    """A kernel, and whether it was there already when it was asked for."""

    artifact: KernelArtifact
    cached: bool


@dataclass(frozen=True, slots=True)
class BuilderStats:
    """Counts since the builder was made, and what it does now."""

    hits: int = 0
    """Kernels found in the store."""
    misses: int = 0
    """Kernels asked for with :meth:`Builder.get` or :meth:`Builder.begin` that the store lacked."""
    compiles: int = 0
    joined: int = 0
    """Callers that waited for a compile another had asked for."""
    failures: int = 0
    """Compiles that gave no kernel, for whatever reason."""
    remembered_failures: int = 0
    """Callers told of a failure that was known already."""
    waiting: int = 0
    building: int = 0


@dataclass(frozen=True, slots=True)
class Flight:
    """One compile in the air; ``leads`` says whether this caller's request started it."""

    future: "Future[Built]"
    leads: bool

    def settle(self, built: Built) -> Built:
        """What this caller is told: whoever joined found the kernel there."""
        return built if self.leads else dataclasses.replace(built, cached=True)


@dataclass(frozen=True, slots=True)
class Use:
    """How often a kernel was given out by this builder, and when last, in seconds since the epoch."""

    count: int
    last: float


Target = tuple[KernelSpec, Arch]


def _unobserved(_: KernelArtifact | Exception) -> None:
    pass


class _KeyHeld(Exception):
    """Another process holds the key, or there are no locks to tell."""


class Builder:
    """Kernels by spec and architecture, from a store or newly compiled.

    One compile a key, over the threads of this process by shared futures and over the processes of this
    machine by the store's lock. Only a refusal by the compiler is remembered, and only for
    ``negative_ttl_s`` seconds: a missing library, a deadline or a crash says nothing of the kernel.

    Args:
        store: where kernels are looked up and published.
        compiler: by default one of its own, started when first needed and closed with the builder.
        queue_limit: different kernels that may wait before :class:`QueueFull`.
        revocations: kernels that are neither given out nor built; by default those of the store's directory.
        refuse_spills: whether a kernel that spills is refused, as the compiler's own refusals are.
    """

    def __init__(
        self,
        store: KernelStore,
        compiler: Compiler | None = None,
        *,
        negative_ttl_s: float = NEGATIVE_TTL_S,
        lock_timeout_s: float = LOCK_TIMEOUT_S,
        queue_limit: int = DEFAULT_QUEUE_LIMIT,
        revocations: Revocations | None = None,
        refuse_spills: bool = False,
    ) -> None:
        self.store: Final = store
        self.revocations: Final = Revocations(folder_of(store)) if revocations is None else revocations
        self._refuse_spills = refuse_spills
        self.observe: Callable[[KernelArtifact | Exception], None] = _unobserved
        """Told of each kernel that was compiled here, and of each compile that gave none."""
        self.compiler: Final = compiler or Compiler()
        self._owns_compiler = compiler is None
        self._negative_ttl_s = negative_ttl_s
        self._lock_timeout_s = lock_timeout_s
        self._queue_limit = queue_limit
        self.forget()
        forget_when_forked(self)

    @property
    def compiles(self) -> int:
        """Kernels this builder has compiled."""
        return self._counts["compiles"]

    def get(self, spec: KernelSpec, arch: Arch) -> KernelArtifact | None:
        """The kernel if it is built, verified; never compiles, and starts no process.

        Where the compiler's version is unknown or the compiler unusable, the kernel last built for this
        spec by any version serves.

        Raises:
            SpecError: the architecture cannot run the spec.
            KernelRevoked: it is not to be used.
        """
        check_target(spec, arch)
        state = self.compiler.state()
        version = state.version or installed_nvrtc_version()
        artifact = None
        if version is not None:
            artifact = self._stored(_key(render(spec), arch, version), spec, arch)
        if artifact is None and (version is None or state.status == "unavailable"):
            artifact = self._last_built(spec, arch)
        if artifact is None:
            self._count("misses")
        else:
            self._count("hits")
            self._note_use((spec, arch))
        return artifact

    def get_or_compile(self, spec: KernelSpec, arch: Arch) -> Built:
        """The kernel, compiled now if need be.

        Raises:
            SpecError: the architecture cannot run the spec, or the compiler does not know it.
            BuildError: one of its kinds, see :mod:`mlaprep.service.errors`.
        """
        artifact = self.get(spec, arch)
        if artifact is not None:
            return Built(artifact, cached=True)
        flight = self.begin(spec, arch)
        return flight.settle(flight.future.result())

    def begin(self, spec: KernelSpec, arch: Arch) -> Flight:
        """Start building, or join whoever does; returns at once.

        The future holds what :meth:`get_or_compile` returns or raises, and cannot be cancelled.

        Raises:
            SpecError: the architecture cannot run the spec.
            CompileFailed: the compiler refused this kernel a short while ago.
            QueueFull, BuilderClosed: nothing was started.
        """
        check_target(spec, arch)
        target = (spec, arch)
        with self._lock:
            self._recall_failure(target)
            if (flight := self._flights.get(target)) is not None:
                self._counts["joined"] += 1
                return Flight(flight, leads=False)
            future: Future[Built] = running_future()
            self._workers.submit(lambda: self._build_or_wait(target, future), future)
            self._flights[target] = future
        future.add_done_callback(lambda _: self._land(target))
        self._note_use(target)
        return Flight(future, leads=True)

    def serving_key(self, spec: KernelSpec, arch: Arch) -> str | None:
        """The key that :meth:`get` looks for; None where no compiler's version is known."""
        version = self.serving_version()
        return None if version is None else _key(render(spec), arch, version)

    def serving_version(self) -> str | None:
        """The compiler version whose kernels :meth:`get` gives out; None for those of any."""
        state = self.compiler.state()
        return None if state.status == "unavailable" else state.version or installed_nvrtc_version()

    def would_serve(self, manifest: Manifest, spec: KernelSpec, arch: Arch, version: str | None) -> bool:
        """Whether :meth:`get` would give out this entry, as far as its manifest and its link tell."""
        if version is None or manifest.nvrtc_version != version:
            return version is None
        own = tuple(manifest.options) == tuple(compile_options(arch))
        if own and self.store.resolve(_request(spec, arch)) == manifest.key:  # 20 times as fast as rendering
            return True
        # Past the caches: who looks at a whole store must not fill them with what nobody asked for.
        return manifest.key == _key.__wrapped__(render.__wrapped__(spec), arch, version)

    def use(self, spec: KernelSpec, arch: Arch) -> Use | None:
        """How a kernel was used since this builder was made, if it was."""
        with self._lock:
            return self._uses.get((spec, arch))

    def used(self) -> list[Target]:
        """What was used since this builder was made, as far as it is noted."""
        with self._lock:
            return list(self._uses)

    def in_flight(self) -> frozenset[Target]:
        """What is being built now, or waits for it."""
        with self._lock:
            return frozenset(self._flights)

    def failed(self) -> frozenset[Target]:
        """What the compiler refused lately."""
        now = time.monotonic()
        with self._lock:
            return frozenset(target for target, (until, _) in self._failures.items() if until > now)

    def stats(self) -> BuilderStats:
        with self._lock:
            waiting = self._workers.waiting + self._waiters.waiting
            return BuilderStats(**self._counts, waiting=waiting, building=len(self._flights))

    def close(self) -> None:
        """Fail what waits and end the compile processes. Safe to repeat."""
        if self._owns_compiler:
            self.compiler.close()
        self._workers.close()
        self._waiters.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def forget(self) -> None:
        """Back to nothing in flight, for a forked copy: flights and threads stayed with its parent."""
        self._lock = threading.Lock()
        self._workers = Workers(self.compiler.processes + _THREADS_BEYOND_PROCESSES, self._queue_limit)
        self._waiters = Workers(_MAX_LOCK_WAITERS, self._queue_limit, "mlaprep-wait")
        self._flights: dict[Target, Future[Built]] = {}
        self._failures: OrderedDict[Target, tuple[float, CompileFailed]] = OrderedDict()
        self._uses: OrderedDict[Target, Use] = OrderedDict()
        self._counts = dict.fromkeys(("hits", "misses", "compiles", "joined", "failures", "remembered_failures"), 0)

    def _build_or_wait(self, target: Target, future: "Future[Built]") -> Built:
        """Build, unless another process holds the key: then threads of their own wait for it.

        Keys that are held for long, however many, must not keep other kernels from being built.
        """
        try:
            return self._build(target, None)
        except _KeyHeld:
            until = time.monotonic() + self._lock_timeout_s
            self._waiters.submit(lambda: self._build(target, max(0.0, until - time.monotonic())), future)
            raise PassedOn() from None

    def _build(self, target: Target, patience_s: float | None) -> Built:
        try:
            return self._build_or_raise(*target, patience_s)
        except BuildError as error:
            self._count("failures")
            self.observe(error)
            if isinstance(error, CompileFailed):
                self._remember_failure(target, error)
            raise

    def _build_or_raise(self, spec: KernelSpec, arch: Arch, patience_s: float | None) -> Built:
        source = render(spec)
        try:
            # The installed wheel's version will do for the lock: of a herd of processes, those that find the
            # kernel built when their turn comes never load NVRTC.
            version = self.compiler.state().version or installed_nvrtc_version() or self.compiler.version()
            with self.store.key_lock(_key(source, arch, version), patience_s or 0.0) as held:
                if not held and patience_s is None:
                    raise _KeyHeld()
                return self._build_once(source, arch, version)
        except CompilerUnavailable:
            if (artifact := self._last_built(spec, arch)) is not None:
                return Built(artifact, cached=True)
            raise

    def _build_once(self, source: KernelSource, arch: Arch, version: str) -> Built:
        """Look again, since whoever held the lock before may have built it, then compile."""
        artifact = self._stored(_key(source, arch, version), source.spec, arch)
        if artifact is None and (actual := self.compiler.version()) != version:
            artifact = self._stored(_key(source, arch, actual), source.spec, arch)
        cached = artifact is not None
        if artifact is None:
            self._require_buildable(arch)
            artifact = self.compiler.compile(source, arch)
            self._count("compiles")
            self.observe(artifact)
            self._require_fit(artifact.manifest)
            self.store.publish(artifact)
        self.store.link(_request(source.spec, arch), artifact.key)
        return Built(artifact, cached)

    def _require_buildable(self, arch: Arch) -> None:
        archs = self.compiler.archs()
        if arch not in archs:
            found = f"an architecture that NVRTC {self.compiler.version()} does not build"
            raise SpecError(FieldProblem("arch", found, "one of " + ", ".join(map(str, archs))))

    def _require_fit(self, manifest: Manifest) -> None:
        """Refuse to publish bytes that are revoked, or that spill where those are refused."""
        if (revoked := self.revocations.of(manifest)) is not None:
            raise KernelRevoked(revoked)
        if self._refuse_spills and (manifest.spill_stores or manifest.spill_loads):
            raise KernelSpills(manifest.variant_id, manifest.arch, manifest.spill_stores, manifest.spill_loads)

    def _stored(self, key: str, spec: KernelSpec, arch: Arch) -> KernelArtifact | None:
        """The entry of a key if it is this release's. Raises KernelRevoked."""
        if (revoked := self.revocations.find(key=key)) is not None:
            raise KernelRevoked(revoked)
        artifact = self.store.get(key)
        if artifact is None:
            return None
        try:
            require_own(artifact, render(spec), arch.name, key=key)
        except ArtifactError as error:
            _log.warning("the stored kernel for %s on %s was refused: %s", spec.variant_id, arch, error)
            return None
        if (revoked := self.revocations.find(digest=artifact.digest)) is not None:
            raise KernelRevoked(revoked)
        return artifact

    def _last_built(self, spec: KernelSpec, arch: Arch) -> KernelArtifact | None:
        """The kernel that a link names, whichever compiler version it came from: of today's source, or none."""
        key = self.store.resolve(_request(spec, arch))
        return None if key is None else self._stored(key, spec, arch)

    def _note_use(self, target: Target) -> None:
        with self._lock:
            use = self._uses.get(target, Use(0, 0.0))
            self._uses[target] = Use(use.count + 1, time.time())
            self._uses.move_to_end(target)
            if len(self._uses) > _MAX_USES:
                self._uses.popitem(last=False)

    def _land(self, target: Target) -> None:
        with self._lock:
            self._flights.pop(target, None)

    def _remember_failure(self, target: Target, error: CompileFailed) -> None:
        with self._lock:
            self._failures[target] = (time.monotonic() + self._negative_ttl_s, error)
            self._failures.move_to_end(target)
            while len(self._failures) > _MAX_FAILURES:
                self._failures.popitem(last=False)

    def _recall_failure(self, target: Target) -> None:
        until, error = self._failures.get(target, (0.0, None))
        if error is None:
            return
        if time.monotonic() < until:
            self._counts["remembered_failures"] += 1
            raise error.again()
        del self._failures[target]

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


@functools.lru_cache(maxsize=8192)
def _key(source: KernelSource, arch: Arch, version: str) -> str:
    return cache_key(source=source.text, options=compile_options(arch), arch=arch.name, nvrtc_version=version)


def _request(spec: KernelSpec, arch: Arch) -> str:
    return request_key(arch=arch.name, spec=spec.to_dict(), generator=templates_fingerprint())
