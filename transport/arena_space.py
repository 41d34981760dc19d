"""Owns which bytes of an arena are free: first fit over an ordered list of holes, merged again as blocks come back."""

from __future__ import annotations

import bisect


class FreeSpace:
    """Offsets of a range of `size` bytes, handed out and taken back. Pure bookkeeping; not safe for threads.

    The holes are disjoint, ordered, never empty and never adjacent, so equal histories give equal offsets.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._starts: list[int] = [0] if size > 0 else []
        self._sizes: list[int] = [size] if size > 0 else []

    @property
    def free_nbytes(self) -> int:
        """Bytes that are not handed out."""
        return sum(self._sizes)

    @property
    def holes(self) -> list[tuple[int, int]]:
        """(offset, size in bytes) of every hole, ascending."""
        return list(zip(self._starts, self._sizes, strict=True))

    def take(self, nbytes: int, alignment: int = 1) -> int | None:
        """The lowest offset, a multiple of `alignment`, at which `nbytes` are free; None where there is none."""
        for index, (start, size) in enumerate(zip(self._starts, self._sizes, strict=True)):
            offset = -(-start // alignment) * alignment
            if offset + nbytes <= start + size:
                pieces = [(start, offset - start), (offset + nbytes, start + size - offset - nbytes)]
                kept = [piece for piece in pieces if piece[1] > 0]
                self._starts[index : index + 1] = [piece[0] for piece in kept]
                self._sizes[index : index + 1] = [piece[1] for piece in kept]
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Takes back what `take` handed out, merging it with the holes on both sides.

        Raises:
            ValueError: some of these bytes are free already.
        """
        index = bisect.bisect_left(self._starts, offset)
        before_end = self._starts[index - 1] + self._sizes[index - 1] if index else 0
        after_start = self._starts[index] if index < len(self._starts) else self.size
        if offset < before_end or offset + nbytes > after_start or nbytes <= 0:
            raise ValueError(f"bytes {offset} to {offset + nbytes} of the arena were not in use")
        start, end, first, last = offset, offset + nbytes, index, index
        if index and before_end == offset:
            start, first = self._starts[index - 1], index - 1
        if index < len(self._starts) and after_start == end:
            end, last = after_start + self._sizes[index], index + 1
        self._starts[first:last] = [start]
        self._sizes[first:last] = [end - start]
