"""Outlook: whether a client has a kernel for a device, or where it would look for it."""

from dataclasses import dataclass

from mlaprep.clients.stats import Tier
from mlaprep.templates.arch import Arch


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a first call would find."""

    arch: Arch | None
    ready: bool = False
    """The kernel is loaded on the device."""
    source: Tier | None = None
    """Where it would come from, where it is not loaded; a service or a compile may still fail."""
    reason: str = ""
    """Why there is none to be had."""
