"""Switches: what an operator turns on for a process without a change of its code."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from mlaprep.templates.environment import read_switch


@dataclass(frozen=True, slots=True)
class Switches:
    """Read when a client or a handle is made, and unpickled; a later change of the environment has no effect on it."""

    disable: bool = False
    """No kernel is launched: ``fused_prepare`` answers None, ``prepare`` and handles take the unfused chain."""
    verify: bool = False
    """Every launch is compared with the unfused chain. Nothing is, where ``disable`` is on."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Raises SpecError for a word that is no switch: a typing error must not leave one off unnoticed."""
        environ = os.environ if environ is None else environ
        return cls(read_switch("MLAPREP_DISABLE", environ), read_switch("MLAPREP_VERIFY", environ))
