"""Listing: the names of the kernels there are, from wherever that can be told soon and without an error."""

import copy
import itertools
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from mlaprep.clients.errors import MlaprepError
from mlaprep.clients.named_kernels import preset_names, spell_variant
from mlaprep.kernels_cache.forks import forget_when_forked
from mlaprep.templates.spec import KernelSpec, parse_variant_id

if TYPE_CHECKING:
    from mlaprep.clients.client import KernelClient

MAX_LISTED: Final = 2000
"""Kernels of the local store that are listed at most; of the service it is one page."""
SERVICE_TIMEOUT_S: Final = 1.0
_KEPT_S: Final = 15.0
"""Seconds for which a list is given again, since a shell asks at every keystroke."""
_STORE_S: Final = 0.5
_PAGE: Final = 500

_log: Final = logging.getLogger(__name__)


def known_names() -> list[str]:
    """Python names of the presets, and of every variant in the local store, the bundles and on the service of the
    default client.

    Takes 1.5 s at most, opens no socket where the client is offline, and leaves out what cannot be told.
    """
    return _listing.get()


class _Listing:
    """The list last made, and when."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Back to none."""
        self._lock = threading.Lock()
        self._names: list[str] = []
        self._until = 0.0

    def get(self) -> list[str]:
        forget_when_forked(self)
        with self._lock:
            if time.monotonic() >= self._until:
                self._names = sorted({*preset_names(), *map(spell_variant, _variants())})
                self._until = time.monotonic() + _KEPT_S
            return list(self._names)


_listing: Final = _Listing()


def _variants() -> set[KernelSpec]:
    from mlaprep.clients.dispatch import default_client

    found: set[KernelSpec] = set()
    for source in (_stored, _bundled, _served):
        try:
            found.update(source(default_client()))
        except Exception as error:  # whoever lists names is told of no fault
            _log.debug("kernels that %s could not be listed: %s", source.__name__.strip("_"), error)
    return found


def _stored(client: "KernelClient") -> Iterator[KernelSpec]:
    deadline = time.monotonic() + _STORE_S
    for manifest in itertools.islice(client.store.list(), MAX_LISTED):
        yield from _spec(manifest.variant_id)
        if time.monotonic() > deadline:
            return


def _bundled(client: "KernelClient") -> Iterator[KernelSpec]:
    for variant_id in sorted({variant_id for variant_id, _ in client.bundles.names()})[:MAX_LISTED]:
        yield from _spec(variant_id)


def _served(client: "KernelClient") -> Iterator[KernelSpec]:
    if client.service is None:
        return
    own = copy.copy(client.service)  # one that meets its deadline closes its connections, fetches of others included
    try:
        page: Any = own.document(f"/v1/variants?state=built&limit={_PAGE}", timeout=SERVICE_TIMEOUT_S)
    finally:
        own.close()
    variants = page.get("variants") if isinstance(page, Mapping) else None
    for variant in variants[:_PAGE] if isinstance(variants, list) else ():
        yield from _spec(variant.get("variant_id") if isinstance(variant, Mapping) else None)


def _spec(variant_id: object) -> Iterator[KernelSpec]:
    """The spec of a variant id, where it is one of this release."""
    try:
        if isinstance(variant_id, str):
            yield parse_variant_id(variant_id)
    except MlaprepError:
        return
