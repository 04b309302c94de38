"""The demo: the whole way works, prints what it should, and leaves nothing running or lying about."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from emulation.artifact import emulated_artifact
from emulation.driver import EmulatedDriver, Region

from mlaprep.clients import demo
from mlaprep.clients.handle import KernelHandle
from mlaprep.templates.arch import DEFAULT_ARCHS
from mlaprep.templates.presets import preset
from mlaprep.templates.spec import KernelSpec


@pytest.mark.parametrize("width", [80, 100])
def test_runs_from_start_to_end(tmp_path: Path, width: int) -> None:
    paths = os.pathsep.join(path for path in sys.path if os.path.isabs(path))
    environment = os.environ | {"PYTHONPATH": paths, "COLUMNS": str(width), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "mlaprep.clients.demo"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    text = done.stdout
    for spec in {preset(model).spec(tp) for model in demo.MODELS for tp in demo.TP_DEGREES}:
        assert spec.variant_id.removeprefix("mla_prepare-") in text
    for arch in DEFAULT_ARCHS:
        assert len(re.findall(rf"{arch} +[0-9,]+ +\d+ +0 +\d+", text)) == 6
    assert "[24/24]" in text
    assert "24 kernels" in text
    assert len(set(re.findall(r"(?:manifest|received) +(?:✓ )?([0-9a-f]{64})", text))) == 1
    assert "mla_prepare-h12" in text.partition("Its source")[2]
    assert "Not run:" in text or "equal the chain's" in text
    assert "Try next" in text
    table = [line for line in text.splitlines() if not line.startswith("[")]
    assert max(map(len, table)) <= width
    pid = int(re.findall(r"pid (\d+) ended .* and is gone", text)[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert list(tmp_path.iterdir()) == []


def test_says_why_where_the_service_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(demo.tempfile, "tempdir", str(tmp_path))
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no module named mlaprep >&2\nexit 7\n")
    broken.chmod(0o755)
    monkeypatch.setattr(demo.sys, "executable", str(broken))
    assert demo.run() == 1
    told = capsys.readouterr().out
    assert "no module named mlaprep" in told
    assert "ended with status 7" in told
    assert list(tmp_path.iterdir()) == [broken]


def test_compares_a_launch_with_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = EmulatedDriver()
    driver._regions = [Region(1, 2**63, 1)]  # the whole of memory
    handle = KernelHandle(emulated_artifact(KernelSpec(num_heads=12)), driver)
    assert demo.compare_with_chain(handle, torch.device("cpu")) == (64 * 12 * 576, 256 * 576)
    monkeypatch.setattr("mlaprep.clients.reference.prepare_chain", lambda *inputs: torch.zeros(64, 12, 576))
    with pytest.raises(demo.DemoError, match="differ"):
        demo.compare_with_chain(handle, torch.device("cpu"))
