"""``mlaprep diff`` and ``mlaprep verify-build``."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mlaprep.clients.cli import app
from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.key import cache_key
from mlaprep.service.disassembler import find_nvdisasm
from mlaprep.service.errors import DisassemblerUnavailable
from mlaprep.templates.spec import KernelSpec

PLAIN = KernelSpec(num_heads=12).variant_id
RESERVED = KernelSpec(num_heads=12, reserved_slot=True).variant_id
Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("MLAPREP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")

    def invoke(*arguments: str, exit_code: int = 0) -> Result:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == exit_code, (result.output, result.exception)
        assert "Traceback" not in result.output
        return result

    return invoke


@pytest.fixture
def store(run: Run, tmp_path: Path) -> DiskStore:
    """Two kernels for sm_90a."""
    run("compile", "--variant", PLAIN, "--variant", RESERVED, "--arch", "sm_90a", "--json")
    return DiskStore(tmp_path / "cache")


def kernel(store: DiskStore, variant_id: str) -> KernelArtifact:
    (key,) = (manifest.key for manifest in store.list() if manifest.variant_id == variant_id)
    artifact = store.get(key)
    assert artifact is not None
    return artifact


def altered(store: DiskStore, version: str | None = None) -> KernelArtifact:
    """The plain kernel with the code of the other: whole, sealed, and not what its inputs give."""
    plain, other = kernel(store, PLAIN), kernel(store, RESERVED)
    version = version or plain.manifest.nvrtc_version
    key = cache_key(source=plain.source, options=plain.manifest.options, arch="sm_90a", nvrtc_version=version)
    manifest = dataclasses.replace(
        plain.manifest, key=key, nvrtc_version=version, cubin_sha256=other.digest, cubin_size=len(other.cubin)
    )
    artifact = KernelArtifact(manifest, other.cubin, plain.source)
    store.delete(key)
    store.publish(artifact)
    return artifact


def outcomes(result: Result) -> dict[str, str]:
    return {each["key"]: each["outcome"] for each in json.loads(result.stdout)["kernels"]}


def test_what_was_just_built_is_the_same_again(run: Run, store: DiskStore) -> None:
    before = {path: path.stat().st_mtime_ns for path in store.root.rglob("*") if path.is_file()}
    assert "2 kernels" in run("verify-build").stdout
    document = json.loads(run("verify-build", "--variant", PLAIN, "--strict", "--json").stdout)
    assert document["counts"] == {"same": 1}
    assert {path: path.stat().st_mtime_ns for path in before} == before
    (seen,) = document["kernels"]
    assert (seen["variant_id"], seen["reasons"]) == (PLAIN, [])
    assert seen["digest"] == seen["rebuilt"] == kernel(store, PLAIN).digest


def test_other_bytes_from_the_same_inputs_fail(run: Run, store: DiskStore) -> None:
    wrong = altered(store)
    result = run("verify-build", "--json", exit_code=1)
    assert outcomes(result)[wrong.key] == "differs"
    assert sorted(outcomes(result).values()) == ["differs", "same"]
    assert "DIFFERS" in run("verify-build", exit_code=1).stdout
    run("verify-build", "--variant", RESERVED)


def test_another_compiler_explains_other_bytes_unless_strict(run: Run, store: DiskStore) -> None:
    older = altered(store, "12.1.55")
    result = run("verify-build", "--json")
    assert outcomes(result)[older.key] == "explained"
    (seen,) = (each for each in json.loads(result.stdout)["kernels"] if each["key"] == older.key)
    assert seen["reasons"][0].startswith("NVRTC 12.1.55, here ")
    run("verify-build", "--strict", exit_code=1)


def test_damage_is_told_and_left_where_it_is(run: Run, store: DiskStore) -> None:
    (cubin,) = store.root.glob(f"sm_90a/*/{kernel(store, PLAIN).key}/kernel.cubin")
    content = bytearray(cubin.read_bytes())
    content[200] ^= 1
    cubin.write_bytes(content)
    result = run("verify-build", "--json", exit_code=1)
    assert sorted(outcomes(result).values()) == ["damaged", "same"]
    assert cubin.read_bytes() == content


def test_nothing_to_verify_is_no_success_where_kernels_were_named(run: Run, tmp_path: Path) -> None:
    assert "0 kernels" in run("verify-build").stdout
    run("verify-build", "--variant", PLAIN, "--json", exit_code=3)
    run("verify-build", "--tp", "8", exit_code=2)
    assert not (tmp_path / "cache").exists()


def test_two_kernels_of_the_cache_are_compared(run: Run, store: DiskStore) -> None:
    try:
        find_nvdisasm()
    except DisassemblerUnavailable as error:
        pytest.skip(str(error))
    found = json.loads(run("diff", PLAIN, kernel(store, RESERVED).key[:12], "--json").stdout)
    assert (found["from"]["variant_id"], found["to"]["variant_id"]) == (PLAIN, RESERVED)
    assert found["figures"]["instructions"][0] < found["figures"]["instructions"][1]
    shown = run("diff", PLAIN, RESERVED).stdout
    assert f"{RESERVED} sm_90a, since {PLAIN} sm_90a:" in shown
    assert "+ULDC.64 UR6, c[reserved_slot]" in shown
    run("diff", PLAIN, "0000000000", exit_code=3)
    run("compile", "--variant", PLAIN, "--arch", "sm_100a", "--json")
    assert "--arch" in run("diff", PLAIN, RESERVED, exit_code=2).output
