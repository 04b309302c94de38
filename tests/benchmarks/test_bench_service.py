"""bench_service: its arithmetic, and once through the parts that need neither wrk nor nginx."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import document
import pytest
import service_goals
import serving

WRK = """Running 3s test @ http://127.0.0.1:18401/
  1 threads and 32 connections
  Thread Stats   Avg      Stdev     Max   +/- Stdev
    Latency     1.23ms  312.11us   9.02ms   91.02%
    Req/Sec    26.51k     1.91k   29.70k    70.00%
  Latency Distribution
     50%    {p50}
     75%    1.31ms
     90%    1.52ms
     99%    {p99}
  79141 requests in 3.00s, 771.12MB read
{more}Requests/sec:  26336.33
Transfer/sec:    256.61MB
"""


@pytest.mark.parametrize(
    ("p50", "p99", "milliseconds"), [("950.00us", "2.51ms", (0.95, 2.51)), ("13.37ms", "1.20s", (13.37, 1200.0))]
)
def test_a_report_of_wrk_is_read(p50: str, p99: str, milliseconds: tuple[float, float]) -> None:
    found = serving.parse_wrk(WRK.format(p50=p50, p99=p99, more=""))
    assert (found["p50_ms"], found["p99_ms"]) == pytest.approx(milliseconds)
    assert (found["rps"], found["requests"], found["errors"]) == (26336.33, 79141, 0)


def test_what_failed_under_wrk_is_counted() -> None:
    more = "  Socket errors: connect 1, read 2, write 3, timeout 4\n  Non-2xx or 3xx responses: 5\n"
    assert serving.parse_wrk(WRK.format(p50="1.00ms", p99="2.00ms", more=more))["errors"] == 15
    with pytest.raises(ValueError, match="no report"):
        serving.parse_wrk("unable to connect")


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(number) for number in range(200, 0, -1)]
    assert [service_goals.percentile(values, share) for share in (0, 50, 99, 100)] == [1, 100, 198, 200]
    assert service_goals.percentile([7.0], 99) == 7.0


def test_a_ratio_is_of_one_round_and_the_median_of_all() -> None:
    """The machine is half as fast in the second round; that is nobody's fault."""
    rounds = [{"a": {"rps": a}, "b": {"rps": b}} for a, b in ((80, 100), (30, 50), (90, 100))]
    assert service_goals.paired(rounds, "a", "b", "rps") == 0.8


def test_goals_are_judged_by_their_side_and_left_open_where_nothing_was_measured() -> None:
    figures: dict[str, Any] = {
        "artifacts": {"ratios": {"service/bare": {"rps": 0.7, "p99_ms": 3.5}}, "service_rss_mb": 160.0},
        "warmup": {"service/one_core": 1.8, "healthz": {"p99_ms": 50.0}},
    }
    verdicts = {goal["goal"].partition(",")[0]: goal["pass"] for goal in service_goals.judge(figures, cores=2)}
    assert verdicts["artifact hits: requests a second / bare application's"] is True
    assert verdicts["artifact hits: p99 / bare application's"] is False
    assert verdicts["warm-up / cores × NVRTC alone on one core"] is True
    assert verdicts["/healthz while every core compiles"] is True
    assert verdicts["resident memory with 10"] is False
    assert verdicts["herd: errors"] is None
    assert "not measured" in service_goals.lines(service_goals.judge({}, cores=2))


@pytest.mark.timeout(180)
def test_a_herd_and_a_start_without_wrk(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    command = [sys.executable, str(root / "benchmarks" / "bench_service.py"), "--quick", "--parts", "start,herd"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert (record["benchmark"], record["verified"], record["complete"]) == ("service", True, False)
    assert record["figures"]["start"]["entries"] == 500
    for herd in (record["figures"]["herd"][name] for name in ("cold", "built")):
        assert (herd["compiles"], herd["different_cubins"], herd["errors"]) == (3, 3, 0)
        assert 0 < herd["p50_s"] <= herd["p99_s"] <= herd["most_s"] <= herd["wall_s"]


def test_the_page_on_scaling_is_made_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"rps": {"median": 10_000, "least": 9_000, "most": 11_000}}
    rates |= {key: {"median": 1.5, "least": 1.0, "most": 2.0} for key in ("p50_ms", "p99_ms")}
    servers = dict.fromkeys(("service", "nginx"), rates)
    herd = {"compiles": 40, "errors": 0, "p50_s": 1.0, "p99_s": 2.5, "wall_s": 3.0, "answers_a_second": 500.0}
    figures = {
        "artifacts": {
            "bytes": 10_000,
            "connections": 32,
            "rounds": 9,
            "servers": servers,
        },
        "parsers": {"ratios": {"with/without": {"rps": 3.0}}},
        "warmup": {"kernels_a_second": {"service": {"median": 20.0}}},
        "herd": {"workers": 2000, "kernels": 40, "cold": herd, "built": herd},
    }
    versions = {"python": "3.11", "uvicorn": "0.54", "nvrtc": "12.9", "nginx": "1.22", "wrk": "4.1"}
    record = {"benchmark": "service", "schema": 1, "date": "2026-12-01T00:00:00Z", "wall_s": 9, "complete": True}
    record |= {"machine": {"cpu": "a processor", "cores": 2}, "versions": versions, "figures": figures}
    record["goals"] = service_goals.judge({}, cores=2)
    monkeypatch.setattr(document, "RESULTS", tmp_path)
    text = (document.DOCS / "scaling.md").read_text("utf-8")
    assert "10,000 workers, 40 cubins each" not in document.renewed(text)
    (tmp_path / "service-2core-2026-12-01.json").write_text(json.dumps(record))
    made = document.renewed(text)
    assert "| 10,000 workers, 40 cubins each | 400,000 × 10.0 KB | 4.0 GB |" in made
    assert "| the same by digest from one process | 400,000 ÷ 10000 a second | 40 s |" in made
    assert "| the same with 8 workers a node on one disk cache | 50,000 ÷ 500 a second | 100 s |" in made
    assert "| building 40 variants for 4 architectures | 160 ÷ 20 a second | 8 s |" in made
    assert "| empty | 40 | 0 | 1 | 2.5 | 3 |" in made
    assert document._NOTHING not in made


def test_the_pages_are_those_of_the_newest_records() -> None:
    for page in document.PAGES:
        text = page.read_text("utf-8")
        assert document.renewed(text) == text, f"{page.name}: run python benchmarks/document.py"
