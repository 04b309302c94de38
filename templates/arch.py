"""Arch: the GPU architectures a kernel can be built for, and which one a device runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from mlaprep.templates.errors import FieldProblem, SpecError


@dataclass(frozen=True, slots=True, order=True)
class Arch:
    """A compilation target such as ``sm_90a``.

    The suffix matters: ``a`` code runs on exactly that compute capability, ``f`` code on its family,
    and code for one is never loaded as another.
    """

    name: str

    def __post_init__(self) -> None:
        if type(self.name) is not str or self.name not in _CAPABILITIES:
            raise SpecError(
                FieldProblem("arch", "an architecture that is not known", "one of " + ", ".join(_CAPABILITIES))
            )

    def __str__(self) -> str:
        return self.name

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability (major, minor)."""
        return _CAPABILITIES[self.name]

    @property
    def supports_pdl(self) -> bool:
        """Programmatic dependent launch came with compute capability 9.0."""
        return self.capability[0] >= 9

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether code for this target is valid on a device: ``a`` on its own capability only, the
        others on later minors of the same major too."""
        if self.name.endswith("a"):
            return capability == self.capability
        return capability[0] == self.capability[0] and capability[1] >= self.capability[1]

    @classmethod
    def for_device(cls, capability: tuple[int, int]) -> Self | None:
        """The target a device of this capability gets by itself, or None where there is none.

        An exact look-up, never a range: a cubin for 12.0 is not valid on 12.1. Capabilities 8.9 and
        12.1 have targets to build by name, but are not chosen until they have been run on hardware.
        """
        name = _BY_DEVICE.get(capability)
        return None if name is None else cls(name)


_CAPABILITIES: Final[Mapping[str, tuple[int, int]]] = {
    "sm_89": (8, 9),
    "sm_90": (9, 0),
    "sm_90a": (9, 0),
    "sm_100": (10, 0),
    "sm_100a": (10, 0),
    "sm_100f": (10, 0),
    "sm_103": (10, 3),
    "sm_103a": (10, 3),
    "sm_103f": (10, 3),
    "sm_120": (12, 0),
    "sm_120a": (12, 0),
    "sm_120f": (12, 0),
    "sm_121": (12, 1),
    "sm_121a": (12, 1),
    "sm_121f": (12, 1),
}
_BY_DEVICE: Final[Mapping[tuple[int, int], str]] = {
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
}

ARCHS: Final = tuple(Arch(name) for name in _CAPABILITIES)
"""Every known target, oldest first."""

DEFAULT_ARCHS: Final = tuple(Arch(name) for name in ("sm_90a", "sm_100a", "sm_103a", "sm_120a"))
"""The targets built where none is named: those that a device gets by itself."""
