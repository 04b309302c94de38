"""Key files: private signing keys (PKCS#8 PEM, mode 0600) and lists of public ones (a line each)."""

import os
import stat
from pathlib import Path
from typing import Final

from mlaprep.kernels_cache.errors import SigningError
from mlaprep.kernels_cache.signing import PublicKey, SigningKey, require_cryptography

_MAX_BYTES: Final = 64 * 2**10
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


def generate_key(path: Path) -> SigningKey:
    """A new private key, written to a new file that only this user can read.

    Raises:
        SigningError: the package cryptography is missing.
        FileExistsError: a key is never overwritten.
        OSError: it cannot be written.
    """
    require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    private = Ed25519PrivateKey.generate()
    text = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    return SigningKey(private)


def read_signing_key(path: str | os.PathLike[str]) -> SigningKey:
    """The private key in a file, such as :func:`generate_key` or ``openssl genpkey -algorithm ed25519`` writes.

    Raises:
        SigningError: no Ed25519 key without a passphrase, a file that others may read or write, none at all, or the
            package cryptography is missing.
    """
    require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    text = _read(path, "private key", _OTHERS, "readable or writable by others; chmod 600 it")
    try:
        private = load_pem_private_key(text, password=None)
    except Exception:  # ValueError, TypeError and UnsupportedAlgorithm, of which the package keeps adding kinds
        raise SigningError("a file that is no private key in PEM without a passphrase") from None
    if not isinstance(private, Ed25519PrivateKey):
        raise SigningError("a private key of another kind than Ed25519")
    return SigningKey(private)


def read_public_keys(path: str | os.PathLike[str]) -> list[PublicKey]:
    """The public keys in a file: one a line as :attr:`PublicKey.text`, ``#`` starts a comment.

    Raises:
        SigningError: a line that is no key, no line, a file that others may write, or none at all.
    """
    try:
        text = _read(path, "list of keys", _OTHERS_MAY_WRITE, "writable by others; chmod go-w it").decode()
    except UnicodeDecodeError:
        raise SigningError("a list of keys that is not text") from None
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if words:
            try:
                keys.append(PublicKey.parse(words))
            except SigningError as error:
                raise SigningError(f"in line {number} of a list of keys, {error}") from None
    if not keys:
        raise SigningError("a list of keys without a key")
    return keys


def _read(path: str | os.PathLike[str], what: str, forbidden: int, told: str) -> bytes:
    # O_NONBLOCK: a FIFO must not hang the start. Links are followed: orchestrators mount secrets behind them.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "no path"
        raise SigningError(f"a {what} that cannot be opened ({reason})") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            raise SigningError(f"a {what} that is no regular file of at most {_MAX_BYTES} bytes")
        if status.st_uid not in (0, os.geteuid()):
            raise SigningError(f"a {what} that belongs to another user")
        if status.st_mode & forbidden:
            raise SigningError(f"a {what} of mode {stat.S_IMODE(status.st_mode):04o}, {told}")
        return os.read(descriptor, _MAX_BYTES)
    finally:
        os.close(descriptor)
