"""Layout tables: launches remembered by all that decides them, so that a repeated call costs microseconds.

A table is asked with a call as it was written. Where types, shapes, strides, dtypes, devices, alignment and
options are those of a remembered one, it launches that with the addresses of this call; anything else is a miss.
``_layouts.c`` is the same table in C, for a torch that offers its C exchange API (2.10 and later).
"""

import importlib
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Protocol

from mlaprep.clients.prepared import PreparedLaunch
from mlaprep.templates.environment import read_switch

if TYPE_CHECKING:
    from types import NotImplementedType

MAX_LAYOUTS: Final = 4096
"""Layouts remembered by one handle or client before it starts over: far more than a process captures."""

_ALIGNMENT: Final = 31
"""Low address bits that coverage may look at: the widest load is 32 bytes."""
_OPTION_TYPES: Final = (type(None), bool, int, str)
_CAPSULE: Final = "__dlpack_c_exchange_api__"


class LayoutTable(Protocol):
    """Calls and their launches. Positional and keyword arguments of a call are its slots, in that order."""

    @property
    def hits(self) -> int:
        """Calls that were launched from the table."""

    def call(
        self, positional: tuple[Any, ...], keywords: dict[str, Any], /
    ) -> "Any | PreparedLaunch | NotImplementedType":
        """Launch what is remembered of this call: its query, the plan itself where that makes none, or
        ``NotImplemented`` where nothing is remembered or the process is a fork.

        Raises:
            DriverError: the driver refused the launch.
        """

    def add(
        self, positional: tuple[Any, ...], keywords: dict[str, Any], slots: tuple[int, ...], plan: PreparedLaunch, /
    ) -> bool:
        """Remember a plan. False where a slot holds no plain tensor with memory of its own, and no option.

        ``slots`` gives for each of :data:`~mlaprep.clients.prepared.TENSORS` the slot that holds it, or -1.
        """

    def clear(self) -> None:
        """Forget every layout."""

    def __len__(self) -> int: ...


class PlainLayoutTable:
    """A :class:`LayoutTable` in Python."""

    def __init__(self, limit: int = MAX_LAYOUTS) -> None:
        self._limit = limit
        self._plans: dict[tuple[object, ...], tuple[tuple[int, ...], PreparedLaunch]] = {}
        self.hits = 0

    def call(
        self, positional: tuple[Any, ...], keywords: dict[str, Any], /
    ) -> "Any | PreparedLaunch | NotImplementedType":
        key = _call_key(positional, keywords)
        found = None if key is None else self._plans.get(key)
        if found is None or not found[1].of_this_process():
            return NotImplemented
        slots, plan = found
        values = (*positional, *keywords.values())
        query = plan.run([None if slot < 0 else values[slot] for slot in slots])
        self.hits += 1
        return plan if query is None else query

    def add(
        self, positional: tuple[Any, ...], keywords: dict[str, Any], slots: tuple[int, ...], plan: PreparedLaunch, /
    ) -> bool:
        key = _call_key(positional, keywords)
        if key is None:
            return False
        if len(self._plans) >= self._limit:
            self._plans.clear()
        self._plans[key] = (slots, plan)
        return True

    def clear(self) -> None:
        self._plans = {}

    def __len__(self) -> int:
        return len(self._plans)


def open_layout_table(limit: int = MAX_LAYOUTS, environ: Mapping[str, str] = os.environ) -> LayoutTable:
    """An empty table: the one in C where it was built and this torch can be read by it, else the one in Python.

    Raises:
        SpecError: an ``MLAPREP_NATIVE`` that is no switch.
    """
    import torch

    api = getattr(torch.Tensor, _CAPSULE, None)
    if api is not None and read_switch("MLAPREP_NATIVE", environ, default=True):
        try:
            native: Any = importlib.import_module("mlaprep.clients._layouts")
            # Scales are often parameters; other subclasses may read as something else than they hold.
            types = (torch.Tensor, torch.nn.Parameter)
            table: LayoutTable = native.NativeLayoutTable(api, types, torch.Tensor.is_neg, torch.empty_like, limit)
        except (ImportError, ValueError):  # not built, or an API of another version
            pass
        else:
            return table
    return PlainLayoutTable(limit)


def layout_key(values: Iterable[Any]) -> tuple[object, ...] | None:
    """What a launch of a call with these values depends on; None where one can be no part of that.

    Types are part of it: an object that only resembles a tensor is never taken for one that was checked, nor
    ``True`` for a remembered 1.
    """
    key: list[object] = []
    try:
        for value in values:
            if type(value) in _OPTION_TYPES:
                key.append((type(value), value))
                continue
            address = value.data_ptr()
            # A lazily negated tensor is read through a copy; a wrapper or a freed storage has no address.
            if value.is_neg() or (not address and value.numel()):
                return None
            key.append((type(value), value.shape, value.stride(), value.dtype, value.device, address & _ALIGNMENT))
    except (AttributeError, RuntimeError, TypeError):
        return None
    return tuple(key)


def _call_key(positional: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[object, ...] | None:
    key = layout_key((*positional, *keywords.values()))
    return None if key is None else (len(positional), *keywords, *key)
