"""Layout tables: a layout is decided once, nothing that decides it is missing from its key, in C and in Python."""

import gc
import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from emulation.artifact import emulated_artifact
from emulation.driver import EmulatedDriver
from kernel.tables import native_table

from mlaprep.clients import handle as handle_module
from mlaprep.clients import plan as plan_module
from mlaprep.clients.errors import NotCovered
from mlaprep.clients.handle import KernelHandle
from mlaprep.clients.layouts import LayoutTable, PlainLayoutTable, open_layout_table
from mlaprep.clients.operands import check_operands
from mlaprep.clients.plan import LaunchConfig, measured_buckets
from mlaprep.clients.prepared import TENSORS, PreparedLaunch
from mlaprep.clients.reference import prepare_chain
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import MAX_THREADS_PER_BLOCK
from mlaprep.templates.spec import KernelSpec

T, H, R, D, S = 5, 3, 64, 16, 32


TABLES = ("c", "python")
NO_SLOTS = (-1,) * len(TENSORS)


@pytest.fixture(params=TABLES, autouse=True)
def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LayoutTable:
    """An empty table of each kind; handles made meanwhile have one like it."""
    monkeypatch.setenv("MLAPREP_NATIVE", "1" if request.param == "c" else "0")
    return native_table() if request.param == "c" else open_layout_table()


def planned(**changes: object) -> PreparedLaunch:
    """A plan that launches nothing."""
    fields = {"pid": os.getpid(), "launch": None, "config": None, "stream": None, "device": torch.device("cpu")}
    fields |= {"pointers": (), "scalars": (), "result_shape": (1, 1, 1), "result_dtype": torch.uint8, "like": None}
    return PreparedLaunch(**(fields | changes))  # type: ignore[arg-type]


class Calls:
    """Fresh tensors of one layout, and a handle that counts what it checks in full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **fields: object) -> None:
        spec = KernelSpec(num_heads=H, kv_lora_rank=R, rope_dim=D, **fields)  # type: ignore[arg-type]
        self.driver = EmulatedDriver()
        self.handle = KernelHandle(emulated_artifact(spec), self.driver)
        self.checked = 0

        def counted(*arguments: object, **options: object) -> object:
            self.checked += 1
            return check(*arguments, **options)

        check = handle_module.check_operands
        monkeypatch.setattr(handle_module, "check_operands", counted)

    def tensors(self, seed: int, tokens: int = T) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).bfloat16()

        inputs = [drawn(tokens, H, R), drawn(tokens, H, D), drawn(tokens, R), drawn(tokens, D)]
        loc = torch.randperm(S, generator=generator)[:tokens]
        return [*inputs, torch.full((S, R + D), 0x5A, dtype=torch.uint8), loc]

    def check(self, tensors: list[torch.Tensor], **options: object) -> None:
        wanted_cache = tensors[4].clone()
        wanted = prepare_chain(*tensors[:4], wanted_cache, tensors[5], **options)  # type: ignore[arg-type]
        with self.driver.memory([*tensors[:4], tensors[5]], [tensors[4]]):
            query = self.handle(*tensors, **options)  # type: ignore[arg-type]
        assert query is not None
        assert wanted is not None
        assert torch.equal(query.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(tensors[4], wanted_cache)


def test_a_layout_is_checked_once_and_its_addresses_are_new_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    for seed in range(4):
        calls.check(calls.tensors(seed))
    assert calls.checked == 1
    for seed in range(4):
        calls.check(calls.tensors(seed, tokens=T + 1))
    assert calls.checked == 2


def test_an_uncovered_layout_stays_uncovered_beside_a_remembered_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    calls.check(calls.tensors(0))
    tensors = calls.tensors(1)
    shifted = torch.zeros(T * H * R + 1, dtype=torch.bfloat16)[1:].view(T, H, R)
    for index, odd in ((0, shifted), (5, tensors[5].int()), (4, tensors[4].view(torch.int8))):
        other = [*tensors]
        other[index] = odd
        with pytest.raises((NotCovered, TypeError)):
            calls.handle(*other)
    calls.check(tensors)


def test_options_are_remembered_with_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, dcp_world=2, reserved_slot=True)
    rank = {"dcp_rank": 1, "reserved_slot": 1}
    tensors = calls.tensors(0)
    with calls.driver.memory([*tensors[:4], tensors[5]], [tensors[4]]):
        calls.handle(*tensors, **rank)  # type: ignore[arg-type]
    for wrong in ({"dcp_rank": True}, {"reserved_slot": True}, {"dcp_rank": 1.0}, {"dcp_rank": [1]}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            calls.handle(*tensors, **(rank | wrong))  # type: ignore[arg-type]


def same_key(table: LayoutTable, one: tuple[object, ...], other: tuple[object, ...]) -> bool | None:
    """Whether a plan remembered for one call is found by another; None where it cannot be remembered."""
    table.clear()
    if not table.add(one, {}, NO_SLOTS, planned()):
        return None
    return table.call(other, {}) is not NotImplemented


def test_what_is_no_plain_tensor_has_no_key(table: LayoutTable) -> None:
    plain = torch.zeros(4)
    assert same_key(table, (plain, None), (torch.ones(4), None))
    for odd in (torch._neg_view(plain), plain.numpy(), plain.to_sparse(), 1.0, [1]):
        assert same_key(table, (plain, odd), (plain, odd)) is None
    assert same_key(table, (plain[1:],), (plain[:3],)) is False
    assert same_key(table, (torch.nn.Parameter(plain),), (torch.nn.Parameter(plain),))


def test_everything_that_decides_a_launch_is_in_its_key(table: LayoutTable) -> None:
    plain = torch.zeros(4, 6)
    others = (
        torch.zeros(4, 7),
        torch.zeros(6, 4).t(),
        torch.zeros(4, 6, 1),
        torch.zeros(24),
        plain.half(),
        plain.bfloat16(),
        plain.int(),
        torch.zeros(26)[2:].view(4, 6),
        None,
        7,
        "7",
    )
    for number, other in enumerate(others):
        assert same_key(table, (plain, 1), (other, 1)) is False, number
        assert same_key(table, (other, 1), (plain, 1)) is False, number
        assert same_key(table, (other, 1), (other, 1)), number
    assert same_key(table, (plain,), (plain, None)) is False


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"a": True}, False),
        ({"a": True}, {"a": 1}, False),
        ({"a": 1}, {"a": 2}, False),
        ({"a": 1}, {"b": 1}, False),
        ({"a": 1}, {}, False),
        ({"a": None}, {"a": 0}, False),
        ({"a": "neox"}, {"a": "".join(["ne", "ox"])}, True),
        ({"a": 2**40}, {"a": 2**40 + 0}, True),
        ({"a": 2**90}, {"a": 2**90 + 1}, False),
        ({"a": 1}, {"".join(["a"]): 1}, True),
        ({"\ud800": "\ud800"}, {"\ud800": "\ud800"}, True),
    ],
)
def test_options_are_compared_by_name_type_and_value(
    table: LayoutTable, one: dict[str, object], other: dict[str, object], same: bool
) -> None:
    tensor = torch.zeros(3)
    assert table.add((tensor,), one, NO_SLOTS, planned())
    assert (table.call((tensor,), other) is not NotImplemented) == same


def test_keywords_say_which_slot_they_are(table: LayoutTable) -> None:
    """One tensor under two names, then two tensors: each comes from its own slot."""
    seen: list[list[int]] = []

    class Launch:
        def __call__(self, config: object, stream: int, arguments: list[int]) -> None:
            seen.append(list(arguments))

        def native(self) -> None:
            return None

    plan = planned(
        launch=Launch(),
        config=LaunchConfig((1, 1, 1), (1, 1, 1)),
        stream=lambda device: 0,
        pointers=(TENSORS.index("q_scale_inv"), TENSORS.index("kv_scale_inv")),
        result_shape=None,
    )
    slots = tuple({"q_scale_inv": 2, "kv_scale_inv": 1}.get(name, -1) for name in TENSORS)
    first, second, lead = torch.zeros(1), torch.ones(1), torch.zeros(4)
    assert table.add((lead,), {"kv_scale_inv": first, "q_scale_inv": first}, slots, plan)
    assert table.call((lead,), {"kv_scale_inv": first, "q_scale_inv": second}) is plan
    assert seen == [[second.data_ptr(), first.data_ptr()]]


def test_more_arguments_than_any_call_has_are_not_remembered(table: LayoutTable) -> None:
    many = (None,) * 40
    if table.add(many, {}, NO_SLOTS, planned()):
        assert table.call(many, {}) is not NotImplemented
    else:
        assert table.call(many, {}) is NotImplemented


def test_a_fork_finds_nothing(table: LayoutTable) -> None:
    assert table.add((1,), {}, NO_SLOTS, planned(pid=os.getpid()))
    child = os.fork()
    if not child:
        os._exit(0 if table.call((1,), {}) is NotImplemented else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert table.call((1,), {}) is not NotImplemented


class Wrapper(torch.Tensor):
    """A tensor without memory, which computes through another."""

    @staticmethod
    def of(inner: torch.Tensor) -> "Wrapper":
        made = torch.Tensor._make_wrapper_subclass(
            Wrapper, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise AssertionError("coverage must not compute")


def freed(tensor: torch.Tensor) -> torch.Tensor:
    other = tensor.clone()
    other.untyped_storage().resize_(0)
    return other


@pytest.mark.parametrize("make_odd", [Wrapper.of, freed])
@pytest.mark.parametrize("remembered", [False, True])
def test_a_tensor_without_memory_is_never_launched(
    monkeypatch: pytest.MonkeyPatch, make_odd: object, remembered: bool
) -> None:
    calls = Calls(monkeypatch)
    tensors = calls.tensors(0)
    if remembered:
        calls.check(calls.tensors(1))
    launched = len(calls.driver.launches)
    for index in (0, 2, 4, 5):
        other = [*tensors]
        other[index] = make_odd(tensors[index])  # type: ignore[operator]
        with pytest.raises(ValueError, match="without memory"):
            calls.handle(*other)
        if make_odd is freed:
            # torch itself crashes on some of these.
            with pytest.raises(ValueError, match=f"{TENSORS[index]}: found a tensor without memory"):
                prepare_chain(*other)  # type: ignore[arg-type]
    assert len(calls.driver.launches) == launched


def test_a_lazily_negated_result_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, layout="same")
    tensors = calls.tensors(0)
    pool = torch.zeros(S, R + D, dtype=torch.bfloat16)
    out = torch.zeros(T, H, R + D, dtype=torch.bfloat16)
    tensors[4] = torch._neg_view(pool)
    for function in (calls.handle, lambda *t, **o: prepare_chain(*t, layout="same", **o)):
        with pytest.raises(ValueError, match="kv_cache"):
            function(*tensors)
        with pytest.raises(ValueError, match="out"):
            function(*tensors[:4], pool, tensors[5], out=torch._neg_view(out))


def test_what_resembles_a_tensor_is_refused_beside_a_remembered_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Proxy:
        def __init__(self, inner: torch.Tensor) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

    calls = Calls(monkeypatch)
    tensors = calls.tensors(0)
    calls.check(tensors)
    with pytest.raises(TypeError, match="q_nope"):
        calls.handle(Proxy(tensors[0]), *tensors[1:])


def test_the_measured_buckets_are_what_a_plan_can_use() -> None:
    document = json.loads(Path(plan_module.__file__).with_name("launch_plans.json").read_text())
    assert document["schema"] == 1
    for arch in document["archs"]:
        for rotates in (False, True):
            buckets = measured_buckets(Arch(arch).name, rotates)
            assert buckets
            for bucket in buckets:
                for number in (bucket.rows_per_token_max, bucket.tokens_max, bucket.threads_per_block):
                    assert type(number) is int
                    assert number >= 1
                assert bucket.threads_per_block <= MAX_THREADS_PER_BLOCK
            assert sorted(buckets, key=lambda b: (b.rows_per_token_max, b.tokens_max)) == list(buckets)
    assert measured_buckets("sm_100a", False) == ()


def test_what_a_plan_keeps_owns_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans outlive a capture: what they kept of its pool would be in the way of torch's own graphs."""
    calls = Calls(monkeypatch)
    tensors = calls.tensors(0)
    plan = calls.handle.plan(check_operands(*tensors))
    assert plan.like is not None
    assert plan.like.untyped_storage().nbytes() == 0
    made = torch.empty_like(plan.like)
    assert made.is_contiguous()
    assert made.shape == (T, H, R + D)


def test_layouts_are_bounded(table: LayoutTable) -> None:
    small = type(table)(**_limit(table, 8))
    for number in range(100):
        assert small.add((number,), {}, NO_SLOTS, planned())
        assert small.call((number,), {}) is not NotImplemented
        assert len(small) <= 8
    assert small.hits == 100
    small.clear()
    assert len(small) == 0


def _limit(table: LayoutTable, limit: int) -> dict[str, Any]:
    if isinstance(table, PlainLayoutTable):
        return {"limit": limit}
    api = torch.Tensor.__dlpack_c_exchange_api__  # type: ignore[attr-defined]
    names = {"types": (torch.Tensor,), "is_negative": torch.Tensor.is_neg, "empty_like": torch.empty_like}
    return {"api": api, "limit": limit} | names


def test_the_last_plan_of_a_layout_stands(table: LayoutTable) -> None:
    for width in (3, 5):
        assert table.add((1,), {}, NO_SLOTS, planned(result_shape=(1, 1, width)))
        assert table.call((1,), {}).shape == (1, 1, width)


def test_plans_are_let_go(table: LayoutTable) -> None:
    class Witness:
        pass

    witness = Witness()
    gone = weakref.ref(witness)
    assert table.add((1,), {}, NO_SLOTS, planned(result_dtype=witness))
    del witness
    assert gone() is not None
    table.clear()
    assert gone() is None
    witness = Witness()
    gone = weakref.ref(witness)
    cycle = [type(table)(**_limit(table, 8))]
    assert cycle[0].add((1,), {}, NO_SLOTS, planned(result_dtype=[witness, cycle]))
    del witness, cycle
    gc.collect()
    assert gone() is None


def test_a_table_that_is_cleared_while_it_launches(table: LayoutTable) -> None:
    class Launch:
        def __call__(self, config: object, stream: int, arguments: object) -> None:
            table.clear()
            gc.collect()

        def native(self) -> None:
            return None

    plan = planned(launch=Launch(), config=LaunchConfig((1, 1, 1), (1, 1, 1)), stream=lambda device: 0)
    assert table.add((1,), {}, NO_SLOTS, plan)
    assert table.call((1,), {}).shape == (1, 1, 1)
    assert table.call((1,), {}) is NotImplemented


@pytest.mark.parametrize("wrong", [(), (1,), (1, {}), ((), [], NO_SLOTS, None), ((), {}, (0,) * 3, None)])
def test_the_table_in_c_checks_its_own_arguments(wrong: tuple[Any, ...]) -> None:
    native: Any = native_table()
    with pytest.raises(TypeError):
        native.call(*wrong[:2]) if len(wrong) < 3 else native.add(*wrong)
    with pytest.raises(ValueError, match="slot"):
        native.add((1,), {}, (5,) * len(TENSORS), planned())
    with pytest.raises((TypeError, AttributeError)):
        native.add((1,), {}, NO_SLOTS, object())
    assert len(native) == 0
