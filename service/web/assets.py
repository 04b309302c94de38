"""Assets: the dashboard's style sheet, script and icon, under URLs that name their content."""

import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

PREFIX: Final = "/assets/"
_FOLDER: Final = Path(__file__).parent
_NAME: Final = re.compile(r"(?P<stem>[a-z]+)\.[0-9a-f]{16}\.(?P<ending>[a-z]+)", re.ASCII)
_MEDIA_TYPES: Final = MappingProxyType(
    {
        "style.css": "text/css; charset=utf-8",
        "app.js": "text/javascript; charset=utf-8",
        "icon.svg": "image/svg+xml",
    }
)


@dataclass(frozen=True, slots=True)
class Asset:
    """One file as it is served."""

    name: str
    """With the digest of its content: ``style.0123456789abcdef.css``."""
    body: bytes
    media_type: str

    @property
    def url(self) -> str:
        return PREFIX + self.name


@functools.cache
def assets() -> dict[str, Asset]:
    """Every asset by the name of its file; read once a process."""
    found = {}
    for file, media_type in _MEDIA_TYPES.items():
        body = (_FOLDER / file).read_bytes()
        stem, _, ending = file.partition(".")
        found[file] = Asset(f"{stem}.{hashlib.sha256(body).hexdigest()[:16]}.{ending}", body, media_type)
    return found


def find_asset(name: str) -> tuple[Asset, bool] | None:
    """The asset of a name as a URL has it, and whether that names its content.

    While replicas are upgraded, a page of one release asks another for its files: it gets those of that one, which
    no cache may keep under this name.
    """
    match = _NAME.fullmatch(name)
    asset = match and assets().get(f"{match['stem']}.{match['ending']}")
    return (asset, asset.name == name) if asset else None
