"""Where blocks go inside a slab: pure arithmetic, the same on every rank."""

from bisect import bisect_left, insort


class Shelf:
    """Blocks laid out upwards from 0, first fit.

    Only taken ranges are kept, so freed neighbours are one hole.
    """

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []  # (start, end), sorted

    @property
    def top(self) -> int:
        """End of the last block."""
        return self._taken[-1][1] if self._taken else 0

    def fit(self, nbytes: int, align: int, limit: int) -> int | None:
        """Return the lowest aligned start of a hole of ``nbytes`` below ``limit``, or None."""
        start = 0
        for taken_start, taken_end in self._taken:
            if start + nbytes <= min(taken_start, limit):
                return start
            start = -(-taken_end // align) * align
        return start if start + nbytes <= limit else None

    def take(self, start: int, nbytes: int) -> None:
        """Mark ``[start, start + nbytes)`` as taken."""
        insort(self._taken, (start, start + nbytes))

    def release(self, start: int) -> None:
        """Free the block that begins at ``start``."""
        del self._taken[bisect_left(self._taken, (start, 0))]

    def holes(self, limit: int) -> list[int]:
        """Return the size of every hole below ``limit``."""
        edges = [0, *(edge for block in self._taken for edge in block), limit]
        sizes = [end - start for start, end in zip(edges[::2], edges[1::2], strict=True)]
        return [size for size in sizes if size > 0]


class Arena:
    """``nbytes`` with a shelf at each end: low for the world's blocks, high for other groups'.

    The low shelf is the same on all ranks. The high one is each rank's own; ``ceiling``, the
    furthest that any rank's reaches down, is agreed at every allocation of the world.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.low = Shelf()
        self.high = Shelf()

    def place_low(self, nbytes: int, align: int, highest: int) -> int | None:
        """Return an offset for a block of the world, or None.

        ``highest`` is the largest ``high.top`` of all ranks.
        """
        return self.low.fit(nbytes, align, self.nbytes - highest)

    def place_high(self, nbytes: int, align: int) -> int | None:
        """Return an offset for a block of a smaller group."""
        start = self.high.fit(nbytes, align, self.nbytes - self.low.top)
        return None if start is None else self.nbytes - start - nbytes

    def take(self, offset: int, nbytes: int, low: bool) -> None:
        """Mark a block that ``place_low`` or ``place_high`` found as taken."""
        if low:
            self.low.take(offset, nbytes)
        else:
            self.high.take(self.nbytes - offset - nbytes, nbytes)

    def release(self, offset: int, nbytes: int, low: bool) -> None:
        """Free a block."""
        if low:
            self.low.release(offset)
        else:
            self.high.release(self.nbytes - offset - nbytes)

    def holes(self) -> list[int]:
        """Return the sizes of all holes; the one between the two shelves counts once."""
        low, high = self.low, self.high
        middle = self.nbytes - low.top - high.top
        sizes = [*low.holes(low.top), *high.holes(high.top), middle]
        return [size for size in sizes if size > 0]
