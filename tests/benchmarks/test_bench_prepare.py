"""The benchmark's own judgement, on the CPU: what counts as right, what counts at all, what a record holds."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import contenders  # noqa: E402
import goals  # noqa: E402
import kernels  # noqa: E402
import report  # noqa: E402
import verdict  # noqa: E402
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
    assert verdict.check(layers, queries, due).verdict in ("equal", "overflow")  # by torch's version

    workload.poison(layers, queries)
    assert verdict.check(layers, queries, due).verdict == "WRONG"


def test_one_wrong_byte_in_a_row_that_must_stay_untouched_shows(layers: list[workload.Layer]) -> None:
    due = workload.make_due(layers)
    for layer, wanted in zip(layers, due, strict=True):
        layer.cache.copy_(wanted.cache)
    queries = [wanted.query for wanted in due]
    assert verdict.check(layers, queries, due).verdict == "equal"

    row = min(set(range(32)).difference(layers[1].loc.tolist()))
    layers[1].cache[row, 5] ^= 1
    found = verdict.check(layers, queries, due)
    assert (found.verdict, found.query_bytes_wrong, found.cache_bytes_wrong) == ("WRONG", 0, 1)


@pytest.mark.parametrize(("due_byte", "found_byte", "expected"), [(0x7E, 0x7F, "overflow"), (0x7D, 0x7F, "WRONG")])
def test_nan_passes_as_overflow_only_where_448_is_due(
    layers: list[workload.Layer], due_byte: int, found_byte: int, expected: str
) -> None:
    due = workload.make_due(layers)
    for layer, wanted in zip(layers, due, strict=True):
        layer.cache.copy_(wanted.cache)
    queries = [wanted.query.clone() for wanted in due]
    due[0].query[0, 0, 0] = due_byte
    queries[0][0, 0, 0] = found_byte
    assert verdict.check(layers, queries, due).verdict == expected


@pytest.mark.parametrize(
    ("column", "steps", "expected"), [(512, 1, "near"), (575, 1, "near"), (511, 1, "WRONG"), (512, 2, "WRONG")]
)
def test_one_step_apart_passes_in_rotated_columns_alone(
    monkeypatch: pytest.MonkeyPatch, column: int, steps: int, expected: str
) -> None:
    monkeypatch.setattr(workload, "CACHE_ROWS", 32)
    layers = workload.make_layers(workload.Cell(2, 3, rope=True), workload.cache_pools(1, "cpu"), seed=7)
    due = workload.make_due(layers)
    layers[0].cache.copy_(due[0].cache)
    due[0].query[0, 0, column] = 0x48
    query = due[0].query.clone()
    query[0, 0, column] += steps
    found = verdict.check(layers, [query], due)
    assert (found.verdict, found.ulps) == (expected, steps)


def test_rotation_is_in_the_bytes_that_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "CACHE_ROWS", 32)
    cell = workload.Cell(2, 3, rope=True)
    (layer,) = workload.make_layers(cell, workload.cache_pools(1, "cpu"), seed=7)
    (due,) = workload.make_due([layer])
    assert workload.reference_holds_on_cpu(layer, due)
    angle = layer.positions.double() * 10000.0 ** (-2 / 64)  # of the second pair
    a, b = (layer.k_rope[:, column].double() for column in (2, 3))
    turned = (a * angle.cos() - b * angle.sin()).clamp(-448, 448)
    stored = due.cache[layer.loc, 514].view(torch.float8_e4m3fn).double()
    torch.testing.assert_close(stored, turned, rtol=0.07, atol=0.01)
    assert cell.bytes - workload.Cell(2, 3).bytes == 3 * (8 + 256)


def result(us: float, verdict: str = "equal", gb_per_s: float = 1.0) -> dict[str, Any]:
    return {"us": us, "gb_per_s": gb_per_s, "check": {"verdict": verdict}}


def cell(
    tokens: int, results: dict[str, Any], mode: str = "cold", rope: bool = False, heads: int = 12
) -> dict[str, Any]:
    head = {"heads": heads, "tokens": tokens, "rope": rope, "mode": mode}
    return head | {"results": results, "ratios": report.ratios(results)}


def test_a_time_with_wrong_bytes_counts_nowhere() -> None:
    good = {"chain": result(8.0, "overflow"), "sglang_pdl": result(1.0), "ours_pdl": result(0.8)}
    wrong = good | {"ours_pdl": result(0.1, "WRONG")}
    assert report.ratios(good) == {"ours/sglang": 0.8, "ours/best": 0.8, "chain/ours": 10.0}
    assert report.ratios(wrong) == {}
    assert report.ratios(good | {"ours_pdl": result(0.1, "near")}) == {}, "ours must be the reference's to the last"

    cells = [cell(1, good), cell(16, wrong), cell(64, good | {"ours_pdl": result(0.9)})]
    means = report.summarise(cells)["cold"]["ours/sglang"]
    assert means == {"T <= 16": 0.8, "all": pytest.approx(0.8485, abs=1e-4), "worst": 0.9}
    assert len(report.wrong_of_ours(cells)) == 1
    assert "0.100!" in report.table(cells, 4000.0)


def test_the_best_peer_is_the_fastest_whose_bytes_are_right() -> None:
    results = {
        "chain": result(8.0, "overflow"),
        "sglang_pdl": result(1.2),
        "vllm_structure_pdl": result(1.0),
        "triton_pdl": result(0.5, "WRONG"),
        "floor_pdl": {"us": 0.1},
        "ours_pdl": result(0.9),
        "ours_general_pdl": result(0.8),
    }
    assert report.best_peer(results) == "vllm_structure_pdl"
    assert report.ratios(results)["ours/best"] == 0.9
    assert report.ratios(results)["general/best"] == 0.8
    assert report.best_peer({"ours_pdl": result(0.9)}) is None
    near = {"flashinfer_append_pdl": result(2.0, "near"), "flashinfer_scatter_pdl": result(2.5), "ours_pdl": result(1)}
    assert report.ratios(near) == {"ours/best": 0.5}


def test_goals_are_judged_over_cold_and_hot_cells() -> None:
    floor = {"floor_pdl": {"us": 0.6}}
    peers = {"chain": result(8.0, "overflow"), "sglang_pdl": result(1.0), "vllm_structure_pdl": result(0.95)}
    flashinfer = {"flashinfer_append_pdl": result(2.0, "near"), "flashinfer_scatter_pdl": result(2.5)}
    record = {
        "copy_gb_per_s": {"median": 4000.0},
        "host": {"ours/sglang": 0.5},
        "cells": [
            cell(1, floor | peers | {"ours_pdl": result(0.9), "ours_general_pdl": result(0.8)}),
            cell(1, floor | peers | {"ours_pdl": result(0.8)}, "hot"),
            cell(1024, peers | {"ours_pdl": result(0.99, gb_per_s=3900.0)}, heads=64),
            cell(16, flashinfer | {"ours_pdl": result(1.2)}, rope=True),
            cell(64, flashinfer | {"ours_pdl": result(2.1)}, rope=True),
        ],
    }
    found = [(goal["found"], goal["general"], goal["cells"], goal["pass"]) for goal in goals.evaluate(record)]
    assert found == [
        (pytest.approx((0.9 * 0.8 * 0.99) ** (1 / 3), abs=1e-4), 0.8, 3, False),
        (pytest.approx(0.72**0.5, abs=1e-4), 0.8, 2, False),
        (pytest.approx((0.9 * 0.8 * 0.99) ** (1 / 3) / 0.95, abs=1e-3), pytest.approx(0.8421), 3, False),
        (pytest.approx(0.99 / 0.95, abs=1e-4), pytest.approx(0.8421), 3, False),
        (pytest.approx(8 / 0.9, abs=1e-3), None, 2, True),
        (pytest.approx(0.3), pytest.approx(0.2), 2, True),
        (0.975, None, 1, True),
        (0.6, None, 1, True),
        (1.05, None, 2, False),
        (0.5, None, 1, False),
    ]
    printed = goals.lines(goals.evaluate(record)).splitlines()
    assert [line.split()[-1] for line in printed[1:]] == [{True: "pass", False: "FAIL"}[passed] for *_, passed in found]


def test_goals_without_measurements_are_neither_met_nor_missed() -> None:
    found = goals.evaluate({"copy_gb_per_s": {"median": 4000.0}, "cells": []})
    assert {goal["pass"] for goal in found} == {None}
    assert goals.lines(found).count("not measured") == len(found)


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
