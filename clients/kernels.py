"""Kernels by name.

::

    from mlaprep.clients.kernels import kimi_k3_tp8
    from mlaprep.clients.kernels import mla_prepare_h12_r512_d64_bf16_fp8_norope_i64_pdl
    from mlaprep.clients.kernels import kimi_k3_tp8_sm_90a

Every name is a handle of the default client, had where it is first used: importing one fetches nothing, opens no
driver and works without a GPU. :mod:`mlaprep.clients.named_kernels` says how names are spelled; ``dir()`` lists those
of the presets, the local store and the service.
"""

import difflib
import opcode
import sys
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from mlaprep.clients.handle import KernelHandle
    from mlaprep.clients.named_kernels import NamedKernel

_known: Final[dict[str, "NamedKernel"]] = {}
MAX_KNOWN: Final = 4096
"""Names kept once they were asked for; beyond it each time makes a new handle."""


def __getattr__(name: str) -> "KernelHandle":
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    handle = _find(name)
    if handle is None:
        _refuse(name, sys._getframe(1))
    return handle


def __dir__() -> list[str]:
    from mlaprep.clients.listing import known_names

    return known_names()


def find(name: str) -> "NamedKernel":
    """The handle of a name given as text.

    Raises:
        SpecError: no kernel has that name; the nearest are given.
        TypeError: no string.
    """
    from mlaprep.templates.errors import FieldProblem, SpecError

    if type(name) is not str:
        raise TypeError(f"name: found a {type(name).__name__}; pass a string such as 'kimi_k3_tp8'")
    handle = _find(name)
    if handle is None:
        raise SpecError(FieldProblem("name", "no kernel's name", _allowed(name)))
    return handle


def _find(name: str) -> "NamedKernel | None":
    from mlaprep.clients.named_kernels import NamedKernel, parse_name

    known = _known.get(name)
    if known is not None:
        return known
    found = parse_name(name)
    if found is None:
        return None
    handle = NamedKernel(name, *found)
    return _known.setdefault(name, handle) if len(_known) < MAX_KNOWN else handle


def _refuse(name: str, asker: FrameType) -> NoReturn:
    message = f"{__name__}: no kernel is named {name:.80}; try {_allowed(name)}"
    # hasattr and getattr take an AttributeError for an answer; an import statement would replace its words.
    if opcode.opname[asker.f_code.co_code[asker.f_lasti]] == "IMPORT_FROM":
        raise ImportError(message, name=__name__)
    raise AttributeError(message)


def _allowed(name: str) -> str:
    from mlaprep.clients.named_kernels import preset_names

    names = dict.fromkeys([*preset_names(), *_known])
    alike = difflib.get_close_matches(name[:80], names, n=3, cutoff=0.5)
    return ", ".join(alike) if alike else "dir(mlaprep.clients.kernels), a variant id with _ for -, or kimi_k3_tp8"
