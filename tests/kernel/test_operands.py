"""Arguments that nothing could take: refused by name, by chain and handle alike."""

import functools
from collections.abc import Callable

import numpy
import pytest
import torch
from kernel.calls import E4M3, make
from kernel.checks import expected, run
from kernel.devices import Emulation
from kernel.entries import DeviceClient

from mlaprep.clients import explain, fused_prepare, prepare, specialise
from mlaprep.clients.errors import NotCovered
from mlaprep.clients.operands import check_operands
from mlaprep.clients.reference import prepare_chain

T, H, R, D = 4, 3, 32, 16
NAMES = ("q_nope", "q_rope", "k_nope", "k_rope", "kv_cache", "loc")


def arguments() -> dict[str, torch.Tensor]:
    call = make(T, H, R, D)
    cache = call.pool.allocate(torch.device("cpu"))[1]
    return dict(zip(NAMES, (call.q_nope, call.q_rope, call.k_nope, call.k_rope, cache, call.loc), strict=True))


@pytest.fixture(params=["chain", "handle", "covers", "prepare", "fused_prepare", "remembered", "verified", "explain"])
def takes(
    request: pytest.FixtureRequest, emulation: Emulation, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., object]:
    """Whatever takes a call's arguments."""
    handle = emulation.handle(make(T, H, R, D).spec)
    if request.param == "verified":
        monkeypatch.setenv("MLAPREP_VERIFY", "1")
    client = DeviceClient(emulation)
    if request.param in ("remembered", "verified"):
        # Beside a call that was launched.
        monkeypatch.setattr(specialise, "DEVICE_TYPE", "cpu")
        good = arguments()
        with emulation.memory(list(good.values()), [good["kv_cache"]]):
            assert fused_prepare(*good.values(), client=client) is not None
        assert len(client.layouts or ()) == (1 if request.param == "remembered" else 0)
    entry = {"prepare": prepare, "explain": explain}.get(request.param, fused_prepare)
    direct = {"chain": prepare_chain, "handle": handle, "covers": handle.covers}
    return direct.get(request.param, functools.partial(entry, client=client))


def refused(takes: Callable[..., object], name: str, value: object, error: type[Exception], words: str = "") -> None:
    given = arguments()
    before = given["kv_cache"].clone()
    positional = {**given, **({name: value} if name in NAMES else {})}
    options = {} if name in NAMES else {name: value}
    with pytest.raises(error, match=rf"^{name}: .*{words}") as caught:
        takes(*positional.values(), **options)
    assert not isinstance(caught.value, NotCovered)
    assert torch.equal(given["kv_cache"], before)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.int8, torch.float32, torch.bool, torch.uint32])
def test_B018_loc_of_another_dtype_is_refused_with_the_dtype_named(takes, dtype: torch.dtype) -> None:
    refused(takes, "loc", torch.zeros(T, dtype=dtype), TypeError, str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("shape", [(T + 1,), (T - 1,), (T, 1), (1, T), (), (0,)])
def test_B018_loc_of_another_shape_is_refused(takes, shape: tuple[int, ...]) -> None:
    refused(takes, "loc", torch.zeros(shape, dtype=torch.int64), ValueError, "shape")


def test_B018_loc_on_another_device_is_refused(takes) -> None:
    refused(takes, "loc", torch.zeros(T, dtype=torch.int64, device="meta"), ValueError, "meta")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_B018_a_strided_loc_is_never_read_as_dense(emulation: Emulation, dtype: torch.dtype) -> None:
    spread = torch.tensor([1, 9, 0, 9, 3, 9, 2, 9], dtype=dtype)
    call = make(T, H, R, D, loc=[1, 0, 3, 2], loc_dtype=dtype)
    strided = type(call)(**{**vars(call), "loc": spread[::2]})
    with pytest.raises(NotCovered, match="loc with stride 2"):
        run(strided, emulation, fused=True)
    assert torch.equal(run(strided, emulation, fused=False).pool, expected(call).pool)
    stuck = type(call)(**{**vars(call), "loc": torch.tensor([7], dtype=dtype).expand(T)})
    with pytest.raises(NotCovered, match="loc with stride 0"):
        run(stuck, emulation, fused=True)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_B018_a_loc_off_its_natural_alignment_is_not_covered(emulation: Emulation, dtype: torch.dtype) -> None:
    buffer = bytearray(8 * T + 8)
    loc = torch.frombuffer(buffer, dtype=dtype, count=T, offset=2)
    call = make(T, H, R, D)
    given = {**arguments(), "loc": loc}
    spec = type(call)(**{**vars(call), "loc": loc}).spec
    assert "loc at an address" in str(emulation.handle(spec).covers(*given.values()).reason)


def test_B018_each_loc_dtype_is_a_kernel_of_its_own(emulation: Emulation) -> None:
    handle = emulation.handle(make(T, H, R, D).spec)
    given = arguments()
    narrow = {**given, "loc": given["loc"].int()}
    assert handle.covers(*given.values())
    assert "int32" in handle.covers(*narrow.values()).reason


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "value",
    [
        numpy.zeros((T, H, R), numpy.float32),
        [[1.0]],
        None,
        3,
        "q",
        memoryview(b"abc"),
        torch.zeros(T, R, dtype=torch.bfloat16).to_sparse(),
        torch.nested.nested_tensor([torch.zeros(2, dtype=torch.bfloat16)]),
        torch.zeros(T, H, R, dtype=torch.float32),
        torch.zeros(T, H, R, dtype=torch.complex64),
    ],
    ids=["numpy", "list", "none", "int", "str", "memoryview", "sparse", "nested", "float32", "complex"],
)
def test_B060_what_is_no_dense_tensor_of_the_right_type_is_a_type_error(takes, name: str, value: object) -> None:
    if value is None and name == "q_rope":
        refused(takes, "k_rope", torch.zeros(T, D + 8, dtype=torch.bfloat16), ValueError)
        return
    refused(takes, name, value, TypeError)


@pytest.mark.parametrize("name", NAMES)
def test_B060_zero_dimensional_tensors_are_refused(takes, name: str) -> None:
    refused(takes, name, arguments()[name].flatten()[0], ValueError, "shape")


@pytest.mark.parametrize("name", NAMES)
def test_B060_tensors_on_another_device_are_refused_by_name(takes, name: str) -> None:
    refused(takes, name, arguments()[name].to("meta"), ValueError, "meta")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("q_nope", (T, H * R)),
        ("q_nope", (T, 1, H, R)),
        ("q_rope", (T, H + 1, D)),
        ("q_rope", (T + 1, H, D)),
        ("q_rope", (T, D)),
        ("k_nope", (T + 1, R)),
        ("k_nope", (T, R - 8)),
        ("k_nope", (T, 2, R)),
        ("k_rope", (T, D + 8)),
        ("k_rope", (1, T, D)),
        ("kv_cache", (16, R + D + 8)),
        ("kv_cache", (16, R)),
        ("kv_cache", (16 * (R + D),)),
        ("kv_cache", (4, 4, 1, R + D)),
    ],
)
def test_shapes_that_do_not_fit_together_are_refused(takes, name: str, shape: tuple[int, ...]) -> None:
    refused(takes, name, torch.zeros(shape, dtype=arguments()[name].dtype), ValueError, "shape")


def test_a_query_of_another_dtype_than_the_keys_is_refused(takes) -> None:
    for name in ("q_rope", "k_nope", "k_rope"):
        refused(takes, name, arguments()[name].half(), TypeError, "float16; pass bfloat16")


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (1.0, TypeError),
        (torch.tensor(1.0, dtype=torch.float64), TypeError),
        (torch.tensor(1.0, dtype=torch.bfloat16), TypeError),
        (torch.tensor([1.0, 2.0]), ValueError),
        (torch.zeros(0), ValueError),
        (torch.tensor(1.0, device="meta"), ValueError),
    ],
)
@pytest.mark.parametrize("name", ["q_scale_inv", "kv_scale_inv"])
def test_scales_are_one_float32_on_the_device(takes, name: str, value: object, error: type[Exception]) -> None:
    refused(takes, name, value, error)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (torch.zeros(T, H, R + D, dtype=torch.uint8), TypeError),
        (torch.zeros(T, H, R, dtype=torch.uint8).view(E4M3), ValueError),
        (torch.zeros(T, H * (R + D), dtype=torch.uint8).view(E4M3), ValueError),
        (torch.zeros(T, H, R + D, dtype=torch.uint8, device="meta").view(E4M3), ValueError),
        (numpy.zeros(3), TypeError),
    ],
)
def test_a_result_that_does_not_fit_is_refused(takes, value: object, error: type[Exception]) -> None:
    refused(takes, "out", value, error)


class Subclass(torch.Tensor):
    """Plain memory under another name."""


@pytest.mark.parametrize("way", ["grad", "parameter", "subclass", "inference", "negated"])
def test_B060_other_kinds_of_tensor_with_memory_of_their_own_are_taken(emulation: Emulation, way: str) -> None:
    """Tensors that want a gradient are detached: the results carry none."""
    call = make(T, H, R, D)
    wanted = expected(call)

    def dress(tensor: torch.Tensor) -> torch.Tensor:
        if way == "inference":
            with torch.inference_mode():
                return tensor.clone()
        if way == "negated" and tensor.is_floating_point() and tensor.dtype != E4M3:
            return torch._neg_view(-tensor)
        if way == "subclass":
            return tensor.as_subclass(Subclass)
        if way == "parameter" and tensor.dtype == torch.bfloat16:
            return torch.nn.Parameter(tensor.clone())
        if way == "grad" and tensor.dtype == torch.bfloat16:
            return (tensor.clone().requires_grad_() * 1).view_as(tensor)
        return tensor

    handle = emulation.handle(call.spec)
    for fused in (True, False):
        whole, cache = call.pool.allocate(torch.device("cpu"))
        dressed = [dress(t) for t in (call.q_nope, call.q_rope, call.k_nope, call.k_rope, cache, call.loc)]
        if fused:
            with emulation.memory(dressed, [dressed[4]]):
                query = handle(*dressed)
        else:
            query = prepare_chain(*dressed)
        assert not query.requires_grad
        assert not query.is_inference()
        assert torch.equal(torch.Tensor.view(query, torch.uint8), wanted.query)
        pool = dressed[4].view(torch.uint8).as_subclass(torch.Tensor) if way == "inference" else whole
        assert torch.equal(pool, call.pool.inside(wanted.pool) if way == "inference" else wanted.pool)


def test_absent_rope_operands_must_be_absent_on_both_sides() -> None:
    given = arguments()
    with pytest.raises(TypeError, match=r"^k_rope: found None beside a q_rope of width 16"):
        prepare_chain(*{**given, "k_rope": None}.values())
    with pytest.raises(ValueError, match=r"^k_rope: found shape \[4, 16\] beside no q_rope"):
        prepare_chain(*{**given, "q_rope": None}.values())


def test_rope_operands_of_no_width_are_absent_ones() -> None:
    given = arguments()
    empty = {
        "q_rope": given["q_rope"][..., :0],
        "k_rope": given["k_rope"][..., :0],
        "kv_cache": given["kv_cache"][:, :R],
    }
    operands = check_operands(*{**given, **empty}.values())
    assert (operands.rope_dim, operands.q_rope, operands.k_rope) == (0, None, None)


def test_operands_are_views_of_the_callers_memory() -> None:
    given = arguments()
    paged = given["kv_cache"].unflatten(0, (4, 4))
    keys = {"k_nope": given["k_nope"].unsqueeze(1), "k_rope": given["k_rope"].unsqueeze(1), "kv_cache": paged}
    operands = check_operands(*{**given, **keys}.values())
    assert (operands.tokens, operands.heads, operands.rank, operands.rope_dim) == (T, H, R, D)
    assert (operands.rows, operands.page) == (16, 4)
    assert operands.k_nope.shape == (T, R)
    assert operands.kv_cache.shape == (16, R + D)
    for name in NAMES:
        assert getattr(operands, name).data_ptr() == given[name].data_ptr()
