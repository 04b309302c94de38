"""A bare ASGI application that gives one file whatever is asked, under the service's own uvicorn settings.

    python benchmarks/bare_app.py FILE        # the address is MLAPREP_HOST and MLAPREP_PORT

It stands in for the service's application in the service's own ``serve``, so that nothing else differs.
"""

import hashlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlaprep.service import server
from mlaprep.service.drain import Drain
from mlaprep.service.overload import Load


class Bare:
    def __init__(self, body: bytes) -> None:
        self.state = SimpleNamespace(drain=Drain(), load=Load())
        self._body = body
        self._headers = [
            (b"content-length", str(len(body)).encode()),
            (b"content-type", b"application/octet-stream"),
            (b"etag", f'"{hashlib.sha256(body).hexdigest()}"'.encode()),
        ]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            await send({"type": "http.response.body", "body": self._body})
            return
        for phase in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{phase}.complete"})


if __name__ == "__main__":
    bare: Any = Bare(Path(sys.argv[1]).read_bytes())
    server.create_app = lambda _settings: bare
    server.serve()
