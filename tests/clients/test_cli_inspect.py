"""``--sass``, ``--resources``, ``--diff`` and ``--save`` of ``render`` and ``compile``."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mlaprep.clients.cli import app
from mlaprep.clients.saved import read_beside, read_build
from mlaprep.kernels_cache.errors import ArtifactError
from mlaprep.service import disassembler
from mlaprep.service.disassembler import find_nvdisasm
from mlaprep.service.errors import DisassemblerUnavailable
from mlaprep.templates.presets import PRESETS
from mlaprep.templates.spec import KernelSpec

PLAIN = KernelSpec(num_heads=12).variant_id
RESERVED = KernelSpec(num_heads=12, reserved_slot=True).variant_id
HOPPER = ("--arch", "sm_90a")
Run = Callable[..., Result]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for the whole module, so that each kernel is compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("MLAPREP_CACHE_DIR", str(cache))
    monkeypatch.setenv("COLUMNS", "80")

    def invoke(*arguments: str, exit_code: int = 0) -> Result:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == exit_code, (result.output, result.exception)
        assert "Traceback" not in result.output
        return result

    return invoke


@pytest.fixture
def saved(run: Run, tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    run("compile", "--variant", PLAIN, *HOPPER, "--arch", "sm_100a", "--save", str(folder), "--json")
    return folder


@pytest.fixture(autouse=True)
def _nvdisasm() -> None:
    try:
        find_nvdisasm()
    except DisassemblerUnavailable as error:
        pytest.skip(str(error))


def test_compile_shows_machine_code_and_resources(run: Run) -> None:
    result = run("compile", "--variant", PLAIN, *HOPPER, "--arch", "sm_100a", "--sass", "--resources")
    assert f"// {PLAIN} sm_90a\nmla_prepare:\n" in result.stdout
    assert f"// {PLAIN} sm_100a\nmla_prepare:\n" in result.stdout
    assert "LDG.E.128" in result.stdout
    rows = {line[:18].strip(): line[18:].split() for line in result.stdout.splitlines() if line[:18].strip()}
    assert rows["registers"] == ["22", "22"]
    assert rows["spill loads"] == ["0", "0"]
    assert rows["· global stores"] == ["1", "1"]


def test_json_is_one_document(run: Run) -> None:
    document = json.loads(run("compile", "--variant", PLAIN, *HOPPER, "--sass", "--resources", "--json").stdout)
    (seen,) = document["inspections"]
    assert (seen["variant_id"], seen["arch"]) == (PLAIN, "sm_90a")
    assert seen["resources"]["registers"] == document["kernels"][0]["registers"]
    assert seen["sass"].startswith("mla_prepare:\n")
    assert "diff" not in seen
    assert "inspections" not in json.loads(run("compile", "--variant", PLAIN, *HOPPER, "--json").stdout)


def test_a_variant_is_compared_with_another(run: Run) -> None:
    result = run("compile", "--variant", RESERVED, *HOPPER, "--diff", PLAIN)
    assert f"{RESERVED} sm_90a, since {PLAIN} sm_90a:" in result.stdout
    assert "+ULDC.64 UR6, c[reserved_slot]" in result.stdout
    document = json.loads(run("compile", "--variant", RESERVED, *HOPPER, "--diff", PLAIN, "--json").stdout)
    found = document["inspections"][0]["diff"]
    assert found["figures"]["instructions"][0] < found["figures"]["instructions"][1]
    # A name as tables show it will do, and the prefix is no part of it.
    short = PLAIN.removeprefix("mla_prepare-")
    again = json.loads(run("compile", "--variant", RESERVED, *HOPPER, "--diff", short, "--json").stdout)
    assert again["inspections"][0]["diff"] == found


def test_a_saved_build_is_compared_kernel_by_kernel(run: Run, saved: Path) -> None:
    assert len(list(saved.iterdir())) == 6
    same = run("compile", "--variant", PLAIN, *HOPPER, "--arch", "sm_100a", "--diff", str(saved)).stdout
    assert f"{PLAIN} sm_90a: the same as {PLAIN} sm_90a" in same
    assert f"{PLAIN} sm_100a: the same as {PLAIN} sm_100a" in same
    other = json.loads(run("compile", "--variant", RESERVED, "--arch", "all", "--diff", str(saved), "--json").stdout)
    sides = {seen["arch"]: seen["diff"] and seen["diff"]["one"] for seen in other["inspections"]}
    assert sides == {
        "sm_90a": f"{PLAIN} sm_90a",
        "sm_100a": f"{PLAIN} sm_100a",
        "sm_103a": None,
        "sm_120a": None,
        "sm_121a": None,
    }


def test_saving_over_what_is_compared_with_keeps_the_comparison(run: Run, saved: Path) -> None:
    arguments = ("compile", "--variant", PLAIN, *HOPPER, "--diff", str(saved), "--save", str(saved), "--json")
    document = json.loads(run(*arguments).stdout)
    assert document["inspections"][0]["diff"]["sass"] == []
    assert Path(document["files"][document["kernels"][0]["key"]]["cubin"]).is_file()


def test_cubins_and_cache_entries_are_compared(run: Run, saved: Path, tmp_path: Path, cache: Path) -> None:
    cubin = next(saved.glob("*.sm_90a.cubin"))
    named = json.loads(run("compile", "--variant", RESERVED, *HOPPER, "--diff", str(cubin), "--json").stdout)
    assert named["inspections"][0]["diff"]["one"] == f"{PLAIN} sm_90a"
    bare = tmp_path / "bare.cubin"
    bare.write_bytes(cubin.read_bytes())
    alone = json.loads(run("compile", "--variant", RESERVED, *HOPPER, "--diff", str(bare), "--json").stdout)
    found = alone["inspections"][0]["diff"]
    assert found["one"] == "bare.cubin sm_90a"
    assert "spill_stores" not in found["figures"]
    assert json.loads(run("compile", "--variant", PLAIN, *HOPPER, "--diff", str(bare), "--json").stdout)["inspections"][
        0
    ]["diff"] == {"one": "bare.cubin sm_90a", "other": f"{PLAIN} sm_90a", "figures": {}, "opcodes": {}, "sass": []}
    entry = next(manifest.parent for manifest in cache.rglob("manifest.json"))
    assert read_build(entry)[0].manifest.variant_id in (PLAIN, RESERVED)


def test_render_shows_how_a_source_differs_without_a_compiler(run: Run) -> None:
    lines = run("render", "--variant", RESERVED, "--diff", PLAIN).stdout.splitlines()
    assert lines[:2] == [f"--- {PLAIN}", f"+++ {RESERVED}"]
    assert "+  if (slot == reserved_slot) return -1;" in lines
    assert run("render", "--variant", PLAIN, "--diff", PLAIN).stdout == "the sources are the same\n"
    document = json.loads(run("render", "--variant", RESERVED, "--diff", PLAIN, "--json").stdout)
    assert document["diff"] == lines
    assert document["source"].startswith(f"// {RESERVED}")
    assert "inspections" not in document


def test_render_shows_machine_code(run: Run, saved: Path) -> None:
    result = run("render", "--variant", PLAIN, "--sass")
    assert result.stdout.startswith(f"// {PLAIN} sm_90a\nmla_prepare:\n")
    assert "#include" not in result.stdout
    document = json.loads(
        run(
            "render", "--variant", RESERVED, "--arch", "sm_120a", "--resources", "--diff", str(saved), "--json",
            exit_code=2,
        ).stdout
    )  # fmt: skip
    assert document["error"]["problems"][0]["field"] == "diff"
    document = json.loads(run("render", "--variant", RESERVED, "--resources", "--diff", PLAIN, "--json").stdout)
    assert document["inspections"][0]["diff"]["sass"]
    assert document["inspections"][0]["resources"]["registers"] > 0


@pytest.mark.parametrize("command", ["render", "compile"])
def test_another_side_that_is_none_is_refused(command: str, run: Run, tmp_path: Path) -> None:
    arguments = ("--variant", PLAIN, *HOPPER, "--diff")
    result = run(command, *arguments, "no-such-thing", "--json", exit_code=2)
    assert json.loads(result.stdout)["error"]["problems"][0]["field"] == "diff"
    empty = tmp_path / "empty"
    empty.mkdir()
    run(command, *arguments, str(empty), exit_code=1)
    noise = tmp_path / "noise.cubin"
    noise.write_bytes(b"\x7fELF" + bytes(100))
    assert run(command, *arguments, str(noise), exit_code=1 if command == "compile" else 2).stdout.count("\n") <= 1


def test_damaged_builds_are_refused(run: Run, saved: Path) -> None:
    cubin = next(saved.glob("*.sm_90a.cubin"))
    cubin.write_bytes(cubin.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ArtifactError):
        read_beside(cubin)
    with pytest.raises(ArtifactError):
        read_build(saved)
    run("compile", "--variant", PLAIN, *HOPPER, "--diff", str(saved), exit_code=1)


def test_without_nvdisasm_the_exit_code_says_elsewhere(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(disassembler, "_wheel_files", lambda: iter(()))
    monkeypatch.setenv("PATH", str(tmp_path))
    for command in ("compile", "render"):
        result = run(command, "--variant", PLAIN, *HOPPER, "--resources", exit_code=3)
        assert "mlaprep[inspect]" in result.stderr
    run("compile", "--variant", PLAIN, *HOPPER)


def test_all_stands_for_every_degree_and_target(run: Run) -> None:
    document = json.loads(run("compile", "--preset", "minicpm3-4b", "--tp", "all", "--arch", "all", "--json").stdout)
    assert len(document["kernels"]) == 5 * len(PRESETS["minicpm3-4b"].tp_degrees)
    assert {kernel["arch"] for kernel in document["kernels"]} == {"sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a"}
    assert all(kernel["spill_stores"] == kernel["stack_bytes"] == 0 for kernel in document["kernels"])
    for wrong in ("many", "-1", "99999", "3"):
        run("compile", "--preset", "minicpm3-4b", "--tp", wrong, exit_code=2)
