"""Settings: what an environment may say, and what must not be served."""

import re

import pytest
from pydantic import ValidationError

from mlaprep.service.settings import Settings, _allowed, is_loopback, read_settings
from mlaprep.templates.errors import SpecError


def test_defaults_serve_this_machine_only() -> None:
    settings = Settings()
    assert (settings.host, settings.port, settings.token, settings.read_only) == ("127.0.0.1", 8400, None, False)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.9.10", "::1", "[::1]", "localhost", "LOCALHOST", "::ffff:127.0.0.1"]
)
def test_loopback_needs_no_token(host: str) -> None:
    assert is_loopback(host)
    Settings(host=host)


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",
        "::",
        "",
        "10.0.0.1",
        "192.168.1.1",
        "kernels",
        "localhost.example.com",
        "::ffff:10.0.0.1",
        "1270.0.0.1",
    ],
)
def test_anything_else_needs_a_token_or_builds_nothing(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ValidationError, match="MLAPREP_TOKEN"):
        Settings(host=host)
    with pytest.raises(ValidationError, match="MLAPREP_TOKEN"):
        Settings(host=host, token="")
    Settings(host=host, token="x")
    Settings(host=host, read_only=True)


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAPREP_PORT", "9000")
    monkeypatch.setenv("MLAPREP_TOKEN", "s3cret")
    monkeypatch.setenv("MLAPREP_HOST", "0.0.0.0")
    monkeypatch.setenv("MLAPREP_URL", "http://somewhere")  # a client's, no business of the service
    settings = Settings()
    assert settings.port == 9000
    assert settings.token is not None
    assert settings.token.get_secret_value() == "s3cret"


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKEN", "CACHE_DIR", "PORT", "READ_ONLY"):
        monkeypatch.setenv(f"MLAPREP_{name}", "")
    assert Settings() == Settings(port=8400, token=None, cache_dir=None, read_only=False)


def test_a_token_shows_nowhere() -> None:
    assert "s3cret" not in repr(Settings(token="s3cret"))
    for bad in ("two words", "tab\t", "é", "x" * 1025):
        with pytest.raises(ValidationError) as failure:
            Settings(token=bad)
        assert bad not in str(failure.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 65536),
        ("port", -1),
        ("compile_timeout_s", 0),
        ("compile_processes", 0),
        ("compile_memory_bytes", 1),
        ("max_body_bytes", 0),
    ],
)
def test_bounds(name: str, value: int) -> None:
    with pytest.raises(ValidationError):
        Settings(**{name: value})


def test_every_setting_says_what_it_is() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("PORT", "99999", "an integer, 0 or more, at most 65,535"),
        ("PORT", "http", "an integer, 0 or more, at most 65,535"),
        ("COMPILE_TIMEOUT_S", "0", "a number, above 0, at most 3,600"),
        ("COMPILE_TIMEOUT_S", "nan", "a number, above 0, at most 3,600"),
        ("CACHE_MAX_BYTES", "1e9", "an integer, 1,048,576 or more"),
        ("READ_ONLY", "ture", "1, true, yes, on; or 0, false, no, off"),
        ("ACCESS_LOG", "y", "1, true, yes, on; or 0, false, no, off"),
        ("TOKEN", "two words", "up to 1024 printable ASCII characters without spaces"),
        ("HOST", "0.0.0.0", "MLAPREP_READ_ONLY=true"),
    ],
)
def test_what_is_wrong_is_told_by_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, allowed: str
) -> None:
    monkeypatch.setenv(f"MLAPREP_{variable}", value)
    with pytest.raises(SpecError) as failure:
        read_settings()
    (problem,) = failure.value.problems
    assert problem.field == f"MLAPREP_{variable}"
    assert allowed in problem.allowed
    told = str(failure.value)
    assert value == "0" or value not in told.replace(problem.allowed, "")
    assert not re.search(r"pydantic|validation|Input should|type=", told)


def test_options_are_told_by_their_own_names_and_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLAPREP_COMPILE_QUEUE", "-1")
    with pytest.raises(SpecError) as failure:
        read_settings({"port": -1, "cache_dir": ""})
    assert {problem.field for problem in failure.value.problems} == {"--port", "MLAPREP_COMPILE_QUEUE"}
    monkeypatch.delenv("MLAPREP_COMPILE_QUEUE")
    with pytest.raises(SpecError, match="--host"):
        read_settings({"host": "0.0.0.0"})


def test_every_setting_says_what_it_may_be() -> None:
    for name in Settings.model_fields:
        assert len(_allowed(name)) > 5


def test_an_empty_directory_is_none() -> None:
    assert Settings(cache_dir="").cache_dir is None
