"""ds_mla rows: codes, a scale for every 128 of them, and rotary columns as they came."""

import struct
from dataclasses import replace

import pytest
import torch
from kernel.calls import DTYPES, E4M3, Call, make, paged_pool, pool_of, values
from kernel.checks import check, every_width, expected, run
from kernel.devices import KernelDevice
from kernel.memory import Guarded

from mlaprep.clients.errors import NotCovered
from mlaprep.clients.reference import prepare_chain
from mlaprep.clients.tiles import tile_scales
from mlaprep.templates.errors import SpecError
from mlaprep.templates.spec import KernelSpec

SCALES = pytest.mark.parametrize("scale", ["raw", "pow2"])
INF, NAN = float("inf"), float("nan")


def tiled(tokens: int, heads: int = 2, rank: int = 128, rope_dim: int = 16, **options: object) -> Call:
    return make(tokens, heads, rank, rope_dim, layout="ds_mla", **options)  # type: ignore[arg-type]


# First elements of a tile, the rest being zero; then for raw and pow2 the bits of its scale and the first codes.
BY_HAND = {
    "zeros": ([0.0, -0.0], (0x00800000, [0x00, 0x80]), (0x39000000, [0x00, 0x80])),
    "scale of one": ([448.0, -1.0, 1.5], (0x3F800000, [0x7E, 0xB8, 0x3C]), (0x3F800000, [0x7E, 0xB8, 0x3C])),
    # 1/448 = 2^-9 * 8/7, rounded up in the last place; 2^-8 is the next power of two.
    "one": ([1.0, 0.5, -1.0], (0x3B124925, [0x7E, 0x76, 0xFE]), (0x3B800000, [0x78, 0x70, 0xF8])),
    "scale of two": ([-896.0, 2.0], (0x40000000, [0xFE, 0x38]), (0x40000000, [0xFE, 0x38])),
    # 900/448 = 2.00892857; 900/4 = 225 rounds to 224.
    "above two": ([900.0, -448.0], (0x40009249, [0x7E, 0xF6]), (0x40800000, [0x76, 0xEE])),
    "nan alone": ([NAN, -NAN], (0x00800000, [0x7F, 0x7F]), (0x39000000, [0x7F, 0x7F])),
    "nan beside": ([NAN, 448.0, -NAN, -1.0], (0x3F800000, [0x7F, 0x7E, 0x7F, 0xB8]), (0x3F800000, [0x7F, 0x7E])),
    "infinity": ([INF, 1.0, -1.0, -INF], (0x7F800000, [0x7F, 0x00, 0x80, 0x7F]), (0x7F800000, [0x7F, 0x00, 0x80])),
    # 2^-133 / 448 lies below 2^-126; 2^-133 / 2^-126 = 2^-7, four times the smallest e4m3.
    "subnormal": ([2.0**-133, -(2.0**-133)], (0x00800000, [0x04, 0x84]), (0x39000000, [0x00, 0x80])),
    # 2^-5 / 448 = 2^-13.8 lies below 1e-4 = 2^-13.29; 2^-5 / 2^-13 = 256.
    "small": ([2.0**-5], (0x38924925, [0x7E]), (0x39000000, [0x78])),
}


@SCALES
def test_tiles_by_hand(device: KernelDevice, scale: str) -> None:
    rank = 128 * len(BY_HAND)
    while rank > 1024:
        rank //= 2
    tiles = torch.zeros(len(BY_HAND), 128)
    for number, (first, _, _) in enumerate(BY_HAND.values()):
        tiles[number, : len(first)] = torch.tensor(first)
    rows = tiles.bfloat16().reshape(-1, rank)
    tokens = len(rows)
    call = replace(
        tiled(0, 1, rank, 0, tile_scale=scale),
        q_nope=rows.unsqueeze(1),
        k_nope=rows,
        loc=torch.arange(tokens),
        pool=pool_of("ds_mla", tokens, rank, 0),
    )
    check(call, device, *every_width(call))
    for fused in (True, False):
        result = run(call, device, fused=fused)
        stored = call.pool.inside(result.pool)
        codes, scales = stored[:, :rank].reshape(-1, 128), stored[:, rank:].contiguous().view(torch.int32).flatten()
        for number, (name, (_, raw, pow2)) in enumerate(BY_HAND.items()):
            bits, first = raw if scale == "raw" else pow2
            assert int(scales[number]) == bits, name
            assert codes[number, : len(first)].tolist() == first, name
            assert (codes[number, 4:] == 0).all(), name


@SCALES
@pytest.mark.parametrize("query", ["e4m3", "input"])
@pytest.mark.parametrize("rope", ["none", "interleaved", "neox"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_kind_of_row_and_query(device: KernelDevice, scale: str, query: str, rope: str, dtype: str) -> None:
    call = tiled(5, loc=[3, -1, 0, 99, 15], rope=rope, dtype=dtype, query_dtype=query, tile_scale=scale)
    check(call, device)


@pytest.mark.parametrize(("rank", "rope_dim"), [(128, 0), (128, 4), (256, 12), (384, 8), (512, 64), (1024, 128)])
@pytest.mark.parametrize("query", ["e4m3", "input"])
def test_widths_and_threads(device: KernelDevice, rank: int, rope_dim: int, query: str) -> None:
    call = tiled(4, 3, rank, rope_dim, query_dtype=query, pitch=-(-(rank + rank // 32 + 2 * rope_dim) // 16) * 16)
    check(call, device, *every_width(call))


@SCALES
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_input_pattern_in_a_tile(device: KernelDevice, scale: str, dtype: str) -> None:
    """In order, where a tile's elements are alike, and shuffled, where they are not."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(DTYPES[dtype])
    finite = patterns[patterns.isfinite()]
    finite = finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(6))]
    rows = torch.cat([patterns, finite[: len(finite) // 1024 * 1024]]).reshape(-1, 1024)
    tokens = len(rows)
    call = replace(
        tiled(0, 1, 1024, 0, dtype=dtype, tile_scale=scale),
        q_nope=None,
        k_nope=rows,
        loc=torch.arange(tokens),
        pool=pool_of("ds_mla", tokens, 1024, 0),
    )
    check(call, device)


def test_powers_of_two_are_exact_at_their_ends(device: KernelDevice) -> None:
    """A largest magnitude of 448 * 2^k is scaled by 2^k, the next one up by twice that."""
    tops = torch.tensor([448.0 * 2.0**k for k in range(-12, 16)], dtype=torch.bfloat16)
    above = (tops.view(torch.int16) + 1).view(torch.bfloat16)
    rows = torch.zeros(56, 128, dtype=torch.bfloat16)
    rows[:28, 77], rows[28:, 3] = tops, -above
    call = replace(
        tiled(0, 1, 128, 0, tile_scale="pow2"),
        q_nope=None,
        k_nope=rows,
        loc=torch.arange(56),
        pool=pool_of("ds_mla", 56, 128, 0),
    )
    result = check(call, device)
    stored = call.pool.inside(result.pool)[:, 128:].contiguous().view(torch.float32).flatten()
    assert stored.tolist() == [2.0**k for k in range(-12, 16)] + [2.0 ** (k + 1) for k in range(-12, 16)]


@pytest.mark.parametrize("cache_dtype", [torch.uint8, E4M3])
@pytest.mark.parametrize("pitch", [656, 672, 704])
def test_B019_rows_of_656_bytes(device: KernelDevice, cache_dtype: torch.dtype, pitch: int) -> None:
    call = tiled(3, 2, 512, 64, pitch=pitch, cache_dtype=cache_dtype)
    assert call.spec.cache_width == 656
    check(call, device)


@pytest.mark.parametrize("width", [576, 654, 672])
def test_B019_another_width_is_refused(device: KernelDevice, width: int) -> None:
    call = replace(tiled(3, 2, 512, 64), pool=Guarded.pool(16, width))
    for fused in (True, False):
        with pytest.raises(ValueError, match=r"^kv_cache: found shape \[16, \d+\]; pass rows of .* = 656 "):
            run(call, device, fused=fused)


def test_a_row_as_its_readers_take_it_apart(device: KernelDevice) -> None:
    """R codes, R/128 little-endian fp32, D input elements: read back they are the latent row to within e4m3."""
    latent = torch.randn(1, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    call = replace(tiled(1, 1, 512, 64, loc=[9]), k_nope=latent)
    row = call.pool.row(run(call, device, fused=True).pool, 9)
    scales = struct.unpack("<4f", bytes(row[512:528].tolist()))
    codes = row[:512].view(E4M3).float().reshape(4, 128)
    assert torch.allclose(codes * torch.tensor(scales).unsqueeze(1), latent.float().reshape(4, 128), rtol=1 / 15)
    assert torch.equal(row[528:].view(torch.int16), call.k_rope[0].view(torch.int16))


@pytest.mark.parametrize("offset", [16, 8, 4])
def test_a_pool_at_any_address(device: KernelDevice, offset: int) -> None:
    call = replace(tiled(3, 2, 512, 64), pool=Guarded((16, 656), (656, 1), offset=offset))
    assert call.spec.elements_per_thread == offset
    check(call, device)
    if offset < 16:
        with pytest.raises(NotCovered, match="kv_cache at an address that is no multiple of 16"):
            run(call.with_fields(elements_per_thread=16), device, fused=True)


@pytest.mark.parametrize("offset", [2, 1])
def test_a_pool_off_four_bytes_is_left_to_the_chain(device: KernelDevice, offset: int) -> None:
    call = replace(tiled(3, 2, 512, 64), pool=Guarded((16, 656), (656, 1), offset=offset))
    with pytest.raises(NotCovered, match="kv_cache at an address"):
        run(call, device, fused=True)
    assert torch.equal(run(call, device, fused=False).pool, expected(call).pool)


@pytest.mark.parametrize("page", [2, 64])
def test_pages_with_gaps(device: KernelDevice, page: int) -> None:
    pool = paged_pool("ds_mla", 3, page, 128, 16, pad=12, gap=32)
    check(replace(tiled(4, loc=[0, page, 3 * page - 1, page + 1]), pool=pool), device)


def test_a_row_is_whole_or_untouched_beside_skipped_ones(device: KernelDevice) -> None:
    """Rows that share a block, some of them skipped: a tile's threads meet only among themselves."""
    loc = [0, -1, 40, 3, 2**40, 5, 6, -9, 8]
    check(tiled(9, 1, 256, 8, rows=16, loc=loc, reserved_slot=6), device)
    check(replace(tiled(9, 1, 256, 8, rows=16, loc=loc), q_nope=None, q_rope=None), device)
    check(replace(tiled(9, 1, 256, 8), k_nope=None, k_rope=None, loc=None, pool=None), device)


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_lora_rank": 192},
        {"kv_lora_rank": 64},
        {"rope_dim": 2},
        {"rope_dim": 6},
        {"tile_scale": "none"},
        {"kv_scale": "scalar"},
        {"elements_per_thread": 2},
    ],
)
def test_rows_that_no_tile_divides_are_no_kernel(fields: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        KernelSpec(num_heads=1, layout="ds_mla", **fields)  # type: ignore[arg-type]


def test_a_rank_that_breaks_a_tile_is_refused_by_the_chain() -> None:
    with pytest.raises(ValueError, match=r"^k_nope: found shape \[2, 192\]; pass R of a multiple of 128"):
        run_chain(192)


def run_chain(rank: int) -> None:
    prepare_chain(
        values(2, 1, rank), None, values(2, rank), None, torch.zeros(4, rank + 4, dtype=torch.uint8),
        torch.tensor([0, 1]), layout="ds_mla",
    )  # fmt: skip


@SCALES
def test_scales_of_the_chain_divide_by_a_tensor_and_keep_no_nan(scale: str) -> None:
    """A GPU's torch divides by a number through its reciprocal, which rounds otherwise for some."""
    amax = torch.linspace(1e-3, 1e3, 4001)
    tiles = torch.zeros(4001, 128)
    tiles[:, 5], tiles[:, 6] = amax, NAN
    found = tile_scales(tiles, scale)
    quotient = (amax.double() / 448).float()
    assert (quotient != amax * torch.tensor(1 / 448)).any()
    if scale == "raw":
        assert torch.equal(found, quotient)
    assert torch.isfinite(found).all()
