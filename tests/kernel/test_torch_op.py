"""The operations of torch.library: in graphs without a break, with the chain's bytes, one launch where there is one."""

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel.calls import E4M3, TENSORS, Call, make, moved, paged_pool, values
from kernel.checks import chain_options, expected
from kernel.supplied import EmulatedClient, emulate
from torch._dynamo.testing import CompileCounterWithBackend

from mlaprep.clients import torch_op
from mlaprep.clients.dispatch import PrepareOptions
from mlaprep.clients.reference import prepare_chain
from mlaprep.clients.spelling import OWN

T, H, R, D, S = 5, 3, 32, 16, 64
CALLS = {
    "packed": make(T, H, R, D),
    "query kept, scaled": make(T, H, R, D, layout="fp8-q16", q_scale_inv=torch.ones(T), kv_scale_inv=torch.tensor(2.0)),
    "cache kept, rotated": make(T, H, R, D, layout="same", rope="neox", dtype="fp16"),
    "tiles": make(T, H, 128, 64, layout="ds_mla", tile_scale="pow2", rope="interleaved"),
    "tiles, query kept": make(T, H, 128, 64, layout="ds_mla", query_dtype="input"),
    "padded": make(T, H, R, D, pad_heads_to=8),
    "no rope columns": make(T, H, R, 0),
    "sharded, reserved": make(4, H, R, D, loc=[0, 5, 6, 9], dcp_world=4, dcp_rank=1, reserved_slot=5),
    "pages apart": replace(make(T, H, R, D), pool=paged_pool("fp8", 4, 4, R, D, gap=16)),
    "query only": replace(make(T, H, R, D, rope="neox"), k_nope=None, k_rope=None, loc=None, pool=None),
    "cache only": replace(make(T, H, R, D, rope="neox"), q_nope=None, q_rope=None),
    "empty": make(0, H, R, D),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedClient]:
    """``asked`` by name, where a CPU tensor is what a kernel takes."""
    client = EmulatedClient()
    emulate(client, monkeypatch)
    torch_op.name_client("asked", client)
    yield client
    torch_op.forget_client("asked")


def given(call: Call) -> tuple[tuple[Any, ...], torch.Tensor | None, dict[str, Any]]:
    whole = cache = None
    if call.pool is not None:
        whole, view = call.pool.allocate(torch.device("cpu"))
        cache = view.view(call.cache_dtype if call.pool.itemsize == 1 else call.lead.dtype)
    tensors = {name: moved(getattr(call, name), torch.device("cpu")) for name in TENSORS}
    positional = (*(tensors.pop(name) for name in ("q_nope", "q_rope", "k_nope", "k_rope")), cache, tensors.pop("loc"))
    rules = {"reserved_slot": call.reserved_slot, "dcp_rank": call.dcp_rank}
    return positional, whole, tensors | rules | chain_options(call)


def check(call: Call, function: Any, **more: Any) -> None:
    wanted = expected(call)
    positional, whole, options = given(call)
    query = function(*positional, **options, **more)
    assert (query is None) == (wanted.query is None)
    assert query is None or torch.equal(query.view(torch.uint8), wanted.query)
    assert whole is None or torch.equal(whole, wanted.pool)


def latent(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query and latent rows as an engine has them, an empty pool, slots."""
    query, rows = values(tokens, H, R + D, seed=seed), values(tokens, R + D, seed=seed + 1)
    return query, rows, torch.zeros(S, R + D, dtype=torch.uint8), torch.arange(tokens) * 3 % S


def layer(query: torch.Tensor, rows: torch.Tensor, cache: torch.Tensor, loc: torch.Tensor, **options: Any) -> Any:
    scaled = query * 0.5
    made = torch_op.prepare(scaled[..., :R], scaled[..., R:], rows[:, :R], rows[:, R:], cache, loc, **options)
    return made.view(torch.uint8) ^ 1


def unfused(query: torch.Tensor, rows: torch.Tensor, loc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer makes of an empty pool."""
    cache, scaled = torch.zeros(S, R + D, dtype=torch.uint8), query * 0.5
    made = prepare_chain(scaled[..., :R], scaled[..., R:], rows[:, :R], rows[:, R:], cache, loc)
    assert made is not None
    return made.view(torch.uint8) ^ 1, cache


@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call_has_the_chains_bytes(name: str) -> None:
    check(CALLS[name], torch_op.prepare)
    check(CALLS[name], torch.compile(torch_op.prepare, fullgraph=True, backend="aot_eager"))


def test_a_compiled_call_is_one_launch_through_the_client_named(asked: EmulatedClient) -> None:
    call = CALLS["packed"]
    compiled = torch.compile(torch_op.prepare, fullgraph=True, backend="aot_eager")
    wanted = expected(call)
    for launches in (1, 2):
        positional, whole, options = given(call)
        query = compiled(*positional, **options, client="asked")
        assert torch.equal(query.view(torch.uint8), wanted.query)
        assert torch.equal(whole, wanted.pool)
        assert len(asked.driver.launches) == launches


OPERATIONS = {
    "prepare": ("prepare", make(T, H, R, D, cache_dtype=torch.uint8), False),
    "kept": ("prepare", make(T, H, R, D, layout="same"), False),
    "padded": ("prepare", make(T, H, R, D, layout="fp8-q16", pad_heads_to=8, cache_dtype=torch.uint8), False),
    "tiles": ("prepare", make(T, H, 128, 64, layout="ds_mla", cache_dtype=torch.uint8), False),
    "query": ("query", CALLS["query only"], False),
    "write": ("write", make(T, H, R, D, cache_dtype=torch.uint8), False),
    "into": ("into", make(T, H, R, D, layout="fp8-q16", cache_dtype=torch.uint8), True),
    "into, no cache": ("into", replace(make(T, H, R, D, layout="fp8-q16"), k_nope=None, k_rope=None, loc=None), True),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_torch_finds_schema_fake_and_dispatch_right(name: str, grad: bool) -> None:
    operation, call, into = OPERATIONS[name]
    (q_nope, q_rope, k_nope, k_rope, cache, loc), _, options = given(call)
    options = {name: value for name, value in options.items() if name not in ("write_q", "write_kv")}
    if "no cache" in name:
        cache = None
    for source in (q_nope, q_rope, k_nope, k_rope):
        if source is not None:  # NaN is unlike itself to opcheck
            source.nan_to_num_(0, 0, 0).requires_grad_(grad)
    query, latent = (q_nope, q_rope), (k_nope, k_rope, cache, loc)
    out = (torch.zeros(T, H, R + D, dtype=torch.bfloat16),) if into else ()
    operands = {"query": query, "write": latent}.get(operation, (*query, *latent, *out))
    torch.library.opcheck(getattr(torch.ops.mlaprep, operation).default, operands, options)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_graph_serves_every_number_of_tokens(backend: str) -> None:
    counted = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, backend=counted, dynamic=True)
    for tokens in (5, 2, 7, 64, 3):
        query, rows, cache, loc = latent(tokens, seed=tokens)
        query = query.nan_to_num(0, 0, 0)  # of NaN and infinity, g++ makes other bits than torch
        wanted, wanted_cache = unfused(query, rows, loc)
        assert torch.equal(compiled(query, rows, cache, loc), wanted)
        assert torch.equal(cache, wanted_cache)
    assert counted.frame_count == 1
    assert counted.op_count


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_pool_is_written_in_place_and_never_copied(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of one pool, sliced in the graph, with a read of the first between them."""
    seen: list[int] = []

    def noted(*operands: Any, **options: Any) -> Any:
        seen.append(operands[4].data_ptr())
        return prepare_chain(*operands, **{name: value for name, value in options.items() if name != "client"})

    def layers(query: torch.Tensor, rows: torch.Tensor, pool: torch.Tensor, loc: torch.Tensor) -> Any:
        first = layer(query, rows, pool[0], loc)
        read = pool[0][loc]
        return first, read, layer(query, rows + 1, pool[1], loc)

    monkeypatch.setattr(torch_op.dispatch, "prepare", noted)
    query, rows, _, loc = latent(T)
    query = query.nan_to_num(0, 0, 0)
    pool = torch.zeros(2, S, R + D, dtype=torch.uint8)
    first, read, second = torch.compile(layers, fullgraph=True, backend=backend)(query, rows, pool, loc)
    wanted, cache = unfused(query, rows, loc)
    again, next_cache = unfused(query, rows + 1, loc)
    assert torch.equal(first, wanted)
    assert torch.equal(read, cache[loc])
    assert torch.equal(second, again)
    assert torch.equal(pool, torch.stack((cache, next_cache)))
    if backend == "inductor":  # aot_eager runs the functional graph as it is
        assert seen == [pool[0].data_ptr(), pool[1].data_ptr()]


def test_out_is_written_in_a_graph_and_returned() -> None:
    query, rows, cache, loc = latent(T)
    out = torch.zeros(T, H, R + D, dtype=E4M3)
    made = torch.compile(torch_op.prepare, fullgraph=True, backend="aot_eager")(
        query[..., :R], query[..., R:], rows[:, :R], rows[:, R:], cache, loc, out=out
    )
    other = torch.zeros_like(cache)
    wanted = prepare_chain(query[..., :R], query[..., R:], rows[:, :R], rows[:, R:], other, loc)
    assert wanted is not None
    assert made.data_ptr() == out.data_ptr()
    assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(cache, other)


def test_inputs_that_need_grad_give_a_result_that_needs_none() -> None:
    query, rows, cache, loc = latent(T)
    needs = [part.clone().requires_grad_() for part in (query, rows)]

    def call(query: torch.Tensor, rows: torch.Tensor) -> Any:
        return torch_op.prepare(query[..., :R], query[..., R:], rows[:, :R], rows[:, R:], cache, loc)

    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        assert not function(*needs).requires_grad


def test_what_cannot_be_is_named() -> None:
    query, rows, cache, loc = latent(T)
    operands = (query[..., :R], query[..., R:], rows[:, :R], rows[:, R:], cache, loc)
    with pytest.raises(ValueError, match="'nobody'"):
        torch_op.prepare(*operands, client="nobody")
    with pytest.raises(TypeError, match="name_client"):
        torch_op.prepare(*operands, client=object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="write_q"):
        torch_op.prepare(*operands, write_q=False, write_kv=False)
    with pytest.raises(ValueError, match="out"):
        torch_op.prepare(*operands, write_q=False, out=query)
    with pytest.raises(ValueError, match="k_nope"):
        torch_op.prepare(*operands[:2], rows[:, :-8], *operands[3:])
    compiled = torch.compile(torch_op.prepare, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="layout: found a name of none"):
        compiled(*operands, layout="fp9")
    assert not cache.any()


def test_what_torch_would_refuse_in_its_own_words_or_take_for_something_else_is_named() -> None:
    tensors = given(CALLS["packed"])[0]
    q_nope, q_rope, k_nope, k_rope, pool, loc = tensors
    with pytest.raises(TypeError, match=r"q_nope: found a numpy\.ndarray"):
        torch_op.prepare(q_nope.float().numpy(), *tensors[1:])
    with pytest.raises(TypeError, match="layuot: no such option"):
        torch_op.prepare(*tensors, layuot="fp8")  # type: ignore[call-arg]
    for name, value in {"dcp_world": "2", "dcp_rank": True, "layout": None, "q_scale_inv": 1.0}.items():
        with pytest.raises(TypeError, match=f"{name}: found a"):
            torch_op.prepare(*tensors, **{name: value})  # type: ignore[arg-type]
    # In the other order the schema would say that a query is written, and nothing of the cache.
    theirs = (pool, loc, k_nope, k_rope, q_nope, q_rope)
    for refuses in (torch_op.prepare, torch.ops.mlaprep.prepare):
        with pytest.raises(TypeError, match="q_rope: found slots in its place"):
            refuses(*theirs)
    with pytest.raises(Exception, match="found slots in its place"):
        torch.compile(torch_op.prepare, fullgraph=True, backend="eager")(*theirs)


@pytest.mark.parametrize("index", range(6))
def test_one_meta_tensor_among_others_is_refused_and_not_taken_for_a_trace(index: int) -> None:
    tensors = list(given(CALLS["packed"])[0])
    tensors[index] = tensors[index].to("meta")
    with pytest.raises(ValueError, match=f"{OWN[max(index, 1)]}: found on"):
        torch_op.prepare(*tensors)


def test_a_name_stands_for_one_client(asked: EmulatedClient) -> None:
    client = asked
    assert torch_op.name_client("asked", client) == "asked"
    other = EmulatedClient()
    with pytest.raises(ValueError, match="another client"):
        torch_op.name_client("asked", other)
    with pytest.raises(ValueError, match="empty"):
        torch_op.name_client("", other)
    for wrong in ((3, other), ("three", object())):
        with pytest.raises(TypeError):
            torch_op.name_client(*wrong)


def test_every_option_of_prepare_is_one_of_the_operations() -> None:
    spoken = {argument.name for argument in torch.ops.mlaprep.prepare.default._schema.arguments}
    aside = {"out", "write_kv", "write_q"}
    assert set(PrepareOptions.__annotations__) - aside == set(torch_op.OpOptions.__annotations__) <= spoken


def test_a_reload_leaves_the_operations(asked: EmulatedClient, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.ops.mlaprep.prepare.default
    importlib.reload(torch_op)
    monkeypatch.delitem(sys.modules, "mlaprep.clients.torch_op")
    again = importlib.import_module("mlaprep.clients.torch_op")
    assert torch.ops.mlaprep.prepare.default is before
    call = CALLS["packed"]
    positional, whole, options = given(call)
    query = again.prepare(*positional, **options, client="asked")
    assert torch.equal(query.view(torch.uint8), expected(call).query)
    assert torch.equal(whole, expected(call).pool)
    assert len(asked.driver.launches) == 1


def test_a_forked_child_runs_them_too() -> None:
    query, rows, cache, loc = latent(1)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            layer(query, rows, cache, loc)
            os._exit(0 if torch.equal(cache, unfused(query, rows, loc)[1]) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
