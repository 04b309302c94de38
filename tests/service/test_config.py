"""Settings from a file: precedence, mistakes by name, what is shown of them, and that all of it is documented."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from mlaprep.service.effective import MASK, effective_settings, without_credentials
from mlaprep.service.settings import Settings, read_settings
from mlaprep.templates.errors import SpecError

SECRET = "a-token-that-nobody-may-see"
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Makes the file that MLAPREP_CONFIG names."""

    def make(text: str) -> Path:
        path = tmp_path / "mlaprep.toml"
        path.write_text(text)
        path.chmod(0o600)
        monkeypatch.setenv("MLAPREP_CONFIG", str(path))
        return path

    return make


def cli(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mlaprep.clients.cli", *words]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)


def test_option_over_environment_over_file_over_default(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("port = 1\ncompile_queue = 2\nnegative_ttl_s = 3\naccess_log = true\n")
    monkeypatch.setenv("MLAPREP_PORT", "10")
    monkeypatch.setenv("MLAPREP_COMPILE_QUEUE", "20")
    monkeypatch.setenv("MLAPREP_NEGATIVE_TTL_S", "")
    effective = {setting.name: setting for setting in effective_settings({"port": 100})}
    settings = read_settings({"port": 100})
    for name, value, source in (
        ("port", 100, "option"),
        ("compile_queue", 20, "env"),
        ("negative_ttl_s", 3, "file"),
        ("access_log", True, "file"),
        ("host", "127.0.0.1", "default"),
    ):
        assert (effective[name].value, effective[name].source) == (value, source)
        assert getattr(settings, name) == value
        assert effective[name].variable == f"MLAPREP_{name.upper()}"


def sample(name: str) -> Any:
    """A value of a setting that is not its default."""
    field = Settings.model_fields[name]
    special = {
        "log_format": "json",
        "log_level": "info",
        "cors_origins": "https://dash.example",
        "trusted_proxies": "10.0.0.0/8",
        "port": 9001,
    }
    if name in special:
        return special[name]
    if isinstance(field.default, bool):
        return not field.default
    kind = str(field.annotation)
    if "int" in kind or "float" in kind:
        return field.default + 1 if field.default else 2
    return "redis://127.0.0.1:6379/0" if "url" in name else "127.0.0.2"


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_can_come_from_file_and_environment(
    write: Write, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(f"MLAPREP_{name.upper()}", raising=False)
    value = sample(name)
    path = write(f"{name} = {json.dumps(value)}\n" + ('tokens_file = "x"' if name == "reads_need_token" else ""))
    from_file = getattr(Settings(), name)
    assert {s.name: s.source for s in effective_settings()}[name] == "file"
    path.write_text('tokens_file = "x"' if name == "reads_need_token" else "")
    monkeypatch.setenv(f"MLAPREP_{name.upper()}", str(value))
    assert getattr(Settings(), name) == from_file != Settings.model_fields[name].default
    assert {s.name: s.source for s in effective_settings()}[name] == "env"


def test_the_page_has_every_setting_and_no_other(root: Path, write: Write) -> None:
    page = (root / "docs" / "settings.md").read_text()
    section = page.partition("## Service\n")[2].partition("\n## ")[0]
    rows = set(re.findall(r"^\| `MLAPREP_(\w+)` \|", section, re.MULTILINE))
    assert rows == {name.upper() for name in Settings.model_fields}
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    write(example)
    settings = Settings()
    for name, value in tomllib.loads(example).items():
        assert str(getattr(settings, name)) == str(value)


@pytest.mark.parametrize(
    ("text", "field", "told"),
    [
        ("prot = 1", "prot in MLAPREP_CONFIG", "did you mean port?"),
        ("MLAPREP_PORT = 1", "MLAPREP_PORT in MLAPREP_CONFIG", "did you mean port?"),
        ("compile_proceses = 1", "compile_proceses in MLAPREP_CONFIG", "did you mean compile_processes?"),
        ("[service]\nport = 1", "service in MLAPREP_CONFIG", "a setting of the service"),
        ('"\\u0007" = 1', "(unprintable name) in MLAPREP_CONFIG", "a setting of the service"),
        ("port = 99999", "port in MLAPREP_CONFIG", "at most 65,535"),
        ('port = "http"', "port in MLAPREP_CONFIG", "an integer"),
        ('read_only = "ture"', "read_only in MLAPREP_CONFIG", "true, yes, on"),
        ('tokens_file = ""', "tokens_file in MLAPREP_CONFIG", "mlaprep token create"),
        ('signing_key = ""', "signing_key in MLAPREP_CONFIG", "mlaprep keys generate"),
        ('host = "0.0.0.0"', "host in MLAPREP_CONFIG", "MLAPREP_TOKENS_FILE"),
        ("port = true", "port in MLAPREP_CONFIG", "no switch"),
        ("redis_timeout_s = false", "redis_timeout_s in MLAPREP_CONFIG", "no switch"),
        ("port = [1]", "port in MLAPREP_CONFIG", "an integer"),
        ("port = ", "MLAPREP_CONFIG", "TOML"),
        (f'token = "{SECRET}', "MLAPREP_CONFIG", "TOML"),
    ],
)
def test_a_mistake_is_told_by_its_place(write: Write, text: str, field: str, told: str) -> None:
    write(text + "\n")
    with pytest.raises(SpecError) as failure:
        read_settings()
    assert [problem.field for problem in failure.value.problems] == [field]
    assert told in failure.value.problems[0].allowed
    assert SECRET not in str(failure.value)


def test_all_unknown_names_are_told_at_once(write: Write) -> None:
    write("prot = 1\nhots = 2\n")
    with pytest.raises(SpecError) as failure:
        read_settings()
    assert {problem.field.split()[0] for problem in failure.value.problems} == {"prot", "hots"}


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "none", tmp_path, tmp_path / "bytes"):
        monkeypatch.setenv("MLAPREP_CONFIG", str(path))
        with pytest.raises(SpecError, match="MLAPREP_CONFIG"):
            read_settings()
    monkeypatch.setenv("MLAPREP_CONFIG", "")
    assert read_settings().port == 8400


def test_a_secret_in_a_file_that_everybody_can_read_is_refused(write: Write) -> None:
    path = write(f'token = "{SECRET}"\n')
    assert read_settings().token == SecretStr(SECRET)
    path.chmod(0o644)
    with pytest.raises(SpecError, match="everybody here can read") as failure:
        read_settings()
    assert SECRET not in str(failure.value)


def test_no_secret_is_shown(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(f'token = "{SECRET}"\ncors_origins = "https://dash.example"\n')
    for words in (("config",), ("config", "--json"), ("config", "--json", "--config", str(path))):
        done = cli(*words)
        assert done.returncode == 0, done.stderr
        assert SECRET not in done.stdout + done.stderr
        assert MASK in done.stdout
    rows = {row["name"]: row for row in json.loads(done.stdout)["settings"]}
    assert (rows["token"]["value"], rows["token"]["source"]) == (MASK, "file")
    assert set(rows) == set(Settings.model_fields)
    assert json.loads(done.stdout)["config_file"] == str(path)
    done = cli("config", MLAPREP_TOKEN="two words " + SECRET)
    assert (done.returncode, SECRET in done.stdout + done.stderr) == (2, False)


def test_a_credential_within_a_value_is_masked() -> None:
    assert without_credentials("redis://user:word@host/0") == f"redis://{MASK}@host/0"
    assert without_credentials("http://host/a@b") == "http://host/a@b"


def test_serve_takes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('host = "0.0.0.0"\n')
    done = cli("serve", "--config", str(path))
    assert done.returncode == 2
    assert "host in MLAPREP_CONFIG" in done.stderr
