"""`make kernel-check`: says what a change to a template does, and fails where it breaks something."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path

import jinja2
import pytest
from sass import kernel_check

from mlaprep.service.compiler import Compiler
from mlaprep.templates.render import KernelSource, render
from mlaprep.templates.spec import KernelSpec

Run = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def _one_compiler(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_check, "Compiler", lambda: contextlib.nullcontext(compiler))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def check(*more: str) -> tuple[int, str]:
        said: list[str] = []
        arguments = ["--folder", str(tmp_path), "--arch", "sm_90a", "--kind", "interleaved", "--no-bytes", *more]
        return kernel_check.main(arguments, said.append), "\n".join(said)

    return check


def changed(old: str, new: str) -> Callable[[KernelSpec], KernelSource]:
    def render_changed(spec: KernelSpec) -> KernelSource:
        source = render(spec)
        assert old in source.text
        return dataclasses.replace(source, text=source.text.replace(old, new))

    return render_changed


def test_a_change_is_shown_until_it_is_saved(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = run()
    assert (code, "1 kernels saved" in said) == (0, True)
    code, said = run()
    assert (code, "0 of 1 kernels changed" in said) == (0, True)
    assert " → " not in said
    monkeypatch.setattr(kernel_check, "render", changed("position < 0 ? 0 :", ""))
    code, said = run("--lines", "0")
    assert (code, "1 of 1 kernels changed" in said) == (0, True)
    assert " → " in said
    assert "\n@@ -" in said
    code, again = run("--lines", "4", "--save")
    assert (code, "1 kernels saved" in again, " → " in again) == (0, True, True)
    assert len(again) < len(said)
    assert "0 of 1 kernels changed" in run()[1]


def test_a_fault_of_the_machine_code_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_check, "render", changed("ld.global.v4.u32", "ld.global.nc.v4.u32"))
    code, said = run()
    assert code == 1
    assert "coherence: LDG.E.128.CONSTANT" in said
    assert "WRONG" in said


def test_what_does_not_compile_or_render_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_check, "render", changed("release_dependents();\n\n", "release_nobody();\n\n"))
    code, said = run()
    assert (code, "release_nobody" in said, "CompileFailed" in said) == (1, True, True)

    def undefined(spec: KernelSpec) -> KernelSource:
        raise jinja2.UndefinedError("'kernel_spec object' has no attribute 'rope_style'")

    monkeypatch.setattr(kernel_check, "render", undefined)
    code, said = run()
    assert (code, "rope_style" in said) == (1, True)


def test_wrong_bytes_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = tmp_path / "test_bytes.py"
    failing.write_text("def test_bytes():\n    assert bytes([0x7e]) == bytes([0x7f])\n")
    monkeypatch.setattr(kernel_check, "BYTES", ["-c", "/dev/null", str(failing)])
    said: list[str] = []
    arguments = ["--folder", str(tmp_path / "saved"), "--arch", "sm_90a", "--kind", "plain"]
    assert kernel_check.main(arguments, said.append) == 1
    assert "1 failed" in "\n".join(said)


def test_the_bytes_it_tries_exist(root: Path) -> None:
    assert Path(kernel_check.BYTES[-1]).is_dir()
    tests = "\n".join(path.read_text() for path in (root / "tests" / "kernel").glob("test_*.py"))
    assert tests.count("every_input_pattern") >= 3
