"""Owns how a row writes into its rank's STAGE: through the caches, or past them where peers hold on to its lines.

A peer that has read STAGE keeps its lines, and a store has to take each one back first. Cores that share a cache need
30 to 150 ns a KiB for that; between cores that share none, 600 were seen, as stores wait for one line after the other.
Stores past the caches wait for nobody (20 to 45 ns), but then the peer reads memory (30 to 50 more). Virtual machines
move from one case to the other by the second, so rows time themselves and nobody configures anything. Where one rank
finds its stores slow, all stream, for reading the others' lines out of a distant cache is as slow: 1 MiB on 4 ranks
takes 250 us where the caches are near, else 1100 with half of the ranks streaming and 370 with all.
"""

from __future__ import annotations

from typing import Final

from gfkernels.engine.context import Ctx
from gfkernels.native.jit import njit
from gfkernels.native.libc import copy, now_ns, stream
from gfkernels.native.memory import LINE_NBYTES, drain_streams, load64, store64

_MIN_NBYTES: Final = 2048
"""Rows of less cost no more than looking at the clock would."""
_SLOW_NS_PER_KIB: Final = 250
"""Slower than this through the caches, the next rows go past them: what was saved on reading back is lost by then."""
_ROWS: Final = 256
"""How many, where a call counts as one more. Trying the slow way again adds some per cent to them."""
_SUSPECTED: Final = -1
"""STREAMED_ROWS after one slow row: two in a row are slow, one was interrupted."""

_STREAMED_ROWS, _TIMESPEC = 8 * int(Ctx.STREAMED_ROWS), 8 * int(Ctx.TIMESPEC)
_STREAMS = 8 * int(Ctx.STREAMS)


@njit
def streams(ctx: int, dst: int, nbytes: int) -> bool:
    """Whether a row that writes `nbytes` at `dst` in STAGE should go past the caches now."""
    wanted = load64(ctx + _STREAMED_ROWS) > 0 or load64(ctx + _STREAMS) != 0
    return wanted and nbytes >= _MIN_NBYTES and dst % LINE_NBYTES == 0


@njit
def started_ns(ctx: int, nbytes: int) -> int:
    """The time before a row that goes through the caches, for `note`; 0: too little to tell."""
    return now_ns(load64(ctx + _TIMESPEC)) if nbytes >= _MIN_NBYTES else 0


@njit
def note(ctx: int, nbytes: int, since_ns: int) -> None:
    """After a row that read this rank's memory alone: how long did its stores take?"""
    if since_ns == 0 or load64(ctx + _STREAMED_ROWS) > 0:
        return
    if (now_ns(load64(ctx + _TIMESPEC)) - since_ns) * 1024 <= nbytes * _SLOW_NS_PER_KIB:
        store64(ctx + _STREAMED_ROWS, 0)
    else:
        store64(ctx + _STREAMED_ROWS, _ROWS if load64(ctx + _STREAMED_ROWS) == _SUSPECTED else _SUSPECTED)


@njit
def count_down(ctx: int) -> int:
    """One streamed row less to come: 1 where this rank still wanted it, else 0."""
    rows = load64(ctx + _STREAMED_ROWS)
    if rows <= 0:
        return 0
    store64(ctx + _STREAMED_ROWS, rows - 1)
    return 1


@njit
def end_streamed(ctx: int) -> None:
    """After a row that went past the caches, before anybody is told of it."""
    drain_streams()
    count_down(ctx)


@njit
def fill(ctx: int, dst: int, src: int, nbytes: int) -> None:
    """Copies this rank's memory into its STAGE."""
    if streams(ctx, dst, nbytes):
        stream(dst, src, nbytes)
        end_streamed(ctx)
        return
    since_ns = started_ns(ctx, nbytes)
    copy(dst, src, nbytes)
    note(ctx, nbytes, since_ns)
