"""ensure_ready: everything there before the first call, told kernel by kernel, and never in the way of a capture."""

import dataclasses
import json
import multiprocessing
import operator
import os
import pickle
import threading
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from fake_driver import FakeDriver
from fake_service import FakeService, artifact_of, problem, reply_of

from mlaprep.clients import kernels, launch
from mlaprep.clients.client import KernelClient
from mlaprep.clients.errors import DriverError, ForkedProcessError, KernelNotReady, KernelUnavailable, SpecError
from mlaprep.clients.wanted import MAX_KERNELS, wanted_specs
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.store import MemoryStore
from mlaprep.templates.arch import Arch
from mlaprep.templates.presets import PRESETS, preset
from mlaprep.templates.spec import KernelSpec, parse_variant_id


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(launch, "cuda_driver", lambda: driver)
    return driver


class TestWanted:
    def test_a_preset_means_the_kernel_that_prepare_asks_for(self) -> None:
        assert wanted_specs("kimi-k3", 8) == (KernelSpec(num_heads=12),)
        (spec,) = wanted_specs("deepseek-v3", 16)
        assert (spec.num_heads, spec.rope, spec.loc_dtype, spec.position_dtype) == (8, "interleaved", "i64", "i64")

    def test_lists_stand_for_each_of_their_values(self) -> None:
        specs = wanted_specs("kimi-k3", (8, 16), loc_dtype=("i32", "i64"), write_kv=[True, False])
        assert len(specs) == 8
        assert {spec.num_heads for spec in specs} == {12, 6}

    def test_everything_that_names_a_kernel(self) -> None:
        spec = KernelSpec(num_heads=16, q_nope_token_stride=8192)
        plan = [
            {"preset": "kimi-k3", "tp": [8, 4]},
            {"num_heads": 5, "loc_dtype": "i32"},
            spec,
            spec.variant_id,
            "kimi-k3",
        ]
        assert wanted_specs(plan, 8) == (
            KernelSpec(num_heads=12), KernelSpec(num_heads=24), KernelSpec(num_heads=5, loc_dtype="i32"), spec,
        )  # fmt: skip
        assert wanted_specs(json.loads(json.dumps({"preset": "kimi-k3", "tp": 8, "loc_dtype": ["i32", "i64"]}))) == (
            KernelSpec(num_heads=12, loc_dtype="i32"), KernelSpec(num_heads=12),
        )  # fmt: skip
        assert wanted_specs([kernels.kimi_k3_tp8, kernels.kimi_k3_tp4]) == wanted_specs("kimi-k3", (8, 4))
        assert wanted_specs(kernels.kimi_k3_tp8) == (KernelSpec(num_heads=12),)
        assert wanted_specs(None, num_heads=3) == (KernelSpec(num_heads=3),)

    @pytest.mark.parametrize("name", PRESETS)
    def test_every_preset_at_every_degree(self, name: str) -> None:
        specs = wanted_specs(name, PRESETS[name].tp_degrees)
        assert specs == tuple(preset(name).spec(tp) for tp in PRESETS[name].tp_degrees)

    @pytest.mark.parametrize(
        ("what", "options", "told"),
        [
            ("kimi-k4", {"tp": 8}, "kimi-k3"),
            ("kimi-k3", {}, "tp: found no degree for kimi-k3"),
            ("kimi-k3", {"tp": 7}, "tp"),
            ("kimi-k3", {"tp": 8, "num_head": 3}, "num_head"),
            (None, {}, "num_heads"),
            ([], {}, "no kernel at all"),
            ({"tp": 8}, {}, "without a preset"),
            ({"preset": 3}, {"tp": 8}, "preset"),
            (KernelSpec(num_heads=3), {"loc_dtype": "i32"}, "loc_dtype"),
            ("mla_prepare-h0", {}, "variant"),
            (({"num_heads": 1 + n % 256, "pad_heads_to": 256, "kv_lora_rank": 16 * (1 + n // 256)}
              for n in range(MAX_KERNELS + 1)), {}, "1024"),
        ],
    )  # fmt: skip
    def test_what_means_none_is_refused(self, what: Any, options: dict[str, Any], told: str) -> None:
        with pytest.raises(SpecError, match=told):
            wanted_specs(what, **options)

    @pytest.mark.parametrize("what", [3, [3], [None], b"kimi-k3", object()])
    def test_what_is_no_name_is_refused(self, what: Any) -> None:
        with pytest.raises(TypeError):
            wanted_specs(what, 8)


class TestEnsureReady:
    def test_what_is_ready_is_told_and_a_second_call_asks_nobody(
        self, client: KernelClient, service: FakeService, driver: FakeDriver
    ) -> None:
        seen: list[tuple[int, int]] = []
        report = client.ensure_ready(
            "kimi-k3", tp=8, devices=[0, 1], loc_dtype=("i32", "i64"), progress=lambda _, *n: seen.append(n)
        )
        assert report.complete
        assert [(kernel.spec.loc_dtype, kernel.device) for kernel in report.kernels] == [
            ("i32", 0), ("i64", 0), ("i32", 1), ("i64", 1),
        ]  # fmt: skip
        assert {kernel.tier for kernel in report.kernels} <= {"service", "memory"}
        assert len(service.requests) == 2
        assert sorted(driver.loads) == [0, 0, 1, 1]
        assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
        assert "4 of 4 kernels ready" in str(report)
        began = time.perf_counter()
        again = client.ensure_ready("kimi-k3", tp=8, devices=(1, 0), loc_dtype=("i32", "i64"))
        assert time.perf_counter() - began < 0.02
        assert [kernel.tier for kernel in again.kernels] == ["loaded"] * 4
        assert len(service.requests) == 2
        assert len(driver.loads) == 4
        for kernel in again.kernels:
            assert client.serving_handle(kernel.spec, kernel.device) is not None

    def test_the_report_cannot_be_changed_and_pickles(self, client: KernelClient, driver: FakeDriver) -> None:
        report = client.ensure_ready("kimi-k3", tp=8, devices=0)
        with pytest.raises(dataclasses.FrozenInstanceError):
            report.ms = 0  # type: ignore[misc]
        assert pickle.loads(pickle.dumps(report)) == report

    def test_fetches_overlap(self, service: FakeService, driver: FakeDriver) -> None:
        together = threading.Barrier(5)

        def answer(request: httpx.Request) -> httpx.Response:
            together.wait(10)  # breaks unless five requests are there at once
            return service.kernel(request)

        service.answer = answer
        client = KernelClient(transport=service.transport(), store=MemoryStore(), on_miss="error")
        assert client.ensure_ready("kimi-k3", tp=(1, 2, 4, 8, 16), devices=0).complete
        assert len(service.requests) == 5

    def test_threads_that_ask_together_fetch_and_load_once(self, service: FakeService, driver: FakeDriver) -> None:
        driver.load_s = 0.02
        client = KernelClient(transport=service.transport(), store=MemoryStore(), on_miss="error")
        threads = [threading.Thread(target=client.ensure_ready, args=("kimi-k3",), kwargs={"tp": 8, "devices": [0, 1]})
                   for _ in range(8)]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(service.requests) == 1
        assert sorted(driver.loads) == [0, 1]

    def test_what_cannot_be_had_is_told_and_the_rest_is_ready(
        self, service: FakeService, client: KernelClient, driver: FakeDriver
    ) -> None:
        def answer(request: httpx.Request) -> httpx.Response:
            return problem(404, "kernel-not-built") if "-h24-" in request.url.path else service.kernel(request)

        service.answer = answer
        report = client.ensure_ready("kimi-k3", tp=(8, 4), devices=0)
        assert not report.complete
        assert [kernel.spec.num_heads for kernel in report.ready] == [12]
        (missing,) = report.missing
        assert isinstance(missing.error, KernelUnavailable)
        assert "missing: mla_prepare-h24" in str(report)
        with pytest.raises(KernelUnavailable, match="asked for 2 kernels, 1 could not be had") as caught:
            client.ensure_ready("kimi-k3", tp=(8, 4), devices=0, strict=True)
        assert len(caught.value.attempts) == 1
        service.answer = None
        assert client.ensure_ready("kimi-k3", tp=(8, 4), devices=0, strict=True).complete

    def test_wrong_bytes_are_missing_and_never_loaded(
        self, service: FakeService, client: KernelClient, driver: FakeDriver
    ) -> None:
        service.answer = lambda request: httpx.Response(200, json=reply_of(artifact_of(KernelSpec(num_heads=16))))
        report = client.ensure_ready("kimi-k3", tp=8, devices=0)
        assert [type(kernel.error).__name__ for kernel in report.kernels] == ["ArtifactRejected"]
        assert driver.loads == []

    def test_what_took_the_chain_so_far_gets_its_kernel(
        self, service: FakeService, driver: FakeDriver, spec: KernelSpec
    ) -> None:
        service.answer = lambda request: problem(404, "kernel-not-built")
        client = KernelClient(transport=service.transport(), store=MemoryStore(), on_miss="fallback")
        assert client.serving_handle(spec, 0) is None
        service.answer = None
        assert client.ensure_ready(spec, devices=0).complete
        assert client.serving_handle(spec, 0) is not None

    def test_a_dead_service_delays_all_kernels_once(self, service: FakeService, driver: FakeDriver) -> None:
        def hang(request: httpx.Request) -> httpx.Response:
            time.sleep(5)
            return httpx.Response(500)

        service.answer = hang
        client = KernelClient(transport=service.transport(timeout=0.3), store=MemoryStore(), on_miss="error")
        began = time.monotonic()
        report = client.ensure_ready("kimi-k3", tp=(1, 2, 4, 8, 16), devices=[0, 1])
        assert time.monotonic() - began < 2
        assert len(report.missing) == 10

    def test_with_an_architecture_and_no_device_it_only_brings(
        self, client: KernelClient, store: DiskStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(launch, "cuda_driver", lambda: pytest.fail("the driver was opened"))
        report = client.ensure_ready("kimi-k3", tp=(8, 4), arch="sm_100a")
        assert [(kernel.device, kernel.tier, kernel.arch) for kernel in report.kernels] == [
            (None, "service", Arch("sm_100a"))
        ] * 2
        assert len(list(store.list("sm_100a"))) == 2
        assert {kernel.tier for kernel in client.ensure_ready("kimi-k3", tp=8, arch="sm_100a").kernels} == {"memory"}


class TestDevices:
    def test_without_a_driver_everything_is_missing(
        self, client: KernelClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def none() -> FakeDriver:
            raise DriverError("asked to use a GPU, but libcuda.so.1 cannot be loaded")

        monkeypatch.setattr(launch, "cuda_driver", none)
        for devices in (None, 0, [0, 1], "all"):
            report = client.ensure_ready("kimi-k3", tp=8, devices=devices)
            assert {type(kernel.error) for kernel in report.kernels} == {DriverError}
        with pytest.raises(KernelUnavailable, match="libcuda"):
            client.ensure_ready("kimi-k3", tp=8, strict=True)
        assert service.requests == []

    def test_B045_devices_that_no_kernel_is_built_for(
        self, client: KernelClient, service: FakeService, driver: FakeDriver
    ) -> None:
        driver.capabilities = ((9, 0), (12, 1), (10, 3))
        report = client.ensure_ready("kimi-k3", tp=8, devices=[0, 1, 2, 3])
        assert [kernel.ready for kernel in report.kernels] == [True, False, True, False]
        assert [kernel.arch and kernel.arch.name for kernel in report.kernels] == ["sm_90a", None, "sm_103a", None]
        assert "capability" in str(report.kernels[1].error)
        assert "device 3" in str(report.kernels[3].error)

    @pytest.mark.parametrize("devices", ["cuda", ["x"], 1.5, True])
    def test_what_is_no_device_is_refused(self, client: KernelClient, driver: FakeDriver, devices: Any) -> None:
        with pytest.raises(TypeError, match="device"):
            client.ensure_ready("kimi-k3", tp=8, devices=devices)

    @pytest.mark.parametrize("devices", [[], (), -1, [0, -1], torch.device("cpu")])
    def test_what_can_be_no_device_is_refused_without_a_driver_too(self, client: KernelClient, devices: Any) -> None:
        with pytest.raises(ValueError, match="device"):
            client.ensure_ready("kimi-k3", tp=8, devices=devices)

    def test_progress_that_cannot_be_called_is_refused_before_anything_is_asked(
        self, client: KernelClient, service: FakeService
    ) -> None:
        with pytest.raises(TypeError, match="progress"):
            client.ensure_ready("kimi-k3", tp=8, arch="sm_90a", progress=3)  # type: ignore[arg-type]
        assert not client.stats().unavailable

    def test_torch_devices_will_do(self, client: KernelClient, driver: FakeDriver) -> None:
        torch = pytest.importorskip("torch")
        report = client.ensure_ready("kimi-k3", tp=8, devices=[torch.device("cuda", 1), 1])
        assert [kernel.device for kernel in report.kernels] == [1]
        with pytest.raises(ValueError, match="cpu"):
            client.ensure_ready("kimi-k3", tp=8, devices=torch.device("cpu"))


class TestCapture:
    def test_B020_a_cold_kernel_is_missing_and_nothing_is_asked(
        self, client: KernelClient, service: FakeService, driver: FakeDriver
    ) -> None:
        client.ensure_ready("kimi-k3", tp=8, devices=0)
        driver.capturing = {0}
        report = client.ensure_ready("kimi-k3", tp=(8, 4), devices=[0, 1])
        assert [(k.device, k.spec.num_heads, k.ready) for k in report.kernels] == [
            (0, 12, True), (0, 24, False), (1, 12, True), (1, 24, True),
        ]  # fmt: skip
        assert isinstance(report.missing[0].error, KernelNotReady)
        assert driver.loads == [0, 1, 1]

    def test_B020_the_chain_by_choice_and_the_kernel_afterwards(
        self, service: FakeService, driver: FakeDriver, spec: KernelSpec
    ) -> None:
        client = KernelClient(
            transport=service.transport(), store=MemoryStore(), on_miss="error", on_cold_capture="chain"
        )
        driver.capturing = {0}
        assert client.serving_handle(spec, 0) is None
        assert client.serving_handle(spec, 0) is None
        assert (client.stats().fallbacks["cold-capture"], service.requests, driver.loads) == (2, [], [])
        driver.capturing = set()
        assert client.serving_handle(spec, 0) is not None

    def test_the_choice_pickles_and_is_one_of_two(self, store: DiskStore) -> None:
        client = KernelClient(store=store, on_cold_capture="chain")
        assert pickle.loads(pickle.dumps(client)).on_cold_capture == "chain"
        with pytest.raises(SpecError, match="on_cold_capture"):
            KernelClient(on_cold_capture="fallback")  # type: ignore[arg-type]


def test_explicit_strides_are_taken_as_they_are(client: KernelClient, driver: FakeDriver) -> None:
    spec = parse_variant_id(KernelSpec(num_heads=12, q_rope_token_stride=2304, q_rope_head_stride=192).variant_id)
    assert [kernel.spec for kernel in client.ensure_ready([spec], devices=0).ready] == [spec]


def test_B026_a_driver_opened_before_a_fork_is_refused_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_opened_driver", lambda: SimpleNamespace(pid=os.getppid()))
    client = KernelClient(store=MemoryStore(), on_miss="fallback")
    for call in (
        lambda: client.load(num_heads=12, device=0),
        lambda: client.ensure_ready(num_heads=12, devices=0),
        lambda: client.serving_handle(KernelSpec(num_heads=12), 0),
    ):
        with pytest.raises(ForkedProcessError, match=f"opened in pid {os.getppid()} before the fork.*spawn"):
            call()


@pytest.mark.parametrize("on_miss", ["fallback", "error"])
def test_B046_a_cubin_that_the_driver_refuses_is_told_and_the_process_goes_on(
    service: FakeService, driver: FakeDriver, spec: KernelSpec, monkeypatch: pytest.MonkeyPatch, on_miss: Any
) -> None:
    def refuse(*arguments: object) -> None:
        raise DriverError("asked the CUDA driver to load a cubin, found CUDA_ERROR_NO_BINARY_FOR_GPU (209)", code=209)

    with monkeypatch.context() as patch:
        patch.setattr(driver, "load", refuse)
        client = KernelClient(transport=service.transport(), store=MemoryStore(), on_miss=on_miss)
        (missing,) = client.ensure_ready(spec, devices=0).missing
        assert isinstance(missing.error, DriverError)
        assert missing.error.code == 209
        if on_miss == "error":
            with pytest.raises(DriverError, match="209"):
                client.serving_handle(spec, 0)
        else:
            assert client.serving_handle(spec, 0) is None
            assert client.stats().fallbacks["driver-error"] == 1
    assert client.ensure_ready(spec, devices=0).complete
    assert client.serving_handle(spec, 0) is not None


def test_a_spawned_process_makes_itself_ready_with_a_pickled_client(store: DiskStore, spec: KernelSpec) -> None:
    store.publish(artifact_of(spec))
    client = KernelClient(store=store, offline=True, on_miss="error", on_cold_capture="chain")
    ready = operator.methodcaller("ensure_ready", spec, arch="sm_90a")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        report = pool.apply_async(ready, (client,)).get(60)
    assert [kernel.tier for kernel in report.kernels] == ["disk"]


def test_a_warm_up_plan_names_what_a_worker_loads() -> None:
    plan = {
        "arch": ["sm_90a", "sm_100a"],
        "kernels": [{"preset": "kimi-k3", "tp": [8, 16]}, {"spec": {"num_heads": 12}}],
    }
    assert [spec.num_heads for spec in wanted_specs(plan)] == [12, 6]
    with pytest.raises(SpecError, match=r"kernels\.0\.preset"):
        wanted_specs({"kernels": [{"preset": "nobody"}]})
