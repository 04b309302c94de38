"""``mlaprep warmup``: a plan from options and files, built here or in a service."""

import json
from pathlib import Path
from typing import Any

import pytest
from service_kit import running_server
from typer.testing import CliRunner

from mlaprep.clients import cli_warmup
from mlaprep.clients.cli import app
from mlaprep.clients.errors import ServiceRefused, ServiceUnreachable

VARIANT = "mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLAPREP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")

    def invoke(*arguments: str, exit_code: int = 0) -> Any:
        result = CliRunner().invoke(app, ["warmup", *arguments])
        assert result.exit_code == exit_code, (result.output, result.exception)
        assert "Traceback" not in result.output
        return result

    return invoke


def test_here_the_second_time_everything_is_found_built(run: Any) -> None:
    options = ("--preset", "kimi-k3", "--tp", "8", "--arch", "sm_100a", "--arch", "sm_103a", "--json")
    first, second = (json.loads(run(*options).stdout) for _ in range(2))
    assert (first["state"], first["total"], first["built"]) == ("done", 2, 2)
    assert (second["state"], second["built"], second["cached"]) == ("done", 0, 2)


def test_a_plan_in_git(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "warmup.yaml"
    file.write_text(f"arch: sm_90a\nkernels:\n  - preset: kimi-k3\n    tp: [8]\n  - variant_id: {VARIANT}\n")
    result = run("--file", str(file), "--variant", "h16-r512-d64-bf16-fp8-norope-i64-pdl", "--arch", "sm_100a")
    assert "[2/2] done" in result.stderr
    assert "2 built, 0 found built, 0 failed, of 2" in result.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("kernels: [\n", "line 2"),
        ("- 1\n", "mapping"),
        ("kernels:\n  - preset: nobody\n  - spec: {num_heads: 0}\n", "kernels.1.num_heads"),
        ("kernels: !!python/object/apply:os.system ['true']\n", "no YAML"),
        ("misses: 3\n", "misses"),
        ("{}", "nothing to build"),
    ],
)
def test_a_bad_plan_is_told(run: Any, tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "warmup.yaml"
    file.write_text(text)
    assert told in run("--file", str(file), exit_code=2).stderr


def test_offline_asks_no_service(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAPREP_OFFLINE", "1")
    assert "offline" in run("--preset", "kimi-k3", "--url", "http://nowhere.invalid", exit_code=3).stderr


def test_in_a_service_it_is_watched_to_its_end(run: Any, tmp_path: Path) -> None:
    with running_server(tmp_path / "server") as server:
        url = ("--url", server.url)
        result = run("--preset", "minicpm3-4b", "--arch", "sm_100a", *url)
        assert "[4/4] done" in result.stderr
        assert "4 built" in result.stderr
        told = json.loads(run("--preset", "minicpm3-4b", "--arch", "sm_100a", "--no-watch", "--json", *url).stdout)
        assert told["total"] == 4
        bad = run("--preset", "nobody", "--variant", "h0-x", *url, exit_code=2)
        assert "kernels.0.preset" in bad.stderr
        assert "kernels.1" in bad.stderr


class Restarting:
    """A service that is asked for a job and has troubles one after the other before it answers."""

    url = "http://kernels:8400"

    def __init__(self, *troubles: Exception) -> None:
        self.troubles = list(troubles)
        counts = dict.fromkeys(("built", "cached", "failed"), 0) | {"done": 1, "total": 2}
        self.job = {"id": "0123456789abcdef", "state": "running", "note": "", "failures": [], **counts}

    def send(self, method: str, path: str, content: object) -> dict[str, Any]:
        return self.job

    def document(self, path: str) -> dict[str, Any]:
        if self.troubles:
            raise self.troubles.pop(0)
        return self.job | {"state": "done", "done": 2}

    def close(self) -> None:
        pass


def refused(status: int) -> ServiceRefused:
    return ServiceRefused("no", status=status)


def test_a_restart_of_the_service_ends_no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_warmup, "_POLL_S", 0.001)
    service: Any = Restarting(ServiceUnreachable("gone"), refused(502), refused(503), ServiceUnreachable("gone"))
    assert cli_warmup._in_service(service, {}, True, quiet=True)["state"] == "done"
    lost: Any = Restarting(refused(404))
    with pytest.raises(ServiceRefused):
        cli_warmup._in_service(lost, {}, True, quiet=True)
    monkeypatch.setattr(cli_warmup, "_PATIENCE_S", 0.05)
    dead: Any = Restarting(*[ServiceUnreachable("gone")] * 10_000)
    with pytest.raises(ServiceUnreachable):
        cli_warmup._in_service(dead, {}, True, quiet=True)
