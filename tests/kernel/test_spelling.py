"""One call in two spellings: this package's own, and the one that users of SGLang's fused functions know."""

import inspect
import typing
from typing import Any

import pytest
import torch
from emulation.driver import EmulatedDriver
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel.calls import TENSORS, Call, make
from kernel.checks import expected
from kernel.entries import EmulatedSupply
from kernel.entries import given as operands_of

from mlaprep.clients import explain, fused_prepare, prepare, specialise
from mlaprep.clients.options import PrepareOptions
from mlaprep.clients.spelling import OWN, SGLANG, canonical

T, H, R, D = 5, 3, 32, 16
OPTIONS = PrepareOptions.__annotations__.keys()
SLOTS = torch.arange(T)
VALUES: dict[str, Any] = {
    "q_nope": torch.zeros(T, H, R, dtype=torch.bfloat16),
    "q_rope": torch.zeros(T, H, D, dtype=torch.bfloat16),
    "k_nope": torch.zeros(T, R, dtype=torch.bfloat16),
    "k_rope": torch.zeros(T, D, dtype=torch.bfloat16),
    "kv_cache": torch.zeros(16, R + D, dtype=torch.uint8),
    "loc": SLOTS,
}
ALIASES = {"kv_cache": "kv_buffer", "k_nope": "cache_k_nope", "k_rope": "cache_k_rope", "dcp_world": "dcp_world_size"}
OWN_NAMES = {alias: name for name, alias in ALIASES.items()}


def of(name: str) -> Any:
    return VALUES[OWN_NAMES.get(name, name)]


@settings(max_examples=100, deadline=None)
@given(
    by_position=st.integers(0, 9),
    rank=st.integers(0, 7),
    warps=st.integers(-4, 32),
    layout=st.sampled_from([None, "fp8", "fp8-q16"]),
    sixteen=st.booleans(),
    keep=st.sets(st.sampled_from(SGLANG[6:])),
    order=st.randoms(use_true_random=False),
)
def test_every_way_to_pass_their_arguments_is_the_same_call(
    by_position: int, rank: int, warps: int, layout: str | None, sixteen: bool, keep: set[str], order: Any
) -> None:
    pool = VALUES["kv_cache"].to(torch.bfloat16) if sixteen else VALUES["kv_cache"]
    passed = {name: of(name) for name in SGLANG[:6]} | {"kv_buffer": pool}
    rest = {"num_warps": warps, "dcp_world_size": 8, "dcp_rank": rank}
    # What goes by position goes without a gap; what is left out has its default.
    passed |= {name: rest[name] for index, name in enumerate(SGLANG[6:], 6) if name in keep or index < by_position}
    positional = tuple(passed.pop(name) for name in SGLANG[:by_position])
    keywords = list(passed.items()) + ([] if layout is None else [("layout", layout)])
    order.shuffle(keywords)
    tensors, options = canonical(positional, dict(keywords), OPTIONS)
    assert all(found is wanted for found, wanted in zip(tensors, [of(name) for name in OWN[:4]], strict=False))
    assert tensors[4] is pool
    assert tensors[5] is SLOTS
    passed_on = {name for index, name in enumerate(SGLANG) if name in keep or index < by_position}
    wanted = {
        "dcp_world": 8 if "dcp_world_size" in passed_on else 1,
        "dcp_rank": rank if "dcp_rank" in passed_on else 0,
    }
    chosen = layout or ("same" if sixteen else None)
    assert options == wanted | ({} if chosen is None else {"layout": chosen})


@settings(max_examples=50, deadline=None)
@given(by_position=st.integers(0, 6), order=st.randoms(use_true_random=False))
def test_own_names_go_in_any_order(by_position: int, order: Any) -> None:
    keywords = [(name, of(name)) for name in OWN[by_position:]] + [("dcp_rank", 3), ("write_kv", True)]
    order.shuffle(keywords)
    tensors, options = canonical([of(name) for name in OWN[:by_position]], dict(keywords), OPTIONS)
    assert all(found is of(name) for found, name in zip(tensors, OWN, strict=True))
    assert options == {"dcp_rank": 3, "write_kv": True}


THEIRS = tuple(of(name) for name in SGLANG[:6])
OURS = tuple(of(name) for name in OWN)


@pytest.mark.parametrize(
    ("positional", "keywords", "named"),
    [
        (OURS, {"num_warps": 4}, "num_warps"),
        (OURS, {"dcp_world_size": 2}, "dcp_world_size"),
        (OURS[:4], {"kv_buffer": of("kv_cache"), "loc": SLOTS}, "kv_buffer"),
        (THEIRS, {"dcp_world": 2}, "dcp_world"),
        (THEIRS[:2], {"k_nope": of("k_nope")}, "k_nope"),
        ((), {"kv_buffer": of("kv_cache"), "kv_cache": of("kv_cache")}, "kv_cache"),
        (THEIRS, {"loc": SLOTS}, "loc: given by position and by name"),
        (THEIRS, {"kv_buffer": of("kv_cache")}, "kv_buffer: given by position and by name"),
        (OURS, {"loc": SLOTS}, "loc: given by position and by name"),
        ((*THEIRS, 4), {"num_warps": 4}, "num_warps: given by position and by name"),
        (THEIRS[:5], {}, "q_rope: missing"),
        (OURS[:4], {}, "kv_cache, loc: missing"),
        ((), {}, "q_nope, q_rope, k_nope, k_rope, kv_cache, loc: missing"),
        ((*OURS, None), {}, "7 positional"),
        ((*THEIRS, 0, 1, 0, 0), {}, "10 positional"),
        ((*THEIRS, 4.0), {}, "num_warps: found a float"),
        ((*THEIRS, True), {}, "num_warps: found a bool"),
        (THEIRS, {"positons": None}, "positons: no such option"),
    ],
)
@pytest.mark.parametrize("entry", [prepare, fused_prepare])
def test_mixtures_and_gaps_are_named(entry: Any, positional: tuple[Any, ...], keywords: Any, named: str) -> None:
    before = VALUES["kv_cache"].clone()
    with pytest.raises(TypeError, match=f"^(found )?{named}"):
        entry(*positional, **keywords)
    assert torch.equal(VALUES["kv_cache"], before)


CALLS = {
    "fp8": make(T, H, R, D),
    "their bf16 function": make(T, H, R, D, layout="same"),
    "no tokens": make(0, H, R, D),
    "sharded": make(4, H, R, D, loc=[0, 5, 6, 9], dcp_world=4, dcp_rank=1),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("by_name", [False, True])
def test_their_call_gives_the_same_bytes(name: str, by_name: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specialise, "DEVICE_TYPE", "cpu")
    call: Call = CALLS[name]
    wanted = expected(call)
    driver = EmulatedDriver()
    supply: Any = EmulatedSupply(driver)
    for entry in (fused_prepare, fused_prepare, prepare):
        positional, whole, options = operands_of(call, torch.device("cpu"))
        q_nope, q_rope, k_nope, k_rope, cache, loc = positional
        theirs = (cache, loc, k_nope.unsqueeze(1), k_rope.unsqueeze(1), q_nope, q_rope)
        rest = {"num_warps": 8} | ({"dcp_world_size": 4, "dcp_rank": 1} if call.dcp_world > 1 else {})
        reads = [*positional, *(options[name] for name in TENSORS if name in options)]
        with driver.memory(reads, [] if whole is None else [whole]):
            if by_name:
                query = entry(**dict(zip(SGLANG, theirs, strict=False)), **rest, client=supply)
            else:
                query = entry(*theirs, *rest.values(), client=supply)
        assert query is not None
        assert wanted.query is not None
        assert torch.equal(query.view(torch.uint8), wanted.query)
        assert whole is None or torch.equal(whole, wanted.pool)
    assert supply.asked == 1


def test_without_a_kernel_their_call_takes_the_chain() -> None:
    call = CALLS["their bf16 function"]
    wanted = expected(call)
    (q_nope, q_rope, k_nope, k_rope, cache, loc), whole, _ = operands_of(call, torch.device("cpu"))
    assert fused_prepare(cache, loc, k_nope, k_rope, q_nope, q_rope) is None
    query = prepare(cache, loc, k_nope, k_rope, q_nope, q_rope)
    assert query is not None
    assert wanted.query is not None
    assert torch.equal(query.view(torch.uint8), wanted.query)
    assert torch.equal(whole, wanted.pool)  # type: ignore[arg-type]


def test_slots_of_another_type_are_named_as_slots() -> None:
    for loc, named in ((SLOTS.short(), "loc"), (SLOTS.bool(), "loc"), (SLOTS[:-1], "loc")):
        with pytest.raises((TypeError, ValueError), match=named):
            prepare(VALUES["kv_cache"], loc, *THEIRS[2:])


@pytest.mark.parametrize("entry", [prepare, fused_prepare, explain])
def test_type_checkers_see_both_spellings(entry: Any) -> None:
    own, sglang = (list(inspect.signature(overload).parameters.values()) for overload in typing.get_overloads(entry))
    assert [parameter.name for parameter in own][:6] == [*OWN]
    assert [parameter.name for parameter in sglang][:9] == [*SGLANG]
    assert [parameter.default for parameter in sglang][6:9] == [0, 1, 0]
