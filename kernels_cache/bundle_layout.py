"""BundleLayout: where everything stands in an archive of kernels, byte for byte.

A bundle is a plain tar file (ustar) that holds, in this order and nothing else:

::

    bundle.json                              the index: which kernels, and how long their parts are
    kernels/<arch>/<key>/kernel.cu
    kernels/<arch>/<key>/kernel.cubin
    kernels/<arch>/<key>/manifest.json

Kernels are sorted by arch and key; owner, group and times are zero, the mode is 0644. So the index alone decides
every other byte that is not content, the place of each member is computed and not searched for, and an archive that
differs anywhere is none. Links, devices, paths that lead elsewhere, sparse or repeated members have no place to be.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from mlaprep.kernels_cache.artifact import MAX_MANIFEST_BYTES, MAX_SOURCE_BYTES, KernelArtifact
from mlaprep.kernels_cache.elf import MAX_CUBIN_BYTES
from mlaprep.kernels_cache.entries import CUBIN, MANIFEST, SOURCE
from mlaprep.kernels_cache.errors import BundleError
from mlaprep.kernels_cache.key import canonical_json, is_arch, is_digest
from mlaprep.kernels_cache.strict_json import parse_strict

INDEX: Final = "bundle.json"
FORMAT: Final = "mlaprep-bundle"
VERSION: Final = 1
MAX_KERNELS: Final = 16384
MAX_INDEX_BYTES: Final = 16 * 2**20
MAX_BUNDLE_BYTES: Final = 4 * 2**30
BLOCK: Final = 512

_RECORD: Final = 10240  # what tar pads a whole archive to
_END: Final = 2 * BLOCK
_HEADER: Final = struct.Struct("100s8s8s8s12s12s8sc100s6s2s32s32s8s8s155s12x")
_BOUNDS: Final[Mapping[str, int]] = {
    "cubin_size": MAX_CUBIN_BYTES,
    "source_size": MAX_SOURCE_BYTES,
    "manifest_size": MAX_MANIFEST_BYTES,
}
_MAX_NAME: Final = 512
_REGULAR: Final = b"0"


@dataclass(frozen=True, slots=True, order=True)
class Record:
    """One kernel as the index has it."""

    arch: str
    key: str
    variant_id: str
    cubin_size: int
    source_size: int
    manifest_size: int

    @classmethod
    def of(cls, artifact: KernelArtifact) -> "Record":
        manifest = artifact.manifest
        sizes = (len(artifact.cubin), len(artifact.source.encode()), len(manifest.to_json()))
        return cls(manifest.arch, manifest.key, manifest.variant_id, *sizes)

    @property
    def folder(self) -> str:
        return f"kernels/{self.arch}/{self.key}"

    def members(self) -> tuple[tuple[str, int], ...]:
        """Name and bytes of its members, in their order."""
        parts = ((SOURCE, self.source_size), (CUBIN, self.cubin_size), (MANIFEST, self.manifest_size))
        return tuple((f"{self.folder}/{name}", size) for name, size in parts)

    def document(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def padded(size: int) -> int:
    """Bytes that a member's content takes."""
    return -(-size // BLOCK) * BLOCK


def whole_size(index_size: int, records: Iterable[Record]) -> int:
    """Bytes of an archive, its end included."""
    sizes = [index_size, *(size for record in records for _, size in record.members())]
    return -(-(sum(BLOCK + padded(size) for size in sizes) + _END) // _RECORD) * _RECORD


def offsets(index_size: int, records: Iterable[Record]) -> Iterator[tuple[Record, int]]:
    """Where each record's first header stands."""
    offset = BLOCK + padded(index_size)
    for record in records:
        yield record, offset
        offset += sum(BLOCK + padded(size) for _, size in record.members())


def header(name: str, size: int) -> bytes:
    """The one header that a member of this name and size can have."""
    fields = [name.encode(), b"0000644\0", b"0000000\0", b"0000000\0", b"%011o\0" % size, b"%011o\0" % 0]
    rest = [_REGULAR, b"", b"ustar\0", b"00", b"", b"", b"", b"", b""]
    total = sum(_HEADER.pack(*fields, b" " * 8, *rest))
    return _HEADER.pack(*fields, b"%06o\0 " % total, *rest)


def require_header(found: bytes, name: str, size: int) -> None:
    """Raises BundleError, which says what stands there instead, unless this is the header expected."""
    if found == header(name, size):
        return
    raise BundleError(f"found {_describe(found, name)}", member=name)


def index_text(records: Iterable[Record]) -> bytes:
    """The content of the index."""
    kernels = [record.document() for record in records]
    return canonical_json({"format": FORMAT, "version": VERSION, "kernels": kernels}).encode()


def parse_index(text: bytes) -> tuple[Record, ...]:
    """The records of an index, each of them and all together within the bounds.

    Raises:
        BundleError: an index that is not, byte for byte, as :func:`index_text` writes it.
    """
    try:
        document = parse_strict(text, max_bytes=MAX_INDEX_BYTES, max_brackets=MAX_KERNELS + 8)
    except ValueError as error:
        raise BundleError(f"an index that cannot be read: {error}", member=INDEX) from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise BundleError("an index that is not of a bundle", member=INDEX)
    if document.get("version") != VERSION:
        raise BundleError(f"a bundle of another version; this release reads {VERSION}", member=INDEX)
    kernels = document.get("kernels")
    if not isinstance(kernels, list) or not 0 < len(kernels) <= MAX_KERNELS:
        raise BundleError(f"an index of no kernel, or of more than {MAX_KERNELS}", member=INDEX)
    records = tuple(_record(item) for item in kernels)
    if any(after <= before for before, after in pairwise((record.arch, record.key) for record in records)):
        raise BundleError("an index that is not in order, or names a kernel twice", member=INDEX)
    if index_text(records) != text:
        raise BundleError("an index that is not as it was written", member=INDEX)
    return records


def _record(document: object) -> Record:
    names = set(Record.__slots__)
    if not isinstance(document, dict) or set(document) != names:
        raise BundleError("an index with a record that this release does not know", member=INDEX)
    good = is_arch(document["arch"]) and is_digest(document["key"])
    variant_id = document["variant_id"]
    good &= type(variant_id) is str and variant_id.isascii() and 0 < len(variant_id) <= _MAX_NAME
    good &= all(type(document[name]) is int and 0 < document[name] <= bound for name, bound in _BOUNDS.items())
    if not good:
        raise BundleError("an index with a record out of bounds", member=INDEX)
    return Record(**document)


def _describe(found: bytes, name: str) -> str:
    """What a header that is not the one expected is of, in words."""
    if found[:2] == b"\x1f\x8b":
        return "compressed data; unpack it with gunzip"
    import tarfile

    try:
        info = tarfile.TarInfo.frombuf(found, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return "no tar header"
    kinds = {
        tarfile.LNKTYPE: "a hard link",
        tarfile.SYMTYPE: "a symbolic link",
        tarfile.CHRTYPE: "a device",
        tarfile.BLKTYPE: "a device",
        tarfile.DIRTYPE: "a directory",
        tarfile.FIFOTYPE: "a FIFO",
        tarfile.GNUTYPE_SPARSE: "a sparse file",
        tarfile.XHDTYPE: "an extended header",
        tarfile.XGLTYPE: "an extended header",
        tarfile.GNUTYPE_LONGNAME: "an extended header",
        tarfile.GNUTYPE_LONGLINK: "an extended header",
    }
    if info.type in kinds:
        return kinds[info.type]
    if info.name != name:
        return "a member of another name"
    return "a member of another size, owner, time or mode than mlaprep writes"
