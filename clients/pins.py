"""Pins: the keys that a client trusts, as its argument or the environment names them."""

import os
from collections.abc import Iterable

from mlaprep.kernels_cache.errors import SigningError
from mlaprep.kernels_cache.trust import VARIABLE, TrustedKeys
from mlaprep.templates.errors import FieldProblem, SpecError
from mlaprep.templates.fields import describe

Pins = TrustedKeys | str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None
"""Keys (``ed25519:…``) or files of them; None for those of ``MLAPREP_TRUSTED_KEYS``, if it is set."""


def pinned_keys(given: Pins) -> TrustedKeys | None:
    """The keys given, or those of the environment; None where neither is.

    Raises:
        SpecError: keys that are none, an empty list or variable included.
    """
    if isinstance(given, TrustedKeys):
        return given
    try:
        return TrustedKeys.from_environment(os.environ) if given is None else TrustedKeys.parse(given)
    except (SigningError, TypeError) as error:
        name = VARIABLE if given is None else "trusted_keys"
        found = str(error) if isinstance(error, SigningError) else describe(given)
        raise SpecError(FieldProblem(name, found, "public keys (ed25519:…) or files of them")) from None
