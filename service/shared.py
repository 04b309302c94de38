"""Shared: the service's part in a Redis that replicas share, as the settings have it."""

import os
from collections.abc import Sequence
from typing import Any, Final

from mlaprep.kernels_cache.errors import SigningError, StoreError
from mlaprep.kernels_cache.redis import RedisStore
from mlaprep.kernels_cache.redis_link import RedisLink
from mlaprep.kernels_cache.redis_url import ALLOWED, INSTALL, RedisUrl, redis_package
from mlaprep.kernels_cache.signing import SigningKey
from mlaprep.kernels_cache.store import KernelStore, TieredStore
from mlaprep.kernels_cache.trust import VARIABLE, TrustedKeys
from mlaprep.service.settings import Settings
from mlaprep.templates.errors import FieldProblem, SpecError

_VARIABLE: Final = "MLAPREP_REDIS_URL"


def open_shared(settings: Settings, signing_key: SigningKey | None) -> RedisStore | None:
    """The shared tier, None where none is configured. Connects to nothing yet.

    What is published is signed where the service has a key. Where MLAPREP_TRUSTED_KEYS pins keys, only what one of
    them signed is read.

    Raises:
        SpecError: the package redis is not installed, or pinned keys that cannot be used. No value is repeated.
    """
    if settings.redis_url is None:
        return None
    try:
        redis_package()
        url = RedisUrl(settings.redis_url.get_secret_value())
    except StoreError as error:
        raise SpecError(FieldProblem(_VARIABLE, str(error), f"{ALLOWED}, with {INSTALL}; or unset it")) from None
    try:
        trust = TrustedKeys.from_environment(os.environ)
    except SigningError as error:
        allowed = "public keys or files of them, between commas; unset it to pin none"
        raise SpecError(FieldProblem(VARIABLE, str(error), allowed)) from None
    return RedisStore(RedisLink(url, settings.redis_timeout_s), sign=signing_key, trust=trust)


class SharedTiers(TieredStore):
    """Tiers of this machine with the shared one below them.

    What is asked for by its digest is kept above too: behind a load balancer half of all fetches would go to Redis.
    """

    def __init__(self, own: Sequence[KernelStore], shared: RedisStore) -> None:
        super().__init__([*own, shared])
        self._own, self._shared = tuple(own), shared

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._own, self._shared)

    def get_blob(self, digest: str) -> bytes | None:
        for tier in self._own:
            if (blob := tier.get_blob(digest)) is not None:
                return blob
        for key in self._shared.keys_of(digest):
            artifact = self.get(key)
            if artifact is not None and artifact.digest == digest:
                return artifact.cubin
        return None


def with_shared(store: KernelStore, shared: RedisStore | None) -> KernelStore:
    """A store with the shared tier below its own."""
    if shared is None:
        return store
    return SharedTiers(store.tiers if isinstance(store, TieredStore) else [store], shared)


def installation_warnings(shared: RedisStore | None) -> tuple[str, ...]:
    """What is wrong with how the shared tier is set up, for as long as the service runs."""
    if shared is None or shared.publishes:
        return ()
    told = "nothing that is built here gets into the shared cache: its keys are pinned, and MLAPREP_SIGNING_KEY is none"
    return (f"{told} of them",)


def shared_warnings(shared: RedisStore | None) -> tuple[str, ...]:
    """What is wrong with the shared tier now, without keeping the service from working; may ask the server."""
    if shared is None:
        return ()
    link = shared.redis.check()
    place = shared.redis.url.place
    if link.state != "up":
        return (f"shared cache down: {place}: {link.reason}; kernels are kept and built on this machine alone",)
    if shared.trouble:
        return (f"shared cache keeps nothing new: {place}: {shared.trouble}",)
    return ()


def shared_document(shared: RedisStore | None) -> dict[str, Any] | None:
    """State and counts of the shared tier, as /readyz has them; asks nobody."""
    if shared is None:
        return None
    stats = shared.snapshot()
    return {
        "state": "refusing" if stats.link.state == "up" and stats.trouble else stats.link.state,
        "reason": stats.link.reason or stats.trouble,
        "place": stats.place,
        "hits": stats.store.hits,
        "misses": stats.store.misses,
        "damaged": stats.store.damaged,
        "differing": stats.store.differing,
        "write_errors": stats.store.write_errors,
        "owed": stats.owed,
        "timeouts": stats.link.timeouts,
        "errors": stats.link.errors,
        "opened": stats.link.opened,
        "leases": stats.leases.acquired,
        "lease_waits": stats.leases.waits,
    }
