"""KernelArtifact: a compiled kernel with its manifest and source, and the proof that the three belong together."""

import functools
import hashlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Final, Self, cast

from mlaprep.kernels_cache.elf import MAX_CUBIN_BYTES, check_cubin
from mlaprep.kernels_cache.errors import ArtifactError
from mlaprep.kernels_cache.json_text import JsonText
from mlaprep.kernels_cache.key import SCHEMA, cache_key, canonical_json, is_arch, is_digest, json_value, write_json
from mlaprep.kernels_cache.strict_json import MAX_INTEGER, parse_strict

MAX_MANIFEST_BYTES: Final = 64 * 2**10
MAX_SOURCE_BYTES: Final = 4 * 2**20
SEAL: Final = "manifest_sha256"
"""Name under which a manifest's JSON text carries the digest of all its other members."""

_MAX_BRACKETS: Final = 1024  # bounds the nesting before the recursive parser sees it
_MAX_PART_BYTES: Final = 16 * 2**10  # of spec, launch and options each, so that the whole stays readable
_MAX_PART_BRACKETS: Final = 256
_MAX_OPTIONS: Final = 64
_MAX_MILLISECONDS: Final = 1e12
_TEXTS: Final[Mapping[str, re.Pattern[str]]] = {
    "variant_id": re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,511}", re.ASCII),
    "entry": re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII),
    "nvrtc_version": re.compile(r"[0-9][A-Za-z0-9_.+-]{0,63}", re.ASCII),
    "created_at": re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|\+00:00)", re.ASCII),
}
_OPTION: Final = re.compile(r"[ -Z\\^-z|~]{1,256}", re.ASCII)  # printable, no bracket of any kind
_SIGNATURE: Final = re.compile(r"[!-~]{1,1024}", re.ASCII)
_COUNTS: Final = ("cubin_size", "registers", "spill_stores", "spill_loads", "stack_bytes", "shared_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is known of one compiled kernel. Every value is checked when it is made.

    Raises:
        ArtifactError: reason ``manifest``, naming the member at fault.
    """

    schema: int = SCHEMA
    """Version of the key encoding and of this manifest; others are refused."""
    variant_id: str
    spec: JsonText
    """The full kernel specification, as JSON values; a copy of the manifest's own that nobody can change."""
    arch: str
    key: str
    """The cache key, see :func:`mlaprep.kernels_cache.key.cache_key`."""
    cubin_sha256: str
    cubin_size: int
    """Bytes."""
    source_sha256: str
    """Digest of the source's UTF-8 text."""
    entry: str
    """Name of the kernel's entry point."""
    launch: JsonText
    """What a caller needs to launch it, as JSON values; read-only as well, with tuples for lists."""
    registers: int
    """Registers a thread."""
    spill_stores: int
    """Bytes."""
    spill_loads: int
    """Bytes."""
    stack_bytes: int
    shared_bytes: int
    """Static shared memory of a block."""
    nvrtc_version: str
    """Exact compiler version, e.g. ``12.9.86``."""
    options: tuple[str, ...]
    """Compiler options in the order they were passed."""
    compile_ms: float
    created_at: str
    """UTC, RFC 3339, e.g. ``2026-01-31T12:00:00Z``."""
    signature: str | None = None
    """Who vouches for all of the above; see :mod:`mlaprep.kernels_cache.signing`."""

    def __post_init__(self) -> None:
        if type(self.schema) is not int or self.schema != SCHEMA:
            raise ArtifactError("schema", f"a manifest of another schema; this release reads {SCHEMA}")
        for name, pattern in _TEXTS.items():
            text = getattr(self, name)
            _require(name, type(text) is str and pattern.fullmatch(text) is not None)
        _require("created_at", _is_time(self.created_at))
        _require("arch", is_arch(self.arch))
        for name in ("key", "cubin_sha256", "source_sha256"):
            _require(name, is_digest(getattr(self, name)))
        for name in _COUNTS:
            count = getattr(self, name)
            _require(name, type(count) is int and 0 <= count <= MAX_INTEGER)
        _require("cubin_size", 0 < self.cubin_size <= MAX_CUBIN_BYTES)
        _require("compile_ms", type(self.compile_ms) in (int, float))
        _require("compile_ms", 0 <= self.compile_ms <= _MAX_MILLISECONDS)
        _require("signature", self.signature is None or _matches(_SIGNATURE, self.signature))
        options: object = self.options
        _require("options", isinstance(options, tuple | list))
        _require("options", len(self.options) <= _MAX_OPTIONS)
        _require("options", all(_matches(_OPTION, option) for option in self.options))
        _require("options", sum(map(len, self.options)) <= _MAX_PART_BYTES // 4)
        object.__setattr__(self, "spec", _json_object("spec", self.spec))
        # What many manifests have alike is one object in the process.
        object.__setattr__(self, "launch", _json_object("launch", self.launch).shared())
        object.__setattr__(self, "options", _shared_options(tuple(self.options)))
        for name in ("arch", "entry", "nvrtc_version"):
            object.__setattr__(self, name, sys.intern(getattr(self, name)))
        object.__setattr__(self, "compile_ms", float(self.compile_ms))

    def __reduce__(self) -> tuple[Callable[[object], Self], tuple[dict[str, Any]]]:
        # Read-only mappings can neither be pickled nor copied.
        return type(self).from_dict, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        """Every member, JSON types only; :meth:`from_dict` reads it back."""
        document: dict[str, Any] = json_value(self._members())
        return document

    def to_json(self) -> str:
        """Canonical JSON text, one line, with a digest of itself so that a flipped bit shows."""
        parts = self._parts()
        return f'{parts[0]}"{SEAL}":"{_sealed(parts)}",{parts[1]}'

    def unsigned_json(self) -> str:
        """Canonical JSON of every member but the signature: what a signature covers."""
        members = self._members()
        del members["signature"]
        return write_json(members)

    def adds_signature_to(self, held: "Manifest") -> bool:
        """Whether this one is signed, and otherwise than a manifest that a store holds for the same cubin."""
        return self.signature is not None and self.signature != held.signature

    @classmethod
    def from_dict(cls, document: object) -> Self:
        """A manifest from parsed JSON; a digest of itself is compared where there is one.

        Raises:
            ArtifactError: reason ``manifest`` (no object, an unknown or missing member, a bad value),
                ``schema``, or ``manifest-digest``.
        """
        if not isinstance(document, Mapping):
            raise ArtifactError("manifest", "a manifest that is not a JSON object")
        members = dict(document)
        seal = members.pop(SEAL, None)
        if not _MEMBERS.issuperset(members):
            raise ArtifactError("manifest", "a manifest with a member that this release does not know")
        missing = sorted(_MEMBERS.difference(members, ("schema", "signature")))
        if missing or "schema" not in members:
            raise ArtifactError("manifest", f"a manifest without {', '.join(missing or ['schema'])}")
        manifest = cls(**members)
        if seal is not None and seal != _sealed(manifest._parts()):
            raise ArtifactError("manifest-digest", "a manifest that differs from its own digest")
        return manifest

    @classmethod
    def from_json(cls, text: bytes | str, *, sealed: bool = False) -> Self:
        """A manifest from JSON text: at most 64 KiB, strict, never NaN, no name given twice.

        ``sealed`` refuses a text that is not, byte for byte, what :meth:`to_json` wrote.

        Raises:
            ArtifactError: as for :meth:`from_dict`, for every input whatever it holds.
        """
        document = _parse(text)
        if isinstance(document, dict):
            document |= {name: _parsed(name, document[name]) for name in _OBJECTS & document.keys()}
        if not sealed:
            return cls.from_dict(document)
        if not (isinstance(document, dict) and type(document.pop(SEAL, None)) is str):
            raise ArtifactError("manifest-digest", "a manifest without a digest of itself")
        manifest = cls.from_dict(document)
        if manifest.to_json() != (text if isinstance(text, str) else text.decode()):
            raise ArtifactError("manifest-digest", "a manifest that is not as it was written")
        return manifest

    def _members(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _NAMES}

    def _parts(self) -> tuple[str, str]:
        """Canonical JSON of every member, in two: between them stands the digest, where its name belongs."""
        first, middle, last = (write_json({name: getattr(self, name) for name in names})[1:-1] for names in _BETWEEN)
        return f'{{{first},"launch":{self.launch.text},', f'{middle},"spec":{self.spec.text},{last}}}'


_NAMES: Final = tuple(sorted(item.name for item in fields(Manifest) if item.init))
_BETWEEN: Final = (
    [name for name in _NAMES if name < "launch"],
    [name for name in _NAMES if "launch" < name < "spec"],
    [name for name in _NAMES if name > "spec"],
)
_MEMBERS: Final = frozenset(_NAMES)
_OBJECTS: Final = frozenset({"launch", "spec"})


@dataclass(frozen=True, slots=True)
class KernelArtifact:
    """A cubin with its manifest and the source it was compiled from."""

    manifest: Manifest
    cubin: bytes = field(repr=False)
    source: str = field(repr=False)
    _proved: bool = field(default=False, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[type[Self], tuple[Manifest, bytes, str]]:
        # A copy, in another process perhaps, proves itself anew.
        return type(self), (self.manifest, self.cubin, self.source)

    @property
    def key(self) -> str:
        return self.manifest.key

    @property
    def digest(self) -> str:
        """sha256 of the cubin, as the manifest has it."""
        return self.manifest.cubin_sha256

    @property
    def size(self) -> int:
        """Bytes of cubin and source, what a store budgets for."""
        return len(self.cubin) + len(self.source.encode())

    def verify(self, *, key: str | None = None, arch: str | None = None, spec: Mapping[str, Any] | None = None) -> None:
        """Prove that this is what was asked and that cubin, source, manifest and key belong together.

        Nothing of an artifact can change, so what was proved once of its parts is not computed again.

        Raises:
            ArtifactError: with the first difference as ``reason``: ``wrong-key``, ``wrong-arch``,
                ``wrong-spec``, ``cubin-size``, ``cubin-digest``, ``source-size``, ``source-digest``,
                ``key-mismatch``, or one of :func:`mlaprep.kernels_cache.elf.check_cubin`.
        """
        manifest = self.manifest
        if key is not None and manifest.key != key:
            raise ArtifactError("wrong-key", f"asked for key {key!r:.66}, found {manifest.key}")
        if arch is not None and manifest.arch != arch:
            raise ArtifactError("wrong-arch", f"asked for {arch!r:.18}, found {manifest.arch}")
        if spec is not None and canonical_json(spec) != manifest.spec.text:
            raise ArtifactError("wrong-spec", f"asked for another spec than that of {manifest.variant_id}")
        if not self._proved:
            self._prove()
            object.__setattr__(self, "_proved", type(self.cubin) is bytes)

    def _prove(self) -> None:
        manifest = self.manifest
        if len(self.cubin) != manifest.cubin_size:
            found = f"{len(self.cubin)} bytes of cubin; the manifest has {manifest.cubin_size}"
            raise ArtifactError("cubin-size", found)
        if _sha256(self.cubin) != manifest.cubin_sha256:
            raise ArtifactError("cubin-digest", "a cubin that differs from the manifest's sha256")
        source = _utf8(self.source)
        if len(source) > MAX_SOURCE_BYTES:
            raise ArtifactError("source-size", f"a source of {len(source)} bytes; the limit is {MAX_SOURCE_BYTES}")
        if _sha256(source) != manifest.source_sha256:
            raise ArtifactError("source-digest", "a source that differs from the manifest's sha256")
        if manifest.key != self._recomputed_key():
            raise ArtifactError("key-mismatch", "a key that does not follow from source, options, arch and compiler")
        check_cubin(self.cubin, manifest.arch)

    def _recomputed_key(self) -> str:
        manifest = self.manifest
        try:
            return cache_key(
                source=self.source,
                options=manifest.options,
                arch=manifest.arch,
                nvrtc_version=manifest.nvrtc_version,
            )
        except ValueError as error:
            raise ArtifactError("key-mismatch", f"no key can be made: {error}") from None


def _sealed(parts: tuple[str, str]) -> str:
    return _sha256("".join(parts).encode())


def utc_now() -> str:
    """The time now as a manifest writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@functools.lru_cache(maxsize=64)
def _shared_options(options: tuple[str, ...]) -> tuple[str, ...]:
    return options


def _require(name: str, good: bool) -> None:
    if not good:
        raise ArtifactError("manifest", f"a manifest whose {name} is not allowed")


def _matches(pattern: re.Pattern[str], text: object) -> bool:
    return type(text) is str and pattern.fullmatch(text) is not None


def _is_time(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


def _json_object(name: str, value: object) -> JsonText:
    """A private, read-only copy that the manifest's own JSON text can carry."""
    _require(name, isinstance(value, Mapping))
    try:
        copy = JsonText(cast(Mapping[str, Any], value))
    except (TypeError, ValueError, RecursionError):
        raise ArtifactError("manifest", f"a manifest whose {name} holds what JSON cannot, or too much") from None
    text = copy.text
    _require(name, len(text) <= _MAX_PART_BYTES and text.count("{") + text.count("[") <= _MAX_PART_BRACKETS)
    return copy


def _parsed(name: str, value: object) -> object:
    """The same as :func:`_json_object` makes of it, at half the cost."""
    if type(value) is not dict:
        return value
    try:
        return JsonText.parsed(value)
    except (ValueError, RecursionError):  # what could be parsed may be too deep to write
        raise ArtifactError("manifest", f"a manifest whose {name} holds what JSON cannot") from None


def _parse(text: bytes | str) -> object:
    try:
        return parse_strict(text, max_bytes=MAX_MANIFEST_BYTES, max_brackets=_MAX_BRACKETS)
    except ValueError:
        raise ArtifactError("manifest", "a manifest that is not the JSON it should be") from None


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _utf8(source: str) -> bytes:
    try:
        return source.encode()
    except UnicodeEncodeError:
        raise ArtifactError("source-digest", "a source with a lone surrogate") from None
