"""CompileChild: the parent's side of one compile process."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from mlaprep.service.errors import CompilerUnavailable, CompileTimeout
from mlaprep.service.frames import Channel
from mlaprep.service.toolchain import Toolchain

START_TIMEOUT_S: Final = 60.0

# Nothing of the server's environment reaches a child: secrets have no business there, CUDA_PATH could name
# another toolkit. A library path may be what makes NVRTC loadable outside a wheel.
_PASSED_ON: Final = ("LD_LIBRARY_PATH", "TZ")


class ChildDied(Exception):
    """The process is gone, or said something that makes no sense; whoever holds it starts another."""


class CompileChild:
    """One running child. It belongs to one thread, which greets it first; others may only kill it.

    Raises:
        ChildDied: the process does not start.
    """

    toolchain: Toolchain
    """What :meth:`greet` learned; there is none before."""

    def __init__(self, *, memory_bytes: int, cpu_s: float, command: Sequence[str] | None = None) -> None:
        arguments = [*(command or default_command()), str(memory_bytes), f"{cpu_s:g}"]
        try:
            # A session of its own: an interrupt from the keyboard is the server's to drain, not the child's.
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
                env=child_environment(),
                start_new_session=True,
            )
        except OSError as error:
            raise ChildDied(f"the compile process does not start: {error.strerror}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._channel = Channel(self._process.stdout.fileno(), self._process.stdin.fileno())
        self.compiles = 0
        """Sources that it has answered."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def greet(self) -> None:
        """Hear what the child says of its compiler, once, before any source.

        Raises:
            ChildDied: the process ended, stayed silent or made no sense; it is closed.
            CompilerUnavailable: it says that there is no compiler; it is closed.
        """
        try:
            greeting, _ = self._channel.receive(deadline=time.monotonic() + START_TIMEOUT_S)
        except (EOFError, TimeoutError, OSError) as error:
            self.close()
            raise ChildDied(f"the compile process gave no greeting: {error} ({self._ending()})") from None
        if "unavailable" in greeting:
            self.close()
            raise CompilerUnavailable(str(greeting["unavailable"]), str(greeting.get("reason")))
        try:
            self.toolchain = Toolchain(
                version=str(greeting["version"]),
                capabilities=tuple(int(number) for number in greeting["capabilities"]),
                library=str(greeting["library"]),
            )
        except (KeyError, TypeError, ValueError):
            self.close()
            raise ChildDied("the compile process greeted with something else") from None

    def compile(self, source: str, options: Sequence[str], timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """The child's reply to one source, and the cubin as the compiler gave it.

        Raises:
            ChildDied: the process ended or broke the protocol; close it.
            CompileTimeout: no reply in ``timeout_s`` seconds; the process has been killed.
        """
        deadline = time.monotonic() + timeout_s
        try:
            self._channel.send({"options": list(options)}, source.encode(), deadline=deadline)
            reply = self._channel.receive(deadline=deadline)
        except TimeoutError:
            self.close()
            raise CompileTimeout(timeout_s) from None
        except (EOFError, OSError) as error:
            self.close()
            raise ChildDied(f"{error} ({self._ending()})") from None
        self.compiles += 1
        return reply

    def close(self) -> None:
        """Kill by pid, reap, close the pipes; safe to repeat."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def kill(self) -> None:
        """End the process from another thread; the owner notices, reaps it and closes the pipes."""
        self._process.kill()

    def _ending(self) -> str:
        code = self._process.returncode
        return f"signal {-code}" if code is not None and code < 0 else f"exit status {code}"


def default_command() -> list[str]:
    """This interpreter, with neither the working directory nor the user's site on its path."""
    return [sys.executable, "-P", "-s", "-B", "-m", "mlaprep.service.compile_child"]


def child_environment() -> dict[str, str]:
    """Everything a child gets to know of its surroundings."""
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if os.path.isabs(entry))
    environment["LC_ALL"] = "C.UTF-8"
    # NumPy, which CuPy imports, reserves address space for every thread it might use.
    environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # CuPy makes its cache directory when it is imported, and fails where the home directory is read-only. It
    # writes there only what it compiles itself, which is nothing here, so any directory that exists will do.
    environment["CUPY_CACHE_DIR"] = "/"
    return environment
