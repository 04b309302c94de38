"""Results of the input dtype: what is only copied keeps its bits, what is computed is rounded once."""

from dataclasses import replace

import pytest
import torch
from kernel.calls import DTYPES, Call, make, pool_of, values
from kernel.checks import check, expected, run
from kernel.devices import KernelDevice

from mlaprep.clients.errors import NotCovered
from mlaprep.clients.rounding import element_bits

ROUNDED = {
    # fp32 bits to bf16 bits: ties to even, the step to infinity, subnormals, NaN of every kind.
    "bf16": {
        0x3F800000: 0x3F80,
        0x3F807FFF: 0x3F80,
        0x3F808000: 0x3F80,
        0x3F808001: 0x3F81,
        0x3F818000: 0x3F82,
        0x7F7F7FFF: 0x7F7F,
        0x7F7F8000: 0x7F80,
        0x7F7FFFFF: 0x7F80,
        0x7F800000: 0x7F80,
        0x00000000: 0x0000,
        0x00000001: 0x0000,
        0x00008000: 0x0000,
        0x00008001: 0x0001,
        0x00018000: 0x0002,
        0x007FFFFF: 0x0080,
    },
    # fp32 bits to fp16 bits: the same at 65504, 65520, 2^-14, 2^-24 and 2^-25.
    "fp16": {
        0x3F800000: 0x3C00,
        0x3F801000: 0x3C00,
        0x3F801001: 0x3C01,
        0x3F803000: 0x3C02,
        0x477FE000: 0x7BFF,
        0x477FEFFF: 0x7BFF,
        0x477FF000: 0x7C00,
        0x7F7FFFFF: 0x7C00,
        0x7F800000: 0x7C00,
        0x00000000: 0x0000,
        0x00000001: 0x0000,
        0x33000000: 0x0000,
        0x33000001: 0x0001,
        0x33800000: 0x0001,
        0x33C00000: 0x0002,
        0x38800000: 0x0400,
        0x387FC000: 0x03FF,
        0x387FDFFF: 0x03FF,
        0x387FE000: 0x0400,
    },
}
NANS = (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF)
"""fp32 bits that become 7fff, whatever their sign."""


def table(dtype: str) -> tuple[torch.Tensor, list[int]]:
    """fp32 values and the bits each of them rounds to, both signs."""
    bits = [*ROUNDED[dtype], *(value | 1 << 31 for value in ROUNDED[dtype]), *NANS]
    wanted = [*ROUNDED[dtype].values(), *(value | 1 << 15 for value in ROUNDED[dtype].values())]
    floats = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)
    return floats, wanted + [0x7FFF] * len(NANS)


def every_pattern(dtype: str) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])


def rows_of(columns: torch.Tensor, layout: str, width: int = 512) -> Call:
    """Query and latent rows of these values."""
    rows = columns.reshape(-1, width)
    tokens = len(rows)
    return Call(
        q_nope=rows.unsqueeze(1),
        q_rope=None,
        k_nope=rows,
        k_rope=None,
        loc=torch.arange(tokens),
        pool=pool_of(layout, tokens, width, 0),
        layout=layout,
    )


def bits_of(result: torch.Tensor) -> list[int]:
    return [value & 0xFFFF for value in result.view(torch.int16).flatten().tolist()]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_scaled_queries_round_as_the_table_says(device: KernelDevice, dtype: str) -> None:
    """Ones, multiplied by a scale of each token's own: the product is the scale."""
    floats, wanted = table(dtype)
    tokens = len(floats)
    call = replace(
        make(0, 1, 16, 0, dtype=dtype, layout="fp8-q16"),
        q_nope=torch.ones(tokens, 1, 16, dtype=DTYPES[dtype]),
        k_nope=values(tokens, 16, dtype=dtype),
        loc=torch.arange(tokens),
        pool=pool_of("fp8-q16", tokens, 16, 0),
        q_scale_inv=floats,
    )
    for fused in (True, False):
        assert bits_of(run(call, device, fused=fused).query) == [bits for bits in wanted for _ in range(16)]
    check(call, device)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_chain_rounds_as_the_table_says(dtype: str) -> None:
    floats, wanted = table(dtype)
    assert bits_of(element_bits(floats, DTYPES[dtype])) == wanted


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["fp8-q16", "same"])
def test_copies_keep_every_bit(device: KernelDevice, layout: str, dtype: str) -> None:
    """All 65,536 patterns, NaN payloads and signs too."""
    call = rows_of(every_pattern(dtype), layout)
    result = check(call, device)
    source = every_pattern(dtype).view(torch.int16)
    assert torch.equal(result.query.view(torch.int16).flatten(), source)
    if layout == "same":
        assert torch.equal(call.pool.inside(result.pool).flatten(), source)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("scale", [1.0, 0.7310586, -3e38, 1e-42])
@pytest.mark.parametrize("layout", ["fp8-q16", "same"])
def test_every_input_pattern_scaled(device: KernelDevice, layout: str, dtype: str, scale: float) -> None:
    call = replace(rows_of(every_pattern(dtype), layout), q_scale_inv=torch.tensor(scale))
    result = check(call, device)
    nan = every_pattern(dtype).isnan()
    assert (result.query.view(torch.int16).flatten()[nan] == 0x7FFF).all()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["fp8", "fp8-q16", "same", "ds_mla"])
def test_a_scale_for_each_token(device: KernelDevice, layout: str, dtype: str) -> None:
    scale = torch.tensor([1.0, 0.5, -2.0, float("inf"), float("nan"), 1e-40, 3.3])
    check(make(7, 3, 128, 16, layout=layout, dtype=dtype, q_scale_inv=scale), device)
    check(make(1, 3, 128, 16, layout=layout, dtype=dtype, q_scale_inv=scale[2:3]), device)
    check(make(0, 3, 128, 16, layout=layout, dtype=dtype, q_scale_inv=scale[:0]), device)


def test_a_scale_for_each_token_beside_one_for_the_cache(device: KernelDevice) -> None:
    scales = {"q_scale_inv": torch.linspace(0.1, 4, 6), "kv_scale_inv": torch.tensor(0.25)}
    check(make(6, 4, **scales), device)
    check(make(6, 4, layout="fp8-q16", **scales), device)


def test_one_scale_and_one_a_token_are_kernels_of_their_own(device: KernelDevice) -> None:
    one, each = make(4, q_scale_inv=torch.tensor(2.0)), make(4, q_scale_inv=torch.full((4,), 2.0))
    for kernel, operands in ((one, each), (each, one)):
        other = operands.with_fields(q_scale=kernel.spec.q_scale)
        with pytest.raises(NotCovered, match="q_scale_inv of shape"):
            run(other, device, fused=True)
    assert torch.equal(expected(one).query, expected(each).query)


def test_a_strided_scale_is_left_to_the_chain(device: KernelDevice) -> None:
    spread = torch.linspace(1, 8, 8)
    for scale in (spread[::2], spread[3].expand(4)):
        call = make(4, q_scale_inv=scale)
        with pytest.raises(NotCovered, match="q_scale_inv with stride"):
            run(call, device, fused=True)
        assert torch.equal(run(call, device, fused=False).query, expected(call).query)
