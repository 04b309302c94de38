"""Documents that drift from the code fail the build."""

import ast
import dataclasses
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def documents(root: Path) -> list[Path]:
    return [
        *sorted(root.glob("*.md")),
        *sorted((root / "docs").rglob("*.md")),
        *sorted((root / "examples").glob("*.md")),
    ]


def anchors(text: str) -> set[str]:
    """The anchors that a forge makes of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(text: str) -> Iterator[str]:
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    yield from re.findall(r"\]\(([^)\s]+)\)", plain)


def test_every_relative_link_leads_somewhere(root: Path) -> None:
    dead = []
    for document in documents(root):
        for link in links(document.read_text()):
            if "://" in link or link.startswith("mailto:"):
                continue
            path, _, anchor = link.partition("#")
            target = (document.parent / path).resolve() if path else document
            if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
                dead.append(f"{document.relative_to(root)}: {link}")
    assert not dead, "\n".join(dead)


def test_every_page_is_in_the_index(root: Path) -> None:
    listed = {link.partition("#")[0] for link in links((root / "docs" / "index.md").read_text())}
    pages = {page.relative_to(root / "docs").as_posix() for page in (root / "docs").rglob("*.md")} - {"index.md"}
    assert pages <= listed


def test_make_targets_in_documents_exist(root: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    assert {"setup", "demo", "test", "check", "serve", "bench"} <= targets
    for document in documents(root):
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", document.read_text(), re.MULTILINE))
        assert named <= targets, document.name


def test_readme_names_the_two_commands(root: Path) -> None:
    text = (root / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


def test_commands_in_documents_exist(root: Path) -> None:
    import typer.main

    from mlaprep.clients.cli import app

    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for document in documents(root):
        text = document.read_text()
        code = "\n".join([*re.findall(r"```\n(.*?)```", text, re.DOTALL), *re.findall(r"`([^`\n]+)`", text)])
        named = set(re.findall(r"^(?:\$ )?mlaprep ([a-z-]+)\b", code, re.MULTILINE))
        assert named <= commands, document.name


def test_settings_in_code_are_documented(root: Path) -> None:
    code = "".join(
        path.read_text()
        for room in ("templates", "kernels_cache", "service", "clients")
        for path in (root / room).rglob("*.py")
    )
    read = set(re.findall(r"\bMLAPREP_[A-Z][A-Z_]+[A-Z]\b", code))
    documented = set(re.findall(r"\bMLAPREP_[A-Z][A-Z_]+[A-Z]\b", (root / "docs" / "settings.md").read_text()))
    assert read <= documented


def test_every_error_class_is_documented(root: Path) -> None:
    from mlaprep.kernels_cache.errors import CacheError
    from mlaprep.templates.errors import MlaprepError

    for module in ("clients.demo", "clients.errors", "service.errors"):
        importlib.import_module(f"mlaprep.{module}")

    def tree(kind: type) -> Iterator[str]:
        if kind.__module__.startswith("mlaprep."):
            yield kind.__name__
        for child in kind.__subclasses__():
            yield from tree(child)

    page = (root / "docs" / "errors.md").read_text()
    names = {*tree(MlaprepError), *tree(CacheError)}
    assert {name for name in names if not re.search(rf"\b{name}\b", page)} == set()
    listed = set(re.findall(r"^[│ ]*[├└]── (\w+)|^(\w+Error)\b", page, re.MULTILINE))
    assert {name for pair in listed for name in pair if name} <= names


def test_problem_types_are_documented(root: Path) -> None:
    used = set()
    for path in (root / "service").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("ProblemError", "invalid_fields"):
                used |= {argument.value for argument in node.args[1:2] if isinstance(argument, ast.Constant)}
    assert used, "no problem found in the service"
    page = (root / "docs" / "errors.md").read_text()
    assert {slug for slug in used if f"`{slug}`" not in page} == set()


def test_every_input_of_a_key_is_documented(root: Path) -> None:
    from mlaprep.kernels_cache.key import CacheKey

    page = (root / "docs" / "caching.md").read_text()
    section = page.partition("## What enters a key\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert set(rows) == {"schema", *(field.name for field in dataclasses.fields(CacheKey))}


def test_generated_parts_are_current(root: Path) -> None:
    command = [sys.executable, str(root / "docs" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
