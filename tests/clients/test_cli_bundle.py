"""``mlaprep bundle``: made, shown, verified, installed; JSON and tables, exit codes, and never a socket offline."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import no_network
import pytest
from typer.testing import CliRunner, Result

from mlaprep.clients.cli import app
from mlaprep.clients.client import KernelClient
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.key_files import generate_key
from mlaprep.kernels_cache.signing import SigningKey
from mlaprep.templates.presets import preset

SPEC = preset("kimi-k3").spec(8)
KIMI = ["--preset", "kimi-k3", "--tp", "8", "--arch", "sm_90a"]
Run = Callable[..., Result]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that has the kernel, so that starting a compiler is paid once."""
    folder = tmp_path_factory.mktemp("warm") / "cache"
    with KernelClient(store=DiskStore(folder), offline=True) as client:
        client.obtain(SPEC, "sm_90a")
    return folder


@pytest.fixture
def run(tmp_path: Path, warm: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    shutil.copytree(warm, tmp_path / "cache")
    monkeypatch.setenv("MLAPREP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)

    def invoke(*arguments: object, exit_code: int = 0) -> Result:
        result = CliRunner().invoke(app, [*map(str, arguments)])
        assert result.exit_code == exit_code, (result.output, result.exception)
        assert "Traceback" not in result.output
        return result

    return invoke


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return generate_key(tmp_path / "signing.pem")


@pytest.fixture
def path(run: Run, tmp_path: Path) -> Path:
    run("bundle", "create", *KIMI, "-o", "kernels.tar")
    return tmp_path / "kernels.tar"


def as_json(result: Result) -> Any:
    return json.loads(result.stdout)


def test_a_round_in_json(run: Run, tmp_path: Path, key: SigningKey) -> None:
    created = as_json(run("bundle", "create", *KIMI, "--sign-with", "signing.pem", "-o", "kernels.tar", "--json"))
    bundle = created["bundle"]
    assert (bundle["kernels"], bundle["key_id"]) == (1, key.public.key_id)
    assert created["kernels"][0]["tier"] == "disk"
    for command in ("show", "verify"):
        document = as_json(run("bundle", command, "kernels.tar", "--json"))
        (kernel,) = document["kernels"]
        assert (kernel["variant_id"], kernel["signed_by"]) == (SPEC.variant_id, key.public.key_id)
        assert document["bundle"]["sha256"] == bundle["sha256"]
        assert not kernel.get("damage")
    for new in (True, False):
        document = as_json(run("bundle", "install", "kernels.tar", "--cache-dir", "worker", "--json"))
        assert [(kernel["new"], kernel["current"]) for kernel in document["kernels"]] == [(new, True)]
        assert document["installed"] == int(new)
    store = DiskStore(tmp_path / "worker")
    client = KernelClient(store=store, offline=True, on_miss="error", trusted_keys=key.public.text)
    assert client.obtain(SPEC, "sm_90a").tier == "disk"


def test_tables(run: Run, path: Path) -> None:
    assert "nobody" in run("bundle", "show", path).stdout
    told = run("bundle", "verify", path).stdout
    assert "1 of 1 kernel good; no keys are pinned, so no signature was checked" in told
    assert "1 of them new" in run("bundle", "install", path, "--cache-dir", "worker").stdout
    assert "0 of them new" in run("bundle", "install", path, "--cache-dir", "worker").stdout


def test_two_machines_make_the_same_bundle(run: Run, path: Path, tmp_path: Path) -> None:
    """Compiled twice, at two times, into two caches."""
    run("bundle", "create", *KIMI, "-o", "again.tar", "--cache-dir", "elsewhere")
    assert (tmp_path / "again.tar").read_bytes() == path.read_bytes()


def test_a_bundle_is_made_whole_or_not_at_all(run: Run, path: Path) -> None:
    before = path.read_bytes()
    options = ["--variant", SPEC.variant_id, "--arch", "sm_90a", "--arch", "sm_89", "-o", path]
    assert "sm_89" in run("bundle", "create", *options, exit_code=2).stderr
    assert "errors" in as_json(run("bundle", "create", *options, "--json", exit_code=2))
    assert path.read_bytes() == before


def test_a_key_that_cannot_sign_stops_before_anything_is_built(run: Run, tmp_path: Path, key: SigningKey) -> None:
    (tmp_path / "signing.pem").chmod(0o644)
    nowhere = ["--cache-dir", "nowhere"]
    told = run(
        "bundle", "create", *KIMI, *nowhere, "--sign-with", "signing.pem", "-o", "kernels.tar", exit_code=1
    ).stderr
    assert "chmod 600" in told
    assert not (tmp_path / "kernels.tar").exists()
    told = run("bundle", "create", *KIMI, *nowhere, "-o", "none/kernels.tar", exit_code=2).stderr
    assert told.startswith("error output: found a file in a folder that is not there")
    assert not (tmp_path / "nowhere").exists()


def test_damage_is_named_and_fails(run: Run, path: Path, tmp_path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(b"\x7fELF") + 100] ^= 1
    path.write_bytes(content)
    assert "kernel.cubin: " in run("bundle", "verify", path, exit_code=1).stderr
    (kernel,) = as_json(run("bundle", "verify", path, "--json", exit_code=1))["kernels"]
    assert kernel["member"].endswith("/kernel.cubin")
    error = as_json(run("bundle", "install", path, "--cache-dir", "worker", "--json", exit_code=1))["error"]
    assert (error["type"], "kernel.cubin" in error["message"]) == ("BundleError", True)
    assert list(DiskStore(tmp_path / "worker").list()) == []
    path.write_bytes(content[:-1])
    for command in ("verify", "show", "install"):
        assert "is cut short" in run("bundle", command, path, exit_code=1).stderr


def test_pins_are_asked_for_by_verify_and_install(
    run: Run, path: Path, tmp_path: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLAPREP_TRUSTED_KEYS", key.public.text)
    refused = run("bundle", "verify", path, exit_code=1)
    assert "no signature" in refused.stderr
    assert "untrusted" in refused.stdout
    assert "damaged" not in refused.stdout + refused.stderr
    assert "manifest.json" in run("bundle", "install", path, "--cache-dir", "worker", exit_code=1).stderr
    assert list(DiskStore(tmp_path / "worker").list()) == []
    run("bundle", "create", *KIMI, "--sign-with", "signing.pem", "-o", "signed.tar")
    assert "signatures checked" in run("bundle", "verify", "signed.tar").stdout
    run("bundle", "install", "signed.tar", "--cache-dir", "worker")
    Path("open.pem").write_bytes(Path("signing.pem").read_bytes())
    Path("open.pem").chmod(0o644)
    told = run("bundle", "create", *KIMI, "--sign-with", "open.pem", "-o", "kernels.tar", exit_code=1).stderr
    assert "--sign-with open.pem: found a private key of mode 0644" in " ".join(told.split())
    monkeypatch.setenv("MLAPREP_TRUSTED_KEYS", "")
    for command in ("verify", "install"):
        assert "MLAPREP_TRUSTED_KEYS" in run("bundle", command, "signed.tar", exit_code=2).stderr


def test_B043_no_bundle_command_opens_a_socket(
    run: Run, path: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named service and all: offline means offline, from a warm cache and for what has to be compiled."""
    monkeypatch.setenv("MLAPREP_OFFLINE", "1")
    monkeypatch.setenv("MLAPREP_URL", "http://kernels.test:8400")
    cold = ["--preset", "kimi-k3", "--tp", "4", "--arch", "sm_90a"]
    with no_network.forbidden() as tried:
        for options in (KIMI, cold):
            run("bundle", "create", *options, "--sign-with", "signing.pem", "-o", "kernels.tar")
        run("bundle", "show", "kernels.tar")
        run("bundle", "verify", "kernels.tar")
        run("bundle", "install", "kernels.tar", "--cache-dir", "worker")
        run("keys", "show", "signing.pem")
    assert tried == []


def test_B043_no_tier_opens_a_socket(run: Run, path: Path, key: SigningKey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory, disk, bundle and compile, with a service named and keys pinned; a kernel that is nowhere is an error."""
    run("bundle", "create", *KIMI, "--sign-with", "signing.pem", "-o", "kernels.tar")
    run("bundle", "install", "kernels.tar", "--cache-dir", "worker")
    monkeypatch.setenv("MLAPREP_OFFLINE", "1")
    monkeypatch.setenv("MLAPREP_URL", "http://kernels.test:8400")
    monkeypatch.setenv("MLAPREP_TRUSTED_KEYS", key.public.text)
    monkeypatch.setenv("MLAPREP_BUNDLE", str(path))
    from mlaprep.clients.errors import KernelUnavailable

    with no_network.forbidden() as tried:
        tiers = []
        for cache in ("worker", "empty"):
            monkeypatch.setenv("MLAPREP_CACHE_DIR", os.path.abspath(cache))
            with KernelClient(on_miss="error") as client:
                tiers += [client.obtain(SPEC, "sm_90a").tier, client.obtain(SPEC, "sm_90a").tier]
                with pytest.raises(KernelUnavailable, match="offline"):
                    client.obtain(preset("kimi-k3").spec(2), "sm_90a")
        with KernelClient() as client:
            tiers.append(client.obtain(preset("kimi-k3").spec(2), "sm_90a").tier)
    assert tiers == ["disk", "memory", "bundle", "memory", "compiled"]
    assert tried == []
