"""Headers that tell browsers what they may do with a reply."""

from collections.abc import Iterable
from typing import Final

PAGE_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
"""For pages with a script and a stylesheet of this service's own, and nothing inline."""

GUARDS: Final[tuple[tuple[bytes, bytes], ...]] = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    # "no-referrer" would have a browser send "Origin: null" with the forms of this service's own pages.
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", PAGE_POLICY.encode()),
)
_NAMES: Final = frozenset(name for name, _ in GUARDS)


def guarded(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers of a reply with those that guard it; what a route says itself stays."""
    kept = list(headers)
    said = {name for name, _ in kept} & _NAMES
    return kept + [header for header in GUARDS if header[0] not in said] if said else [*kept, *GUARDS]
