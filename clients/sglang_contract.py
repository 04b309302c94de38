"""What the hook relies on in sglang: names, their parameters and their source, as read in the versions it knows."""

import hashlib
import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from mlaprep.clients.errors import HookRefused

BACKEND: Final = "sglang.srt.layers.attention.trtllm_mla_backend"
CUTEDSL: Final = "sglang.srt.layers.attention.cutedsl_mla_backend"
POOL: Final = "sglang.srt.mem_cache.memory_pool"

KNOWN_VERSIONS: Final = ("0.5.23",)


@dataclass(frozen=True, slots=True)
class ReliedOn:
    """A name of sglang, as it stands in the versions known."""

    module: str
    name: str
    parameters: str
    """Names in order, comma-separated; ``=`` follows one that has a default."""
    digest: str
    """The first half of the sha256 of its source: a patched build may keep a signature and change what it does."""


_QUANTISE: Final = "q_nope, q_rope, k_nope, k_rope"
_FORWARD: Final = (
    "self, q, k, v, layer, forward_batch, save_kv_cache=, q_rope=, k_rope=, cos_sin_cache=, is_neox=, llama_4_scaling="
)
_WRITE: Final = "self, dst_buffer, loc, cache_k_nope, cache_k_rope"
RELIED_ON: Final = (
    ReliedOn(BACKEND, "TRTLLMMLABackend.forward_decode", _FORWARD, "2fc71b5439f6c0e23d432a99e2e420a1"),
    ReliedOn(BACKEND, "TRTLLMMLABackend.forward_extend", _FORWARD, "5cc5b19e388f97cd6d24a843f71621fa"),
    ReliedOn(
        BACKEND,
        "mla_quantize_without_rope_for_fp8",
        "q_nope, q_rope, k_nope, k_rope",
        "cddef914a182fa478790969c03ada79f",
    ),
    ReliedOn(BACKEND, "get_parallel", "", "75d1c5f8a754b0424f79d5ade3c47daa"),
    ReliedOn(BACKEND, "get_in_autotune_dummy_run", "", "e4344dbee0256b1d516e0a21e03fc3f8"),
    ReliedOn(CUTEDSL, "CuteDslMLABackend.forward_decode", _FORWARD, "6301f89bf707feccfa51f092ef89a126"),
    ReliedOn(
        CUTEDSL,
        "mla_quantize_without_rope_for_fp8",
        "q_nope, q_rope, k_nope, k_rope",
        "cddef914a182fa478790969c03ada79f",
    ),
    ReliedOn(
        POOL,
        "MLATokenToKVPool.set_mla_kv_buffer",
        "self, layer, loc_info, cache_k_nope, cache_k_rope, layer_id_override=",
        "bf0d40c30f329a0f4eb387ea66cedc35",
    ),
    ReliedOn(POOL, "MLATokenToKVPool._write_mla_kv_buffer", _WRITE, "d342f123b5fcf933b69ac792504236af"),
    ReliedOn(POOL, "MLATokenToKVPool._scatter_mla_rows", _WRITE, "ccc251890c61d72d39fad9d6cbf10ffc"),
    ReliedOn(POOL, "MLATokenToKVPool.get_key_buffer", "self, layer_id", "822eb385826281a8fc52ab4205b4c3f9"),
    ReliedOn(
        POOL,
        "HybridLinearKVPool.set_mla_kv_buffer",
        "self, layer, loc_info, cache_k_nope, cache_k_rope",
        "70f73c05fe05e5b29bc94f1f7e987788",
    ),
    ReliedOn(POOL, "HybridLinearKVPool.get_key_buffer", "self, layer_id, scale=", "dd30e8f695f842dcffb591a10b248cdb"),
)


def require_known(modules: Iterable[str]) -> dict[str, ModuleType]:
    """Import modules of sglang and compare what is relied on in them and in the pools.

    Raises:
        HookRefused: sglang is not installed, is of a version not known, or a name is not what it was; nothing
            of sglang has been changed.
    """
    wanted = {*modules, POOL}
    try:
        version = str(importlib.import_module("sglang.version").__version__)
        found = {name: importlib.import_module(name) for name in sorted(wanted)}
    except ImportError as error:
        raise HookRefused(
            f"asked to hook sglang, found that it cannot be imported ({error}); install sglang {_KNOWN} beside "
            "mlaprep, or leave the hook out"
        ) from error
    changes = [change for name in RELIED_ON if name.module in wanted for change in _changes(found[name.module], name)]
    if version not in KNOWN_VERSIONS or changes:
        told = "; ".join(changes) if changes else "no name that is hooked differs, but nobody has proved this version"
        raise HookRefused(
            f"asked to hook sglang, found version {version}, the hook knows {_KNOWN}: {told}. "
            "sglang runs unchanged; install a version that is known, or an mlaprep that knows this one",
            version=version,
            changes=changes,
        )
    return found


def parameters_of(function: Any) -> str:
    """Names of its parameters, as :class:`ReliedOn` spells them."""
    return ", ".join(
        parameter.name + "=" * (parameter.default is not parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
    )


def source_digest(function: Any) -> str:
    """The digest of :class:`ReliedOn`; raises OSError where there is no source. Wrappers are looked through."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:32]


def _changes(module: ModuleType, relied_on: ReliedOn) -> list[str]:
    """What differs, in words; none where all is as it was."""
    value: Any = module
    for part in relied_on.name.split("."):
        # A method that a class no longer defines itself is another method.
        value = vars(value).get(part)
        if value is None:
            return [f"{relied_on.name} is not in {module.__name__}"]
    try:
        parameters, digest = parameters_of(value), source_digest(value)
    except (TypeError, ValueError, OSError):
        return [f"{relied_on.name} is no function with a source to compare"]
    if parameters != relied_on.parameters:
        return [f"{relied_on.name} takes ({parameters}), not ({relied_on.parameters})"]
    if digest != relied_on.digest:
        return [f"{relied_on.name} takes the same and does something else"]
    return []


_KNOWN: Final = " or ".join(KNOWN_VERSIONS)
