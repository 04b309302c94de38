"""``mlaprep revoke`` and ``revocations``: in a service and in this machine's cache."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_service import URL, FakeService, artifact_of, problem
from typer.testing import CliRunner, Result

from mlaprep.clients import cli_revoke
from mlaprep.clients.cli import app
from mlaprep.clients.cli_output import ExitCode
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.key import request_key
from mlaprep.kernels_cache.revocation import Revocation, Revocations
from mlaprep.service.builder import Builder
from mlaprep.templates.render import templates_fingerprint
from mlaprep.templates.spec import KernelSpec

SPEC = KernelSpec(num_heads=12)
ARTIFACT = artifact_of(SPEC)
TOLD = Revocation.of(ARTIFACT.manifest, "wrong rows")


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, [*arguments], env={"COLUMNS": "140"} | (env or {}))


@pytest.fixture
def through_the_fake(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> FakeService:
    monkeypatch.setattr(cli_revoke, "RestTransport", lambda url, token: service.transport())
    return service


def test_revoked_in_a_service(through_the_fake: FakeService) -> None:
    service = through_the_fake
    service.answer = lambda request: httpx.Response(200, json={"revocation": TOLD.to_dict()})
    arguments = ("revoke", SPEC.variant_id, "--arch", "sm_90a", "--reason", "wrong rows & more", "--url", URL)
    shown = run(*arguments)
    assert shown.exit_code == ExitCode.OK
    assert "wrong rows" in shown.output
    (request,) = service.requests
    assert (request.method, request.url.path) == ("DELETE", f"/v1/kernels/sm_90a/{SPEC.variant_id}")
    assert request.url.params["reason"] == "wrong rows & more"
    assert json.loads(run(*arguments, "--json").stdout) == {"revocations": [TOLD.to_dict()]}


def test_a_service_that_has_no_such_kernel(through_the_fake: FakeService) -> None:
    through_the_fake.answer = lambda request: problem(404, "kernel-not-built")
    shown = run("revoke", SPEC.variant_id, "--arch", "sm_90a", "--reason", "x", "--url", URL)
    assert shown.exit_code == ExitCode.UNAVAILABLE


@pytest.mark.parametrize("document", [None, [], {"revocation": None}, {"revocation": {"key": "../.."}}])
def test_a_reply_that_is_none(through_the_fake: FakeService, document: Any) -> None:
    through_the_fake.answer = lambda request: httpx.Response(200, content=json.dumps(document))
    shown = run("revoke", SPEC.variant_id, "--arch", "sm_90a", "--reason", "x", "--url", URL)
    assert shown.exit_code == ExitCode.FAILED
    assert "no list of revocations" in shown.output


def test_listed_and_lifted_in_a_service(through_the_fake: FakeService) -> None:
    service = through_the_fake
    service.revoked = lambda request: httpx.Response(200, json={"revocations": [TOLD.to_dict()]})
    service.answer = lambda request: httpx.Response(200, json=TOLD.to_dict())
    assert json.loads(run("revocations", "--url", URL, "--json").stdout) == {"revocations": [TOLD.to_dict()]}
    lifted = json.loads(run("revocations", "--lift", TOLD.key[:12], "--url", URL, "--json").stdout)
    assert lifted == {"lifted": [TOLD.to_dict()]}
    assert [request.method for request in service.requests] == ["DELETE"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A cache directory with one kernel that looks like this release's."""
    store = DiskStore(tmp_path / "cache")
    store.publish(ARTIFACT)
    request = request_key(arch="sm_90a", spec=SPEC.to_dict(), generator=templates_fingerprint())
    store.link(request, ARTIFACT.key)
    monkeypatch.setattr(Builder, "get", lambda builder, spec, arch: builder._last_built(spec, arch))
    return {"MLAPREP_CACHE_DIR": str(tmp_path / "cache")}


def test_revoked_and_lifted_here(here: dict[str, str]) -> None:
    root = Path(here["MLAPREP_CACHE_DIR"])
    revoke = ("revoke", SPEC.variant_id, "--arch", "sm_90a", "--reason", "wrong rows", "--json")
    (told,) = json.loads(run(*revoke, env=here).stdout)["revocations"]
    assert (told["key"], told["reason"]) == (ARTIFACT.key, "wrong rows")
    assert DiskStore(root).get(ARTIFACT.key) is None
    assert json.loads(run("revocations", "--json", env=here).stdout)["revocations"] == [told]
    assert "wrong rows" in run("revocations", env=here).stdout
    assert run("revocations", "--lift", ARTIFACT.key, env=here).exit_code == ExitCode.OK
    assert Revocations(root).list() == ()
    assert run("revocations", "--lift", ARTIFACT.key, env=here).exit_code == ExitCode.UNAVAILABLE
    assert "No kernel is revoked" in run("revocations", env=here).output


def test_what_is_not_here_cannot_be_revoked(here: dict[str, str]) -> None:
    shown = run("revoke", KernelSpec(num_heads=16).variant_id, "--arch", "sm_90a", "--reason", "x", env=here)
    assert shown.exit_code == ExitCode.UNAVAILABLE
    assert "mlaprep ls" in shown.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("revoke", "mla_prepare-h0", "--arch", "sm_90a", "--reason", "x"),
        ("revoke", SPEC.variant_id, "--arch", "sm_70", "--reason", "x"),
        ("revoke", SPEC.variant_id, "--arch", "sm_90a", "--reason", "a\nb"),
        ("revoke", SPEC.variant_id, "--arch", "sm_90a", "--reason", "x", "--key", "../etc"),
        ("revocations", "--lift", "0" * 7),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], tmp_path: Path) -> None:
    assert run(*arguments, env={"MLAPREP_CACHE_DIR": str(tmp_path)}).exit_code == ExitCode.USAGE


def test_offline_asks_nobody(tmp_path: Path) -> None:
    shown = run("revocations", "--url", URL, env={"MLAPREP_OFFLINE": "1"})
    assert shown.exit_code == ExitCode.UNAVAILABLE
