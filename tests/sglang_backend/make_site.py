"""Make ``.sglang-site``: the files of sglang that its MLA backends import, none of them compiled.

    python tests/sglang_backend/make_site.py                    # fetches the released wheel with pip
    python tests/sglang_backend/make_site.py --wheel sglang-0.5.23-….whl

For a machine without a network: carry the folder there, then run ``tests/sglang_backend/drive.py --device cuda --site
.sglang-site``. It needs torch, triton and numpy; other packages are stood in for where they are missing. The folder
stays out of the repository.
"""

import argparse
import ast
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

RELEASE = "sglang==0.5.23"
SITE = Path(__file__).resolve().parents[2] / ".sglang-site"
ROOTS = (
    "sglang.version",
    "sglang.srt.layers.attention.trtllm_mla_backend",
    "sglang.srt.layers.attention.cutedsl_mla_backend",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.platforms.cuda",
    "sglang.srt.platforms.cpu",
    "sglang.srt.plugins",
)
WHOLE = ("sglang/kernels/jit/", "sglang/kernels/ops/attention/", "sglang/kernels/ops/kvcache/", "sglang/srt/platforms/")
"""Folders whose modules are also imported inside functions."""


SOURCES = ("sglang/kernels/jit/include/", "sglang/kernels/jit/csrc/elementwise/")
"""CUDA sources beside them: looked for at import, compiled where tvm-ffi and nvcc are there."""
GROUP = re.compile("sglang/kernels/ops/[a-z0-9_]+/__init__.py")
"""Found by name at import."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Gather the files that sglang's MLA backends import.")
    parser.add_argument("--wheel", type=Path, help=f"a wheel of {RELEASE}; fetched with pip by default")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = arguments.wheel or _fetched(Path(folder))
        with zipfile.ZipFile(wheel) as archive:
            names = [*_needed(archive), *(name for name in archive.namelist() if name.startswith(SOURCES))]
            shutil.rmtree(SITE, ignore_errors=True)
            for name in names:
                archive.extract(name, SITE)
    size = sum((SITE / name).stat().st_size for name in names)
    print(f"{SITE.name}: {len(names)} files, {size / 1e6:.1f} MB")
    return 0


def _fetched(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), RELEASE]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def _needed(archive: zipfile.ZipFile) -> list[str]:
    """Files that the roots import where they stand at the top of a module, and those those import."""
    there = {name for name in archive.namelist() if name.startswith("sglang/") and name.endswith(".py")}
    found: set[str] = set()
    whole = [name for name in there if name.startswith(WHOLE) or GROUP.fullmatch(name)]
    waiting = [*ROOTS, *(name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in whole)]
    while waiting:
        module = waiting.pop()
        parts = module.split(".")
        for count in range(1, len(parts) + 1):
            stem = "/".join(parts[:count])
            name = f"{stem}/__init__.py" if f"{stem}/__init__.py" in there else f"{stem}.py"
            if name not in there or name in found:
                continue
            found.add(name)
            # The package's own first module is its front end, which nothing here uses.
            if name != "sglang/__init__.py":
                package = parts[:count] if name.endswith("__init__.py") else parts[: count - 1]
                waiting += _imported(ast.parse(archive.read(name)), package)
    return sorted(found)


def _imported(tree: ast.AST, package: list[str]) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("sglang."))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module.startswith("sglang"):
                yield module
                yield from (f"{module}.{alias.name}" for alias in node.names)
        else:
            yield from _imported(node, package)


if __name__ == "__main__":
    sys.exit(main())
