"""Outlook: whether a client has a kernel for a device, or where it would look for it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlaprep.clients.errors import DriverError
from mlaprep.clients.stats import FallbackReason, Tier
from mlaprep.clients.supply import KernelSupply
from mlaprep.templates.arch import Arch
from mlaprep.templates.spec import KernelSpec

if TYPE_CHECKING:
    from mlaprep.clients.handle import KernelHandle


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a call would find."""

    arch: Arch | None
    ready: bool = False
    """The kernel is loaded on the device."""
    source: Tier | None = None
    """Where it would come from, where it is not loaded; a service or a compile may still fail."""
    reason: str = ""
    """Why there is none to be had."""


def known(handle: "KernelHandle | None", refusal: FallbackReason) -> Outlook:
    """Of a kernel that the client has asked for before."""
    if handle is not None:
        return Outlook(handle.arch, ready=True)
    return Outlook(None, reason=f"there was none to be had ({refusal}); load it by hand")


def foresee(spec: KernelSpec, device: int, supply: KernelSupply, on_miss: str, *, store_exists: bool) -> Outlook:
    """Of a kernel that it has not asked for."""
    from mlaprep.clients.launch import cuda_driver

    try:
        capability = cuda_driver().capability(device)
    except DriverError as error:
        return Outlook(None, reason=str(error))
    arch = Arch.for_device(capability)
    if arch is None:
        return Outlook(None, reason=f"none is built for compute capability {capability[0]}.{capability[1]}")
    source = supply.nearest(spec, arch, store_exists=store_exists)
    if source is None:
        reason = f"memory, local store and bundles lack it, and on_miss={on_miss!r} leaves no other place"
        return Outlook(arch, reason=reason)
    return Outlook(arch, source=source)
