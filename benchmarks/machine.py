"""Machine: what a result was measured on. No host names, no paths."""

import os
import platform
import re
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """GPU, driver, processor. Needs torch with a CUDA device."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "memory_bytes": properties.total_memory,
        "driver": _driver(),
        **describe_host(),
    }


def describe_host() -> dict[str, Any]:
    """Processor, and the cores of it that this process may use."""
    return {"cpu": _cpu(), "cores": len(os.sched_getaffinity(0))}


def describe_versions(nvrtc: str | None) -> dict[str, Any]:
    """Versions of what the numbers depend on; None where it is not there.

    ``nvrtc`` is the compiler that made our kernels, which need not be this machine's.
    """
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nvcc": _nvcc(),
        "nvrtc": nvrtc or _nvrtc(),
        "mlaprep": _mlaprep(),
    }


def now() -> str:
    """UTC, RFC 3339."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def gpu_slug(name: str) -> str:
    """``NVIDIA H200`` → ``h200``, for file names."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-") or "gpu"


def machine_line(machine: dict[str, Any], versions: dict[str, Any], date: str) -> str:
    return (
        f"{machine['gpu']} ({machine['multiprocessors']} SMs), driver {machine['driver']}, torch {versions['torch']}, "
        f"CUDA {versions['cuda']}, NVRTC {versions['nvrtc']}, nvcc {versions['nvcc']}, {date}"
    )


def _run(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _driver() -> str | None:
    text = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return text.splitlines()[0].strip() if text and text.strip() else None


def _nvcc() -> str | None:
    text = _run(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc", "--version")
    found = re.search(r"V([\d.]+)", text or "")
    return found[1] if found else None


def _nvrtc() -> str | None:
    try:
        from cupy.cuda import nvrtc

        return ".".join(map(str, nvrtc.getVersion()))
    except Exception:
        return None


def _mlaprep() -> str | None:
    import tomllib

    try:
        project = Path(__file__).resolve().parent.parent / "pyproject.toml"
        return str(tomllib.loads(project.read_text("utf-8"))["project"]["version"])
    except (OSError, KeyError, ValueError):
        return None


def _cpu() -> str | None:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        return found[1].strip() if found else None
    except OSError:
        return None
