"""Kernels by name: what a name stands for, what it costs, and what an unknown one is told."""

import os
import pickle
import signal
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest
from fake_driver import FakeDriver
from fake_service import FakeService, artifact_of
from hypothesis import given
from hypothesis import strategies as st

from mlaprep.clients import dispatch, kernels, launch, listing
from mlaprep.clients.client import KernelClient
from mlaprep.clients.errors import DriverError, NotCovered, SpecError
from mlaprep.clients.handle import KernelHandle
from mlaprep.clients.named_kernels import NamedKernel, parse_name, preset_names, spell_variant
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.templates.arch import ARCHS, Arch
from mlaprep.templates.presets import PRESETS
from mlaprep.templates.spec import KernelSpec

VARIANT = "mla_prepare_h12_r512_d64_bf16_fp8_norope_i64_pdl"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A default client and a list of names of the test's own."""
    monkeypatch.setattr(dispatch, "_default", dispatch._DefaultClient())
    monkeypatch.setattr(listing, "_listing", listing._Listing())
    monkeypatch.setattr(kernels, "_known", {})


@pytest.fixture
def default(client: KernelClient, monkeypatch: pytest.MonkeyPatch) -> KernelClient:
    """The service's client, as the default one."""
    monkeypatch.setattr(dispatch._default, "client", client)
    return client


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(launch, "cuda_driver", lambda: driver)
    return driver


class TestNames:
    def test_a_preset_with_its_degree_and_a_variant_are_handles(self) -> None:
        from mlaprep.clients.kernels import kimi_k3_tp8, mla_prepare_h12_r512_d64_bf16_fp8_norope_i64_pdl

        for handle in (kimi_k3_tp8, mla_prepare_h12_r512_d64_bf16_fp8_norope_i64_pdl):
            assert isinstance(handle, KernelHandle)
            assert handle.spec == KernelSpec(num_heads=12)
        assert kernels.kimi_k3_tp8 is kimi_k3_tp8
        assert kernels.find("kimi_k3_tp8") is kimi_k3_tp8
        assert repr(kimi_k3_tp8) == "NamedKernel('kimi_k3_tp8')"

    @pytest.mark.parametrize("name", preset_names())
    def test_every_preset_at_every_degree(self, name: str) -> None:
        assert name.isidentifier()
        found = parse_name(name)
        assert found is not None
        folded, _, degree = name.rpartition("_tp")
        (preset,) = [p for p in PRESETS.values() if p.name.replace("-", "_").replace(".", "_") == folded]
        assert found == (preset.spec(int(degree)), None)

    @given(
        st.builds(
            KernelSpec,
            num_heads=st.integers(1, 256),
            layout=st.sampled_from(["fp8", "fp8-q16", "same", "ds_mla"]),
            rope=st.sampled_from(["none", "interleaved", "neox"]),
            loc_dtype=st.sampled_from(["i32", "i64"]),
            pdl=st.booleans(),
            reserved_slot=st.booleans(),
            q_rope_token_stride=st.sampled_from(["dynamic", 512 * 1024]),
        ),
        st.sampled_from([None, *ARCHS]),
    )
    def test_names_round_trip(self, spec: KernelSpec, arch: Arch | None) -> None:
        name = spell_variant(spec, arch)
        assert name.isidentifier()
        assert parse_name(name) == (spec, arch)

    def test_an_architecture_may_stand_behind(self) -> None:
        assert parse_name("kimi_k3_tp8_sm_103a") == (KernelSpec(num_heads=12), Arch("sm_103a"))
        for name in ("kimi_k3_tp8_sm_91", "kimi_k3_tp8_sm_", "kimi_k3_sm_90a", "_sm_90a"):
            assert parse_name(name) is None

    @pytest.mark.parametrize(
        "name",
        [
            "kimi_k3", "kimi_k3_tp", "kimi_k3_tp7", "kimi_k3_tp08", "kimi_k3_tp\u0668", "kimi-k3_tp8", "kimi_k4_tp8",
            "mla_prepare_", "mla_prepare_h0_r512_d64_bf16_fp8_norope_i64_pdl", "", "x" * 10_000,
        ],
    )  # fmt: skip
    def test_what_is_no_name(self, name: str) -> None:
        assert parse_name(name) is None


class TestUnknown:
    def test_an_import_is_told_the_nearest_names(self) -> None:
        with pytest.raises(ImportError, match=r"kimi_k3_tp7.*try .*kimi_k3_tp8"):
            from mlaprep.clients.kernels import kimi_k3_tp7  # noqa: F401
        with pytest.raises(ImportError, match=r"try .*kimi_k3_tp"):
            from mlaprep.clients.kernels import kimi_k3  # noqa: F401

    def test_an_attribute_is_an_attribute_error(self) -> None:
        assert not hasattr(kernels, "kimi_k3_tp7")
        assert getattr(kernels, "nonsense", None) is None
        with pytest.raises(AttributeError, match="deepseek_v3_tp8"):
            kernels.deepseek_v3_tp9  # noqa: B018
        for name in ("__path__", "__wrapped__", "__all__"):
            with pytest.raises(AttributeError):
                getattr(kernels, name)

    def test_a_name_as_text_is_a_spec_error(self) -> None:
        with pytest.raises(SpecError, match="kimi_k3_tp8"):
            kernels.find("kimi_k3_tp7")
        for nothing in (None, 3, b"kimi_k3_tp8"):
            with pytest.raises(TypeError, match="name"):
                kernels.find(nothing)  # type: ignore[arg-type]

    def test_a_name_in_use_is_proposed_once(self) -> None:
        kernels.find("kimi_k3_tp8")
        with pytest.raises(SpecError) as refused:
            kernels.find("kimi_k3_tp9")
        assert str(refused.value).count("kimi_k3_tp8") == 1


class TestUse:
    def test_an_import_touches_nothing(self) -> None:
        script = """
import ctypes, socket, sys
def explode(*arguments, **options):
    raise AssertionError(f"reached for {arguments}")
ctypes.CDLL = socket.socket = socket.create_connection = socket.getaddrinfo = explode
from mlaprep.clients.kernels import kimi_k3_tp8
print(kimi_k3_tp8.spec.variant_id, [m for m in ("torch", "httpx", "cupy", "fastapi") if m in sys.modules])
"""
        environ = os.environ | {"MLAPREP_URL": "http://kernels.test"}
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environ, check=True)
        assert done.stdout.split() == [KernelSpec(num_heads=12).variant_id, "[]"]

    def test_it_is_loaded_through_the_default_client(
        self, default: KernelClient, service: FakeService, driver: FakeDriver
    ) -> None:
        handle = kernels.kimi_k3_tp8
        assert service.requests == []
        loaded = handle.load(1)
        assert not isinstance(loaded, NamedKernel)
        assert loaded is default.load(num_heads=12, device=1)
        assert (driver.loads, len(service.requests)) == ([1], 1)
        assert kernels.find(VARIANT).load(1) is loaded

    def test_without_a_gpu_it_has_a_spec_and_says_what_is_missing(
        self, default: KernelClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def none() -> FakeDriver:
            raise DriverError("asked to use a GPU, but libcuda.so.1 cannot be loaded")

        monkeypatch.setattr(launch, "cuda_driver", none)
        for ask in (lambda: kernels.kimi_k3_tp8.load(), lambda: kernels.kimi_k3_tp8.arch):
            with pytest.raises(DriverError, match="libcuda"):
                ask()
        assert service.requests == []
        named = kernels.kimi_k3_tp8_sm_103a
        assert named.arch == Arch("sm_103a")
        assert named.artifact == artifact_of(KernelSpec(num_heads=12), "sm_103a")

    def test_a_call_refuses_what_no_gpu_holds(self) -> None:
        torch = pytest.importorskip("torch")
        q, k, cache, loc = (
            torch.zeros(2, 12, 576, dtype=torch.bfloat16),
            torch.zeros(2, 576, dtype=torch.bfloat16),
            torch.zeros(4, 576, dtype=torch.uint8),
            torch.arange(2),
        )
        operands = (q[..., :512], q[..., 512:], k[:, :512], k[:, 512:], cache, loc)
        with pytest.raises(NotCovered, match="kimi_k3_tp8 does not cover this call"):
            kernels.kimi_k3_tp8(*operands)
        assert not kernels.kimi_k3_tp8.covers(*operands)
        with pytest.raises(TypeError, match="loc"):
            kernels.kimi_k3_tp8(*operands[:5], "loc")

    def test_it_pickles_as_its_name(self) -> None:
        handle = kernels.kimi_k3_tp8
        assert pickle.loads(pickle.dumps(handle)) is handle
        code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()))"
        done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(handle), capture_output=True, check=True)
        assert done.stdout.decode().strip() == "NamedKernel('kimi_k3_tp8')"


class TestListing:
    def test_presets_store_and_service_are_listed(
        self, default: KernelClient, service: FakeService, store: DiskStore
    ) -> None:
        stored, served = KernelSpec(num_heads=77), KernelSpec(num_heads=78)
        store.publish(artifact_of(stored))
        entries: list[object] = [{"variant_id": served.variant_id}, {"variant_id": "mla_prepare-from-tomorrow"}, 3]
        service.answer = lambda request: httpx.Response(200, json={"variants": entries})
        names = dir(kernels)
        assert {"kimi_k3_tp8", spell_variant(stored), spell_variant(served)} < set(names)
        assert names == sorted(set(names))
        assert all(kernels.find(name).spec for name in names)
        dir(kernels)
        assert service.calls == ["GET /v1/variants"]  # once for a while

    @pytest.mark.parametrize(
        "answer",
        [
            httpx.Response(500), httpx.Response(404), httpx.Response(200, content=b"<html>"),
            httpx.Response(200, json=[]), httpx.Response(200, json={"variants": {"a": 1}}),
        ],
    )  # fmt: skip
    def test_a_service_that_is_none_is_left_out(
        self, default: KernelClient, service: FakeService, answer: httpx.Response
    ) -> None:
        service.answer = lambda request: answer
        assert dir(kernels) == sorted(preset_names())

    def test_a_hung_service_costs_its_deadline_once(
        self, default: KernelClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def hang(request: httpx.Request) -> Any:
            time.sleep(5)

        service.answer = hang
        monkeypatch.setattr(listing, "SERVICE_TIMEOUT_S", 0.2)
        began = time.monotonic()
        assert dir(kernels) == sorted(preset_names())
        assert dir(kernels) == sorted(preset_names())
        assert time.monotonic() - began < 1.5

    def test_a_bad_setting_is_no_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MLAPREP_URL", "no url at all")
        assert dir(kernels) == sorted(preset_names())

    def test_offline_asks_no_service(
        self, service: FakeService, store: DiskStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        offline = KernelClient(transport=service.transport(), store=store, offline=True)
        monkeypatch.setattr(dispatch._default, "client", offline)
        assert dir(kernels) == sorted(preset_names())
        assert service.requests == []

    def test_a_forked_child_lists_for_itself(self, default: KernelClient, service: FakeService) -> None:
        dir(kernels)
        with listing._listing._lock:
            child = os.fork()
            if child == 0:
                signal.alarm(20)
                try:
                    os._exit(0 if "kimi_k3_tp8" in dir(kernels) else 1)
                finally:
                    os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
