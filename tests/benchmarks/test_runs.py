"""Whole runs of the benchmarks on a device that is none: what a record holds, and what it says of failures."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import bench_host
import bench_prepare
import bench_verify_step
import contenders
import tune_prepare
from fake_gpu import FakeDriver, install
from fake_peers import one_set_of_peers
from torch import Tensor

from mlaprep.clients.reference import prepare_chain


def run(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    return int(module.main())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDriver:
    return install(monkeypatch, tmp_path)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"EAGER_HEADS": (2,), "EAGER_TOKENS": (1,), "HOST_HEADS": 2}.items():
        monkeypatch.setattr(bench_prepare, name, value)
    monkeypatch.setattr(bench_host, "CALLS", 5)


ARGUMENTS = ("--heads", "2", "--rope-heads", "2", "--tokens", "1,3", "--rounds", "2", "--compile-limit", "-1")


def test_a_whole_run_leaves_a_complete_record(
    gpu: FakeDriver,
    small: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "record.json"
    with one_set_of_peers(monkeypatch):
        status = run(bench_prepare, monkeypatch, *ARGUMENTS, "--out", out)
    printed = capsys.readouterr().out
    assert status == 0, printed
    record = json.loads(out.read_text("utf-8"))
    assert record["complete"] is True
    assert [(c["heads"], c["tokens"], c["rope"], c["mode"]) for c in record["cells"]] == [
        (2, tokens, rope, mode) for rope in (False, True) for tokens in (1, 3) for mode in ("cold", "hot")
    ]
    for cell in record["cells"]:
        for name in ("ours_pdl", "ours_fixed_pdl", "ours_nopdl"):
            assert cell["results"][name]["check"]["verdict"] == "equal"
            assert cell["results"][name]["kernel"]["variant"].startswith("mla_prepare-h2")
        assert cell["results"]["grid_pdl"]["us"] == 2.0
        assert cell["ratios"]["ours/best"] == 1.0
    plain = record["cells"][0]["results"]
    assert "spent" in plain["compiled"]["error"]
    assert plain["chain"]["check"]["verdict"] in ("equal", "overflow")
    assert plain["sglang_pdl"]["check"]["verdict"] == "equal"
    rope = record["cells"][-1]["results"]
    assert {rope[name]["check"]["verdict"] for name in ("flashinfer_scatter_pdl", "flashinfer_append_pdl")} == {"equal"}
    assert [(cell["rope"], cell["mode"]) for cell in record["eager"]] == [(False, "eager"), (True, "eager")]
    assert record["eager"][0]["results"]["ours_pdl"]["check"]["verdict"] == "equal"
    assert record["host"]["us"]["ours: handle(...)"]["check"]["verdict"] == "equal"
    goals = {goal["goal"]: goal for goal in record["goals"]}
    assert len(goals) == 10
    assert goals["ours / SGLang's fused kernel, both PDL, geometric mean"]["found"] == 1.0
    assert goals["rope: the same over all T, worst cell"]["pass"] is True
    assert goals["share of a device copy's bandwidth at T·H >= 64k, worst cell"]["pass"] is None
    assert printed.rstrip().splitlines()[-10:][0].startswith("ours / SGLang's fused kernel")


def test_a_wrong_byte_of_ours_fails_the_run(
    gpu: FakeDriver,
    small: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def spoil(self: object, *inputs: Tensor, out: Tensor, **options: Tensor) -> Tensor:
        prepare_chain(*inputs, out=out)
        inputs[4][-1, 7] = 1
        return out

    monkeypatch.setattr(contenders.KernelHandle, "__call__", spoil)
    out = tmp_path / "record.json"
    status = run(bench_prepare, monkeypatch, *ARGUMENTS, "--parts", "plain", "--tokens", "1", "--out", out)
    assert status == 1
    assert "WRONG: H 2, T 1, cold: ours_pdl: wrong bytes" in capsys.readouterr().err
    record = json.loads(out.read_text("utf-8"))
    assert record["cells"][0]["ratios"] == {}
    assert {goal["pass"] for goal in record["goals"]} == {None}
    assert "fetch_peers" in record["cells"][0]["results"]["sglang_pdl"]["error"]


def test_a_verify_step_counts_launches_and_what_is_saved(
    gpu: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench_verify_step, "DRAFTS", (2,))
    monkeypatch.setattr(bench_verify_step, "REQUESTS", (1, 2))
    out = tmp_path / "steps.json"
    assert run(bench_verify_step, monkeypatch, "--heads", "2", "--rounds", "2", "--out", out) == 0
    steps = json.loads(out.read_text("utf-8"))["steps"]
    assert [(step["tokens_a_request"], step["requests"], step["tokens"]) for step in steps] == [(2, 1, 2), (2, 2, 4)]
    for step in steps:
        for where in ("alone", "in_model"):
            assert step[where]["results"]["ours_pdl"]["check"]["verdict"] == "equal"
            assert step[where]["results"]["chain"]["us_a_step"] == 2.0 * 2
            assert step[where]["saved_us_a_step"] == 0.0
    assert "failed" in capsys.readouterr().out, "SGLang is not there"


def test_a_tuning_run_writes_the_plans_that_launches_read(
    gpu: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    for name, value in {
        "HEADS": (2, 4), "TOKENS": (1, 3), "ROPE_HEADS": (2,), "ROPE_TOKENS": (3,), "WIDE_HEADS": (2,),
        "WIDE_TOKENS": (1,),
    }.items():  # fmt: skip
        monkeypatch.setattr(tune_prepare, name, value)
    out, plans = tmp_path / "tune.json", tmp_path / "clients" / "launch_plans.json"
    assert run(tune_prepare, monkeypatch, "--out", out, "--plans", plans) == 0
    record = json.loads(out.read_text("utf-8"))
    assert record["complete"] is True
    assert {trial["verdict"] for trial in record["trials"]} == {"equal"}
    assert record["gain"]["chosen/default"] == {"geometric_mean": 1.0, "best": 1.0, "worst": 1.0}
    written = json.loads(plans.read_text("utf-8"))["archs"]["sm_90a"]
    assert written["gpu"] == "NVIDIA Fake"
    assert written["buckets"] == record["buckets"]
