"""KernelClient: a kernel from the nearest place that has it, verified.

Order: process memory, local store, service, local compile. Each later place fills the earlier ones.
"""

import contextlib
import dataclasses
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Self, get_args

from mlaprep.clients.errors import (
    ArtifactRejected,
    DriverError,
    KernelNotReady,
    KernelUnavailable,
    MlaprepError,
    ServiceError,
)
from mlaprep.clients.forks import forget_when_forked
from mlaprep.clients.rest import DEFAULT_TIMEOUT_S, RestTransport
from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.disk import open_default_store
from mlaprep.kernels_cache.errors import ArtifactError
from mlaprep.kernels_cache.key import request_key
from mlaprep.kernels_cache.store import KernelStore
from mlaprep.templates.arch import Arch
from mlaprep.templates.errors import FieldProblem, SpecError
from mlaprep.templates.render import check_target, templates_fingerprint
from mlaprep.templates.spec import KernelSpec, describe, parse_variant_id

if TYPE_CHECKING:
    from mlaprep.clients.handle import KernelHandle
    from mlaprep.service.builder import Builder

OnMiss = Literal["compile", "fallback", "error"]
Tier = Literal["memory", "disk", "service", "compiled"]

MEMORY_ARTIFACTS: Final = 512
LOCK_MARGIN_S: Final = 30.0
"""Seconds beyond the service's deadline for which another process is waited for."""

_TRUE: Final = ("1", "true", "yes", "on")
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Obtained:
    """A verified kernel and where it came from.

    ``cached`` is false where it had to be compiled for this call, here or in the service.
    """

    artifact: KernelArtifact
    tier: Tier
    cached: bool


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Counts since the client was made. The first four are kernels by the place that had them."""

    memory: int = 0
    disk: int = 0
    service: int = 0
    compiled: int = 0
    unavailable: int = 0
    """Kernels that no place had."""
    rejected: int = 0
    """Entries and replies that were not the kernel asked for."""
    service_errors: int = 0
    """Fetches that the service did not answer with a kernel."""


class KernelClient:
    """Gets kernels and loads them.

    Safe to share between threads: one kernel is fetched or built once however many ask for it, and
    other processes that share the local store wait for it too. A forked child starts over with the same
    configuration; a pickled client carries its configuration only.

    Args:
        url: the kernel service; without one, and without ``MLAPREP_URL``, there is none to ask.
        token: its bearer token; ``MLAPREP_TOKEN`` by default.
        store: where kernels are kept on this machine; the directory of ``MLAPREP_CACHE_DIR`` by default.
        transport: replaces the HTTP transport of ``url``.
        on_miss: what follows when memory, store and service have no kernel. ``"compile"`` builds it here;
            ``"fallback"`` and ``"error"`` raise, and differ in what ``prepare`` makes of that: the unfused
            chain, or an error.
        offline: never open a socket; ``MLAPREP_OFFLINE=1`` by default.
        timeout: seconds that the service may take for one kernel, in all.

    Raises:
        SpecError: an ``on_miss``, URL or token that cannot be used.
    """

    _lock: threading.Lock
    _memory: OrderedDict[tuple[KernelSpec, Arch], KernelArtifact]
    _flights: "dict[tuple[KernelSpec, Arch], Future[Obtained]]"
    _serving: "dict[tuple[KernelSpec, int], KernelHandle | None]"
    _counts: dict[str, int]
    _store: KernelStore | None
    _builder: "Builder | None"

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        store: KernelStore | None = None,
        transport: RestTransport | None = None,
        on_miss: OnMiss = "compile",
        offline: bool | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if on_miss not in get_args(OnMiss):
            raise SpecError(FieldProblem("on_miss", describe(on_miss), "one of " + ", ".join(get_args(OnMiss))))
        environ = os.environ
        url = url or environ.get("MLAPREP_URL") or None
        token = token or environ.get("MLAPREP_TOKEN") or None
        if offline is None:
            offline = environ.get("MLAPREP_OFFLINE", "").strip().lower() in _TRUE
        self.on_miss: Final = on_miss
        self.offline: Final = offline
        self._timeout = timeout
        self._transport = transport or (RestTransport(url, token, timeout=timeout) if url else None)
        self._given_store = store
        self.forget()
        forget_when_forked(self)

    def artifact(self, spec: KernelSpec, arch: Arch) -> KernelArtifact:
        """The verified kernel of ``spec`` for ``arch``; see :meth:`obtain`."""
        return self.obtain(spec, arch).artifact

    def obtain(self, spec: KernelSpec, arch: Arch) -> Obtained:
        """The verified kernel of ``spec`` for ``arch``, and where it came from.

        Returns within the service's deadline, the time another process may hold the kernel's lock, and
        one compile.

        Raises:
            SpecError: the architecture cannot run the spec.
            KernelUnavailable: no place had it, and it was not or could not be built here; where a build
                failed, that error is the cause.
            ArtifactRejected: the service sent something else, and nothing was to be built here.
        """
        key = (spec, arch)
        while True:
            with self._lock:
                known = self._memory.get(key)
                if known is not None:
                    self._memory.move_to_end(key)
                    self._counts["memory"] += 1
                    return Obtained(known, "memory", cached=True)
                flight = self._flights.get(key)
                leads = flight is None
                if flight is None:
                    flight = self._flights[key] = Future()
            if leads:
                return self._lead(key, flight)
            with contextlib.suppress(CancelledError):  # the leader was interrupted: ask again
                return self._count("memory", flight.result().artifact, cached=True)

    def load(
        self,
        spec: KernelSpec | str | None = None,
        *,
        arch: Arch | str | None = None,
        device: int | None = None,
        **fields: Any,
    ) -> "KernelHandle":
        """A callable kernel, loaded on a device.

        Args:
            spec: a spec or a variant id; or none, and the spec's fields by keyword.
            arch: by default the device's own.
            device: CUDA ordinal; by default torch's current device. With an ``arch`` and no ``device`` no
                driver is touched, and the handle loads itself where it is first called.

        Raises:
            SpecError: fields that make no spec, or an unknown architecture.
            KernelUnavailable: no kernel, or a device that none is built for.
            ArtifactRejected: as for :meth:`obtain`.
            DriverError: no CUDA driver or device, or one that refuses the kernel.
            KernelNotReady: the device's stream is being captured.
        """
        from mlaprep.clients.handle import KernelHandle
        from mlaprep.clients.launch import cuda_driver

        wanted = as_spec(spec, fields)
        if device is None and arch is not None:
            return KernelHandle(self.artifact(wanted, as_arch(arch)))
        driver = cuda_driver()
        if device is None:
            device = _current_device()
        own = Arch.for_device(driver.capability(device))
        target = own if arch is None else as_arch(arch)
        if target is None:
            raise KernelUnavailable(
                f"no kernel {wanted.variant_id} for device {device}: none is built for its compute capability. "
                "Use the unfused chain (mlaprep.clients.prepare does), or name an arch that the device can run",
                variant_id=wanted.variant_id,
            )
        if target != own:
            return KernelHandle(self.artifact(wanted, target), driver).load(device)
        handle = self._serving.get((wanted, device))
        if handle is None:
            handle = KernelHandle(self.artifact(wanted, target), driver).load(device)
            self._serving[wanted, device] = handle
        return handle

    def serving_handle(self, spec: KernelSpec, device: int) -> "KernelHandle | None":
        """The handle loaded on a device, loading it the first time; None where it is to be the unfused chain.

        None is remembered, so that one shape does not change its path while it is served; :meth:`load`
        changes it. The look-up of what is known takes no lock and does no I/O.

        Raises:
            KernelNotReady: not known yet, and the device's stream is being captured.
            KernelUnavailable, ArtifactRejected, DriverError: no kernel, under ``on_miss="error"``.
        """
        try:
            return self._serving[spec, device]
        except KeyError:
            return self._first_handle(spec, device)

    def _first_handle(self, spec: KernelSpec, device: int) -> "KernelHandle | None":
        if _is_capturing(device):
            raise KernelNotReady(
                f"asked for {spec.variant_id} on device {device} for the first time while its stream is being captured; "
                "load it before the capture: client.load(spec, device=...)"
            )
        try:
            return self.load(spec, device=device)
        except (KernelUnavailable, ArtifactRejected, DriverError) as error:
            if self.on_miss == "error":
                raise
            _log.warning("taking the unfused chain from now on: %s", error)
            return self._serving.setdefault((spec, device), None)

    def stats(self) -> ClientStats:
        """Counts so far."""
        with self._lock:
            return ClientStats(**self._counts)

    def close(self) -> None:
        """End connections and compile processes. The client starts new ones when it is used again."""
        with self._lock:
            builder, self._builder = self._builder, None
        if builder is not None:
            builder.close()
        if self._transport is not None:
            self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("on_miss", "offline", "_timeout", "_transport", "_given_store")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self.forget()
        forget_when_forked(self)

    def forget(self) -> None:
        """Back to the configuration alone; what a parent process still uses is left to it."""
        self._lock = threading.Lock()
        self._memory = OrderedDict()
        self._flights = {}
        self._serving = {}
        self._counts = {field.name: 0 for field in dataclasses.fields(ClientStats)}
        self._store = self._given_store
        self._builder = None

    @property
    def store(self) -> KernelStore:
        """Where kernels are kept on this machine, opened on first use."""
        with self._lock:
            if self._store is None:
                self._store = open_default_store()
            return self._store

    def _lead(self, key: tuple[KernelSpec, Arch], flight: "Future[Obtained]") -> Obtained:
        try:
            obtained = self._walk(*key)
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
        if (artifact := self._from_store(request, spec, arch)) is not None:
            return self._count("disk", artifact, cached=True)
        with self.store.key_lock(request, self._timeout + LOCK_MARGIN_S):
            # Whoever held the lock before may have brought it.
            if (artifact := self._from_store(request, spec, arch)) is not None:
                return self._count("disk", artifact, cached=True)
            attempts = ["not in the local store"]
            cause: MlaprepError | None = None
            try:
                if (obtained := self._from_service(spec, arch, attempts)) is not None:
                    self._keep(request, obtained.artifact)
                    return obtained
            except ArtifactRejected as error:
                attempts.append(str(error))
                cause = error
            if self.on_miss == "compile":
                try:
                    return self._compile(spec, arch)
                except SpecError:
                    raise
                except MlaprepError as error:
                    attempts.append(str(error).partition("\n")[0])
                    cause = error
            else:
                attempts.append(f'not compiled here (on_miss="{self.on_miss}")')
        with self._lock:
            self._counts["unavailable"] += 1
        if isinstance(cause, ArtifactRejected):
            raise cause
        raise KernelUnavailable(
            f"no kernel {spec.variant_id} for {arch}: {'; '.join(attempts)}. Build it ahead with "
            f"`mlaprep compile --variant {spec.variant_id} --arch {arch}`, or set MLAPREP_URL to a service that has it",
            variant_id=spec.variant_id,
            arch=str(arch),
            attempts=attempts,
        ) from cause

    def _from_store(self, request: str, spec: KernelSpec, arch: Arch) -> KernelArtifact | None:
        store = self.store
        key = store.resolve(request)
        artifact = None if key is None else store.get(key)
        if artifact is None:
            return None
        try:
            artifact.verify(key=key, spec=spec.to_dict(), arch=str(arch))
        except ArtifactError as error:
            # The alias is a hint that anybody may have written; the entry is for something else.
            _log.warning("local store: the entry for %s on %s was refused: %s", spec.variant_id, arch, error)
            with self._lock:
                self._counts["rejected"] += 1
            return None
        return artifact

    def _from_service(self, spec: KernelSpec, arch: Arch, attempts: list[str]) -> Obtained | None:
        if self.offline:
            attempts.append("offline, so no service was asked")
            return None
        if self._transport is None:
            attempts.append("no service is configured")
            return None
        try:
            reply = self._transport.fetch_reply(spec, arch)
        except ServiceError as error:
            _log.warning("kernel service: %s", error)
            attempts.append(str(error))
            with self._lock:
                self._counts["service_errors"] += 1
            return None
        except ArtifactRejected as error:
            _log.error("kernel service: %s", error)
            with self._lock:
                self._counts["rejected"] += 1
            raise
        return self._count("service", reply.artifact, cached=reply.cached)

    def _compile(self, spec: KernelSpec, arch: Arch) -> Obtained:
        built = self._local_builder().get_or_compile(spec, arch)
        built.artifact.verify(spec=spec.to_dict(), arch=str(arch))
        return self._count("disk" if built.cached else "compiled", built.artifact, cached=built.cached)

    def _local_builder(self) -> "Builder":
        try:
            from mlaprep.service.builder import Builder
        except ImportError as error:
            raise KernelUnavailable(
                f"cannot compile here: {error.name} is not installed; install mlaprep[service,cuda12]"
            ) from error
        store = self.store
        with self._lock:
            if self._builder is None:
                self._builder = Builder(store)
            return self._builder

    def _keep(self, request: str, artifact: KernelArtifact) -> None:
        self.store.publish(artifact)
        self.store.link(request, artifact.key)

    def _count(self, tier: Tier, artifact: KernelArtifact, *, cached: bool) -> Obtained:
        with self._lock:
            self._counts[tier] += 1
        return Obtained(artifact, tier, cached)


def as_spec(spec: KernelSpec | str | None, fields: Mapping[str, Any]) -> KernelSpec:
    """A spec from a spec, a variant id, or fields.

    Raises:
        SpecError: both or neither, or one that cannot be.
    """
    if spec is None:
        return KernelSpec.from_dict(fields)
    if fields:
        allowed = "a spec or variant id alone, or fields alone"
        raise SpecError(FieldProblem("spec", "a spec together with fields", allowed))
    return parse_variant_id(spec) if isinstance(spec, str) else spec


def as_arch(arch: Arch | str) -> Arch:
    """An architecture from itself or its name. Raises SpecError for an unknown one."""
    return arch if isinstance(arch, Arch) else Arch(arch)


def _current_device() -> int:
    import torch

    return int(torch.cuda.current_device())


def _is_capturing(device: int) -> bool:
    import torch

    with torch.cuda.device(device):
        return bool(torch.cuda.is_current_stream_capturing())
