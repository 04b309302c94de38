"""The image, built from the Dockerfile and tried: `pytest -m image`, as root, a few minutes.

PROVE_IMAGE_ARGS is passed on to deploy/prove_image.sh, for what a network needs.
"""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from deploy_kit import IMAGE_USER


@pytest.mark.image
@pytest.mark.timeout(1800)
def test_the_image_is_built_and_serves(root: Path, tmp_path: Path) -> None:
    if os.geteuid() or not all(map(shutil.which, ("buildah", "debootstrap"))):
        pytest.skip("needs root, buildah and debootstrap")
    report = tmp_path / "report"
    command = [str(root / "deploy" / "prove_image.sh"), "--report", str(report)]
    done = subprocess.run(
        [*command, *shlex.split(os.environ.get("PROVE_IMAGE_ARGS", ""))], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = report.read_text()
    assert "ended with 0 on SIGTERM" in text
    size = re.search(r"mlaprep's own (\d+) MB", text)
    assert size
    assert int(size[1]) < 500, text


def test_the_image_runs_as_a_numbered_user_and_checks_itself(root: Path) -> None:
    text = (root / "Dockerfile").read_text()
    assert f"\nUSER {IMAGE_USER[0]}:{IMAGE_USER[1]}\n" in text
    assert re.search(r"^HEALTHCHECK [^\n]*\\\n +CMD \[", text, re.MULTILINE), "without a shell"
    assert "*\n" in (root / ".dockerignore").read_text(), "what is not named stays out"
    copied = set(re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE))
    named = {name for line in copied for name in line.split()}
    assert named == set(re.findall(r"^!(\S+)$", (root / ".dockerignore").read_text(), re.MULTILINE))


def test_the_script_tells_how_it_is_used(root: Path) -> None:
    done = subprocess.run(
        [str(root / "deploy" / "prove_image.sh"), "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "prove_image.sh [--base" in done.stdout
