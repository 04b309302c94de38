"""Writes requirements.lock: the exact versions that this release is tested with.

    python deploy/lock.py            # resolve the newest versions inside pyproject.toml's ranges, write the file
    python deploy/lock.py --check    # resolve again under the file, say what it lacks

The file is a constraints file: `pip install -c requirements.lock -e '.[service]'` takes from it what the
extra needs and nothing else. Versions carry no local part ("+cpu") and the file names no index, so that it
holds wherever the packages come from.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
# The reference chain and the tests need torch; a worker brings its own, so no extra asks for it.
WANTED = [f"{ROOT}[dev]", "torch==2.13.0"]
# Resolved by themselves: CuPy for CUDA 12 and for CUDA 13 must not share an environment. NVRTC 13 stays
# unlocked, since each CUDA build of torch pins one of its own.
WANTED_APART = ["cupy-cuda13x>=14.2,<15"]
HEAD = """\
# Exact versions that this release is tested with, as pip constraints (Linux x86-64, Python 3.11).
# Written by deploy/lock.py; the ranges are in pyproject.toml.
"""


def resolve(requirements: list[str], constraints: Path | None) -> dict[str, str]:
    """Name to version of everything that pip would install into an empty environment."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        command += ["--prefer-binary", "--report", str(report)]
        command += ["-c", str(constraints)] if constraints else []
        subprocess.run([*command, *requirements], check=True)
        installs = json.loads(report.read_text())["install"]
    found = {entry["metadata"]["name"]: entry["metadata"]["version"] for entry in installs}
    return {
        re.sub(r"[-_.]+", "-", name).lower(): version.partition("+")[0]
        for name, version in found.items()
        if name != "mlaprep"
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the file lacks a version")
    check = parser.parse_args().check
    constraints = LOCK if check else None
    versions = resolve(WANTED, constraints)
    for requirement in WANTED_APART:
        versions = resolve([requirement], constraints) | versions
    lines = [f"{name}=={version}" for name, version in sorted(versions.items())]
    if not check:
        LOCK.write_text(HEAD + "\n".join(lines) + "\n")
        return 0
    missing = sorted(set(lines) - set(LOCK.read_text().splitlines()))
    print("\n".join(missing) if missing else f"{LOCK.name} is complete")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
