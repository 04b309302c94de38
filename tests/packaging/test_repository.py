"""The tree itself: what must be there, and what must not leak into it."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

MACHINE_PATH = re.compile(r"(?<![\w.$}/-])/(?:home|Users|work|mnt|workspace)/\w")
CREDENTIAL = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----|\bgh[pousr]_[A-Za-z0-9]{30,}|\bAKIA[A-Z0-9]{16}\b")
TOP_LEVEL = {
    ".ci", ".dockerignore", ".gitignore", "benchmarks", "CHANGELOG.md", "clients", "CONTRIBUTING.md", "deploy",
    "Dockerfile", "docs", "examples", "kernels_cache", "LICENSE", "Makefile", "pyproject.toml", "README.md",
    "requirements.lock", "service", "templates", "tests",
}  # fmt: skip


@pytest.fixture(scope="module")
def tracked(root: Path) -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    return [path for name in listing.split("\0") if name and (path := root / name).is_file() and not path.is_symlink()]


def test_top_level_is_the_agreed_one(root: Path, tracked: list[Path]) -> None:
    assert {path.relative_to(root).parts[0] for path in tracked} <= TOP_LEVEL


def test_no_machine_path_and_no_credential(root: Path, tracked: list[Path]) -> None:
    leaks = []
    for path in tracked:
        text = path.read_bytes().decode(errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            if MACHINE_PATH.search(line) or CREDENTIAL.search(line) or str(root) in line:
                leaks.append(f"{path.relative_to(root)}:{number}: {line.strip()[:120]}")
    assert not leaks, "\n".join(leaks)


def test_no_binary_and_nothing_large(root: Path, tracked: list[Path]) -> None:
    large = [path.relative_to(root) for path in tracked if path.stat().st_size > 512 * 1024]
    binary = {path.relative_to(root) for path in tracked if b"\0" in path.read_bytes()[:4096]}
    pictures = (Path("docs/benchmarks"), Path("docs/images"))
    shown = {path for path in binary if path.parent in pictures and path.suffix == ".png"}
    assert (large, binary - shown) == ([], set())


def test_modules_hold_one_noun(root: Path, tracked: list[Path]) -> None:
    rooms = ("templates", "kernels_cache", "service", "clients")
    code = [path for path in tracked if path.suffix == ".py" and path.relative_to(root).parts[0] in rooms]
    written = {path: text for path in code if "do not edit" not in (text := path.read_text()).partition("\n")[0]}
    assert {str(path.relative_to(root)) for path, text in written.items() if len(text.splitlines()) > 500} == set()


def test_licence_is_apache_2(root: Path) -> None:
    text = (root / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert tomllib.loads((root / "pyproject.toml").read_text())["project"]["license"] == "Apache-2.0"


def test_changelog_speaks_of_this_version(root: Path) -> None:
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    headings = re.findall(r"^## (.+)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings
    assert headings[0] == "Unreleased" or headings[0].startswith(version)


def test_lock_names_exact_versions_and_no_index(root: Path) -> None:
    lines = [line for line in (root / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    pinned = re.compile(r"[a-z0-9][a-z0-9-]*==[0-9][0-9a-z.]*(post[0-9]+)?")
    assert [line for line in lines if not pinned.fullmatch(line)] == []
    names = [line.partition("==")[0] for line in lines]
    assert names == sorted(set(names))


def test_lock_covers_every_dependency_and_lies_in_its_range(root: Path) -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pinned = dict(line.split("==") for line in (root / "requirements.lock").read_text().splitlines() if "==" in line)
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    # NVRTC 13 is unlocked on purpose: each CUDA build of torch pins its own.
    free = {"mlaprep", "nvidia-cuda-nvrtc"}
    for requirement in map(Requirement, asked):
        name = canonicalize_name(requirement.name)
        if name not in free:
            assert requirement.specifier.contains(pinned[name]), f"{requirement} is not met by {pinned.get(name)}"


def test_ci_runs_what_developers_run(root: Path) -> None:
    script = (root / ".ci" / "run").read_text()
    assert re.findall(r"^make (\w+)$", script, re.MULTILINE) == ["check", "test"]
    for script in (".ci/run", "tests/install-tools"):
        assert (root / script).stat().st_mode & 0o111, f"{script} is not executable"


def test_namespace_mirror_points_at_the_rooms(root: Path) -> None:
    mirror = root / "tests" / "namespace" / "mlaprep"
    assert {link.name: link.resolve() for link in mirror.iterdir()} == {
        room: root / room for room in ("templates", "kernels_cache", "service", "clients")
    }


def test_image_runs_as_a_number_that_is_not_root(root: Path) -> None:
    lines = (root / "Dockerfile").read_text().splitlines()
    stages = [line for line in lines if line.startswith("FROM ")]
    assert len(stages) == 2
    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001:10001"]
    assert any(line.startswith("HEALTHCHECK ") for line in lines)
