"""Replies that nobody reads: uvicorn would keep them, and their connection, for as long as the client likes."""

import asyncio
from typing import Any


def bounded_replies(protocol: type[asyncio.Protocol], timeout_s: float) -> type[asyncio.Protocol]:
    """One of uvicorn's HTTP protocols that drops a connection whose client takes nothing of a reply.

    What the kernel does not take is looked at every ``timeout_s`` seconds; if it is as much as the time before, the
    connection is gone, twice that time after the client has stopped at the latest.
    """
    base: Any = protocol

    class BoundedReplies(base):  # type: ignore[misc]  # whichever protocol uvicorn has chosen
        _look: asyncio.TimerHandle | None = None
        _unsent = 0

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self._look = asyncio.get_running_loop().call_later(timeout_s, self._look_at)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._look is not None:
                self._look.cancel()
            super().connection_lost(exc)

        def _look_at(self) -> None:
            unsent = self.transport.get_write_buffer_size()
            if unsent and unsent == self._unsent:
                self.transport.abort()
                return
            self._unsent = unsent
            self._look = asyncio.get_running_loop().call_later(timeout_s, self._look_at)

    return BoundedReplies
