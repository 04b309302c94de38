"""The service as a process: uvicorn with limits and a drain."""

import contextlib
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from mlaprep.service.app import create_app
from mlaprep.service.settings import Settings


def serve(settings: Settings | None = None, *, on_listening: Callable[[int], None] | None = None) -> None:
    """Serve until SIGTERM or an interrupt, drain, and return. Call it from the main thread.

    No new connection is taken, running requests may finish for ``shutdown_grace_s`` seconds, compile processes
    are ended by their pids. A second interrupt does not wait.

    Args:
        settings: by default from the environment.
        on_listening: called with the port once connections are taken; port 0 has become a free one by then.

    Raises:
        ValueError: settings that must not be served, see :class:`Settings`.
        SystemExit: the server did not start, for one because the port is taken; uvicorn has logged why.
    """
    settings = settings or Settings()
    config = uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        access_log=settings.access_log,
        limit_concurrency=settings.max_connections,
        timeout_graceful_shutdown=settings.shutdown_grace_s,
        proxy_headers=False,
        server_header=False,
        ws="none",
    )
    server = _Server(config, on_listening)

    def stop(_signal: int, _frame: FrameType | None) -> None:
        server.should_exit = True

    # uvicorn sends itself the signal again once it has drained; a default handler would then end the process
    # as if it had been killed. This one also catches a signal that comes before uvicorn's own are in place.
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.run()
    finally:
        signal.signal(signal.SIGTERM, before)


class _Server(uvicorn.Server):
    """Tells when it listens; uvicorn itself only logs it."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[int], None] | None) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_listening is not None:
            self._on_listening(self.servers[0].sockets[0].getsockname()[1])
