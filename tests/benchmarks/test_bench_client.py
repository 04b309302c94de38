"""bench_client, once through: a record of the one style, its kernels compared, what it left out named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(180)
def test_runs_without_a_gpu_and_without_the_service(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    command = [sys.executable, str(root / "benchmarks" / "bench_client.py"), "--stand-in", "--no-eager"]
    command += ["--runs", "1", "--ranks", "2", "--rank-runs", "1", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert (record["benchmark"], record["verified"]) == ("client", True)
    assert record["service"].startswith("stand-in")
    assert {"date", "machine", "versions", "goals", "skipped"} < set(record)
    figures = record["figures"]
    for name in ("import_ms", "cold_ms", "disk_ms", "memory_us"):
        assert 0 < figures[name]["least"] <= figures[name]["median"] <= figures[name]["most"]
    assert figures["ranks_with_service"]["fetched"] == [1]
    assert figures["ranks_without_service"]["compiled_here"] == [1]
    measured = set(figures) | set(record["skipped"])
    assert {"load_ms", "look_up_us", "eager"} <= measured
