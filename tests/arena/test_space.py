"""Owns the tests of an arena's bookkeeping: nothing is handed out twice, and everything comes back in one piece."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from gfkernels.transport.arena_space import FreeSpace

SIZE = 4096


class Allocator(RuleBasedStateMachine):
    """Random histories, against a map of every byte."""

    blocks: Bundle[tuple[int, int]] = Bundle("blocks")

    def __init__(self) -> None:
        super().__init__()
        self.space = FreeSpace(SIZE)
        self.used = bytearray(SIZE)
        self.live: list[tuple[int, int]] = []

    @rule(target=blocks, nbytes=st.integers(1, 900), power=st.integers(0, 9))
    def take(self, nbytes: int, power: int) -> tuple[int, int]:
        offset = self.space.take(nbytes, 1 << power)
        starts = range(0, SIZE - nbytes + 1, 1 << power)
        possible = next((start for start in starts if not any(self.used[start : start + nbytes])), None)
        assert offset == possible, "not the lowest free offset"
        if offset is None:
            return 0, 0
        self.used[offset : offset + nbytes] = b"\1" * nbytes
        self.live.append((offset, nbytes))
        return offset, nbytes

    @rule(block=consumes(blocks))
    def give(self, block: tuple[int, int]) -> None:
        if block[1]:
            self.space.give(*block)
            self.used[block[0] : sum(block)] = b"\0" * block[1]
            self.live.remove(block)

    @invariant()
    def holes_are_the_free_bytes(self) -> None:
        free = bytearray(b"\1" * SIZE)
        end_before = -1
        for start, nbytes in self.space.holes:
            assert nbytes > 0 and start > end_before, "holes touch, overlap or are empty"
            free[start : start + nbytes] = b"\0" * nbytes
            end_before = start + nbytes
        assert free == self.used
        assert self.space.free_nbytes == self.used.count(0)

    def teardown(self) -> None:
        for block in self.live:
            self.space.give(*block)
        assert self.space.holes == [(0, SIZE)]


TestAllocator = Allocator.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_giving_back_what_is_free_is_an_error() -> None:
    space = FreeSpace(100)
    assert space.take(10) == 0
    space.give(0, 10)
    for offset, nbytes in ((0, 10), (95, 10), (5, 1)):
        with pytest.raises(ValueError, match="were not in use"):
            space.give(offset, nbytes)
    assert space.holes == [(0, 100)]


def test_an_empty_space_hands_nothing_out() -> None:
    assert FreeSpace(0).take(1) is None
