"""The prepare kernel in sglang's TRT-LLM MLA backend: ``install()``, ``uninstall()``, and a plugin that is off until
``MLAPREP_SGLANG`` is on.

Decode, target verify and draft extend of ``TRTLLMMLABackend`` and of its subclasses prepare their query and write
their cache rows in one launch where a kernel covers the call. Everything else runs sglang's own methods, whole.
"""

import functools
import importlib.abc
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from mlaprep.clients.errors import HookRefused
from mlaprep.clients.sglang_contract import BACKEND, CUTEDSL, require_known
from mlaprep.clients.sglang_query import AttentionCall, QueryMaker
from mlaprep.templates.environment import read_switch

if TYPE_CHECKING:
    from mlaprep.clients.client import KernelClient

__all__ = ["install", "plugin", "stats", "uninstall"]

_log: Final = logging.getLogger(__name__)
_PREPARED: Final = object()
"""Stands where sglang looks for the rotary columns of a query that has them already."""

Forward = Callable[..., Any]


class _Hook:
    """What was put in the place of what. ``maker`` is None while nothing is to be hooked."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.maker: QueryMaker | None = None
        self.put: dict[tuple[Any, str], tuple[Any, Any]] = {}
        """(owner, name) -> (sglang's own, ours)."""

    def replace(self, owner: Any, name: str, wrap: Callable[[Forward], Forward]) -> None:
        if (owner, name) in self.put:
            return
        found = vars(owner)[name]
        # A module imported after another was hooked has taken our function from it.
        own, ours = next((pair for pair in self.put.values() if pair[1] is found), (found, None))
        ours = ours or functools.wraps(own)(wrap(own))
        self.put[owner, name] = (own, ours)
        setattr(owner, name, ours)

    def restore(self) -> None:
        for (owner, name), (own, ours) in list(self.put.items()):
            # Whoever wrapped ours since then keeps their wrapper; ours passes everything on from now on.
            if vars(owner).get(name) is ours:
                setattr(owner, name, own)
                del self.put[owner, name]


_hook: Final = _Hook()


def install(client: "KernelClient | None" = None) -> None:
    """Hook sglang's backends in this process. Call it before the engine starts, in every process that runs a model;
    :func:`plugin` does that without a change of code.

    Idempotent; a second call changes the client. Backends that exist already are hooked as well.

    Args:
        client: where kernels come from; by default the process's, made from the environment at first use.

    Raises:
        HookRefused: no sglang, or one that this hook does not know; nothing is changed.
    """
    with _hook.lock:
        _start(require_known((BACKEND, CUTEDSL)), client)


def uninstall() -> None:
    """Put sglang's own methods back. Graphs captured meanwhile keep the launches they hold."""
    with _hook.lock:
        _hook.maker = None
        _hook.restore()
        _Watcher.withdraw()


def stats() -> Mapping[str, int]:
    """Calls since :func:`install` by what became of them; a replayed graph makes none.

    ``fused`` took one launch, ``chain`` the unfused chain (CPU tensors); every other name is a reason why
    sglang's own path was taken. ``client.stats()`` says why where it is ``no-kernel``.
    """
    maker = _hook.maker
    return {} if maker is None else dict(maker.counts)


def plugin() -> None:
    """What sglang calls in each of its processes (entry point group ``sglang.srt.plugins``).

    Does nothing unless ``MLAPREP_SGLANG`` is on. It imports nothing of sglang, since importing the backend makes a
    CUDA context, which processes without a model must not have: each module is hooked as sglang itself imports
    it. A version that is not known is told once in the log, and sglang runs unchanged.

    Raises:
        SpecError: an ``MLAPREP_SGLANG`` that is no switch.
    """
    if not read_switch("MLAPREP_SGLANG", os.environ):
        return
    with _hook.lock:
        for name in (BACKEND, CUTEDSL):
            if name in sys.modules:
                _start_or_tell(name)
            else:
                _Watcher.awaited.add(name)
        if _Watcher.awaited and not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Watcher())


def _start_or_tell(name: str) -> None:
    try:
        with _hook.lock:
            _start(require_known((BACKEND, name)), None)
    except HookRefused as error:
        _log.error("%s", error)


def _start(modules: dict[str, ModuleType], client: "KernelClient | None") -> None:
    if _hook.maker is None or client is not None:
        _hook.maker = QueryMaker(modules, client)
    base: Any = modules[BACKEND]
    _hook.replace(base.TRTLLMMLABackend, "forward_decode", _decode)
    _hook.replace(base.TRTLLMMLABackend, "forward_extend", _extend)
    _hook.replace(base, "mla_quantize_without_rope_for_fp8", _quantise)
    if CUTEDSL in modules:
        cutedsl: Any = modules[CUTEDSL]
        _hook.replace(cutedsl.CuteDslMLABackend, "forward_decode", _sharded_decode)
        _hook.replace(cutedsl, "mla_quantize_without_rope_for_fp8", _quantise)


def _decode(own: Forward) -> Forward:
    def forward_decode(self: Any, *args: Any, **named: Any) -> Any:
        return _forward(own, self, AttentionCall(*args, **named), "decode")

    return forward_decode


def _sharded_decode(own: Forward) -> Forward:
    def forward_decode(self: Any, *args: Any, **named: Any) -> Any:
        maker = _hook.maker
        # Without DCP sglang's own method goes on to that of the class above, which is hooked as well.
        if maker is None or not maker.sharded():
            return own(self, *args, **named)
        return _forward(own, self, AttentionCall(*args, **named), "decode")

    return forward_decode


def _extend(own: Forward) -> Forward:
    def forward_extend(self: Any, *args: Any, **named: Any) -> Any:
        call = AttentionCall(*args, **named)
        mode = call.forward_batch.forward_mode
        if mode.is_target_verify():
            return _forward(own, self, call, "verify")
        if mode.is_draft_extend_v2():
            return _forward(own, self, call, "draft")
        return own(self, *call)

    return forward_extend


def _quantise(own: Forward) -> Forward:
    def mla_quantize_without_rope_for_fp8(q_nope: Any, q_rope: Any, k_nope: Any, k_rope: Any) -> Any:
        if q_rope is _PREPARED:
            return q_nope, k_nope, k_rope
        return own(q_nope, q_rope, k_nope, k_rope)

    return mla_quantize_without_rope_for_fp8


def _forward(own: Forward, backend: Any, call: AttentionCall, kind: str) -> Any:
    """Prepare the query and hand it to sglang's own method; or hand everything to it, untouched."""
    maker = _hook.maker
    if maker is None or call.q_rope is _PREPARED or call.q_rope is None or maker.is_dummy_run():
        return own(backend, *call)
    query = maker.query(backend, call, kind)
    if query is None:
        return own(backend, *call)
    # One decision: a query means written rows, so sglang neither saves the cache nor concatenates nor rotates.
    import torch

    rounds = backend.data_type == torch.float8_e4m3fn and kind != "draft"
    prepared = call._replace(
        q=query, save_kv_cache=False, q_rope=_PREPARED if rounds else None, cos_sin_cache=None, is_neox=False
    )
    return own(backend, *prepared)


class _Watcher(importlib.abc.MetaPathFinder):
    """Hooks modules as they are imported."""

    awaited: Final[set[str]] = set()

    @classmethod
    def withdraw(cls) -> None:
        cls.awaited.clear()
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, cls)]

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.awaited:
            return None
        self.awaited.discard(name)  # first, since the search below comes here again
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Hooking(spec.loader)
        return spec


class _Hooking(importlib.abc.Loader):
    """A module's own loader, followed by the hook."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _start_or_tell(module.__name__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
