"""doctor: what this machine can do with kernels, what it lacks, and what to do about it."""

import importlib.metadata
import importlib.util
import os
import re
import stat
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from mlaprep.clients.bundles import bundles_by_environment
from mlaprep.clients.client import offline_by_environment
from mlaprep.clients.errors import DriverError, MlaprepError, SpecError
from mlaprep.clients.launch import cuda_driver
from mlaprep.clients.pins import pinned_keys
from mlaprep.clients.replies import plain
from mlaprep.clients.rest import RestTransport
from mlaprep.clients.switches import Switches
from mlaprep.clients.wording import count
from mlaprep.kernels_cache import location
from mlaprep.kernels_cache.bundle import Bundle
from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.errors import BundleError, CacheError
from mlaprep.templates.arch import Arch
from mlaprep.templates.environment import read_switch

Status = Literal["ok", "warn", "missing"]

_MAX_DEVICES: Final = 64
_OLDEST_TORCH: Final = (2, 1)  # the first with float8_e4m3fn
_SERVICE_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at: ``found`` says what is there, ``advice`` what to do, "" where nothing is."""

    name: str
    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Examination:
    """Every check, and whether this machine can get kernels at all, by compiling or from a service."""

    checks: tuple[Check, ...]
    usable: bool


def examine(
    describe_compiler: Callable[[], str],
    package_conflicts: Callable[[], Sequence[str]],
    *,
    url: str | None,
    token: str | None,
    cache_dir: str | os.PathLike[str] | None,
) -> Examination:
    """Look at compiler, packages, driver, torch, cache, bundles and service, at pinned keys and switches that are on.

    Args:
        describe_compiler: one line on the compiler in use; raises MlaprepError where there is none.
        package_conflicts: sentences on installed packages that break each other.
    """
    compiler = check_compiler(describe_compiler)
    service = check_service(url, token, compiles_here=compiler.status == "ok")
    served = bool(url) and service.status != "missing"
    usable = compiler.status == "ok" or served
    if compiler.status == "missing" and served and service.status == "ok":
        # A worker needs no compiler of its own.
        compiler = Check("NVRTC", "ok", "none here, and none is needed: the service compiles")
    others = (
        check_packages(package_conflicts),
        check_driver(),
        check_torch(),
        check_launches(),
        check_cache(cache_dir),
    )
    bundles = check_bundles()
    usable |= any(check.status == "ok" for check in bundles)
    return Examination((compiler, *others, *bundles, service, *check_trusted_keys(), *check_switches()), usable)


def check_compiler(describe_compiler: Callable[[], str]) -> Check:
    try:
        return Check("NVRTC", "ok", describe_compiler())
    except MlaprepError as error:
        found = str(error).partition("; install ")[0]
        advice = "install mlaprep[service,cuda12] to compile here, or have workers fetch: MLAPREP_URL names the service"
        return Check("NVRTC", "missing", found, advice)


def check_packages(package_conflicts: Callable[[], Sequence[str]]) -> Check:
    conflicts = package_conflicts()
    if conflicts:
        found, _, advice = conflicts[0].partition("; ")
        return Check("packages", "warn", found, advice)
    cupy = sorted(
        f"{dist.metadata['Name']} {dist.version}"
        for dist in importlib.metadata.distributions()
        if str(dist.metadata["Name"]).lower().startswith("cupy")
    )
    return Check("packages", "ok", ", ".join(cupy) or "no CuPy; only compiling needs it")


def check_driver() -> Check:
    """The CUDA driver and the devices it shows, each with the architecture it gets."""
    try:
        driver = cuda_driver()
    except DriverError as error:
        advice = "none is needed to build and serve; to launch kernels here, install the NVIDIA driver"
        found = "libcuda.so.1 cannot be loaded" if error.code is None else str(error)
        return Check("CUDA driver", "warn", found, advice)
    devices, unmapped = [], False
    for ordinal in range(_MAX_DEVICES):
        try:
            major, minor = driver.capability(ordinal)
        except DriverError:
            break
        arch = Arch.for_device((major, minor))
        unmapped |= arch is None
        devices.append(f"device {ordinal}: {major}.{minor} → {arch or 'the unfused chain'}")
    if not devices:
        advice = "check nvidia-smi and CUDA_VISIBLE_DEVICES; building and serving work without one"
        return Check("CUDA driver", "warn", "a driver that shows no device", advice)
    if unmapped:
        advice = "no kernel is chosen by itself for such a device; prepare takes the unfused chain there"
        return Check("CUDA driver", "warn", "; ".join(devices), advice)
    return Check("CUDA driver", "ok", "; ".join(devices))


def check_torch() -> Check:
    """Looks at the installed version only: importing torch takes seconds."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Check(
            "torch", "warn", "not installed", "none is needed to build and serve; to call a kernel, install torch"
        )
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if release < _OLDEST_TORCH:
        return Check("torch", "warn", version, "install torch 2.1 or later: older ones lack float8_e4m3fn")
    if version.endswith("+cpu"):
        return Check("torch", "ok", f"{version}: the unfused chain on the CPU; launching needs a CUDA build")
    return Check("torch", "ok", version)


def check_launches() -> Check:
    """Whether remembered calls are launched by the extension in C, told without importing torch."""
    try:
        wanted = read_switch("MLAPREP_NATIVE", os.environ, default=True)
    except SpecError as error:
        return Check("launches", "missing", str(error), "correct it: the first launch would refuse to start")
    if not wanted:
        return Check("launches", "warn", "MLAPREP_NATIVE is off: by Python, some µs slower", "unset it")
    if importlib.util.find_spec("mlaprep.clients._layouts") is None:
        advice = "with a C compiler at hand, install mlaprep again: a launch then costs some µs less"
        return Check("launches", "ok", f"by Python: the extension was not built. {advice}")
    return Check("launches", "ok", "by the extension, where torch is 2.10 or later")


def check_cache(cache_dir: str | os.PathLike[str] | None) -> Check:
    """The kernel cache: owner, mode, content, and a file written and removed again. Makes no directory."""
    try:
        folder = location.cache_dir(cache_dir, os.environ)
        if _is_absent(folder):
            return _check_absent_cache(folder)
        store = DiskStore(folder)
        status = os.stat(store.root)
        with tempfile.TemporaryFile(dir=store.root) as file:
            file.write(b"\0" * 4096)
            file.flush()
        stats = store.stats()
    except (CacheError, OSError) as error:
        advice = "set MLAPREP_CACHE_DIR to a directory of your own; until then kernels live in memory only"
        return Check("cache", "warn", str(error), advice)
    mode = stat.S_IMODE(status.st_mode)
    content = f"{count(stats.entries, 'kernel')}, {count(stats.bytes, 'byte')}"
    found = f"{store.root}, uid {status.st_uid}, mode {mode:04o}, {content}"
    if mode & 0o077:
        return Check("cache", "warn", found, f"chmod 700 {store.root}: other users can read it")
    return Check("cache", "ok", found)


def check_bundles() -> list[Check]:
    """Each archive that ``MLAPREP_BUNDLE`` names, looked into but not read whole."""
    checks = []
    for path in bundles_by_environment(os.environ):
        try:
            bundle = Bundle.open(path, private=True)
        except BundleError as error:
            checks.append(Check("bundle", "missing", str(error), "correct MLAPREP_BUNDLE, or put the file in place"))
        else:
            found = f"{bundle.path}, {count(len(bundle.records), 'kernel')}"
            checks.append(Check("bundle", "ok", found, "mlaprep bundle verify reads it whole"))
    return checks


def check_trusted_keys() -> list[Check]:
    """The keys that ``MLAPREP_TRUSTED_KEYS`` pins; nothing where it is not set."""
    try:
        trusted = pinned_keys(None)
    except SpecError as error:
        told = "; ".join(problem.found for problem in error.problems)
        return [Check("trusted keys", "missing", told, "correct MLAPREP_TRUSTED_KEYS; no client starts with it")]
    if trusted is None:
        return []
    ids = ", ".join(key.key_id for key in trusted.keys)
    return [Check("trusted keys", "ok", f"{ids}; kernels that none of them signed are refused")]


def _is_absent(folder: Path) -> bool:
    try:
        os.stat(folder)
    except FileNotFoundError:
        return True
    return False


def _check_absent_cache(folder: Path) -> Check:
    above = next(parent for parent in folder.parents if parent.exists())
    if os.access(above, os.W_OK | os.X_OK):
        return Check("cache", "ok", f"{folder} is made when the first kernel is kept")
    advice = "set MLAPREP_CACHE_DIR to a directory of your own; until then kernels live in memory only"
    return Check("cache", "warn", f"{folder} is not there, and {above} cannot be written", advice)


def check_switches() -> list[Check]:
    """What an operator has turned on for workers of this environment, and may have forgotten."""
    try:
        switches = Switches.from_environment()
    except SpecError as error:
        return [Check("switches", "missing", str(error), "correct it: clients refuse to start")]
    if switches.disable:
        return [Check("switches", "warn", "MLAPREP_DISABLE: every call takes the unfused chain", "unset it to launch")]
    if switches.verify:
        advice = "unset it to serve: each call waits for the device"
        return [Check("switches", "warn", "MLAPREP_VERIFY: every launch is compared with the chain", advice)]
    return []


def check_service(url: str | None, token: str | None, *, compiles_here: bool = True) -> Check:
    if not url and compiles_here:
        return Check("service", "ok", "none configured; kernels are compiled here")
    if not url:
        return Check("service", "missing", "none configured", "set MLAPREP_URL, e.g. http://kernels:8400")
    if offline_by_environment():
        return Check(
            "service", "missing", f"{url}, not asked: MLAPREP_OFFLINE is set", "unset MLAPREP_OFFLINE to use it"
        )
    try:
        transport = RestTransport(url, token, timeout=_SERVICE_TIMEOUT_S)
        try:
            transport.document("/healthz")
            state = transport.document("/readyz", statuses=(200, 503))
        finally:
            transport.close()
    except MlaprepError as error:
        return Check("service", "missing", str(error), "start it (mlaprep serve), or correct MLAPREP_URL")
    reasons = state.get("reasons") if isinstance(state, dict) else None
    if not isinstance(reasons, list):
        return Check("service", "missing", f"{url} is no mlaprep service", "correct MLAPREP_URL")
    if reasons:
        told = plain("; ".join(map(str, reasons)))
        return Check("service", "warn", f"{url} builds nothing now: {told}", "it serves what is built; see its /readyz")
    return Check("service", "ok", f"{url} is ready")
