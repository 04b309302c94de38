"""LoopbackService: the service's kernel routes over a real socket, with the standard library alone.

``python -m loopback_service STORE`` serves what a disk store holds, and prints its URL. It stands in for the real
service where that cannot be installed: it builds nothing, and answers 404 for what is not in the store.
"""

import base64
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mlaprep.kernels_cache.artifact import KernelArtifact
from mlaprep.kernels_cache.disk import DiskStore

Kernels = dict[tuple[str, str], bytes]
"""Arch and variant id to the body of the inline reply."""


def reply_body(artifact: KernelArtifact) -> bytes:
    document = {
        "manifest": artifact.manifest.to_dict(),
        "cached": True,
        "cubin_base64": base64.b64encode(artifact.cubin).decode(),
        "source": artifact.source,
    }
    return json.dumps(document).encode()


def kernels_of(artifacts: Iterator[KernelArtifact]) -> Kernels:
    return {(a.manifest.arch, a.manifest.variant_id): reply_body(a) for a in artifacts}


class LoopbackService(ThreadingHTTPServer):
    """``connections`` counts those accepted, ``requests`` lists method and path."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.requests: list[str] = []
        self.connections = 0
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: LoopbackService

    def setup(self) -> None:
        self.server.connections += 1
        super().setup()

    def do_PUT(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/v1/revocations":
            self._send(200, b'{"revocations":[]}')
            return
        self.server.requests.append(f"{self.command} {path}")
        _, _, _, arch, variant_id, *_ = [*path.split("/"), "", "", "", ""]
        body = self.server.kernels.get((arch, variant_id))
        problem = {"type": "urn:mlaprep:problem:kernel-not-built", "title": "Not built", "status": 404}
        self._send(404 if body is None else 200, json.dumps(problem).encode() if body is None else body)

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(kernels: Kernels) -> Iterator[LoopbackService]:
    with LoopbackService(kernels) as service:
        thread = threading.Thread(target=service.serve_forever, daemon=True)
        thread.start()
        yield service
        service.shutdown()


def main(root: str) -> None:
    store = DiskStore(Path(root))
    artifacts = (store.get(manifest.key) for manifest in store.list())
    with LoopbackService(kernels_of(artifact for artifact in artifacts if artifact is not None)) as service:
        print(service.url, flush=True)
        service.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
