"""Tokens on the command line: made once, listed without their secret, taken by a real service and its clients."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from service_kit import running_server

from mlaprep.clients.client import KernelClient
from mlaprep.clients.errors import KernelUnavailable, ServiceRefused
from mlaprep.clients.rest import RestTransport
from mlaprep.service.tokens import TokenList, digest_of
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec

VARIANT = "mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl"


def cli(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mlaprep.clients.cli", *words]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)


def test_a_token_is_printed_once_beside_the_line_that_keeps_its_digest() -> None:
    done = cli("token", "create", "--scope", "build", "--name", "ci", "--expires", "2999-01-31")
    assert done.returncode == 0, done.stderr
    secret, line = done.stdout.splitlines()
    (token,) = TokenList.parse(line).tokens
    assert (token.name, token.scope, token.digest) == ("ci", "build", digest_of(secret))
    assert line.endswith("  2999-01-31")
    assert secret not in line + done.stderr
    document = json.loads(cli("token", "create", "--scope", "admin", "--name", "ops", "--json").stdout)
    assert set(document) == {"token", "line"}
    assert document["token"] != secret
    assert digest_of(document["token"]) in document["line"]


@pytest.mark.parametrize("words", [("--scope", "root", "--name", "a b"), ("--scope", "", "--name", "")])
def test_a_token_that_cannot_be_is_wrong_usage(words: tuple[str, ...]) -> None:
    done = cli("token", "create", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "scope" in done.stderr
    assert "name" in done.stderr


def test_the_list_shows_everything_but_secrets(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"ci build sha256:{'a' * 64}\nold read sha256:{'b' * 64} 2001-01-01\n")
    rows = json.loads(cli("token", "list", "--json", MLAPREP_TOKENS_FILE=str(path)).stdout)["tokens"]
    assert [(row["name"], row["scope"], row["valid"]) for row in rows] == [
        ("ci", "build", True),
        ("old", "read", False),
    ]
    shown = cli("token", "list", "--file", str(path)).stdout
    assert "aaaaaaaaaaaa…" in shown
    assert "(past)" in shown
    path.write_text("s3cret\n")
    done = cli("token", "list", "--file", str(path))
    assert done.returncode == 2
    assert "s3cret" not in done.stderr


def test_commands_and_clients_send_their_token_and_say_what_they_lack(tmp_path: Path) -> None:
    made = {
        scope: json.loads(cli("token", "create", "--scope", scope, "--name", scope, "--json").stdout)
        for scope in ("read", "build")
    }
    path = tmp_path / "tokens"
    path.write_text("".join(entry["line"] + "\n" for entry in made.values()))
    settings = {"MLAPREP_TOKENS_FILE": str(path), "MLAPREP_READS_NEED_TOKEN": "on", "MLAPREP_HOST": "0.0.0.0"}
    spec, arch = KernelSpec(num_heads=12), Arch("sm_100a")
    with running_server(tmp_path / "service", wait=False, **settings) as server:
        revoke = ("revoke", VARIANT, "--arch", "sm_100a", "--reason", "test", "--url", server.url)
        nobody = cli(*revoke)
        assert nobody.returncode != 0
        assert "401" in nobody.stderr
        assert "set MLAPREP_TOKEN" in nobody.stderr
        builder = cli(*revoke, MLAPREP_TOKEN=made["build"]["token"])
        assert builder.returncode != 0
        assert "scope admin" in builder.stderr
        assert made["build"]["token"] not in builder.stderr

        with pytest.raises(ServiceRefused, match="401") as refused:
            RestTransport(server.url).fetch(spec, arch)
        assert refused.value.problem == "token-required"
        with pytest.raises(ServiceRefused, match=r"404.*building it there was refused.*scope build"):
            RestTransport(server.url, made["read"]["token"]).fetch(spec, arch)
        assert RestTransport(server.url, made["build"]["token"]).fetch(spec, arch).manifest.arch == "sm_100a"
        assert RestTransport(server.url, made["read"]["token"]).fetch(spec, arch).manifest.arch == "sm_100a"
        with (
            KernelClient(server.url, token="wrong", on_miss="error", report_misses=False) as client,
            pytest.raises(KernelUnavailable, match="the token that was sent does not hold"),
        ):
            client.obtain(KernelSpec(num_heads=13), arch)
        log = server.log.read_text()
        assert not any(entry["token"] in log for entry in made.values())
