"""RestTransport: one round trip, verified in full, bounded in time and size."""

import base64
import gzip
import json
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from fake_service import FakeService, artifact_of, problem, reply_of

from mlaprep.clients import replies
from mlaprep.clients.errors import ArtifactRejected, ServiceRefused, ServiceUnreachable
from mlaprep.clients.rest import RestTransport
from mlaprep.templates.arch import Arch
from mlaprep.templates.errors import SpecError
from mlaprep.templates.render import render
from mlaprep.templates.spec import KernelSpec

Answer = Callable[[httpx.Request], httpx.Response]


def answering(*responses: httpx.Response | Exception) -> Answer:
    """Each response once, the last one for ever."""
    left = list(responses)

    def answer(request: httpx.Request) -> httpx.Response:
        response = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(response, Exception):
            raise response
        return response

    return answer


def replying(reply: object) -> Answer:
    content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
    return lambda request: httpx.Response(200, content=content)


class TestOneRoundTrip:
    def test_a_cold_worker_sends_one_put(self, service: FakeService, spec: KernelSpec, arch: Arch) -> None:
        reply = service.transport(token="secret").fetch_reply(spec, arch)
        assert service.calls == [f"PUT /v1/kernels/sm_90a/{spec.variant_id}"]
        assert service.requests[0].url.params["inline"] == "true"
        assert service.requests[0].headers["authorization"] == "Bearer secret"
        assert reply.artifact == artifact_of(spec)
        assert reply.cached

    def test_a_kernel_built_just_now_is_not_cached(self, service: FakeService, spec: KernelSpec, arch: Arch) -> None:
        service.answer = replying(reply_of(artifact_of(spec), cached=False))
        assert not service.transport().fetch_reply(spec, arch).cached

    @pytest.mark.parametrize("status", [401, 403])
    def test_where_building_is_forbidden_it_asks_for_what_is_built(
        self, service: FakeService, spec: KernelSpec, arch: Arch, status: int
    ) -> None:
        def answer(request: httpx.Request) -> httpx.Response:
            return problem(status, "forbidden") if request.method == "PUT" else service.kernel(request)

        service.answer = answer
        transport = service.transport()
        transport.fetch(spec, arch)
        transport.fetch(spec, arch)
        assert [request.method for request in service.requests] == ["PUT", "GET", "GET"]

    def test_a_kernel_that_may_not_be_built_is_told_with_the_reason(
        self, service: FakeService, spec: KernelSpec, arch: Arch
    ) -> None:
        service.answer = lambda request: (
            problem(401, "token-required") if request.method == "PUT" else problem(404, "kernel-not-built")
        )
        transport = service.transport()
        for _ in range(2):
            with pytest.raises(ServiceRefused, match=r"404.*refused.*401.*MLAPREP_TOKEN") as caught:
                transport.fetch(spec, arch)
            assert caught.value.status == 404

    def test_who_may_not_read_is_told_what_to_do(self, service: FakeService, spec: KernelSpec, arch: Arch) -> None:
        asked = {
            401: (problem(401, "invalid-token"), "token that was sent does not hold, look at MLAPREP_TOKEN"),
            403: (problem(403, "insufficient-scope"), "ask whoever runs the service for a token that may"),
        }
        for status, (reply, told) in asked.items():
            service.answer = lambda _, reply=reply: reply
            with pytest.raises(ServiceRefused, match=f"{status}.*{told}") as caught:
                service.transport(token="secret").fetch(spec, arch, build=False)
            assert "secret" not in str(caught.value)
            assert (caught.value.status, caught.value.problem) == (status, reply.json()["type"].rpartition(":")[2])

    def test_without_build_it_only_asks(self, service: FakeService, spec: KernelSpec, arch: Arch) -> None:
        service.answer = lambda request: problem(404, "not-built")
        with pytest.raises(ServiceRefused, match="404") as caught:
            service.transport().fetch(spec, arch, build=False)
        assert (caught.value.status, caught.value.problem) == (404, "not-built")
        assert [request.method for request in service.requests] == ["GET"]


def changed(**members: Any) -> Callable[[KernelSpec], object]:
    """The right reply with other members in its manifest."""
    return lambda spec: reply_of(artifact_of(spec, **members))


def with_manifest(**members: Any) -> Callable[[KernelSpec], object]:
    """The right reply with a manifest edited after it was made."""

    def build(spec: KernelSpec) -> object:
        reply = reply_of(artifact_of(spec))
        return reply | {"manifest": reply["manifest"] | members}

    return build


def with_cubin(edit: Callable[[bytes], bytes]) -> Callable[[KernelSpec], object]:
    def build(spec: KernelSpec) -> object:
        artifact = artifact_of(spec)
        return reply_of(artifact, cubin_base64=base64.b64encode(edit(artifact.cubin)).decode())

    return build


def flipped(cubin: bytes) -> bytes:
    return cubin[:100] + bytes([cubin[100] ^ 1]) + cubin[101:]


def other_kernel(spec: KernelSpec) -> object:
    return reply_of(artifact_of(KernelSpec(num_heads=16)))


def other_arch(spec: KernelSpec) -> object:
    return reply_of(artifact_of(spec, "sm_100a"))


def other_arch_relabelled(spec: KernelSpec) -> object:
    """The manifest says sm_90a, key included; the cubin is for sm_100a."""
    return reply_of(artifact_of(spec, "sm_90a", cubin=artifact_of(spec, "sm_100a").cubin))


def other_source(spec: KernelSpec) -> object:
    source = render(spec).text + "// and more\n"
    return reply_of(artifact_of(spec, source=source), source=source)


def code_in_a_comment(spec: KernelSpec) -> object:
    """Its head's last line goes on: the compiler reads the first line of code as a comment."""
    source = render(spec).text.replace("\n\nusing", "\\\n\nusing", 1)
    return reply_of(artifact_of(spec, source=source), source=source)


def code_on_a_comments_line(spec: KernelSpec) -> object:
    """A line separator for Python, none for the compiler."""
    source = render(spec).text.replace("\n\nusing", "\u2028\nusing", 1)
    return reply_of(artifact_of(spec, source=source), source=source)


def not_cuda(spec: KernelSpec) -> object:
    cubin = artifact_of(spec).cubin
    return reply_of(artifact_of(spec, cubin=cubin[:18] + (62).to_bytes(2, "little") + cubin[20:]))


def duplicate_name(spec: KernelSpec) -> bytes:
    return json.dumps(reply_of(artifact_of(spec))).replace('{"manifest"', '{"cached": true, "manifest"', 1).encode()


HOSTILE: dict[str, tuple[str, Callable[[KernelSpec], object]]] = {
    "wrong-bytes": ("cubin-digest", with_cubin(flipped)),
    "cut-short": ("cubin-size", with_cubin(lambda cubin: cubin[:-1])),
    "nothing": ("cubin-size", with_cubin(lambda cubin: b"")),
    "wrong-spec": ("wrong-spec", other_kernel),
    "wrong-arch": ("wrong-arch", other_arch),
    "relabelled-arch": ("elf", other_arch_relabelled),
    "not-cuda": ("elf", not_cuda),
    "other-source": ("source", other_source),
    "code-in-a-comment": ("source", code_in_a_comment),
    "code-on-a-comment's-line": ("source", code_on_a_comments_line),
    "other-launch": ("launch", changed(launch={"parameters": [["q_out", "pointer"]]})),
    "other-entry": ("entry", changed(entry="mla_prepare_fast")),
    "other-name": ("variant-id", changed(variant_id="mla_prepare-h16-r512-d64-bf16-fp8-norope-i64-pdl")),
    "other-key": ("key-mismatch", with_manifest(key="0" * 64)),
    "other-compiler": ("key-mismatch", with_manifest(nvrtc_version="11.0.1")),
    "unknown-member": ("manifest", with_manifest(path="/etc/passwd")),
    "bad-member": ("manifest", with_manifest(registers=-1)),
    "no-manifest": ("reply", lambda spec: {"cached": True, "cubin_base64": ""}),
    "no-cubin": ("reply", lambda spec: reply_of(artifact_of(spec), cubin_base64=None)),
    "not-base64": ("reply", lambda spec: reply_of(artifact_of(spec), cubin_base64="*" * 40)),
    "array": ("reply", lambda spec: [1, 2, 3]),
    "null": ("reply", lambda spec: b"null"),
    "html": ("reply", lambda spec: b"<html>Please log in</html>"),
    "garbage": ("reply", lambda spec: b"\x00\xff" * 50),
    "empty": ("reply", lambda spec: b""),
    "nan": ("reply", lambda spec: b'{"manifest": {"compile_ms": NaN}}'),
    "deep": ("reply", lambda spec: b"[" * 200_000),
    "many-digits": ("reply", lambda spec: b'{"manifest": ' + b"9" * 10_000 + b"}"),
    "duplicate-name": ("reply", duplicate_name),
}


class TestHostileReplies:
    @pytest.mark.parametrize("case", HOSTILE)
    def test_is_refused(self, service: FakeService, spec: KernelSpec, arch: Arch, case: str) -> None:
        reason, build = HOSTILE[case]
        service.answer = replying(build(spec))
        with pytest.raises(ArtifactRejected) as caught:
            service.transport().fetch(spec, arch)
        if reason != "elf":
            assert caught.value.reason == reason
        assert service.requests[0].url.host in str(caught.value) or caught.value.reason == "reply"

    @pytest.mark.parametrize("declared", [True, False])
    def test_an_oversized_reply_is_cut_off(
        self, service: FakeService, spec: KernelSpec, arch: Arch, monkeypatch: pytest.MonkeyPatch, declared: bool
    ) -> None:
        monkeypatch.setattr(replies, "MAX_REPLY_BYTES", 10_000)
        sent = 0

        def chunks() -> Iterator[bytes]:
            nonlocal sent
            for _ in range(1000):
                sent += 4096
                yield b" " * 4096

        headers = {"content-length": str(4096 * 1000)} if declared else {}
        service.answer = lambda request: httpx.Response(200, headers=headers, content=chunks())
        with pytest.raises(ArtifactRejected, match="10000 bytes"):
            service.transport().fetch(spec, arch)
        assert sent < 30_000

    def test_a_compressed_reply_that_was_not_asked_for_is_refused(
        self, service: FakeService, spec: KernelSpec, arch: Arch
    ) -> None:
        body = gzip.compress(json.dumps(reply_of(artifact_of(spec))).encode())
        service.answer = lambda request: httpx.Response(200, headers={"content-encoding": "gzip"}, content=body)
        with pytest.raises(ArtifactRejected, match="compressed"):
            service.transport().fetch(spec, arch)
        assert service.requests[0].headers["accept-encoding"] == "identity"

    def test_a_redirect_is_not_followed(self, service: FakeService, spec: KernelSpec, arch: Arch) -> None:
        service.answer = lambda request: httpx.Response(302, headers={"location": "http://elsewhere.test/"})
        with pytest.raises(ServiceRefused, match="302"):
            service.transport().fetch(spec, arch)
        assert len(service.requests) == 1

    def test_a_refusal_is_told_by_field_and_made_printable(
        self, service: FakeService, spec: KernelSpec, arch: Arch
    ) -> None:
        fault = {"field": "num_heads", "found": "an\x1b[31m integer", "allowed": "1 to 256"}
        service.answer = lambda request: problem(422, "spec", detail="no\nsuch\x1b[2J", problems=[fault, "junk", {}])
        with pytest.raises(ServiceRefused) as caught:
            service.transport().fetch(spec, arch)
        assert [(p.field, p.found) for p in caught.value.problems] == [("num_heads", "an?[31m integer")]
        assert "\x1b" not in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(service.requests) == 1


class TestSourceOfAnotherJinja:
    """The head comment names the jinja2 version; only that may differ from what this release renders."""

    def source(self, spec: KernelSpec) -> str:
        return "\n".join(
            "// jinja2 0.0.1" if line.startswith("// jinja2 ") else line for line in render(spec).text.split("\n")
        )

    def test_is_taken_from_the_reply(self, service: FakeService, spec: KernelSpec, arch: Arch) -> None:
        source = self.source(spec)
        service.answer = replying(reply_of(artifact_of(spec, source=source), source=source))
        assert service.transport().fetch(spec, arch).source == source
        assert len(service.requests) == 1

    def test_is_asked_for_where_the_reply_lacks_it(self, service: FakeService, spec: KernelSpec, arch: Arch) -> None:
        source = self.source(spec)

        def answer(request: httpx.Request) -> httpx.Response:
            if request.url.path.endswith("/source"):
                return httpx.Response(200, text=source)
            return httpx.Response(200, json=reply_of(artifact_of(spec, source=source)))

        service.answer = answer
        assert service.transport().fetch(spec, arch).source == source
        assert len(service.requests) == 2


class TestTransientFailures:
    @pytest.mark.parametrize(
        "failure", [httpx.ConnectError("refused"), httpx.ReadError("reset"), httpx.Response(502), problem(429, "busy")]
    )
    def test_are_retried(
        self, service: FakeService, spec: KernelSpec, arch: Arch, failure: httpx.Response | Exception
    ) -> None:
        good = httpx.Response(200, json=reply_of(artifact_of(spec)))
        service.answer = answering(failure, failure, good)
        service.transport().fetch(spec, arch)
        assert len(service.requests) == 3

    def test_are_told_to_nobody_but_the_caller(
        self, service: FakeService, spec: KernelSpec, arch: Arch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        service.answer = answering(httpx.ConnectError("refused"))
        with pytest.raises(ServiceUnreachable):
            service.transport().fetch(spec, arch)
        assert len(service.requests) == 3
        assert capfd.readouterr() == ("", "")

    def test_a_short_retry_after_is_kept_to(self, service: FakeService, spec: KernelSpec, arch: Arch) -> None:
        busy = httpx.Response(503, headers={"retry-after": "1"})
        service.answer = answering(busy, httpx.Response(200, json=reply_of(artifact_of(spec))))
        began = time.monotonic()
        service.transport().fetch(spec, arch)
        assert time.monotonic() - began >= 1

    def test_are_not_retried_beyond_the_deadline(self, service: FakeService, spec: KernelSpec, arch: Arch) -> None:
        service.answer = lambda request: httpx.Response(503, headers={"retry-after": "1"})
        began = time.monotonic()
        with pytest.raises(ServiceUnreachable, match="503"):
            service.transport(timeout=0.5).fetch(spec, arch)
        assert time.monotonic() - began < 0.5
        assert len(service.requests) == 1

    @pytest.mark.parametrize("status", [400, 404, 409, 413, 422, 501])
    def test_final_answers_are_not(self, service: FakeService, spec: KernelSpec, arch: Arch, status: int) -> None:
        service.answer = lambda request: problem(status, "no")
        with pytest.raises(ServiceRefused):
            service.transport().fetch(spec, arch)
        assert len(service.requests) == 1

    def test_a_dead_service_is_left_alone_for_a_while(
        self, service: FakeService, spec: KernelSpec, arch: Arch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        service.answer = answering(httpx.ConnectError("refused"))
        transport = service.transport()
        for _ in range(5):
            with pytest.raises(ServiceUnreachable):
                transport.fetch(spec, arch)
        assert len(service.requests) == 3
        monkeypatch.setattr(transport, "_down_until", 0.0)
        service.answer = None
        transport.fetch(spec, arch)

    def test_a_service_that_cannot_compile_is_still_asked_for_other_kernels(
        self, service: FakeService, spec: KernelSpec, arch: Arch
    ) -> None:
        service.answer = lambda request: problem(503, "compiler-unavailable", detail="libnvrtc.so.12 is missing")
        transport = service.transport()
        with pytest.raises(ServiceRefused, match=r"libnvrtc\.so\.12"):
            transport.fetch(spec, arch)
        service.answer = None
        transport.fetch(spec, arch)

    def test_a_long_retry_after_is_not_waited_for(self, service: FakeService, spec: KernelSpec, arch: Arch) -> None:
        service.answer = lambda request: httpx.Response(503, headers={"retry-after": "3600"})
        with pytest.raises(ServiceUnreachable) as caught:
            service.transport().fetch(spec, arch)
        assert caught.value.retry_after == 3600
        assert len(service.requests) == 1


@contextmanager
def server(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """A TCP server that gives every connection to ``serve``, each in a thread; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def hang(connection: socket.socket) -> None:
    connection.recv(65536)
    time.sleep(5)


def drip_headers(connection: socket.socket) -> None:
    try:
        connection.sendall(b"HTTP/1.1 200 OK\r\nx: ")
        for _ in range(100):
            connection.sendall(b"a")
            time.sleep(0.05)
    except OSError:
        return


def drip_body(connection: socket.socket) -> None:
    try:
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        for _ in range(100):
            connection.sendall(b" ")
            time.sleep(0.05)
    except OSError:
        return


class TestDeadline:
    @pytest.mark.parametrize("behaviour", [hang, drip_headers, drip_body])
    def test_bounds_a_stuck_service(
        self, behaviour: Callable[[socket.socket], None], spec: KernelSpec, arch: Arch
    ) -> None:
        with server(behaviour) as url:
            transport = RestTransport(url, timeout=0.5)
            began = time.monotonic()
            with pytest.raises(ServiceUnreachable):
                transport.fetch(spec, arch)
            assert time.monotonic() - began < 1.5
            began = time.monotonic()
            with pytest.raises(ServiceUnreachable, match="not asked again"):
                transport.fetch(spec, arch)
            assert time.monotonic() - began < 0.1

    def test_bounds_a_dead_name_server(self, spec: KernelSpec, arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
        done = threading.Event()

        def look_up(*_: object, **__: object) -> list[object]:
            done.wait(5)
            raise socket.gaierror("no answer")

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        began = time.monotonic()
        with pytest.raises(ServiceUnreachable):
            RestTransport("http://kernels.test", timeout=0.5).fetch(spec, arch)
        assert time.monotonic() - began < 1.5
        done.set()

    def test_a_refused_connection_takes_no_time(self, spec: KernelSpec, arch: Arch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        began = time.monotonic()
        with pytest.raises(ServiceUnreachable):
            RestTransport(f"http://127.0.0.1:{port}", timeout=5).fetch(spec, arch)
        assert time.monotonic() - began < 2


class TestConfiguration:
    @pytest.mark.parametrize(
        "url",
        [
            "",
            "kernels:8400",
            "ftp://kernels",
            "http://",
            "http://user:word@kernels",
            "http://kernels/?a=b",
            "http://k k",
            "http://kernels:99999",
            "file:///etc/passwd",
            "http://kernels\n",
            "http://kern\u00e9ls",
        ],
    )
    def test_refuses_what_is_no_service_url(self, url: str) -> None:
        with pytest.raises(SpecError) as caught:
            RestTransport(url)
        assert caught.value.problems[0].field == "url"
        assert len(url) < 10 or url not in str(caught.value)

    @pytest.mark.parametrize("token", ["a b", "a\nb", "", "é"])
    def test_refuses_a_token_that_is_no_header(self, token: str) -> None:
        with pytest.raises(SpecError, match="token"):
            RestTransport("http://kernels", token)

    def test_never_shows_its_token(self) -> None:
        assert "secret" not in repr(RestTransport("http://kernels", "secret"))

    def test_pickles_as_its_configuration(self, spec: KernelSpec, arch: Arch) -> None:
        transport = RestTransport("http://kernels/", "secret", timeout=3)
        transport._open_wire()
        again = pickle.loads(pickle.dumps(transport))
        assert (again.url, again.timeout, again._token) == ("http://kernels", 3, "secret")
        assert again._wire is None
