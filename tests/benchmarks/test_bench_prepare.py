"""The benchmark's own judgement, on the CPU: what counts as right, what counts at all, what a record holds."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import contenders  # noqa: E402
import kernels  # noqa: E402
import peers  # noqa: E402
import report  # noqa: E402
import workload  # noqa: E402

from mlaprep.kernels_cache.elf import check_cubin  # noqa: E402
from mlaprep.templates.arch import Arch  # noqa: E402
from mlaprep.templates.render import KernelSource  # noqa: E402

ARCH = Arch("sm_90a")


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[workload.Layer]:
    monkeypatch.setattr(workload, "CACHE_ROWS", 32)
    return workload.make_layers(workload.Cell(heads=2, tokens=3), workload.cache_pools(2, "cpu"), seed=7)


def test_operands_are_laid_out_as_a_model_hands_them_over(layers: list[workload.Layer]) -> None:
    layer = layers[0]
    assert layer.q_nope.shape == (3, 2, 512)
    assert layer.q_nope.stride() == (512, 3 * 512, 1)
    assert layer.q_rope.stride() == (2 * 192, 192, 1)
    assert layer.k_nope.stride() == layer.k_rope.stride() == (2112, 1)
    assert len(set(layer.loc.tolist())) == 3
    assert not any((tensor == 0).any() for tensor in layer[:4])
    assert layer.q_nope.abs().max() > 464
    strides = workload.fixed_strides(2)
    assert strides["q_rope_token_stride"] == layer.q_rope.stride(0)
    assert strides["cache_row_stride"] == layer.cache.stride(0)


def test_bytes_count_each_operand_once() -> None:
    layer = 2 * (13 * 576) * 2 + 2 * (13 * 576) + 2 * 8
    assert workload.Cell(heads=12, tokens=2).bytes == layer


def test_the_chain_passes_and_what_is_not_written_shows(layers: list[workload.Layer]) -> None:
    due = workload.make_due(layers)
    assert workload.reference_holds_on_cpu(layers[0], due[0])
    workload.poison(layers, [])
    queries = [contenders.five_launches(layer) for layer in layers]
    assert workload.check(layers, queries, due).verdict in ("equal", "overflow")  # by torch's version

    workload.poison(layers, queries)
    assert workload.check(layers, queries, due).verdict == "WRONG"


def test_one_wrong_byte_in_a_row_that_must_stay_untouched_shows(layers: list[workload.Layer]) -> None:
    due = workload.make_due(layers)
    for layer, wanted in zip(layers, due, strict=True):
        layer.cache.copy_(wanted.cache)
    queries = [wanted.query for wanted in due]
    assert workload.check(layers, queries, due).verdict == "equal"

    row = min(set(range(32)).difference(layers[1].loc.tolist()))
    layers[1].cache[row, 5] ^= 1
    found = workload.check(layers, queries, due)
    assert (found.verdict, found.query_bytes_wrong, found.cache_bytes_wrong) == ("WRONG", 0, 1)


@pytest.mark.parametrize(("due_byte", "found_byte", "verdict"), [(0x7E, 0x7F, "overflow"), (0x7D, 0x7F, "WRONG")])
def test_nan_passes_as_overflow_only_where_448_is_due(
    layers: list[workload.Layer], due_byte: int, found_byte: int, verdict: str
) -> None:
    due = workload.make_due(layers)
    for layer, wanted in zip(layers, due, strict=True):
        layer.cache.copy_(wanted.cache)
    queries = [wanted.query.clone() for wanted in due]
    due[0].query[0, 0, 0] = due_byte
    queries[0][0, 0, 0] = found_byte
    assert workload.check(layers, queries, due).verdict == verdict


def result(us: float, verdict: str = "equal") -> dict[str, Any]:
    return {"us": us, "gb_per_s": 1.0, "check": {"verdict": verdict}}


def cell(tokens: int, results: dict[str, Any]) -> dict[str, Any]:
    return {"heads": 12, "tokens": tokens, "mode": "cold", "results": results, "ratios": report.ratios(results)}


def test_a_time_with_wrong_bytes_counts_nowhere() -> None:
    good = {"chain": result(8.0, "overflow"), "sglang_pdl": result(1.0), "ours_pdl": result(0.8)}
    wrong = good | {"ours_pdl": result(0.1, "WRONG")}
    assert report.ratios(good) == {"ours/sglang": 0.8, "chain/ours": 10.0}
    assert report.ratios(wrong) == {}

    cells = [cell(1, good), cell(16, wrong), cell(64, good | {"ours_pdl": result(0.9)})]
    means = report.summarise(cells, 4000.0)["cold"]["geometric_means"]["ours/sglang"]
    assert means == {"T <= 16": 0.8, "all": pytest.approx(0.8485, abs=1e-4), "worst": 0.9}
    assert len(report.wrong_of_ours(cells)) >= 1
    assert "0.100!" in report.table(cells, 4000.0)


def test_a_peer_that_fails_leaves_the_rest_of_the_line() -> None:
    failed = report.failure(RuntimeError("no nvcc"))
    line = report.table([cell(1, {"sglang_pdl": failed, "ours_pdl": result(0.8)})], 4000.0).splitlines()[-1]
    assert "failed" in line
    assert "0.800=" in line


def test_a_failure_carries_no_path_of_this_machine() -> None:
    text = report.failure(OSError("cannot open /opt/some-where/1.2+x/kernel.cuh:5"))["error"]
    assert text == "OSError: cannot open kernel.cuh:5"


def test_a_record_reads_back(tmp_path: Path) -> None:
    record = {"benchmark": "prepare", "cells": [{"a": 1, "text": "µs"}, {"a": None}], "host": {"us": {"x": [1.5]}}}
    path = tmp_path / "results" / "record.json"
    report.write(record, path)
    report.write(record, path)
    assert json.loads(path.read_text("utf-8")) == record
    assert [entry.name for entry in path.parent.iterdir()] == ["record.json"]


def test_the_empty_kernel_compiles_without_a_gpu() -> None:
    for pdl in (False, True):
        cubin, _ = kernels.compile_floor(ARCH, pdl=pdl)
        check_cubin(cubin, "sm_90a")


def test_kernels_come_from_the_directory_while_their_code_is_todays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = kernels.spec_of(12, pdl=True, fixed=True)
    made = kernels.obtain(spec, ARCH, tmp_path)

    def compile_again(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(kernels, "_compile", compile_again)
    assert kernels.obtain(spec, ARCH, tmp_path).digest == made.digest
    with pytest.raises(AssertionError, match="compiled again"):
        kernels.obtain(kernels.spec_of(12, pdl=False, fixed=True), ARCH, tmp_path)

    text = kernels.render(spec).text

    def rendered_as(other: str) -> None:
        monkeypatch.setattr(kernels, "render", lambda spec: KernelSource(spec, other))

    # Another jinja2 shows in the head comment only; the code is the same.
    rendered_as(text.replace("// jinja2 ", "// jinja2 9"))
    assert kernels.obtain(spec, ARCH, tmp_path).digest == made.digest
    rendered_as(text.replace("kLoraRank = 512", "kLoraRank = 496"))
    with pytest.raises(AssertionError, match="compiled again"):
        kernels.obtain(spec, ARCH, tmp_path)


def test_a_missing_peer_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PEERS", tmp_path)
    monkeypatch.delenv(peers.ENVIRON, raising=False)
    sglang = peers.Sglang(None, (9, 0))
    assert "fetch_peers" in sglang.facts()["error"]
    for _ in range(2):
        with pytest.raises(peers.PeerMissing, match="fetch_peers"):
            sglang.kernel(True)
