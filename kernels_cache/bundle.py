"""Bundle: kernels in one file, to carry to where there is no network.

Written whole or not at all, the same kernels giving the same bytes; read without being unpacked. What the file looks
like is in :mod:`mlaprep.kernels_cache.bundle_layout`.
"""

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from mlaprep.kernels_cache import bundle_layout as layout
from mlaprep.kernels_cache.artifact import KernelArtifact, Manifest
from mlaprep.kernels_cache.bundle_layout import BLOCK, INDEX, MAX_BUNDLE_BYTES, MAX_INDEX_BYTES, MAX_KERNELS, Record
from mlaprep.kernels_cache.errors import ArtifactError, BundleError
from mlaprep.kernels_cache.files import new_name
from mlaprep.kernels_cache.signing import SigningKey

NO_TIME: Final = "1970-01-01T00:00:00Z"
"""When a bundled kernel was built, where no signature has it otherwise: a fact of one run, not of the kernel."""

_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class Finding:
    """One kernel of a bundle: its manifest where that can be read, what is wrong with it ("" where nothing is), and
    the member at fault."""

    record: Record
    manifest: Manifest | None
    damage: str = ""
    member: str = ""


class Bundle:
    """An archive that has been looked into: its index is read and proved, its kernels are read on demand.

    Holds no file open. Safe to use from several threads and after a fork.
    """

    def __init__(self, path: Path, identity: tuple[int, ...], places: Mapping[str, tuple[Record, int]]) -> None:
        self.path = path
        self._identity = identity
        self._places = places

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, private: bool = False) -> Self:
        """Read the index of a file, and compare the file's length with it.

        Args:
            private: refuse a file that others may write.

        Raises:
            BundleError: no bundle, one of another version, one that is cut short or has more than it should, or one
                that cannot be opened.
        """
        place = Path(path).absolute()
        with _opened(place) as descriptor:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise BundleError(f"{place} is no regular file")
            if private and status.st_mode & _OTHERS_MAY_WRITE:
                raise BundleError(
                    f"{place} has mode {stat.S_IMODE(status.st_mode):04o}: others may write it; chmod go-w"
                )
            if status.st_size > MAX_BUNDLE_BYTES:
                raise BundleError(f"{place} has more than {MAX_BUNDLE_BYTES} bytes")
            size = _index_size(descriptor, place)
            with _naming(place):
                records = layout.parse_index(_read_member(descriptor, 0, INDEX, size))
            expected = layout.whole_size(size, records)
            if status.st_size != expected:
                told = "is cut short" if status.st_size < expected else "goes on behind its end"
                raise BundleError(f"{place} {told}: {status.st_size} bytes, where its index makes {expected}")
        places = {record.key: (record, offset) for record, offset in layout.offsets(size, records)}
        if len(places) != len(records):
            raise BundleError(f"{place}: {INDEX}: an index that names a kernel twice", member=INDEX)
        return cls(place, _identity(status), places)

    @property
    def records(self) -> list[Record]:
        """What the index names, in order."""
        return [record for record, _ in self._places.values()]

    def keys(self, variant_id: str, arch: str) -> list[str]:
        """Keys of the kernels of a variant for an architecture; several where several compilers built it."""
        return [r.key for r, _ in self._places.values() if r.variant_id == variant_id and r.arch == arch]

    def read(self, key: str) -> KernelArtifact:
        """The verified kernel of a key of the index.

        Raises:
            KeyError: it is not in the index.
            BundleError: the member at fault, and what is wrong with it.
        """
        record, offset = self._places[key]
        with self._open() as descriptor, _naming(self.path):
            return _read_kernel(descriptor, record, offset)

    def manifests(self) -> Iterator[Manifest]:
        """Of every kernel, without reading the rest. Raises BundleError at the first that is damaged."""
        with self._open() as descriptor, _naming(self.path):
            for record, offset in self._places.values():
                *others, (name, size) = record.members()
                place = offset + sum(BLOCK + layout.padded(size) for _, size in others)
                yield _manifest(_read_member(descriptor, place, name, size), record, name)

    def verify(self) -> Iterator[Finding]:
        """Read and prove everything, one kernel after the other, damaged ones included.

        Raises:
            BundleError: the file was replaced meanwhile, or has something where its end should be.
        """
        with self._open() as descriptor:
            for record, offset in self._places.values():
                try:
                    manifest = _read_kernel(descriptor, record, offset).manifest
                except BundleError as error:
                    yield Finding(record, None, str(error), error.member)
                else:
                    yield Finding(record, manifest)
            record, offset = list(self._places.values())[-1]
            end = offset + sum(BLOCK + layout.padded(size) for _, size in record.members())
            if any(os.pread(descriptor, MAX_INDEX_BYTES, end)):
                raise BundleError(f"{self.path}: something stands behind the last member")

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        with _opened(self.path) as descriptor:
            if _identity(os.fstat(descriptor)) != self._identity:
                raise BundleError(f"{self.path} was replaced since it was looked into")
            yield descriptor


def write_bundle(path: Path, artifacts: Iterable[KernelArtifact]) -> str:
    """Write an archive, in place of any file of that name; it is on the medium when this returns.

    Returns the sha256 of the whole file.

    Raises:
        ArtifactError: a kernel that does not verify.
        BundleError: none at all, more than an archive may hold, or two under one key.
        OSError: it cannot be written; a file of that name is still what it was.
    """
    kernels: dict[Record, KernelArtifact] = {}
    for artifact in artifacts:
        artifact.verify()
        kernels[Record.of(artifact)] = artifact
    records = sorted(kernels)
    if not 0 < len(records) <= MAX_KERNELS:
        raise BundleError("no kernel to bundle" if not records else f"more than {MAX_KERNELS} kernels in one bundle")
    if len({record.key for record in records}) != len(records):
        raise BundleError("two kernels under one key")
    index = layout.index_text(records)
    digest = hashlib.sha256()
    temporary = path.with_name(f".{path.name}.{new_name()[:12]}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "wb") as file:
            written = 0
            for part in _parts(index, records, kernels):
                file.write(part)
                digest.update(part)
                written += len(part)
            end = bytes(layout.whole_size(len(index), records) - written)
            file.write(end)
            digest.update(end)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return digest.hexdigest()


def as_bundled(artifact: KernelArtifact, key: SigningKey | None = None) -> KernelArtifact:
    """A kernel as a bundle carries it, so that the same kernels give the same archive wherever they were compiled.

    With a key its manifest is signed by that key. A signature that is there is kept where no key is given, and with it
    the whole manifest. Otherwise the time it was built and the time that took are left out.
    """
    if key is None and artifact.manifest.signature is not None:
        return artifact
    manifest = replace(artifact.manifest, compile_ms=0.0, created_at=NO_TIME, signature=None)
    return replace(artifact, manifest=manifest if key is None else key.sign(manifest))


def _parts(index: bytes, records: Iterable[Record], kernels: Mapping[Record, KernelArtifact]) -> Iterator[bytes]:
    yield from _member(INDEX, index)
    for record in records:
        artifact = kernels[record]
        contents = (artifact.source.encode(), artifact.cubin, artifact.manifest.to_json().encode())
        for (name, _), content in zip(record.members(), contents, strict=True):
            yield from _member(name, content)


def _member(name: str, content: bytes) -> Iterator[bytes]:
    yield layout.header(name, len(content))
    yield content
    yield bytes(layout.padded(len(content)) - len(content))


def _index_size(descriptor: int, place: Path) -> int:
    """The size of the index by its header, which is the one number that an archive is free to choose."""
    head = os.pread(descriptor, BLOCK, 0)
    digits = head[124:135]
    size = int(digits, 8) if len(head) == BLOCK and digits.isdigit() and not digits.translate(None, b"01234567") else 0
    with _naming(place):
        layout.require_header(head, INDEX, size)
        if size > MAX_INDEX_BYTES:
            raise BundleError(f"an index of more than {MAX_INDEX_BYTES} bytes", member=INDEX)
    return size


def _read_kernel(descriptor: int, record: Record, offset: int) -> KernelArtifact:
    contents = []
    for name, size in record.members():
        contents.append(_read_member(descriptor, offset, name, size))
        offset += BLOCK + layout.padded(size)
    source, cubin, text = contents
    names = [name for name, _ in record.members()]
    manifest = _manifest(text, record, names[2])
    try:
        artifact = KernelArtifact(manifest, cubin, source.decode())
        artifact.verify(key=record.key, arch=record.arch)
    except UnicodeDecodeError:
        raise BundleError("a source that is not UTF-8", member=names[0]) from None
    except ArtifactError as error:
        part = names[0] if error.reason.startswith("source") else names[1]
        raise BundleError(str(error), member=part) from error
    return artifact


def _manifest(text: bytes, record: Record, name: str) -> Manifest:
    try:
        manifest = Manifest.from_json(text, sealed=True)
    except ArtifactError as error:
        raise BundleError(str(error), member=name) from error
    if (manifest.arch, manifest.key, manifest.variant_id) != (record.arch, record.key, record.variant_id):
        raise BundleError("a manifest of another kernel than the index names", member=name)
    return manifest


def _read_member(descriptor: int, offset: int, name: str, size: int) -> bytes:
    data = os.pread(descriptor, BLOCK + layout.padded(size), offset)
    layout.require_header(data[:BLOCK], name, size)
    if len(data) != BLOCK + layout.padded(size):
        raise BundleError("a member that is cut short", member=name)
    if any(data[BLOCK + size :]):
        raise BundleError("something stands between two members", member=name)
    return data[BLOCK : BLOCK + size]


@contextlib.contextmanager
def _naming(place: Path) -> Iterator[None]:
    """Put file and member ahead of what went wrong."""
    try:
        yield
    except BundleError as error:
        raise BundleError(f"{place}: {error.member}: {error}", member=error.member) from error.__cause__


@contextlib.contextmanager
def _opened(place: Path) -> Iterator[int]:
    # O_NONBLOCK: a FIFO in place of the file must not hang the reader.
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "no path"
        raise BundleError(f"{place} cannot be opened: {reason}") from None
    try:
        yield descriptor
    except OSError as error:
        raise BundleError(f"{place} cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
