"""Cells: one shape measured with every contender: bytes first, then time."""

from collections.abc import Iterable
from typing import Any

import torch
from contenders import FLOOR, Contender, Form
from report import failure, ratios
from timing import Chain, time_eager, time_interleaved
from torch import Tensor
from verdict import check
from workload import Cell, Due, Layer, cache_pools, make_due, make_layers, poison, reference_holds_on_cpu

_CPU_CHECK_ROWS = 2**14
_CHOICE_ROUNDS = 2


class DeviceLost(RuntimeError):
    """The device answers nothing any more; later cells would only repeat the fault."""


def head(cell: Cell, mode: str, sets: int) -> dict[str, Any]:
    """What a cell's record begins with. ``sets``: distinct sets of buffers along the chain."""
    return {
        "heads": cell.heads,
        "tokens": cell.tokens,
        "rope": cell.rope,
        "mode": mode,
        "bytes_a_layer": cell.bytes,
        "working_set_bytes": cell.bytes * sets,
    }


def measure(
    cell: Cell, contenders: Iterable[Contender], pools: Tensor, *, rounds: int, seed: int
) -> list[dict[str, Any]]:
    """The cell's two records, cold and hot.

    Raises:
        DeviceLost: the device stopped answering. Any other fault of a contender stands in its result.
    """
    layers = make_layers(cell, pools, seed + 4096 * cell.heads + cell.tokens)
    due = make_due(layers)
    on_cpu = reference_holds_on_cpu(layers[0], due[0]) if cell.heads * cell.tokens <= _CPU_CHECK_ROWS else None
    measured = []
    for mode in ("cold", "hot"):
        chain_layers = layers if mode == "cold" else [layers[0]] * len(layers)
        results: dict[str, dict[str, Any]] = {}
        chains: dict[str, Chain] = {}
        writers = set()
        for contender in contenders:
            try:
                forms = contender.forms(cell, layers)
                chain, facts = _fastest(forms, chain_layers, keep=mode == "cold")
                results[contender.name] = _verify(contender, chain, due) | ({"kernel": facts} if facts else {})
                chains[contender.name] = chain
                writers |= {contender.name} if contender.kind != FLOOR else set()
            except Exception as error:
                results[contender.name] = failure(error)
                _insist_on_device(error)
        try:
            samples = time_interleaved(chains, rounds)
        except Exception as error:
            _insist_on_device(error)
            raise
        for name, found in samples.items():
            results[name] |= found.to_dict() | {"replays": chains[name].replays}
            if name in writers:
                results[name]["gb_per_s"] = round(cell.bytes / found.median / 1000, 1)
        sets = len(layers) if mode == "cold" else 1
        measured.append(
            head(cell, mode, sets) | {"reference_equal_on_cpu": on_cpu, "results": results, "ratios": ratios(results)}
        )
    return measured


def measure_eager(cell: Cell, contenders: Iterable[Contender], *, rounds: int, seed: int) -> dict[str, Any]:
    """The cell's record without graphs: one set of buffers, calls enqueued by the host."""
    layers = make_layers(cell, cache_pools(1), seed + 4096 * cell.heads + cell.tokens)
    due = make_due(layers)
    results: dict[str, dict[str, Any]] = {}
    for contender in contenders:
        if contender.kind == FLOOR:
            continue
        try:
            body = contender.forms(cell, layers)[0].body
            poison(layers, [layers[0].out])
            query = body(layers[0])
            assert query is not None
            verdict = check(layers, [query], due).to_dict()
            results[contender.name] = {"check": verdict} | time_eager(body, layers[0], rounds).to_dict()
        except Exception as error:
            results[contender.name] = failure(error)
            _insist_on_device(error)
    return head(cell, "eager", 1) | {"results": results, "ratios": ratios(results)}


def _fastest(forms: list[Form], layers: list[Layer], *, keep: bool) -> tuple[Chain, dict[str, Any]]:
    """The chain of the form that takes the least time, and what is to be said of it."""
    if len(forms) == 1:
        return Chain(forms[0].body, layers, keep=keep), forms[0].facts
    best: tuple[float, Chain, dict[str, Any]] | None = None
    reasons: list[Exception] = []
    for form in forms:
        try:
            chain = Chain(form.body, layers, keep=keep)
        except Exception as error:
            _insist_on_device(error)
            reasons.append(error)
            continue
        taken = min(chain.microseconds() for _ in range(_CHOICE_ROUNDS))
        if best is None or taken < best[0]:
            best = taken, chain, form.facts
    if best is None:
        raise reasons[0]
    return best[1], best[2]


def _verify(contender: Contender, chain: Chain, due: list[Due]) -> dict[str, Any]:
    """Poison, replay once, compare; and what the captured graph holds."""
    result: dict[str, Any] = {}
    if contender.kind != FLOOR:
        layers: list[Layer] = chain.layers if len(chain.queries) > 1 else chain.layers[:1]
        queries = [query for query in chain.queries if query is not None]
        poison(layers, queries)
        chain.replay()
        torch.cuda.synchronize()
        result["check"] = check(layers, queries, due[: len(layers)]).to_dict()
    if chain.content is not None:
        result["launches_a_layer"] = round(chain.content.nodes / len(chain.layers), 3)
        result["programmatic_edges"] = chain.content.programmatic_edges
    return result


def _insist_on_device(cause: Exception) -> None:
    try:
        torch.cuda.synchronize()
        torch.ones(1, device="cuda").sum().item()
    except Exception as error:
        raise DeviceLost(f"the device stopped answering after {type(cause).__name__}: {cause}") from error
