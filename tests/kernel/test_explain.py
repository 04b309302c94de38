"""explain: one line on the path of a call, which it does not take."""

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from emulation.artifact import emulated_artifact
from emulation.driver import EmulatedDriver
from kernel.calls import Call, make
from kernel.devices import Gpu
from kernel.entries import CALLS, D, DeviceClient, H, R, T, given

from mlaprep.clients import explain, fused_prepare, launch, specialise
from mlaprep.clients.client import KernelClient
from mlaprep.clients.decisions import Decision
from mlaprep.clients.dispatch import call_tensors, checked, graph_shape, option_values
from mlaprep.clients.errors import DriverError
from mlaprep.clients.explanation import Explanation
from mlaprep.clients.layouts import layout_key
from mlaprep.kernels_cache.bundle import write_bundle
from mlaprep.kernels_cache.key import request_key
from mlaprep.kernels_cache.store import MemoryStore
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import templates_fingerprint

CALL = make(T, H, R, D)


class Untouchable:
    """A service that nobody may ask."""

    def fetch_reply(self, *_: object) -> Any:
        raise AssertionError("explain asked the service for a kernel")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"explain asked the service for {name}")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> EmulatedDriver:
    """The emulation in the place of the CUDA driver."""
    driver = EmulatedDriver()
    monkeypatch.setattr(specialise, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(launch, "cuda_driver", lambda: driver)
    return driver


def client_of(**options: Any) -> KernelClient:
    return KernelClient(**{"store": MemoryStore(), "on_miss": "error"} | options)


def explained(call: Call, client: KernelClient, **more: Any) -> Explanation:
    """What explain says, and that it changes nothing."""
    positional, whole, options = given(call, torch.device("cpu"))
    before, stats = None if whole is None else whole.clone(), client.stats()
    found = explain(*positional, **options, client=client, **more)
    assert whole is None or torch.equal(whole, before)  # type: ignore[arg-type]
    assert client.stats() == stats
    assert client.layouts is None
    assert "\n" not in str(found)
    return found


def test_a_loaded_kernel(driver: EmulatedDriver) -> None:
    client = client_of(on_miss="error")
    client._supply._memory[CALL.spec, Arch("sm_90a")] = emulated_artifact(CALL.spec)
    client.load(CALL.spec, device=0)
    found = explained(CALL, client)
    assert (found.fused, found.ready, found.source, found.error) == (True, True, None, None)
    assert (found.variant_id, found.arch, found.strides) == (CALL.spec.variant_id, "sm_90a", "dynamic")
    assert str(found) == f"one launch of {CALL.spec.variant_id}, strides dynamic, for sm_90a: loaded on cpu"
    assert driver.launches == []
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.fused = False  # type: ignore[misc]


def test_where_a_kernel_would_come_from(driver: EmulatedDriver, tmp_path: Path) -> None:
    artifact = emulated_artifact(CALL.spec)
    request = request_key(arch="sm_90a", spec=CALL.spec.to_dict(), generator=templates_fingerprint())
    store = MemoryStore()
    store.publish(artifact)
    store.link(request, artifact.key)
    bundle = tmp_path / "kernels.tar"
    write_bundle(bundle, [artifact])
    held = client_of()
    held._supply._memory[CALL.spec, Arch("sm_90a")] = artifact
    for client, source, words in (
        (held, "memory", "not loaded yet, taken from process memory"),
        (client_of(store=store), "disk", "not loaded yet, read from the local store"),
        (client_of(bundles=[bundle]), "bundle", "not loaded yet, read from a bundle"),
        (client_of(transport=Untouchable()), "service", "not loaded yet, asked of the service"),
        (client_of(on_miss="compile"), "compiled", "not loaded yet, compiled on this machine"),
    ):
        found = explained(CALL, client)
        assert (found.fused, found.ready, found.source, found.arch) == (True, False, source, "sm_90a")
        assert words in str(found)
    assert driver.loads == 0


def test_no_directory_is_made(driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLAPREP_CACHE_DIR", str(tmp_path / "cache"))
    assert explained(CALL, client_of(store=None, on_miss="compile")).source == "compiled"
    assert list(tmp_path.iterdir()) == []


def test_no_place_left(driver: EmulatedDriver) -> None:
    found = explained(CALL, client_of(on_miss="fallback", offline=True, transport=Untouchable()))
    assert (found.fused, found.error, found.variant_id) == (False, None, CALL.spec.variant_id)
    assert str(found).startswith(f"the unfused chain instead of {CALL.spec.variant_id}")
    assert "on_miss='fallback'" in found.reason
    found = explained(CALL, client_of(on_miss="error"))
    assert (found.fused, found.error) == (False, "KernelUnavailable")
    assert str(found).startswith("KernelUnavailable instead of mla_prepare-")


def test_a_refusal_is_told(driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlaprep.clients.serving.is_capturing", lambda device: False)
    client = client_of(on_miss="fallback")
    positional, _, options = given(CALL, torch.device("cpu"))
    assert fused_prepare(*positional, **options, client=client) is None
    found = explained(CALL, client)
    assert (found.fused, found.reason) == (False, "there was none to be had (no-kernel); load it by hand")


def test_devices_without_a_kernel(driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.device_capability = (12, 1)
    found = explained(CALL, client_of(on_miss="fallback"))
    assert (found.fused, found.arch) == (False, None)
    assert "compute capability 12.1" in str(found)

    def no_driver() -> None:
        raise DriverError("asked to use a GPU, but libcuda.so.1 cannot be loaded")

    monkeypatch.setattr(launch, "cuda_driver", no_driver)
    found = explained(CALL, client_of(on_miss="fallback"))
    assert not found.fused
    assert "libcuda" in str(found)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pitch of 1", "kv_cache with a row stride of 49 elements, no multiple of 2"),
        ("pool off 8 bytes", "kv_cache at an address that is no multiple of 2 bytes"),
        ("last stride 2", "q_nope with a last stride of 2, the kernel takes 1"),
        ("strided loc", "loc with stride 2, the kernel takes a contiguous one"),
        ("width of no kernel", "kv_lora_rank"),
    ],
)
def test_why_a_layout_is_not_covered(driver: EmulatedDriver, name: str, reason: str) -> None:
    found = explained(CALLS[name][0], client_of())
    assert (found.fused, found.variant_id) == (False, None)
    assert found.reason.startswith(reason)
    assert str(found) == f"the unfused chain: {found.reason}"


def test_tensors_on_no_gpu_and_a_path_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(explained(CALL, client_of())) == "the unfused chain: the tensors are on cpu"
    monkeypatch.setenv("MLAPREP_DISABLE", "1")
    assert str(explained(CALL, client_of())) == "the unfused chain: MLAPREP_DISABLE is on"


def test_verification_is_told(driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAPREP_VERIFY", "1")
    assert "compared with the chain (MLAPREP_VERIFY)" in str(explained(CALL, client_of(on_miss="compile")))


def test_arguments_that_nothing_takes_are_named_as_ever() -> None:
    positional, _, options = given(CALL, torch.device("cpu"))
    with pytest.raises(TypeError, match="loc"):
        explain(*positional[:5], positional[5].bool(), **options)
    with pytest.raises(TypeError, match="positons"):
        explain(*positional, positons=None)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="client is a str"):
        explain(*positional, client="http://kernels")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="graph_key"):
        explain(*positional, graph_key=[1])


def test_the_other_spelling() -> None:
    (q_nope, q_rope, k_nope, k_rope, cache, loc), _, _ = given(make(T, H, R, D, layout="same"), torch.device("cpu"))
    found = explain(cache, loc, k_nope, k_rope, q_nope, q_rope, num_warps=4)
    assert str(found) == "the unfused chain: the tensors are on cpu"


def test_a_capture_tells_of_cold_kernels_and_of_records(
    driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = client_of(on_miss="compile")
    monkeypatch.setattr(KernelClient, "is_capturing", lambda client, device: True)
    found = explained(CALL, client)
    assert (found.fused, found.error, found.source) == (False, "KernelNotReady", "compiled")
    assert explained(CALL, client, graph_key="graph").error == "KernelNotReady"
    chain = explained(CALL, client_of(on_miss="compile", on_cold_capture="chain"))
    assert (chain.fused, chain.error) == (False, None)
    assert str(chain).endswith("not loaded, and the stream is being captured")
    client._supply._memory[CALL.spec, Arch("sm_90a")] = emulated_artifact(CALL.spec)
    client.load(CALL.spec, device=0)
    driver.capturing = True
    assert explained(CALL, client).fused
    positional, _, options = given(CALL, torch.device("cpu"))
    tensors = call_tensors(positional, options)
    shape = graph_shape(checked(tensors, options), options)
    client.decisions.settle("graph", shape, Decision(False, "it was so"))
    client.decisions.settle(None, layout_key((*tensors, *option_values(options))), Decision(False, "it was so"))
    found = explained(CALL, client, graph_key="graph")
    assert (found.fused, found.error) == (False, "DecisionChanged")
    assert "recorded is the unfused chain, since it was so; loaded on cpu" in str(found)
    assert explained(CALL, client, graph_key="other").fused
    again = explain(*positional, **options, client=client)  # the very tensors: alignment is part of a layout
    assert again.error == "DecisionChanged"


@pytest.mark.gpu
def test_on_a_gpu_it_foretells_the_path(gpu: Gpu) -> None:
    for call, covered in CALLS.values():
        client = KernelClient(store=MemoryStore(), on_miss="compile")
        positional, whole, options = given(call, gpu.device)
        gc.collect()
        before = torch.cuda.memory_allocated(gpu.device)
        found = explain(*positional, **options, client=client)
        assert torch.cuda.memory_allocated(gpu.device) <= before
        assert found.fused == covered
        assert not covered or (found.arch, found.source) == (gpu.arch.name, "compiled")
        assert whole is None or (whole == call.pool.poison).all()  # type: ignore[union-attr]
        query = fused_prepare(*positional, **options, client=DeviceClient(gpu))
        assert (query is not None) == covered
