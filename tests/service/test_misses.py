"""/v1/misses: what workers lacked is counted, bounded, kept, and listed with its state by now."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from service_kit import Client, ClientMaker, ServerMaker, wait_for

from mlaprep.kernels_cache.disk import DiskStore
from mlaprep.kernels_cache.opening import folder_of
from mlaprep.kernels_cache.store import MemoryStore, TieredStore
from mlaprep.service import misses as module
from mlaprep.service.misses import FILE, Misses, MissReport
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec

VARIANT = "mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl"
ENTRY = {"variant_id": VARIANT, "arch": "sm_100a"}


def post(client: Client, *entries: Any) -> Any:
    return client.request("POST", "/v1/misses", json={"misses": list(entries)})


def listed(client: Client, query: str = "") -> list[tuple[str, str, int]]:
    rows = client.get(f"/v1/misses{query}").json()["misses"]
    return [(row["variant_id"], row["arch"], row["count"]) for row in rows]


def reports(heads: range, arch: str = "sm_90a") -> list[MissReport]:
    return [
        MissReport(KernelSpec(num_heads=h, kv_lora_rank=r), Arch(arch), 1, "compiled")
        for r in range(16, 1024, 16)
        for h in heads
    ]


class TestRoute:
    def test_reports_are_summed_and_listed(self, client: Client) -> None:
        assert post(client, ENTRY).json() == {"recorded": 1, "ignored": 0}
        other = ENTRY | {"arch": "sm_90a"}
        post(client, ENTRY | {"count": 4, "reason": "compiled"}, other | {"reason": "unavailable"})
        reply = client.get("/v1/misses").json()
        first, second = reply["misses"]
        assert (first["arch"], first["count"], first["reasons"]) == ("sm_100a", 5, {"built": 1, "compiled": 4})
        assert (second["arch"], second["count"], second["reasons"]) == ("sm_90a", 1, {"unavailable": 1})
        assert (first["models"], first["state"]) == (["kimi-k3"], "missing")
        assert first["first_seen"] <= first["last_seen"]
        assert (reply["total"], reply["next_cursor"]) == (2, None)
        assert listed(client, "?arch=sm_90a") == [(VARIANT, "sm_90a", 1)]

    def test_what_is_built_meanwhile_shows(self, client: Client) -> None:
        client.service.compiler.version()
        post(client, ENTRY)
        assert client.get("/v1/misses").json()["misses"][0]["state"] == "missing"
        assert client.put(f"/v1/kernels/sm_100a/{VARIANT}").status_code == 201
        assert client.get("/v1/misses").json()["misses"][0]["state"] == "built"

    def test_reporting_builds_nothing_and_needs_no_token(self, make_client: ClientMaker) -> None:
        for settings in ({"token": "secret"}, {"read_only": True}):
            client = make_client(**settings)
            assert post(client, ENTRY).status_code == 200
            assert client.service.builder.compiles == 0

    @pytest.mark.parametrize("order", ["count", "last_seen"])
    def test_pages_have_every_miss_once(self, client: Client, order: str) -> None:
        for number in range(1, 12):
            name = KernelSpec(num_heads=number).variant_id
            post(client, {"variant_id": name, "arch": "sm_90a", "count": number % 4 + 1})
        seen, cursor = [], ""
        while cursor is not None:
            reply = client.get(f"/v1/misses?limit=3&order={order}{cursor and f'&cursor={cursor}'}").json()
            seen += [row["variant_id"] for row in reply["misses"]]
            cursor = reply["next_cursor"]
        assert len(seen) == len(set(seen)) == 11
        assert seen == [name for name, *_ in listed(client, f"?order={order}")]

    @pytest.mark.parametrize(
        ("entry", "field"),
        [
            (7, "entry"),
            (None, "entry"),
            ({}, "variant_id"),
            ({"variant_id": VARIANT}, "arch"),
            (ENTRY | {"variant_id": "../../etc/passwd"}, "variant_id"),
            (ENTRY | {"variant_id": f"{VARIANT}\n"}, "variant_id"),
            (ENTRY | {"variant_id": "<script>"}, "variant_id"),
            (ENTRY | {"variant_id": ["x"]}, "variant_id"),
            (ENTRY | {"variant_id": VARIANT.replace("h12", "h0")}, "num_heads"),
            (ENTRY | {"arch": "sm_1"}, "arch"),
            (ENTRY | {"arch": ["sm_90a"]}, "arch"),
            (ENTRY | {"arch": "sm_89"}, "pdl"),
            (ENTRY | {"count": 0}, "count"),
            (ENTRY | {"count": True}, "count"),
            (ENTRY | {"count": 1.0}, "count"),
            (ENTRY | {"count": 10_001}, "count"),
            (ENTRY | {"reason": "because"}, "reason"),
            (ENTRY | {"reason": ["built"]}, "reason"),
            (ENTRY | {"extra": 1}, "extra"),
            (ENTRY | {"\x1b[31m": 1}, "(unprintable name)"),
        ],
    )
    def test_a_bad_entry_is_named_and_nothing_is_counted(self, client: Client, entry: Any, field: str) -> None:
        reply = post(client, ENTRY, entry)
        assert reply.status_code == 422
        assert f"misses.1.{field}" in {problem["field"] for problem in reply.json()["problems"]}
        for hostile in ("passwd", "script", "because", "\x1b"):
            assert hostile not in reply.text
        assert listed(client) == []

    def test_every_bad_entry_is_listed(self, client: Client) -> None:
        reply = post(client, *[{"variant_id": "x", "arch": "y"}] * 200)
        numbers = {problem["field"].split(".")[1] for problem in reply.json()["problems"]}
        assert (reply.status_code, len(numbers)) == (422, 200)

    @pytest.mark.parametrize(
        "body", [b"[]", b"7", b"null", b"{}", b'{"misses": {}}', b'{"misses": []}', b'{"miss": [1]}']
    )
    def test_a_body_of_another_shape_is_refused(self, client: Client, body: bytes) -> None:
        headers = {"content-type": "application/json"}
        assert client.request("POST", "/v1/misses", content=body, headers=headers).status_code == 422
        assert client.request("POST", "/v1/misses", content=body).status_code == 415

    def test_a_report_is_bounded(self, client: Client) -> None:
        assert post(client, *[ENTRY] * 257).status_code == 422
        huge = client.request("POST", "/v1/misses", content=b" " * 70_000, headers={"content-type": "application/json"})
        assert huge.status_code == 413

    @pytest.mark.parametrize(
        "cursor",
        ["x", "1", f"0.1.sm_90a.{VARIANT}", f"1.1.sm_1.{VARIANT}", "1.1.sm_90a.x", f"{10**16}.1.sm_90a.{VARIANT}"],
    )
    def test_a_bad_cursor_is_refused(self, client: Client, cursor: str) -> None:
        reply = client.get("/v1/misses", params={"cursor": cursor})
        assert [problem["field"] for problem in reply.json()["problems"]] == ["cursor"]


class TestBounds:
    def test_a_flood_of_unknown_kernels_is_ignored_and_known_ones_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "NEW_AT_ONCE", 100)
        monkeypatch.setattr(module, "NEW_PER_S", 0.0)
        misses = Misses()
        known = reports(range(1, 2))[:10]
        assert misses.record(known) == (10, 0)
        assert misses.record(reports(range(2, 12))) == (90, len(reports(range(2, 12))) - 90)
        assert misses.record(known) == (10, 0)
        assert misses.page("count", 10).misses[0][2].count == 2

    def test_the_longest_ago_go_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "MAX_MISSES", 50)
        misses = Misses()
        every = reports(range(1, 4))
        for start in range(0, 120, 10):
            misses.record([every[0], *every[start : start + 10]])
            misses.save()
        page = misses.page("count", 500)
        assert page.total == 50
        assert page.misses[0][:2] == (every[0].spec, every[0].arch)

    def test_counts_do_not_overflow(self, tmp_path: Path) -> None:
        misses = Misses()
        one = reports(range(1, 2))[0]
        misses.record([MissReport(one.spec, one.arch, 2**53 - 2, "built")])
        misses.record([MissReport(one.spec, one.arch, 10_000, "built")])
        assert misses.page("count", 1).misses[0][2].count == 2**53 - 1


class TestFile:
    def test_a_restart_loses_nothing(self, make_client: ClientMaker) -> None:
        before = make_client()
        post(before, ENTRY | {"count": 3})
        before.service.misses.close()
        assert listed(make_client()) == [(VARIANT, "sm_100a", 3)]

    def test_a_timer_saves(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "SAVE_S", 0.01)
        misses = Misses(DiskStore(tmp_path / "cache").root)
        misses.record(reports(range(1, 2))[:3])
        file = tmp_path / "cache" / FILE
        wait_for(file.exists)
        assert len(json.loads(file.read_text())["misses"]) == 3

    def test_processes_that_share_a_directory_show_the_sum(self, tmp_path: Path) -> None:
        folder = DiskStore(tmp_path / "cache").root
        shared = [Misses(folder) for _ in range(4)]
        one = reports(range(1, 2))[:5]

        def tell(misses: Misses) -> None:
            for _ in range(5):
                misses.record(one)
                misses.save()

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(tell, shared))
        for misses in shared:
            assert [miss.count for *_, miss in misses.page("count", 10).misses] == [20] * 5

    def test_reports_during_a_save_are_kept(self, tmp_path: Path) -> None:
        misses = Misses(DiskStore(tmp_path / "cache").root)
        one = reports(range(1, 2))[:2]
        stop = threading.Event()

        def save() -> None:
            while not stop.is_set():
                misses.save()

        thread = threading.Thread(target=save)
        thread.start()
        for _ in range(200):
            misses.record(one)
        stop.set()
        thread.join()
        misses.close()
        assert [miss.count for *_, miss in Misses(misses._folder).page("count", 10).misses] == [200, 200]

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            "[]",
            '{"schema": 2, "misses": []}',
            '{"schema": 1, "misses": 7}',
            '{"schema": 1, "misses": [7, [], ["x", "sm_90a", 1, 1, {}], [1, 2, 3, 4, 5]]}',
            '{"schema": 1, "misses": [["a", "sm_90a", 1, 1, {"because": 1}], ["a", "sm_90a", true, 1, {"built": 1}]]}',
            f'{{"schema": 1, "misses": [["{VARIANT}", "sm_90a", 1, 999999999999, {{"built": 1}}]]}}',
            '{"schema": 1, "misses": [["../../x", "sm_90a", 1, 1, {"built": 1}], ["\\u001b", "y", 1, 1, {}]]}',
        ],
    )
    def test_a_file_that_makes_no_sense_is_passed_over(
        self, make_client: ClientMaker, tmp_path: Path, text: str
    ) -> None:
        client = make_client()
        (tmp_path / "cache" / FILE).write_text(text)
        assert listed(client) == []
        post(client, ENTRY)
        client.service.misses.save()
        assert listed(make_client()) == [(VARIANT, "sm_100a", 1)]

    def test_a_directory_that_cannot_be_written_is_no_error(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = DiskStore(tmp_path / "cache").root
        (folder / FILE).mkdir()
        (folder / FILE / "x").touch()
        misses = Misses(folder)
        for _ in range(3):
            misses.record(reports(range(1, 2))[:2])
            misses.save()
        assert [miss.count for *_, miss in misses.page("count", 10).misses] == [3, 3]
        assert sum("cannot be written" in record.getMessage() for record in caplog.records) == 1

    def test_a_store_without_a_directory_has_no_file(self, tmp_path: Path) -> None:
        disk = DiskStore(tmp_path / "cache")
        assert folder_of(MemoryStore()) is None
        assert folder_of(TieredStore([MemoryStore(), disk])) == disk.root


def test_a_stopped_server_keeps_its_misses(run_server: ServerMaker, tmp_path: Path) -> None:
    import httpx

    with run_server(wait=False) as server:
        assert httpx.post(f"{server.url}/v1/misses", json={"misses": [ENTRY]}).json() == {"recorded": 1, "ignored": 0}
        assert server.stop() == 0
    with run_server(wait=False) as server:
        assert httpx.get(f"{server.url}/v1/misses").json()["misses"][0]["count"] == 1
