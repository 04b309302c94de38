"""Channel: messages between the compiler and its children over two pipes.

A message is a JSON object and a blob, each behind its length. Nothing is pickled, lengths are bounded, and
every wait may have a deadline, so a peer that hangs, dies or babbles costs a known time and nothing more.
"""

import json
import os
import select
import struct
import time
from collections.abc import Mapping
from typing import Any, Final

_LENGTHS: Final = struct.Struct(">II")
_MAX_HEADER: Final = 4 * 2**20
_MAX_BLOB: Final = 64 * 2**20
_CHUNK: Final = 2**16


class Channel:
    """Two file descriptors, one to read and one to write; the caller owns and closes them."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        # A peer that does not read must not hold the writer past its deadline.
        os.set_blocking(write_fd, False)

    def send(self, header: Mapping[str, Any], blob: bytes = b"", *, deadline: float | None = None) -> None:
        """Write one message.

        Raises:
            EOFError: the peer is gone.
            TimeoutError: ``deadline``, on the monotonic clock, passed.
        """
        text = json.dumps(header).encode()
        view = memoryview(_LENGTHS.pack(len(text), len(blob)) + text + blob)
        while view:
            _wait(self._write_fd, select.POLLOUT, deadline)
            try:
                view = view[os.write(self._write_fd, view) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise EOFError("the peer closed the channel") from None

    def receive(self, *, deadline: float | None = None) -> tuple[dict[str, Any], bytes]:
        """Read one message.

        Raises:
            EOFError: the peer is gone, or sent something that is no message.
            TimeoutError: ``deadline``, on the monotonic clock, passed.
        """
        header_size, blob_size = _LENGTHS.unpack(self._read(_LENGTHS.size, deadline))
        if header_size > _MAX_HEADER or blob_size > _MAX_BLOB:
            raise EOFError("the peer sent lengths out of bounds")
        text = self._read(header_size, deadline)
        blob = self._read(blob_size, deadline)
        try:
            header = json.loads(text)
        except ValueError:
            header = None
        if not isinstance(header, dict):
            raise EOFError("the peer sent a header that is no JSON object")
        return header, blob

    def _read(self, size: int, deadline: float | None) -> bytes:
        chunks = []
        while size:
            _wait(self._read_fd, select.POLLIN, deadline)
            chunk = os.read(self._read_fd, min(size, _CHUNK))
            if not chunk:
                raise EOFError("the peer closed the channel")
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)


def _wait(fd: int, event: int, deadline: float | None) -> None:
    # poll and not select: a server may hold more than 1,024 descriptors.
    poll = select.poll()
    poll.register(fd, event)
    remaining = None if deadline is None else deadline - time.monotonic()
    if remaining is not None and remaining <= 0:
        raise TimeoutError("no answer before the deadline")
    if not poll.poll(None if remaining is None else remaining * 1000):
        raise TimeoutError("no answer before the deadline")
