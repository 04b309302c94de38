"""``mlaprep keys``: a key made, and the half of it that may be shown."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlaprep.clients.cli import app
from mlaprep.kernels_cache.signing import PublicKey


def run(*arguments: object, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["keys", *map(str, arguments)])
    assert result.exit_code == exit_code, (result.output, result.exception)
    assert "PRIVATE KEY" not in result.output
    return result.stdout if exit_code == 0 else result.stderr


def test_make_one_and_show_it(tmp_path: Path) -> None:
    path = tmp_path / "signing.pem"
    public = run("generate", path).strip()
    assert run("show", path).strip() == public
    shown = json.loads(run("show", path, "--json"))
    assert shown == {"key_id": PublicKey.parse(public).key_id, "public_key": public}
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    assert "exists" in run("generate", path, exit_code=1)
    assert path.read_bytes() == before


@pytest.mark.parametrize("mode", [0o644, 0o640])
def test_a_key_that_others_may_read_is_not_shown(tmp_path: Path, mode: int) -> None:
    run("generate", tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    assert "chmod 600" in run("show", tmp_path / "key", exit_code=1)
    assert "cannot be opened" in run("show", tmp_path / "none", exit_code=1)
