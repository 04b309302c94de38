"""prepare and fused_prepare: a worker's one-line entry to the prepare kernel.

``fused_prepare`` answers with the query, or with None where no kernel covers the call and nothing was
written; ``prepare`` takes the unfused chain there. The decision depends on shapes, dtypes, layout and
options alone, never on values.
"""

import functools
import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Unpack, cast, overload

from mlaprep.clients.coverage import coverage
from mlaprep.clients.decisions import Decision, check_graph_key
from mlaprep.clients.errors import VerificationFailed
from mlaprep.clients.operands import Operands, check_operands, check_slot_rules
from mlaprep.clients.options import PrepareOptions, SharedOptions
from mlaprep.clients.prepared import TENSORS, layout_key, option_key, recall, remember
from mlaprep.clients.reference import prepare_chain
from mlaprep.clients.spelling import OWN, canonical, slots_come_second
from mlaprep.clients.verify import run_verified
from mlaprep.kernels_cache.forks import forget_when_forked
from mlaprep.templates.errors import SpecError
from mlaprep.templates.spec import KernelSpec, parse_variant_id

if TYPE_CHECKING:
    from torch import Tensor

    from mlaprep.clients.client import KernelClient
    from mlaprep.clients.handle import KernelHandle
    from mlaprep.clients.stats import FallbackReason


@overload
def fused_prepare(
    q_nope: "Tensor | None",
    q_rope: "Tensor | None",
    k_nope: "Tensor | None",
    k_rope: "Tensor | None",
    kv_cache: "Tensor | None",
    loc: "Tensor | None",
    *,
    client: "KernelClient | None" = None,
    graph_key: Hashable = None,
    **options: Unpack[PrepareOptions],
) -> "Tensor | None": ...


@overload
def fused_prepare(
    kv_buffer: "Tensor",
    loc: "Tensor",
    cache_k_nope: "Tensor",
    cache_k_rope: "Tensor",
    q_nope: "Tensor",
    q_rope: "Tensor",
    num_warps: int = 0,
    dcp_world_size: int = 1,
    dcp_rank: int = 0,
    *,
    client: "KernelClient | None" = None,
    graph_key: Hashable = None,
    **options: Unpack[SharedOptions],
) -> "Tensor | None": ...


def fused_prepare(
    *tensors: Any, client: "KernelClient | None" = None, graph_key: Hashable = None, **options: Any
) -> "Tensor | None":
    """Prepare T tokens in one launch, or answer None and touch nothing.

    Tensors as for :meth:`KernelHandle.__call__`, options as :class:`PrepareOptions` lists them. The order and
    the names of SGLang's ``set_mla_kv_concat_q_fp8`` and ``set_mla_kv_concat_q`` will do as well:
    :func:`~mlaprep.clients.spelling.canonical` says what becomes of them. The first
    call of a shape loads its kernel through ``client`` (by default one made from the environment); load it
    ahead with ``client.load`` where that must not happen in the serving path. With ``write_q=False`` the
    answer is an empty tensor where the kernel ran.

    Returns:
        ``[T, H, R + D]`` float8_e4m3fn or as ``q_nope``, or None where no kernel covers the call.

    Raises:
        TypeError, ValueError: arguments that nothing could take; the argument is named.
        KernelNotReady: the kernel is not loaded on the device and its stream is being captured.
        DecisionChanged: the shape was recorded, under ``graph_key`` or by an earlier capture, and would now
            take the other path.
        VerificationFailed: ``MLAPREP_VERIFY`` is on, and a byte differs from the unfused chain's.
    """
    client = usable_client(client)
    if len(tensors) != len(OWN) or not options.keys() <= KNOWN or slots_come_second(tensors):
        tensors, options = canonical(tensors, options, KNOWN)
    if graph_key is not None:
        check_graph_key(graph_key)
    tensors = call_tensors(tensors, options)
    layout = layout_key(tensors)
    key = (layout, option_values(options))
    plan = recall(client.prepared, key) if graph_key is None else None
    if plan is None or not plan.of_this_process():
        operands = checked(tensors, options)
        handle, decision = _decide(client, operands, options)
        captured = graph_key is None and layout is not None and client.is_capturing(operands.device)
        if captured:
            client.decisions.settle(None, key, decision)
        elif graph_key is not None:
            client.decisions.settle(graph_key, graph_shape(operands, options), decision)
        if handle is None:
            return None
        rank, reserved_slot = options.get("dcp_rank", 0), options.get("reserved_slot")
        plan = handle.plan(operands, rank, reserved_slot)
        if layout is None:
            tensors = tuple(getattr(operands, name) for name in TENSORS)
        if client.switches.verify:
            if handle.can_verify(operands.device):
                try:
                    result = run_verified(handle, plan, tensors, operands, rank, reserved_slot)
                except VerificationFailed:
                    client.tally.add("verify_failures")
                    raise
                client.tally.add("verified")
                return plan.nothing() if result is None else result
            client.tally.add("unverified")
        elif layout is not None:
            recorded = client.decisions.find(None, key)
            # Where a capture took the chain nothing is remembered, so that the next capture is held to that.
            if recorded is None or recorded.fused:
                remember(client.prepared, key, plan)
    result = plan.run(tensors)
    return plan.nothing() if result is None else result


@overload
def prepare(
    q_nope: "Tensor | None",
    q_rope: "Tensor | None",
    k_nope: "Tensor | None",
    k_rope: "Tensor | None",
    kv_cache: "Tensor | None",
    loc: "Tensor | None",
    *,
    client: "KernelClient | None" = None,
    graph_key: Hashable = None,
    **options: Unpack[PrepareOptions],
) -> "Tensor | None": ...


@overload
def prepare(
    kv_buffer: "Tensor",
    loc: "Tensor",
    cache_k_nope: "Tensor",
    cache_k_rope: "Tensor",
    q_nope: "Tensor",
    q_rope: "Tensor",
    num_warps: int = 0,
    dcp_world_size: int = 1,
    dcp_rank: int = 0,
    *,
    client: "KernelClient | None" = None,
    graph_key: Hashable = None,
    **options: Unpack[SharedOptions],
) -> "Tensor | None": ...


def prepare(
    *tensors: Any, client: "KernelClient | None" = None, graph_key: Hashable = None, **options: Any
) -> "Tensor | None":
    """Prepare T tokens: one launch where a kernel covers the call, else the unfused chain.

    The bytes are the same either way. Arguments as for :func:`fused_prepare`.

    Returns:
        ``[T, H, R + D]`` float8_e4m3fn or as ``q_nope``; None with ``write_q=False``.

    Raises:
        TypeError, ValueError: arguments that nothing could take; the argument is named.
        KernelNotReady: the kernel is not loaded on the device and its stream is being captured.
    """
    query: Tensor | None = fused_prepare(*tensors, client=client, graph_key=graph_key, **options)
    if query is None:
        tensors, options = canonical(tensors, options, KNOWN)
        return prepare_chain(*tensors, **options)
    return query if options.get("write_q", True) else None


def usable_client(client: "KernelClient | None") -> "KernelClient":
    """The client to ask: the one given, or the process's own. Raises TypeError for what is none."""
    if client is None:
        return default_client()
    if not callable(getattr(client, "serving_handle", None)):
        raise TypeError(f"client is a {type(client).__name__}; give a KernelClient, or none for the default one")
    return client


def call_tensors(tensors: Sequence[Any], options: Mapping[str, Any]) -> tuple[Any, ...]:
    """A call's tensors in the order of :data:`TENSORS`; operands of a side that is left out are not looked at."""
    q_nope, q_rope, k_nope, k_rope, kv_cache, loc = tensors
    if options.get("write_kv") is False:
        k_nope = k_rope = kv_cache = loc = None
    if options.get("write_q") is False:
        q_nope = q_rope = None
    return (q_nope, q_rope, k_nope, k_rope, kv_cache, loc, *[options.get(name) for name in _TENSOR_OPTIONS])


def option_values(options: Mapping[str, Any]) -> tuple[object, ...]:
    """The options of a call that are no tensors, as part of a key."""
    return option_key(*[options.get(name) for name in _OPTIONS])


def checked(tensors: Sequence[Any], options: Mapping[str, Any]) -> Operands:
    """A call's operands, its tensors in the order of :data:`TENSORS`.

    Raises:
        TypeError, ValueError: arguments that nothing could take; the argument is named.
    """
    operands = check_operands(
        *tensors[:6],
        **dict(zip(_TENSOR_OPTIONS, tensors[6:], strict=True)),
        layout=options.get("layout", "fp8"),
        query_dtype=options.get("query_dtype"),
        tile_scale=options.get("tile_scale"),
        rope=options.get("rope", "none"),
        pad_heads_to=options.get("pad_heads_to"),
        write_kv=options.get("write_kv", True),
        write_q=options.get("write_q", True),
    )
    world, interleave = options.get("dcp_world", 1), options.get("dcp_interleave", 1)
    check_slot_rules(options.get("reserved_slot"), world, options.get("dcp_rank", 0), interleave, operands.page)
    return operands


def graph_shape(operands: Operands, options: Mapping[str, Any]) -> Hashable:
    """What a graph key stands for: numbers and options of a call, not where its operands lie in memory."""
    numbers = operands.tokens, operands.heads, operands.rank, operands.rope_dim, operands.dtype, operands.device
    return numbers, tuple(getattr(operands, name) is not None for name in TENSORS), option_values(options)


def wanted_spec(
    client: "KernelClient", operands: Operands, options: Mapping[str, Any]
) -> "tuple[KernelSpec | None, FallbackReason | None, str]":
    """The kernel that these operands ask for; or None, the reason and what was found, in words."""
    if client.switches.disable:
        return None, "disabled", "MLAPREP_DISABLE is on"
    if operands.device.type != _DEVICE_TYPE:
        return None, "cpu", f"the tensors are on {operands.device.type}"
    spec, found = covering(operands, cast(PrepareOptions, options))
    return spec, "uncovered" if spec is None else None, found


def _decide(
    client: "KernelClient", operands: Operands, options: Mapping[str, Any]
) -> "tuple[KernelHandle | None, Decision]":
    """The kernel to launch, or None; and that in words. Counts a call that goes without."""
    spec, reason, found = wanted_spec(client, operands, options)
    if reason == "uncovered":
        client.fall_back(reason, *_uncovered(operands, found))
    elif reason is not None:
        client.fall_back(reason, found, operands.device.type)
    if spec is None:
        return None, Decision(False, found)
    handle = client.serving_handle(spec, operands.device.index or 0)
    if handle is None:
        return None, Decision(False, f"there was no kernel {spec.variant_id} to be had")
    return handle, Decision(True, spec.variant_id)


def covering_spec(operands: Operands, options: PrepareOptions) -> KernelSpec | None:
    """The spec of the kernel that takes these operands; None if there is none."""
    return covering(operands, options)[0]


def covering(operands: Operands, options: PrepareOptions) -> tuple[KernelSpec | None, str]:
    """The spec of the kernel that takes these operands, every input stride dynamic; or None and the reason.

    The widest accesses that widths, strides and addresses allow are chosen; the reason is the one that keeps
    the narrowest from it.
    """
    reserved_slot = options.get("reserved_slot")
    # Slot rules say nothing where no cache is written.
    writes = operands.kv_cache is not None
    world = options.get("dcp_world", 1) if writes else 1
    scale = operands.q_scale_inv
    even = operands.page_stride == operands.page * operands.row_stride
    out = operands.out
    fields = (
        # With no query the number of heads says nothing, and one kernel serves them all.
        ("num_heads", operands.heads if operands.q_nope is not None else 1),
        ("kv_lora_rank", operands.rank),
        ("rope_dim", operands.rope_dim),
        ("dtype", _DTYPE[str(operands.dtype).removeprefix("torch.")]),
        ("layout", operands.layout.name),
        ("query_dtype", operands.layout.query_dtype),
        ("tile_scale", operands.layout.tile_scale),
        ("rope", options.get("rope", "none")),
        ("loc_dtype", _index_dtype(operands.loc)),
        ("position_dtype", _index_dtype(operands.positions)),
        ("q_scale", "none" if scale is None else "scalar" if scale.numel() == 1 else "token"),
        ("kv_scale", "none" if operands.kv_scale_inv is None else "scalar"),
        ("dcp_world", world),
        ("dcp_interleave", options.get("dcp_interleave", 1) if world > 1 else 1),
        ("reserved_slot", writes and reserved_slot is not None),
        ("pad_heads_to", operands.padded_heads if operands.q_nope is not None else None),
        ("page_size", 1 if even else operands.page),
        ("write_kv", writes),
        ("write_q", operands.q_nope is not None),
        ("out_token_stride", None if out is None or out.is_contiguous() else "dynamic"),
        ("out_head_stride", None if out is None or out.is_contiguous() else "dynamic"),
    )
    unmade = unmet = ""
    for elements in _ELEMENTS_PER_THREAD:
        spec = _spec((*fields, ("elements_per_thread", elements)))
        if isinstance(spec, str):
            unmade = spec
            continue
        covered = coverage(spec, _DEVICE_TYPE, operands, reserved_slot)
        if covered.reason is None:
            return spec, ""
        unmet = covered.reason
    return None, unmet or unmade


def _uncovered(operands: Operands, reason: str) -> tuple[str, tuple[object, ...]]:
    """A layout that no kernel takes, in words, and what tells it from others of another shape."""
    decision = (operands.heads, operands.rank, operands.rope_dim, str(operands.dtype), operands.layout.name)
    shape = "{} heads of {} + {} {}, layout {}".format(*decision)
    return f"no kernel takes this call ({shape}): {reason}", decision


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


@functools.lru_cache(maxsize=4096)
def _spec(fields: tuple[tuple[str, object], ...]) -> KernelSpec | str:
    """The spec of these fields, or what is wrong with them."""
    try:
        return KernelSpec.from_dict(dict(fields))
    except SpecError as error:
        # The width of accesses is no wish of the caller's, so it is told last.
        return str(min(error.problems, key=lambda problem: problem.field == "elements_per_thread"))


def _index_dtype(indices: "Tensor | None") -> str:
    return "i64" if indices is None else f"i{indices.element_size() * 8}"


_DTYPE: Final = {"bfloat16": "bf16", "float16": "fp16"}
_ELEMENTS_PER_THREAD: Final = (16, 8, 4, 2)
_TENSOR_OPTIONS: Final = ("positions", "cos_sin_cache", "q_scale_inv", "kv_scale_inv", "out")
_OPTIONS: Final = tuple(name for name in PrepareOptions.__annotations__ if name not in _TENSOR_OPTIONS)
KNOWN: Final = frozenset(PrepareOptions.__annotations__)
_DEVICE_TYPE: Final = "cuda"
