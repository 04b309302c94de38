"""The service as a process: uvicorn with limits and a drain."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final

import uvicorn

from mlaprep.service.app import create_app
from mlaprep.service.descriptors import ACCEPTED_AT_ONCE, ANSWERED_BEYOND, log_seldom, refuse_beyond, room_for
from mlaprep.service.drain import Drain
from mlaprep.service.errors import ListenError
from mlaprep.service.heads import bounded_heads
from mlaprep.service.logs import set_up_logs
from mlaprep.service.settings import Settings, read_settings
from mlaprep.service.supervisor import supervise
from mlaprep.service.unread import bounded_replies

_BACKLOG: Final = 2048
_TICK_S: Final = 0.02


def serve(settings: Settings | None = None, *, on_listening: Callable[[int], None] | None = None) -> None:
    """Serve until SIGTERM or an interrupt, drain, and return. Call it from the main thread.

    The address is taken before anything else starts. Warnings and errors go to stderr with their time, unless
    logging has been set up already. With ``workers`` above 1 as many processes answer, see
    :mod:`mlaprep.service.supervisor`. While it drains, running requests may finish for ``shutdown_grace_s``
    seconds, new ones get a 503; then compile processes are ended by their pids. A second interrupt does not
    wait.

    Args:
        settings: by default from the environment.
        on_listening: called with the port once requests are answered; port 0 has become a free one by then.

    Raises:
        SpecError: settings that must not be served, see :class:`Settings`.
        ListenError: the address cannot be listened on, for one because the port is taken.
        SystemExit: the server did not start for another reason; it has been logged.
    """
    settings = settings or read_settings()
    set_up_logs(settings.log_format, settings.log_level, access_log=settings.access_log)
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(listener) for listener in listen(settings.host, settings.port)]
        if settings.workers > 1:
            supervise(settings, listeners, on_listening)
        else:
            answer(settings, listeners, on_listening)


def answer(
    settings: Settings,
    listeners: Sequence[socket.socket],
    on_listening: Callable[[int], None] | None = None,
    *,
    until: int | None = None,
) -> None:
    """Answer what comes to these sockets in this process, until SIGTERM, an interrupt, or ``until`` can be read.

    Raises:
        SpecError, SystemExit: as for :func:`serve`.
    """
    connections = room_for(settings.max_connections)
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,  # ours has the route, the time and the request's id
        timeout_graceful_shutdown=settings.shutdown_grace_s,
        backlog=ACCEPTED_AT_ONCE,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies,
        server_header=False,
        ws="none",
    )
    server = _Server(config, app.state.drain, on_listening, connections, settings.request_timeout_s, until)
    app.state.load.watch(server.server_state.connections, connections)

    def stop(_signal: int, _frame: FrameType | None) -> None:
        server.should_exit = True

    # uvicorn sends itself the signal again once it has drained; a default handler would then end the process
    # as if it had been killed. This one also catches a signal that comes before uvicorn's own are in place.
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.run(list(listeners))
    finally:
        signal.signal(signal.SIGTERM, before)


def listen(host: str, port: int) -> Sequence[socket.socket]:
    """Sockets that listen on every address of a host, all on one port; port 0 is a free one.

    Raises:
        ListenError: an address that cannot be had.
    """
    shown = f"[{host}]" if ":" in host else host
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            bound = sockets[0].getsockname()[1] if sockets else port
            place = (address[0], bound, *address[2:])
            sockets.append(socket.create_server(place, family=family, backlog=_BACKLOG))
            # Connections inherit it. asyncio sets it on sockets that it made itself; without it a reply in two
            # parts waits 40 ms for the peer's acknowledgement of the first.
            sockets[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        for opened in sockets:
            opened.close()
        # A failed look-up has a negative number and words of its own.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or "no such address"
        raise ListenError(shown, port, reason) from None
    return sockets


class _Server(uvicorn.Server):
    """Tells when it listens, which uvicorn only logs, and turns new requests away before it stops listening."""

    def __init__(
        self,
        config: uvicorn.Config,
        drain: Drain,
        on_listening: Callable[[int], None] | None,
        connections: int,
        request_timeout_s: float,
        until: int | None,
    ) -> None:
        super().__init__(config)
        self._until = until
        self._connections = connections
        self._request_timeout_s = request_timeout_s
        self._drain = drain
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        log_seldom(asyncio.get_running_loop())
        bounded = bounded_replies(self.config.http_protocol_class, self._request_timeout_s)
        bounded = bounded_heads(bounded, self._request_timeout_s)
        protocol = refuse_beyond(self._connections + ANSWERED_BEYOND, bounded)
        self.config.http_protocol_class = protocol  # type: ignore[assignment]  # only ever called
        await super().startup(sockets)
        if self._until is not None:
            asyncio.get_running_loop().add_reader(self._until, self._stop)
        for listener in sockets or ():
            listener.listen(_BACKLOG)  # connections that wait; uvicorn's number is of those taken in one turn too
        if self.started and self._on_listening is not None:
            self._on_listening(self.servers[0].sockets[0].getsockname()[1])

    def _stop(self) -> None:
        assert self._until is not None
        asyncio.get_running_loop().remove_reader(self._until)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        grace = self.config.timeout_graceful_shutdown or 0
        deadline = time.monotonic() + grace
        self._drain.begin()
        while self._drain.running and not self.force_exit and time.monotonic() < deadline:
            await asyncio.sleep(_TICK_S)
        # What is left of the grace is for replies that are still being sent.
        self.config.timeout_graceful_shutdown = max(0, round(deadline - time.monotonic()))
        await super().shutdown(sockets)
