"""The caching page lists every input of a key, every variable, every counter and every reason."""

import dataclasses
import re
from pathlib import Path

from mlaprep.kernels_cache.key import CacheKey
from mlaprep.kernels_cache.store import StoreStats

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "caching.md").read_text()
CODE = {path.name: path.read_text() for path in (ROOT / "kernels_cache").glob("*.py")}


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_cells(text: str) -> set[str]:
    rows = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_B035_every_input_of_a_key_is_documented() -> None:
    inputs = {field.name for field in dataclasses.fields(CacheKey)}
    assert first_cells(section("What enters a key")) == inputs | {"schema"}


def test_every_variable_is_documented() -> None:
    read = set(re.findall(r'environ\.get\("(\w+)"', "".join(CODE.values())))
    assert {name for name in first_cells(section("On disk")) if name.isupper()} == read


def test_every_counter_is_documented() -> None:
    assert first_cells(section("Counters")) == {field.name for field in dataclasses.fields(StoreStats)}


def test_every_reason_is_documented() -> None:
    raised = set(re.findall(r'ArtifactError\(\s*"([a-z-]+)"', "".join(CODE.values())))
    assert raised == {name for name in raised if f"`{name}`" in section("What is checked on every read")}
    assert len(raised) > 10
