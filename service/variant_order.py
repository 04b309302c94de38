"""VariantOrder: variants in one order, and who of them has which property, as bits at their places.

A set of 100,000 variants is an integer of 12 KB: what a listing filters by is a few of them and-ed, what a page leaves
before it is a shift, and how many are left is a count of bits. None of it looks at a variant.
"""

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from mlaprep.templates.spec import KernelSpec

Order = tuple[int, int, int, str]
Place = tuple[float, Order]
"""Where a variant stands: the figure that a listing is sorted by, negated; then its shape and name."""

Facet = tuple[str, object]

_WINDOW_BITS: Final = 1024
_WINDOW: Final = (1 << _WINDOW_BITS) - 1


class VariantOrder:
    """Not changed once it is made, so it may be read by several threads.

    Args:
        variants: place, spec and facets of each, in any order.
    """

    def __init__(self, variants: Iterable[tuple[Place, KernelSpec, Sequence[Facet]]]) -> None:
        found = sorted(variants, key=lambda variant: variant[0])
        self.places: Final[Sequence[Place]] = [place for place, _, _ in found]
        self.specs: Final[Sequence[KernelSpec]] = [spec for _, spec, _ in found]
        self._all = (1 << len(found)) - 1
        marks: dict[Facet, bytearray] = {}
        size = len(found) // 8 + 1
        for rank, (_, _, facets) in enumerate(found):
            byte, bit = rank >> 3, 1 << (rank & 7)
            for facet in facets:
                if (mark := marks.get(facet)) is None:
                    mark = marks[facet] = bytearray(size)
                mark[byte] |= bit
        self._facets: Mapping[Facet, int] = {facet: int.from_bytes(mark, "little") for facet, mark in marks.items()}

    def having(self, facets: Iterable[Facet]) -> int:
        """The variants that have all of these, as bits."""
        bits = self._all
        for facet in facets:
            bits &= self._facets.get(facet, 0)
        return bits

    def without(self, bits: int, places: Iterable[Place]) -> int:
        """The same bits but for the variants at these places, as far as there are any."""
        mark = bytearray(len(self.places) // 8 + 1)
        for place in places:
            rank = bisect.bisect_left(self.places, place)
            if rank < len(self.places) and self.places[rank] == place:
                mark[rank >> 3] |= 1 << (rank & 7)
        return bits & ~int.from_bytes(mark, "little")

    def behind(self, bits: int, place: Place) -> int:
        """Those of the bits that stand behind a place, whether somebody stands there or not."""
        rank = bisect.bisect_right(self.places, place)
        return bits >> rank << rank

    def walk(self, bits: int) -> Iterator[tuple[Place, KernelSpec]]:
        """The variants of these bits, in order."""
        base = 0
        while bits:
            # A step over all bits for each window, and not for each variant.
            skipped = (bits & -bits).bit_length() - 1
            base, bits = base + skipped, bits >> skipped
            window = bits & _WINDOW
            while window:
                lowest = window & -window
                rank = base + lowest.bit_length() - 1
                yield self.places[rank], self.specs[rank]
                window ^= lowest
            base, bits = base + _WINDOW_BITS, bits >> _WINDOW_BITS
