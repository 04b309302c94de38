"""RedisStore: artifacts that replicas share, in one Redis.

A record names a cubin and a source by digest; both are blobs of their own. All three are proved on every read, and
what does not hold is a miss: it is removed, unless it has been made good meanwhile, and counted. The server is
trusted with nothing but keeping bytes.
"""

import contextlib
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, TypeVar, TypeVarTuple

from mlaprep.kernels_cache import redis_scripts as scripts
from mlaprep.kernels_cache.artifact import MAX_MANIFEST_BYTES, MAX_SOURCE_BYTES, KernelArtifact, Manifest
from mlaprep.kernels_cache.elf import MAX_CUBIN_BYTES
from mlaprep.kernels_cache.errors import ArtifactError, SharedStoreDown, SharedStoreRefusal, StoreError
from mlaprep.kernels_cache.key import is_digest
from mlaprep.kernels_cache.leases import Leases, LeaseStats
from mlaprep.kernels_cache.redis_index import RedisIndex
from mlaprep.kernels_cache.redis_keys import BYTES, INDEX, REVISION, SIZES, TTL_S, name
from mlaprep.kernels_cache.redis_link import LinkStats, RedisLink
from mlaprep.kernels_cache.signing import SigningKey
from mlaprep.kernels_cache.store import Counters, StoreStats, is_prefix, only_key, require_digests
from mlaprep.kernels_cache.trust import TrustedKeys

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_ATTEMPTS: Final = 3
_MAX_OWED: Final = 256
_OWED_AT_ONCE: Final = 8
_LARGEST: Final = max(MAX_MANIFEST_BYTES, MAX_CUBIN_BYTES, MAX_SOURCE_BYTES)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStats:
    """What one process knows of the shared tier; read without asking the server."""

    place: str
    """The server's address, without secrets."""
    trouble: str
    """Why the last publication was not kept, such as that it is full; "" where it was."""
    owed: int
    """Kernels that will be published once the server takes them."""
    store: StoreStats
    link: LinkStats
    leases: LeaseStats


@dataclass(frozen=True, slots=True)
class _Raw:
    """What was read of a record and its blobs, unproved; empty bytes for what is not there, None for no bytes."""

    record: bytes | None
    manifest: Manifest | None = None
    cubin: bytes | None = b""
    source: bytes | None = b""
    damage: ArtifactError | None = None
    """Why there is no manifest."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A record that was proved."""

    record: bytes
    artifact: KernelArtifact
    is_trusted: bool


class RedisStore:
    """A store in the Redis of a link. Never raises for a server in trouble: then it has nothing and keeps nothing.

    Args:
        sign: signs what is published here, so that readers who pin this key believe it.
        trust: keys of which one must have signed what is read here; what none has signed is a miss, and gives way
            to what is published with such a signature.
    """

    def __init__(self, link: RedisLink, *, sign: SigningKey | None = None, trust: TrustedKeys | None = None) -> None:
        self.redis: Final = link
        self._sign = sign
        self._trust = trust
        self._counters = Counters()
        self.leases: Final = Leases(link)
        self._index = RedisIndex(link)
        self.trouble = ""
        """Why the last write was not kept; "" where it was."""
        self._owed: OrderedDict[str, KernelArtifact] = OrderedDict()
        link.when_up(self._catch_up)

    @property
    def publishes(self) -> bool:
        """Whether what is published here is read here too: not where keys are pinned and its own is none of them."""
        return self._trust is None or (self._sign is not None and self._sign.public in self._trust.keys)

    @property
    def pins(self) -> bool:
        """Whether only what pinned keys signed is read."""
        return self._trust is not None

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _remade, (type(self), self.redis, self._sign, self._trust)

    def get(self, key: str) -> KernelArtifact | None:
        held = self._look_up(key) if is_digest(key) else None
        self._counters.add("misses" if held is None else "hits")
        return None if held is None else held.artifact

    def get_blob(self, digest: str) -> bytes | None:
        for key in self.keys_of(digest):
            held = self._look_up(key)
            if held is not None and held.artifact.digest == digest:
                return held.artifact.cubin
        return None

    def keys_of(self, digest: str) -> Sequence[str]:
        """Some keys that this cubin was published under: hints. Never raises."""
        keys: Sequence[bytes] = ()
        if is_digest(digest):
            with contextlib.suppress(StoreError):
                keys = self.redis.run(_pick_holders, digest)
        return [key.decode("ascii", "replace") for key in keys]

    def find_blob(self, prefix: str) -> str | None:
        if not is_prefix(prefix):
            return None
        digests = (manifest.cubin_sha256 for manifest in self._index.manifests())
        return only_key(prefix, (digest for digest in digests if digest.startswith(prefix)))

    def publish(self, artifact: KernelArtifact) -> None:
        artifact.verify()
        if self._sign is not None:
            artifact = self._sign.sign_artifact(artifact)
        if self._trusts(artifact.manifest):  # else nobody who pins the same keys would read it
            if self._write(self._place, artifact):
                self._publish_owed(_OWED_AT_ONCE)
            else:
                self._owe(artifact.key, artifact)

    def link(self, request: str, key: str) -> None:
        require_digests(request, key)
        self._write(self.redis.run, _link, request, key)

    def resolve(self, request: str) -> str | None:
        if not is_digest(request):
            return None
        key: bytes | None = None
        with contextlib.suppress(StoreError):
            (key,) = self.redis.run(_read_all, [name("link", request)])
        text = (key or b"").decode("ascii", "replace")
        return text if is_digest(text) else None

    def list(self, arch: str | None = None) -> Iterator[Manifest]:
        """Reads only what this object has not read before; as of the last answer, where the server gives none."""
        return (manifest for manifest in self._index.manifests() if arch in (None, manifest.arch))

    def delete(self, key: str) -> bool:
        self._owed.pop(key, None)
        return is_digest(key) and bool(self._write(self._remove, key))

    def find(self, prefix: str) -> str | None:
        if not is_prefix(prefix):
            return None
        keys = (manifest.key for manifest in self._index.manifests())
        return only_key(prefix, (key for key in keys if key.startswith(prefix)))

    def key_lock(
        self, key: str, timeout: float, *, unless: Callable[[], bool] | None = None
    ) -> AbstractContextManager[bool]:
        if not is_digest(key):
            raise StoreError("a lock needs a digest of 64 lower-case hexadecimal digits")
        return self.leases.hold(key, timeout, unless=unless)

    def stats(self) -> StoreStats:
        entries, size = self._index.totals()
        return self._counters.stats(entries=entries, size=size)

    def snapshot(self) -> SharedStats:
        """Counts and states of everything here, as of now; ``entries`` and ``bytes`` as of the last look."""
        entries, size = self._index.known_totals()
        return SharedStats(
            place=self.redis.url.place,
            trouble=self.trouble,
            owed=len(self._owed),
            store=self._counters.stats(entries=entries, size=size),
            link=self.redis.stats(),
            leases=self.leases.stats(),
        )

    # Reading

    def _look_up(self, key: str) -> _Held | None:
        """A good record that is trusted; never raises."""
        held = None
        if is_digest(key):
            with contextlib.suppress(StoreError):
                held = self._read(key)
        return held if held is not None and held.is_trusted else None

    def _read(self, key: str) -> _Held | None:
        """A good record; what is no good is removed and counted. Raises StoreError."""
        raw = self.redis.run(_fetch, key)
        if raw.record == b"":
            return None
        if raw.manifest is not None and raw.manifest.key == key and b"" in (raw.cubin, raw.source):  # it made room
            self.redis.run(_drop, {name("record", key): raw.record})
            return None
        try:
            artifact = _prove(raw, key)
        except ArtifactError as damage:
            self._set_aside(key, raw, damage)
            return None
        return _Held(raw.record or b"", artifact, self._trusts(artifact.manifest))

    def _trusts(self, manifest: Manifest) -> bool:
        if self._trust is None:
            return True
        try:
            self._trust.require(manifest)
        except ArtifactError as error:
            _log.info("shared cache: %s is passed over: %s", manifest.key, error)
            return False
        return True

    def _set_aside(self, key: str, raw: _Raw, damage: ArtifactError) -> None:
        self._counters.add("damaged")
        _log.warning("shared cache: damaged record %s is removed: %s", key, damage)
        wrong = {name("record", key): raw.record}
        if raw.manifest is not None:
            for digest, data in ((raw.manifest.cubin_sha256, raw.cubin), (raw.manifest.source_sha256, raw.source)):
                if data is None or hashlib.sha256(data).hexdigest() != digest:
                    wrong[name("blob", digest)] = data
        if self.redis.run(_drop, wrong):
            self._counters.add("quarantined")

    # Writing

    def _write(self, call: Callable[[*Ts], T], *args: *Ts) -> T | None:
        """What the call gives; None where the server is in trouble, which is counted and said once."""
        try:
            done = call(*args)
        except (SharedStoreDown, SharedStoreRefusal) as error:
            self._counters.add("write_errors")
            level = logging.DEBUG if self.trouble else logging.WARNING
            _log.log(level, "shared cache: nothing is kept there for now: %s", error)
            self.trouble = error.reason
            return None
        self.trouble = ""
        return done

    def _catch_up(self) -> None:
        self.trouble = ""
        self._publish_owed()

    def _publish_owed(self, limit: int = _MAX_OWED) -> None:
        """Publish what could not be before, the latest first, as long as the server takes it."""
        for _ in range(limit):
            try:
                key, artifact = self._owed.popitem()
            except KeyError:
                return
            if not self._write(self._place, artifact):
                self._owe(key, artifact)
                return

    def _owe(self, key: str, artifact: KernelArtifact) -> None:
        self._owed[key] = artifact
        while len(self._owed) > _MAX_OWED:
            with contextlib.suppress(KeyError):
                self._owed.popitem(last=False)

    def _place(self, artifact: KernelArtifact) -> bool:
        """True, whether it or another stands there now. Raises StoreError."""
        for _ in range(_ATTEMPTS):
            held = self._read(artifact.key)
            if held is None:
                if self.redis.run(_publish, artifact):
                    return True
            elif held.artifact.digest == artifact.digest:
                if artifact.manifest.adds_signature_to(held.artifact.manifest):
                    self.redis.run(_replace, held.record, artifact)
                return True
            elif held.is_trusted:
                self._counters.add("differing")
                _log.warning("shared cache: a second, differing cubin for %s is not kept", artifact.key)
                return True
            else:
                self._remove(artifact.key)
        return True  # records come and go faster than this one can be placed

    def _remove(self, key: str) -> bool:
        return self.redis.run(_delete, key)


def _pick_holders(client: Any, digest: str) -> Sequence[bytes]:
    keys: Sequence[bytes] = client.srandmember(name("holders", digest), _ATTEMPTS)
    return keys


def _fetch(client: Any, key: str) -> _Raw:
    """A record and its blobs, as they stand."""
    record = _read_all(client, [name("record", key)])[0]
    if record == b"":
        return _Raw(record)
    try:
        if record is None:
            raise ArtifactError("manifest", "a record that is no string")
        manifest = Manifest.from_json(record, sealed=True)
    except ArtifactError as damage:
        return _Raw(record, damage=damage)
    blobs = [name("blob", digest) for digest in (manifest.cubin_sha256, manifest.source_sha256)]
    cubin, source = _read_all(client, blobs, name("holders", manifest.cubin_sha256))
    return _Raw(record, manifest, cubin, source)


def _read_all(client: Any, names: list[str], *kept: str) -> list[bytes | None]:
    """Bytes by name, b"" where there are none and None for another type; they, and ``kept``, stay for longer."""
    pipeline = client.pipeline(transaction=False)
    for each in names:
        pipeline.getrange(each, 0, _LARGEST)
    for each in (*names, *kept):
        pipeline.expire(each, TTL_S)  # a server that cannot write still reads
    answers = pipeline.execute(raise_on_error=False)[: len(names)]
    for answer in answers:
        if isinstance(answer, Exception) and not str(answer).startswith("WRONGTYPE"):
            raise answer
    return [None if isinstance(answer, Exception) else answer for answer in answers]


def _prove(raw: _Raw, key: str) -> KernelArtifact:
    """Raises ArtifactError."""
    if raw.manifest is None:
        raise raw.damage or ArtifactError("manifest", "a record that is no manifest")
    if raw.cubin is None or raw.source is None:
        raise ArtifactError("cubin-digest", "a blob that is no string")
    try:
        source = raw.source.decode()
    except UnicodeDecodeError:
        raise ArtifactError("source-digest", "a source that is not UTF-8") from None
    artifact = KernelArtifact(raw.manifest, raw.cubin, source)
    artifact.verify(key=key)
    return artifact


def _drop(client: Any, read: Mapping[str, bytes | None]) -> int:
    """Remove what is still as it was read."""
    gone: int = client.eval(scripts.DROP, len(read), *read, *(data or b"" for data in read.values()), _LARGEST)
    return gone


def _publish(client: Any, artifact: KernelArtifact) -> bool:
    key, manifest = artifact.key, artifact.manifest
    names = (
        name("record", key),
        name("blob", manifest.cubin_sha256),
        name("blob", manifest.source_sha256),
        name("holders", manifest.cubin_sha256),
        *(INDEX, SIZES, BYTES, REVISION),
    )
    values = (manifest.to_json(), artifact.cubin, artifact.source.encode(), key, artifact.size, TTL_S)
    return bool(client.eval(scripts.PUBLISH, len(names), *names, *values))


def _replace(client: Any, record: bytes, artifact: KernelArtifact) -> None:
    names = (name("record", artifact.key), INDEX, REVISION)
    client.eval(scripts.REPLACE, len(names), *names, record, artifact.manifest.to_json(), artifact.key, TTL_S)


def _delete(client: Any, key: str) -> bool:
    names = [name("record", key), INDEX, SIZES, BYTES, REVISION]
    record = _read_all(client, names[:1])[0]
    with contextlib.suppress(ArtifactError):
        digest = Manifest.from_json(record or b"", sealed=True).cubin_sha256
        names += [name("holders", digest), name("blob", digest)]
    return bool(client.eval(scripts.DELETE, len(names), *names, key))


def _link(client: Any, request: str, key: str) -> None:
    client.set(name("link", request), key, ex=TTL_S)


def _remade(
    kind: type["RedisStore"], link: RedisLink, sign: SigningKey | None, trust: TrustedKeys | None
) -> "RedisStore":
    return kind(link, sign=sign, trust=trust)
