"""KernelHandle: a verified kernel that a worker calls.

A handle is made from an artifact, loads its module once a device and keeps it for the life of the
process. It launches on torch's current stream of the tensors' device and leaves everything else alone.
"""

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mlaprep.clients.errors import ArtifactRejected, DriverError, ForkedProcessError, KernelNotReady, NotCovered
from mlaprep.clients.launch import KernelDriver, Launcher, cuda_driver
from mlaprep.clients.operands import Operands, check_operands, check_slot_rules
from mlaprep.clients.plan import MAX_TOKENS, RowShape, plan_launch
from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.errors import ArtifactError
from mlaprep.kernels_cache.origin import require_own_call
from mlaprep.templates.arch import Arch
from mlaprep.templates.errors import SpecError
from mlaprep.templates.render import render
from mlaprep.templates.spec import DYNAMIC, KernelSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_INPUT_ALIGNMENT: Final = 16
"""Bytes: inputs are read 16 at a time."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """Whether a handle takes a call; true if it does, and ``reason`` says why where it does not."""

    reason: str | None = None

    def __bool__(self) -> bool:
        return self.reason is None


@dataclass(frozen=True, slots=True)
class _DeviceKernel:
    launch: Launcher
    multiprocessors: int


class KernelHandle:
    """One variant's kernel, callable.

    Raises:
        ArtifactRejected: the artifact does not verify, or is not called as this release calls its spec.
    """

    def __init__(self, artifact: KernelArtifact, driver: KernelDriver | None = None) -> None:
        manifest = artifact.manifest
        try:
            artifact.verify()
            self.spec: Final = KernelSpec.from_dict(manifest.spec)
            self.arch: Final = Arch(manifest.arch)
            # Arguments go to the driver by the manifest's word: a wrong list is memory written at random.
            require_own_call(manifest, render(self.spec))
        except ArtifactError as error:
            raise ArtifactRejected(f"asked for {manifest.variant_id}: {error}", reason=error.reason) from error
        except SpecError as error:
            raise ArtifactRejected(f"asked for {manifest.variant_id}: {error}", reason="wrong-spec") from error
        self.artifact: Final = artifact
        self._driver = driver
        self._names = tuple(name for name, _ in manifest.launch["parameters"])
        self._shape = RowShape.from_launch(manifest.launch)
        self._devices: dict[int, _DeviceKernel] = {}
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
            DriverError: no driver, or the kernel's architecture is not the device's.
            ForkedProcessError: this process is a fork of the one that made the handle.
        """
        import torch

        if device is None:
            device = torch.cuda.current_device()
        if isinstance(device, torch.device):
            device = torch.cuda.current_device() if device.index is None else device.index
        self._device_kernel(device)
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
        operands = self._check(
            q_nope, q_rope, k_nope, k_rope, kv_cache, loc, q_scale_inv, kv_scale_inv, out, dcp_rank, reserved_slot
        )
        return Coverage(self._uncovered(operands, reserved_slot))

    def __call__(
        self,
        q_nope: "Tensor | None",
        q_rope: "Tensor | None",
        k_nope: "Tensor | None",
        k_rope: "Tensor | None",
        kv_cache: "Tensor | None",
        loc: "Tensor | None",
        *,
        q_scale_inv: "Tensor | None" = None,
        kv_scale_inv: "Tensor | None" = None,
        out: "Tensor | None" = None,
        dcp_rank: int = 0,
        reserved_slot: int | None = None,
    ) -> "Tensor | None":
        """Prepare T tokens in one launch: write their cache rows, return their queries.

        Args:
            q_nope: ``[T, H, R]`` bf16 or fp16, last stride 1.
            q_rope: ``[T, H, D]``, same dtype; None if D = 0.
            k_nope: ``[T, R]`` or ``[T, 1, R]``, same dtype.
            k_rope: ``[T, D]`` or ``[T, 1, D]``, same dtype; None if D = 0.
            kv_cache: ``[S, W]``, ``[S, 1, W]`` or ``[pages, page, W]``, float8_e4m3fn or uint8, written in place.
            loc: ``[T]`` int32 or int64, distinct slots; negative, reserved, foreign and out-of-range slots
                write nothing.
            q_scale_inv, kv_scale_inv: one float32 on the device, a multiplier before rounding, for specs
                made with that scale.
            out: ``[T, H, W]`` float8_e4m3fn to write the query to; a new tensor by default.
            dcp_rank: this rank, for specs with ``dcp_world`` above 1.
            reserved_slot: the slot never written, for specs with ``reserved_slot``.

        Returns:
            The query, ``[T, H, W]`` float8_e4m3fn; None for a spec with ``write_q`` false. T = 0 launches nothing.

        Raises:
            NotCovered: the kernel does not take this layout; use the chain.
            TypeError, ValueError: arguments that nothing could take.
            KernelNotReady: not loaded on this device while its stream is captured; the capture stays valid.
            ForkedProcessError: this process is a fork of the one that made the handle.
            DriverError: the driver refused the launch.
        """
        import torch

        operands = self._check(
            q_nope, q_rope, k_nope, k_rope, kv_cache, loc, q_scale_inv, kv_scale_inv, out, dcp_rank, reserved_slot
        )
        reason = self._uncovered(operands, reserved_slot)
        if reason is not None:
            raise NotCovered(f"{self.spec.variant_id} does not cover this call: {reason}")
        query = operands.out
        if query is None and self.spec.write_q:
            shape = (operands.tokens, operands.heads, self.spec.row_width)
            query = torch.empty(shape, dtype=torch.float8_e4m3fn, device=operands.device)
        if operands.tokens:
            device = operands.device.index or 0
            kernel = self._devices.get(device) if os.getpid() == self._pid else None
            if kernel is None:
                kernel = self._device_kernel(device)
            values = self._arguments(operands, query, dcp_rank, reserved_slot)
            config = plan_launch(self._shape, operands.tokens, kernel.multiprocessors)
            kernel.launch(config, self._open_driver().current_stream(device), [values[name] for name in self._names])
        return query

    def _check(
        self,
        q_nope: object,
        q_rope: object,
        k_nope: object,
        k_rope: object,
        kv_cache: object,
        loc: object,
        q_scale_inv: object,
        kv_scale_inv: object,
        out: object,
        dcp_rank: object,
        reserved_slot: object,
    ) -> Operands:
        spec = self.spec
        operands = check_operands(
            q_nope,
            q_rope,
            k_nope,
            k_rope,
            kv_cache,
            loc,
            q_scale_inv=q_scale_inv,
            kv_scale_inv=kv_scale_inv,
            out=out,
            write_kv=spec.write_kv,
            write_q=spec.write_q,
        )
        check_slot_rules(reserved_slot, spec.dcp_world, dcp_rank, spec.dcp_interleave, operands.page)
        return operands

    def _uncovered(self, operands: Operands, reserved_slot: int | None) -> str | None:
        """The first reason why this kernel does not take these operands, or None."""
        spec = self.spec
        device_type = "cuda" if self._driver is None else self._driver.device_type
        if operands.device.type != device_type:
            return f"tensors on {operands.device.type}, the kernel runs on {device_type}"
        dtype = str(operands.dtype).removeprefix("torch.")
        if dtype != _TORCH_DTYPE[spec.dtype]:
            return f"inputs of {dtype}, the kernel takes {_TORCH_DTYPE[spec.dtype]}"
        if spec.write_q and operands.heads != spec.num_heads:
            return f"{operands.heads} heads, the kernel has {spec.num_heads}"
        for name, found, wanted in (
            ("kv_lora_rank", operands.rank, spec.kv_lora_rank),
            ("rope_dim", operands.rope_dim, spec.rope_dim),
        ):
            if found != wanted:
                return f"{name} {found}, the kernel has {wanted}"
        if operands.tokens > MAX_TOKENS:
            return f"{operands.tokens} tokens, one launch takes at most {MAX_TOKENS}"
        for name, given, made in (
            ("q_scale_inv", operands.q_scale_inv is not None, spec.q_scale != "none"),
            ("kv_scale_inv", operands.kv_scale_inv is not None, spec.kv_scale != "none"),
            ("reserved_slot", reserved_slot is not None, spec.reserved_slot),
        ):
            if given != made:
                return f"{name} {'given' if given else 'absent'}, unlike in the spec the kernel was made for"
        return self._uncovered_slots(operands) or self._uncovered_memory(operands)

    def _uncovered_slots(self, operands: Operands) -> str | None:
        loc = operands.loc
        if loc is None:
            return None
        width = loc.element_size() * 8
        if f"i{width}" != self.spec.loc_dtype:
            return f"loc of int{width}, the kernel takes int{self.spec.loc_dtype[1:]}"
        if operands.tokens > 1 and loc.stride(0) != 1:
            return f"loc with stride {loc.stride(0)}, the kernel takes a contiguous one"
        if loc.data_ptr() % loc.element_size():
            return f"loc at an address that is no multiple of {loc.element_size()} bytes"
        return None

    def _uncovered_memory(self, operands: Operands) -> str | None:
        spec = self.spec
        stored = spec.elements_per_thread  # one byte an element, stored at once
        for name, tensor, dims, alignment in (
            ("q_nope", operands.q_nope, _QUERY_DIMS, _INPUT_ALIGNMENT),
            ("q_rope", operands.q_rope, _QUERY_DIMS, _INPUT_ALIGNMENT),
            ("k_nope", operands.k_nope, _TOKEN_DIMS, _INPUT_ALIGNMENT),
            ("k_rope", operands.k_rope, _TOKEN_DIMS, _INPUT_ALIGNMENT),
            ("kv_cache", operands.kv_cache, _CACHE_DIMS, stored),
            ("out", operands.out, _QUERY_DIMS, stored),
        ):
            if tensor is None or tensor.numel() == 0:
                continue
            if tensor.data_ptr() % alignment:
                return f"{name} at an address that is no multiple of {alignment} bytes"
            *strides, last = tensor.stride()
            if last != 1:
                return f"{name} with a last stride of {last}, the kernel takes 1"
            for size, stride, dim in zip(tensor.shape, strides, dims, strict=False):
                if size == 1:
                    continue
                if stride * tensor.element_size() % alignment:
                    return f"{name} with a {dim} stride of {stride} elements, no multiple of {alignment} bytes"
                made = getattr(spec, _STRIDE_FIELD[name, dim])
                if made not in (DYNAMIC, stride):
                    return f"{name} with a {dim} stride of {stride} elements, the kernel was made for {made}"
        if operands.out is None and spec.write_q and operands.tokens:
            packed = (spec.num_heads * spec.row_width, spec.row_width)
            for dim, stride, size in zip(_QUERY_DIMS, packed, (operands.tokens, spec.num_heads), strict=True):
                if size > 1 and getattr(spec, f"out_{dim}_stride") not in (DYNAMIC, stride):
                    return f"no out, the kernel writes a result with a {dim} stride of its own; pass out"
        return None

    def _arguments(
        self, operands: Operands, query: "Tensor | None", dcp_rank: int, reserved_slot: int | None
    ) -> dict[str, int]:
        tensors = {
            "q_out": query,
            "kv_cache": operands.kv_cache,
            "q_nope": operands.q_nope,
            "q_rope": operands.q_rope,
            "k_nope": operands.k_nope,
            "k_rope": operands.k_rope,
            "loc": operands.loc,
            "q_scale_inv": operands.q_scale_inv,
            "kv_scale_inv": operands.kv_scale_inv,
        }
        values = {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}
        values |= {
            "tokens": operands.tokens,
            "cache_rows": operands.rows,
            "dcp_rank": dcp_rank,
            "reserved_slot": 0 if reserved_slot is None else reserved_slot,
        }
        for (name, dim), field in _STRIDE_FIELD.items():
            tensor = query if name == "out" else tensors[name]
            if tensor is not None:
                values[field] = tensor.stride(_DIM_INDEX[dim])
        return values

    def _open_driver(self) -> KernelDriver:
        if self._driver is None:
            self._driver = cuda_driver()
        return self._driver

    def _device_kernel(self, device: int) -> _DeviceKernel:
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                f"asked to use {self!r} in process {os.getpid()}, found it created in pid {self._pid}; "
                "CUDA does not survive a fork: load the kernel in the child, or start it with spawn"
            )
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
            loaded = driver.load(self.artifact.cubin, self.artifact.manifest.entry, device)
            parameters = [(name, kind) for name, kind in launch["parameters"]]
            launcher = driver.prepare(loaded, parameters, launch["pdl"])
            self._devices[device] = _DeviceKernel(launcher, loaded.multiprocessors)
            return self._devices[device]


_TORCH_DTYPE: Final = {"bf16": "bfloat16", "fp16": "float16"}
_QUERY_DIMS: Final = ("token", "head")
_TOKEN_DIMS: Final = ("token",)
_CACHE_DIMS: Final = ("row",)
_DIM_INDEX: Final = {"token": 0, "head": 1, "row": 0}
_STRIDE_FIELD: Final = {
    ("q_nope", "token"): "q_nope_token_stride",
    ("q_nope", "head"): "q_nope_head_stride",
    ("q_rope", "token"): "q_rope_token_stride",
    ("q_rope", "head"): "q_rope_head_stride",
    ("k_nope", "token"): "k_nope_token_stride",
    ("k_rope", "token"): "k_rope_token_stride",
    ("kv_cache", "row"): "cache_row_stride",
    ("out", "token"): "out_token_stride",
    ("out", "head"): "out_head_stride",
}
