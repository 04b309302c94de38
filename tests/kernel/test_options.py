"""Arguments beyond the plain call that nothing could take: refused by name, by chain and handle alike."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from kernel.calls import E4M3, Call, make, paged_pool
from kernel.checks import chain_options, expected
from kernel.devices import Emulation

from mlaprep.clients.cache_layout import cache_layout
from mlaprep.clients.errors import NotCovered
from mlaprep.clients.operands import check_operands
from mlaprep.clients.reference import prepare_chain

T, H, R, D = 4, 3, 128, 16
META = torch.device("meta")


def turning(layout: str = "fp8", **options: Any) -> Call:
    return make(T, H, R, D, layout=layout, rope="neox", **options)


def call_with(call: Call, handle: Callable[..., object] | None, **changes: Any) -> object:
    """Call the handle, or the chain, with some arguments replaced."""
    assert call.pool is not None
    view = call.pool.allocate(torch.device("cpu"))[1]
    arguments: dict[str, Any] = {
        "q_nope": call.q_nope,
        "q_rope": call.q_rope,
        "k_nope": call.k_nope,
        "k_rope": call.k_rope,
        "kv_cache": view.view(call.cache_dtype if call.pool.itemsize == 1 else call.lead.dtype),
        "loc": call.loc,
        "positions": call.positions,
        "cos_sin_cache": call.cos_sin_cache,
    }
    if handle is None:
        arguments |= chain_options(call)
    return (handle or prepare_chain)(**arguments | changes)


def refused(
    emulation: Emulation, call: Call, name: str, value: object, error: type[Exception], words: str = ""
) -> None:
    handle = emulation.handle(call.spec)
    for way in (None, handle, handle.covers):
        with pytest.raises(error, match=rf"^{name}: .*{words}") as caught:
            call_with(call, way, **{name: value})
        assert not isinstance(caught.value, NotCovered)


def test_the_plain_call_is_taken(emulation: Emulation) -> None:
    assert call_with(turning(), emulation.handle(turning().spec).covers)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (None, TypeError, "NoneType; pass a torch.Tensor"),
        (numpy.arange(T), TypeError, "numpy.ndarray"),
        (torch.arange(T, dtype=torch.int16), TypeError, "int16; pass int64 or int32"),
        (torch.arange(T, dtype=torch.float32), TypeError, "float32"),
        (torch.arange(T + 1), ValueError, "shape"),
        (torch.arange(T).unsqueeze(1), ValueError, "shape"),
        (torch.tensor(3), ValueError, "shape"),
        (torch.zeros(T, dtype=torch.int64, device=META), ValueError, "meta"),
    ],
)
def test_positions_are_one_index_for_each_token(
    emulation: Emulation, value: object, error: type[Exception], words: str
) -> None:
    refused(emulation, turning(), "positions", value, error, words)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (None, TypeError, "NoneType"),
        (torch.zeros(5, D, dtype=torch.float64), TypeError, "float64; pass float32"),
        (torch.zeros(5, D, dtype=torch.bfloat16), TypeError, "bfloat16"),
        (torch.zeros(5, D // 2), ValueError, "shape"),
        (torch.zeros(5, D + 2), ValueError, "shape"),
        (torch.zeros(0, D), ValueError, "one row or more"),
        (torch.zeros(5, 1, D), ValueError, "shape"),
        (torch.zeros(D), ValueError, "shape"),
        (torch.zeros(5, D, device=META), ValueError, "meta"),
    ],
)
def test_tables_are_float32_rows_of_cosines_and_sines(
    emulation: Emulation, value: object, error: type[Exception], words: str
) -> None:
    refused(emulation, turning(), "cos_sin_cache", value, error, words)


@pytest.mark.parametrize("name", ["positions", "cos_sin_cache"])
def test_angles_without_a_rotation_are_refused(emulation: Emulation, name: str) -> None:
    """A rotation that was forgotten would be silent."""
    refused(emulation, make(T, H, R, D), name, getattr(turning(), name), ValueError, "given with rope none")


def test_rotations_that_cannot_be_are_refused() -> None:
    for value, error in (("ring", ValueError), (None, TypeError), (1, TypeError), (["neox"], TypeError)):
        with pytest.raises(error, match=r"^rope: "):
            call_with(turning(), None, rope=value)
    for rope_dim in (0, 5):
        call = replace(turning(), q_rope=make(T, H, R, rope_dim).q_rope, k_rope=make(T, H, R, rope_dim).k_rope)
        call = replace(call, pool=make(T, H, R, rope_dim).pool)
        with pytest.raises(ValueError, match=rf"^rope: found neox with D = {rope_dim}"):
            call_with(call, None)


@pytest.mark.parametrize(
    ("changes", "error", "name"),
    [
        ({"layout": "fp4"}, ValueError, "layout"),
        ({"layout": None}, TypeError, "layout"),
        ({"layout": ["fp8"]}, TypeError, "layout"),
        ({"query_dtype": "input"}, ValueError, "query_dtype"),
        ({"query_dtype": "bf16"}, ValueError, "query_dtype"),
        ({"query_dtype": torch.bfloat16}, TypeError, "query_dtype"),
        ({"tile_scale": "raw"}, ValueError, "tile_scale"),
        ({"tile_scale": 1.0}, TypeError, "tile_scale"),
        ({"pad_heads_to": H - 1}, ValueError, "pad_heads_to"),
        ({"pad_heads_to": float(H)}, TypeError, "pad_heads_to"),
        ({"pad_heads_to": True}, TypeError, "pad_heads_to"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(
    changes: dict[str, object], error: type[Exception], name: str
) -> None:
    with pytest.raises(error, match=rf"^{name}: "):
        call_with(make(T, H, R, D), None, **changes)


@pytest.mark.parametrize(
    ("layout", "query", "tile", "settled"),
    [
        ("fp8", None, None, ("fp8", "e4m3", "none")),
        ("fp8", "e4m3", "none", ("fp8", "e4m3", "none")),
        ("fp8-q16", None, None, ("fp8-q16", "input", "none")),
        ("same", "input", None, ("same", "input", "none")),
        ("ds_mla", None, None, ("ds_mla", "e4m3", "raw")),
        ("ds_mla", "input", "pow2", ("ds_mla", "input", "pow2")),
    ],
)
def test_layouts_settle_what_was_left_out(
    layout: str, query: str | None, tile: str | None, settled: tuple[str, str, str]
) -> None:
    found = cache_layout(layout, query, tile)
    assert (found.name, found.query_dtype, found.tile_scale) == settled


@pytest.mark.parametrize(
    ("layout", "dtype", "words"),
    [
        ("fp8", torch.bfloat16, "bfloat16; pass uint8 or float8_e4m3fn"),
        ("fp8-q16", torch.bfloat16, "bfloat16; pass uint8 or float8_e4m3fn"),
        ("same", torch.uint8, "uint8; pass bfloat16"),
        ("same", E4M3, "float8_e4m3fn; pass bfloat16"),
        ("same", torch.float16, "float16; pass bfloat16"),
        ("ds_mla", torch.bfloat16, "bfloat16; pass uint8 or float8_e4m3fn"),
        ("ds_mla", torch.float8_e5m2, "float8_e5m2; pass uint8"),
    ],
)
def test_B019_a_pool_of_another_layouts_dtype_is_refused(
    emulation: Emulation, layout: str, dtype: torch.dtype, words: str
) -> None:
    refused(emulation, turning(layout), "kv_cache", torch.zeros(16, R + D).to(dtype), TypeError, words)


@pytest.mark.parametrize(("layout", "width"), [("fp8", R + D), ("same", R + D), ("ds_mla", R + 4 + 2 * D)])
def test_B019_a_row_of_another_layouts_width_is_refused(emulation: Emulation, layout: str, width: int) -> None:
    dtype = torch.bfloat16 if layout == "same" else torch.uint8
    for wrong in (width - 2, width + 2, 656):
        refused(emulation, turning(layout), "kv_cache", torch.zeros(16, wrong).to(dtype), ValueError, f"= {width} ")


@pytest.mark.parametrize(("layout", "wrong"), [("fp8", torch.bfloat16), ("fp8-q16", E4M3), ("same", torch.float16)])
def test_a_result_of_another_dtype_is_refused(emulation: Emulation, layout: str, wrong: torch.dtype) -> None:
    out = torch.zeros(T, H, R + D).to(wrong)
    refused(emulation, turning(layout), "out", out, TypeError, "found dtype")


def test_a_result_without_the_padding_heads_is_refused(emulation: Emulation) -> None:
    call = turning(pad_heads_to=H + 1)
    for heads in (H, H + 2):
        out = torch.zeros(T, heads, R + D).to(E4M3)
        refused(emulation, call, "out", out, ValueError, rf"pass \[{T}, {H + 1}, {R + D}\]")


@pytest.mark.parametrize("layout", ["same", "ds_mla"])
def test_a_scale_that_the_layout_has_not_is_refused(emulation: Emulation, layout: str) -> None:
    refused(emulation, turning(layout), "kv_scale_inv", torch.tensor(1.0), ValueError, f"layout {layout}")


@pytest.mark.parametrize("shape", [(T + 1,), (T, 1), (1, T), (2,), (T, H)])
def test_a_scale_is_one_number_or_one_a_token(emulation: Emulation, shape: tuple[int, ...]) -> None:
    refused(emulation, turning(), "q_scale_inv", torch.ones(shape), ValueError, rf"a scalar, or \[{T}\]")


def test_pools_are_seen_as_rows_or_as_pages() -> None:
    def seen(pool: torch.Tensor) -> tuple[tuple[int, ...], int, int, int, int]:
        call = make(T, H, 32, 16)
        given = check_operands(call.q_nope, call.q_rope, call.k_nope, call.k_rope, pool, call.loc)
        assert given.kv_cache.data_ptr() == pool.data_ptr()
        return tuple(given.kv_cache.shape), given.rows, given.page, given.row_stride, given.page_stride

    flat = torch.zeros(4096, dtype=torch.uint8)
    assert seen(flat.as_strided((16, 48), (64, 1))) == ((16, 48), 16, 1, 64, 64)
    assert seen(flat.as_strided((16, 1, 48), (64, 9, 1))) == ((16, 48), 16, 1, 64, 64)
    assert seen(flat.as_strided((4, 4, 48), (256, 64, 1))) == ((16, 48), 16, 4, 64, 256)
    assert seen(flat.as_strided((1, 4, 48), (999, 64, 1))) == ((4, 48), 4, 4, 64, 256)
    assert seen(flat.as_strided((4, 4, 48), (512, 64, 1))) == ((4, 4, 48), 16, 4, 64, 512)
    assert seen(flat.as_strided((4, 4, 48), (48, 192, 1))) == ((4, 4, 48), 16, 4, 192, 48)


def test_pages_that_overlap_are_refused(emulation: Emulation) -> None:
    flat = torch.zeros(4096, dtype=torch.uint8)
    for strides in ((96, 144, 1), (0, 144, 1), (288, 144, 1), (144, 100, 1)):
        refused(emulation, turning(), "kv_cache", flat.as_strided((3, 3, 144), strides), ValueError, "share memory")


@pytest.mark.parametrize("layout", ["fp8", "same", "ds_mla"])
@pytest.mark.parametrize("way", ["grad", "inference", "negated"])
def test_B060_other_kinds_of_tensor_are_taken_in_every_layout(emulation: Emulation, layout: str, way: str) -> None:
    call = turning(layout, pad_heads_to=5)
    call = replace(call, pool=paged_pool(layout, 4, 4, R, D, gap=16, pad=-(R + 4 + 2 * D) % 16))
    wanted = expected(call)

    def dress(tensor: torch.Tensor) -> torch.Tensor:
        if way == "grad" and tensor.is_floating_point():
            return tensor.clone().requires_grad_()
        if way == "negated" and tensor.is_floating_point():
            return torch._neg_view(-tensor)
        if way == "inference":
            with torch.inference_mode():
                return tensor.clone()
        return tensor

    names = ("q_nope", "q_rope", "k_nope", "k_rope", "loc", "positions", "cos_sin_cache")
    dressed = {name: dress(getattr(call, name)) for name in names}
    for handle in (None, emulation.handle(call.spec)):
        whole, view = call.pool.allocate(torch.device("cpu"))
        dressed["kv_cache"] = view.view(torch.bfloat16 if layout == "same" else torch.uint8)
        with emulation.memory(list(dressed.values()), [view]):
            query = call_with(call, handle, **dressed)
        assert isinstance(query, torch.Tensor)
        assert not query.requires_grad
        assert torch.equal(query.view(torch.uint8), wanted.query)
        assert torch.equal(whole, wanted.pool)
