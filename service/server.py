"""The service as a process: uvicorn with limits and a drain."""

import socket
import sys
from collections.abc import Callable

import uvicorn

from mlaprep.service.app import create_app
from mlaprep.service.settings import Settings


def serve(settings: Settings | None = None, *, on_listening: Callable[[int], None] | None = None) -> None:
    """Serve until SIGTERM or an interrupt, then drain.

    No new connection is taken, running requests may finish for ``shutdown_grace_s`` seconds, compile processes
    are ended by their pids. A second signal does not wait.

    Args:
        settings: by default from the environment.
        on_listening: called with the port once connections are taken; port 0 has become a free one by then.

    Raises:
        ValueError: settings that must not be served, see :class:`Settings`.
        SystemExit: the server did not start, for one because the port is taken.
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
    server.run()
    if not server.started:
        sys.exit(1)


class _Server(uvicorn.Server):
    """Tells when it listens: uvicorn itself only logs it."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[int], None] | None) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._on_listening is not None:
            self._on_listening(self.servers[0].sockets[0].getsockname()[1])
