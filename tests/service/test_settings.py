"""Settings: what an environment may say, and what must not be served."""

import pytest
from pydantic import ValidationError

from mlaprep.service.settings import Settings, is_loopback


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
