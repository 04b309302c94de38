"""RestTransport: kernels over HTTP, bounded in time and size, and verified before anybody sees them."""

import base64
import binascii
import json
import random
import re
import threading
import time
from collections.abc import Callable, Container, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar
from urllib.parse import urlsplit

from mlaprep.clients.errors import ArtifactRejected, ServiceError, ServiceRefused, ServiceUnreachable
from mlaprep.clients.replies import field_problems, parse_json, plain, problem_of, read_body, retry_after
from mlaprep.clients.wire import Answer, Wire, WireError, open_wire
from mlaprep.kernels_cache.artifact import KernelArtifact, Manifest
from mlaprep.kernels_cache.errors import ArtifactError
from mlaprep.kernels_cache.forks import forget_when_forked
from mlaprep.kernels_cache.origin import FOREIGN, require_own
from mlaprep.templates.arch import Arch
from mlaprep.templates.errors import FieldProblem, SpecError
from mlaprep.templates.fields import describe
from mlaprep.templates.render import KernelSource, render
from mlaprep.templates.spec import KernelSpec

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

DEFAULT_TIMEOUT_S: Final = 10.0
"""Seconds that one fetch may take in all: name look-up, every attempt, and the reply's last byte."""

COOL_DOWN_S: Final = 15.0
"""Seconds for which a service that did not answer is not asked again."""

MAX_COOL_DOWN_S: Final = 60.0
_PAUSES_S: Final = (0.05, 0.1)
"""Seconds at least between attempts; one attempt more than there are pauses."""

_GOOD: Final = (200, 201)
_ACCEPTED: Final = (200, 201, 202)
_TRANSIENT: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_PATIENCE_S: Final = 1.0  # a service that asks for a longer pause is not retried
_PROBLEM_TYPE: Final = "urn:mlaprep:problem:"
_TOKEN: Final = re.compile(r"[\x21-\x7e]{1,4096}")


@dataclass(frozen=True, slots=True)
class Reply:
    """A verified kernel, and whether the service had it before it was asked."""

    artifact: KernelArtifact
    cached: bool


class RestTransport:
    """Fetches kernels from a service.

    One fetch costs one round trip: a PUT that builds the kernel if the service lacks it. Where building
    is not allowed it is a GET, which finds what is built. A service that is dead, hung or overloaded
    costs ``timeout`` seconds at most, and is then left alone for a while.

    Every reply is checked in full: the manifest must be for the spec and the architecture asked, the bytes
    must match their digests and their key, and the code, the entry point and the launch parameters must be
    what this release generates for the spec, so a service of another release cannot slip in an outdated kernel.

    Args:
        url: base address, ``http://`` or ``https://``.
        token: bearer token, where the service asks for one.
        timeout: seconds that one fetch may take in all.
        transport: an httpx transport that replaces the network, in tests.

    Raises:
        SpecError: a URL or token that cannot be used. It is not echoed.
    """

    _lock: threading.Lock
    _wire: Wire | None
    _down_until: float
    _read_only_until: float
    _build_refusal: str

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        transport: "httpx.BaseTransport | None" = None,
    ) -> None:
        self.url = _checked_url(url)
        if token is not None and not _TOKEN.fullmatch(token):
            raise SpecError(FieldProblem("token", describe(token), "printable ASCII without blanks"))
        self.timeout = timeout
        self._token = token
        self._transport = transport
        self.forget()
        forget_when_forked(self)

    def __repr__(self) -> str:
        return f"RestTransport({self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("url", "timeout", "_token", "_transport")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self.forget()
        forget_when_forked(self)

    def fetch(self, spec: KernelSpec, arch: Arch, build: bool = True) -> KernelArtifact:
        """The verified kernel of ``spec`` for ``arch``; see :meth:`fetch_reply`."""
        return self.fetch_reply(spec, arch, build).artifact

    def fetch_reply(self, spec: KernelSpec, arch: Arch, build: bool = True) -> Reply:
        """The verified kernel, and whether the service had it already.

        Args:
            build: whether the service may be asked to build what it lacks.

        Raises:
            ServiceUnreachable: no usable answer within the deadline, or none a moment ago.
            ServiceRefused: a final answer that is not a kernel, 404 for one that is not built included.
            ArtifactRejected: an answer that is not the kernel asked for.
        """
        pause = self._down_until - time.monotonic()
        if pause > 0:
            raise ServiceUnreachable(f"{self.url} gave no answer a moment ago; not asked again for {pause:.0f} s")
        deadline = time.monotonic() + self.timeout
        try:
            reply = self._within(deadline, lambda: self._exchange(spec, arch, build, deadline))
        except ServiceUnreachable as error:
            self._down_until = time.monotonic() + min(max(error.retry_after, COOL_DOWN_S), MAX_COOL_DOWN_S)
            raise
        return reply

    def document(self, path: str, statuses: Container[int] = _GOOD, timeout: float | None = None) -> Any:
        """The parsed JSON of one GET, for health; ``statuses`` are answers. Raises as :meth:`fetch_reply` does."""
        deadline = time.monotonic() + (self.timeout if timeout is None else min(timeout, self.timeout))
        return self._within(deadline, lambda: parse_json(self._ask("GET", path, deadline, statuses)))

    def post(self, path: str, document: Any, timeout: float) -> None:
        """Send JSON, once, and look at no reply but its status. For a thread that nobody waits for: a name look-up may
        take longer than ``timeout``.

        Raises:
            ServiceUnreachable: no answer, or none to a fetch a moment ago.
            ServiceRefused: an answer that is no success.
            ArtifactRejected: an answer that is too long.
        """
        if time.monotonic() < self._down_until:
            raise ServiceUnreachable(f"{self.url} gave no answer a moment ago")
        self._ask_once("POST", path, time.monotonic() + timeout, _GOOD, json.dumps(document).encode())

    def revocations(self, tag: str, timeout: float) -> Any:
        """What the service has revoked, as parsed JSON; None where that is the list whose digest is ``tag``. For a
        thread that nobody waits for long. Raises as :meth:`post` does."""
        if time.monotonic() < self._down_until:
            raise ServiceUnreachable(f"{self.url} gave no answer a moment ago")
        deadline = time.monotonic() + timeout
        body = self._ask_once("GET", "/v1/revocations", deadline, (200, 304), tag=tag)
        return parse_json(body) if body else None

    def send(self, method: str, path: str, document: Any = None) -> Any:
        """The parsed JSON that answers a request which is made once, within :attr:`timeout`.

        Raises:
            ServiceUnreachable: no usable answer.
            ServiceRefused: an answer that is no success.
            ArtifactRejected: an answer that is no JSON, or too long.
        """
        content = None if document is None else json.dumps(document).encode()
        deadline = time.monotonic() + self.timeout
        return self._within(deadline, lambda: parse_json(self._ask_once(method, path, deadline, _ACCEPTED, content)))

    def close(self) -> None:
        """Close connections; the transport opens new ones when it is used again."""
        with self._lock:
            wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    def forget(self) -> None:
        """Drop connections and what is remembered of the service, without closing a parent's sockets."""
        self._lock = threading.Lock()
        self._wire = None
        self._down_until = 0.0
        self._read_only_until = 0.0
        self._build_refusal = ""

    def _within(self, deadline: float, call: Callable[[], T]) -> T:
        """``call`` in a thread of its own, left behind at the deadline.

        Socket timeouts alone bound neither a name look-up nor a peer that sends one byte at a time.
        """
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                outcome.set_result(call())
            except BaseException as error:
                outcome.set_exception(error)

        threading.Thread(target=run, name="mlaprep-fetch", daemon=True).start()
        try:
            return outcome.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            self.close()  # ends what the thread is still reading
            raise ServiceUnreachable(
                f"{self.url} gave no whole answer within {self.timeout:g} s; is it overloaded or behind a stuck proxy?"
            ) from None

    def _exchange(self, spec: KernelSpec, arch: Arch, build: bool, deadline: float) -> Reply:
        path = f"/v1/kernels/{arch}/{spec.variant_id}"
        if build and time.monotonic() >= self._read_only_until:
            try:
                return self._verified(self._ask("PUT", f"{path}?inline=true", deadline), spec, arch, path, deadline)
            except ServiceRefused as error:
                if error.status not in (401, 403):
                    raise
                self._read_only_until = time.monotonic() + MAX_COOL_DOWN_S
                self._build_refusal = str(error)
        try:
            return self._verified(self._ask("GET", f"{path}?inline=true", deadline), spec, arch, path, deadline)
        except ServiceRefused as error:
            if not (build and error.status == 404):
                raise
            message = f"{error}; building it there was refused: {self._build_refusal}"
            raise ServiceRefused(message, status=error.status, problem=error.problem) from None

    def _ask(self, method: str, path: str, deadline: float, statuses: Container[int] = _GOOD) -> bytes:
        """The body of an answer with one of these statuses, transient failures retried while time remains."""
        for pause in _PAUSES_S:
            try:
                return self._ask_once(method, path, deadline, statuses)
            except ServiceError as error:
                # Spread out, so that workers that failed together do not come back together.
                wait = max(error.retry_after, pause * random.uniform(1, 2))
                if not _is_transient(error) or time.monotonic() + wait >= deadline:
                    raise
                time.sleep(wait)
        return self._ask_once(method, path, deadline, statuses)

    def _ask_once(
        self,
        method: str,
        path: str,
        deadline: float,
        statuses: Container[int],
        content: bytes | None = None,
        tag: str = "",
    ) -> bytes:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ServiceUnreachable(f"{self.url}: no time left to ask")
        headers = {"accept": "application/json", "accept-encoding": "identity", "user-agent": "mlaprep"}
        if self._token is not None:
            headers["authorization"] = f"Bearer {self._token}"
        if tag:
            headers["if-none-match"] = f'"{tag}"'
        if content is not None:
            headers["content-type"] = "application/json"
        try:
            with self._open_wire().ask(method, path, headers, content, left) as answer:
                body = read_body(answer, deadline)
        except WireError as error:
            raise ServiceUnreachable(f"{self.url} cannot be reached: {plain(str(error))}") from error
        if answer.status in statuses:
            return body
        self._refuse(answer, body)

    def _open_wire(self) -> Wire:
        with self._lock:
            if self._wire is None:
                self._wire = open_wire(self.url, self._transport)
            return self._wire

    def _refuse(self, answer: Answer, body: bytes) -> NoReturn:
        status = answer.status
        problem = problem_of(body)
        told = ": ".join(plain(problem[key]) for key in ("title", "detail") if isinstance(problem.get(key), str))
        message = f"{self.url} answered {status}" + (f", {told}" if told else "")
        kind = problem.get("type")
        if status in _TRANSIENT and not (isinstance(kind, str) and kind.startswith(_PROBLEM_TYPE)):
            raise ServiceUnreachable(message, retry_after=retry_after(answer))  # a proxy, not the service
        raise ServiceRefused(
            message + (self._access_advice(status) or _ADVICE.get(status, "")),
            status=status,
            problem=plain(kind).removeprefix(_PROBLEM_TYPE) if isinstance(kind, str) else "",
            problems=tuple(field_problems(problem)),
            retry_after=retry_after(answer),
        )

    def _access_advice(self, status: int) -> str:
        """What to do about an answer that is about who asks; the answer itself says which scope is needed."""
        if status == 401 and self._token is None:
            return "; set MLAPREP_TOKEN, or give a token"
        if status == 401:
            return "; the token that was sent does not hold, look at MLAPREP_TOKEN"
        return "; ask whoever runs the service for a token that may" if status == 403 and self._token else ""

    def _verified(self, body: bytes, spec: KernelSpec, arch: Arch, path: str, deadline: float) -> Reply:
        envelope = parse_json(body)
        manifest_document = envelope.get("manifest") if isinstance(envelope, dict) else None
        encoded = envelope.get("cubin_base64") if isinstance(envelope, dict) else None
        if not isinstance(manifest_document, dict) or not isinstance(encoded, str):
            raise ArtifactRejected(f"{self.url} sent no manifest with its cubin; is it an mlaprep service?")
        try:
            manifest = Manifest.from_dict(manifest_document)
            cubin = base64.b64decode(encoded, validate=True)
            if manifest.spec != spec.to_dict():
                raise ArtifactError("wrong-spec", f"asked for {spec.variant_id}, found {manifest.variant_id}")
            expected = render(spec)
            source = self._source(manifest, expected, envelope, path, deadline)
            artifact = KernelArtifact(manifest, cubin, source)
            require_own(artifact, expected, str(arch))
        except ArtifactError as error:
            advice = _UPGRADE if error.reason in FOREIGN else ""
            raise ArtifactRejected(f"{self.url} sent a wrong kernel: {error}{advice}", reason=error.reason) from error
        except (binascii.Error, ValueError) as error:
            raise ArtifactRejected(f"{self.url} sent a kernel that cannot be read: {plain(str(error))}") from error
        return Reply(artifact, envelope.get("cached") is True)

    def _source(
        self, manifest: Manifest, expected: KernelSource, envelope: Mapping[str, Any], path: str, deadline: float
    ) -> str:
        """The text the service compiled; it differs from our own at least where its head names another jinja2."""
        if manifest.source_sha256 == expected.sha256:
            return expected.text
        text = envelope.get("source")
        return text if isinstance(text, str) else self._ask("GET", f"{path}/source", deadline).decode()


_UPGRADE: Final = "; bring service and worker to the same release of mlaprep"
_ADVICE: Final[Mapping[int, str]] = {
    404: "; the kernel is not built there, or this is not an mlaprep service",
}


def _checked_url(url: str) -> str:
    allowed = "http://host:port or https://host:port, without user, query or fragment"
    try:
        parts = urlsplit(url)
        good = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not (parts.username or parts.password or parts.query or parts.fragment)
            and url.isascii()
            and url.isprintable()
            and " " not in url
        )
    except (ValueError, TypeError, AttributeError):
        good = False
    if not good:
        raise SpecError(FieldProblem("url", describe(url), allowed))
    return url.rstrip("/")


def _is_transient(error: ServiceError) -> bool:
    if isinstance(error, ServiceRefused) and error.status not in _TRANSIENT:
        return False
    return error.retry_after <= _PATIENCE_S
