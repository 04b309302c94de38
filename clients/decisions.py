"""Decisions: which path each captured shape took, so that a later flip is an error and not silence."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from mlaprep.clients.errors import DecisionChanged
from mlaprep.clients.tensors import kind_of

MAX_RECORDED: Final = 4096
"""Decisions kept by one client; the oldest goes first. An engine captures some dozens of shapes."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The path of a call."""

    fused: bool
    what: str
    """The kernel's variant id, or why the call takes the chain."""

    def __str__(self) -> str:
        return f"one launch of {self.what}" if self.fused else f"the unfused chain, since {self.what}"


class Decisions:
    """Decisions by graph key and shape; without a graph key, by the layout of a call that was captured."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._recorded: OrderedDict[tuple[Hashable, Hashable], Decision] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recorded)

    def find(self, graph_key: Hashable, shape: Hashable) -> Decision | None:
        """What was recorded; ``graph_key`` None means without one."""
        return self._recorded.get((graph_key, shape))

    def settle(self, graph_key: Hashable, shape: Hashable, decision: Decision) -> None:
        """Record a decision, or hold it against the one recorded.

        Two kernels are one path: their bytes are the same, and which of them it is may follow from alignment.

        Raises:
            DecisionChanged: one is a launch and the other is the chain. What was recorded stays.
        """
        with self._lock:
            recorded = self._recorded.setdefault((graph_key, shape), decision)
            if len(self._recorded) > MAX_RECORDED:
                self._recorded.popitem(last=False)
        if recorded.fused == decision.fused:
            return
        under = "while its stream is captured, as before" if graph_key is None else f"under graph key {graph_key!r:.80}"
        again = "client.forget_graph()" if graph_key is None else "client.forget_graph(key)"
        raise DecisionChanged(
            f"asked to prepare a call {under}; recorded for its shape is {recorded}; found now is {decision}. Graphs "
            "captured before would go on along the other path. Bring back what has changed, or call "
            f"{again} and capture them anew; give layers that differ in layout graph keys of their own",
            recorded=str(recorded),
            found=str(decision),
        )

    def forget(self, graph_key: Hashable) -> None:
        """Forget what was recorded under a graph key; None means without one."""
        with self._lock:
            for key in [key for key in self._recorded if key[0] == graph_key]:
                del self._recorded[key]


def check_graph_key(key: object) -> None:
    """Raises TypeError for what cannot be a key."""
    try:
        hash(key)
    except TypeError:
        message = f"graph_key: found a {kind_of(key)}; pass what can be hashed, such as (batch size, mode)"
        raise TypeError(message) from None
