"""vLLM's operations by their own signatures: bytes, launches, slots, scales, and what is refused."""

import gc
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel.calls import E4M3, cache_width, values
from kernel.supplied import EmulatedClient, emulate
from torch.overrides import TorchFunctionMode

from mlaprep.clients import inverse_scales, vllm
from mlaprep.clients.errors import KernelNotReady, NotCovered
from mlaprep.clients.reference import prepare_chain
from mlaprep.clients.rounding import e4m3_codes

T, H, R, D, BLOCKS, BLOCK = 5, 3, 128, 16, 4, 8
DTYPES = ["auto", "fp8", "fp8_e4m3", "fp8_ds_mla"]
LAYOUTS = {"auto": "same", "fp8": "fp8", "fp8_e4m3": "fp8", "fp8_ds_mla": "ds_mla"}
SLOTS = [9, -1, 0, 31, 17]


class Reciprocals(TorchFunctionMode):
    """Counts inverses that are computed; each is a launch on a GPU."""

    count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.reciprocal
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    inverse_scales._fixed.clear()
    inverse_scales._kept.clear()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> EmulatedClient:
    client = EmulatedClient()
    emulate(client, monkeypatch, vllm)
    return client


def pool(kind: str) -> torch.Tensor:
    width = cache_width(LAYOUTS[kind], R, D)
    return torch.zeros(BLOCKS, BLOCK, width, dtype=torch.bfloat16 if kind == "auto" else torch.uint8)


def sources(tokens: int = T, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query parts as vLLM has them (a transposed bmm result, a slice), latent rows, rope keys ``[N, 1, D]``."""
    nope = values(H, tokens, R, seed=seed).transpose(0, 1)
    rope = values(tokens, H, 2 * D, seed=seed + 1)[..., D:]
    latent = values(tokens, R + D, seed=seed + 2)
    return nope, rope, latent[:, :R], latent[:, R:].unsqueeze(1)


def chain(kind: str, tokens: int = T, **options: Any) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Query and pool as the chain makes them with the inverses of scales 3 (cache) and 0.3 (query)."""
    cache = pool(kind)
    if LAYOUTS[kind] == "fp8" and options.get("write_kv", True):
        options["kv_scale_inv"] = 1 / torch.tensor(3.0)
    nope, rope, latent, keys = sources(tokens)
    slots = torch.tensor(SLOTS[:tokens])
    layout = options.pop("layout", LAYOUTS[kind])
    query = prepare_chain(nope, rope, latent, keys, cache, slots, layout=layout, **options)
    return query, cache


def same(found: torch.Tensor, wanted: torch.Tensor | None) -> bool:
    assert wanted is not None
    return found.dtype == wanted.dtype and torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("way", ["kernel", "chain"])
def test_the_cache_is_written_in_one_launch(kind: str, way: str, request: pytest.FixtureRequest) -> None:
    """Slots of -1 skip; rows beyond slot_mapping are padding; rope keys may have a head of their own."""
    client = request.getfixturevalue("client") if way == "kernel" else None
    cache, scale = pool(kind), torch.tensor([3.0])
    _, _, latent, keys = sources(T)
    padded = [torch.cat((part, torch.full_like(part[:2], torch.nan))) for part in (latent, keys)]
    for k_pe in (padded[1], padded[1].squeeze(1)):
        cache.zero_()
        vllm.concat_and_cache_mla(padded[0], k_pe, cache, torch.tensor(SLOTS), kind, scale, client=client)
        assert torch.equal(cache.view(torch.uint8), chain(kind)[1].view(torch.uint8))
    assert cache[1].any()
    assert client is None or len(client.driver.launches) == 2


@pytest.mark.parametrize("way", ["kernel", "chain"])
def test_the_query_is_one_launch(way: str, request: pytest.FixtureRequest) -> None:
    client = request.getfixturevalue("client") if way == "kernel" else None
    nope, rope, _, _ = sources()
    query = vllm.decode_concat_quant_fp8(nope, rope, torch.tensor(0.3), client=client)
    assert query.is_contiguous()
    assert same(query, chain("fp8", q_scale_inv=1 / torch.tensor(0.3))[0])
    assert client is None or len(client.driver.launches) == 1


BOTH = [
    ("auto", None, {}),
    ("fp8", None, {"q_scale_inv": 1 / torch.tensor(0.3)}),
    ("fp8_e4m3", False, {"layout": "fp8-q16"}),
    ("fp8_ds_mla", None, {"query_dtype": "input"}),
    ("fp8_ds_mla", True, {"query_dtype": "e4m3", "q_scale_inv": 1 / torch.tensor(0.3)}),
]


@pytest.mark.parametrize(("kind", "quantize", "options"), BOTH)
@pytest.mark.parametrize("way", ["kernel", "chain"])
def test_both_are_one_launch_together(
    kind: str, quantize: bool | None, options: dict[str, Any], way: str, request: pytest.FixtureRequest
) -> None:
    client = request.getfixturevalue("client") if way == "kernel" else None
    cache = pool(kind)
    query = vllm.concat_cache_and_quant_mla(
        *sources(), cache, torch.tensor(SLOTS), kind, torch.tensor(0.3), torch.tensor(3.0),
        quantize_query=quantize, client=client,
    )  # fmt: skip
    wanted, wanted_cache = chain(kind, **options)
    assert same(query, wanted)
    assert torch.equal(cache.view(torch.uint8), wanted_cache.view(torch.uint8))
    assert client is None or len(client.driver.launches) == 1


def test_rows_of_a_mixed_batch_beyond_its_queries_are_cached_by_a_second_launch(client: EmulatedClient) -> None:
    cache = pool("fp8")
    nope, rope, latent, keys = sources()
    query = vllm.concat_cache_and_quant_mla(
        nope[:2], rope[:2], latent, keys, cache, torch.tensor(SLOTS), "fp8", torch.tensor(0.3), torch.tensor(3.0),
        client=client,
    )  # fmt: skip
    wanted, wanted_cache = chain("fp8", q_scale_inv=1 / torch.tensor(0.3))
    assert wanted is not None
    assert same(query, wanted[:2])
    assert torch.equal(cache, wanted_cache)
    assert len(client.driver.launches) == 2


def test_a_pool_that_is_not_made_yet_takes_nothing(client: EmulatedClient) -> None:
    """As in vLLM's profiling run."""
    nope, rope, latent, keys = sources()
    slots, scale, empty = torch.tensor(SLOTS), torch.tensor(0.3), torch.tensor([])
    vllm.concat_and_cache_mla(latent, keys, empty, slots, "fp8", scale, client=client)
    query = vllm.concat_cache_and_quant_mla(nope, rope, latent, keys, empty, slots, "fp8", scale, scale, client=client)
    assert same(query, chain("fp8", q_scale_inv=1 / scale)[0])
    assert len(client.driver.launches) == 1


def test_the_signatures_are_those_that_vllm_calls() -> None:
    def named(function: Any) -> list[str]:
        parameters = inspect.signature(function).parameters.values()
        return [parameter.name for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]

    cached = ["kv_c", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype", "scale"]
    assert named(vllm.concat_and_cache_mla) == cached
    assert named(vllm.decode_concat_quant_fp8) == ["decode_ql_nope", "decode_q_pe", "scale", "scale_ub"]


@pytest.mark.parametrize(("tokens", "width"), [(0, D), (T, 0), (1, D)])
def test_no_tokens_and_no_rope_columns_will_do(tokens: int, width: int, client: EmulatedClient) -> None:
    nope, rope, latent, keys = sources(tokens)
    rope, keys = rope[..., :width], keys[..., :width]
    slots, one = torch.arange(tokens), torch.tensor(1.0)
    cache, other, wanted = (torch.zeros(BLOCKS, BLOCK, R + width, dtype=torch.uint8) for _ in range(3))
    made = prepare_chain(nope, rope, latent, keys, wanted, slots)
    query = vllm.concat_cache_and_quant_mla(nope, rope, latent, keys, cache, slots, "fp8", one, one, client=client)
    assert same(query, made)
    assert same(vllm.decode_concat_quant_fp8(nope, rope, one, client=client), made)
    vllm.concat_and_cache_mla(latent, keys, other, slots, "fp8", one, client=client)
    assert torch.equal(cache, wanted)
    assert torch.equal(other, wanted)


def test_what_cannot_be_is_named() -> None:
    nope, rope, latent, keys = sources()
    cache, slots, scale = pool("fp8"), torch.tensor(SLOTS), torch.tensor(1.0)

    latent_rows = {"kv_c": latent, "k_pe": keys, "kv_cache": cache, "slot_mapping": slots, "kv_cache_dtype": "fp8"}
    queries = {"decode_ql_nope": nope, "decode_q_pe": rope, "q_scale": scale, "k_scale": scale}

    def write(**other: Any) -> None:
        vllm.concat_and_cache_mla(**(latent_rows | {"scale": scale} | other))

    def both(**other: Any) -> None:
        vllm.concat_cache_and_quant_mla(**(latent_rows | queries | other))

    with pytest.raises(NotCovered, match="fp8_e5m2, which no kernel writes; start vLLM with"):
        write(kv_cache_dtype="fp8_e5m2")
    with pytest.raises(NotCovered, match="kv_cache_dtype"):
        write(kv_cache_dtype="int4")
    for name, wrong, error in (
        ("kv_cache_dtype", None, TypeError),
        ("slot_mapping", slots.float(), TypeError),
        ("slot_mapping", SLOTS, TypeError),
        ("scale", 1.0, TypeError),
        ("scale", torch.ones(2), ValueError),
        ("scale", scale.double(), TypeError),
        ("kv_cache", pool("auto"), TypeError),
        ("kv_cache", pool("fp8_ds_mla"), ValueError),
    ):
        with pytest.raises(error, match=name):
            write(**{name: wrong})
    with pytest.raises(ValueError, match="k_nope") as raised:
        write(kv_c=latent[:3], k_pe=keys[:3])
    assert "kv_c" in "".join(raised.value.__notes__)
    for wrong in (1.0, torch.ones(2), torch.ones((), device="meta")):
        with pytest.raises((TypeError, ValueError), match="scale"):
            vllm.fix_scale(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="q_scale"):
        both(q_scale=torch.ones(2))
    with pytest.raises(TypeError, match="k_scale"):
        both(k_scale=None)
    with pytest.raises(ValueError, match="scale_ub"):
        vllm.decode_concat_quant_fp8(nope, rope, scale, scale)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="slot_mapping"):
        both(slot_mapping=slots[:3])
    with pytest.raises(ValueError, match="quantize_query"):
        both(kv_cache_dtype="auto", quantize_query=True)
    with pytest.raises(TypeError, match="quantize_query: found a str"):
        both(quantize_query="no")
    with pytest.raises(TypeError, match="decode_ql_nope"):
        both(decode_ql_nope=[1])
    assert not cache.any()


def test_queries_are_rounded_as_by_vllm_and_cache_rows_but_for_ties() -> None:
    """vLLM multiplies queries by the inverse, and divides cache rows: unlike only beside a tie, by one code."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    for scale in (1.0, 0.25, 2.0**-9, 0.7, 3.0, 1 / 3):
        divisor = torch.tensor(scale)
        assert torch.equal(e4m3_codes(bits / divisor), e4m3_codes(bits * divisor.reciprocal())), scale
    beside = torch.tensor(0.8552631735801697)
    value = torch.tensor(1.015625)
    assert e4m3_codes(value / beside) == 0x3A
    assert e4m3_codes(value * beside.reciprocal()) == 0x39


def test_an_inverse_is_computed_once_and_again_when_its_scale_changed() -> None:
    scale, like = torch.tensor(4.0), torch.tensor(4.0)
    with Reciprocals() as computed:
        for _ in range(3):
            assert inverse_scales.inverse_of(scale) == 0.25
        assert computed.count == 1
        scale.fill_(8.0)
        assert inverse_scales.inverse_of(scale) == 0.125
        assert inverse_scales.inverse_of(scale) == 0.125
        assert computed.count == 2
        scale.data = torch.tensor(16.0)
        assert inverse_scales.inverse_of(scale) == 0.0625
        assert inverse_scales.inverse_of(like) == 0.25
        assert computed.count == 4
    with torch.inference_mode():
        scale.mul_(2)
        assert inverse_scales.inverse_of(scale) == 1 / 32


def test_an_inference_tensor_is_inverted_anew_since_nothing_tells_a_change() -> None:
    with torch.inference_mode():
        scale = torch.tensor(4.0)
        assert inverse_scales.inverse_of(scale) == 0.25
        scale.fill_(8.0)
        assert inverse_scales.inverse_of(scale) == 0.125


def test_inverses_die_with_their_scales() -> None:
    for _ in range(20):
        inverse_scales.inverse_of(torch.tensor(4.0))
    gc.collect()
    assert not inverse_scales._kept


def test_a_capture_uses_no_inverse_but_of_a_fixed_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    scale = torch.tensor(4.0)
    inverse_scales.inverse_of(scale)
    monkeypatch.setattr(inverse_scales, "_is_capturing", lambda scale: True)
    with Reciprocals() as computed:
        inverse_scales.inverse_of(scale)
        inverse_scales.inverse_of(scale)
        assert computed.count == 2
        with pytest.raises(KernelNotReady, match="before the capture"):
            vllm.fix_scale(scale)
    monkeypatch.undo()
    fixed = vllm.fix_scale(scale)
    monkeypatch.setattr(inverse_scales, "_is_capturing", lambda scale: True)
    with Reciprocals() as computed:
        assert inverse_scales.inverse_of(scale) is fixed
        assert computed.count == 0
        scale.fill_(8.0)  # the promise is broken: the graph inverts for itself
        assert inverse_scales.inverse_of(scale) == 0.125
        assert computed.count == 1


@pytest.mark.parametrize("inference", [False, True])
def test_a_fixed_scale_that_changed_is_renewed_where_graphs_read_it(inference: bool) -> None:
    with torch.inference_mode(inference):
        scale = torch.tensor(4.0)
        fixed = vllm.fix_scale(scale)
        scale.fill_(8.0)
    assert vllm.fix_scale(scale) is fixed
    assert fixed == 0.125
    if not inference:
        scale.fill_(2.0)
        assert inverse_scales.inverse_of(scale) is fixed
        assert fixed == 0.5


def test_scales_of_a_layer_cost_no_launch_once_known(client: EmulatedClient) -> None:
    cache, q_scale, k_scale = pool("fp8"), torch.tensor(0.3), torch.tensor(3.0)
    for step in range(3):
        with Reciprocals() as computed:
            query = vllm.concat_cache_and_quant_mla(
                *sources(), cache, torch.tensor(SLOTS), "fp8", q_scale, k_scale, client=client
            )
        assert computed.count == (2 if step == 0 else 0)
        assert query.dtype == E4M3
    assert len(client.driver.launches) == 3
