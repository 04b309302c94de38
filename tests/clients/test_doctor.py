"""doctor: each check tells what is there and what to do, and only the lack of every source of kernels is fatal."""

import importlib.metadata
import os
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from cache.samples import make_artifact
from emulation.driver import EmulatedDriver
from rich.console import Console

from mlaprep.clients import doctor
from mlaprep.clients.cli_output import checks_table
from mlaprep.clients.doctor import Check, Examination, examine
from mlaprep.clients.errors import DriverError
from mlaprep.clients.rest import RestTransport
from mlaprep.kernels_cache.bundle import write_bundle
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.key_files import generate_key
from mlaprep.service.errors import CompilerUnavailable
from mlaprep.service.toolchain import conflicts


def no_compiler() -> str:
    raise CompilerUnavailable("libnvrtc", "libnvrtc.so.12: cannot open shared object file")


def no_conflicts() -> tuple[str, ...]:
    return ()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def examined(cache: Path, *, compiler: bool = True, url: str | None = None) -> tuple[Examination, dict[str, Check]]:
    examination = examine(
        (lambda: "12.9.86") if compiler else no_compiler, no_conflicts, url=url, token=None, cache_dir=cache
    )
    return examination, {check.name: check for check in examination.checks}


def answering(monkeypatch: pytest.MonkeyPatch, **replies: httpx.Response) -> None:
    """Every transport gets these replies, by the last word of the path."""

    def transport(url: str, token: str | None, *, timeout: float) -> RestTransport:
        handler = httpx.MockTransport(lambda request: replies[request.url.path.rpartition("/")[2]])
        return RestTransport(url, token, timeout=timeout, transport=handler)

    monkeypatch.setattr(doctor, "RestTransport", transport)


class TestUsable:
    def test_a_compiler_is_enough(self, cache: Path) -> None:
        examination, checks = examined(cache)
        assert examination.usable
        assert list(checks) == ["NVRTC", "packages", "CUDA driver", "torch", "launches", "cache", "service"]
        assert checks["NVRTC"] == Check("NVRTC", "ok", "12.9.86")

    @pytest.mark.parametrize("name", ["MLAPREP_DISABLE", "MLAPREP_VERIFY"])
    def test_switches_that_are_on_are_told(self, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setenv(name, "1")
        examination, checks = examined(cache)
        assert examination.usable
        assert checks["switches"].status == "warn"
        assert checks["switches"].found.startswith(name)
        monkeypatch.setenv(name, "ture")
        assert examined(cache)[1]["switches"].status == "missing"

    def test_a_service_is_enough(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        answering(
            monkeypatch,
            healthz=httpx.Response(200, json={"status": "ok"}),
            readyz=httpx.Response(200, json={"ready": True, "reasons": []}),
        )
        examination, checks = examined(cache, compiler=False, url="http://kernels")
        assert examination.usable
        assert checks["NVRTC"] == Check("NVRTC", "ok", "none here, and none is needed: the service compiles")
        assert checks["service"].status == "ok"
        assert not [check for check in examination.checks if check.status == "missing"]

    def test_neither_is_not(self, cache: Path) -> None:
        examination, checks = examined(cache, compiler=False)
        assert not examination.usable
        assert checks["NVRTC"].found.count("libnvrtc.so.12") == 1
        assert checks["NVRTC"].advice.startswith("install mlaprep[service,cuda12]")
        assert "install" not in checks["NVRTC"].found
        assert (checks["service"].status, checks["service"].found) == ("missing", "none configured")
        assert "MLAPREP_URL" in checks["service"].advice
        assert not examined(cache, compiler=False, url="http://127.0.0.1:9")[0].usable


class TestService:
    def test_that_is_not_there(self, cache: Path) -> None:
        check = examined(cache, url="http://127.0.0.1:9")[1]["service"]
        assert check.status == "missing"
        assert "127.0.0.1:9" in check.found
        assert "mlaprep serve" in check.advice

    def test_that_cannot_build(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        answering(
            monkeypatch,
            healthz=httpx.Response(200, json={"status": "ok"}),
            readyz=httpx.Response(503, json={"ready": False, "reasons": ["libnvrtc is missing\x1b[31m"]}),
        )
        check = examined(cache, url="http://kernels")[1]["service"]
        assert check.status == "warn"
        assert "libnvrtc is missing?" in check.found

    @pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"ready": true}'])
    def test_that_is_something_else(self, cache: Path, monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
        answering(monkeypatch, healthz=httpx.Response(200, json={}), readyz=httpx.Response(200, content=body))
        assert examined(cache, url="http://kernels")[1]["service"].status == "missing"

    def test_by_a_bad_address(self, cache: Path) -> None:
        assert examined(cache, url="kernels:8400")[1]["service"].status == "missing"


class TestCache:
    def test_one_that_is_not_there_yet_is_not_made(self, cache: Path) -> None:
        check = examined(cache / "deep")[1]["cache"]
        assert (check.status, check.advice) == ("ok", "")
        assert str(cache / "deep") in check.found
        assert not cache.exists()

    def test_one_that_is_not_there_and_cannot_be_made(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        check = examined(cache)[1]["cache"]
        assert (check.status, "MLAPREP_CACHE_DIR" in check.advice) == ("warn", True)

    def test_a_private_one(self, cache: Path) -> None:
        DiskStore(cache).publish(make_artifact())
        check = examined(cache)[1]["cache"]
        assert "1 kernel, " in check.found
        assert check.status == "ok"
        assert str(cache) in check.found
        assert "mode 0700" in check.found
        assert [path for path in cache.iterdir() if path.is_file()] == []

    def test_one_that_others_can_read(self, cache: Path) -> None:
        cache.mkdir()
        os.chmod(cache, 0o755)
        check = examined(cache)[1]["cache"]
        assert (check.status, check.advice) == ("warn", f"chmod 700 {cache}: other users can read it")

    def test_one_that_cannot_be(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        check = examined(tmp_path / "file" / "cache")[1]["cache"]
        assert check.status == "warn"
        assert "MLAPREP_CACHE_DIR" in check.advice


class TestDriver:
    def test_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing() -> None:
            raise DriverError("asked to use a GPU, but libcuda.so.1 cannot be loaded")

        monkeypatch.setattr(doctor, "cuda_driver", missing)
        assert doctor.check_driver().status == "warn"
        assert "libcuda.so.1" in doctor.check_driver().found

    @pytest.mark.parametrize(
        ("capability", "status", "shown"),
        [((9, 0), "ok", "9.0 → sm_90a"), ((12, 1), "warn", "12.1 → the unfused chain")],
    )
    def test_one_device(
        self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], status: str, shown: str
    ) -> None:
        class OneDevice(EmulatedDriver):
            def capability(self, device: int) -> tuple[int, int]:
                if device:
                    raise DriverError("no such device", code=101)
                return capability

        monkeypatch.setattr(doctor, "cuda_driver", OneDevice)
        check = doctor.check_driver()
        assert check.status == status
        assert shown in check.found


class TestPackages:
    def test_B042_two_cupys(self) -> None:
        check = doctor.check_packages(lambda: conflicts(["cupy-cuda12x", "cupy-cuda13x"]))
        assert check.status == "warn"
        assert "cupy-cuda12x and cupy-cuda13x" in check.found
        assert "uninstall" in check.advice

    def test_one_cupy(self) -> None:
        assert doctor.check_packages(lambda: conflicts(["cupy-cuda12x", "numpy"])).status == "ok"

    @pytest.mark.parametrize(
        ("version", "status"), [("2.13.0", "ok"), ("2.13.0+cpu", "ok"), ("1.13.1", "warn"), (None, "warn")]
    )
    def test_torch(self, monkeypatch: pytest.MonkeyPatch, version: str | None, status: str) -> None:
        def installed(name: str) -> str:
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(doctor.importlib, "metadata", SimpleNamespace(
            version=installed, PackageNotFoundError=importlib.metadata.PackageNotFoundError
        ))  # fmt: skip
        assert doctor.check_torch().status == status


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_fits_a_terminal(cache: Path, width: int) -> None:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(checks_table(examined(cache, compiler=False)[0].checks))
    text = console.export_text()
    console.file.close()
    assert "missing  NVRTC" in text
    assert "→" in text
    assert max(map(len, text.splitlines())) <= width


class TestOffline:
    def test_a_bundle_is_enough(self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bundle = tmp_path / "kernels.tar"
        write_bundle(bundle, [make_artifact()])
        monkeypatch.setenv("MLAPREP_BUNDLE", f"{bundle}:{tmp_path / 'none.tar'}")
        assert examined(cache, compiler=False)[0].usable
        first, second = doctor.check_bundles()
        assert (first.status, "1 kernel" in first.found) == ("ok", True)
        assert (second.status, "none.tar" in second.found) == ("missing", True)
        bundle.write_text("no bundle")
        assert not examined(cache, compiler=False)[0].usable

    def test_pinned_keys(self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert doctor.check_trusted_keys() == []
        key = generate_key(tmp_path / "key").public
        monkeypatch.setenv("MLAPREP_TRUSTED_KEYS", key.text)
        assert key.key_id in examined(cache)[1]["trusted keys"].found
        for text in ("", "nonsense"):
            monkeypatch.setenv("MLAPREP_TRUSTED_KEYS", text)
            assert examined(cache)[1]["trusted keys"].status == "missing"


@pytest.mark.parametrize(
    ("value", "built", "status", "told"),
    [
        ("", True, "ok", "by the extension"),
        ("", False, "ok", "was not built"),
        ("0", True, "warn", "MLAPREP_NATIVE"),
        ("ture", True, "missing", "MLAPREP_NATIVE"),
    ],
)
def test_how_remembered_calls_are_launched(
    monkeypatch: pytest.MonkeyPatch, value: str, built: bool, status: str, told: str
) -> None:
    monkeypatch.setenv("MLAPREP_NATIVE", value)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object() if built else None)
    check = doctor.check_launches()
    assert check.status == status
    assert told in check.found
