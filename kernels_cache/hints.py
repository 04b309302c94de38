"""Hint: a small file that maps a digest to a line of text, in ``<kind>/<digest[:2]>/<digest>``.

A hint is never trusted and never worth an error: one that is damaged or lost costs a look elsewhere.
"""

import contextlib
from collections.abc import Iterator
from typing import Final

from mlaprep.kernels_cache.files import TEMPORARY, Folder, descend, new_name
from mlaprep.kernels_cache.key import is_digest

LINKS: Final = "links"
"""Request digest to key."""
BLOBS: Final = "blobs"
"""Digest of a cubin to ``<arch>/<key>`` of an entry that holds it."""
_MAX_BYTES: Final = 256


def read_hint(root: Folder, kind: str, digest: str) -> str | None:
    """The text noted for a digest; None where there is none that can be read."""
    with contextlib.suppress(OSError, UnicodeDecodeError), descend(root, kind, digest[:2]) as shelf:
        return shelf.read(digest, _MAX_BYTES).decode("ascii").removesuffix("\n")
    return None


def write_hint(root: Folder, kind: str, digest: str, text: str) -> bool:
    """Note a text for a digest; False where it stands there already. Raises OSError."""
    if read_hint(root, kind, digest) == text:
        return False
    with root.make(TEMPORARY) as temporary, root.make(kind) as hints, hints.make(digest[:2]) as shelf:
        name = new_name("hint-")
        try:
            temporary.write(name, f"{text}\n".encode(), sync=False)
            try:
                temporary.move(name, shelf, digest)
            except IsADirectoryError:
                shelf.remove(digest)
                temporary.move(name, shelf, digest)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.remove(name)
            raise
    return True


def has_hint(root: Folder, kind: str, digest: str) -> bool:
    """Whether something stands in a hint's place, whatever it is: cheaper than reading it."""
    try:
        root.status(f"{kind}/{digest[:2]}/{digest}")
    except OSError:
        return False
    return True


def drop_hint(root: Folder, kind: str, digest: str) -> None:
    """Forget a digest."""
    with contextlib.suppress(OSError), descend(root, kind, digest[:2]) as shelf:
        shelf.remove(digest)


def iterate_hints(root: Folder, kind: str, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every (digest, text) of a kind that can be read, of those digests that start with ``prefix``."""
    with contextlib.suppress(OSError), root.open(kind) as shelves:
        for name in shelves.names():
            if not name.startswith(prefix[:2]):
                continue
            digests: list[str] = []
            with contextlib.suppress(OSError), shelves.open(name) as shelf:
                digests = [digest for digest in shelf.names() if is_digest(digest) and digest.startswith(prefix)]
            for digest in digests:
                text = read_hint(root, kind, digest)
                if text is not None:
                    yield digest, text
