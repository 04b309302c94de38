"""KernelHandle: a verified kernel that a worker calls.

A handle is made from an artifact, loads its module once a device and keeps it for the life of the
process. It launches on torch's current stream of the tensors' device and leaves everything else alone.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

from mlaprep.clients.coverage import Coverage, coverage, page_stride
from mlaprep.clients.errors import ArtifactRejected, DriverError, ForkedProcessError, KernelNotReady, NotCovered
from mlaprep.clients.launch import KernelDriver, Launcher, cuda_driver, device_ordinal
from mlaprep.clients.layouts import LayoutTable, open_layout_table
from mlaprep.clients.operands import Operands, check_operands, check_slot_rules
from mlaprep.clients.plan import RowShape, measured_buckets, plan_launch
from mlaprep.clients.prepared import OUT, TENSORS, PreparedLaunch
from mlaprep.clients.reference import spec_chain
from mlaprep.clients.stats import Tier
from mlaprep.clients.switches import Switches
from mlaprep.clients.tracing import span
from mlaprep.clients.verify import run_verified, tell_skipped
from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.errors import ArtifactError
from mlaprep.kernels_cache.origin import require_own_call
from mlaprep.templates.arch import Arch
from mlaprep.templates.errors import SpecError
from mlaprep.templates.render import render
from mlaprep.templates.spec import KernelSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class _DeviceKernel:
    launch: Launcher
    multiprocessors: int


class KernelHandle:
    """One variant's kernel, callable.

    Args:
        artifact: the kernel.
        driver: what loads and launches it; the CUDA driver by default.
        tier: the place that had it.
        on_loaded: called with this handle, the device and the milliseconds it took, once a device.
        spec: what the artifact was proved to be made from, by :func:`mlaprep.kernels_cache.origin.require_own`; proved
            here where it is not given.

    Raises:
        ArtifactRejected: the artifact does not verify, or is not called as this release calls its spec.
        SpecError: ``MLAPREP_DISABLE`` or ``MLAPREP_VERIFY`` is no switch.
    """

    def __init__(
        self,
        artifact: KernelArtifact,
        driver: KernelDriver | None = None,
        *,
        tier: Tier = "memory",
        on_loaded: "Callable[[KernelHandle, int, float], None] | None" = None,
        spec: KernelSpec | None = None,
    ) -> None:
        manifest = artifact.manifest
        try:
            artifact.verify()
            self.spec: Final = KernelSpec.from_dict(manifest.spec) if spec is None else spec
            self.arch: Final = Arch(manifest.arch)
            if spec is None:
                # Arguments go to the driver by the manifest's word: a wrong list is memory written at random.
                require_own_call(manifest, render(self.spec))
        except ArtifactError as error:
            raise ArtifactRejected(f"asked for {manifest.variant_id}: {error}", reason=error.reason) from error
        except SpecError as error:
            raise ArtifactRejected(f"asked for {manifest.variant_id}: {error}", reason="wrong-spec") from error
        self.artifact: Final = artifact
        self._switches = Switches.from_environment()
        self._told_unverified = False
        self._driver = driver
        self.tier: Final = tier
        self._on_loaded = on_loaded
        self._parameters = tuple((name, kind) for name, kind in manifest.launch["parameters"])
        self._shape = RowShape.from_launch(manifest.launch)
        self._buckets = measured_buckets(manifest.arch, self.spec.rope != "none")
        self._devices: dict[int, _DeviceKernel] = {}
        self._layouts: LayoutTable | None = None
        self._loading = threading.Lock()
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"KernelHandle({self.spec.variant_id!r}, {self.arch.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        # A module cannot cross processes; the spec can, and the default client loads it anew there.
        from mlaprep.clients.dispatch import load_variant

        return load_variant, (self.spec.variant_id, self.arch.name)

    def load(self, device: "int | torch.device | None" = None) -> "KernelHandle":
        """Load the module on a device now (torch's current one by default), so that no call has to.

        Idempotent and thread-safe. Call it before capturing a graph.

        Raises:
            KernelNotReady: the device's current stream is being captured.
            DriverError: no driver or device, or the kernel's architecture is not the device's.
            TypeError, ValueError: no CUDA device; the argument is named.
            ForkedProcessError: this process is a fork of the one that made the handle.
        """
        self._device_kernel(device_ordinal(device))
        return self

    def covers(
        self,
        q_nope: "Tensor | None",
        q_rope: "Tensor | None",
        k_nope: "Tensor | None",
        k_rope: "Tensor | None",
        kv_cache: "Tensor | None",
        loc: "Tensor | None",
        *,
        positions: "Tensor | None" = None,
        cos_sin_cache: "Tensor | None" = None,
        q_scale_inv: "Tensor | None" = None,
        kv_scale_inv: "Tensor | None" = None,
        out: "Tensor | None" = None,
        dcp_rank: int = 0,
        reserved_slot: int | None = None,
    ) -> Coverage:
        """Whether this kernel takes exactly these tensors; if not, the reason.

        Shapes and dtypes as for the call. Launches nothing and touches no device memory.

        Raises:
            TypeError, ValueError: arguments that no kernel and no chain could take; the argument is named.
        """
        tensors = (
            q_nope, q_rope, k_nope, k_rope, kv_cache, loc,
            positions, cos_sin_cache, q_scale_inv, kv_scale_inv, out,
        )  # fmt: skip
        operands = self._check(tensors, dcp_rank, reserved_slot)
        return self._coverage(operands, reserved_slot)

    def __call__(
        self,
        q_nope: "Tensor | None",
        q_rope: "Tensor | None",
        k_nope: "Tensor | None",
        k_rope: "Tensor | None",
        kv_cache: "Tensor | None",
        loc: "Tensor | None",
        *,
        positions: "Tensor | None" = None,
        cos_sin_cache: "Tensor | None" = None,
        q_scale_inv: "Tensor | None" = None,
        kv_scale_inv: "Tensor | None" = None,
        out: "Tensor | None" = None,
        dcp_rank: int = 0,
        reserved_slot: int | None = None,
    ) -> "Tensor | None":
        """Prepare T tokens in one launch: write their cache rows, return their queries.

        Where ``MLAPREP_DISABLE`` is on, the unfused chain does that instead, for the same layouts.

        Args:
            q_nope: ``[T, H, R]`` bf16 or fp16, last stride 1.
            q_rope: ``[T, H, D]``, same dtype; None if D = 0.
            k_nope: ``[T, R]`` or ``[T, 1, R]``, same dtype.
            k_rope: ``[T, D]`` or ``[T, 1, D]``, same dtype; None if D = 0.
            kv_cache: ``[S, W]``, ``[S, 1, W]`` or ``[pages, page, W]`` as the spec's layout has it
                (``fp8``: float8_e4m3fn or uint8; ``same``: as q_nope; ``ds_mla``: bytes), written in place.
            loc: ``[T]`` int32 or int64, distinct slots; negative, reserved, foreign and out-of-range slots
                write nothing.
            positions: ``[T]`` int32 or int64, for specs with rope; one outside the table reads its nearest row.
            cos_sin_cache: ``[P, D]`` float32, contiguous rows ``[cos | sin]``, for specs with rope.
            q_scale_inv: float32 multiplier of queries before rounding, one element or ``[T]``, for specs made
                with that scale.
            kv_scale_inv: one float32 on the device, the same for latent rows.
            out: ``[T, H, W]`` of the query's dtype to write it to; a new tensor by default.
            dcp_rank: this rank, for specs with ``dcp_world`` above 1.
            reserved_slot: the slot never written, for specs with ``reserved_slot``.

        Returns:
            The query, ``[T, H, W]`` float8_e4m3fn or as q_nope, H padded as the spec says; None for a spec with
            ``write_q`` false. T = 0 launches nothing.

        Raises:
            NotCovered: the kernel does not take this layout; use the chain.
            TypeError, ValueError: arguments that nothing could take.
            KernelNotReady: not loaded on this device while its stream is captured; the capture stays valid.
            ForkedProcessError: this process is a fork of the one that made the handle.
            DriverError: the driver refused the launch.
            VerificationFailed: ``MLAPREP_VERIFY`` is on, and a byte differs from the unfused chain's.
        """
        call = (
            q_nope, q_rope, k_nope, k_rope, kv_cache, loc,
            positions, cos_sin_cache, q_scale_inv, kv_scale_inv, out, dcp_rank, reserved_slot,
        )  # fmt: skip
        if self._layouts is not None:
            found = self._layouts.call(call, _NO_KEYWORDS)
            if found is not NotImplemented:
                return None if isinstance(found, PreparedLaunch) else found
        return self._first_call(call)

    def _first_call(self, call: tuple[Any, ...]) -> "Tensor | None":
        """A call whose layout is not remembered: checked, launched, and remembered if it can be."""
        *given, dcp_rank, reserved_slot = call
        tensors = tuple(given)
        operands = self._check(tensors, dcp_rank, reserved_slot)
        covered = self._coverage(operands, reserved_slot)
        if not covered:
            raise NotCovered(f"{self.spec.variant_id} does not cover this call: {covered.reason}")
        if self._switches.disable:
            query = spec_chain(self.spec, operands, dcp_rank, reserved_slot)
            return query if tensors[OUT] is None else tensors[OUT]
        if os.getpid() != self._pid:
            self._refuse_fork()
        plan = self.plan(operands, dcp_rank, reserved_slot)
        checked = [getattr(operands, name) for name in TENSORS]
        if self._switches.verify and self.can_verify(operands.device):
            query = run_verified(self, plan, checked, operands, dcp_rank, reserved_slot)
        else:
            query = plan.run(checked)
        if not self._switches.verify:
            if self._layouts is None:
                self._layouts = open_layout_table()
            self._layouts.add(call, _NO_KEYWORDS, _SLOTS, plan)
        return query if tensors[OUT] is None else tensors[OUT]

    def can_verify(self, device: "torch.device") -> bool:
        """Whether a launch could be waited for: not while the device's current stream is being captured."""
        if not self._open_driver().is_capturing(device.index or 0):
            return True
        if not self._told_unverified:
            self._told_unverified = True
            tell_skipped(self)
        return False

    def plan(self, operands: Operands, dcp_rank: int = 0, reserved_slot: int | None = None) -> PreparedLaunch:
        """The launch of operands that were checked and are covered, for every call of their layout.

        Raises:
            KernelNotReady, ForkedProcessError, DriverError: as the call does.
        """
        spec, config, kernel = self.spec, None, None
        if operands.tokens:
            kernel = self._device_kernel(operands.device.index or 0)
            config = plan_launch(self._shape, operands.tokens, kernel.multiprocessors, self._buckets)
        values = self._arguments(operands, dcp_rank, reserved_slot)
        return PreparedLaunch(
            pid=self._pid,
            launch=None if kernel is None else kernel.launch,
            config=config,
            stream=None if kernel is None else self._open_driver().current_stream,
            device=operands.device,
            pointers=tuple(_POINTERS[name] for name, kind in self._parameters if kind == "pointer"),
            scalars=tuple(values[name] for name, kind in self._parameters if kind != "pointer"),
            result_shape=(operands.tokens, operands.padded_heads, spec.row_width) if spec.write_q else None,
            result_dtype=operands.result_dtype,
            like=self._result_like(operands) if kernel is not None and spec.write_q and operands.out is None else None,
        )

    def _result_like(self, operands: Operands) -> "Tensor":
        """A tensor of the result's shape that owns no memory: ``empty_like`` of it costs half of ``empty``."""
        import torch

        one = torch.empty(1, dtype=operands.result_dtype, device=operands.device)
        like: Tensor = one.expand(operands.tokens, operands.padded_heads, self.spec.row_width)
        # Plans outlive a capture, and nothing that does may stay allocated in its pool.
        one.untyped_storage().resize_(0)
        return like

    def _check(self, tensors: tuple[Any, ...], dcp_rank: object, reserved_slot: object) -> Operands:
        """Operands from a call's tensors, in the order of :data:`TENSORS`."""
        spec = self.spec
        operands = check_operands(
            *tensors[:6],
            **dict(zip(TENSORS[6:], tensors[6:], strict=True)),
            layout=spec.layout,
            query_dtype=spec.query_dtype,
            tile_scale=None if spec.tile_scale == "none" else spec.tile_scale,
            rope=spec.rope,
            # Another number of heads is not this kernel's; only one beyond its padding is nobody's.
            pad_heads_to=spec.pad_heads_to if spec.pad_heads_to > spec.num_heads else None,
            write_kv=spec.write_kv,
            write_q=spec.write_q,
        )
        check_slot_rules(reserved_slot, spec.dcp_world, dcp_rank, spec.dcp_interleave, operands.page)
        return operands

    def _coverage(self, operands: Operands, reserved_slot: int | None) -> Coverage:
        device_type = "cuda" if self._driver is None else self._driver.device_type
        return coverage(self.spec, device_type, operands, reserved_slot)

    def _arguments(self, operands: Operands, dcp_rank: int, reserved_slot: int | None) -> dict[str, int]:
        """The arguments that are passed by value."""
        packed = (operands.padded_heads * self.spec.row_width, self.spec.row_width)
        values = {
            "tokens": operands.tokens,
            "cache_rows": operands.rows,
            "cos_sin_rows": 0 if operands.cos_sin_cache is None else len(operands.cos_sin_cache),
            "dcp_rank": dcp_rank,
            "reserved_slot": 0 if reserved_slot is None else reserved_slot,
            "cache_row_stride": operands.row_stride,
            "cache_page_stride": page_stride(self.spec, operands),
            "out_token_stride": packed[0] if operands.out is None else operands.out.stride(0),
            "out_head_stride": packed[1] if operands.out is None else operands.out.stride(1),
        }
        for name in _STRIDED:
            tensor: Tensor | None = getattr(operands, name)
            if tensor is not None:
                values[f"{name}_token_stride"] = tensor.stride(0)
                if tensor.dim() == 3:
                    values[f"{name}_head_stride"] = tensor.stride(1)
        return values

    def _open_driver(self) -> KernelDriver:
        if self._driver is None:
            self._driver = cuda_driver()
        return self._driver

    def _refuse_fork(self) -> NoReturn:
        raise ForkedProcessError(
            f"asked to use {self!r} in process {os.getpid()}, found it created in pid {self._pid}; "
            "CUDA does not survive a fork: load the kernel in the child, or start it with spawn"
        )

    def _device_kernel(self, device: int) -> _DeviceKernel:
        if os.getpid() != self._pid:
            self._refuse_fork()
        driver = self._open_driver()
        with self._loading:
            if device in self._devices:
                return self._devices[device]
            capability = driver.capability(device)
            if not self.arch.runs_on(capability):
                raise DriverError(
                    f"asked to load {self!r} on device {device}, found compute capability "
                    f"{capability[0]}.{capability[1]}; load the kernel built for that device"
                )
            if driver.is_capturing(device):
                raise KernelNotReady(
                    f"asked to run {self!r} on device {device} for the first time while its stream is being captured; "
                    "call handle.load(device) before the capture"
                )
            launch = self.artifact.manifest.launch
            began = time.perf_counter()
            with span("load", self.spec, self.arch, device=device, tier=self.tier):
                loaded = driver.load(self.artifact.cubin, self.artifact.manifest.entry, device)
            launcher = driver.prepare(loaded, self._parameters, launch["pdl"])
            self._devices[device] = _DeviceKernel(launcher, loaded.multiprocessors)
            if self._on_loaded is not None:
                self._on_loaded(self, device, (time.perf_counter() - began) * 1e3)
            return self._devices[device]


_STRIDED: Final = ("q_nope", "q_rope", "k_nope", "k_rope")
_SLOTS: Final = tuple(range(len(TENSORS)))
_NO_KEYWORDS: Final[dict[str, Any]] = {}
_POINTERS: Final = {"q_out": OUT, **{name: index for index, name in enumerate(TENSORS)}}
