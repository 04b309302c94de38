"""KernelClient: gets kernels and loads them, for a worker."""

import os
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from mlaprep.clients.building import KernelBuilder, Obtained
from mlaprep.clients.bundles import Bundles, Paths, bundle_paths
from mlaprep.clients.configuring import check_arguments
from mlaprep.clients.decisions import Decisions
from mlaprep.clients.errors import KernelUnavailable
from mlaprep.clients.misses import MissReporter, reports_by_environment
from mlaprep.clients.named import as_arch, as_named, as_spec
from mlaprep.clients.outlook import Outlook, foresee
from mlaprep.clients.pins import Pins, pinned_keys
from mlaprep.clients.plan import read_measured
from mlaprep.clients.rest import DEFAULT_TIMEOUT_S, RestTransport
from mlaprep.clients.serving import OnColdCapture, OnMiss, Serving, arch_of, is_capturing
from mlaprep.clients.specialise import MAX_SPECIALISATIONS, Specialisations
from mlaprep.clients.stats import ClientStats, FallbackReason, Tally, Tier
from mlaprep.clients.supply import KernelSupply
from mlaprep.clients.switches import Switches
from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.forks import forget_when_forked
from mlaprep.kernels_cache.location import default_cache_dir
from mlaprep.kernels_cache.opening import open_default_store
from mlaprep.kernels_cache.store import KernelStore
from mlaprep.kernels_cache.trust import TrustedKeys
from mlaprep.templates.arch import Arch
from mlaprep.templates.environment import read_count, read_switch
from mlaprep.templates.render import read_templates
from mlaprep.templates.spec import KernelSpec

if TYPE_CHECKING:
    import torch

    from mlaprep.clients.handle import KernelHandle
    from mlaprep.clients.layouts import LayoutTable
    from mlaprep.clients.prepared import PreparedLaunch
    from mlaprep.clients.readiness import Progress, ReadinessReport
    from mlaprep.clients.wanted import Wanted


@dataclass(frozen=True, slots=True)
class Configuration:
    """What a client is made from, and all that a pickled one carries; see :class:`KernelClient`."""

    on_miss: OnMiss
    on_cold_capture: OnColdCapture
    offline: bool
    transport: RestTransport | None
    store: KernelStore | None
    trusted_keys: TrustedKeys | None
    report_misses: bool
    bundles: tuple[str | os.PathLike[str], ...]
    max_specialisations: int


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
        on_cold_capture: what ``prepare`` makes of a kernel that is not loaded while the device's stream is being
            captured: ``"error"`` raises KernelNotReady; ``"chain"`` records the unfused chain in the graph.
            Either way the capture stays valid.
        offline: never open a socket; ``MLAPREP_OFFLINE=1`` by default.
        timeout: seconds that the service may take for one kernel, in all.
        bundles: archives of kernels to read below the store; those of ``MLAPREP_BUNDLE`` by default.
        trusted_keys: public keys (``ed25519:…``) or files of them, of which one must have signed every kernel that
            is not compiled in this process; those of ``MLAPREP_TRUSTED_KEYS`` by default. Unsigned kernels are taken
            only where neither is given.
        report_misses: tell the service, in the background, what was asked for and not built;
            ``MLAPREP_REPORT_MISSES`` by default, which is on where it is not set.
        max_specialisations: kernels with strides compiled in that ``prepare`` may ask for; further layouts get the
            kernel that takes strides at launch. ``MLAPREP_MAX_SPECIALISATIONS`` by default, else 32.

    Raises:
        SpecError: an argument that cannot be used, each named; an ``MLAPREP_OFFLINE``,
            ``MLAPREP_DISABLE``, ``MLAPREP_VERIFY`` or ``MLAPREP_REPORT_MISSES`` that is no switch, or keys that are
            none, an empty list included.
    """

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
        trusted_keys: Pins = None,
        on_cold_capture: OnColdCapture = "error",
        report_misses: bool | None = None,
        bundles: Paths | None = None,
        max_specialisations: int | None = None,
    ) -> None:
        check_arguments(locals())
        url = url or os.environ.get("MLAPREP_URL") or None
        token = token or os.environ.get("MLAPREP_TOKEN") or None
        if offline is None:
            offline = offline_by_environment()
        if transport is None and url is not None:
            transport = RestTransport(url, token, timeout=timeout)
        if report_misses is None:
            report_misses = reports_by_environment()
        paths = bundle_paths(bundles)
        pins = pinned_keys(trusted_keys)
        if max_specialisations is None:
            max_specialisations = read_count("MLAPREP_MAX_SPECIALISATIONS", os.environ, MAX_SPECIALISATIONS)
        self._configure(
            Configuration(
                on_miss, on_cold_capture, offline, transport, store, pins, report_misses, paths, max_specialisations
            )
        )

    def _configure(self, configuration: Configuration) -> None:
        # Not while a worker waits for its first kernel.
        read_templates()
        read_measured()
        self._configuration = given = configuration
        self.on_miss: OnMiss = given.on_miss
        self.on_cold_capture: OnColdCapture = given.on_cold_capture
        self.offline = given.offline
        self.report_misses = given.report_misses
        self.switches = Switches.from_environment()
        self.tally = Tally()
        """What :meth:`stats` reports; ``prepare`` counts here too."""
        self.misses = MissReporter(self.service if given.report_misses else None, self.tally)
        """Tells the service of kernels that were lacking."""
        self.bundles = Bundles(given.bundles)
        """Archives that are read below the store."""
        self._supply = KernelSupply(
            self._open_store,
            self.service,
            _open_builder if given.on_miss == "compile" else None,
            no_service="offline, so no service was asked" if given.offline else "no service is configured",
            tally=self.tally,
            trusted_keys=given.trusted_keys,
            on_miss=self.misses.report,
            bundles=self.bundles,
        )
        self._serving = Serving(
            self._supply.obtain,
            self.tally,
            self.misses,
            on_miss=given.on_miss,
            on_cold_capture=given.on_cold_capture,
            specialisations=Specialisations(given.max_specialisations),
        )
        self.decisions = Decisions()
        """Paths that captured shapes took."""
        self.layouts: LayoutTable | None = None
        """Launches that ``prepare`` made through this client, by layout. A call that took the chain is not
        among them, since :meth:`load` may change its path."""
        forget_when_forked(self)

    def artifact(self, spec: KernelSpec | str, arch: Arch | str) -> KernelArtifact:
        """The verified kernel of ``spec`` for ``arch``; arguments and errors are those of :meth:`obtain`."""
        return self.obtain(spec, arch).artifact

    def obtain(self, spec: KernelSpec | str, arch: Arch | str) -> Obtained:
        """The verified kernel of ``spec`` (or a variant id) for ``arch`` (or its name), and where it came from.

        Returns within the service's deadline, the time another process may hold the kernel's lock, and
        one compile.

        Raises:
            TypeError: an argument that is neither.
            SpecError: no such variant or architecture, or one that cannot run the spec.
            KernelUnavailable: no place had it, and it was not or could not be built here; where a build
                failed, that error is the cause.
            ArtifactRejected: the service sent something else, and nothing was to be built here.
        """
        return self._supply.obtain(as_named(spec), as_arch(arch))

    def load(
        self,
        spec: KernelSpec | str | None = None,
        *,
        arch: Arch | str | None = None,
        device: "int | torch.device | None" = None,
        **fields: Any,
    ) -> "KernelHandle":
        """A callable kernel, loaded on a device.

        Loaded on several devices of one architecture, it is one handle.

        Args:
            spec: a spec or a variant id; or none, and the spec's fields by keyword.
            arch: by default the device's own.
            device: CUDA ordinal or torch device; by default torch's current device. With an ``arch`` and no
                ``device`` no driver is touched, and the handle loads itself where it is first called.

        Raises:
            SpecError: fields that make no spec, or an unknown architecture.
            TypeError, ValueError: a ``spec`` or ``arch`` that is neither itself nor a name, no CUDA device.
            KernelUnavailable: no kernel, or a device that none is built for.
            ArtifactRejected: as for :meth:`obtain`.
            DriverError: no CUDA driver or device, or one that refuses the kernel.
            KernelNotReady: the device's stream is being captured.
        """
        from mlaprep.clients.launch import check_device, cuda_driver, device_ordinal

        wanted = as_spec(spec, fields)
        if device is None and arch is not None:
            return self._serving.made(wanted, self.obtain(wanted, arch))
        check_device(device)
        driver, ordinal = cuda_driver(), device_ordinal(device)
        if arch is None:
            return self._serving.bring(wanted, arch_of(wanted, ordinal), ordinal)[0]
        target = as_arch(arch)
        if target != Arch.for_device(driver.capability(ordinal)):
            return self._serving.made(wanted, self.obtain(wanted, target), driver).load(ordinal)
        return self._serving.bring(wanted, target, ordinal)[0]

    def bring(self, spec: KernelSpec, arch: Arch, device: int) -> "tuple[KernelHandle, Tier | Literal['loaded']]":
        """A kernel loaded on a device of its architecture, and the place that had it. Raises as :meth:`load` does."""
        return self._serving.bring(spec, arch, device)

    def is_loaded(self, spec: KernelSpec, device: int) -> bool:
        """Whether :meth:`serving_handle` has the kernel at hand."""
        return self._serving.is_loaded(spec, device)

    def ensure_ready(
        self,
        what: "Wanted | Iterable[Wanted] | None" = None,
        *,
        tp: "int | Iterable[int] | None" = None,
        devices: "int | torch.device | Sequence[int | torch.device] | Literal['all'] | None" = None,
        arch: Arch | str | None = None,
        progress: "Progress | None" = None,
        strict: bool = False,
        **fields: Any,
    ) -> "ReadinessReport":
        """Fetch and load every kernel of a worker before it serves or captures a graph, several at once.

        Idempotent: what is loaded already costs microseconds, what could not be had is tried again. Each
        kernel takes no longer than :meth:`obtain` says.

        Args:
            what: a preset's name; a variant id; a spec; a handle; a mapping (``{"preset": "kimi-k3", "tp": 8}``,
                or spec fields); or any number of these. None for ``fields`` alone.
            tp: the tensor-parallel degree of presets; a list for several.
            devices: CUDA ordinals or torch devices; torch's current one by default, ``"all"`` for every one
                that this process sees, each of which then gets a context.
            arch: the devices' own by default. With an ``arch`` and no ``devices`` no driver is touched: the
                kernels are brought to this machine's store and memory.
            progress: called in this thread with each outcome, the number done and the number in all.
            strict: raise where anything is missing.
            fields: spec fields that override the preset's. A list or tuple stands for each of its values:
                ``loc_dtype=("i32", "i64")``. A preset alone means int64 slots and positions, its own rope and
                layout, cache and query written, and input strides passed at launch, as ``prepare`` asks for it.

        Returns:
            What is ready, from which place and in how many milliseconds, and what could not be had and why.

        Raises:
            SpecError: names or fields that mean no kernel, or an unknown architecture.
            TypeError, ValueError: arguments of another type; no CUDA device.
            KernelUnavailable: ``strict``, and something is missing; ``attempts`` has a line for each.
            ForkedProcessError: the driver was opened in a parent process.
        """
        from mlaprep.clients.readiness import make_ready

        target = None if arch is None else as_arch(arch)
        return make_ready(self, what, tp, fields, devices, target, progress, strict)

    def remember(
        self, positional: tuple[Any, ...], keywords: dict[str, Any], slots: tuple[int, ...], plan: "PreparedLaunch"
    ) -> None:
        """Have calls like this one launched from :attr:`layouts`; arguments as for :meth:`LayoutTable.add`."""
        if self.layouts is None:
            from mlaprep.clients.layouts import open_layout_table

            self.layouts = open_layout_table()
        self.layouts.add(positional, keywords, slots, plan)

    def serving_handle(self, spec: KernelSpec, device: int, general: KernelSpec | None = None) -> "KernelHandle | None":
        """The handle loaded on a device, loading it the first time; None where it is to be the unfused chain.

        None is remembered, so that one shape does not change its path while it is served; :meth:`load`
        changes it. ``general`` is a spec that takes the same calls: it serves where ``spec`` is not to be had, is
        one too many, or would have to be loaded while the stream is being captured.

        Raises:
            KernelNotReady: not known yet, and the device's stream is being captured.
            KernelUnavailable, ArtifactRejected, DriverError: no kernel, under ``on_miss="error"``.
        """
        return self._serving.handle(spec, device, general)

    def serving_spec(self, spec: KernelSpec, device: int, general: KernelSpec | None = None) -> KernelSpec:
        """Which of two specs :meth:`serving_handle` would take, the first one's kernel being had."""
        return self._serving.chosen(spec, device, general)

    def outlook(self, spec: KernelSpec, device: int) -> Outlook:
        """What :meth:`serving_handle` would answer, without fetching, compiling or loading anything."""
        found = self._serving.known(spec, device)
        if found is not None:
            return found
        exists = self._configuration.store is not None or default_cache_dir(os.environ).exists()
        return foresee(spec, device, self._supply, self.on_miss, store_exists=exists)

    def fall_back(self, reason: FallbackReason, found: str, decision: Hashable = None) -> None:
        """Count a call that goes without its kernel, and log it the first time that ``decision`` is met.

        ``found`` says what was found, in words. ``disabled`` and ``cpu`` are no warning: somebody chose them.
        """
        self.tally.fall_back(reason, found, decision)

    def _open_store(self) -> KernelStore:
        given = self._configuration.store
        return open_default_store() if given is None else given

    def is_capturing(self, device: "torch.device") -> bool:
        """Whether torch's current stream of that device is being captured into a graph."""
        return device.type == "cuda" and is_capturing(device.index or 0)

    def forget_graph(self, key: Hashable = None) -> None:
        """Forget which path was recorded under a graph key, ahead of capturing that graph anew on purpose.

        Without a key, forget what captures without one have recorded.
        """
        self.decisions.forget(key)

    @property
    def store(self) -> KernelStore:
        """Where kernels are kept on this machine."""
        return self._supply.store

    @property
    def service(self) -> RestTransport | None:
        """The service that is asked; None where none is configured, or the client is offline."""
        return None if self.offline else self._configuration.transport

    def stats(self) -> ClientStats:
        """Counts so far, in this process."""
        return self.tally.stats(
            specialisations=len(self._serving.specialisations),
            specialisation_limit=self._serving.specialisations.limit,
            layouts=0 if self.layouts is None else len(self.layouts),
            launches=0 if self.layouts is None else self.layouts.hits,
        )

    def close(self) -> None:
        """End connections and compile processes. The client starts new ones when it is used again."""
        self.misses.close()
        self._supply.close()

    def forget(self) -> None:
        """Back to the configuration alone; what a parent process still uses is left to it."""
        self.misses.forget()
        self._supply.forget()
        self._serving.forget()
        self.decisions = Decisions()
        self.layouts = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> Configuration:
        return self._configuration

    def __setstate__(self, configuration: Configuration) -> None:
        self._configure(configuration)


def offline_by_environment() -> bool:
    """Whether ``MLAPREP_OFFLINE`` forbids every socket. Raises SpecError for a word that is no switch."""
    return read_switch("MLAPREP_OFFLINE", os.environ)


def _open_builder(store: KernelStore) -> KernelBuilder:
    try:
        from mlaprep.service.builder import Builder
    except ImportError as error:
        raise KernelUnavailable(
            f"cannot compile here: {error.name} is not installed; install mlaprep[service,cuda12]"
        ) from error
    return Builder(store)
