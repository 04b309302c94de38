"""HttpxWire: requests through httpx."""

import contextlib
from collections.abc import Iterator, Mapping

import httpx

from mlaprep.clients.wire import CONNECT_TIMEOUT_S, Answer, WireError


class HttpxWire:
    """A :class:`~mlaprep.clients.wire.Wire` over an httpx client, which it closes where it ``owns`` it."""

    def __init__(self, url: str, client: httpx.Client, owns: bool) -> None:
        self._url, self._client, self._owns = url, client, owns

    @contextlib.contextmanager
    def ask(
        self, method: str, path: str, headers: Mapping[str, str], content: bytes | None, timeout: float
    ) -> Iterator[Answer]:
        limits = httpx.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT_S))
        try:
            with self._client.stream(
                method, self._url + path, headers=dict(headers), content=content, timeout=limits
            ) as response:
                yield _HttpxAnswer(response)
        except httpx.TransportError as error:
            raise WireError(str(error) or type(error).__name__) from error
        except RuntimeError as error:  # another thread closed the connections
            raise WireError("the connection was closed") from error

    def close(self) -> None:
        if self._owns:
            self._client.close()


class _HttpxAnswer:
    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self._response = response

    def header(self, name: str) -> str:
        value: str = self._response.headers.get(name, "")
        return value

    def chunks(self) -> Iterator[bytes]:
        return self._response.iter_bytes()
