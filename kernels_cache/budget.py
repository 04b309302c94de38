"""Budget: how many bytes of entries a disk store may keep, measured no more often than need be."""

from mlaprep.kernels_cache import housekeeping
from mlaprep.kernels_cache.files import Folder


class Budget:
    """The limit of one store object. Others write to the same directory, so what is known goes stale."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._known: int | None = None
        self._added = 0

    def spend(self, root: Folder, size: int) -> int:
        """Note an entry of that size; how many others were removed for it. Raises OSError."""
        self._added += size
        known = self._known
        if known is None or known + self._added > self.max_bytes or self._added > self.max_bytes // 16:
            return self.enforce(root, self.max_bytes)
        return 0

    def enforce(self, root: Folder, limit: int) -> int:
        """Measure everything, and remove what is beyond the limit; how many entries that were. Raises OSError."""
        evicted, self._known = housekeeping.evict(root, limit)
        self._added = 0
        return evicted
