"""prepare and fused_prepare: one kernel for every batch size, and the chain's bytes where there is none."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from emulation.driver import EmulatedDriver
from kernel.calls import TENSORS, Call, make, values
from kernel.checks import expected
from kernel.devices import Gpu
from kernel.entries import CALLS, VARIANTS, D, DeviceClient, EmulatedSupply, H, R, T, given

from mlaprep.clients import fused_prepare, prepare, specialise
from mlaprep.clients.operands import check_operands
from mlaprep.clients.specialise import covering_spec
from mlaprep.templates.spec import KernelSpec

CHECKED = ("layout", "query_dtype", "tile_scale", "rope", "pad_heads_to", "write_q", "write_kv")
"""Options that say what the operands must be."""


def spec_of(call: Call) -> KernelSpec | None:
    """The kernel that prepare asks for where these operands lie on a GPU."""
    positional, _, options = given(call, torch.device("cpu"))
    tensors = {name: options[name] for name in TENSORS if name in options}
    checked = check_operands(*positional, **tensors, **{name: options[name] for name in CHECKED})
    return covering_spec(checked._replace(device=torch.device("cuda")), options)  # type: ignore[arg-type]


def test_B017_one_kernel_for_every_batch_size_and_every_stride() -> None:
    specs = {spec_of(make(tokens, H, R, D, rows=64)) for tokens in (0, 1, 2, 17, 64)}
    one = make(1, H, R, D)
    specs.add(spec_of(replace(one, k_nope=values(R, seed=1).as_strided((1, R), (7, 1)))))
    specs.add(spec_of(replace(one, q_nope=values(4096, seed=2).as_strided((1, H, R), (9, 1000, 1)))))
    specs.add(spec_of(make(T, H, R, D, pitch=64)))
    assert len(specs) == 1


def test_the_spec_of_a_call_names_what_it_needs() -> None:
    call = make(T, H, R, D, loc_dtype=torch.int32, dtype="fp16", kv_scale_inv=torch.tensor(1.0), reserved_slot=0)
    assert spec_of(call) == call.spec
    sharded = make(T, H, R, D, dcp_world=4, dcp_interleave=64)
    assert spec_of(sharded) == sharded.spec
    assert spec_of(replace(make(T, H, R, D), dcp_interleave=64)) == make(T, H, R, D).spec


@pytest.mark.parametrize("name", VARIANTS)
def test_options_and_operands_name_the_variant(name: str) -> None:
    assert spec_of(VARIANTS[name]) == VARIANTS[name].spec


@pytest.mark.parametrize(("pitch", "elements"), [(64, 16), (56, 8), (52, 4), (50, 2), (49, None)])
def test_the_spec_follows_what_accesses_the_pool_allows(pitch: int, elements: int | None) -> None:
    spec = spec_of(make(T, H, R, D, pitch=pitch))
    assert elements == (None if spec is None else spec.elements_per_thread)


@pytest.mark.parametrize(("offset", "elements"), [(8, 16), (4, 4), (2, 2), (1, None)])
def test_the_spec_follows_what_accesses_a_source_allows(offset: int, elements: int | None) -> None:
    k_nope = values(T * R + 8, seed=1)[offset : offset + T * R].unflatten(0, (T, R))
    spec = spec_of(replace(make(T, H, R, D), k_nope=k_nope))
    assert elements == (None if spec is None else spec.elements_per_thread)


def test_shapes_of_no_kernel_have_no_spec() -> None:
    for shape in ((0, R, D), (257, R, D), (H, 20, D), (H, R, 5), (H, 1040, D), (H, R, 130)):
        assert spec_of(make(T, *shape)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_prepare_gives_the_same_bytes_fused_or_not(gpu: Gpu, name: str) -> None:
    call, covered = CALLS[name]
    wanted = expected(call)
    positional, whole, options = given(call, gpu.device)
    query = fused_prepare(*positional, **options, client=DeviceClient(gpu))
    assert (query is not None) == covered
    if not covered:
        assert (whole == call.pool.poison).all()
    query = prepare(*positional, **options, client=DeviceClient(gpu))
    assert (query is None) == (wanted.query is None)
    assert query is None or torch.equal(query.view(torch.uint8).cpu(), wanted.query)
    assert whole is None or torch.equal(whole.cpu(), wanted.pool)


def test_slot_rules_do_not_keep_a_query_only_call_from_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specialise, "DEVICE_TYPE", "cpu")
    call = VARIANTS["query only"]
    wanted = expected(call)
    driver = EmulatedDriver()
    supply: Any = EmulatedSupply(driver)
    positional, _, options = given(call, torch.device("cpu"))
    options |= {"dcp_world": 4, "dcp_rank": 1, "reserved_slot": 0}
    with driver.memory([*positional, *(options[name] for name in TENSORS if name in options)], []):
        query = fused_prepare(*positional, **options, client=supply)
        # What is left out is not looked at, whatever it is.
        again = fused_prepare(*positional[:2], [1], [2], [3], [4], **options, client=supply)
    for found in (query, again):
        assert found is not None
        assert torch.equal(found.view(torch.uint8), wanted.query)


def test_flags_are_booleans_and_nothing_else() -> None:
    positional, _, options = given(make(T, H, R, D), torch.device("cpu"))
    for function in (fused_prepare, prepare):
        for name in ("write_q", "write_kv"):
            for wrong in (torch.tensor(True), [1], "no", 1):
                with pytest.raises(TypeError, match=name):
                    function(*positional, **{**options, name: wrong})
        with pytest.raises(TypeError, match="pad_heads_to"):
            function(*positional, **{**options, "write_q": False, "pad_heads_to": [8]})


@pytest.mark.parametrize("name", CALLS)
def test_a_remembered_launch_gives_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of prepare on the emulation, where a CPU tensor is what a kernel takes."""
    monkeypatch.setattr(specialise, "DEVICE_TYPE", "cpu")
    call, covered = CALLS[name]
    wanted = expected(call)
    driver = EmulatedDriver()
    supply: Any = EmulatedSupply(driver)
    for _ in range(3):
        positional, whole, options = given(call, torch.device("cpu"))
        reads = [*positional, *(options[name] for name in TENSORS if name in options)]
        with driver.memory(reads, [] if whole is None else [whole]):
            fused = fused_prepare(*positional, **options, client=supply)
            assert (fused is not None) == covered
            query = prepare(*positional, **options, client=supply)
        assert (query is None) == (wanted.query is None)
        assert query is None or torch.equal(query.view(torch.uint8), wanted.query)
        assert whole is None or torch.equal(whole, wanted.pool)
    assert supply.asked == (1 if covered else 0)
    assert len(supply.layouts or ()) == (1 if covered else 0)
    assert supply.stats().launches == (5 if covered else 0)
    assert supply.stats().fallbacks["uncovered"] == (0 if covered else 6)


def test_options_that_are_none_are_named() -> None:
    positional, _, options = given(make(T, H, R, D), torch.device("cpu"))
    for function in (fused_prepare, prepare):
        with pytest.raises(TypeError, match="positons"):
            function(*positional, **options, positons=None)
        with pytest.raises(TypeError, match="layout"):
            function(*positional, **{**options, "layout": ["fp8"]})


@pytest.mark.parametrize("name", CALLS)
def test_on_the_cpu_prepare_is_the_chain(name: str) -> None:
    call, _ = CALLS[name]
    wanted = expected(call)
    positional, whole, options = given(call, torch.device("cpu"))
    assert fused_prepare(*positional, **options) is None
    query = prepare(*positional, **options)
    assert (query is None) == (wanted.query is None)
    assert query is None or torch.equal(query.view(torch.uint8), wanted.query)
    assert whole is None or torch.equal(whole, wanted.pool)
