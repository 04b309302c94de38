"""Rotation: fp32, two products and one sum, each rounded once, then one rounding to the result."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel import oracle
from kernel.calls import DTYPES, Call, angles, make, pool_of, values
from kernel.checks import check, every_width, expected, run
from kernel.devices import KernelDevice

from mlaprep.clients.errors import NotCovered
from mlaprep.templates.errors import SpecError
from mlaprep.templates.spec import KernelSpec

STYLES = pytest.mark.parametrize("rope", ["interleaved", "neox"])
INT64 = torch.iinfo(torch.int64)
INT32 = torch.iinfo(torch.int32)


@STYLES
@pytest.mark.parametrize("rope_dim", [2, 4, 6, 8, 16, 24, 32, 64, 128])
def test_every_width_of_rotary_columns_at_every_width_of_thread(device: KernelDevice, rope: str, rope_dim: int) -> None:
    call = make(5, 2, 32, rope_dim, rope=rope, positions=torch.tensor([3, 0, 7, 1, 7]), seed=rope_dim)
    check(call, device, *every_width(call))


@STYLES
@pytest.mark.parametrize("layout", ["fp8-q16", "same", "ds_mla"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_layout_and_dtype(device: KernelDevice, rope: str, layout: str, dtype: str) -> None:
    check(make(6, 3, 128, 64, rope=rope, layout=layout, dtype=dtype, seed=3), device)


@STYLES
@pytest.mark.parametrize("layout", ["fp8", "same"])
def test_rotation_comes_before_the_scale_and_rounds_once_with_it(device: KernelDevice, rope: str, layout: str) -> None:
    scales = {"q_scale_inv": torch.linspace(-3, 5, 9)}
    if layout == "fp8":
        scales["kv_scale_inv"] = torch.tensor(0.37)
    check(make(9, 2, 16, 64, rope=rope, layout=layout, **scales), device)


@STYLES
@pytest.mark.parametrize("side", ["query", "cache"])
def test_one_sided_kernels_rotate_too(device: KernelDevice, rope: str, side: str) -> None:
    call = make(6, 3, 32, 16, rope=rope)
    absent = ("k_nope", "k_rope", "loc", "pool") if side == "query" else ("q_nope", "q_rope")
    check(replace(call, **dict.fromkeys(absent)), device)


@STYLES
@pytest.mark.parametrize("layout", ["fp8", "same"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_input_pattern_turned(device: KernelDevice, rope: str, layout: str, dtype: str) -> None:
    """All 65,536 patterns on either side of a pair, NaN and infinity among them."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    mixed = patterns[torch.randperm(2**16, generator=torch.Generator().manual_seed(5))]
    columns = torch.stack([patterns, mixed], dim=-1).reshape(-1, 64)
    if rope == "neox":
        columns = columns.unflatten(1, (32, 2)).transpose(1, 2).flatten(1)
    tokens = len(columns) // 2
    call = replace(
        make(0, 1, 16, 64, rope=rope, layout=layout, dtype=dtype),
        q_nope=values(tokens, 1, 16, dtype=dtype),
        q_rope=columns[:tokens].unsqueeze(1),
        k_nope=values(tokens, 16, dtype=dtype),
        k_rope=columns[tokens:],
        loc=torch.arange(tokens),
        pool=pool_of(layout, tokens, 16, 64),
        positions=torch.arange(tokens),
        cos_sin_cache=angles(tokens, 64),
    )
    result = check(call, device)
    if layout == "same":
        codes = result.query.view(torch.int16)[..., 16:].flatten()
        nan = codes.view(DTYPES[dtype]).isnan()
        assert nan.any()
        assert (codes[nan] == 0x7FFF).all()


@STYLES
def test_products_are_never_fused_with_the_sum(device: KernelDevice, rope: str) -> None:
    """Pairs whose products nearly cancel tell: with a fused multiply-add many results would differ."""
    call = make(32, 1, 16, 128, rope=rope, layout="same", dtype="fp16", rows=32)
    table = call.cos_sin_cache.double().numpy()[:32, None]
    cosine, sine = table[..., :64], table[..., 64:]
    a = torch.randn(32, 1, 64, generator=torch.Generator().manual_seed(1)).half().double().numpy()
    b = torch.from_numpy(a * cosine / sine).half().double().numpy()
    separate = oracle.to_fp32(oracle.to_fp32(a * cosine) - oracle.to_fp32(b * sine))
    fused = oracle.to_fp32(a * cosine - oracle.to_fp32(b * sine))
    differ = oracle.codes(separate, "fp16") != oracle.codes(fused, "fp16")
    assert differ.mean() > 0.05
    halves = torch.from_numpy(np.stack([a, b], axis=-1 if rope == "interleaved" else -2)).half()
    check(replace(call, q_rope=halves.flatten(-2)), device)


@STYLES
@pytest.mark.parametrize("layout", ["fp8", "same"])
def test_an_angle_of_zero_changes_no_byte(device: KernelDevice, rope: str, layout: str) -> None:
    source = make(4, 3, 32, 16, layout=layout)
    tame = {name: torch.randn(getattr(source, name).shape).abs().add(0.1).bfloat16() for name in ("q_rope", "k_rope")}
    plain = replace(source, **tame)
    table = torch.cat((torch.ones(4, 8), torch.zeros(4, 8)), dim=1)
    turned = replace(plain, rope=rope, positions=torch.arange(4), cos_sin_cache=table)
    wanted, found = expected(plain), check(turned, device)
    assert torch.equal(found.query, wanted.query)
    assert torch.equal(found.pool, wanted.pool)


@STYLES
def test_a_quarter_turn_swaps_a_pair(device: KernelDevice, rope: str) -> None:
    """cos 0 and sin 1: (a, b) becomes (-b, a), by its pairing told apart from the other style."""
    columns = torch.arange(1, 9, dtype=torch.bfloat16)
    source = make(1, 1, 16, 8, layout="same")
    call = replace(
        source,
        q_rope=columns.reshape(1, 1, 8),
        k_rope=columns.reshape(1, 8),
        rope=rope,
        positions=torch.tensor([0]),
        cos_sin_cache=torch.tensor([[0.0] * 4 + [1.0] * 4]),
    )
    turned = {"interleaved": [-2, 1, -4, 3, -6, 5, -8, 7], "neox": [-5, -6, -7, -8, 1, 2, 3, 4]}[rope]
    for fused in (True, False):
        result = run(call, device, fused=fused)
        assert result.query.view(torch.bfloat16)[0, 0, 16:].tolist() == turned
        assert call.pool.row(result.pool, 15).view(torch.bfloat16)[16:].tolist() == turned
    check(call, device)


@STYLES
@pytest.mark.parametrize("rows", [1, 5])
def test_positions_outside_the_table_read_its_nearest_row(device: KernelDevice, rope: str, rows: int) -> None:
    table = angles(rows, 16, seed=8)
    wide = torch.tensor([0, -1, rows - 1, rows, 2**31, 2**32 + 1, 2**40 + 5, -(2**31), INT64.max, INT64.min])
    check(make(10, 2, 32, 16, rope=rope, positions=wide, cos_sin_cache=table), device)
    narrow = torch.tensor([0, -1, rows - 1, rows, INT32.max, INT32.min, 7, -7, 1, 2], dtype=torch.int32)
    check(make(10, 2, 32, 16, rope=rope, positions=narrow, cos_sin_cache=table), device)


@pytest.mark.parametrize("loc_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("position_dtype", [torch.int32, torch.int64])
def test_slots_and_positions_have_types_of_their_own(
    device: KernelDevice, loc_dtype: torch.dtype, position_dtype: torch.dtype
) -> None:
    positions = torch.tensor([4, 2, 9], dtype=position_dtype)
    call = make(3, rope="neox", loc=[7, -1, 2], loc_dtype=loc_dtype, positions=positions, cos_sin_cache=angles(10, 16))
    check(call, device)
    other = replace(call, positions=positions.to(torch.int64 if position_dtype == torch.int32 else torch.int32))
    with pytest.raises(NotCovered, match="positions of int"):
        run(with_spec_of(call, other), device, fused=True)


def with_spec_of(call: Call, operands: Call) -> Call:
    """The operands of one call for the kernel of another."""
    return replace(operands, fields={**operands.fields, "position_dtype": call.spec.position_dtype})


@STYLES
def test_tables_of_any_numbers(device: KernelDevice, rope: str) -> None:
    table = (
        torch.randint(-(2**31), 2**31, (6, 32), generator=torch.Generator().manual_seed(2)).int().view(torch.float32)
    )
    table[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e-45])
    for layout in ("fp8", "same"):
        check(make(6, 2, 16, 32, rope=rope, layout=layout, cos_sin_cache=table), device)


@STYLES
def test_sources_of_any_stride(device: KernelDevice, rope: str) -> None:
    """A pair's other half is found by the column, not through the next row."""
    fused = values(5, 3, 24 + 32 + 16, seed=4)
    keys = values(5, 8 + 32 + 16, seed=5)
    call = make(5, 3, 32, 32, rope=rope)
    call = replace(call, q_rope=fused[..., 24:56], k_rope=keys[:, 8:40].unsqueeze(1))
    check(call, device)
    still = replace(call, q_rope=values(1, 1, 32).expand(5, 3, 32), k_rope=values(1, 32).expand(5, 32))
    check(still, device)


def spread(positions: torch.Tensor) -> torch.Tensor:
    return positions.repeat_interleave(2)[::2]


def test_what_a_kernel_cannot_read_is_left_to_the_chain(device: KernelDevice) -> None:
    call = make(4, rope="interleaved")
    wide = torch.zeros(7, 20)
    wide[:, :16] = call.cos_sin_cache
    shifted = torch.zeros(7 * 16 + 1)
    shifted[1:] = call.cos_sin_cache.flatten()
    for changes, reason in (
        ({"positions": spread(call.positions)}, "positions with stride 2"),
        ({"cos_sin_cache": wide[:, :16]}, "cos_sin_cache with strides"),
        ({"cos_sin_cache": call.cos_sin_cache.t().contiguous().t()}, "cos_sin_cache with strides"),
        ({"cos_sin_cache": shifted[1:].unflatten(0, (7, 16))}, "cos_sin_cache at an address"),
    ):
        other = replace(call, **changes)
        with pytest.raises(NotCovered, match=reason):
            run(other, device, fused=True)
        result, wanted = run(other, device, fused=False), expected(call)
        assert torch.equal(result.query, wanted.query)
        assert torch.equal(result.pool, wanted.pool)


def test_an_empty_batch_and_a_table_larger_than_the_batch(device: KernelDevice) -> None:
    check(make(0, rope="neox"), device)
    table = angles(4096, 16)
    check(make(3, rope="neox", positions=torch.tensor([4095, 17, 2048]), cos_sin_cache=table), device)


@pytest.mark.parametrize("fields", [{"rope_dim": 0}, {"rope_dim": 63}, {"rope_dim": 130}])
def test_rotation_without_pairs_is_no_kernel(fields: dict[str, int]) -> None:
    with pytest.raises(SpecError):
        KernelSpec(num_heads=1, rope="neox", **fields)


def test_the_oracle_rounds_each_step() -> None:
    """By hand: (1 + 2^-7)(1 + 2^-23) rounds to 1 + 2^-7 + 2^-23, and the sum with 2^-24 is a tie to even."""
    value, cosine = np.array([1 + 2.0**-7, 2.0**-24]), np.array([1 + 2.0**-23, -1.0])
    first = oracle.rotated(value, cosine, "interleaved")[0]
    assert first == 1 + 2.0**-7 + 2 * 2.0**-23
