"""``mlaprep misses``: a table for people, JSON for programs, and nothing of a stranger's reply taken on trust."""

import json
from typing import Any

import httpx
import pytest
from fake_service import URL, FakeService, problem
from typer.testing import CliRunner, Result

from mlaprep.clients import cli_misses
from mlaprep.clients.cli import app
from mlaprep.clients.cli_output import ExitCode

ROW = {
    "variant_id": "mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl",
    "arch": "sm_100a",
    "models": ["kimi-k3"],
    "state": "missing",
    "count": 1234,
    "reasons": {"compiled": 1230, "rejected": 4},
    "first_seen": "2026-01-31T12:00:00Z",
    "last_seen": "2026-01-31T12:34:07Z",
}


@pytest.fixture(autouse=True)
def through_the_fake(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_misses, "RestTransport", lambda url, token: service.transport())


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["misses", "--url", URL, *arguments], env={"COLUMNS": "140"})


def answer(service: FakeService, document: Any) -> None:
    service.answer = lambda request: httpx.Response(200, content=json.dumps(document))


def test_a_table(service: FakeService) -> None:
    answer(service, {"misses": [ROW], "total": 3, "next_cursor": "x"})
    shown = run("--arch", "sm_100a", "--limit", "1", "--latest")
    assert shown.exit_code == ExitCode.OK
    for text in (ROW["variant_id"], "1,234", "missing", "compiled 1,230, rejected 4", "2026-01-31T12:34:07Z", "2 more"):
        assert str(text) in shown.output
    assert str(service.requests[0].url) == f"{URL}/v1/misses?order=last_seen&limit=1&arch=sm_100a"


def test_on_a_narrow_terminal_every_miss_has_one_line(service: FakeService) -> None:
    answer(service, {"misses": [ROW] * 3, "total": 3, "next_cursor": None})
    shown = CliRunner().invoke(app, ["misses", "--url", URL], env={"COLUMNS": "80"})
    lines = [line for line in shown.stdout.splitlines() if "h12-r512-d64-bf16-fp8-norope-i64-pdl" in line]
    assert len(lines) == 3 == len(shown.stdout.splitlines()) - 2
    assert all("missing" in line and "01-31 12:34" in line for line in lines)


def test_json(service: FakeService) -> None:
    answer(service, {"misses": [ROW], "total": 1, "next_cursor": None})
    assert json.loads(run("--json").stdout) == {"misses": [ROW], "total": 1}


def test_none(service: FakeService) -> None:
    answer(service, {"misses": [], "total": 0, "next_cursor": None})
    shown = run()
    assert (shown.exit_code, shown.stdout) == (ExitCode.OK, "")
    assert "lacked nothing" in shown.output


@pytest.mark.parametrize(
    "document",
    [[], 7, None, {}, {"misses": 7, "total": 1}, {"misses": [7], "total": 1}, {"misses": [{}], "total": 1}]
    + [{"misses": [ROW | {name: wrong}], "total": 1} for name, wrong in (("count", "1"), ("arch", 7), ("reasons", []))]
    + [{"misses": [ROW], "total": True}],
)
def test_a_reply_of_another_shape_is_an_error(service: FakeService, document: Any) -> None:
    answer(service, document)
    shown = run()
    assert shown.exit_code == ExitCode.FAILED
    assert "no list of misses" in shown.output


def test_a_stranger_cannot_write_to_the_terminal(service: FakeService) -> None:
    answer(service, {"misses": [ROW | {"state": "\x1b[2J[bold]x"}], "total": 1})
    shown = run()
    assert "\x1b[2J" not in shown.output
    assert "?[2J[bold]x" in shown.output


def test_usage_and_a_service_that_refuses(service: FakeService) -> None:
    assert run("--arch", "sm_1").exit_code == ExitCode.USAGE
    assert CliRunner().invoke(app, ["misses"], env={"MLAPREP_URL": ""}).exit_code == ExitCode.USAGE
    service.answer = lambda request: problem(404, "not-found")
    assert run().exit_code == ExitCode.UNAVAILABLE
