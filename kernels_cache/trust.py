"""TrustedKeys: the public keys that a worker pins, and the proof that one of them signed a manifest."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Self

from mlaprep.kernels_cache.artifact import Manifest
from mlaprep.kernels_cache.errors import ArtifactError, SigningError
from mlaprep.kernels_cache.key_files import read_public_keys
from mlaprep.kernels_cache.signing import ALGORITHM, PublicKey, require_cryptography, split_signature

VARIABLE: Final = "MLAPREP_TRUSTED_KEYS"
UNTRUSTED: Final = frozenset({"unsigned", "unknown-key", "bad-signature"})
"""Reasons of a manifest that no pinned key vouches for."""

MAX_KEYS: Final = 64


@dataclass(frozen=True, slots=True)
class TrustedKeys:
    """Pinned keys, one at least. Holds nothing but their bytes, so it can be pickled and forked.

    Raises:
        SigningError: none, more than :data:`MAX_KEYS`, or the package cryptography is missing.
    """

    keys: tuple[PublicKey, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", tuple(dict.fromkeys(self.keys)))
        if not 0 < len(self.keys) <= MAX_KEYS:
            raise SigningError("no key" if not self.keys else f"more than {MAX_KEYS} keys")
        require_cryptography()

    @classmethod
    def parse(cls, entries: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> Self:
        """Keys from entries, each a key (``ed25519:…``) or a file of keys; a string holds several, between
        commas or blanks, and a path is one file.

        Raises:
            SigningError: no entry, or one that is neither; no entry is repeated in the message.
        """
        given: list[str | os.PathLike[str]]
        if isinstance(entries, str):
            given = [*entries.replace(",", " ").split()]
        else:
            given = [entries] if isinstance(entries, os.PathLike) else list(entries)
        keys: list[PublicKey] = []
        for number, entry in enumerate(given, 1):
            try:
                text = os.fspath(entry)
                if not text:
                    raise SigningError("nothing")
                keys += [PublicKey.parse(text)] if text.startswith(f"{ALGORITHM}:") else read_public_keys(text)
            except TypeError:
                raise SigningError(f"as entry {number}, neither a key nor a file") from None
            except SigningError as error:
                raise SigningError(f"as entry {number}, {error}") from None
        return cls(tuple(keys))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self | None:
        """Those of ``MLAPREP_TRUSTED_KEYS``; None where it is not set. Set and empty is an error, not "no keys".

        Raises:
            SigningError: as for :meth:`parse`.
        """
        text = environ.get(VARIABLE)
        return None if text is None else cls.parse(text)

    def require(self, manifest: Manifest) -> None:
        """Prove that a pinned key signed the manifest as it stands.

        Raises:
            ArtifactError: reason ``unsigned``, ``unknown-key`` or ``bad-signature``.
        """
        if manifest.signature is None:
            raise ArtifactError("unsigned", f"{manifest.variant_id} has no signature, and keys are pinned")
        try:
            key_id, _ = split_signature(manifest)
        except ValueError as error:
            raise ArtifactError("bad-signature", f"{manifest.variant_id} has {error}") from None
        signers = [key for key in self.keys if key.key_id == key_id]
        if not signers:
            raise ArtifactError("unknown-key", f"{manifest.variant_id} is signed by key {key_id}, which is not pinned")
        if not any(key.verifies(manifest) for key in signers):
            told = f"{manifest.variant_id} has a signature that key {key_id} did not make for this manifest"
            raise ArtifactError("bad-signature", told)
