"""KernelStore: where compiled kernels are kept, in memory or in tiers.

What every store promises: a hit is verified, damage is a miss, and neither reading nor publishing raises
for a failing device. Links and blob records are hints that a reader proves before it believes them.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from threading import Lock, RLock
from typing import Final, Protocol, Self

from mlaprep.kernels_cache.artifact import KernelArtifact, Manifest
from mlaprep.kernels_cache.errors import AmbiguousKeyError, StoreError
from mlaprep.kernels_cache.forks import forget_when_forked
from mlaprep.kernels_cache.key import is_digest

MEMORY_BYTES: Final = 64 * 2**20
_MAX_LINKS: Final = 65536
_ASK_AGAIN_S: Final = 0.002
_HEX: Final = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """Counters of one store object since it was made, and what the store holds now."""

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    """Entries found damaged; each was a miss."""
    quarantined: int = 0
    """Damaged entries that were set aside; below ``damaged`` where the place is read-only."""
    evicted: int = 0
    """Entries removed for room, or never stored because they alone exceed it."""
    write_errors: int = 0
    differing: int = 0
    """Publications whose cubin differed from the good one already there, which stayed."""
    entries: int = 0
    bytes: int = 0


class KernelStore(Protocol):
    """The operations of a store. All are safe to call from several threads and processes."""

    def get(self, key: str) -> KernelArtifact | None:
        """The verified artifact of a key. Damage counts, is set aside, and is a miss; never raises."""

    def get_blob(self, digest: str) -> bytes | None:
        """The cubin with this sha256, verified; never raises."""

    def find_blob(self, prefix: str) -> str | None:
        """The one digest of a cubin that starts with this prefix, among those noted; never reads every entry.

        Raises:
            AmbiguousKeyError: several do.
        """

    def publish(self, artifact: KernelArtifact) -> None:
        """Keep an artifact. A store that cannot write counts it and goes on.

        What is held already stays. Only its manifest gives way, to one of the same cubin that is signed, and
        otherwise: so a record gets its signature, and another one when keys are rotated.

        Raises:
            ArtifactError: the artifact itself does not verify.
        """

    def link(self, request: str, key: str) -> None:
        """Note which key answered a request digest; never raises for a failing device.

        Raises:
            StoreError: one of the two is no digest.
        """

    def resolve(self, request: str) -> str | None:
        """The key last linked to a request: a hint. The reader compares spec and arch of the entry."""

    def list(self, arch: str | None = None) -> Iterator[Manifest]:
        """Manifests of the entries, of one architecture or of all; those that cannot be read are left out."""

    def delete(self, key: str) -> bool:
        """Remove an entry; whether there was one."""

    def find(self, prefix: str) -> str | None:
        """The one key that starts with this prefix.

        Raises:
            AmbiguousKeyError: several do.
        """

    def key_lock(
        self, key: str, timeout: float, *, unless: Callable[[], bool] | None = None
    ) -> AbstractContextManager[bool]:
        """Hold a key against others that would compile it too; yields whether it is held.

        Waits ``timeout`` seconds at most, and no longer once ``unless``, asked each time that the key is found held,
        says that there is nothing left to do. It only saves work: check the store again once inside, and go on all
        the same where it yields False.
        """

    def stats(self) -> StoreStats:
        """Counters and contents."""


class Counters:
    """Counts behind a lock; names are those of :class:`StoreStats`."""

    def __init__(self) -> None:
        self._stats = StoreStats()
        self.forget()
        forget_when_forked(self)

    def forget(self) -> None:
        """A lock that nobody holds; the counts go on."""
        self._lock = Lock()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._stats = replace(self._stats, **{name: getattr(self._stats, name) + amount})

    def stats(self, *, entries: int, size: int) -> StoreStats:
        with self._lock:
            return replace(self._stats, entries=entries, bytes=size)


class MemoryStore:
    """Artifacts of this process, the least recently used dropped above ``max_bytes``."""

    def __init__(self, max_bytes: int = MEMORY_BYTES) -> None:
        if type(max_bytes) is not int or max_bytes < 0:
            raise StoreError("max_bytes must be an integer, 0 or more")
        self.max_bytes = max_bytes
        self._lock = RLock()
        self._counters = Counters()
        self._clear()
        forget_when_forked(self)

    def forget(self) -> None:
        """Locks that nobody holds, and the entries, unless another thread was amid changing them."""
        whole = self._lock.acquire(blocking=False)
        self._lock = RLock()
        self._key_locks.clear()
        if not whole:
            self._clear()

    def __reduce__(self) -> tuple[type[Self], tuple[int]]:
        # A copy, in this process or another, starts empty.
        return type(self), (self.max_bytes,)

    def get(self, key: str) -> KernelArtifact | None:
        # Verified when it was published; the bytes are immutable since.
        with self._lock:
            artifact = self._entries.get(key)
            if artifact is not None:
                self._entries.move_to_end(key)
        self._counters.add("misses" if artifact is None else "hits")
        return artifact

    def get_blob(self, digest: str) -> bytes | None:
        with self._lock:
            key = next(iter(self._blobs.get(digest, ())), None)
            return None if key is None else self._entries[key].cubin

    def find_blob(self, prefix: str) -> str | None:
        if not is_prefix(prefix):
            return None
        with self._lock:
            return only_key(prefix, (digest for digest in self._blobs if digest.startswith(prefix)))

    def publish(self, artifact: KernelArtifact) -> None:
        artifact.verify()
        if artifact.size > self.max_bytes:
            self._counters.add("evicted")
            return
        with self._lock:
            held = self._entries.get(artifact.key)
            if held is None:
                self._entries[artifact.key] = artifact
                self._blobs.setdefault(artifact.digest, set()).add(artifact.key)
                self._bytes += artifact.size
                self._make_room()
            elif held.digest != artifact.digest:
                self._counters.add("differing")
            elif artifact.manifest.adds_signature_to(held.manifest):
                self._entries[artifact.key] = artifact

    def link(self, request: str, key: str) -> None:
        require_digests(request, key)
        with self._lock:
            self._links[request] = key
            self._links.move_to_end(request)
            if len(self._links) > _MAX_LINKS:
                self._links.popitem(last=False)

    def resolve(self, request: str) -> str | None:
        with self._lock:
            return self._links.get(request)

    def list(self, arch: str | None = None) -> Iterator[Manifest]:
        with self._lock:
            manifests = [artifact.manifest for artifact in self._entries.values()]
        return (manifest for manifest in manifests if arch in (None, manifest.arch))

    def delete(self, key: str) -> bool:
        with self._lock:
            return self._remove(key)

    def find(self, prefix: str) -> str | None:
        if not is_prefix(prefix):
            return None
        with self._lock:
            return only_key(prefix, (key for key in self._entries if key.startswith(prefix)))

    @contextmanager
    def key_lock(self, key: str, timeout: float, *, unless: Callable[[], bool] | None = None) -> Iterator[bool]:
        deadline = time.monotonic() + timeout
        with self._lock:
            lock, users = self._key_locks.get(key, (Lock(), 0))
            self._key_locks[key] = (lock, users + 1)
        held = lock.acquire(blocking=False)
        while not held and (left := deadline - time.monotonic()) > 0 and not (unless is not None and unless()):
            held = lock.acquire(timeout=left if unless is None else min(left, _ASK_AGAIN_S))
        try:
            yield held
        finally:
            if held:
                lock.release()
            with self._lock:
                lock, users = self._key_locks.pop(key, (lock, 1))  # gone where this process was forked meanwhile
                if users > 1:
                    self._key_locks[key] = (lock, users - 1)

    def stats(self) -> StoreStats:
        with self._lock:
            return self._counters.stats(entries=len(self._entries), size=self._bytes)

    def _clear(self) -> None:
        self._entries: OrderedDict[str, KernelArtifact] = OrderedDict()
        self._blobs: dict[str, set[str]] = {}
        self._links: OrderedDict[str, str] = OrderedDict()
        self._key_locks: dict[str, tuple[Lock, int]] = {}
        self._bytes = 0

    def _make_room(self) -> None:
        while self._bytes > self.max_bytes:
            self._remove(next(iter(self._entries)))
            self._counters.add("evicted")

    def _remove(self, key: str) -> bool:
        artifact = self._entries.pop(key, None)
        if artifact is None:
            return False
        self._bytes -= artifact.size
        keys = self._blobs[artifact.digest]
        keys.remove(key)
        if not keys:
            del self._blobs[artifact.digest]
        return True


class TieredStore:
    """Several stores, the fastest first: a hit further down is copied to those above it.

    ``hits`` and ``misses`` are those of the whole; the other counters are sums over the tiers, and
    ``entries`` and ``bytes`` those of the tier that holds most.
    """

    def __init__(self, tiers: Sequence[KernelStore]) -> None:
        if not tiers:
            raise StoreError("a tiered store needs at least one store")
        self.tiers = tuple(tiers)
        self._counters = Counters()

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[KernelStore, ...]]]:
        return type(self), (self.tiers,)

    def get(self, key: str) -> KernelArtifact | None:
        for depth, tier in enumerate(self.tiers):
            artifact = tier.get(key)
            if artifact is not None:
                for above in self.tiers[:depth]:
                    above.publish(artifact)
                self._counters.add("hits")
                return artifact
        self._counters.add("misses")
        return None

    def get_blob(self, digest: str) -> bytes | None:
        blobs = (tier.get_blob(digest) for tier in self.tiers)
        return next((blob for blob in blobs if blob is not None), None)

    def find_blob(self, prefix: str) -> str | None:
        return only_key(prefix, (found for tier in self.tiers if (found := tier.find_blob(prefix)) is not None))

    def publish(self, artifact: KernelArtifact) -> None:
        for tier in self.tiers:
            tier.publish(artifact)

    def link(self, request: str, key: str) -> None:
        for tier in self.tiers:
            tier.link(request, key)

    def resolve(self, request: str) -> str | None:
        for depth, tier in enumerate(self.tiers):
            key = tier.resolve(request)
            if key is not None:
                for above in self.tiers[:depth]:
                    above.link(request, key)
                return key
        return None

    def list(self, arch: str | None = None) -> Iterator[Manifest]:
        seen: set[str] = set()
        for tier in self.tiers:
            for manifest in tier.list(arch):
                if manifest.key not in seen:
                    seen.add(manifest.key)
                    yield manifest

    def delete(self, key: str) -> bool:
        deleted = [tier.delete(key) for tier in self.tiers]
        return any(deleted)

    def find(self, prefix: str) -> str | None:
        return only_key(prefix, (key for tier in self.tiers if (key := tier.find(prefix)) is not None))

    @contextmanager
    def key_lock(self, key: str, timeout: float, *, unless: Callable[[], bool] | None = None) -> Iterator[bool]:
        deadline = time.monotonic() + timeout
        with ExitStack() as stack:
            held = [
                stack.enter_context(tier.key_lock(key, deadline - time.monotonic(), unless=unless))
                for tier in self.tiers
            ]
            yield all(held)

    def stats(self) -> StoreStats:
        tiers = [tier.stats() for tier in self.tiers]
        fullest = max(tiers, key=lambda stats: stats.entries)
        sums = {item.name: sum(getattr(stats, item.name) for stats in tiers) for item in fields(StoreStats)}
        whole = self._counters.stats(entries=fullest.entries, size=fullest.bytes)
        del sums["hits"], sums["misses"], sums["entries"], sums["bytes"]
        return replace(whole, **sums)


def require_digests(request: str, key: str) -> None:
    """Raises StoreError unless both are full digests."""
    if not (is_digest(request) and is_digest(key)):
        raise StoreError("a link needs two digests of 64 lower-case hexadecimal digits")


def is_prefix(text: object) -> bool:
    """Whether this can be the start of a key."""
    return type(text) is str and 0 < len(text) <= 64 and _HEX.issuperset(text)


def only_key(prefix: str, keys: Iterator[str]) -> str | None:
    """The key there is, if any; raises AmbiguousKeyError where there are several."""
    found = set(keys)
    if len(found) > 1:
        raise AmbiguousKeyError(prefix, len(found))
    return next(iter(found), None)
