"""The dashboard's pages and files as replies; tests/browser looks at them in a browser."""

import html
import re

import pytest
from service_kit import Client, ClientMaker

from mlaprep.service.errors import DisassemblerUnavailable
from mlaprep.service.job_store import WarmupJob
from mlaprep.service.routes import dashboard, inspection
from mlaprep.service.web.assets import assets
from mlaprep.service.web.highlight import sass_lines, source_lines
from mlaprep.service.web.pages import ago, duration, size, with_query
from mlaprep.templates.arch import Arch
from mlaprep.templates.render import render
from mlaprep.templates.spec import KernelSpec

VARIANT = "mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl"


def test_a_page_runs_and_loads_its_own_files_alone(client: Client) -> None:
    reply = client.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in reply.headers["content-security-policy"]
    assert not re.search(r"<style|style=|<script>|\son\w+=|javascript:", reply.text)
    loaded = set(re.findall(r'(?:src|<link rel="\w+" href)="([^"]+)"', reply.text))
    assert loaded == {asset.url for asset in assets().values()}


def test_files_are_kept_for_ever_under_names_of_their_content(client: Client) -> None:
    for asset in assets().values():
        reply = client.get(asset.url)
        assert (reply.status_code, reply.content) == (200, asset.body)
        assert reply.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert reply.headers["content-type"] == asset.media_type
    for name in ("style.css", "pages.0000000000000000.py", "..%2Fpages.py"):
        assert client.get(f"/assets/{name}").status_code == 404


def test_a_page_of_another_release_gets_files_that_no_cache_keeps(client: Client) -> None:
    reply = client.get("/assets/style.0000000000000000.css")
    assert (reply.status_code, reply.content) == (200, assets()["style.css"].body)
    assert reply.headers["cache-control"] == "no-store"


def test_fields_sent_empty_leave_the_url(client: Client) -> None:
    reply = client.get("/?model=kimi-k3&arch=&num_heads=")
    assert (reply.status_code, reply.headers["location"]) == (303, "/?model=kimi-k3")
    assert client.get("/?arch=").headers["location"] == "/"


def test_what_is_wrong_is_told_as_a_page_without_the_input(client: Client) -> None:
    for path in ("/?cursor=%3Cb%3E", "/?%3Cscript%3E=1", "/?model=x&model=y"):
        reply = client.get(path)
        assert reply.status_code == 422
        assert reply.headers["content-type"] == "text/html; charset=utf-8"
        assert "<b>" not in reply.text
        assert "<script>" not in reply.text
    assert client.request("POST", "/").status_code == 405


def test_values_read_as_people_write_them() -> None:
    assert [size(count) for count in (0, 1023, 1024, 10_035, 2**21, 2**40)] == [
        "0 B", "1023 B", "1.0 KiB", "9.8 KiB", "2.0 MiB", "1024.0 GiB",
    ]  # fmt: skip
    assert [duration(seconds) for seconds in (0, 59.6, 192, 90061)] == ["0 s", "1 min", "3 min 12 s", "1 d 1 h"]
    assert ago("2026-01-31T12:00:00Z").endswith(" d ago")
    assert with_query("/", {"a": 1, "b": None}, c="x&y") == "/?a=1&c=x%26y"


def test_highlighted_lines_are_the_text_and_no_markup_of_it() -> None:
    source = render(KernelSpec(num_heads=12)).text
    assert [text_of(line) for line in source_lines(source)] == source.splitlines()
    hostile = '/* <b>\n</b> */ "&lt;"'
    assert [text_of(line) for line in source_lines(hostile)] == hostile.split("\n")
    assert "<b>" not in "".join(source_lines(hostile))
    listing = "mla_prepare:\n  0100    @P0 BRA .L3\n  0140        LDCU.64 UR4, c[0x0][0x3c8]    // q_nope <\n"
    assert [text_of(line) for line in sass_lines(listing)] == listing.splitlines()
    assert '<span class="k">BRA</span>' in sass_lines(listing)[1]


def text_of(line: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", line))


def test_machine_code_that_cannot_be_shown_leaves_the_page(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.put(f"/v1/kernels/sm_90a/{VARIANT}").status_code == 201

    def refuse(*_: object) -> None:
        raise DisassemblerUnavailable("no nvdisasm")

    monkeypatch.setattr(inspection, "inspect", refuse)
    reply = client.get(f"/variants/{VARIANT}?arch=sm_90a&view=sass")
    assert reply.status_code == 200
    assert "cannot disassemble: no nvdisasm" in reply.text


def test_a_revoked_kernel_says_why(client: Client) -> None:
    path = f"/v1/kernels/sm_90a/{VARIANT}"
    assert client.put(path).status_code == 201
    assert client.request("DELETE", f"{path}?reason=wrong%20bytes%20at%20W%20=%20576").status_code == 200
    page = client.get(f"/variants/{VARIANT}?arch=sm_90a").text
    assert "Revoked." in page
    assert "wrong bytes at W = 576" in page
    assert "Build it" not in page


def test_an_architecture_that_cannot_run_a_variant_is_said_to(client: Client) -> None:
    assert "sm_89 cannot run this variant" in client.get(f"/variants/{VARIANT}?arch=sm_89").text


def test_a_line_to_copy_brings_the_token_where_one_is_needed(make_client: ClientMaker) -> None:
    page = html.unescape(make_client(token="secret-of-this-test").get(f"/variants/{VARIANT}?arch=sm_90a").text)
    assert 'curl -X PUT -H "Authorization: Bearer $MLAPREP_TOKEN" http://127.0.0.1:8400/v1/kernels/sm_90a/' in page
    assert "secret-of-this-test" not in page


def test_a_read_only_service_offers_nothing_to_start(make_client: ClientMaker) -> None:
    client = make_client(read_only=True)
    for path in ("/warmups", "/misses", f"/variants/{VARIANT}?arch=sm_90a", "/status"):
        page = client.get(path).text
        assert "data-warmup" not in page, path
        assert "read-only" in page


def test_more_jobs_than_a_page_shows_are_counted(client: Client) -> None:
    for number in range(52):
        client.service.jobs.store.put(WarmupJob(f"{number:016x}", "", {"kernels": []}, 1, "done", created_at=number))
    page = client.get("/warmups").text
    assert page.count('role="progressbar"') == 50
    assert "The latest 50 of 52." in page
    assert client.get("/warmups?limit=256").text.count('role="progressbar"') == 52


def test_the_status_shows_every_part_of_readyz(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    document = client.get("/readyz").json()
    document["redis"] = {"connected": False, "url": "redis://<kernels>", "round_trips": 12345, "since": None}
    document["counters"]["of_a_later_release"] = 7
    monkeypatch.setattr(dashboard, "ready_document", lambda *_: document)
    page = client.get("/status").text
    for words in ("Redis", "Connected", "redis://&lt;kernels&gt;", "12,345", "Of a later release"):
        assert words in page, words


def test_pages_look_again_while_something_is_built(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    target, path = (KernelSpec(num_heads=12), Arch("sm_90a")), f"/variants/{VARIANT}?arch=sm_90a"
    assert "data-refresh" not in client.get("/").text + client.get(path).text
    monkeypatch.setattr(client.service.builder, "in_flight", lambda: frozenset({target}))
    assert 'id="matrix" data-refresh="2"' in client.get("/?state=building").text
    assert 'id="kernel" data-region data-refresh="2"' in (page := client.get(path).text)
    assert "sm_90a: being built" in page


def test_a_refused_kernel_is_told_from_one_that_nobody_asked_for(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = (KernelSpec(num_heads=12), Arch("sm_90a"))
    monkeypatch.setattr(client.service.builder, "failed", lambda: frozenset({target}))
    page = client.get(f"/variants/{VARIANT}?arch=sm_90a").text
    assert "sm_90a: refused by the compiler" in page
    assert client.get("/?state=failed").text.count('class="state failed"') == 1


def test_a_large_plan_is_not_spelled_out(client: Client) -> None:
    entries = [
        {"arch": ["sm_90a"], "variant_id": KernelSpec(num_heads=1, out_token_stride=4096 + 16 * n).variant_id}
        for n in range(300)
    ]
    client.service.jobs.store.put(WarmupJob("0" * 16, "", {"kernels": entries}, 300, "done"))
    page = client.get(f"/warmups/{'0' * 16}").text
    assert page.count('class="id"') == 200
    assert "100 more are in" in page


def test_head_and_options_are_answered_for_pages_too(client: Client) -> None:
    head = client.request("HEAD", "/")
    assert (head.status_code, head.content, head.headers["content-type"]) == (200, b"", "text/html; charset=utf-8")
    assert client.request("OPTIONS", "/warmups").headers["allow"] == "GET, HEAD, OPTIONS"


def test_a_shared_cache_that_is_gone_shows_on_every_page(make_client: ClientMaker) -> None:
    client = make_client(redis_url="redis://127.0.0.1:1/0")
    client.put(f"/v1/kernels/sm_90a/{VARIANT}")
    assert "ready, with warnings" in client.get("/").text
    page = client.get("/status").text
    assert "Shared cache" in page
    assert "shared cache down: redis://127.0.0.1:1/0" in page
