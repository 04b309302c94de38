"""SharedMisses: the misses of all replicas, summed in the Redis that they share.

::

    mlaprep:1:misses          "<arch> <variant id> <reason>" -> count
    mlaprep:1:misses-first    "<arch> <variant id>", scored by when it was first seen
    mlaprep:1:misses-last     the same, by when it was last seen
"""

import contextlib
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Final

from mlaprep.kernels_cache.errors import StoreError
from mlaprep.kernels_cache.redis_keys import PREFIX
from mlaprep.kernels_cache.redis_link import RedisLink
from mlaprep.service.job_store import LATEST
from mlaprep.service.misses import MAX_MISSES, MISS_REASONS, MOST, Miss, Name

COUNTS: Final = f"{PREFIX}misses"
FIRST: Final = f"{PREFIX}misses-first"
LAST: Final = f"{PREFIX}misses-last"

_BATCH: Final = 500
_FRESH_S: Final = 1.0
_TRIM: Final = """
-- KEYS: counts, first, last. ARGV: how many stay, then the reasons. Those that were lacking longest ago go.
local over = redis.call('ZCARD', KEYS[3]) - tonumber(ARGV[1])
if over <= 0 then return 0 end
local gone = redis.call('ZPOPMIN', KEYS[3], over)
for i = 1, #gone, 2 do
  redis.call('ZREM', KEYS[2], gone[i])
  for reason = 2, #ARGV do redis.call('HDEL', KEYS[1], gone[i] .. ' ' .. ARGV[reason]) end
end
return over
"""


class SharedMisses:
    """The sum over replicas, behind one link. Safe to use from several threads."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._read: OrderedDict[Name, Miss] = OrderedDict()
        self._read_at = float("-inf")

    def tell(self, new: Mapping[Name, Miss]) -> frozenset[Name]:
        """Add these to the sum; the names of those that are in it. A server in trouble takes none or some.

        Where it took some and could not say so, they are told again and count twice: this is a list of what to build.
        """
        told: set[Name] = set()
        names = iter(new.items())
        with contextlib.suppress(StoreError):
            while batch := dict(itertools.islice(names, _BATCH)):
                self._link.run(_add, batch)
                told |= batch.keys()
        self._read_at = float("-inf")
        return frozenset(told)

    def known(self) -> OrderedDict[Name, Miss] | None:
        """The sum, the one seen longest ago first, a second old at most; None where the server does not answer."""
        with self._lock:
            if time.monotonic() - self._read_at > _FRESH_S:
                try:
                    self._read = OrderedDict(itertools.chain.from_iterable(self._batches()))
                except StoreError:
                    return None
                self._read_at = time.monotonic()
            return self._read

    def _batches(self) -> Iterator[list[tuple[Name, Miss]]]:
        """The whole sum, a call a batch: all at once takes longer than a call may, and would open the breaker."""
        number = self._link.run(lambda client: client.zcard(LAST))
        return (self._link.run(_fetch, start) for start in range(0, min(number, MAX_MISSES), _BATCH))


def _add(client: Any, new: Mapping[Name, Miss]) -> None:
    pipeline = client.pipeline(transaction=True)
    for (variant_id, arch), miss in new.items():
        member = f"{arch} {variant_id}"
        for reason, count in miss.reasons.items():
            pipeline.hincrby(COUNTS, f"{member} {reason}", count)
        pipeline.zadd(FIRST, {member: miss.first_seen}, lt=True)
        pipeline.zadd(LAST, {member: miss.last_seen}, gt=True)
    pipeline.eval(_TRIM, 3, COUNTS, FIRST, LAST, MAX_MISSES, *MISS_REASONS)
    pipeline.execute()


def _fetch(client: Any, start: int) -> list[tuple[Name, Miss]]:
    """Those of one batch in order of when they were last seen. What makes no sense is passed over."""
    scored = [
        (member, _seconds(score)) for member, score in client.zrange(LAST, start, start + _BATCH - 1, withscores=True)
    ]
    if not scored:
        return []
    members = [member for member, _ in scored]
    pipeline = client.pipeline(transaction=False).zmscore(FIRST, members)
    pipeline.hmget(COUNTS, [b"%b %b" % (member, reason.encode()) for member in members for reason in MISS_REASONS])
    began, counts = pipeline.execute()
    found = []
    for (member, last), first, row in zip(scored, began, _rows(counts), strict=True):
        reasons = {reason: number for reason, text in zip(MISS_REASONS, row, strict=True) if (number := _count(text))}
        if reasons:
            total = min(MOST, sum(reasons.values()))
            seen = last if first is None else min(_seconds(first), last)
            found.append((_name(member), Miss(total, reasons, seen, last)))
    return found


def _rows(counts: list[bytes | None]) -> Iterator[list[bytes | None]]:
    """Of each member, the counts by reason."""
    return (counts[at : at + len(MISS_REASONS)] for at in range(0, len(counts), len(MISS_REASONS)))


def _count(text: bytes | None) -> int:
    """0 for what is none."""
    number = int(text) if text is not None and text.isdigit() and len(text) <= len(str(MOST)) else 0
    return number if number <= MOST else 0


def _name(member: bytes) -> Name:
    arch, _, variant_id = member.decode("ascii", "replace").partition(" ")
    return variant_id, arch


def _seconds(score: float) -> int:
    return int(score) if 0 < score <= LATEST else 1
