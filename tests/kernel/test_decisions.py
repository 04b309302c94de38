"""Recorded decisions: a captured shape keeps its path, and a flip is an error that changes nothing."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from emulation.driver import EmulatedDriver
from kernel.calls import TENSORS, Call, make
from kernel.checks import expected
from kernel.devices import Gpu
from kernel.entries import D, DeviceClient, EmulatedSupply, H, R, T, given

from mlaprep.clients import fused_prepare, prepare, specialise
from mlaprep.clients.decisions import MAX_RECORDED, Decision, Decisions
from mlaprep.clients.errors import DecisionChanged
from mlaprep.clients.handle import KernelHandle
from mlaprep.templates.spec import KernelSpec

CALL = make(T, H, R, D)
UNCOVERED = make(T, H, R, D, pitch=49)
KEY = (T, "decode")


class Wavering(EmulatedSupply):
    """A client that has its kernels or not, as ``has`` says, and captures as ``capturing`` says."""

    def __init__(self) -> None:
        super().__init__(EmulatedDriver())
        self.has = True
        self.capturing = False

    def serving_handle(self, spec: KernelSpec, device: int, general: KernelSpec | None = None) -> KernelHandle | None:
        return super().serving_handle(spec, device) if self.has else None

    def is_capturing(self, device: torch.device) -> bool:
        return self.capturing

    def run(self, call: Call = CALL, entry: Any = prepare, **more: Any) -> int:
        """Make the call, check its bytes, and answer how many launches it took."""
        before = len(self._driver.launches)
        positional, whole, options = given(call, torch.device("cpu"))
        reads = [*positional, *(options[name] for name in TENSORS if name in options)]
        with self._driver.memory(reads, [whole]):
            try:
                query = entry(*positional, **options, client=self, **more)
            except DecisionChanged:
                assert (whole == call.pool.poison).all()  # type: ignore[union-attr]
                assert len(self._driver.launches) == before
                raise
        wanted = expected(call)
        if entry is prepare:
            assert torch.equal(query.view(torch.uint8), wanted.query)  # type: ignore[arg-type]
            assert torch.equal(whole, wanted.pool)  # type: ignore[arg-type]
        return len(self._driver.launches) - before


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Wavering:
    monkeypatch.setattr(specialise, "DEVICE_TYPE", "cpu")
    return Wavering()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("entry", [prepare, fused_prepare])
def test_a_flip_under_one_graph_key_is_an_error(client: Wavering, first: bool, entry: Any) -> None:
    client.has = first
    assert client.run(graph_key=KEY) == client.run(graph_key=KEY) == int(first)
    client.has = not first
    with pytest.raises(DecisionChanged, match=r"\(5, 'decode'\)") as caught:
        client.run(entry=entry, graph_key=KEY)
    variant = CALL.spec.variant_id
    words = (f"one launch of {variant}", f"the unfused chain, since there was no kernel {variant}")
    recorded, found = words if first else words[::-1]
    assert caught.value.recorded.startswith(recorded)
    assert caught.value.found.startswith(found)
    for word in (recorded, found, "client.forget_graph(key)"):
        assert word in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), vars(again)) == (str(caught.value), vars(caught.value))
    # Other graphs decide for themselves, and a deliberate re-capture may.
    assert client.run(graph_key=(T, "verify")) == int(not first)
    client.forget_graph(KEY)
    assert client.run(graph_key=KEY) == int(not first)
    client.has = first
    with pytest.raises(DecisionChanged):
        client.run(graph_key=(T, "verify"))


def test_a_layout_that_no_kernel_covers_is_a_flip_too(client: Wavering) -> None:
    assert client.run(graph_key=KEY) == 1
    with pytest.raises(DecisionChanged, match="row stride of 49 elements"):
        client.run(UNCOVERED, graph_key=KEY)
    assert client.run(make(T + 1, H, R, D, pitch=49), graph_key=KEY) == 0


def test_a_remembered_launch_does_not_hide_a_flip(client: Wavering) -> None:
    assert client.run() == 1
    client.has = False
    assert client.run() == 1, "remembered"
    client.has = True
    assert client.run(graph_key=KEY) == 1
    client.has = False
    with pytest.raises(DecisionChanged):
        client.run(graph_key=KEY)


def test_a_flip_between_two_captures_of_one_layout_is_caught_without_a_key(client: Wavering) -> None:
    client.capturing, client.has = True, False
    assert client.run() == client.run() == 0
    client.capturing, client.has = False, True
    assert client.run() == client.run() == 1, "outside of a capture either path will do"
    client.capturing = True
    with pytest.raises(DecisionChanged, match=r"client\.forget_graph\(\)"):
        client.run()
    assert client.run(make(T + 1, H, R, D)) == 1
    client.forget_graph()
    assert client.run() == 1


def test_eager_calls_record_nothing(client: Wavering) -> None:
    for has in (False, True, False):
        client.has = has
        client.run(UNCOVERED)
        client.run()
    assert len(client.decisions) == 0


@pytest.mark.parametrize("key", [[1], {}, {1: 2}, torch.zeros(2).numpy()])
def test_a_graph_key_that_cannot_be_one_is_named(client: Wavering, key: object) -> None:
    with pytest.raises(TypeError, match="graph_key"):
        client.run(graph_key=key)


def test_records_are_bounded_and_the_oldest_goes() -> None:
    decisions = Decisions()
    for number in range(MAX_RECORDED + 3):
        decisions.settle(number, "shape", Decision(True, "v"))
    assert len(decisions) == MAX_RECORDED
    assert decisions.find(2, "shape") is None
    assert decisions.find(3, "shape") == Decision(True, "v")


def test_two_kernels_are_one_path() -> None:
    decisions = Decisions()
    decisions.settle("graph", "shape", Decision(True, "a"))
    decisions.settle("graph", "shape", Decision(True, "b"))
    assert decisions.find("graph", "shape") == Decision(True, "a")


def test_of_threads_that_disagree_one_is_refused() -> None:
    decisions = Decisions()

    def settle(number: int) -> bool:
        try:
            decisions.settle("graph", "shape", Decision(number % 2 == 0, "v"))
        except DecisionChanged:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(settle, range(64))) == 32


@pytest.mark.gpu
def test_a_flip_between_two_captures_on_a_gpu(gpu: Gpu) -> None:
    class Client(DeviceClient):
        has = False

        def serving_handle(
            self, spec: KernelSpec, device: int, general: KernelSpec | None = None
        ) -> KernelHandle | None:
            return super().serving_handle(general or spec, device) if self.has else None

    client = Client(gpu)
    positional, whole, options = given(CALL, gpu.device)
    gpu.handle(CALL.spec)
    prepare(*positional, **options, client=client)  # what torch sets up at first use must not be in a capture

    def capture(**more: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            prepare(*positional, **options, client=client, **more)
        return graph

    capture()
    capture(graph_key=KEY)
    client.has = True
    for more in ({}, {"graph_key": KEY}):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            with pytest.raises(DecisionChanged):
                prepare(*positional, **options, client=client, **more)
            torch.zeros(1, device=gpu.device)  # the capture is still valid
        client.forget_graph(more.get("graph_key"))
        assert whole is not None
        whole.fill_(CALL.pool.poison)  # type: ignore[union-attr]
        capture(**more).replay()
        torch.cuda.synchronize()
        assert torch.equal(whole.cpu(), expected(CALL).pool)  # type: ignore[arg-type]
