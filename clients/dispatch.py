"""prepare and fused_prepare: a worker's one-line entry to the prepare kernel.

``fused_prepare`` answers with the query, or with None where no kernel covers the call and nothing was
written; ``prepare`` takes the unfused chain there. The decision depends on shapes, dtypes, layout and
options alone, never on values.
"""

import functools
import threading
from typing import TYPE_CHECKING, Final

from mlaprep.clients.errors import NotCovered
from mlaprep.clients.operands import Operands, check_operands, check_slot_rules
from mlaprep.clients.reference import prepare_chain
from mlaprep.kernels_cache.forks import forget_when_forked
from mlaprep.templates.errors import SpecError
from mlaprep.templates.spec import KernelSpec, parse_variant_id

if TYPE_CHECKING:
    from torch import Tensor

    from mlaprep.clients.client import KernelClient
    from mlaprep.clients.handle import KernelHandle

_DTYPE: Final = {"bfloat16": "bf16", "float16": "fp16"}


def fused_prepare(
    q_nope: "Tensor | None",
    q_rope: "Tensor | None",
    k_nope: "Tensor | None",
    k_rope: "Tensor | None",
    kv_cache: "Tensor | None",
    loc: "Tensor | None",
    *,
    q_scale_inv: "Tensor | None" = None,
    kv_scale_inv: "Tensor | None" = None,
    reserved_slot: int | None = None,
    dcp_world: int = 1,
    dcp_rank: int = 0,
    dcp_interleave: int = 1,
    out: "Tensor | None" = None,
    client: "KernelClient | None" = None,
) -> "Tensor | None":
    """Prepare T tokens in one launch, or answer None and touch nothing.

    Tensors and options as for :meth:`KernelHandle.__call__` and :func:`prepare_chain`. The first call of a
    shape loads its kernel through ``client`` (by default one made from the environment); load it ahead with
    ``client.load`` where that must not happen in the serving path.

    Returns:
        ``[T, H, R + D]`` float8_e4m3fn, or None where no kernel covers the call.

    Raises:
        TypeError, ValueError: arguments that nothing could take; the argument is named.
        KernelNotReady: the kernel is not loaded on the device and its stream is being captured.
    """
    operands = check_operands(
        q_nope, q_rope, k_nope, k_rope, kv_cache, loc, q_scale_inv=q_scale_inv, kv_scale_inv=kv_scale_inv, out=out
    )
    check_slot_rules(reserved_slot, dcp_world, dcp_rank, dcp_interleave, operands.page)
    if client is not None and not callable(getattr(client, "serving_handle", None)):
        raise TypeError(f"client is a {type(client).__name__}; give a KernelClient, or none for the default one")
    if operands.device.type != "cuda":
        return None
    spec = _spec(operands, reserved_slot is not None, dcp_world, dcp_interleave)
    handle = None if spec is None else (client or default_client()).serving_handle(spec, operands.device.index or 0)
    if handle is None:
        return None
    try:
        return handle(
            q_nope,
            q_rope,
            k_nope,
            k_rope,
            kv_cache,
            loc,
            q_scale_inv=q_scale_inv,
            kv_scale_inv=kv_scale_inv,
            out=out,
            dcp_rank=dcp_rank,
            reserved_slot=reserved_slot,
        )
    except NotCovered:
        return None


def prepare(
    q_nope: "Tensor",
    q_rope: "Tensor | None",
    k_nope: "Tensor",
    k_rope: "Tensor | None",
    kv_cache: "Tensor",
    loc: "Tensor",
    *,
    q_scale_inv: "Tensor | None" = None,
    kv_scale_inv: "Tensor | None" = None,
    reserved_slot: int | None = None,
    dcp_world: int = 1,
    dcp_rank: int = 0,
    dcp_interleave: int = 1,
    out: "Tensor | None" = None,
    client: "KernelClient | None" = None,
) -> "Tensor":
    """Prepare T tokens: one launch where a kernel covers the call, else the unfused chain.

    The bytes are the same either way. Arguments as for :func:`fused_prepare`.

    Returns:
        ``[T, H, R + D]`` float8_e4m3fn.

    Raises:
        TypeError, ValueError: arguments that nothing could take; the argument is named.
        KernelNotReady: the kernel is not loaded on the device and its stream is being captured.
    """
    query = fused_prepare(
        q_nope,
        q_rope,
        k_nope,
        k_rope,
        kv_cache,
        loc,
        q_scale_inv=q_scale_inv,
        kv_scale_inv=kv_scale_inv,
        reserved_slot=reserved_slot,
        dcp_world=dcp_world,
        dcp_rank=dcp_rank,
        dcp_interleave=dcp_interleave,
        out=out,
        client=client,
    )
    if query is None:
        query = prepare_chain(
            q_nope,
            q_rope,
            k_nope,
            k_rope,
            kv_cache,
            loc,
            q_scale_inv=q_scale_inv,
            kv_scale_inv=kv_scale_inv,
            reserved_slot=reserved_slot,
            dcp_world=dcp_world,
            dcp_rank=dcp_rank,
            dcp_interleave=dcp_interleave,
            out=out,
        )
    assert query is not None
    return query


def default_client() -> "KernelClient":
    """The process's client, made from the environment at first use (anew in a forked child)."""
    return _default.get()


class _DefaultClient:
    """Holds the one client of a process, however many threads ask for it first."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Back to no client, with a lock that nobody holds."""
        self._lock = threading.Lock()
        self._client: KernelClient | None = None

    def get(self) -> "KernelClient":
        client = self._client  # without the lock, since prepare comes here
        return self._first() if client is None else client

    def _first(self) -> "KernelClient":
        from mlaprep.clients.client import KernelClient

        # Before the lock is taken: a fork while another thread holds it would leave it held in the child.
        forget_when_forked(self)
        with self._lock:
            if self._client is None:
                self._client = KernelClient()
            return self._client


_default: Final = _DefaultClient()


def load_variant(variant_id: str, arch: str) -> "KernelHandle":
    """A handle by name through the default client; unpickling a handle comes here."""
    return default_client().load(parse_variant_id(variant_id), arch=arch)


def _spec(operands: Operands, reserved: bool, dcp_world: int, dcp_interleave: int) -> KernelSpec | None:
    """The spec of a call with every stride dynamic, or None where its dimensions are none of a kernel's."""
    assert operands.loc is not None
    try:
        return _cached_spec(
            operands.heads,
            operands.rank,
            operands.rope_dim,
            _DTYPE[str(operands.dtype).removeprefix("torch.")],
            f"i{operands.loc.element_size() * 8}",
            operands.q_scale_inv is not None,
            operands.kv_scale_inv is not None,
            reserved,
            dcp_world,
            dcp_interleave,
            operands.out is not None and not operands.out.is_contiguous(),
            all(_stored_16(tensor) for tensor in (operands.kv_cache, operands.out)),
        )
    except SpecError:
        return None


@functools.lru_cache(maxsize=1024)
def _cached_spec(
    heads: int,
    rank: int,
    rope_dim: int,
    dtype: str,
    loc_dtype: str,
    q_scale: bool,
    kv_scale: bool,
    reserved: bool,
    dcp_world: int,
    dcp_interleave: int,
    strided_out: bool,
    aligned: bool,
) -> KernelSpec:
    return KernelSpec.from_dict(
        {
            "num_heads": heads,
            "kv_lora_rank": rank,
            "rope_dim": rope_dim,
            "dtype": dtype,
            "loc_dtype": loc_dtype,
            "q_scale": "scalar" if q_scale else "none",
            "kv_scale": "scalar" if kv_scale else "none",
            "reserved_slot": reserved,
            "dcp_world": dcp_world,
            "dcp_interleave": dcp_interleave if dcp_world > 1 else 1,
            "elements_per_thread": None if aligned else 8,
            "out_token_stride": "dynamic" if strided_out else None,
            "out_head_stride": "dynamic" if strided_out else None,
        }
    )


def _stored_16(tensor: "Tensor | None") -> bool:
    """Whether every row of a result starts at a multiple of 16 bytes."""
    return tensor is None or (
        tensor.data_ptr() % 16 == 0
        and all(stride % 16 == 0 for size, stride in zip(tensor.shape[:-1], tensor.stride(), strict=False) if size > 1)
    )
