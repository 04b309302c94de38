"""Wording: how counts and values read in a sentence or a table."""


def count(number: int, noun: str) -> str:
    """A number of things: ``1 kernel``, ``2 kernels``, ``1,024 bytes``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def spell(value: object) -> str:
    """A value as people read it: nothing is ``none``, a switch is ``yes`` or ``no``."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
