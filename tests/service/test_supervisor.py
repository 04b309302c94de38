"""Several workers on one address: what they count together, and what becomes of them when one dies or all must go."""

import os
import re
import signal
import socket
import tempfile
import time
from pathlib import Path

import httpx
import pytest
from service_kit import ServerMaker, is_alive, wait_for

from mlaprep.service import supervisor
from mlaprep.service.settings import Settings
from mlaprep.service.supervisor import share_of_compilers

KERNEL = "/v1/kernels/sm_90a/mla_prepare-h2-r512-d64-bf16-fp8-norope-i64-pdl"
HEALTHZ = r'mlaprep_requests_total\{method="GET",route="/healthz",status="200"\} (\S+)'


def children(pid: int) -> list[int]:
    """Workers of a supervisor: its children, without the tracker of multiprocessing's resources."""
    found = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [child for child in found if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def counted(http: httpx.Client, pattern: str) -> float:
    match = re.search(pattern, http.get("/metrics").text)
    return float(match[1]) if match else 0.0


def ask(port: int, times: int) -> None:
    for _ in range(times):  # each on a connection of its own, which any worker may take
        assert httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200


def test_counts_are_summed_a_dead_worker_is_replaced_and_all_end_together(run_server: ServerMaker) -> None:
    with run_server(MLAPREP_WORKERS="2", MLAPREP_COMPILE_PROCESSES="2") as server:
        supervisor = server.process.pid
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=30) as http:
            before = counted(http, HEALTHZ)
            ask(server.port, 20)
            assert counted(http, HEALTHZ) == before + 20
            assert [http.put(KERNEL).status_code for _ in range(4)] == [201, 200, 200, 200]
            wait_for(lambda: counted(http, r'mlaprep_compiles_total\{result="ok"\} (\S+)') == 1)
            first = children(supervisor)
            assert len(first) == 2
        os.kill(first[0], signal.SIGKILL)
        wait_for(lambda: len(set(children(supervisor)) - set(first)) == 1)
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=30) as http:
            ask(server.port, 10)
            # Nothing that the dead one had counted is lost, and its gauges do not stay.
            assert counted(http, HEALTHZ) == before + 30
            wait_for(lambda: counted(http, r"(?m)^mlaprep_compile_processes (\S+)") <= 2)
        workers = children(supervisor)
        os.kill(supervisor, signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert not any(map(is_alive, workers))


def test_workers_of_a_killed_supervisor_end_by_themselves(run_server: ServerMaker) -> None:
    with run_server(MLAPREP_WORKERS="2", MLAPREP_READ_ONLY="on") as server:
        workers = children(server.process.pid)
        assert len(workers) == 2
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait(10)
        deadline = time.monotonic() + 15
        while any(map(is_alive, workers)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not any(map(is_alive, workers))


def test_compilers_are_shared_out() -> None:
    assert share_of_compilers(Settings(workers=4, compile_processes=8)) == 2
    assert share_of_compilers(Settings(workers=4, compile_processes=1)) == 1
    assert share_of_compilers(Settings(workers=1, compile_processes=3)) == 3


def test_what_killed_supervisors_left_is_swept_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    old = time.time() - 3600
    for name in ("mlaprep-metrics-left", "mlaprep-metrics-held", "mlaprep-metrics-young", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "counter_1.db").write_bytes(b"x")
        if not name.endswith("young"):
            os.utime(tmp_path / name, (old, old))
    (tmp_path / "mlaprep-metrics-link").symlink_to(tmp_path / "other")
    with supervisor._held(tmp_path / "mlaprep-metrics-held"), supervisor._metrics_directory():
        own = Path(os.environ["PROMETHEUS_MULTIPROC_DIR"])
        os.utime(own, (old, old))
        supervisor._sweep(tmp_path)
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {own.name, "mlaprep-metrics-held", "mlaprep-metrics-young", "mlaprep-metrics-link", "other"}
    assert (tmp_path / "other" / "counter_1.db").exists()


def test_nothing_listens_any_more_when_workers_are_asked_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Idle:
        is_ready = is_alive = True
        pid = 0

        def __init__(self, _: Settings, listeners: list[socket.socket]) -> None:
            self.sentinel, self.listeners = os.pipe()[0], listeners

        def ask_to_end(self) -> None:
            seen.extend(listener.fileno() for listener in self.listeners)

        def end_by(self, _: float) -> None:
            os.close(self.sentinel)

    monkeypatch.setattr(supervisor, "_Worker", Idle)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        supervisor.supervise(Settings(workers=2), [listener], lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert seen == [-1, -1]
