"""The examples run as their first lines say."""

import os
import subprocess
import sys
from pathlib import Path

import no_network


def run(*command: str | Path, cwd: Path) -> str:
    # Not a cache of an earlier test: the second run of an example must find what its first run left.
    environ = os.environ | {"MLAPREP_CACHE_DIR": str(cwd / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_worker_takes_the_chain_without_a_gpu(root: Path, tmp_path: Path) -> None:
    assert "3 steps of 4 layers on cpu" in run(root / "examples" / "worker.py", cwd=tmp_path)


def test_warm_cache_compiles_once(root: Path, tmp_path: Path) -> None:
    script = root / "examples" / "warm_cache.py"
    assert "20 kernels, 20 of them compiled now" in run(script, "kernels", "kimi-k3", cwd=tmp_path)
    assert "20 kernels, 0 of them compiled now" in run(script, "kernels", "kimi-k3", cwd=tmp_path)


def test_torch_compile_makes_one_graph(root: Path, tmp_path: Path) -> None:
    script = root / "examples" / "torch_compile.py"
    assert "3 batch sizes on cpu, one graph" in run(script, cwd=tmp_path)


def test_vllm_plugin_plugs_into_stand_ins(root: Path, tmp_path: Path) -> None:
    script = root / "examples" / "vllm_plugin.py"
    assert "8 tokens on cpu: two operations and one, the same bytes" in run(script, cwd=tmp_path)


def test_every_example_is_run_here(root: Path) -> None:
    here = Path(__file__).read_text()
    assert not [path.name for path in (root / "examples").glob("*.py") if f'"{path.name}"' not in here]


def test_the_air_gapped_round_needs_no_network(root: Path, tmp_path: Path) -> None:
    """Made, verified, installed on an empty cache, its signature checked: where any socket ends the process."""
    (tmp_path / "hooks").mkdir()
    environ = no_network.environment(tmp_path / "hooks") | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, root / "examples" / "air_gapped.py", tmp_path / "round"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 kernels good; signatures checked" in done.stdout
    assert " from disk, ed25519:" in done.stdout
    assert " from bundle, ed25519:" in done.stdout
    first = (tmp_path / "round" / "kernels.tar").read_bytes()
    subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, check=True)
    assert (tmp_path / "round" / "kernels.tar").read_bytes() == first


def test_the_ban_on_the_network_bites(tmp_path: Path) -> None:
    environ = no_network.environment(tmp_path)
    for script in ("import socket; socket.socket()", "import socket; socket.getaddrinfo('localhost', 1)"):
        done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.split(":")[0]) == (99, "network")
