"""Errors a worker can meet.

::

    MlaprepError
    ├── SpecError (also ValueError)        a specification, variant id, preset or architecture that cannot be
    ├── TemplateError                      a template of the kernel that does not render; .template, .line
    ├── KernelUnavailable                  no tier had the kernel and none could build it; .attempts says why
    ├── ServiceError                       the kernel service gave no kernel
    │   ├── ServiceUnreachable             no usable answer within the deadline
    │   └── ServiceRefused                 an answer that is no kernel; .status, .problem, .problems
    ├── ArtifactRejected                   bytes that are not the kernel asked for; never stored, never loaded
    ├── KernelNotReady                     a cold handle met during stream capture; the capture stays valid
    ├── NotCovered                         tensors that a handle's kernel does not cover
    ├── DriverError                        a CUDA driver call failed; .code
    ├── ForkedProcessError                 a handle used in a child of the process that made it
    ├── DecisionChanged                    a captured shape that would now take the other path; .recorded, .found
    ├── VerificationFailed                 a launch whose bytes are not the chain's; .variant_id, .arch, .digest
    ├── HookRefused                        an engine that cannot be hooked safely; .version, .changes
    └── CompilerUnavailable, CompileFailed, ...   from mlaprep.service.errors, where a client compiles itself

Every message names what was asked, what was found, and what to do next. Attributes have defaults, so that
errors survive pickling on their way between processes.
"""

from collections.abc import Sequence

from mlaprep.templates.errors import FieldProblem, MlaprepError, SpecError

__all__ = [
    "ArtifactRejected",
    "DecisionChanged",
    "DriverError",
    "FieldProblem",
    "ForkedProcessError",
    "HookRefused",
    "KernelNotReady",
    "KernelUnavailable",
    "MlaprepError",
    "NotCovered",
    "ServiceError",
    "ServiceRefused",
    "ServiceUnreachable",
    "SpecError",
    "VerificationFailed",
]


class KernelUnavailable(MlaprepError):
    """A kernel that memory, disk and service lack, and that was not or could not be compiled here.

    ``attempts`` holds one line for each tier that was asked, in order.
    """

    def __init__(self, message: str, *, variant_id: str = "", arch: str = "", attempts: Sequence[str] = ()) -> None:
        self.variant_id = variant_id
        self.arch = arch
        self.attempts = tuple(attempts)
        super().__init__(message)


class ServiceError(MlaprepError):
    """The kernel service gave no kernel.

    ``retry_after`` is the number of seconds to leave it alone, as the service said, or 0.
    """

    def __init__(self, message: str, *, retry_after: float = 0.0) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class ServiceUnreachable(ServiceError):
    """No usable answer within the deadline: dead, hung, cut off, or a proxy that speaks for it."""


class ServiceRefused(ServiceError):
    """An answer of the service that is not a kernel.

    ``status`` is the HTTP status, ``problem`` the problem type's last word ("" where the reply had none),
    ``problems`` the fields at fault.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        problem: str = "",
        problems: Sequence[FieldProblem] = (),
        retry_after: float = 0.0,
    ) -> None:
        self.status = status
        self.problem = problem
        self.problems = tuple(problems)
        super().__init__(message, retry_after=retry_after)


class ArtifactRejected(MlaprepError):
    """What a service or store sent is not the kernel that was asked for.

    ``reason`` is a short slug: "reply", or the reason of the artifact check that failed.
    """

    def __init__(self, message: str, *, reason: str = "reply") -> None:
        self.reason = reason
        super().__init__(message)


class KernelNotReady(MlaprepError):
    """A handle that is not loaded on the device was called while its stream was being captured."""


class NotCovered(MlaprepError, ValueError):
    """Tensors whose layout, device or type a handle's kernel does not cover, or a cache format that none does."""


class DriverError(MlaprepError):
    """A CUDA driver call failed. ``code`` is the CUresult, None where the driver itself is missing."""

    def __init__(self, message: str, *, code: int | None = None) -> None:
        self.code = code
        super().__init__(message)


class ForkedProcessError(MlaprepError):
    """A handle was used in a forked child; CUDA state does not survive a fork. Load it anew, or spawn."""


class DecisionChanged(MlaprepError):
    """A call whose shape was recorded with one path, launch or chain, would now take the other.

    ``recorded`` and ``found`` are the two in words. Nothing was launched or written.
    """

    def __init__(self, message: str, *, recorded: str = "", found: str = "") -> None:
        self.recorded = recorded
        self.found = found
        super().__init__(message)


class VerificationFailed(MlaprepError):
    """Under ``MLAPREP_VERIFY`` a launch wrote other bytes than the unfused chain, or bytes that are not its to write.

    ``operand`` is ``kv_cache`` or ``query``; ``where`` the first wrong byte: ``(row, byte)`` of the cache, or
    ``(token, head, byte)``. ``digest`` is the cubin's sha256.
    """

    def __init__(
        self,
        message: str,
        *,
        variant_id: str = "",
        arch: str = "",
        digest: str = "",
        operand: str = "",
        where: Sequence[int] = (),
    ) -> None:
        self.variant_id = variant_id
        self.arch = arch
        self.digest = digest
        self.operand = operand
        self.where = tuple(where)
        super().__init__(message)


class HookRefused(MlaprepError):
    """An inference engine that is not there, or not the one a hook was made for; it runs unchanged.

    ``version`` is the engine's own ("" where it is not there), ``changes`` one line for each name that differs.
    """

    def __init__(self, message: str, *, version: str = "", changes: Sequence[str] = ()) -> None:
        self.version = version
        self.changes = tuple(changes)
        super().__init__(message)
