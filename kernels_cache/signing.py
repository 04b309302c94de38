"""Signing: Ed25519 signatures of manifests.

What is signed is :data:`CONTEXT` followed by the canonical JSON of every member of the manifest but the signature
itself: schema, variant id, spec, arch, key, digest and size of the cubin, digest of the source, entry point, launch
parameters, resource figures, compiler version, options and times. The digests carry the signature over to the bytes.

A signature is printed as ``ed25519:<key id>:<base64>``. Nothing here enters a cache key.
"""

import base64
import binascii
import functools
import hashlib
import importlib.util
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Self

from mlaprep.kernels_cache.artifact import KernelArtifact, Manifest
from mlaprep.kernels_cache.errors import SigningError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

ALGORITHM: Final = "ed25519"
CONTEXT: Final = b"mlaprep-manifest-signature-1\n"
"""Goes ahead of what is signed, so that no signature made for another purpose passes for one of a manifest."""

_KEY_BYTES: Final = 32
_SIGNATURE_BYTES: Final = 64
_SIGNATURE: Final = re.compile(rf"{ALGORITHM}:([0-9a-f]{{16}}):([A-Za-z0-9+/]{{86}}==)", re.ASCII)
# Points of small order, sign bit cleared: under such a "key" anybody can make signatures. Zeros, the likeliest
# placeholder, are one of them.
_WEAK: Final = frozenset(
    bytes.fromhex(text)
    for text in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    )
)


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A key that checks signatures: the 32 bytes of an Ed25519 point.

    Raises:
        SigningError: not that, or a point of small order.
    """

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != _KEY_BYTES:
            raise SigningError(f"a public key of other than {_KEY_BYTES} bytes")
        if self.raw[:-1] + bytes([self.raw[-1] & 0x7F]) in _WEAK:
            raise SigningError("a public key under which anybody can sign")

    @property
    def key_id(self) -> str:
        """The first 16 hexadecimal digits of the sha256 of its bytes."""
        return hashlib.sha256(self.raw).hexdigest()[:16]

    @property
    def text(self) -> str:
        """As it is printed and configured: ``ed25519:<base64>``."""
        return f"{ALGORITHM}:{base64.b64encode(self.raw).decode()}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """A key from its :attr:`text`. Raises SigningError."""
        kind, _, encoded = text.partition(":")
        if kind != ALGORITHM:
            raise SigningError(f"a text that does not start with {ALGORITHM}:")
        try:
            raw = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            raise SigningError("a public key that is not base64") from None
        key = cls(raw)
        if key.text != text:
            raise SigningError("a public key that is not base64 as it should be")
        return key

    def verifies(self, manifest: Manifest) -> bool:
        """Whether this key signed the manifest as it stands."""
        from cryptography.exceptions import InvalidSignature

        try:
            _loaded(self.raw).verify(split_signature(manifest)[1], signed_bytes(manifest))
        except (InvalidSignature, ValueError):
            return False
        return True


class SigningKey:
    """A private key. It is never printed, pickled or sent."""

    def __init__(self, private: "Ed25519PrivateKey") -> None:
        self._private = private
        self.public: Final = PublicKey(private.public_key().public_bytes_raw())

    def __repr__(self) -> str:
        return f"SigningKey({self.public.key_id})"

    def __reduce__(self) -> str:
        raise TypeError("a private key is not pickled; name its file where it is needed")

    def sign(self, manifest: Manifest) -> Manifest:
        """The manifest with this key's signature, in place of any other."""
        signature = base64.b64encode(self._private.sign(signed_bytes(manifest))).decode()
        return replace(manifest, signature=f"{ALGORITHM}:{self.public.key_id}:{signature}")

    def sign_artifact(self, artifact: KernelArtifact) -> KernelArtifact:
        """The artifact with a signed manifest."""
        return replace(artifact, manifest=self.sign(artifact.manifest))


def signed_bytes(manifest: Manifest) -> bytes:
    """What a signature of the manifest covers; the same whether it has one or not."""
    return CONTEXT + manifest.unsigned_json().encode()


def split_signature(manifest: Manifest) -> tuple[str, bytes]:
    """Key id and bytes of a manifest's signature. Raises ValueError where there is none of that form."""
    match = _SIGNATURE.fullmatch(manifest.signature or "")
    if match is None:
        raise ValueError("no signature of a form that this release knows")
    raw = base64.b64decode(match[2], validate=True)
    if len(raw) != _SIGNATURE_BYTES or base64.b64encode(raw).decode() != match[2]:
        raise ValueError("a signature that is not base64 as it should be")
    return match[1], raw


def require_cryptography() -> None:
    """Raises SigningError where the package that signs and checks is not installed; does not import it."""
    if importlib.util.find_spec("cryptography") is None:
        raise SigningError("keys, but no package that can use them: install mlaprep[signing]")


@functools.lru_cache(maxsize=64)
def _loaded(raw: bytes) -> "Ed25519PublicKey":
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return Ed25519PublicKey.from_public_bytes(raw)
