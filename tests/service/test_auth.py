"""Tokens and scopes: who is let in, for what, what the others are told, and that no secret shows anywhere."""

import logging
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st
from service_kit import Client, ClientMaker

from mlaprep.service import tokens
from mlaprep.service.auth import requirement_of
from mlaprep.service.token_file import TokenFile
from mlaprep.service.tokens import SCOPES, Token, TokenList, digest_of, find_token, make_token
from mlaprep.templates.errors import SpecError

VARIANT = "mla_prepare-h12-r512-d64-bf16-fp8-norope-i64-pdl"
KERNEL = f"/v1/kernels/sm_100a/{VARIANT}"
SECRETS = {scope: f"a-token-of-scope-{scope}" for scope in SCOPES}


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def write(path: Path, *lines: str) -> Path:
    """As an editor or a mounted secret does: a new file takes the place of the old one."""
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(f"{line}\n" for line in lines))
    fresh.chmod(0o600)
    fresh.replace(path)
    return path


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    lines = [Token(f"{scope}er", scope, digest_of(secret)).line() for scope, secret in SECRETS.items()]
    return write(tmp_path / "tokens", "# who may do what", "", *lines)


@pytest.fixture
def guarded(make_client: ClientMaker, token_file: Path) -> Client:
    """A service with a token for each scope, that asks for one to read too."""
    return make_client(host="0.0.0.0", tokens_file=token_file, reads_need_token=True)


def slug(reply: httpx.Response) -> str:
    assert reply.headers["content-type"] == "application/problem+json"
    return str(reply.json()["type"]).rpartition(":")[2]


def routes(client: Client) -> list[Any]:
    """What the application answers, routers that it includes taken apart."""
    found: list[Any] = []
    for route in client.app.routes:
        router = getattr(route, "original_router", None)
        found += [route] if router is None else router.routes
    assert len(found) > 20
    return found


def calls(client: Client) -> list[tuple[APIRoute, str, str]]:
    """Every route with a method and a path that it answers."""
    values = {"arch": "sm_100a", "variant_id": VARIANT, "digest": "0" * 64, "key": "0" * 64, "job_id": "0" * 16}
    return [
        (route, method, re.sub(r"{(\w+)}", lambda match: values.get(match[1], "x"), route.path))
        for route in routes(client)
        for method in route.methods
        if method != "HEAD"
    ]


def test_every_route_says_what_it_takes(client: Client) -> None:
    """A route that was forgotten would be open to all. ``dependencies=[require(...)]`` or ``open_to_all()``."""
    silent = [route.path for route in routes(client) if requirement_of(route) is None]
    assert silent == []
    takes = {(method, route.path): requirement_of(route).scope for route, method, _ in calls(client)}  # type: ignore[union-attr]
    open_paths = {path for (_, path), scope in takes.items() if scope is None}
    assert open_paths == {"/healthz", "/readyz", "/metrics", "/assets/{name}"}
    for (method, path), scope in takes.items():
        assert method == "GET" or scope in ("build", "admin") or path == "/v1/misses", (method, path)
    assert {path for (_, path), scope in takes.items() if scope == "admin"} == {
        "/v1/kernels/{arch}/{variant_id}",
        "/v1/revocations/{key}",
    }


def test_every_route_holds_callers_to_it(guarded: Client) -> None:
    for route, method, path in calls(guarded):
        scope = requirement_of(route).scope  # type: ignore[union-attr]
        reply = guarded.request(method, path)
        if scope is None:
            assert reply.status_code in (200, 404, 503), path
            continue
        assert reply.status_code == 401, path
        assert "html" in reply.headers["content-type"] or slug(reply) == "token-required", path
        assert reply.headers["www-authenticate"] == f'Bearer realm="mlaprep", scope="{scope}"'
        for held, secret in SECRETS.items():
            if SCOPES.index(held) < SCOPES.index(scope):
                reply = guarded.request(method, path, headers=bearer(secret))
                assert (reply.status_code, slug(reply)) == (403, "insufficient-scope"), path
                assert f"has scope {held}" in reply.json()["detail"]
                assert f"scope {scope}" in reply.json()["title"]
                assert f'error="insufficient_scope", scope="{scope}"' in reply.headers["www-authenticate"]
        if "events" not in path:
            reply = guarded.request(method, path, headers=bearer(SECRETS[scope]))
            assert reply.status_code not in (401, 403), path


def test_the_document_says_which_scope_a_call_takes(client: Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert paths["/v1/kernels/{arch}/{variant_id}"]["put"]["security"] == [{"token": ["build"]}, {}]
    assert paths["/v1/kernels/{arch}/{variant_id}"]["delete"]["security"] == [{"token": ["admin"]}, {}]
    assert "security" not in paths["/healthz"]["get"]
    for path, item in paths.items():
        for operation in item.values():
            assert ("401" in operation["responses"]) is ("security" in operation), path
    assert "<code>admin</code>" in client.get("/docs").text


def test_reading_is_open_unless_asked_otherwise(make_client: ClientMaker, token_file: Path) -> None:
    client = make_client(host="0.0.0.0", tokens_file=token_file)
    assert client.get("/v1/archs").status_code == 200
    assert client.get("/v1/archs", headers=bearer("wrong")).status_code == 200
    assert slug(client.put(KERNEL)) == "token-required"
    assert client.put(KERNEL, headers=bearer(SECRETS["build"])).status_code == 201
    assert slug(client.request("DELETE", KERNEL, headers=bearer(SECRETS["build"]))) == "insufficient-scope"
    assert client.request("DELETE", KERNEL, headers=bearer(SECRETS["admin"])).status_code == 200


def test_the_single_token_has_every_scope(make_client: ClientMaker) -> None:
    client = make_client(token="one-token-for-all", reads_need_token=True)
    assert slug(client.get("/v1/archs")) == "token-required"
    for method, path in (("GET", "/v1/archs"), ("PUT", KERNEL), ("DELETE", KERNEL)):
        assert client.request(method, path, headers=bearer("one-token-for-all")).is_success


def test_no_shared_cache_keeps_what_takes_a_token(make_client: ClientMaker, token_file: Path) -> None:
    """A proxy that kept an artifact would hand it to callers without a token."""
    for asked, kept in ((False, "public"), (True, "private")):
        client = make_client(tokens_file=token_file, reads_need_token=asked)
        manifest = client.put(KERNEL, headers=bearer(SECRETS["build"])).json()["manifest"]
        reply = client.get(f"/v1/artifacts/{manifest['cubin_sha256']}", headers=bearer(SECRETS["read"]))
        assert reply.headers["cache-control"] == f"{kept}, max-age=31536000, immutable"


def test_an_old_token_and_its_successor_hold_side_by_side(make_client: ClientMaker, tmp_path: Path) -> None:
    old, first = make_token("ci", "build")
    new, second = make_token("ci", "build", "2999-01-01")
    path = write(tmp_path / "tokens", first.line())
    client = make_client(tokens_file=path)
    assert client.put(KERNEL, headers=bearer(old)).status_code == 201
    assert client.put(KERNEL, headers=bearer(new)).status_code == 401
    write(path, first.line(), second.line())
    assert client.put(KERNEL, headers=bearer(old)).status_code == 200
    assert client.put(KERNEL, headers=bearer(new)).status_code == 200
    write(path, second.line())
    reply = client.put(KERNEL, headers=bearer(old))
    assert (reply.status_code, slug(reply)) == (401, "invalid-token")
    assert client.put(KERNEL, headers=bearer(new)).status_code == 200


def test_a_file_edited_in_place_holds_from_the_next_request_on(tmp_path: Path) -> None:
    one, two = make_token("a", "read")[1], make_token("b", "read")[1]
    path = write(tmp_path / "tokens", one.line())
    file = TokenFile.open(path)
    assert file.tokens() == (one,)
    for _ in range(50):  # quicker than the clock of the file system, and of equal length
        for token in (two, one):
            path.write_text(token.line())
            assert file.tokens() == (token,)
    past = 10**9
    os.utime(path, ns=(past, past))
    assert file.tokens() == (one,)


def test_a_mounted_secret_holds_as_soon_as_it_is_swapped(make_client: ClientMaker, tmp_path: Path) -> None:
    """As kubelet does it: the file is a link into a folder that is a link, and the latter is replaced."""
    (old, first), (new, second) = make_token("ci", "build"), make_token("ci", "build")
    for number, token in enumerate((first, second)):
        (tmp_path / str(number)).mkdir()
        write(tmp_path / str(number) / "tokens", token.line())
    (tmp_path / "..data").symlink_to("0")
    (tmp_path / "tokens").symlink_to("..data/tokens")
    client = make_client(tokens_file=tmp_path / "tokens")
    for secret, status in ((old, 201), (new, 401)):
        assert client.put(KERNEL, headers=bearer(secret)).status_code == status
    (tmp_path / "..next").symlink_to("1")
    (tmp_path / "..next").rename(tmp_path / "..data")
    for secret, status in ((old, 401), (new, 200)):
        assert client.put(KERNEL, headers=bearer(secret)).status_code == status


def test_a_mistake_in_the_file_lets_nobody_in_that_it_should_not(
    make_client: ClientMaker, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = make_client(tokens_file=token_file)
    lines = token_file.read_text().splitlines()
    write(token_file, *(line.replace("builder  build", "builder  biuld") for line in lines))
    with caplog.at_level(logging.WARNING):
        assert client.put(KERNEL, headers=bearer(SECRETS["build"])).status_code == 401
        assert client.put(KERNEL, headers=bearer(SECRETS["admin"])).status_code == 201
    assert client.get("/readyz").json()["warnings"] == ["token file, line 4: a second word that is no scope"]
    assert caplog.text.count("line 4: a second word that is no scope") == 1
    token_file.unlink()
    assert client.put(KERNEL, headers=bearer(SECRETS["admin"])).status_code == 401
    assert client.put(KERNEL).status_code == 401  # not as if it had never had any
    assert "cannot be read" in client.get("/readyz").json()["warnings"][0]
    write(token_file, *lines)
    assert client.put(KERNEL, headers=bearer(SECRETS["build"])).status_code == 200
    assert client.get("/readyz").json()["warnings"] == []


@pytest.mark.parametrize(
    "break_it",
    [
        lambda path: path.unlink(),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: path.chmod(0o646),
        lambda path: path.write_text("ci build sha256:00\n"),
        lambda path: path.write_text("ci build " + "sha256:" + "0" * 64 + " soon\n"),
        lambda path: path.write_text("s3cret\n"),
        lambda path: path.write_bytes(b"\xff\xfe\0" * 10),
        lambda path: path.write_text("#" * 300_000),
        lambda path: path.write_text(f"a read sha256:{'0' * 64}\n" * (tokens.MAX_TOKENS + 1)),
    ],
    ids=["gone", "folder", "open", "digest", "date", "secret", "bytes", "long", "many"],
)
def test_a_service_does_not_start_with_a_broken_file(
    make_client: ClientMaker, token_file: Path, break_it: Callable[[Path], Any]
) -> None:
    break_it(token_file)
    with pytest.raises(SpecError, match="MLAPREP_TOKENS_FILE") as failure:
        make_client(tokens_file=token_file)
    assert "s3cret" not in str(failure.value)


def test_an_end_is_kept() -> None:
    now = datetime(2027, 1, 31, tzinfo=UTC)
    token = TokenList.parse(f"ci build sha256:{'0' * 64} 2027-01-31").tokens[0]
    assert token.is_valid(now - timedelta(seconds=1))
    assert not token.is_valid(now)
    assert TokenList.parse(f"ci build sha256:{'0' * 64} 2027-01-31T02:00:00+02:00").tokens == (token,)
    past = Token("ci", "build", digest_of("x"), datetime.now(UTC) - timedelta(seconds=1))
    assert find_token(b"x", [past]) is None
    assert find_token(b"x", [past, Token("ci", "read", digest_of("x"))]) is not None


@given(
    name=st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True),
    scope=st.sampled_from(SCOPES),
    expires=st.none() | st.datetimes(datetime(2027, 1, 1), datetime(2999, 1, 1), timezones=st.just(UTC)),
)
def test_a_line_reads_back_as_the_same_token(name: str, scope: tokens.Scope, expires: datetime | None) -> None:
    token = Token(name, scope, digest_of(name), expires and expires.replace(microsecond=0))
    assert TokenList.parse(token.line() + "  # a remark") == TokenList((token,))


@given(st.text(max_size=200))
def test_no_text_breaks_the_parser_or_makes_a_token(text: str) -> None:
    read = TokenList.parse(text)
    assert read.tokens == ()


def test_all_tokens_are_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def compare(_: str, digest: str) -> bool:
        compared.append(digest)
        return _ == digest

    monkeypatch.setattr(tokens.hmac, "compare_digest", compare)
    held = [Token(str(number), "read", digest_of(str(number))) for number in range(20)]
    for secret in ("0", "19", "none"):
        compared.clear()
        found = find_token(secret.encode(), held)
        assert (found and found.name) == (None if secret == "none" else secret)
        assert compared == [token.digest for token in held]


def test_a_made_token_cannot_be_guessed_or_mistaken() -> None:
    secrets = {make_token("ci", "build")[0] for _ in range(100)}
    assert len(secrets) == 100
    assert all(re.fullmatch(r"mlaprep_[A-Za-z0-9_-]{43}", secret) for secret in secrets)
    for name, scope, expires in (("a b", "root", "soon"), ("", "", "2001-01-01"), ("x\n", "read ", "")):
        with pytest.raises(SpecError) as failure:
            make_token(name, scope, expires)
        assert {problem.field for problem in failure.value.problems} == {"name", "scope", "expires"}


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", "Bearer  ")],
        [("authorization", "Bearer")],
        [("authorization", "")],
        [("authorization", f"Basic {SECRETS['admin']}")],
        [("authorization", SECRETS["admin"])],
        [("authorization", f"Bearer {SECRETS['admin']}x")],
        [("authorization", f"Bearer {SECRETS['admin'].upper()}")],
        [("authorization", f"Bearer {digest_of(SECRETS['admin'])}")],
        [("authorization", f"Bearer {SECRETS['admin']}, Bearer x")],
        [("authorization", f"Bearer {SECRETS['admin']}"), ("authorization", "Bearer x")],
        [("authorization", "Bearer x"), ("authorization", f"Bearer {SECRETS['admin']}")],
        [("authorization", "Bearer " + "x" * 60_000)],
        [(b"authorization", b"Bearer \xff\xfe\x00")],
    ],
)
def test_what_is_no_token_is_refused_and_counted(guarded: Client, headers: Any) -> None:
    before = guarded.service.access.stats()
    reply = guarded.request("DELETE", KERNEL, headers=headers)
    assert (reply.status_code, slug(reply)) == (401, "invalid-token")
    after = guarded.service.access.stats()
    assert (after.invalid_token, after.admitted) == (before.invalid_token + 1, before.admitted)


def test_refusals_are_counted_by_kind_and_seldom_logged(guarded: Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            guarded.get("/v1/archs", headers=bearer("guess"))
        guarded.get("/v1/archs")
        guarded.put(KERNEL, headers=bearer(SECRETS["read"]))
        guarded.get("/v1/presets", headers=bearer(SECRETS["read"]))
    stats = guarded.service.access.stats()
    assert (stats.invalid_token, stats.without_token, stats.insufficient_scope, stats.admitted) == (50, 1, 1, 1)
    assert caplog.text.count("refused a request") == 1


def test_no_secret_shows_in_a_reply_a_log_or_a_state(guarded: Client, caplog: pytest.LogCaptureFixture) -> None:
    told = []
    with caplog.at_level(logging.DEBUG):
        for secret in (*SECRETS.values(), "a-wrong-guess"):
            for method, path in (("GET", "/v1/archs"), ("PUT", KERNEL), ("DELETE", KERNEL), ("GET", "/readyz")):
                reply = guarded.request(method, path, headers=bearer(secret))
                told.append(reply.text + repr(reply.headers))
    access = guarded.service.access
    told += [
        caplog.text,
        repr(guarded.service.settings),
        repr(access.stats()),
        repr(access._file and access._file.tokens()),
    ]
    everything = "\n".join(told)
    for secret in (*SECRETS.values(), "a-wrong-guess"):
        assert secret not in everything


@pytest.mark.parametrize(
    "header", ["forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via"]
)
def test_without_a_token_nothing_is_built_through_a_proxy(client: Client, header: str) -> None:
    """A proxy on this machine reaches loopback for everybody."""
    reply = client.put(KERNEL, headers={header: "203.0.113.7"})
    assert (reply.status_code, slug(reply)) == (403, "forwarded")
    assert client.get("/v1/archs", headers={header: "203.0.113.7"}).status_code == 200
    assert client.service.access.stats().foreign == 1
