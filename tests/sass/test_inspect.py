"""Taking a kernel apart: what is read off the cubin, what nvdisasm says, and how two builds differ."""

import json
import os
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.elf import cubin_target, read_sections
from mlaprep.kernels_cache.errors import ArtifactError
from mlaprep.service import disassembler
from mlaprep.service.compiler import Compiler
from mlaprep.service.cubin import read_kernel
from mlaprep.service.disassembler import disassemble, find_nvdisasm, nvdisasm_version
from mlaprep.service.errors import DisassemblerUnavailable, DisassemblyFailed, InspectError
from mlaprep.service.inspect import arch_of, diff, inspect, inspect_all, inspect_cubin, resources, sass
from mlaprep.service.sass import Instruction, Listing
from mlaprep.templates.arch import ARCHS, Arch
from mlaprep.templates.render import check_target, render
from mlaprep.templates.spec import KernelSpec

HOPPER, BLACKWELL = Arch("sm_90a"), Arch("sm_100a")
PLAIN = KernelSpec(num_heads=12)
DIVIDES = KernelSpec(num_heads=12, layout="ds_mla")


@pytest.fixture(scope="module")
def artifacts(compiler: Compiler) -> dict[tuple[KernelSpec, Arch], KernelArtifact]:
    wanted = [(spec, arch) for spec in (PLAIN, DIVIDES) for arch in (HOPPER, BLACKWELL)]
    futures = [compiler.submit(render(spec), arch) for spec, arch in wanted]
    return {target: future.result() for target, future in zip(wanted, futures, strict=True)}


Tool = Callable[[str], Path]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Puts a script in nvdisasm's place."""

    def place(script: str) -> Path:
        path = tmp_path / "nvdisasm"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(disassembler, "_wheel_files", lambda: iter(()))
        monkeypatch.setenv("PATH", str(tmp_path))
        return path

    return place


@pytest.mark.parametrize("arch", [HOPPER, BLACKWELL], ids=str)
@pytest.mark.parametrize("spec", [PLAIN, DIVIDES], ids=["plain", "divides"])
def test_instructions_are_those_of_nvdisasm(
    spec: KernelSpec, arch: Arch, artifacts: dict[tuple[KernelSpec, Arch], KernelArtifact], tmp_path: Path
) -> None:
    artifact = artifacts[spec, arch]
    (tmp_path / "cubin").write_bytes(artifact.cubin)
    command = [str(find_nvdisasm()), "-json", str(tmp_path / "cubin")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    theirs = [item for function in json.loads(printed)[1] for item in function["sass-instructions"]]
    ours = sass(artifact).instructions
    assert [item["opcode"] for item in theirs] == [i.opcode for i in ours]
    assert [item.get("predicate", "") for item in theirs] == [i.predicate for i in ours]
    # Given a whole file, nvdisasm names functions where it shows addresses of bare code.
    for item, instruction in zip(theirs, ours, strict=True):
        if not instruction.opcode.startswith(("CALL", "RET")):
            assert item.get("operands", "").replace(" ", "") == ",".join(instruction.operands)


def test_resources_are_the_compilers(artifacts: dict[tuple[KernelSpec, Arch], KernelArtifact]) -> None:
    for artifact in artifacts.values():
        found, manifest = resources(artifact), artifact.manifest
        assert (found.registers, found.stack_bytes, found.shared_bytes) == (
            manifest.registers,
            manifest.stack_bytes,
            manifest.shared_bytes,
        )
        assert (found.spill_stores, found.spill_loads) == (manifest.spill_stores, manifest.spill_loads)
        assert 0 < 16 * found.instructions <= found.code_bytes < manifest.cubin_size
        assert sum(found.kinds.values()) == found.instructions
        assert found.kinds["global loads"] == 3
        assert found.kinds["launch order"] == 2
        assert "other memory" not in found.kinds
        assert json.loads(json.dumps(found.to_dict())) == found.to_dict()


def test_kernels_come_back_in_order(artifacts: dict[tuple[KernelSpec, Arch], KernelArtifact]) -> None:
    together = inspect_all(artifacts.values())
    assert [(each.name, each.arch) for each in together] == [(s.variant_id, a) for s, a in artifacts]
    assert together == [inspect(artifact) for artifact in artifacts.values()]
    assert inspect_all([]) == []


def test_listing_names_labels_arguments_and_functions(
    artifacts: dict[tuple[KernelSpec, Arch], KernelArtifact],
) -> None:
    text = sass(artifacts[DIVIDES, BLACKWELL]).text()
    lines = text.splitlines()
    assert lines[0] == "mla_prepare:"
    assert "\n$__internal_0_$__cuda_sm3x_div_rn_noftz_f32_slowpath:\n" in text
    assert "CALL.REL.NOINC $__internal_0_$__cuda_sm3x_div_rn_noftz_f32_slowpath\n" in text
    assert any(line.endswith("// q_nope_head_stride") for line in lines)
    assert "NOP" not in text
    labels = {line.rstrip(":") for line in lines if line.startswith(".L")}
    used = {word for line in lines for word in line.split() if word.startswith(".L") and not word.endswith(":")}
    assert used == labels


@pytest.mark.parametrize("arch", ARCHS, ids=str)
def test_every_architecture_can_be_shown(arch: Arch, compiler: Compiler) -> None:
    if arch not in compiler.archs():
        pytest.skip(f"this NVRTC does not build {arch}")
    spec = KernelSpec(num_heads=12, pdl=arch.supports_pdl)
    check_target(spec, arch)
    artifact = compiler.compile(render(spec), arch)
    assert sass(artifact).opcodes()["LDG.E.128"] == 2
    assert read_kernel(artifact.cubin).registers == artifact.manifest.registers
    assert arch_of(artifact.cubin).capability == arch.capability


def test_bare_cubins_are_told_by_their_header(artifacts: dict[tuple[KernelSpec, Arch], KernelArtifact]) -> None:
    artifact = artifacts[PLAIN, BLACKWELL]
    found = inspect_cubin(artifact.cubin, "mine.cubin")
    assert (found.name, found.arch) == ("mine.cubin", BLACKWELL)
    assert found.resources.spill_stores is None
    assert found.resources.figures() | {"spill_stores": 0, "spill_loads": 0} == resources(artifact).figures()
    assert cubin_target(artifact.cubin) == (100, ("a",))
    assert cubin_target(artifacts[PLAIN, HOPPER].cubin) == (90, ("a",))


def test_same_builds_do_not_differ(artifacts: dict[tuple[KernelSpec, Arch], KernelArtifact]) -> None:
    one = inspect(artifacts[PLAIN, HOPPER])
    assert diff(one, one).empty
    assert diff(one, one, registers=True).empty


def test_a_difference_says_what_changed(
    artifacts: dict[tuple[KernelSpec, Arch], KernelArtifact], compiler: Compiler
) -> None:
    spec = KernelSpec(num_heads=12, reserved_slot=True)
    one, other = inspect(artifacts[PLAIN, HOPPER]), inspect(compiler.compile(render(spec), HOPPER))
    found = diff(one, other)
    assert not found.empty
    assert found.figures["instructions"] == (one.resources.instructions, other.resources.instructions)
    assert "registers" not in found.figures
    for opcode, (before, after) in found.opcodes.items():
        assert (before, after) == (one.listing.opcodes()[opcode], other.listing.opcodes()[opcode])
    assert found.sass[:2] == (f"--- {PLAIN.variant_id} sm_90a", f"+++ {spec.variant_id} sm_90a")
    assert any(line.startswith("+") and "c[reserved_slot]" in line for line in found.sass)
    # An argument more moves those behind it, and a value more renumbers registers: neither is a difference.
    assert not any("c[cache_row_stride]" in line for line in found.sass if line.startswith(("+", "-")))
    assert len(diff(one, other, registers=True).sass) >= len(found.sass)
    assert diff(other, one).figures["instructions"] == found.figures["instructions"][::-1]
    assert json.loads(json.dumps(found.to_dict()))["sass"] == list(found.sass)


def test_a_unified_diff_can_be_applied(artifacts: dict[tuple[KernelSpec, Arch], KernelArtifact]) -> None:
    one, other = inspect(artifacts[PLAIN, HOPPER]), inspect(artifacts[DIVIDES, HOPPER])
    lines = diff(one, other, registers=True, context=10**6).sass[3:]
    assert [line[1:] for line in lines if line[0] in " -"] == one.listing.keys(registers=True)
    assert [line[1:] for line in lines if line[0] in " +"] == other.listing.keys(registers=True)


def test_kinds_of_instructions() -> None:
    for text, kind in {
        "LDG.E.128": "global loads",
        "STG.E.U16": "global stores",
        "LDL": "other memory",
        "LDS.128": "other memory",
        "LD.E": "other memory",
        "ATOMG.E.ADD": "other memory",
        "REDG.E.ADD": "other memory",
        "LDGSTS.E": "other memory",
        "LDC.64": "constant loads",
        "LDCU.128": "constant loads",
        "ULDC": "constant loads",
        "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C": "conversions",
        "IMAD.MOV.U32": "moves",
        "IMAD.WIDE.U32": "integer",
        "FFMA": "floating point",
        "SHFL.BFLY": "warp exchange",
        "BRA.DIV": "branches",
        "EXIT": "branches",
        "ACQBULK": "launch order",
        "REDUX.OR": "warp exchange",
        "ISETP.GE.S64.AND": "integer",
        "UIADD3.X": "integer",
        "LOP3.LUT": "integer",
        "NEVERSEEN.X": "other",
    }.items():
        assert Instruction(0, "", text, ()).kind == kind, text
    assert Instruction(0, "", "HFMA2", ("R27", "-RZ", "RZ", "0", "0")).kind == "moves"
    assert Instruction(0, "", "FFMA", ("R27", "R1", "R2", "RZ")).kind == "floating point"


def test_keys_leave_out_what_moves() -> None:
    instructions = (
        Instruction(0, "@!P0", "BRA", ("0x20",), 0x20),
        Instruction(16, "", "IADD3", ("R4", "P1", "R6.reuse", "UR4", "RZ")),
        Instruction(32, "", "LDC.64", ("R2", "c[0x0][0x218]")),
        Instruction(48, "", "EXIT", ()),
    )
    listing = Listing((), instructions, ((0x210, "q_out"), (0x218, "kv_cache")))
    assert listing.keys() == ["@!P BRA label", "IADD3 R, P, R, UR, RZ", "LDC.64 R, c[kv_cache]", "EXIT"]
    assert listing.keys(registers=True)[1] == "IADD3 R4, P1, R6, UR4, RZ"


def test_damaged_cubins_are_refused(artifacts: dict[tuple[KernelSpec, Arch], KernelArtifact]) -> None:
    cubin = artifacts[PLAIN, HOPPER].cubin
    with pytest.raises(ArtifactError, match="no kernel other"):
        read_kernel(cubin, "other")
    for broken in (b"", b"\x7fELF", cubin[:-1], cubin[: len(cubin) // 2], cubin + b"\0"):
        with pytest.raises(ArtifactError):
            read_kernel(broken)
    # Whatever a flipped byte does, it ends in a kernel or in the one error.
    generator = random.Random(7)
    for _ in range(600):
        at = generator.randrange(len(cubin))
        broken = cubin[:at] + bytes([cubin[at] ^ 1 << generator.randrange(8)]) + cubin[at + 1 :]
        try:
            read_kernel(broken)
        except ArtifactError:
            continue


def test_sections_have_names_and_bytes(artifacts: dict[tuple[KernelSpec, Arch], KernelArtifact]) -> None:
    sections = {section.name: section for section in read_sections(artifacts[PLAIN, BLACKWELL].cubin)}
    code = sections[".text.mla_prepare"]
    assert len(code.data) == code.size > 0
    assert sections[".nv.shared.reserved.0"].data == b""


def test_a_missing_nvdisasm_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disassembler, "_wheel_files", lambda: iter(()))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DisassemblerUnavailable, match=r"nvdisasm is not installed; install mlaprep\[inspect\]"):
        disassemble([bytes(16)], HOPPER)
    assert disassemble([], HOPPER) == ()


def test_nvdisasm_on_the_path_is_found(tool: Tool) -> None:
    path = tool("echo 'Cuda compilation tools, release 13.1, V13.1.80'")
    assert find_nvdisasm() == path
    assert nvdisasm_version() == "13.1.80"


def test_the_wheels_nvdisasm_comes_first(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    on_path = tool("true")
    monkeypatch.undo()
    monkeypatch.setenv("PATH", f"{on_path.parent}:{os.environ['PATH']}")
    try:
        assert find_nvdisasm() != on_path
    except DisassemblerUnavailable:
        pytest.skip("the wheel is not installed")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'nvdisasm fatal : Unknown option json' >&2; exit 1", "Unknown option json"),
        ("exit 3", "exit status 3"),
        ("echo not json", "cannot be read"),
        ("echo '[1]'", "cannot be read"),
        ("echo '[{}, [{\"sass-instructions\": [{}]}]]'", "cannot be read"),
        ("echo '[{}, [{\"sass-instructions\": []}]]'", "cannot be read"),
        ("echo '[{}, 7]'", "cannot be read"),
    ],
)
def test_a_useless_nvdisasm_is_an_error(tool: Tool, script: str, message: str) -> None:
    tool(script)
    with pytest.raises(DisassemblyFailed, match=message):
        disassemble([bytes(16)], HOPPER)


def test_a_hung_nvdisasm_is_killed(tool: Tool) -> None:
    tool("exec /bin/sleep 60")
    started = time.monotonic()
    with pytest.raises(DisassemblyFailed, match=r"deadline of 0\.3 s"):
        disassemble([bytes(16)], HOPPER, timeout_s=0.3)
    assert time.monotonic() - started < 20


def test_nvdisasm_runs_in_a_folder_of_its_own(tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVICE", "1")
    tool(
        f"pwd > {tmp_path}/folder; /usr/bin/env > {tmp_path}/env; ls > {tmp_path}/files; exit 1".replace(
            "ls ", "/bin/ls "
        )
    )
    with pytest.raises(InspectError):
        disassemble([bytes(16)], HOPPER)
    assert not Path((tmp_path / "folder").read_text().strip()).exists()
    assert (tmp_path / "files").read_text().split() == ["code"]
    assert "SECRET_OF_THE_SERVICE" not in (tmp_path / "env").read_text()


def test_code_that_is_none_is_refused(compiler: Compiler) -> None:
    with pytest.raises(DisassemblyFailed, match="refused"):
        disassemble([bytes(64)], HOPPER)
