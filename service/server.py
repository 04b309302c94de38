"""The service as a process: uvicorn with limits and a drain."""

import uvicorn

from mlaprep.service.app import create_app
from mlaprep.service.settings import Settings


def serve(settings: Settings | None = None) -> None:
    """Serve until SIGTERM or an interrupt, then drain.

    No new connection is taken, running requests may finish for ``shutdown_grace_s`` seconds, compile processes
    are ended by their pids. A second signal does not wait.

    Raises:
        ValueError: settings that must not be served, see :class:`Settings`.
    """
    settings = settings or Settings()
    uvicorn.run(
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
