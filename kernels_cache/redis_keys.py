"""RedisKeys: what mlaprep's entries in a shared Redis are called, and how long they stay.

::

    mlaprep:1:record:<key>       manifest, sealed JSON
    mlaprep:1:blob:<sha256>      bytes of a cubin or of a source
    mlaprep:1:holders:<sha256>   keys whose records name this cubin
    mlaprep:1:link:<request>     key that answered a request last
    mlaprep:1:lease:<key>        token of whoever compiles it now
    mlaprep:1:index              keys, scored by the revision that added them
    mlaprep:1:sizes              key -> bytes of cubin and source
    mlaprep:1:bytes              their sum
    mlaprep:1:revision           grows with every record that comes or goes

Only digests of 64 hexadecimal digits are ever put behind a prefix.
"""

from typing import Final

from mlaprep.kernels_cache.key import SCHEMA, is_digest

TTL_S: Final = 30 * 86400
"""Seconds that a record, a blob or a link stays after it was last written or read."""

PREFIX: Final = f"mlaprep:{SCHEMA}:"
INDEX: Final = f"{PREFIX}index"
SIZES: Final = f"{PREFIX}sizes"
BYTES: Final = f"{PREFIX}bytes"
REVISION: Final = f"{PREFIX}revision"


def name(kind: str, digest: str) -> str:
    """The name of one entry. Raises ValueError for what is no digest: no caller's text becomes part of a name."""
    if not is_digest(digest):
        raise ValueError("a name in the shared Redis is made of a digest")
    return f"{PREFIX}{kind}:{digest}"
