"""The wheel and the sdist: what they hold, and that an installed copy works from outside the repository."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOMS = ("templates", "kernels_cache", "service", "clients")


@dataclass(frozen=True)
class Distribution:
    wheel: Path
    sdist: Path

    def wheel_names(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())

    def sdist_names(self) -> set[str]:
        """Names below the archive's one folder."""
        with tarfile.open(self.sdist) as archive:
            return {name.partition("/")[2] for name in archive.getnames()}


@pytest.fixture(scope="module")
def distribution(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Distribution:
    """Built from a copy, the wheel from the sdist: what the sdist lacks, the wheel lacks too."""
    source, out = tmp_path_factory.mktemp("source") / "mlaprep", tmp_path_factory.mktemp("dist")
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, source)
    for room in ROOMS:
        shutil.copytree(root / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return Distribution(wheel, sdist)


def sources(root: Path, suffix: str) -> set[str]:
    """Files of the four rooms, relative to the repository."""
    return {
        path.relative_to(root).as_posix()
        for room in ROOMS
        for path in (root / room).rglob(f"*{suffix}")
        if "__pycache__" not in path.parts
    }


def modules(root: Path) -> list[str]:
    """Every module, by its installed name."""
    names = {f"mlaprep.{name.removesuffix('.py').replace('/', '.')}" for name in sources(root, ".py")}
    return sorted(name.removesuffix(".__init__") for name in names)


def test_B042_wheel_and_sdist_hold_every_template(root: Path, distribution: Distribution) -> None:
    templates = sources(root, ".j2")
    assert templates, "no template found in the repository"
    assert templates <= distribution.sdist_names()
    assert {f"mlaprep/{name}" for name in templates} <= distribution.wheel_names()


@pytest.mark.parametrize("suffix", [".py", "py.typed", ".css", ".js", ".svg"])
def test_wheel_holds_every_module(root: Path, distribution: Distribution, suffix: str) -> None:
    assert {f"mlaprep/{name}" for name in sources(root, suffix)} <= distribution.wheel_names()


def test_wheel_holds_what_the_rooms_hold_and_nothing_else(root: Path, distribution: Distribution) -> None:
    installed = {name for name in distribution.wheel_names() if not name.startswith("mlaprep-")}
    assert installed <= {f"mlaprep/{name}" for name in sources(root, "")}
    metadata = distribution.wheel_names() - installed
    assert any(name.endswith("licenses/LICENSE") for name in metadata)
    assert any(name.endswith("entry_points.txt") for name in metadata)


@pytest.fixture(scope="module")
def installed(distribution: Distribution, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Runs code in a fresh environment that holds the wheel; a ``.pth`` lends it this one's dependencies.

    Only the folder is lent: the editable install's own ``.pth`` in it is not read.
    """
    home = tmp_path_factory.mktemp("fresh")
    venv.create(home / "venv", symlinks=True)
    python = home / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(distribution.wheel)], check=True, capture_output=True)
    (site,) = (home / "venv" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}

    def run(code: str) -> str:
        command = [str(python), "-W", "error::ImportWarning", "-c", code]
        done = subprocess.run(command, cwd=home, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


def test_every_module_imports_from_outside_the_repository(root: Path, installed: Callable[[str], str]) -> None:
    code = f"""
import importlib, sys
for name in {modules(root)!r}:
    module = importlib.import_module(name)
    assert module.__file__.startswith(sys.prefix), module.__file__
print("ok")
"""
    assert installed(code) == "ok"


def test_nothing_lands_at_the_top_level(installed: Callable[[str], str]) -> None:
    code = f"import importlib.util; print([n for n in {ROOMS!r} if importlib.util.find_spec(n)])"
    assert installed(code) == "[]"


def test_templates_render_from_the_installed_copy(installed: Callable[[str], str]) -> None:
    code = """
from mlaprep.templates.render import render
from mlaprep.templates.spec import KernelSpec
source = render(KernelSpec(num_heads=12))
print(source.spec.variant_id in source.text)
"""
    assert installed(code) == "True"


# Absent packages are stood in for by None in sys.modules: importing one raises ImportError.
@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("mlaprep.templates", "cupy torch fastapi httpx rich typer pydantic"),
        ("mlaprep.kernels_cache", "cupy torch fastapi httpx rich typer pydantic jinja2"),
        ("mlaprep.clients", "cupy torch fastapi httpx rich typer pydantic numpy"),
        ("mlaprep.clients.client", "cupy torch fastapi"),
        ("mlaprep.clients.cli", "cupy torch fastapi"),
        ("mlaprep.service.app", "cupy torch"),
        ("mlaprep.service.compiler", "cupy torch"),
    ],
)
def test_B042_imports_without_what_it_does_not_need(installed: Callable[[str], str], module: str, absent: str) -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({absent.split()!r})); import {module}; print('ok')"
    assert installed(code) == "ok"


@pytest.mark.parametrize(
    ("module", "unloaded"),
    [
        ("mlaprep.clients", {"fastapi", "starlette", "cupy", "torch", "httpx", "rich", "typer", "ctypes.util"}),
        ("mlaprep.service.app", {"torch", "cupy"}),
    ],
)
def test_import_loads_none_of(installed: Callable[[str], str], module: str, unloaded: set[str]) -> None:
    code = f"import sys, {module}; print(sorted({unloaded!r} & set(sys.modules)))"
    assert installed(code) == "[]"


def test_import_does_no_work(installed: Callable[[str], str]) -> None:
    """No directory made, no socket opened, no log handler set, no thread started."""
    code = """
import logging, sys, threading
seen = []
watched = ("socket.", "os.mkdir", "subprocess.", "ctypes.dlopen", "shutil.")
sys.addaudithook(lambda event, args: seen.append(event) if event.startswith(watched) else None)
import mlaprep.clients, mlaprep.kernels_cache, mlaprep.templates
print(seen, logging.getLogger("mlaprep").handlers, threading.active_count())
"""
    assert installed(code) == "[] [] 1"


def test_console_script_runs(root: Path, distribution: Distribution) -> None:
    with zipfile.ZipFile(distribution.wheel) as archive:
        (entry,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert "mlaprep = mlaprep.clients.cli:main" in archive.read(entry).decode()


def test_every_all_is_exact(root: Path, installed: Callable[[str], str]) -> None:
    """Each listed name is there, once, and a package's listed names are all that a star import binds."""
    code = f"""
import importlib
for name in {modules(root)!r}:
    module = importlib.import_module(name)
    listed = getattr(module, "__all__", None)
    if listed is not None:
        assert len(listed) == len(set(listed)), name
        missing = [item for item in listed if not hasattr(module, item)]
        assert not missing, (name, missing)
print("ok")
"""
    assert installed(code) == "ok"
