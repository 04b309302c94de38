"""B039: a machine whose NVRTC is missing, in whole or in part, serves what is built and says what it lacks."""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from service_kit import SERVE, ServerMaker, wait_for

from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.service.builder import Builder
from mlaprep.service.compile_child import _unavailable
from mlaprep.service.compiler import Compiler
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec

VARIANT = "mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl"
KERNEL = f"/v1/kernels/sm_100a/{VARIANT}"
SITE_PACKAGES = Path(sysconfig.get_paths()["purelib"])
IMPATIENT = "from mlaprep.service.compiler import Compiler; Compiler.__init__.__kwdefaults__['retry_s'] = 1.0\n"
NVRTC = Path("nvidia") / "cuda_nvrtc" / "lib"


@pytest.fixture
def python_without(tmp_path: Path) -> Callable[[str], str]:
    """Makes an interpreter that has every package of this one, but not these libraries of NVRTC."""
    if "libnvrtc.so" in subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout:
        pytest.skip("the system has an NVRTC of its own, which would be found")

    def make(hidden: str) -> str:
        folder = tmp_path / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(folder)], check=True)
        site = folder / SITE_PACKAGES.relative_to(Path(sys.prefix))
        for package in SITE_PACKAGES.iterdir():
            if package.name != "nvidia":
                (site / package.name).symlink_to(package)
        (site / NVRTC).mkdir(parents=True)
        for library in (SITE_PACKAGES / NVRTC).iterdir():
            if not library.name.startswith(hidden):
                expose(library, site / NVRTC / library.name)
        return str(folder / "bin" / "python")

    return make


def expose(library: Path, link: Path) -> None:
    """A library at another place; not a symbolic link, since libraries look for each other where they lie."""
    try:
        os.link(library, link)
    except OSError:
        shutil.copyfile(library, link)


@pytest.fixture
def built(tmp_path: Path, compiler: Compiler) -> str:
    """A kernel in the cache that the servers of these tests use; its digest."""
    with Builder(DiskStore(tmp_path / "cache"), compiler) as builder:
        return builder.get_or_compile(KernelSpec(num_heads=12), Arch("sm_100a")).artifact.digest


@pytest.mark.parametrize("hidden", ["libnvrtc", "libnvrtc-builtins"])
def test_B039_without_a_library_the_server_serves_and_says_so(
    run_server: ServerMaker, python_without: Callable[[str], str], built: str, tmp_path: Path, hidden: str
) -> None:
    python = python_without(hidden + ".") if hidden.endswith("builtins") else python_without(hidden)
    with (
        run_server(python=python, code=IMPATIENT + SERVE, wait=False) as server,
        httpx.Client(base_url=server.url, timeout=30) as http,
    ):
        ready = wait_for(lambda: (r := http.get("/readyz")).json()["compiler"]["status"] == "unavailable" and r)
        assert ready.status_code == 503
        assert ready.json()["compiler"]["missing"].startswith(hidden)
        assert hidden in ready.json()["reasons"][0]

        for _ in range(3):
            reply = http.put(KERNEL.replace("h12", "h13"))
            assert reply.status_code == 503
            assert reply.json()["type"] == "urn:mlaprep:problem:compiler-unavailable"
            assert hidden in reply.json()["detail"]
            assert int(reply.headers["retry-after"]) > 0

        assert http.put(KERNEL).json()["cached"] is True
        assert http.get(KERNEL).json()["manifest"]["cubin_sha256"] == built
        assert http.get(f"/v1/artifacts/{built}").status_code == 200
        assert {arch["buildable"] for arch in http.get("/v1/archs").json()["archs"]} == {None}
        assert http.get("/healthz").status_code == 200

        # The library comes back while the server runs: nothing was held against the kernel.
        site = Path(python).parent.parent / SITE_PACKAGES.relative_to(Path(sys.prefix))
        for library in (SITE_PACKAGES / NVRTC).iterdir():
            if not (site / NVRTC / library.name).exists():
                expose(library, site / NVRTC / library.name)
        deadline = time.monotonic() + 20
        while (reply := http.put(KERNEL.replace("h12", "h13"))).status_code != 201:
            assert time.monotonic() < deadline, reply.text
            time.sleep(0.1)
        assert http.get("/readyz").status_code == 200


def test_B039_no_driver_is_needed(compiler: Compiler) -> None:
    """Nothing here has a GPU; a compile process loads no driver library either."""
    compiler.version()
    for pid in compiler.state().pids:
        assert "libcuda.so" not in Path(f"/proc/{pid}/maps").read_text()


def test_what_is_missing_is_told_without_a_list_of_directories() -> None:
    class DynamicLibNotFoundError(RuntimeError):
        """As the loader that CuPy uses raises it."""

    class DynamicLibNotAvailableError(DynamicLibNotFoundError):
        """One of its kinds."""

    dump = 'Failure finding "libnvrtc.so": listdir("/somewhere/lib"): ' + " ".join(f"lib{n}.so" for n in range(400))
    for kind in (DynamicLibNotFoundError, DynamicLibNotAvailableError):
        greeting = _unavailable("libnvrtc", kind(dump))
        assert greeting == {"unavailable": "libnvrtc", "reason": "no package and no directory of the system has it"}
    assert len(_unavailable("libnvrtc", OSError("x" * 5000))["reason"]) <= 200
    assert _unavailable("cupy", ImportError())["reason"] == "ImportError"
