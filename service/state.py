"""Service: what the routes share; one value an application."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar, TypeVarTuple, Unpack

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from mlaprep.kernels_cache.artifact import Manifest
from mlaprep.kernels_cache.errors import SigningError, StoreError
from mlaprep.kernels_cache.key_files import read_signing_key
from mlaprep.kernels_cache.opening import Opened, folder_of, open_store_or_memory
from mlaprep.kernels_cache.redis import RedisStore
from mlaprep.kernels_cache.shared_revocations import SharedRevocations
from mlaprep.kernels_cache.signing import SigningKey
from mlaprep.kernels_cache.store import KernelStore, MemoryStore, TieredStore
from mlaprep.service.auth import Access
from mlaprep.service.builder import Builder, Built, Target
from mlaprep.service.catalog import Catalog
from mlaprep.service.compiler import Compiler
from mlaprep.service.job_store import JobStore
from mlaprep.service.jobs import Jobs
from mlaprep.service.markers import Markers
from mlaprep.service.misses import Misses
from mlaprep.service.queued_jobs import QueuedJobs
from mlaprep.service.settings import Settings
from mlaprep.service.shared import installation_warnings, open_shared, with_shared
from mlaprep.service.shared_misses import SharedMisses
from mlaprep.service.toolchain import Toolchain, buildable_archs, conflicts
from mlaprep.templates.arch import ARCHS, Arch
from mlaprep.templates.errors import FieldProblem, SpecError
from mlaprep.templates.spec import KernelSpec, parse_variant_id

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_READERS: Final = 4
_BUILDERS: Final = 4


@dataclass(slots=True)
class Streams:
    """Streams of events that are open."""

    open: int = 0


@dataclass(frozen=True, slots=True)
class Service:
    """The parts behind an application, made together and closed together."""

    settings: Settings
    access: Access
    store: KernelStore
    compiler: Compiler
    builder: Builder
    catalog: Catalog
    misses: Misses
    jobs: Jobs | QueuedJobs
    warnings: tuple[str, ...]
    """What is wrong with the installation without keeping it from working; names no directory."""
    logged_warnings: tuple[str, ...]
    """The same for the log, which does."""
    owns_compiler: bool
    signing_key: SigningKey | None = None
    shared: RedisStore | None = None
    reading: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_READERS))
    """Bounds the threads of calls that look at the whole store, so that kernels are handed out meanwhile."""
    building: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(_BUILDERS))
    """Bounds the threads that look whether a kernel must be built: a thousand callers who want new ones at once stand
    in a line of their own, and not before those who fetch what is built."""
    streams: Streams = field(default_factory=Streams)

    @classmethod
    def assemble(
        cls, settings: Settings, store: KernelStore | None = None, compiler: Compiler | None = None
    ) -> "Service":
        """Everything from settings; opens the cache directory and starts no process.

        Raises:
            SpecError: a signing key, a token file or a shared Redis that cannot be used as configured.
        """
        access = Access.assemble(settings)
        signing_key = _signing_key(settings)
        opened = Opened(store or MemoryStore())
        shared = None
        if store is None:
            opened = open_store(settings)
            shared = open_shared(settings, signing_key)
            store = with_shared(opened.store, shared)
        owns_compiler = compiler is None
        compiler = compiler or Compiler(
            settings.compile_processes,
            settings.compile_timeout_s,
            settings.compile_memory_bytes,
            queue_limit=settings.compile_queue,
            recycle_after=settings.compile_recycle_after,
        )
        builder = Builder(
            store,
            compiler,
            negative_ttl_s=settings.negative_ttl_s,
            queue_limit=settings.compile_queue,
            revocations=None if shared is None else SharedRevocations(folder_of(store), shared.redis),
            refuse_spills=settings.refuse_spills,
        )
        of_installation = (*conflicts(), *installation_warnings(shared))
        folder = folder_of(store)
        misses = Misses(folder, shared=None if shared is None else SharedMisses(shared.redis))
        jobs = _open_jobs(builder, shared)
        catalog = Catalog(builder)
        return cls(
            settings,
            access,
            store,
            compiler,
            builder,
            catalog,
            misses,
            jobs,
            tuple(filter(None, (opened.told, *of_installation))),
            tuple(filter(None, (opened.warning, *of_installation))),
            owns_compiler,
            signing_key,
            shared,
        )

    def signed(self, manifest: Manifest) -> Manifest:
        """A manifest as it is served: signed with the service's key, or as it is kept where it has none.

        Signing here and not in the store lets replicas share a store under keys of their own, and has a new key
        sign what was kept under the one before.
        """
        return manifest if self.signing_key is None else self.signing_key.sign(manifest)

    async def find(self, spec: KernelSpec, arch: Arch) -> Built | None:
        """The kernel if it is built."""
        artifact = await in_thread(self.builder.get, spec, arch)
        return None if artifact is None else Built(artifact, cached=True)

    async def build(self, spec: KernelSpec, arch: Arch) -> Built:
        """The kernel, compiled if need be; no thread is held while it is."""
        artifact = await in_thread(self.builder.get, spec, arch, limiter=self.building)
        if artifact is not None:
            return Built(artifact, cached=True)
        flight = self.builder.begin(spec, arch)
        return flight.settle(await asyncio.wrap_future(flight.future))

    def known_archs(self) -> tuple[Arch, ...]:
        """What this NVRTC builds, or every known architecture while it has not said so."""
        toolchain = self.compiler.known_toolchain
        return ARCHS if toolchain is None else buildable_archs(toolchain)

    def parse_target(self, arch: str, variant_id: str) -> Target:
        """What a path names.

        Raises:
            SpecError: no such variant or architecture; everything wrong with both is listed, with the
                architectures that can be built.
        """
        problems: list[FieldProblem] = []
        spec = target = None
        try:
            target = Arch(arch)
        except SpecError:
            allowed = "one of " + ", ".join(map(str, self.known_archs()))
            problems.append(FieldProblem("arch", "an architecture that is not known", allowed))
        try:
            spec = parse_variant_id(variant_id)
        except SpecError as error:
            problems.extend(error.problems)
        if spec is None or target is None:
            raise SpecError(problems)
        return spec, target

    async def toolchain(self) -> Toolchain:
        """The compiler in use, started if need be; errors as for :meth:`Compiler.toolchain`."""
        known = self.compiler.known_toolchain
        return known if known is not None else await in_thread(self.compiler.toolchain)

    def close(self) -> None:
        """End what was assembled here; a compiler that was handed in is its giver's."""
        self.jobs.close()
        self.misses.close()
        if self.owns_compiler:
            self.compiler.close()
        self.builder.close()
        if self.shared is not None:
            self.shared.redis.close()


def open_store(settings: Settings) -> Opened:
    """The disk store with a memory above it, or whatever is left where no directory can be written, and why."""
    environ = dict(os.environ)
    if settings.cache_dir is not None:
        environ["MLAPREP_CACHE_DIR"] = str(settings.cache_dir)
    environ["MLAPREP_CACHE_MAX_BYTES"] = str(settings.cache_max_bytes)
    opened = open_store_or_memory(environ)
    if isinstance(opened.store, MemoryStore | TieredStore) or settings.memory_max_bytes == 0:
        return opened
    return replace(opened, store=TieredStore([MemoryStore(settings.memory_max_bytes), opened.store]))


def _open_jobs(builder: Builder, shared: RedisStore | None) -> Jobs | QueuedJobs:
    if shared is None:
        return Jobs(builder, JobStore(folder_of(builder.store)))
    try:
        return QueuedJobs(shared.redis, Markers(builder, shared))
    except StoreError as error:
        raise SpecError(FieldProblem("MLAPREP_REDIS_URL", str(error), "a Redis, with the package rq")) from None


def _signing_key(settings: Settings) -> SigningKey | None:
    if settings.signing_key is None:
        return None
    try:
        return read_signing_key(settings.signing_key)
    except SigningError as error:
        allowed = "an Ed25519 key such as `mlaprep keys generate` writes, that only this user can read"
        raise SpecError(FieldProblem("MLAPREP_SIGNING_KEY", str(error), allowed)) from None


async def in_thread(call: Callable[[Unpack[Ts]], T], *args: *Ts, limiter: CapacityLimiter | None = None) -> T:
    """Run what may touch a disk away from the event loop; a client that leaves does not wait for it.

    With a ``limiter``, only so many of its calls run at once, and they take no thread from others.
    """
    return await run_sync(call, *args, abandon_on_cancel=True, limiter=limiter)


def service_of(request: Request) -> Service:
    """The service behind a request."""
    service: Service = request.app.state.service
    return service


def json_response(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON that caches ask for again each time: what is built can change at any moment."""
    body = to_json(document, inf_nan_mode="null")
    return Response(body, status, {"cache-control": "no-cache"} | (headers or {}), "application/json")
