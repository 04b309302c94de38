"""Entry: the directory that holds one artifact on disk, read and written.

::

    kernel.cubin   manifest.json   kernel.cu   last_use (empty; its modification time is the last use)
"""

import contextlib
import errno
import os
import time
from typing import Final

from mlaprep.kernels_cache.artifact import MAX_MANIFEST_BYTES, MAX_SOURCE_BYTES, KernelArtifact, Manifest
from mlaprep.kernels_cache.elf import MAX_CUBIN_BYTES
from mlaprep.kernels_cache.errors import ArtifactError
from mlaprep.kernels_cache.files import Folder, NotPrivateError, NotRegularError

CUBIN: Final = "kernel.cubin"
MANIFEST: Final = "manifest.json"
SOURCE: Final = "kernel.cu"
LAST_USE: Final = "last_use"
CONTENT: Final = (CUBIN, MANIFEST, SOURCE)

# What the file system says when a file of an entry is there but is not the file it was.
_DAMAGE: Final = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EIO, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EPERM}
)


def read_manifest(entry: Folder, arch: str, key: str) -> Manifest:
    """The manifest of an entry, proved against the place it was found in.

    Raises:
        ArtifactError: damaged, or of another key or architecture.
        OSError: it cannot be read now.
    """
    manifest = Manifest.from_json(_read(entry, MANIFEST, MAX_MANIFEST_BYTES), sealed=True)
    if manifest.key != key:
        raise ArtifactError("wrong-key", f"{entry.where} holds the manifest of {manifest.key}")
    if manifest.arch != arch:
        raise ArtifactError("wrong-arch", f"{entry.where} holds a kernel for {manifest.arch}")
    return manifest


def read_entry(entry: Folder, arch: str, key: str) -> KernelArtifact:
    """The verified artifact of an entry; errors as for :func:`read_manifest`."""
    manifest = read_manifest(entry, arch, key)
    cubin = _read(entry, CUBIN, MAX_CUBIN_BYTES)
    try:
        source = _read(entry, SOURCE, MAX_SOURCE_BYTES).decode()
    except UnicodeDecodeError:
        raise ArtifactError("source-digest", f"{entry.where}/{SOURCE} is not UTF-8") from None
    artifact = KernelArtifact(manifest, cubin, source)
    artifact.verify()
    return artifact


def write_entry(entry: Folder, artifact: KernelArtifact) -> None:
    """Fill an empty folder; everything is on the medium when this returns. Raises OSError."""
    entry.write(CUBIN, artifact.cubin)
    entry.write(SOURCE, artifact.source.encode())
    entry.write(MANIFEST, artifact.manifest.to_json().encode())
    entry.write(LAST_USE, b"", sync=False)
    entry.sync()


def size_of(artifact: KernelArtifact) -> int:
    """Bytes of content that an entry of this artifact takes."""
    return artifact.size + len(artifact.manifest.to_json())


def touch(entry: Folder) -> None:
    """Record a use now. The files of the kernel stay as they are; a read-only place is no error."""
    with contextlib.suppress(OSError):
        now = time.time_ns()
        try:
            os.utime(LAST_USE, ns=(now, now), dir_fd=entry.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            entry.write(LAST_USE, b"", sync=False)


def measure(entry: Folder) -> tuple[float, int]:
    """Time of last use, seconds since 1970, and bytes of content. Raises OSError."""
    size = 0
    for name in CONTENT:
        with contextlib.suppress(FileNotFoundError):
            size += entry.status(name).st_size
    try:
        used = entry.status(LAST_USE).st_mtime
    except FileNotFoundError:
        used = os.fstat(entry.descriptor).st_mtime
    return used, size


def _read(entry: Folder, name: str, limit: int) -> bytes:
    try:
        return entry.read(name, limit)
    except (NotPrivateError, NotRegularError) as error:
        raise ArtifactError("bad-file", str(error)) from None
    except OSError as error:
        if error.errno in _DAMAGE:
            raise ArtifactError("bad-file", f"{entry.where}/{name}: {os.strerror(error.errno)}") from None
        raise
