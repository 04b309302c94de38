"""explain: which path a prepare call would take, and why, in one line."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Unpack, overload

from mlaprep.clients.decisions import Decision, check_graph_key
from mlaprep.clients.dispatch import (
    KNOWN,
    call_tensors,
    checked,
    graph_shape,
    option_values,
    usable_client,
    wanted_spec,
)
from mlaprep.clients.layouts import layout_key
from mlaprep.clients.operands import Operands
from mlaprep.clients.options import PrepareOptions, SharedOptions
from mlaprep.clients.specialise import with_constant_strides
from mlaprep.clients.spelling import canonical
from mlaprep.templates.fields import DYNAMIC
from mlaprep.templates.spec import KernelSpec

if TYPE_CHECKING:
    from torch import Tensor

    from mlaprep.clients.client import KernelClient


@dataclass(frozen=True, slots=True)
class Explanation:
    """The path of a call. ``str()`` is one line."""

    fused: bool
    """One launch; else the unfused chain, or an error."""
    reason: str
    """Why that."""
    error: str | None = None
    """The error that the call would raise instead, by its class's name."""
    variant_id: str | None = None
    """The kernel that covers the call; None where none does, or where it was not looked for."""
    arch: str | None = None
    """What it is, or would be, compiled for."""
    strides: str | None = None
    """``specialised`` where strides of inputs or cache are constants of the kernel, ``dynamic`` where none is."""
    ready: bool = False
    """The kernel is loaded on the device: the call launches at once, and may be captured."""
    source: str | None = None
    """Where a kernel that is not loaded would come from: ``memory``, ``disk``, ``service`` or ``compiled``."""

    def __str__(self) -> str:
        kernel = f"{self.variant_id}, strides {self.strides}" + ("" if self.arch is None else f", for {self.arch}")
        if self.fused:
            return f"one launch of {kernel}: {self.reason}"
        path = "the unfused chain" if self.error is None else self.error
        return f"{path}{'' if self.variant_id is None else f' instead of {kernel}'}: {self.reason}"


@overload
def explain(
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
) -> Explanation: ...


@overload
def explain(
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
) -> Explanation: ...


def explain(
    *tensors: Any, client: "KernelClient | None" = None, graph_key: Hashable = None, **options: Any
) -> Explanation:
    """Which path :func:`prepare` would take with these arguments, and why. The call itself is not made.

    Launches nothing, writes nothing, loads nothing, counts and records nothing. The place a kernel would come from
    is told without asking a service or compiling, so either may still fail.

    Raises:
        TypeError, ValueError: arguments that nothing could take; the argument is named.
    """
    client = usable_client(client)
    check_graph_key(graph_key)
    tensors, options = canonical(tensors, options, KNOWN)
    tensors = call_tensors(tensors, options)
    operands = checked(tensors, options)
    found = _found(client, operands, options)
    capturing = client.is_capturing(operands.device)
    if capturing and found.fused and not found.ready:
        error = "KernelNotReady" if client.on_cold_capture == "error" else None
        found = replace(found, fused=False, error=error, reason="not loaded, and the stream is being captured")
    if graph_key is not None:
        key: tuple[Hashable, Hashable] = (graph_key, graph_shape(operands, options))
    elif capturing:
        key = (None, layout_key((*tensors, *option_values(options))))
    else:
        return found
    recorded: Decision | None = client.decisions.find(*key)
    if recorded is None or found.error is not None or recorded.fused == found.fused:
        return found
    return replace(found, fused=False, error="DecisionChanged", reason=f"recorded is {recorded}; {found.reason}")


def _found(client: "KernelClient", operands: Operands, options: Mapping[str, Any]) -> Explanation:
    spec, _, why = wanted_spec(client, operands, options)
    if spec is None:
        return Explanation(False, why)
    device = operands.device.index or 0
    exact = with_constant_strides(spec, operands, options.get("reserved_slot"))
    chosen = client.serving_spec(exact, device, spec)
    outlook = client.outlook(chosen, device)
    if chosen != spec and not outlook.ready and outlook.source is None:
        chosen, outlook = spec, client.outlook(spec, device)
    verified = ", and compared with the chain (MLAPREP_VERIFY)" if client.switches.verify else ""
    common = Explanation(
        fused=True,
        reason=f"loaded on {operands.device}{verified}",
        variant_id=chosen.variant_id,
        arch=None if outlook.arch is None else outlook.arch.name,
        strides="specialised" if _has_constant_strides(chosen) else "dynamic",
        ready=outlook.ready,
        source=outlook.source,
    )
    if outlook.ready:
        return common
    if outlook.source is not None:
        return replace(common, reason=f"not loaded yet, {_WORDS[outlook.source]}{verified}")
    error = "KernelUnavailable" if client.on_miss == "error" else None
    return replace(common, fused=False, error=error, reason=outlook.reason)


def _has_constant_strides(spec: KernelSpec) -> bool:
    fields = ("q_nope_token", "q_nope_head", "q_rope_token", "q_rope_head", "k_nope_token", "k_rope_token")
    return any(getattr(spec, f"{field}_stride") != DYNAMIC for field in (*fields, "cache_row", "cache_page"))


_WORDS: Final = {
    "memory": "taken from process memory",
    "disk": "read from the local store",
    "bundle": "read from a bundle",
    "service": "asked of the service",
    "compiled": "compiled on this machine",
}
