"""The service as a process: uvicorn with limits and a drain."""

import signal
from types import FrameType

import uvicorn

from mlaprep.service.app import create_app
from mlaprep.service.settings import Settings


def serve(settings: Settings | None = None) -> None:
    """Serve until SIGTERM or an interrupt, drain, and return. Call it from the main thread.

    No new connection is taken, running requests may finish for ``shutdown_grace_s`` seconds, compile processes
    are ended by their pids. A second interrupt does not wait.

    Raises:
        ValueError: settings that must not be served, see :class:`Settings`.
    """
    settings = settings or Settings()
    server = uvicorn.Server(
        uvicorn.Config(
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
    )

    def stop(_signal: int, _frame: FrameType | None) -> None:
        server.should_exit = True

    # uvicorn sends itself the signal again once it has drained; a default handler would then end the process
    # as if it had been killed. This one also catches a signal that comes before uvicorn's own are in place.
    before = signal.signal(signal.SIGTERM, stop)
    try:
        server.run()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
