"""PreparedLaunch: a layout is decided once, and nothing that decides it is missing from its key."""

import json
from pathlib import Path

import pytest
import torch
from emulation.artifact import emulated_artifact
from emulation.driver import EmulatedDriver

from mlaprep.clients import handle as handle_module
from mlaprep.clients import plan as plan_module
from mlaprep.clients.errors import NotCovered
from mlaprep.clients.handle import KernelHandle
from mlaprep.clients.plan import measured_buckets
from mlaprep.clients.prepared import MAX_LAYOUTS, layout_key, option_key, remember
from mlaprep.clients.reference import prepare_chain
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import MAX_THREADS_PER_BLOCK
from mlaprep.templates.spec import KernelSpec

T, H, R, D, S = 5, 3, 64, 16, 32


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
    assert option_key(True) != option_key(1)


def test_what_is_no_plain_tensor_has_no_key() -> None:
    plain = torch.zeros(4)
    assert layout_key((plain, None)) == layout_key((torch.ones(4), None))
    assert layout_key((plain, torch._neg_view(plain))) is None
    assert layout_key((plain, plain.numpy())) is None
    assert layout_key((plain, plain.to_sparse())) is None
    assert layout_key((plain[1:],)) != layout_key((plain[:3],))


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
        with pytest.raises(NotCovered, match="without memory"):
            calls.handle(*other)
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
        buckets = measured_buckets(Arch(arch).name)
        assert buckets
        for bucket in buckets:
            for number in (bucket.rows_per_token_max, bucket.tokens_max, bucket.threads_per_block):
                assert type(number) is int
                assert number >= 1
            assert bucket.threads_per_block <= MAX_THREADS_PER_BLOCK
        assert sorted(buckets, key=lambda b: (b.rows_per_token_max, b.tokens_max)) == list(buckets)
    assert measured_buckets("sm_100a") == ()


def test_layouts_are_bounded() -> None:
    plans: dict[tuple[object, ...], object] = {}
    for number in range(MAX_LAYOUTS + 10):
        remember(plans, (number,), object())  # type: ignore[arg-type]
    assert 0 < len(plans) <= MAX_LAYOUTS
