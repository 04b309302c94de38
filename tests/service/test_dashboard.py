"""The dashboard's pages and files as replies; tests/browser looks at them in a browser."""

import re

from service_kit import Client

from mlaprep.service.web.assets import assets
from mlaprep.service.web.pages import ago, duration, size, with_query


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
    for name in ("style.css", "style.0000000000000000.css", "..%2Fpages.py"):
        assert client.get(f"/assets/{name}").status_code == 404


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
