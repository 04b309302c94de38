"""Readiness: why the service cannot do its work, and what is wrong that keeps nothing from working, in words."""

from collections.abc import Iterable

from mlaprep.kernels_cache.opening import disk_of
from mlaprep.service.compiler import CompilerState
from mlaprep.service.errors import without_folders
from mlaprep.service.shared import shared_document, shared_warnings
from mlaprep.service.state import Service


def reasons_not_ready(service: Service, *, draining: bool) -> list[str]:
    """Empty where kernels can be built, or, for a read-only service, where it runs. Looks at memory alone."""
    if draining:
        return ["the service is shutting down"]
    return [] if service.settings.read_only else _of_compiler(service.compiler.state())


def warnings_of(service: Service) -> list[str]:
    """What is wrong now; names no directory. May ask the disk and the shared tier whether they work again."""
    of_disk = () if (disk := disk_of(service.store)) is None else _of_disk(disk.check())
    return [*service.warnings, *service.access.warnings(), *of_disk, *shared_warnings(service.shared)]


def is_warned(service: Service) -> bool:
    """Whether there was anything to warn of when last looked at; asks nobody."""
    shared = shared_document(service.shared)
    is_alone = shared is not None and shared["state"] in ("down", "refusing")
    disk = disk_of(service.store)
    return bool(service.warnings) or is_alone or (disk is not None and disk.trouble != "")


def _of_disk(trouble: str) -> Iterable[str]:
    if trouble:
        yield f"the cache's disk {trouble}: new kernels are kept in memory, and written once the disk takes them"


def _of_compiler(compiler: CompilerState) -> list[str]:
    match compiler.status:
        case "ready":
            return []
        case "unavailable":
            reason = without_folders(compiler.reason or "")
            return [f"no kernel can be built: {compiler.missing} is missing or does not load ({reason})"]
        case "closed":
            return ["the service is shutting down"]
    return ["the compiler is starting"]
