"""The page on writing a kernel says what the checks hold kernels to, and quotes code that is there."""

import re
from pathlib import Path

import pytest
from sass.checks import BUDGETS, CHECKS
from sass.kernel_check import parse
from sass.variants import ARCHS


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "writing-a-kernel.md").read_text()


def test_budgets_are_documented(page: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert {row[0]: tuple(map(int, row[1:])) for row in rows} == {
        rotation: (*plain, *scaled) for rotation, (plain, scaled) in BUDGETS.items()
    }


def test_checks_and_architectures_are_documented(page: str) -> None:
    table = page.partition("| check | holds a kernel to |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| ([a-z ]+) \|", table, re.MULTILINE) == list(CHECKS)
    assert [f"`{arch}`" for arch in ARCHS if f"`{arch}`" not in page] == []


def test_quoted_code_is_in_the_files_named_before_it(page: str, root: Path) -> None:
    quotes = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    assert len(quotes) >= 8
    before = re.split(r"```diff\n.*?```", page, flags=re.DOTALL)
    named: list[str] = []
    for prose, quote in zip(before, quotes, strict=False):
        # A quote is from a file that its own section names, the last one first.
        section = prose.rpartition("\n### ")[2] if "\n### " in prose else prose
        files = re.findall(r"`((?:templates|clients|tests)/[\w/.]+\.(?:py|j2))`", section)
        named = files if "\n### " in prose else [*named, *files]
        texts = [(root / file).read_text() for file in named]
        for line in quote.splitlines():
            assert any(line.removeprefix("+") in text for text in texts), f"{line!r} is in none of {named}"


def test_templates_are_documented(page: str, root: Path) -> None:
    assert {path.name for path in (root / "templates").glob("*.j2")} == set(
        re.findall(r"^\| `templates/([\w.]+\.j2)` \|", page, re.MULTILINE)
    )


def test_options_of_kernel_check_exist(page: str) -> None:
    for arguments in re.findall(r"ARGS='?(--[^'`\n]+)", page):
        parse(arguments.split())
