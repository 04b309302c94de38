"""What an operator sees of a client: counts, and log lines under one logger."""

import ast
import json
import logging
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulation.artifact import emulated_artifact
from emulation.driver import EmulatedDriver
from fake_service import FakeService, problem

from mlaprep.clients import fused_prepare, launch
from mlaprep.clients.client import KernelClient
from mlaprep.clients.errors import ArtifactRejected, DriverError, KernelNotReady, KernelUnavailable
from mlaprep.clients.handle import KernelHandle
from mlaprep.clients.stats import FALLBACK_REASONS, ClientStats, LoadTimes, Tally, reason_of
from mlaprep.kernels_cache.store import MemoryStore
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec


def chain_calls(client: KernelClient, times: int, heads: int = 3, width: int = 32) -> None:
    source = torch.zeros(2, heads, width + 16, dtype=torch.bfloat16)
    cache, loc = torch.zeros(4, width + 16, dtype=torch.uint8), torch.arange(2)
    operands = (source[..., :width], source[..., width:], source[:, 0, :width], source[:, 0, width:], cache, loc)
    for _ in range(times):
        assert fused_prepare(*operands, client=client) is None


def messages(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name.startswith("mlaprep")]


class TestCounts:
    def test_a_document_has_every_count_and_is_json(self) -> None:
        document = json.loads(json.dumps(ClientStats().to_dict()))
        assert set(document) == {
            "memory", "disk", "bundle", "service", "compiled", "unavailable", "rejected", "service_errors", "fallbacks",
            "loads", "specialisations", "specialisation_limit", "layouts", "launches", "verified", "verify_failures",
            "unverified", "misses_reported", "misses_dropped",
        }  # fmt: skip
        assert document["fallbacks"] == dict.fromkeys(FALLBACK_REASONS, 0)
        assert document["loads"] == {"count": 0, "total_ms": 0.0, "max_ms": 0.0, "last_ms": 0.0}

    def test_stats_are_a_snapshot_that_crosses_processes(self) -> None:
        tally = Tally()
        tally.fall_back("cpu")
        before = tally.stats()
        tally.fall_back("cpu")
        assert (before.fallbacks["cpu"], tally.stats().fallbacks["cpu"]) == (1, 2)
        assert pickle.loads(pickle.dumps(before)) == before
        with pytest.raises(AttributeError):
            before.memory = 1  # type: ignore[misc]

    def test_threads_lose_no_count(self) -> None:
        tally = Tally()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: [tally.fall_back("cpu") or tally.add("disk") for _ in range(500)], range(8)))
        assert (tally.stats().fallbacks["cpu"], tally.stats().disk, tally.stats().hits) == (4000, 4000, 4000)

    def test_load_times(self) -> None:
        tally = Tally()
        for ms in (2.0, 5.0, 1.0):
            tally.load(ms)
        assert tally.stats().loads == LoadTimes(3, 8.0, 5.0, 1.0)

    def test_a_handle_tells_of_each_device_once(self) -> None:
        loads: list[tuple[object, int, float]] = []
        spec = KernelSpec(num_heads=2, kv_lora_rank=32, rope_dim=16)
        handle = KernelHandle(emulated_artifact(spec), EmulatedDriver(), on_loaded=lambda *loaded: loads.append(loaded))
        for device in (0, 0, 1, 0):
            handle.load(device)
        assert [(made, device) for made, device, _ in loads] == [(handle, 0), (handle, 1)]
        assert all(ms > 0 for *_, ms in loads)

    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (KernelUnavailable(""), "no-kernel"),
            (ArtifactRejected(""), "rejected"),
            (DriverError(""), "no-driver"),
            (DriverError("", code=209), "driver-error"),
        ],
    )
    def test_an_error_is_a_reason(self, error: Any, reason: str) -> None:
        assert reason_of(error) == reason


class TestFallbacks:
    def test_calls_are_counted_and_told_once(self, client: KernelClient, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "mlaprep")
        chain_calls(client, 3)
        assert client.stats().fallbacks == ClientStats().fallbacks | {"cpu": 3}
        assert messages(caplog) == [("INFO", "taking the unfused chain (cpu): the tensors are on cpu")]

    def test_uncovered_shapes_are_warned_of_once_each(
        self, client: KernelClient, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("mlaprep.clients.specialise.DEVICE_TYPE", "cpu")
        chain_calls(client, 3, width=20)
        chain_calls(client, 2, heads=5, width=20)
        assert client.stats().fallbacks["uncovered"] == 5
        assert [level for level, _ in messages(caplog)] == ["WARNING", "WARNING"]
        assert "3 heads of 20 + 16 torch.bfloat16, layout fp8" in messages(caplog)[0][1]

    def test_a_shape_without_a_kernel_is_counted_at_every_call(
        self,
        service: FakeService,
        spec: KernelSpec,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        service.answer = lambda request: problem(404, "kernel-not-built")
        monkeypatch.setattr(launch, "cuda_driver", EmulatedDriver)
        client = KernelClient(transport=service.transport(), store=MemoryStore(), on_miss="fallback")
        for _ in range(4):
            assert client.serving_handle(spec, 0) is None
        stats = client.stats()
        assert (stats.fallbacks["no-kernel"], stats.unavailable, stats.specialisations) == (4, 1, 0)
        told = [message for level, message in messages(caplog) if "unfused chain" in message]
        assert len(told) == 1
        assert spec.variant_id in told[0]

    def test_cold_during_capture(self, client: KernelClient, spec: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(launch, "cuda_driver", lambda: EmulatedDriver(capturing=True))
        with pytest.raises(KernelNotReady):
            client.serving_handle(spec, 0)
        assert client.stats().fallbacks["cold-capture"] == 1

    def test_decisions_told_are_bounded(self, client: KernelClient, caplog: pytest.LogCaptureFixture) -> None:
        for number in range(1000):
            client.fall_back("uncovered", "a shape", number)
        assert client.stats().fallbacks["uncovered"] == 1000
        assert len(messages(caplog)) == 256


def test_a_loaded_kernel_is_counted_and_told(
    client: KernelClient, spec: KernelSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "mlaprep")
    module = SimpleNamespace(function=0, context=1, multiprocessors=4)
    monkeypatch.setattr(EmulatedDriver, "load", lambda *arguments: module)
    monkeypatch.setattr(EmulatedDriver, "prepare", lambda *arguments: None)
    monkeypatch.setattr(launch, "cuda_driver", EmulatedDriver)
    for _ in range(3):
        assert client.serving_handle(spec, 0) is not None
    stats = client.stats()
    assert (stats.service, stats.specialisations, stats.loads.count) == (1, 0, 1)
    assert stats.loads.total_ms == stats.loads.max_ms == stats.loads.last_ms > 0
    (told,) = [message for level, message in messages(caplog) if level == "INFO"]
    assert told.startswith(f"loaded {spec.variant_id} for sm_90a on device 0 from service in ")
    assert ("DEBUG", f"{spec.variant_id} for sm_90a: had from service") in messages(caplog)


def test_a_forked_child_counts_anew(client: KernelClient, spec: KernelSpec, arch: Arch) -> None:
    client.obtain(spec, arch)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if client.stats() == ClientStats(specialisation_limit=client.stats().specialisation_limit) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert client.stats().service == 1


def test_one_logger_and_no_handler(root: Path) -> None:
    """Every logger is a child of ``mlaprep`` by its module, and importing sets nothing."""
    for room in ("clients", "kernels_cache", "templates"):
        for path in (root / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "logging.getLogger":
                    (name,) = node.args
                    literal = name.value if isinstance(name, ast.Constant) else ""
                    assert ast.unparse(name) == "__name__" or str(literal).startswith("mlaprep"), path
    script = (
        "import logging, mlaprep.clients as c; [getattr(c, name) for name in c.__all__]; c.KernelClient();"
        "tree = [logging.root, *logging.root.manager.loggerDict.values()];"
        "print([l for l in tree if getattr(l, 'handlers', None)], logging.getLogger('mlaprep').level)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] 0"


def test_the_page_names_every_reason_and_count(root: Path) -> None:
    page = (root / "docs" / "observability.md").read_text()
    for name in (*FALLBACK_REASONS, *ClientStats().to_dict(), *ClientStats().to_dict()["loads"]):
        assert f"`{name}`" in page, name


def test_the_page_names_every_warning(root: Path) -> None:
    """What stands before the first value in a message is what an alert can look for."""
    page = (root / "docs" / "observability.md").read_text()
    heads = set()
    for room in ("clients", "kernels_cache"):
        for path in (root / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("_log.warning", "_log.error"):
                    text = node.args[0]
                    heads.add(str(text.value).partition("%")[0].strip() if isinstance(text, ast.Constant) else "")
    assert "kernel service:" in heads
    assert {head for head in heads if head and f"`{head}" not in page} == set()
