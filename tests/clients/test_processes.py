"""The client in many processes: one compile a key, the same key everywhere, and what a missing compiler costs."""

import json
import multiprocessing
import operator
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mlaprep.clients.client import KernelClient
from mlaprep.clients.errors import KernelUnavailable
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec

SPEC, ARCH = KernelSpec(num_heads=12), Arch("sm_100a")
CLI = [sys.executable, "-m", "mlaprep.clients.cli"]
COMPILE = [*CLI, "compile", "--preset", "kimi-k3", "--tp", "8", "--arch", "sm_100a", "--arch", "sm_103a", "--json"]

WORKER = """
    import json, sys
    from pathlib import Path
    from mlaprep.clients.client import KernelClient
    from mlaprep.kernels_cache.disk import DiskStore
    from mlaprep.templates.arch import Arch
    from mlaprep.templates.spec import KernelSpec

    with KernelClient(store=DiskStore(Path(sys.argv[1]))) as client:
        print("ready", flush=True)
        sys.stdin.readline()
        obtained = client.obtain(KernelSpec(num_heads=12), Arch("sm_100a"))
        print(json.dumps({"digest": obtained.artifact.digest, "compiled": client.stats().compiled}))
"""


def environment(**changes: str) -> dict[str, str]:
    """The environment of a process that imports what this one does."""
    paths = os.pathsep.join(path for path in sys.path if os.path.isabs(path))
    return os.environ | {"PYTHONPATH": paths} | changes


def run_json(command: list[str], cwd: Path | None = None, **changes: str) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, env=environment(**changes), cwd=cwd, check=False)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def leftovers(root: Path) -> list[str]:
    """Files in the cache that belong to no finished entry, hint or lock."""
    return [str(path) for path in (root / "tmp").rglob("*")] + [str(path) for path in (root / "quarantine").rglob("*")]


def test_B023_sixteen_processes_compile_one_key_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(WORKER), str(tmp_path)]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
        for _ in range(16)
    ]
    try:
        for worker in workers:  # the barrier: everything is imported, nothing is asked for
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        with ThreadPoolExecutor(16) as pool:
            results = [json.loads(text) for text, _ in pool.map(lambda w: w.communicate("go\n", timeout=120), workers)]
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
    assert len({result["digest"] for result in results}) == 1
    assert sum(result["compiled"] for result in results) == 1
    assert len(list(DiskStore(tmp_path).list())) == 1
    assert leftovers(tmp_path) == []


def test_B023_sixteen_threads_compile_one_key_once(tmp_path: Path) -> None:
    barrier = threading.Barrier(16)
    with KernelClient(store=DiskStore(tmp_path)) as client, ThreadPoolExecutor(16) as pool:

        def ask(_: int) -> str:
            barrier.wait()
            return client.artifact(SPEC, ARCH).digest

        digests = set(pool.map(ask, range(16)))
        assert len(digests) == 1
        assert client.stats().compiled == 1
    assert leftovers(tmp_path) == []


def test_B035_B036_keys_hold_across_processes_places_and_hash_seeds(tmp_path: Path) -> None:
    """The second process compiles nothing and touches no file; another user, folder and seed get the same bytes."""
    cache = tmp_path / "cache"
    first = run_json(COMPILE, MLAPREP_CACHE_DIR=str(cache), PYTHONHASHSEED="0")
    assert (first["compiles"], [kernel["cached"] for kernel in first["kernels"]]) == (2, [False, False])
    before = snapshot(cache)
    again = run_json(COMPILE, MLAPREP_CACHE_DIR=str(cache), PYTHONHASHSEED="1")
    assert (again["compiles"], [kernel["cached"] for kernel in again["kernels"]]) == (0, [True, True])
    assert snapshot(cache) == before
    home = tmp_path / "home"
    home.mkdir()
    elsewhere = run_json(
        COMPILE, cwd=home, MLAPREP_CACHE_DIR=str(tmp_path / "other"), HOME=str(home), USER="nobody",
        TMPDIR=str(home), PYTHONHASHSEED="random",
    )  # fmt: skip
    assert elsewhere["compiles"] == 2
    for ours, theirs in zip(first["kernels"], elsewhere["kernels"], strict=True):
        assert (ours["key"], ours["cubin_sha256"]) == (theirs["key"], theirs["cubin_sha256"])


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    """mtime and inode of every cubin, manifest and source."""
    names = ("kernel.cubin", "manifest.json", "kernel.cu")
    files = (path for path in root.rglob("*") if path.name in names)
    return {str(path): (path.stat().st_mtime_ns, path.stat().st_ino) for path in files}


@pytest.fixture
def no_nvrtc(tmp_path: Path) -> Path:
    """A folder that, ahead on the path, makes NVRTC fail to load as it does where libnvrtc is missing."""
    folder = tmp_path / "hidden"
    package = folder / "cupy" / "cuda"
    package.mkdir(parents=True)
    (folder / "cupy" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "nvrtc.py").write_text(
        "def getSupportedArchs():\n"
        "    raise OSError('libnvrtc.so.12: cannot open shared object file: No such file or directory')\n"
    )
    return folder


def test_B039_local_compile_names_the_missing_library(
    no_nvrtc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(no_nvrtc))
    with KernelClient(store=DiskStore(tmp_path / "cache")) as client:
        with pytest.raises(KernelUnavailable, match=r"libnvrtc\.so\.12") as caught:
            client.artifact(SPEC, ARCH)
        assert type(caught.value.__cause__).__name__ == "CompilerUnavailable"


def test_B039_cached_kernels_need_no_compiler(no_nvrtc: Path, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    built = run_json(COMPILE, MLAPREP_CACHE_DIR=cache)
    paths = os.pathsep.join([str(no_nvrtc), *(path for path in sys.path if os.path.isabs(path))])
    worker = [sys.executable, "-c", textwrap.dedent(WORKER), cache]
    done = subprocess.run(
        worker, input="go\n", capture_output=True, text=True, env=environment(PYTHONPATH=paths), check=True
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == {"digest": built["kernels"][0]["cubin_sha256"], "compiled": 0}
    again = run_json(COMPILE, MLAPREP_CACHE_DIR=cache, PYTHONPATH=paths)
    assert again["compiles"] == 0
    missing = [*CLI, "compile", "--preset", "kimi-k3", "--tp", "4", "--arch", "sm_100a", "--json"]
    refused = subprocess.run(
        missing, capture_output=True, text=True, env=environment(MLAPREP_CACHE_DIR=cache, PYTHONPATH=paths), check=False
    )
    assert refused.returncode == 3
    assert "libnvrtc.so.12" in json.loads(refused.stdout)["errors"][0]["message"]


def test_a_spawned_process_takes_a_pickled_client(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "cache")
    with KernelClient(store=store) as client:
        digest = client.artifact(SPEC, ARCH).digest
    # The child can import no test module, and finds the kernel on disk or not at all.
    fetch = operator.methodcaller("artifact", SPEC, ARCH)
    with multiprocessing.get_context("spawn").Pool(1) as pool, KernelClient(store=store, on_miss="error") as client:
        assert pool.apply(fetch, (client,)).digest == digest


def test_nothing_needs_the_working_directory(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"""
        import os, runpy, sys
        os.chdir({str(gone)!r})
        os.rmdir({str(gone)!r})
        sys.argv = {COMPILE[2:]!r}
        runpy.run_module("mlaprep.clients.cli", run_name="__main__")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    assert run_json(command, MLAPREP_CACHE_DIR=str(tmp_path / "cache"))["compiles"] == 2
