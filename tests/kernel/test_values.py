"""Rounding: every input pattern becomes the byte that the hardware's saturating conversion gives."""

import pytest
import torch
from kernel import oracle
from kernel.calls import DTYPES, E4M3, Call, make
from kernel.checks import check, run
from kernel.devices import KernelDevice
from kernel.memory import Guarded
from torch.overrides import TorchFunctionMode

from mlaprep.clients.rounding import e4m3_codes


def rows_of(values: torch.Tensor, width: int = 512) -> Call:
    """A call whose query and latent rows both hold these values, in order."""
    rows = values.reshape(-1, width)
    tokens = rows.shape[0]
    return Call(
        q_nope=rows.unsqueeze(1),
        q_rope=None,
        k_nope=rows,
        k_rope=None,
        loc=torch.arange(tokens),
        pool=Guarded.pool(tokens, width),
    )


def every_pattern(dtype: str) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])


def literal_row() -> tuple[torch.Tensor, list[int]]:
    """The literal table and its mirror image, padded to 48 elements; the bytes beside it."""
    inputs = [*oracle.LITERAL, *(-value for value in oracle.LITERAL), float("nan"), -float("nan")]
    codes = [*oracle.LITERAL.values(), *(code | 0x80 for code in oracle.LITERAL.values()), 0x7F, 0x7F]
    pad = 48 - len(inputs)
    return torch.tensor(inputs + [0.0] * pad, dtype=torch.bfloat16), codes + [0] * pad


def test_the_oracle_agrees_with_the_literal_table() -> None:
    row, codes = literal_row()
    assert oracle.e4m3(row).tolist() == codes


def test_B001_fused_and_chain_saturate_as_the_literal_table_says(device: KernelDevice) -> None:
    row, codes = literal_row()
    call = rows_of(row, width=48)
    for fused in (True, False):
        result = run(call, device, fused=fused)
        assert result.query is not None
        assert result.query.flatten().tolist() == codes
        assert result.pool is not None
        assert call.pool is not None
        assert call.pool.inside(result.pool).flatten().tolist() == codes


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_B001_every_input_pattern(device: KernelDevice, dtype: str) -> None:
    result = check(rows_of(every_pattern(dtype)), device)
    assert result.query is not None
    finite = ~every_pattern(dtype).isnan()
    codes = result.query.flatten()
    assert (codes[~finite] == 0x7F).all()
    # The second oracle of the contract, where torch versions agree: clamp, then cast.
    clamped = every_pattern(dtype)[finite].float().clamp(-448, 448).to(E4M3).view(torch.uint8)
    assert torch.equal(codes[finite], clamped)


def test_B001_the_chain_never_relies_on_how_torch_casts_overflow_or_nan() -> None:
    seen = []

    class Casts(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if getattr(func, "__name__", "") == "to" and E4M3 in args:
                seen.append(args[0])
            return func(*args, **(kwargs or {}))

    with Casts():
        e4m3_codes(every_pattern("bf16").float())
        e4m3_codes(every_pattern("bf16").float() * 1e30)
    assert len(seen) == 2
    for cast in seen:
        assert cast.dtype == torch.float32
        assert (cast.abs() <= 448).all()


def test_B002_nan_stays_nan_in_exactly_its_own_byte(device: KernelDevice) -> None:
    nans = every_pattern("bf16")
    nans = nans[nans.isnan()]
    assert len(nans) == 254
    alternating = torch.ones(512, dtype=torch.bfloat16)
    alternating[: 2 * len(nans) : 2] = nans
    result = check(rows_of(alternating), device)
    assert result.query is not None
    assert result.query.flatten()[:508].tolist() == [0x7F, 0x38] * 254


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "scale",
    [1.0, 0.0, -0.0, -3.0, 1 / 3, 2.0**-126, 1e-45, 3e-39, 3e38, float("inf"), -float("inf"), float("nan")],
)
def test_scales_multiply_in_fp32_before_rounding(device: KernelDevice, dtype: str, scale: float) -> None:
    q_scale, kv_scale = torch.tensor(scale), torch.tensor([-scale])
    check(make(7, dtype=dtype, q_scale_inv=q_scale, kv_scale_inv=kv_scale), device)


def test_a_scaled_row_rounds_once(device: KernelDevice) -> None:
    """Every bf16 pattern times an fp32 with a full mantissa: a second rounding on the way would show."""
    call = rows_of(every_pattern("bf16"))
    scales = {"q_scale_inv": torch.tensor(0.7310586), "kv_scale_inv": torch.tensor(1.0000001)}
    check(Call(**{**vars(call), **scales}), device)


@pytest.mark.parametrize("scaled", ["q_scale_inv", "kv_scale_inv"])
def test_one_scale_leaves_the_other_side_alone(device: KernelDevice, scaled: str) -> None:
    check(make(5, **{scaled: torch.tensor(0.25)}), device)


def test_scales_are_read_at_launch(device: KernelDevice) -> None:
    scale = torch.tensor(1.0)
    call = make(3, q_scale_inv=scale)
    before = check(call, device)
    scale.fill_(4.0)
    after = check(call, device)
    assert before.query is not None
    assert after.query is not None
    assert not torch.equal(before.query, after.query)
