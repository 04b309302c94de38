"""Readiness: why the service cannot do its work, in words."""

from mlaprep.service.compiler import CompilerState
from mlaprep.service.state import Service


def reasons_not_ready(service: Service, *, draining: bool) -> list[str]:
    """Empty where kernels can be built, or, for a read-only service, where it runs. Looks at memory alone."""
    if draining:
        return ["the service is shutting down"]
    return [] if service.settings.read_only else _of_compiler(service.compiler.state())


def _of_compiler(compiler: CompilerState) -> list[str]:
    match compiler.status:
        case "ready":
            return []
        case "unavailable":
            return [f"no kernel can be built: {compiler.missing} is missing or does not load ({compiler.reason})"]
        case "closed":
            return ["the service is shutting down"]
    return ["the compiler is starting"]
