"""prepare and fused_prepare: a worker's one-line entry to the prepare kernel.

``fused_prepare`` answers with the query, or with None where no kernel covers the call and nothing was
written; ``prepare`` takes the unfused chain there. The decision depends on shapes, dtypes, layout and
options alone, never on values.
"""

import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Unpack, cast, overload

from mlaprep.clients import specialise
from mlaprep.clients.decisions import Decision, check_graph_key
from mlaprep.clients.errors import VerificationFailed
from mlaprep.clients.layouts import layout_key
from mlaprep.clients.operands import Operands, check_operands, check_slot_rules
from mlaprep.clients.options import PrepareOptions, SharedOptions
from mlaprep.clients.prepared import OUT, TENSORS, PreparedLaunch
from mlaprep.clients.reference import prepare_chain
from mlaprep.clients.specialise import covering, with_constant_strides
from mlaprep.clients.spelling import OWN, canonical, slot_names, slots_come_second
from mlaprep.clients.verify import run_verified
from mlaprep.kernels_cache.forks import forget_when_forked
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
    # Written out in both entries, since each call of a function would add 0.1 µs to a launch of 3.
    if client is None:
        client = _default.client or default_client()
    layouts = getattr(client, "layouts", None)
    found = NotImplemented if layouts is None or graph_key is not None else layouts.call(tensors, options)
    if found is NotImplemented:
        found = _first_call(usable_client(client), graph_key, tensors, options)
    return found.nothing() if isinstance(found, PreparedLaunch) else found


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
    if client is None:
        client = _default.client or default_client()
    layouts = getattr(client, "layouts", None)
    found = NotImplemented if layouts is None or graph_key is not None else layouts.call(tensors, options)
    if found is NotImplemented:
        found = _first_call(usable_client(client), graph_key, tensors, options)
    if found is None:
        tensors, options = canonical(tensors, options, KNOWN)
        return prepare_chain(*tensors, **options)
    return None if isinstance(found, PreparedLaunch) else found


def _first_call(
    client: "KernelClient", graph_key: Hashable, given: tuple[Any, ...], spelled: dict[str, Any]
) -> "Tensor | PreparedLaunch | None":
    """A call whose layout is not remembered, as it was written: checked, launched, and remembered if it can be.

    The query; the plan where none is made; None where the chain is to run.
    """
    names = slot_names(given, spelled)
    call, options = given, spelled
    if len(call) != len(OWN) or not options.keys() <= KNOWN or slots_come_second(call):
        call, options = canonical(call, options, KNOWN)
    if graph_key is not None:
        check_graph_key(graph_key)
    tensors = call_tensors(call, options)
    operands = checked(tensors, options)
    handle, decision = _decide(client, operands, options)
    key = layout_key((*tensors, *option_values(options)))
    if graph_key is not None:
        client.decisions.settle(graph_key, graph_shape(operands, options), decision)
    elif key is not None and client.is_capturing(operands.device):
        client.decisions.settle(None, key, decision)
    if handle is None:
        return None
    plan = handle.plan(operands, options.get("dcp_rank", 0), options.get("reserved_slot"))
    if client.switches.verify:
        query = _verified(client, handle, plan, operands, options)
    else:
        query = plan.run([getattr(operands, name) for name in TENSORS])
        recorded = None if key is None else client.decisions.find(None, key)
        # Where a capture took the chain nothing is remembered, so that the next capture is held to that.
        if recorded is None or recorded.fused:
            named = zip(TENSORS, tensors, strict=True)
            slots = tuple(-1 if tensor is None else names.index(name) for name, tensor in named)
            client.remember(given, spelled, slots, plan)
    if query is None:
        return plan
    out = tensors[OUT]
    return query if out is None else out


def _verified(
    client: "KernelClient",
    handle: "KernelHandle",
    plan: PreparedLaunch,
    operands: Operands,
    options: Mapping[str, Any],
) -> "Tensor | None":
    tensors = [getattr(operands, name) for name in TENSORS]
    if not handle.can_verify(operands.device):
        client.tally.add("unverified")
        return plan.run(tensors)
    rank, reserved_slot = options.get("dcp_rank", 0), options.get("reserved_slot")
    try:
        query = run_verified(handle, plan, tensors, operands, rank, reserved_slot)
    except VerificationFailed:
        client.tally.add("verify_failures")
        raise
    client.tally.add("verified")
    return query


def usable_client(client: "KernelClient | None") -> "KernelClient":
    """The client to ask: the one given, or the process's own. Raises TypeError for what is none."""
    if client is None:
        return default_client()
    if not hasattr(client, "layouts"):
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
    """The options of a call that are no tensors, in one order."""
    return tuple(options.get(name) for name in _OPTIONS)


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
    if operands.device.type != specialise.DEVICE_TYPE:
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
    exact = with_constant_strides(spec, operands, options.get("reserved_slot"))
    handle = client.serving_handle(exact, operands.device.index or 0, general=spec)
    if handle is None:
        return None, Decision(False, f"there was no kernel {spec.variant_id} to be had")
    return handle, Decision(True, handle.spec.variant_id)


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
        self.client: KernelClient | None = None

    def get(self) -> "KernelClient":
        client = self.client  # without the lock, since prepare comes here
        return self._first() if client is None else client

    def _first(self) -> "KernelClient":
        from mlaprep.clients.client import KernelClient

        # Before the lock is taken: a fork while another thread holds it would leave it held in the child.
        forget_when_forked(self)
        with self._lock:
            if self.client is None:
                self.client = KernelClient()
            return self.client


_default: Final = _DefaultClient()


def load_variant(variant_id: str, arch: str) -> "KernelHandle":
    """A handle by name through the default client; unpickling a handle comes here."""
    return default_client().load(parse_variant_id(variant_id), arch=arch)


_TENSOR_OPTIONS: Final = ("positions", "cos_sin_cache", "q_scale_inv", "kv_scale_inv", "out")
_OPTIONS: Final = tuple(name for name in PrepareOptions.__annotations__ if name not in _TENSOR_OPTIONS)
KNOWN: Final = frozenset(PrepareOptions.__annotations__)
