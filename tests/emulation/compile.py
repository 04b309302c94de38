"""A rendered kernel as a shared object for this machine's processor."""

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent


@functools.cache
def _directory() -> Path:
    import atexit

    directory = Path(tempfile.mkdtemp(prefix="mlaprep-emulation-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


@functools.lru_cache(maxsize=512)
def compile_source(source: str, dtype: str) -> ctypes.CDLL:
    """The kernel's own text between the shim's two headers, built once a session."""
    name = hashlib.sha256(f"{dtype}\n{source}".encode()).hexdigest()
    unit, library = _directory() / f"{name}.cc", _directory() / f"{name}.so"
    unit.write_text(
        f'#include "{HERE}/prologue.h"\n#line 1 "{name[:12]}.cu"\n{source}\n#include "{HERE}/epilogue.h"\n', "utf-8"
    )
    # No contraction: every product and sum of the kernel is rounded by itself.
    command = [
        "g++",
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unused",
        "-Wno-unknown-pragmas",
        "-ffp-contract=off",
        "-shared",
        "-fPIC",
    ]
    command += ["-DEMULATED_TILES"] * ("kTileThreads" in source)
    command += [f"-DEMULATED_{dtype.upper()}", str(unit), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise AssertionError(f"g++ refuses the rendered source:\n{done.stderr[-4000:]}")
    return ctypes.CDLL(str(library))
