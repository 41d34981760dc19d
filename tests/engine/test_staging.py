"""How rows get into STAGE: the same bytes through the caches and past them, and who decides."""

from __future__ import annotations

import numpy as np
import pytest

from gfkernels.engine import staging
from gfkernels.engine.context import N_CTX_WORDS, Ctx
from gfkernels.engine.staging import _MIN_NBYTES, _ROWS, _SLOW_NS_PER_KIB, _SUSPECTED
from gfkernels.native.libc import now_ns


class _Context:
    def __init__(self, streamed_rows: int) -> None:
        self.words, self._timespec = np.zeros(N_CTX_WORDS, np.int64), np.zeros(2, np.int64)
        self.words[Ctx.TIMESPEC], self.words[Ctx.STREAMED_ROWS] = self._timespec.ctypes.data, streamed_rows

    @property
    def at(self) -> int:
        return int(self.words.ctypes.data)

    @property
    def left(self) -> int:
        return int(self.words[Ctx.STREAMED_ROWS])

    def now(self) -> int:
        return int(now_ns(int(self._timespec.ctypes.data)))


@pytest.mark.parametrize("streamed_rows", [0, 1000])
@pytest.mark.parametrize("nbytes", [0, 1, 127, 2047, 2048, 2049, 4096, 4223, 100_001])
@pytest.mark.parametrize("offset", [0, 1, 8, 64])
def test_fill_copies_these_bytes_alone(streamed_rows: int, nbytes: int, offset: int) -> None:
    context = _Context(streamed_rows)
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes + 64, dtype=np.uint8)[7 : 7 + nbytes]
    raw = np.full(nbytes + 512, 0xA5, np.uint8)
    start = -raw.ctypes.data % 64 + 64 + offset
    source_at = int(source.ctypes.data) if nbytes else 0
    staging.fill(context.at, int(raw.ctypes.data) + start, source_at, nbytes)
    assert np.array_equal(raw[start : start + nbytes], source)
    assert (np.delete(raw, np.s_[start : start + nbytes]) == 0xA5).all()
    streams = streamed_rows > 0 and nbytes >= _MIN_NBYTES and offset % 64 == 0
    if streams:
        assert context.left == streamed_rows - 1
    else:
        # A crooked row among those that go past the caches tells nothing of them.
        assert context.left in (streamed_rows, _SUSPECTED) if nbytes >= _MIN_NBYTES else context.left == streamed_rows


def test_two_slow_rows_send_the_next_ones_past_the_caches() -> None:
    context, nbytes = _Context(0), 1 << 20
    assert not staging.streams(context.at, 0, nbytes)
    too_long = _SLOW_NS_PER_KIB * nbytes // 1024 + 1
    staging.note(context.at, nbytes, context.now() - too_long)
    assert context.left == _SUSPECTED and not staging.streams(context.at, 0, nbytes)
    staging.note(context.at, nbytes, context.now() - too_long)
    assert context.left == _ROWS
    for left in reversed(range(_ROWS)):
        assert staging.streams(context.at, 0, nbytes)
        staging.end_streamed(context.at)
        assert context.left == left
    assert not staging.streams(context.at, 0, nbytes)


@pytest.mark.parametrize("before", [0, _SUSPECTED])
def test_a_fast_row_takes_suspicion_back(before: int) -> None:
    context = _Context(before)
    staging.note(context.at, 1 << 40, staging.started_ns(context.at, 1 << 40))
    assert context.left == 0


@pytest.mark.parametrize("own", [0, _SUSPECTED])
def test_rows_follow_a_rank_that_streams_and_count_for_it_alone(own: int) -> None:
    context = _Context(own)
    assert not staging.streams(context.at, 64, _MIN_NBYTES)
    context.words[Ctx.STREAMS] = 1
    assert staging.streams(context.at, 64, _MIN_NBYTES) and not staging.streams(context.at, 65, _MIN_NBYTES)
    staging.end_streamed(context.at)
    assert context.left == own


def test_small_and_crooked_rows_stay_in_the_caches() -> None:
    context = _Context(5)
    assert staging.streams(context.at, 64, _MIN_NBYTES)
    assert not staging.streams(context.at, 64, _MIN_NBYTES - 1)
    assert not staging.streams(context.at, 65, _MIN_NBYTES)
    assert staging.started_ns(context.at, _MIN_NBYTES - 1) == 0
    staging.note(context.at, 0, 0)
    assert context.left == 5
