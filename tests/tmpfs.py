"""Small file systems in memory that a test may fill or spoil. Mounting takes root."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path


def may_mount() -> bool:
    """Whether this user can mount a file system; tried where nobody else sees it."""
    try:
        probe = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True)
    except FileNotFoundError:
        return False
    return probe.returncode == 0


@contextlib.contextmanager
def mounted(place: Path, options: str) -> Iterator[Path]:
    """A tmpfs at a directory, with options such as ``size=256k``; gone afterwards, whoever has files open there."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"{options},mode=0700", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def remounted(place: Path, option: str) -> bool:
    """Mount it anew, ``ro`` or ``rw``; False where somebody writes to it just now."""
    return subprocess.run(["mount", "-o", f"remount,{option}", str(place)], capture_output=True).returncode == 0
