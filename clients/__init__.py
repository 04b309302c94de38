"""What workers import. Importing it loads no FastAPI, CuPy, torch or httpx, touches no CUDA, opens no socket.

::

    from mlaprep.clients import KernelClient, fused_prepare, prepare

Names load on first use, so a worker pays only for what it calls.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from mlaprep.clients.client import KernelClient
    from mlaprep.clients.dispatch import fused_prepare, prepare
    from mlaprep.clients.errors import (
        ArtifactRejected,
        DecisionChanged,
        DriverError,
        ForkedProcessError,
        KernelNotReady,
        KernelUnavailable,
        MlaprepError,
        NotCovered,
        ServiceError,
        ServiceRefused,
        ServiceUnreachable,
        SpecError,
        VerificationFailed,
    )
    from mlaprep.clients.explanation import Explanation, explain
    from mlaprep.clients.handle import KernelHandle
    from mlaprep.clients.readiness import ReadinessReport

__all__ = [
    "ArtifactRejected",
    "DecisionChanged",
    "DriverError",
    "Explanation",
    "ForkedProcessError",
    "KernelClient",
    "KernelHandle",
    "KernelNotReady",
    "KernelUnavailable",
    "MlaprepError",
    "NotCovered",
    "ReadinessReport",
    "ServiceError",
    "ServiceRefused",
    "ServiceUnreachable",
    "SpecError",
    "VerificationFailed",
    "explain",
    "fused_prepare",
    "prepare",
]

_HOMES: Final = {
    "Explanation": "explanation",
    "KernelClient": "client",
    "KernelHandle": "handle",
    "ReadinessReport": "readiness",
    "explain": "explanation",
    "fused_prepare": "dispatch",
    "prepare": "dispatch",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOMES.get(name, 'errors')}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
