"""MLAPREP_VERIFY and MLAPREP_DISABLE: every launch proved, or none made."""

import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from emulation.artifact import emulated_artifact
from emulation.driver import EmulatedDriver
from kernel.calls import TENSORS, Call, make, paged_pool
from kernel.checks import Result, expected
from kernel.devices import Gpu, KernelDevice
from kernel.entries import CALLS, D, DeviceClient, EmulatedSupply, H, R, T, given
from kernel.memory import CANARY

from mlaprep.clients import fused_prepare, prepare, specialise
from mlaprep.clients.client import KernelClient
from mlaprep.clients.errors import NotCovered, SpecError, VerificationFailed
from mlaprep.clients.handle import KernelHandle
from mlaprep.clients.launch import LoadedKernel
from mlaprep.clients.plan import LaunchConfig
from mlaprep.kernels_cache.store import MemoryStore
from mlaprep.templates.spec import parse_variant_id

HANDLE_OPTIONS = ("positions", "cos_sin_cache", "q_scale_inv", "kv_scale_inv", "reserved_slot", "dcp_rank")


@pytest.fixture
def verifying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAPREP_VERIFY", "1")


@pytest.fixture
def disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAPREP_DISABLE", "1")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulation's kernels take what lies on the CPU."""
    monkeypatch.setattr(specialise, "DEVICE_TYPE", "cpu")


def reads(positional: Sequence[Any], options: dict[str, Any]) -> list[Any]:
    return [*positional, *(options[name] for name in TENSORS if name in options)]


def compare(wanted: Result, query: torch.Tensor | None, whole: torch.Tensor | None) -> None:
    assert (query is None) == (wanted.query is None)
    assert query is None or torch.equal(query.view(torch.uint8).cpu(), wanted.query)
    assert whole is None or torch.equal(whole.cpu(), wanted.pool)


MORE: dict[str, tuple[Call, bool]] = {
    "skipped slots": (make(T, H, R, D, loc=[-1, 3, 99, 0, 7], reserved_slot=0), True),
    "rows with padding": (make(T, H, R, D, pitch=80), True),
    "all skipped": (make(T, H, R, D, loc=[-1] * T), True),
    "an empty pool": (make(2, H, R, D, rows=2, loc=[5, 6]), True),
    "pages of 16-bit rows": (
        replace(make(T, H, R, D, layout="same"), pool=paged_pool("same", 4, 4, R, D, gap=16)),
        True,
    ),
}


@pytest.mark.parametrize("name", [*CALLS, *MORE])
def test_every_call_is_verified_and_gives_the_same_bytes(
    device: KernelDevice, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specialise, "DEVICE_TYPE", device.device.type)
    call, covered = {**CALLS, **MORE}[name]
    wanted = expected(call)
    with monkeypatch.context() as patch:  # for the client alone: handles are kept for other tests
        patch.setenv("MLAPREP_VERIFY", "1")
        client = DeviceClient(device)
    for calls in range(1, 3):
        positional, whole, options = given(call, device.device)
        with device.memory(reads(positional, options), [] if whole is None else [whole]):
            query = prepare(*positional, **options, client=client)
        compare(wanted, query, whole)
        assert client.stats().verified == (calls if covered else 0)
    assert client.layouts is None


def test_two_tokens_with_one_slot_may_end_either_way(verifying: None, on_cpu: None) -> None:
    call = make(T, H, R, D, loc=[3, 4, 3, 3, 7])
    driver = EmulatedDriver()
    positional, whole, options = given(call, torch.device("cpu"))
    assert whole is not None
    with driver.memory(reads(positional, options), [whole]):
        assert fused_prepare(*positional, **options, client=EmulatedSupply(driver)) is not None


@dataclass
class FaultyDriver(EmulatedDriver):
    """Its kernels do one thing more than they should."""

    fault: Callable[[Sequence[int]], None] = lambda _: None

    def prepare(self, kernel: LoadedKernel, parameters: Sequence[tuple[str, str]], pdl: bool) -> Any:
        launch = super().prepare(kernel, parameters, pdl)

        def faulty(config: LaunchConfig, stream: int, arguments: Sequence[int]) -> None:
            launch(config, stream, arguments)
            self.fault(arguments)

        return faulty


PITCH = 80
FAULTS = {
    # A byte of the pool, counted from its first row, and what is told of it. Slots are 3, 4, 9, -1 and 0, of which
    # the last is reserved; the pool has 300 rows.
    "a written row": (3 * PITCH + 5, (3, 5), "cache row 3, which token 0 writes"),
    "the last byte of a row": (9 * PITCH + 47, (9, 47), "cache row 9, which token 2 writes"),
    "the row after": (10 * PITCH, (10, 0), "cache row 10, which no token writes"),
    "the row ahead": (2 * PITCH + 1, (2, 1), "cache row 2, which no token writes"),
    "the reserved row": (0, (0, 0), "cache row 0, which no token writes"),
    "the last row": (299 * PITCH + 1, (299, 1), "cache row 299, which no token writes"),
    "padding": (4 * PITCH + 48, (4, 48), "cache row 4, which is padding"),
}


def padded_call() -> Call:
    return make(T, H, R, D, rows=300, loc=[3, 4, 9, -1, 0], reserved_slot=0, pitch=PITCH, pad_heads_to=4)


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_wrong_byte_of_the_pool_is_named(name: str, by_hand: bool, verifying: None, on_cpu: None) -> None:
    place, where, words = FAULTS[name]
    call = padded_call()
    driver = FaultyDriver()
    positional, whole, options = given(call, torch.device("cpu"))
    assert whole is not None
    kept = whole
    driver.fault = lambda _: kept[CANARY + place].bitwise_xor_(1)  # type: ignore[assignment, return-value]
    options |= {"client": EmulatedSupply(driver)}
    entry: Any = prepare
    if by_hand:
        options = {name: options.get(name) for name in HANDLE_OPTIONS}
        entry = KernelHandle(emulated_artifact(call.spec), driver)
    with (
        driver.memory([*positional, *options.values()], [whole]),
        pytest.raises(VerificationFailed, match=words) as failed,
    ):
        entry(*positional, **options)
    error = failed.value
    assert (error.operand, error.where) == ("kv_cache", where)
    assert error.variant_id.startswith(call.spec.variant_id)
    assert error.arch == "sm_90a"
    made = emulated_artifact(parse_variant_id(error.variant_id))
    assert error.digest == made.manifest.cubin_sha256
    for word in (error.variant_id, error.digest, "sm_90a", "5 tokens", f"byte {where[1]}", "MLAPREP_DISABLE=1"):
        assert word in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == (str(error), vars(error))


@pytest.mark.parametrize("where", [(0, 0, 0), (4, 2, 47), (2, 3, 7)])
def test_a_wrong_byte_of_the_query_is_named(where: tuple[int, int, int], verifying: None, on_cpu: None) -> None:
    call = padded_call()
    driver = FaultyDriver()
    positional, whole, options = given(call, torch.device("cpu"))
    client = EmulatedSupply(driver)
    out = torch.zeros(T, 4, R + D, dtype=torch.float8_e4m3fn)
    driver.fault = lambda _: out.view(torch.uint8)[where].bitwise_xor_(1)  # type: ignore[assignment, return-value]
    with driver.memory(reads(positional, options), [whole, out]), pytest.raises(VerificationFailed) as caught:
        prepare(*positional, **options, out=out, client=client)
    assert (client.stats().verified, client.stats().verify_failures) == (0, 1)
    assert (caught.value.operand, caught.value.where) == ("query", where)
    assert f"byte {where[2]} of the query of token {where[0]}, head {where[1]}" in str(caught.value)


def test_a_captured_launch_is_not_verified_and_that_is_told_once(
    caplog: pytest.LogCaptureFixture, verifying: None, on_cpu: None
) -> None:
    call = make(T, H, R, D)
    driver = FaultyDriver()
    handle = KernelHandle(emulated_artifact(call.spec), driver).load(0)

    class Client(EmulatedSupply):
        def serving_handle(self, spec: Any, device: int, general: Any = None) -> KernelHandle:
            return handle

    client = Client(driver)
    driver.capturing = True
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            positional, whole, options = given(call, torch.device("cpu"))
            with driver.memory(reads(positional, options), [whole]):
                compare(expected(call), prepare(*positional, **options, client=client), whole)
    assert (client.stats().verified, client.stats().unverified) == (0, 3)
    assert client.layouts is None
    (record,) = caplog.records
    assert call.spec.variant_id in record.getMessage()


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_launched_where_the_fused_path_is_off(name: str, disabled: None, on_cpu: None) -> None:
    call, covered = CALLS[name]
    wanted, driver = expected(call), EmulatedDriver()
    client = EmulatedSupply(driver)
    positional, whole, options = given(call, torch.device("cpu"))
    assert fused_prepare(*positional, **options, client=client) is None
    assert whole is None or (whole == call.pool.poison).all()  # type: ignore[union-attr]
    for _ in range(2):
        compare(wanted, prepare(*positional, **options, client=client), whole)
    assert (client.asked, client.layouts) == (0, None)
    assert client.stats().fallbacks["disabled"] == 3
    positional, whole, options = given(call, torch.device("cpu"))
    if covered:
        handle = KernelHandle(emulated_artifact(call.spec), driver)
        compare(wanted, handle(*positional, **{name: options.get(name) for name in HANDLE_OPTIONS}), whole)
    assert (driver.launches, driver.loads) == ([], 0)


def test_arguments_are_checked_where_the_fused_path_is_off(disabled: None, on_cpu: None) -> None:
    client = EmulatedSupply(EmulatedDriver())
    positional, _, options = given(make(T, H, R, D), torch.device("cpu"))
    with pytest.raises(TypeError, match="loc"):
        fused_prepare(*positional[:5], positional[5].short(), **options, client=client)
    handle = KernelHandle(emulated_artifact(make(T, 2, R, D).spec), EmulatedDriver())
    with pytest.raises(NotCovered, match="3 heads"):
        handle(*positional)


def test_disable_wins_over_verify(disabled: None, verifying: None, on_cpu: None) -> None:
    client = EmulatedSupply(EmulatedDriver())
    positional, _, options = given(make(T, H, R, D), torch.device("cpu"))
    assert fused_prepare(*positional, **options, client=client) is None
    assert client.stats().verified == 0


def test_switches_are_read_when_a_client_is_made(monkeypatch: pytest.MonkeyPatch, on_cpu: None) -> None:
    driver = EmulatedDriver()
    client = EmulatedSupply(driver)
    positional, whole, options = given(make(T, H, R, D), torch.device("cpu"))
    monkeypatch.setenv("MLAPREP_DISABLE", "on")
    with driver.memory(reads(positional, options), [whole]):
        assert fused_prepare(*positional, **options, client=client) is not None
    plain = KernelClient(store=MemoryStore(), on_miss="error")
    assert plain.switches.disable
    monkeypatch.delenv("MLAPREP_DISABLE")
    assert not pickle.loads(pickle.dumps(KernelClient(on_miss="error"))).switches.disable


@pytest.mark.parametrize("name", ["MLAPREP_DISABLE", "MLAPREP_VERIFY"])
def test_a_word_that_is_no_switch_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "ture")
    with pytest.raises(SpecError, match=name):
        KernelClient(store=MemoryStore())
    with pytest.raises(SpecError, match=name):
        KernelHandle(emulated_artifact(make(T, H, R, D).spec), EmulatedDriver())


@pytest.mark.gpu
def test_a_wrong_byte_is_found_on_a_gpu_and_a_capture_stays_valid(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    call = padded_call()
    positional, whole, options = given(call, gpu.device)
    assert whole is not None
    kept = whole

    class FaultyGpuDriver:
        def __getattr__(self, name: str) -> Any:
            return getattr(gpu.driver, name)

        def prepare(self, kernel: LoadedKernel, parameters: Sequence[tuple[str, str]], pdl: bool) -> Any:
            launch = gpu.driver.prepare(kernel, parameters, pdl)

            def faulty(config: LaunchConfig, stream: int, arguments: Sequence[int]) -> None:
                launch(config, stream, arguments)
                kept[CANARY + 10 * PITCH].bitwise_xor_(1)

            return faulty

    with monkeypatch.context() as patch:
        patch.setenv("MLAPREP_VERIFY", "1")
        client = DeviceClient(gpu)
        faulty: Any = KernelHandle(gpu.artifact(call.spec), FaultyGpuDriver())  # type: ignore[arg-type]
    with pytest.raises(VerificationFailed, match="cache row 10, which no token writes"):
        faulty(*positional, **{name: options.get(name) for name in HANDLE_OPTIONS})

    whole.fill_(call.pool.poison)  # type: ignore[union-attr]
    prepare(*positional, **options, client=client)
    whole.fill_(call.pool.poison)  # type: ignore[union-attr]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        query = prepare(*positional, **options, client=client)
    assert (client.stats().verified, client.stats().unverified) == (1, 1)
    graph.replay()
    torch.cuda.synchronize()
    compare(expected(call), query, whole)
