"""Importing the client costs a worker nothing: no CUDA, no socket, no heavy package."""

import importlib
import subprocess
import sys

import pytest

import mlaprep.clients

EXPORTS = [
    "ArtifactRejected",
    "DecisionChanged",
    "DriverError",
    "Explanation",
    "ForkedProcessError",
    "KernelClient",
    "KernelHandle",
    "KernelNotReady",
    "KernelUnavailable",
    "MlaprepError",
    "NotCovered",
    "ReadinessReport",
    "ServiceError",
    "ServiceRefused",
    "ServiceUnreachable",
    "SpecError",
    "VerificationFailed",
    "explain",
    "fused_prepare",
    "prepare",
]

HEAVY = [
    "cryptography",
    "cupy",
    "fastapi",
    "httpx",
    "mlaprep.service",
    "pydantic",
    "rich",
    "starlette",
    "tarfile",
    "torch",
    "typer",
]

WATCHED = """
import ctypes, socket, sys

def explode(*arguments, **options):
    raise AssertionError(f"importing reached for {arguments}")

ctypes.CDLL = ctypes.PyDLL = explode
socket.socket = socket.create_connection = socket.getaddrinfo = explode
"""


def python(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_exports_are_exact() -> None:
    assert mlaprep.clients.__all__ == EXPORTS
    assert set(EXPORTS) <= set(dir(mlaprep.clients))


@pytest.mark.parametrize("name", EXPORTS)
def test_every_export_loads(name: str) -> None:
    value = getattr(mlaprep.clients, name)
    assert value.__module__.startswith("mlaprep.")
    assert getattr(importlib.import_module(value.__module__), value.__name__) is value


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        mlaprep.clients.nonsense  # noqa: B018


def test_import_loads_nothing_heavy_and_touches_nothing() -> None:
    loaded = python(f"{WATCHED}\nimport mlaprep.clients\nprint([m for m in {HEAVY!r} if m in sys.modules])")
    assert loaded.strip() == "[]"


def test_the_client_itself_loads_nothing_heavy_and_touches_nothing(tmp_path: object) -> None:
    script = f"""{WATCHED}
from mlaprep.clients import KernelClient
KernelClient("http://kernels.test")
print([m for m in {HEAVY!r} if m in sys.modules])
"""
    assert python(script).strip() == "[]"


def test_a_fork_after_the_import_can_still_use_cuda_itself() -> None:
    """cuInit before a fork would leave the child without CUDA, so nothing may open the driver on import."""
    load_all = "import mlaprep.clients as c; [getattr(c, name) for name in c.__all__]"
    script = f"{load_all}; print('libcuda' in open('/proc/self/maps').read())"
    assert python(script).strip() == "False"
