"""Configuring: a client's arguments, checked when it is made and not where they are first used."""

import math
from typing import Any, Final, get_args

from mlaprep.clients.serving import OnColdCapture, OnMiss
from mlaprep.templates.errors import FieldProblem, SpecError
from mlaprep.templates.fields import describe

_WORDS: Final = {"on_miss": get_args(OnMiss), "on_cold_capture": get_args(OnColdCapture)}
_SWITCHES: Final = ("offline", "report_misses")
_MOST: Final = 2**31 - 1
_METHODS: Final = {"store": ("get", "a KernelStore"), "transport": ("fetch_reply", "a RestTransport")}


def check_arguments(given: dict[str, Any]) -> None:
    """Check a client's arguments by name; None stands for the default where there is one.

    Raises:
        SpecError: what cannot be; all of it at once.
    """
    problems = []

    def refuse(name: str, allowed: str) -> None:
        problems.append(FieldProblem(name, describe(given[name]), allowed))

    for name, words in _WORDS.items():
        if given[name] not in words:
            refuse(name, "one of " + ", ".join(words))
    for name in _SWITCHES:
        # A word would be taken for on, "no" and "off" among them.
        if given[name] is not None and type(given[name]) is not bool:
            refuse(name, "True, False or None")
    timeout = given["timeout"]
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        refuse("timeout", "seconds, a number above 0")
    most = given["max_specialisations"]
    if most is not None and (type(most) is not int or not 0 <= most <= _MOST):
        refuse("max_specialisations", f"an integer from 0 to {_MOST}, or None")
    if given["token"] is not None and type(given["token"]) is not str:
        refuse("token", "a string, or None")
    for name, (method, allowed) in _METHODS.items():
        if given[name] is not None and not hasattr(given[name], method):
            refuse(name, f"{allowed}, or None")
    if problems:
        raise SpecError(problems)
