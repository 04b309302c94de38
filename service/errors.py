"""Errors of building and serving kernels.

::

    MlaprepError
    ├── ListenError                 an address that the service cannot listen on; .host, .port
    ├── BuildError                  a kernel that could not be built
    │   ├── CompilerUnavailable     NVRTC is not there or does not load; names the library
    │   ├── CompileFailed           the compiler refused the source; the same again would fail the same
    │   │   └── KernelSpills            it compiled to a kernel that spills, and such kernels are not published
    │   ├── KernelRevoked               the kernel is revoked, and not built or given out under its key
    │   ├── CompileTimeout          the compile passed its deadline and was killed
    │   ├── CompileCrashed          the compiler died or ran out of memory, twice
    │   ├── QueueFull               as many kernels wait for a compiler as may
    │   └── BuilderClosed           the builder was closed while the kernel waited
    ├── TooManyJobs                 as many warm-ups wait for their turn as may
    ├── CatalogUnread               the store is still being read for the first time
    └── InspectError                a kernel whose machine code could not be shown
        ├── DisassemblerUnavailable nvdisasm is not there or does not start
        └── DisassemblyFailed       nvdisasm refused the code, took too long, or gave what cannot be read

Only :class:`CompileFailed` says something about the source, so only it may be remembered against a key.
"""

import re
from typing import Final

from mlaprep.kernels_cache.revocation import Revocation
from mlaprep.templates.errors import MlaprepError

RETRY_AFTER_S: Final = 10
"""How long a caller should wait before it asks again for something that was unavailable."""
_FOLDERS: Final = re.compile(r"(?<![\w:/])/(?:[^/\s'\":,;()]+/)+", re.ASCII)


def without_folders(text: str) -> str:
    """A library's or the system's words, for callers over a network: of a path only its last part is left."""
    return _FOLDERS.sub("", text)


class ListenError(MlaprepError):
    """The service cannot listen where it should: the port is taken, or the address is not this machine's."""

    def __init__(self, host: str, port: int, reason: str) -> None:
        self.host = host
        self.port = port
        self.reason = reason
        super().__init__(
            f"cannot listen on {host} port {port}: {reason}; stop what listens there, or choose another by "
            "--host, --port, MLAPREP_HOST or MLAPREP_PORT (port 0 picks a free one)"
        )

    def __reduce__(self) -> tuple[type["ListenError"], tuple[str, int, str]]:
        return type(self), (self.host, self.port, self.reason)


class BuildError(MlaprepError):
    """Base of everything that keeps a kernel from being built."""


class CompilerUnavailable(BuildError):
    """The compiler cannot be used on this machine as it is.

    ``library`` names what is missing, e.g. ``libnvrtc`` or ``libnvrtc-builtins``.
    """

    def __init__(self, library: str, reason: str) -> None:
        self.library = library
        self.reason = reason
        super().__init__(
            f"cannot compile: {library} is missing or does not load ({reason}); "
            "install mlaprep[service,cuda12], or fetch kernels that are built already"
        )

    def again(self) -> "CompilerUnavailable":
        """A fresh instance to raise: one raised in many threads would collect their tracebacks."""
        return CompilerUnavailable(self.library, self.reason)


class CompileFailed(BuildError):
    """The compiler ran and gave no usable kernel. ``log`` is what it said, cut to a bounded length."""

    def __init__(self, message: str, log: str = "") -> None:
        self.message = message
        self.log = log
        super().__init__(f"{message}\n{log}" if log else message)

    def again(self) -> "CompileFailed":
        """A fresh instance to raise: one raised in many threads would collect their tracebacks."""
        return CompileFailed(self.message, self.log)


class KernelSpills(CompileFailed):
    """The kernel compiled, and keeps registers in memory; it was not published."""

    def __init__(self, variant_id: str, arch: str, spill_stores: int, spill_loads: int) -> None:
        self._figures = (variant_id, arch, spill_stores, spill_loads)
        super().__init__(
            f"{variant_id} for {arch} spills: {spill_stores} bytes of stores, {spill_loads} bytes of loads a thread; "
            "change the template or the specification, or set MLAPREP_REFUSE_SPILLS=false to publish it all the same"
        )

    def again(self) -> "KernelSpills":
        return KernelSpills(*self._figures)

    def __reduce__(self) -> tuple[type["KernelSpills"], tuple[str, str, int, int]]:
        return type(self), self._figures


class KernelRevoked(BuildError):
    """The kernel, or another with the same bytes, is revoked. ``revocation`` says since when and why."""

    def __init__(self, revocation: Revocation) -> None:
        self.revocation = revocation
        super().__init__(
            f"the kernel is {revocation}; it is not given out or built again under key {revocation.key[:12]}. Another "
            "template or compiler makes another kernel; `mlaprep revocations --lift KEY` lets this one be used again"
        )


class CompileTimeout(BuildError):
    """One compile took longer than it may; its process was killed."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        super().__init__(f"the compile passed its deadline of {timeout_s:g} s and was killed; nothing was stored")


class CompileCrashed(BuildError):
    """The compiler's process died, and so did the one that tried again."""


class QueueFull(BuildError):
    """Too many kernels wait already; ask again later."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(f"{limit} kernels wait for a compiler already; ask again in a few seconds")


class BuilderClosed(BuildError):
    """The builder or compiler was closed before the kernel was built."""

    def __init__(self) -> None:
        super().__init__("the compiler was closed before this kernel was built; ask a running service")


class TooManyJobs(MlaprepError):
    """Too many warm-ups wait already; start it again later."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(f"{limit} warm-ups wait for their turn already; start this one again once some are done")


class CatalogUnread(MlaprepError):
    """The store is being read for the first time since the service started; kernels are handed out meanwhile."""

    def __init__(self) -> None:
        super().__init__(
            "the store is still being read for the first listing since the service started; ask again in a moment. "
            "Kernels and artifacts are handed out meanwhile"
        )


class InspectError(MlaprepError):
    """Base of everything that keeps a kernel's machine code from being shown."""


class DisassemblerUnavailable(InspectError):
    """nvdisasm cannot be used on this machine as it is."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"cannot disassemble: {reason}; install mlaprep[inspect], "
            "or put the nvdisasm of a CUDA toolkit 13 or later on PATH"
        )


class DisassemblyFailed(InspectError):
    """nvdisasm ran and gave nothing that can be read."""
