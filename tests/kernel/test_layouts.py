"""Layouts: widths, strides and views of sources, pool and result."""

import pytest
import torch
from kernel.calls import E4M3, Call, make, values
from kernel.checks import check, expected, run
from kernel.devices import KernelDevice
from kernel.memory import Guarded

from mlaprep.clients.errors import NotCovered
from mlaprep.clients.reference import prepare_chain
from mlaprep.templates.errors import SpecError
from mlaprep.templates.spec import KernelSpec


def changed(call: Call, **members: object) -> Call:
    return Call(**{**vars(call), **members})  # type: ignore[arg-type]


def origins(tokens: int, heads: int, rank: int, rope_dim: int) -> Call:
    """Every source element tells operand, row and column apart, as far as one byte goes."""

    def code(operand: int, *shape: int) -> torch.Tensor:
        width = shape[-1]
        index = torch.arange(torch.Size(shape).numel())
        finite = (index % width * 7 + index // width * 31 + operand * 53) % 0x7F
        return finite.to(torch.uint8).view(E4M3).to(torch.bfloat16).reshape(shape)

    return make(
        tokens,
        heads,
        rank,
        rope_dim,
        q_nope=code(0, tokens, heads, rank),
        q_rope=code(1, tokens, heads, rope_dim) if rope_dim else None,
        k_nope=code(2, tokens, rank),
        k_rope=code(3, tokens, rope_dim) if rope_dim else None,
    )


@pytest.mark.parametrize(
    ("rank", "rope_dim"), [(512, 64), (528, 64), (256, 64), (320, 32), (512, 0), (16, 8), (1024, 128), (48, 24)]
)
def test_B008_widths_are_exact_over_the_boundary(device: KernelDevice, rank: int, rope_dim: int) -> None:
    check(origins(4, 3, rank, rope_dim), device)


@pytest.mark.parametrize(("rank", "rope_dim"), [(500, 64), (512, 63), (8, 0), (1040, 64), (512, 136)])
def test_B008_other_widths_are_no_kernel_and_still_right_in_the_chain(rank: int, rope_dim: int) -> None:
    with pytest.raises(SpecError):
        KernelSpec(num_heads=3, kv_lora_rank=rank, rope_dim=rope_dim)
    call = origins(4, 3, rank, rope_dim)
    cache = call.pool.allocate(torch.device("cpu"))[1]
    query = prepare_chain(call.q_nope, call.q_rope, call.k_nope, call.k_rope, cache, call.loc)
    assert torch.equal(query.view(torch.uint8), expected(call).query)


@pytest.mark.parametrize(("rank", "rope_dim"), [(500, 64), (512, 63)])
def test_B008_a_handle_does_not_cover_another_width(device: KernelDevice, rank: int, rope_dim: int) -> None:
    handle = device.handle(make(1, 3, 512, 64).spec)
    other = origins(4, 3, rank, rope_dim)
    tensors = [tensor.to(device.device) for tensor in (other.q_nope, other.q_rope, other.k_nope, other.k_rope)]
    whole, cache = other.pool.allocate(device.device)
    coverage = handle.covers(*tensors, cache, other.loc.to(device.device))
    assert not coverage
    assert coverage.reason.startswith("kv_lora_rank" if rank != 512 else "rope_dim")
    with pytest.raises(NotCovered):
        handle(*tensors, cache, other.loc.to(device.device))
    assert (whole == other.pool.poison).all()


T, H, R, D = 5, 3, 32, 16


def joined() -> dict[str, torch.Tensor]:
    """Query halves out of one row, key halves out of one fused projection."""
    big = values(T, H, R + D + 24, seed=10)
    fused = values(T, 16 + R + D + 8, seed=11)
    return {
        "q_nope": big[..., :R],
        "q_rope": big[..., R : R + D],
        "k_nope": fused[:, 16 : 16 + R],
        "k_rope": fused[:, 16 + R : 16 + R + D],
    }


def transposed() -> dict[str, torch.Tensor]:
    """A bmm's result, [H, T, R], seen as [T, H, R]; keys as [T, 1, R]."""
    return {
        "q_nope": values(H, T, R, seed=12).transpose(0, 1),
        "q_rope": values(H, T, D, seed=13).transpose(0, 1),
        "k_nope": values(T, 1, R, seed=14),
        "k_rope": values(1, T, D, seed=15).transpose(0, 1),
    }


def expanded() -> dict[str, torch.Tensor]:
    """Stride 0 over tokens, heads, or both."""
    return {
        "q_nope": values(1, 1, R, seed=16).expand(T, H, R),
        "q_rope": values(T, 1, D, seed=17).expand(T, H, D),
        "k_nope": values(1, R, seed=18).expand(T, R),
        "k_rope": values(1, D, seed=19).expand(T, D),
    }


def overlapping() -> dict[str, torch.Tensor]:
    """A sliding window: tokens eight elements apart."""
    return {
        "q_nope": values(4096, seed=20).as_strided((T, H, R), (8, 16, 1)),
        "k_nope": values(4096, seed=21).as_strided((T, R), (8, 1), 24),
    }


@pytest.mark.parametrize("sources", [joined, transposed, expanded, overlapping])
def test_B015_strided_sources_give_the_bytes_of_packed_ones(device: KernelDevice, sources) -> None:
    call = changed(make(T, H, R, D), **sources())
    packed = changed(call, **{name: tensor.contiguous() for name, tensor in sources().items()})
    assert torch.equal(expected(call).query, expected(packed).query)
    check(call, device)


def test_B015_strides_as_constants_of_the_kernel(device: KernelDevice) -> None:
    sources = joined()
    width = R + D + 24
    fields = {
        "q_nope_token_stride": H * width,
        "q_nope_head_stride": width,
        "q_rope_token_stride": H * width,
        "q_rope_head_stride": width,
        "k_nope_token_stride": 16 + R + D + 8,
        "k_rope_token_stride": 16 + R + D + 8,
        "cache_row_stride": 64,
    }
    check(changed(make(T, H, R, D, pitch=64, fields=fields), **sources), device)


def test_B015_a_handle_made_for_one_stride_set_refuses_another(device: KernelDevice) -> None:
    call = make(T, H, R, D, fields={"q_nope_head_stride": R, "k_nope_token_stride": R})
    check(call, device)
    for name, tensor, stride in (("q_nope", joined()["q_nope"], "head"), ("k_nope", joined()["k_nope"], "token")):
        with pytest.raises(NotCovered, match=f"{name} with a {stride} stride"):
            run(changed(call, **{name: tensor}), device, fused=True)


def stepped(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, two elements apart."""
    return torch.stack([tensor, torch.zeros_like(tensor)], dim=-1)[..., 0]


def moved_by_one(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at an address that is no multiple of 16."""
    flat = torch.cat([torch.zeros(1, dtype=tensor.dtype), tensor.flatten()])
    return flat[1:].view(tensor.shape)


def odd_pitch(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, rows one element further apart."""
    return torch.cat([tensor, torch.zeros_like(tensor[..., :1])], dim=-1)[..., :-1]


@pytest.mark.parametrize("name", ["q_nope", "q_rope", "k_nope", "k_rope"])
@pytest.mark.parametrize("layout", [stepped, moved_by_one, odd_pitch])
def test_B015_layouts_a_kernel_cannot_read_are_left_to_the_chain(device: KernelDevice, name: str, layout) -> None:
    call = make(T, H, R, D)
    call = changed(call, **{name: layout(getattr(call, name))})
    with pytest.raises(NotCovered, match=f": {name} "):
        run(call, device, fused=True)
    result = run(call, device, fused=False)
    assert torch.equal(result.query, expected(call).query)
    assert torch.equal(result.pool, expected(call).pool)


@pytest.mark.parametrize("tokens", [0, 1])
def test_B017_strides_of_size_one_dimensions_are_ignored(device: KernelDevice, tokens: int) -> None:
    """T = 1 and T = 0 with arbitrary token strides, S = 1 with an arbitrary row stride."""
    call = make(tokens, H, R, D, rows=1, pitch=49, fields={"q_nope_token_stride": 512, "k_nope_token_stride": 512})
    odd = {
        "q_nope": values(H * R, seed=30).as_strided((tokens, H, R), (7, R, 1)),
        "q_rope": values(H * D, seed=31).as_strided((tokens, H, D), (3, D, 1)),
        "k_nope": values(R, seed=32).as_strided((tokens, R), (7, 1)),
        "k_rope": values(D, seed=33).as_strided((tokens, D), (1, 1)),
        "loc": torch.zeros(1, dtype=torch.int64).as_strided((tokens,), (5,)),
    }
    check(changed(call, **odd), device)


def test_B017_one_head_ignores_the_head_stride(device: KernelDevice) -> None:
    call = make(T, 1, R, D)
    odd = {
        "q_nope": values(T * R, seed=34).as_strided((T, 1, R), (R, 5, 1)),
        "q_rope": values(T * D, seed=35).as_strided((T, 1, D), (D, 9, 1)),
    }
    assert changed(call, **odd).spec == call.spec
    check(changed(call, **odd), device)


@pytest.mark.parametrize("dtype", [torch.uint8, E4M3])
@pytest.mark.parametrize("pitch", [576, 584, 640, 656])
@pytest.mark.parametrize("page", [0, 1, 4, 16])
def test_B019_pools_of_either_dtype_any_pitch_and_every_view(
    device: KernelDevice, dtype: torch.dtype, pitch: int, page: int
) -> None:
    check(make(3, 1, 512, 64, pitch=pitch, cache_dtype=dtype, page=page), device)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int8])
def test_B019_other_one_byte_pools_are_refused(device: KernelDevice, dtype: torch.dtype) -> None:
    for fused in (True, False):
        with pytest.raises(TypeError, match=f"^kv_cache: found dtype {str(dtype).removeprefix('torch.')}; pass uint8"):
            run(make(3, cache_dtype=dtype), device, fused=fused)


@pytest.mark.parametrize("width", [640, 656])
def test_B019_a_wider_row_is_refused_and_its_slice_is_not(device: KernelDevice, width: int) -> None:
    call = make(3, 1, 512, 64)
    for fused in (True, False):
        with pytest.raises(ValueError, match=r"^kv_cache: found shape \[16, \d+\]; pass rows of R \+ D = 576"):
            run(changed(call, pool=Guarded.pool(16, width)), device, fused=fused)
    check(changed(call, pool=Guarded.pool(16, 576, width)), device)


def test_B019_a_uint8_pool_gets_bytes_not_values() -> None:
    call = make(1, 1, 16, 0, k_nope=torch.full((1, 16), 1.5, dtype=torch.bfloat16), loc=[2], cache_dtype=torch.uint8)
    cache = torch.zeros(4, 16, dtype=torch.uint8)
    prepare_chain(call.q_nope, None, call.k_nope, None, cache, call.loc)
    assert (cache[2] == 0x3C).all()


@pytest.mark.parametrize("pitch", [56, 52, 50, 49])
def test_a_pool_is_written_in_pieces_that_its_rows_start_on(device: KernelDevice, pitch: int) -> None:
    call = make(T, H, R, D, pitch=pitch)
    widest = max((width for width in (2, 4, 8, 16) if pitch % width == 0), default=0)
    if widest:
        assert call.spec.elements_per_thread == widest
        check(call, device)
    if widest < 16:
        with pytest.raises(NotCovered, match=f"kv_cache with a row stride of {pitch} elements"):
            run(call.with_fields(elements_per_thread=16), device, fused=True)
        assert torch.equal(run(call, device, fused=False).pool, expected(call).pool)


@pytest.mark.parametrize("offset", [16, 8, 4, 2, 1])
def test_a_pool_at_any_address(device: KernelDevice, offset: int) -> None:
    call = changed(make(T, H, R, D), pool=Guarded((16, R + D), (R + D, 1), offset=offset))
    if offset % 2 == 0:
        assert call.spec.elements_per_thread == offset
        check(call, device)
    if offset < 16:
        with pytest.raises(NotCovered, match="kv_cache at an address"):
            run(call.with_fields(elements_per_thread=16), device, fused=True)
        assert torch.equal(run(call, device, fused=False).pool, expected(call).pool)


def test_memory_that_overlaps_itself_is_refused() -> None:
    call = make(2, 1, 16, 0)
    row = torch.zeros(1, 16, dtype=torch.uint8)
    for cache in (row.expand(4, 16), torch.zeros(64, dtype=torch.uint8).as_strided((4, 16), (8, 1))):
        with pytest.raises(ValueError, match=r"^kv_cache: rows that share memory"):
            prepare_chain(call.q_nope, None, call.k_nope, None, cache, call.loc)
    out = torch.zeros(1, 1, 16, dtype=torch.uint8).view(E4M3).expand(2, 1, 16)
    with pytest.raises(ValueError, match=r"^out: elements that share memory"):
        prepare_chain(call.q_nope, None, call.k_nope, None, torch.zeros(4, 16, dtype=torch.uint8), call.loc, out=out)


OUT_LAYOUTS = {
    "packed": Guarded.packed(T, H, R + D),
    "padded rows": Guarded((T, H, R + D), (H * 64, 64, 1)),
    "heads first": Guarded((T, H, R + D), (R + D, T * (R + D), 1), offset=8),
}


@pytest.mark.parametrize("layout", OUT_LAYOUTS)
def test_the_callers_result_is_written_in_place(device: KernelDevice, layout: str) -> None:
    out = OUT_LAYOUTS[layout]
    fields = {"out_token_stride": "dynamic", "out_head_stride": "dynamic"}
    check(make(T, H, R, D, out=out, fields=fields), device)
    constant = {"out_token_stride": out.stride[0], "out_head_stride": out.stride[1]}
    check(make(T, H, R, D, out=out, fields=constant), device)


def test_a_result_of_another_layout_is_not_covered(device: KernelDevice) -> None:
    with pytest.raises(NotCovered, match="out with a token stride"):
        run(make(T, H, R, D, out=OUT_LAYOUTS["padded rows"]), device, fused=True)
    fields = {"out_token_stride": H * 64, "out_head_stride": 64}
    with pytest.raises(NotCovered, match="pass out"):
        run(make(T, H, R, D, fields=fields), device, fused=True)


def test_addresses_are_64_bit(device: KernelDevice) -> None:
    """Pool and sources whose last row lies beyond 2**31 bytes; untouched memory is never backed."""
    heads, rank, far = 2, 16, 2**31 + 2**20
    rows = far // rank
    place = device.device
    spec = make(2, heads, rank, 0, fields={"out_token_stride": "dynamic", "out_head_stride": "dynamic"}).spec
    cache = torch.empty(rows, rank, dtype=torch.uint8, device=place)
    out = torch.empty(far + 64, dtype=torch.uint8, device=place).view(E4M3).as_strided((2, heads, rank), (far, 16, 1))
    wide = torch.empty(far + 64, dtype=torch.bfloat16, device=place)
    q_nope, k_nope = wide.as_strided((2, heads, rank), (far, 16, 1)), wide.as_strided((2, rank), (far, 1), 32)
    q_source, k_source = values(2, heads, rank, seed=40), values(2, rank, seed=41)
    q_nope.copy_(q_source)
    k_nope.copy_(k_source)
    loc = torch.tensor([rows - 1, 1], device=place)
    with device.memory([q_nope, k_nope, loc], [cache, out]):
        device.handle(spec)(q_nope, None, k_nope, None, cache, loc, out=out)
    wanted = expected(make(2, heads, rank, 0, q_nope=q_source, k_nope=k_source, loc=[3, 1], rows=4))
    assert torch.equal(out.cpu().view(torch.uint8), wanted.query)
    pool = Guarded.pool(4, rank).inside(wanted.pool)
    assert torch.equal(cache[[1, rows - 1]].cpu(), pool[[1, 3]])
