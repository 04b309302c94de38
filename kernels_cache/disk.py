"""DiskStore: artifacts in a private directory, safe against crashes, races, damage and full disks.

::

    <root>/<arch>/<key[:2]>/<key>/   one entry, see mlaprep.kernels_cache.entries
    <root>/links, blobs              hints, see mlaprep.kernels_cache.hints
    <root>/tmp                       what is being written or removed
    <root>/quarantine                the last damaged entries
    <root>/locks                     locks that only save work
"""

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, Self, TypeVar

from mlaprep.kernels_cache import housekeeping
from mlaprep.kernels_cache.artifact import KernelArtifact, Manifest
from mlaprep.kernels_cache.budget import Budget
from mlaprep.kernels_cache.disk_trouble import DiskTrouble
from mlaprep.kernels_cache.entries import read_entry, size_of, touch, write_entry
from mlaprep.kernels_cache.errors import ArtifactError, PlaceUnusable, StoreError
from mlaprep.kernels_cache.files import TEMPORARY, Folder, Identity, NotPrivateError, reason_of
from mlaprep.kernels_cache.hints import BLOBS, LINKS, drop_hint, has_hint, iterate_hints, read_hint, write_hint
from mlaprep.kernels_cache.index import Index, Totals
from mlaprep.kernels_cache.key import is_arch, is_digest
from mlaprep.kernels_cache.locks import LOCKS, file_lock
from mlaprep.kernels_cache.store import Counters, StoreStats, is_prefix, only_key, require_digests

DISK_BYTES: Final = 2**30
"""Default limit of a disk store's content."""

_TOUCH_AGAIN_S: Final = 60.0
_ATTEMPTS: Final = 3
_LINKS_BETWEEN_LOOKS: Final = 1024

# What rename says when another writer's entry has the name already.
_LOST: Final = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})
# Worth opening everything again: network file systems, and directories that went away underneath.
_AGAIN: Final = frozenset({errno.ESTALE, errno.EBUSY, errno.ENOENT})
# Something else stands where a directory should.
_NO_FOLDER: Final = frozenset({errno.ENOTDIR, errno.ELOOP, errno.EACCES})

_ELSEWHERE: Final = "point MLAPREP_CACHE_DIR at a directory that this user can make or owns, and others cannot write"

_log = logging.getLogger(__name__)
_Store = TypeVar("_Store", bound="DiskStore")


class DiskStore:
    """A store in a directory that belongs to this user and that no other may write.

    Several processes may use one root at once. ``max_bytes`` bounds the content of the entries; the least
    recently used go first. Links inside the root are never followed.

    Raises:
        StoreError: the root cannot be made or opened, belongs to another user, or is writable by others.
    """

    def __init__(self, root: Path, max_bytes: int = DISK_BYTES) -> None:
        if type(max_bytes) is not int or max_bytes < 0:
            raise StoreError("max_bytes must be an integer, 0 or more")
        try:
            self._configure(Path(os.path.realpath(root)), max_bytes)
            self._open(create=True).close()
        except (OSError, ValueError) as error:
            told = f": {reason_of(error)}; {_ELSEWHERE}"
            raise PlaceUnusable("no kernel cache can be kept at", root, told) from error

    def _configure(self, root: Path, max_bytes: int) -> None:
        self.root = root
        self.max_bytes = max_bytes
        self._counters = Counters()
        self._index = Index()
        self._budget = Budget(max_bytes)
        self._unkept = DiskTrouble(root)
        self._added_links = 0
        self._last_touch = ("", 0.0)
        self._swept = False

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[type[Self], Path, int]]:
        # A copy, in this process or another, is a store of its own over the same directory. Making it does not
        # touch the disk: a directory that is gone by then gives misses, and comes back with the next publication.
        return _unopened, (type(self), self.root, self.max_bytes)

    def get(self, key: str) -> KernelArtifact | None:
        artifact = self._look_up(key) if is_digest(key) else None
        self._counters.add("misses" if artifact is None else "hits")
        return artifact

    def get_blob(self, digest: str) -> bytes | None:
        if not is_digest(digest):
            return None
        try:
            with self._open() as root:
                artifact = self._look_up_blob(root, digest)
        except OSError as error:
            self._trouble("read", error)
            return None
        return None if artifact is None else artifact.cubin

    def find_blob(self, prefix: str) -> str | None:
        if not is_prefix(prefix):
            return None
        with contextlib.suppress(OSError), self._open() as root:
            hints = list(iterate_hints(root, BLOBS, prefix))
            return only_key(prefix, (found for found, text in hints if housekeeping.leads_somewhere(root, BLOBS, text)))
        return None

    def publish(self, artifact: KernelArtifact) -> None:
        artifact.verify()
        if size_of(artifact) > self.max_bytes:
            self._counters.add("evicted")
            return
        try:
            with self._open(create=True) as root:
                written = self._keep(root, artifact)
        except OSError as error:
            self._unkept.owe(artifact)
            self._trouble("write", error)
            return
        if self._unkept.worked(written):
            self._write_owed()

    def link(self, request: str, key: str) -> None:
        require_digests(request, key)
        try:
            with self._open(create=True) as root:
                self._added_links += write_hint(root, LINKS, request, key)
                if self._added_links > _LINKS_BETWEEN_LOOKS:  # where nothing is evicted, since nothing is kept
                    self._added_links = 0
                    housekeeping.drop_lost_hints(root)
        except OSError as error:
            self._unkept.owe_link(request, key)
            self._trouble("write", error)

    def resolve(self, request: str) -> str | None:
        if not is_digest(request):
            return None
        with contextlib.suppress(OSError), self._open() as root:
            key = read_hint(root, LINKS, request)
            return key if is_digest(key) else None
        return None

    def list(self, arch: str | None = None) -> Iterator[Manifest]:
        """Reads only what this object has not read before. Damage that came to an entry since does not show."""
        with contextlib.suppress(OSError), self._open() as root:
            return iter(self._index.manifests(root, arch))
        return iter(())

    def delete(self, key: str) -> bool:
        deleted = False
        self._unkept.forgive(key)
        for arch, found in self._names(key) if is_digest(key) else ():
            try:
                with self._open() as root:
                    deleted |= housekeeping.remove_entry(root, arch, found)
            except OSError as error:
                self._trouble("write", error)
        return deleted

    def find(self, prefix: str) -> str | None:
        return only_key(prefix, (key for _, key in self._names(prefix))) if is_prefix(prefix) else None

    def key_lock(
        self, key: str, timeout: float, *, unless: Callable[[], bool] | None = None
    ) -> AbstractContextManager[bool]:
        if not is_digest(key):
            raise StoreError("a lock needs a digest of 64 lower-case hexadecimal digits")
        return file_lock(self._open_locks, f"{key}.lock", timeout, unless)

    def stats(self) -> StoreStats:
        totals = Totals()
        with contextlib.suppress(OSError), self._open() as root:
            totals = self._index.totals(root)
        return self._counters.stats(entries=totals.entries, size=totals.size)

    @property
    def trouble(self) -> str:
        """What :meth:`check` found last."""
        return self._unkept.reason

    def check(self) -> str:
        """Why nothing new is kept, as the end of a sentence about the disk, such as ``is full``; "" where all is well.

        After a write that failed, this tries again once a second at most, and writes what could not be written since.
        """
        if self._unkept.is_due():
            self._write_owed()
        return self._unkept.reason

    def gc(self, max_bytes: int | None = None) -> int:
        """Remove the least recently used entries until at most ``max_bytes`` of content are left.

        Also empties the quarantine, drops hints that lead nowhere, and does what :meth:`sweep` does. Returns
        the number of entries removed; a device that fails is counted, not raised.
        """
        evicted = 0
        try:
            with self._open() as root:
                evicted = self._budget.enforce(root, self.max_bytes if max_bytes is None else max_bytes)
                self._counters.add("evicted", evicted)
                housekeeping.drop_lost_hints(root)
                housekeeping.empty_quarantine(root)
        except OSError as error:
            self._trouble("write", error)
        self.sweep()
        return evicted

    def sweep(self, min_age_s: float = 60.0) -> int:
        """Remove what killed writers left behind, if it is that old; returns how much of it there was.

        What a living writer still holds stays. Where the file system has no locks to tell, only what is an
        hour old goes. Never raises.
        """
        with contextlib.suppress(OSError), self._open() as root:
            return housekeeping.sweep(root, min_age_s)
        return 0

    def _open(self, *, create: bool = False) -> Folder:
        return Folder.at(self.root, create=create)

    def _open_locks(self) -> Folder:
        with self._open(create=True) as root:
            return root.make(LOCKS)

    def _names(self, prefix: str = "") -> Sequence[tuple[str, str]]:
        with contextlib.suppress(OSError), self._open() as root:
            return housekeeping.entry_names(root, prefix)
        return []

    def _trouble(self, what: str, error: OSError) -> None:
        """A device fails: count it, and say it once until it works again."""
        if what == "write":
            self._counters.add("write_errors")
        elif isinstance(error, FileNotFoundError):
            return
        self._unkept.meet(what, error)

    # Reading

    def _look_up(self, key: str) -> KernelArtifact | None:
        for attempt in range(_ATTEMPTS):
            try:
                with self._open() as root:
                    found = (self._read(root, arch, key) for arch in root.names() if is_arch(arch))
                    return next((artifact for artifact in found if artifact is not None), None)
            except OSError as error:
                if error.errno != errno.ESTALE or attempt == _ATTEMPTS - 1:
                    self._trouble("read", error)
                    break
        return None

    def _read(self, root: Folder, arch: str, key: str) -> KernelArtifact | None:
        """A verified entry, its use recorded; None where there is none or it had to be set aside."""
        with contextlib.ExitStack() as stack:
            shelf = folder = root
            for name in (arch, key[:2], key):
                child = self._enter(root, folder, name)
                if child is None:
                    return None
                shelf, folder = folder, stack.enter_context(child)
            try:
                artifact = read_entry(folder, arch, key)
            except ArtifactError as damage:
                # An entry that was removed or replaced meanwhile looks damaged to who holds it open.
                if not shelf.holds(key, folder.identity):
                    raise OSError(errno.ESTALE, "entry replaced while it was read") from damage
                self._set_aside(root, shelf, key, damage, folder.identity)
                return None
            self._record_use(root, folder, artifact)
            return artifact

    def _enter(self, root: Folder, folder: Folder, name: str) -> Folder | None:
        try:
            return folder.open(name)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in _NO_FOLDER or isinstance(error, NotPrivateError):
                self._set_aside(root, folder, name, error)
                return None
            raise

    def _record_use(self, root: Folder, entry: Folder, artifact: KernelArtifact) -> None:
        """Keeps the order exact: only a key that is hit over and over is not noted each time."""
        now = time.monotonic()
        last_key, noted = self._last_touch
        again = artifact.key == last_key and now - noted <= _TOUCH_AGAIN_S
        if not again:
            self._last_touch = (artifact.key, now)
            touch(entry)
        if not (again and has_hint(root, BLOBS, artifact.digest)):
            with contextlib.suppress(OSError):  # lost or damaged: what can be read can be had by its digest too
                self._note_blob(root, artifact)

    def _look_up_blob(self, root: Folder, digest: str) -> KernelArtifact | None:
        hint = read_hint(root, BLOBS, digest)
        if hint is None:
            return None
        arch, _, key = hint.partition("/")
        artifact = self._read(root, arch, key) if is_arch(arch) and is_digest(key) else None
        if artifact is not None and artifact.digest == digest:
            return artifact
        # The entry is gone; another may hold the same cubin.
        for manifest in self.list():
            if manifest.cubin_sha256 == digest:
                artifact = self._read(root, manifest.arch, manifest.key)
                if artifact is not None:
                    self._note_blob(root, artifact)
                    return artifact
        drop_hint(root, BLOBS, digest)
        return None

    def _set_aside(
        self, root: Folder, folder: Folder, name: str, reason: Exception, identity: Identity | None = None
    ) -> None:
        self._counters.add("damaged")
        _log.warning("kernel cache: damaged entry %s/%s: %s", folder.where, name, reason)
        try:
            if housekeeping.quarantine(root, folder, name, identity):
                self._counters.add("quarantined")
        except OSError as error:
            _log.warning("kernel cache: %s/%s stays where it is: %s", folder.where, name, error)

    # Writing

    def _keep(self, root: Folder, artifact: KernelArtifact) -> bool:
        """Make sure of an entry; False where it was there already."""
        if not self._place(root, artifact):
            return False
        self._note_blob(root, artifact)
        self._counters.add("evicted", self._budget.spend(root, size_of(artifact)))
        return True

    def _write_owed(self) -> None:
        try:
            with self._open(create=True) as root:
                self._unkept.write_owed(root, self._keep)
        except OSError as error:
            self._unkept.meet("write", error)

    def _place(self, root: Folder, artifact: KernelArtifact) -> bool:
        """Write an entry aside and rename it to its place; False where another stands there."""
        if self._stands(root, artifact):
            return False
        if not self._swept:
            self._swept = True
            self.sweep()
        with root.make(TEMPORARY) as temporary, housekeeping.staged(temporary) as (name, stage):
            write_entry(stage, artifact)
            return self._move_in(root, temporary, name, artifact)

    def _move_in(self, root: Folder, temporary: Folder, name: str, artifact: KernelArtifact) -> bool:
        arch, key = artifact.manifest.arch, artifact.key
        failure = OSError()
        for _ in range(_ATTEMPTS):
            try:
                with root.make(arch, sync=True) as shelves, shelves.make(key[:2], sync=True) as shelf:
                    temporary.move(name, shelf, key)
                    with contextlib.suppress(OSError):
                        shelf.sync()
                    return True
            except OSError as error:
                if error.errno not in _LOST | _AGAIN:
                    raise
                failure = error
            if self._stands(root, artifact):
                return False
        if failure.errno not in _LOST:
            raise failure
        # On a network file system the winner may stay invisible for a minute. It has the place, we have
        # the bytes: nothing more to do.
        _log.info("kernel cache: another writer's entry for %s is not visible yet", key)
        return False

    def _stands(self, root: Folder, artifact: KernelArtifact) -> bool:
        """Whether a good entry has this key already; the first one stays even if its cubin differs."""
        try:
            held = self._read(root, artifact.manifest.arch, artifact.key)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return False
        if held is None:
            return False
        if held.digest != artifact.digest:
            self._counters.add("differing")
            _log.warning("kernel cache: a second, differing cubin for %s is not kept", artifact.key)
        else:
            if artifact.manifest.adds_signature_to(held.manifest):
                housekeeping.replace_manifest(root, artifact)
            self._note_blob(root, artifact)
        return True

    def _note_blob(self, root: Folder, artifact: KernelArtifact) -> None:
        write_hint(root, BLOBS, artifact.digest, f"{artifact.manifest.arch}/{artifact.key}")


def _unopened(kind: type[_Store], root: Path, max_bytes: int) -> _Store:
    store = kind.__new__(kind)
    store._configure(root, max_bytes)
    return store
