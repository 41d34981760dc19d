"""Owns what the checker knows of memory: which contribution lies in each interval, who wrote it, who has read it since.

Vector clocks order accesses. An access is (clock entry, its count); it happened before another one if the other one's
clock has reached that count. Intervals make arrays of any length cheap.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Clock = npt.NDArray[np.int64]


class Value(NamedTuple):
    """What an element is.

    Attributes:
        ranks: bit mask of the ranks whose contribution it holds, each once.
        shift: index of the element in its array, less its offset in the buffer.
        call: number of the call.
        array: which array of many.
        scaled: whether mean's scale has been applied to all it holds.
        final: whether the reduction is complete (mean has divided).
    """

    ranks: int
    shift: int
    call: int
    array: int
    scaled: bool
    final: bool


@dataclass
class _Interval:
    lo: int
    hi: int
    value: Value | None
    writer: int
    written: int
    where: str
    reads: dict[int, tuple[int, str]] = field(default_factory=dict)


class RaceError(Exception):
    """Two accesses that nothing orders; the text says which."""


class Region:
    """One buffer of one rank."""

    def __init__(self, length: int, name: str) -> None:
        self.name = name
        self._starts = [0]
        self._parts = [_Interval(0, length, None, -1, 0, "nobody")]

    def _cut(self, at: int) -> int:
        """Index of the interval that begins at `at`, made if need be; the number of intervals at the end."""
        index = bisect_right(self._starts, at) - 1
        part = self._parts[index]
        if part.lo == at:
            return index
        if at >= part.hi:
            return index + 1
        rest = _Interval(at, part.hi, part.value, part.writer, part.written, part.where, dict(part.reads))
        part.hi = at
        self._starts.insert(index + 1, at)
        self._parts.insert(index + 1, rest)
        return index + 1

    def read(self, lo: int, hi: int, who: int, clock: Clock, where: str) -> list[tuple[int, int, Value | None]]:
        """Values of [lo, hi) as (lo, hi, value) in order.

        Raises:
            RaceError: a write to it is not ordered before.
        """
        if lo == hi:
            return []
        first, last = self._cut(lo), self._cut(hi)
        now = int(clock[who])
        values = []
        for part in self._parts[first:last]:
            if part.writer >= 0 and clock[part.writer] < part.written:
                raise RaceError(f"reads {self.name}[{part.lo}:{part.hi}] while {part.where} may be writing it")
            part.reads[who] = (now, where)
            values.append((part.lo, part.hi, part.value))
        return values

    def write(self, values: Iterable[tuple[int, int, Value | None]], who: int, clock: Clock, where: str) -> None:
        """Replaces adjacent intervals.

        Raises:
            RaceError: an earlier read or write is not ordered before.
        """
        fresh = [_Interval(lo, hi, value, who, int(clock[who]), where) for lo, hi, value in values if hi > lo]
        if not fresh:
            return
        first, last = self._cut(fresh[0].lo), self._cut(fresh[-1].hi)
        for part in self._parts[first:last]:
            span = f"{self.name}[{part.lo}:{part.hi}]"
            if part.writer >= 0 and clock[part.writer] < part.written:
                raise RaceError(f"writes {span} while {part.where} may be writing it")
            for reader, (count, reads_where) in part.reads.items():
                if clock[reader] < count and reader != who:
                    raise RaceError(f"writes {span} while {reads_where} may be reading it")
        self._parts[first:last] = fresh
        self._starts[first:last] = [part.lo for part in fresh]

    def values(self) -> list[tuple[int, int, Value | None]]:
        """All of it, without an access."""
        return [(part.lo, part.hi, part.value) for part in self._parts if part.hi > part.lo]
