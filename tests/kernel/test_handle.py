"""KernelHandle around a launch: architectures, capture, processes, what a driver is asked."""

import hashlib
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulation.artifact import emulated_artifact
from emulation.driver import EmulatedDriver
from kernel.calls import Call, make
from kernel.checks import run
from kernel.devices import Emulation

from mlaprep.clients.errors import ArtifactRejected, DriverError, ForkedProcessError, KernelNotReady, NotCovered
from mlaprep.clients.handle import KernelHandle
from mlaprep.clients.plan import MAX_TOKENS
from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.templates.arch import Arch


def call_on(driver: EmulatedDriver, handle: KernelHandle, call: Call) -> torch.Tensor | None:
    cache = call.pool.allocate(torch.device("cpu"))[1]
    operands = [call.q_nope, call.q_rope, call.k_nope, call.k_rope, cache, call.loc]
    with driver.memory(operands, [cache]):
        return handle(*operands)


@pytest.fixture
def driver() -> EmulatedDriver:
    return EmulatedDriver()


@pytest.fixture
def call() -> Call:
    return make(3)


@pytest.fixture
def handle(driver: EmulatedDriver, call: Call) -> KernelHandle:
    return KernelHandle(emulated_artifact(call.spec), driver)


def test_a_module_is_loaded_once(driver: EmulatedDriver, handle: KernelHandle, call: Call) -> None:
    for _ in range(3):
        call_on(driver, handle, call)
    assert driver.loads == 1
    assert len(driver.launches) == 3


def test_the_launch_says_whether_the_kernel_waits(driver: EmulatedDriver) -> None:
    for pdl in (True, False):
        call = make(3, fields={"pdl": pdl})
        call_on(driver, KernelHandle(emulated_artifact(call.spec), driver), call)
        assert driver.launches[-1].pdl is pdl


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
        ((12, 1), None),
        ((8, 9), None),
        ((11, 0), None),
    ],
)
def test_B045_devices_get_their_own_target_or_none(
    driver: EmulatedDriver, handle: KernelHandle, call: Call, capability: tuple[int, int], arch: str | None
) -> None:
    found = Arch.for_device(capability)
    assert (None if found is None else found.name) == arch
    driver.device_capability = capability
    if arch == "sm_90a":
        call_on(driver, handle, call)
    else:
        with pytest.raises(DriverError, match="compute capability"):
            call_on(driver, handle, call)
        assert driver.loads == 0


def relabelled(artifact: KernelArtifact, cubin: bytes) -> KernelArtifact:
    """The artifact with other bytes, as a store with a wrong entry would hand it out."""
    digest = hashlib.sha256(cubin).hexdigest()
    return replace(
        artifact, cubin=cubin, manifest=replace(artifact.manifest, cubin_sha256=digest, cubin_size=len(cubin))
    )


def test_B046_another_architectures_binary_never_reaches_a_driver(driver: EmulatedDriver, call: Call) -> None:
    artifact = emulated_artifact(call.spec)
    cubin = bytearray(artifact.cubin)
    cubin[8], cubin[48:52] = 8, (0x600640A).to_bytes(4, "little")  # what an sm_100a cubin has there
    with pytest.raises(ArtifactRejected, match="sm_90a was asked for, this one is for sm_100a") as caught:
        KernelHandle(relabelled(artifact, bytes(cubin)), driver)
    assert caught.value.reason == "wrong-arch"


@pytest.mark.parametrize(("offset", "value", "reason"), [(18, 62, "wrong-machine"), (0, 0, "not-elf")])
def test_B046_what_is_no_cubin_never_reaches_a_driver(
    driver: EmulatedDriver, call: Call, offset: int, value: int, reason: str
) -> None:
    artifact = emulated_artifact(call.spec)
    cubin = bytearray(artifact.cubin)
    cubin[offset] = value
    with pytest.raises(ArtifactRejected) as caught:
        KernelHandle(relabelled(artifact, bytes(cubin)), driver)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "launch",
    [
        {},
        {"parameters": None},
        {"parameters": [["q_out"]]},
        {"parameters": [["q_out", "pointer"], ["no_such", "u32"]]},
        {"pdl": 1},
        {"threads_per_row": 0},
        {"rows_per_token": "13"},
    ],
)
def test_launch_parameters_that_are_not_the_specs_never_reach_a_driver(
    driver: EmulatedDriver, call: Call, launch: dict[str, Any]
) -> None:
    artifact = emulated_artifact(call.spec)
    launch = artifact.manifest.launch | launch if launch else {}
    with pytest.raises(ArtifactRejected, match="launch parameters") as caught:
        KernelHandle(replace(artifact, manifest=replace(artifact.manifest, launch=launch)), driver)
    assert caught.value.reason == "launch"


def test_a_spec_that_cannot_be_never_reaches_a_driver(driver: EmulatedDriver, call: Call) -> None:
    artifact = emulated_artifact(call.spec)
    manifest = replace(artifact.manifest, spec=artifact.manifest.spec | {"num_heads": 0})
    with pytest.raises(ArtifactRejected, match="num_heads") as caught:
        KernelHandle(replace(artifact, manifest=manifest), driver)
    assert caught.value.reason == "wrong-spec"


def test_a_cold_handle_refuses_a_capture_and_a_loaded_one_does_not(
    driver: EmulatedDriver, handle: KernelHandle, call: Call
) -> None:
    driver.capturing = True
    with pytest.raises(KernelNotReady):
        call_on(driver, handle, call)
    assert driver.loads == 0
    driver.capturing = False
    call_on(driver, handle, call)
    driver.capturing = True
    call_on(driver, handle, call)
    assert driver.loads == 1


def test_B009_an_empty_batch_needs_no_module_even_in_a_capture(driver: EmulatedDriver, handle: KernelHandle) -> None:
    driver.capturing = True
    assert call_on(driver, handle, make(0)).shape == (0, 3, 48)
    assert driver.loads == 0
    assert not driver.launches


def test_a_forked_child_gets_a_clear_error(driver: EmulatedDriver, handle: KernelHandle, call: Call) -> None:
    call_on(driver, handle, call)
    child = os.fork()
    if not child:
        try:
            call_on(driver, handle, call)
        except ForkedProcessError as error:
            os._exit(0 if f"created in pid {os.getppid()}" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (make(3, heads=4), "4 heads"),
        (make(3, rank=48), "kv_lora_rank 48"),
        (make(3, rope_dim=32), "rope_dim 32"),
        (make(3, dtype="fp16"), "float16"),
        (make(3, loc_dtype=torch.int32), "int32"),
        (make(3, q_scale_inv=torch.tensor(1.0)), "q_scale_inv given"),
        (make(3, kv_scale_inv=torch.tensor(1.0)), "kv_scale_inv given"),
        (make(3, reserved_slot=0), "reserved_slot given"),
    ],
)
def test_another_variants_call_is_not_covered(emulation: Emulation, given: Call, reason: str) -> None:
    other = make(3)
    handle = emulation.handle(other.spec)
    cache = given.pool.allocate(torch.device("cpu"))[1]
    operands = (given.q_nope, given.q_rope, given.k_nope, given.k_rope, cache, given.loc)
    options = {name: getattr(given, name) for name in ("q_scale_inv", "kv_scale_inv", "reserved_slot")}
    coverage = handle.covers(*operands, **options)
    assert not coverage
    assert reason in coverage.reason
    with pytest.raises(NotCovered, match=reason):
        handle(*operands, **options)


def test_another_number_of_heads_is_not_covered_and_more_than_the_padding_is_refused(emulation: Emulation) -> None:
    handle = emulation.handle(make(3, heads=3, pad_heads_to=8).spec)
    for heads, error, words in (
        (4, NotCovered, "4 heads"),
        (9, ValueError, "^pad_heads_to: found 8; pass an int from 9"),
    ):
        given = make(3, heads=heads)
        cache = given.pool.allocate(torch.device("cpu"))[1]
        with pytest.raises(error, match=words):
            handle(given.q_nope, given.q_rope, given.k_nope, given.k_rope, cache, given.loc)


def test_an_option_of_the_kernel_must_be_given(emulation: Emulation) -> None:
    for option in ({"reserved_slot": 3}, {"q_scale_inv": torch.tensor(2.0)}, {"kv_scale_inv": torch.tensor(2.0)}):
        call = make(2, **option)
        handle = emulation.handle(call.spec)
        cache = call.pool.allocate(torch.device("cpu"))[1]
        with pytest.raises(NotCovered, match=f"{next(iter(option))} absent"):
            handle(call.q_nope, call.q_rope, call.k_nope, call.k_rope, cache, call.loc)


def test_a_batch_beyond_one_launch_is_refused_with_the_limit_named(emulation: Emulation) -> None:
    call = make(1, heads=1, rank=16, rope_dim=0)
    tokens = MAX_TOKENS + 1
    q_nope, k_nope = call.q_nope.expand(tokens, 1, 16), call.k_nope.expand(tokens, 16)
    loc = torch.empty(tokens, dtype=torch.int32)  # never touched, so never backed by memory
    handle = emulation.handle(make(1, heads=1, rank=16, rope_dim=0, loc_dtype=torch.int32).spec)
    cache = call.pool.allocate(torch.device("cpu"))[1]
    with pytest.raises(NotCovered, match=f"{tokens} tokens, one launch takes at most {MAX_TOKENS}"):
        handle(q_nope, None, k_nope, None, cache, loc)


def test_B010_a_grid_of_more_rows_than_16_bits(emulation: Emulation) -> None:
    for heads, tokens in ((1, 65_536), (128, 512)):
        call = make(0, heads, 16, 0, rows=tokens)
        source = torch.randn(tokens, heads, 16).bfloat16()
        many = {"q_nope": source, "k_nope": source[:, 0], "loc": torch.arange(tokens).flip(0)}
        result = run(Call(**{**vars(call), **many}), emulation, fused=True)
        wanted = run(Call(**{**vars(call), **many}), emulation, fused=False)
        assert torch.equal(result.query, wanted.query)
        assert torch.equal(result.pool, wanted.pool)
