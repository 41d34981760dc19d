"""Owns what a rank does while nothing moves: look around, spin, yield, nap, and end the wait when there is news.

Waking a blocked process costs 50 to 85 microseconds, so a wait spins first where every rank has a core, then yields,
then naps. Where ranks share cores, spinning takes time from the rank that is waited for: there it yields at once.
"""

from __future__ import annotations

from typing import Final

from gfkernels.engine.context import Code, Ctx
from gfkernels.native.jit import njit
from gfkernels.native.libc import now_ns, poll, sched_yield, usleep
from gfkernels.native.memory import call1, load64, load_acquire, pause, store64
from gfkernels.transport.table import N_SLOTS, Slot

GO_ON: Final = 0

_YIELD_NS: Final = 2_000_000
"""Yielding ends here: a wait this long is no longer the ordinary skew of ranks."""
_NAP_US: Final = 50
_LONG_NS: Final = 50_000_000
"""From here on a wait blocks in poll(2) for a millisecond at a time."""
_POLL_EVERY_NS: Final = 1_000_000
_BLOCK_MS: Final = 1

_SIZE, _CHANNELS, _HAS_CALLS = 8 * int(Ctx.SIZE), 8 * int(Ctx.CHANNELS), 8 * int(Ctx.HAS_CALLS)
_IDLE, _SPIN_ROUNDS, _ABORT = 8 * int(Ctx.IDLE), 8 * int(Ctx.SPIN_ROUNDS), 8 * int(Ctx.ABORT)
_TIMESPEC, _SLICE_NS, _SLICE_SINCE = 8 * int(Ctx.TIMESPEC), 8 * int(Ctx.SLICE_NS), 8 * int(Ctx.SLICE_SINCE_NS)
_IDLE_SINCE, _LAST_POLL, _EVENT = 8 * int(Ctx.IDLE_SINCE_NS), 8 * int(Ctx.LAST_POLL_NS), 8 * int(Ctx.EVENT)
_FDS, _N_FDS, _N_EVENT_FDS = 8 * int(Ctx.FDS), 8 * int(Ctx.N_FDS), 8 * int(Ctx.N_EVENT_FDS)
_PEER, _MOVED, _HANDOVER = 8 * int(Ctx.PEER), 8 * int(Ctx.MOVED), 8 * int(Ctx.HANDOVER)
_ABORTED, _SLICE, _EVENT_CODE = int(Code.ABORTED), int(Code.SLICE), int(Code.EVENT)
_STATE, _PROGRESS, _SLOTS_NBYTES = 8 * int(Slot.STATE), 8 * int(Slot.PROGRESS), 8 * N_SLOTS
_POLLFD_NBYTES, _REVENTS_SHIFT = 8, 48


@njit
def progress(ctx: int) -> int:
    """Lets the transport work: how many things happened, or a negative fault."""
    happened = 0
    for peer in range(load64(ctx + _SIZE)):
        slots = load64(ctx + _CHANNELS) + peer * _SLOTS_NBYTES
        function = load64(slots + _PROGRESS)
        if function != 0:
            code = call1(function, load64(slots + _STATE))
            if code < 0:
                store64(ctx + _PEER, peer)
                return code
            happened += code
    return happened


@njit
def moved(ctx: int) -> None:
    """Says that something moved, so that the next wait starts from spinning."""
    store64(ctx + _IDLE, 0)
    store64(ctx + _MOVED, 1)
    store64(ctx + _EVENT, 0)


@njit
def idle(ctx: int) -> int:
    """One idle round: GO_ON, a `Code` that ends the stretch, or a negative fault."""
    if load_acquire(load64(ctx + _ABORT)) != 0:
        return _ABORTED
    if load64(ctx + _EVENT) != 0:
        # Seen in the last round; the lanes have run since, so what came before the news is not lost.
        store64(ctx + _EVENT, 0)
        return _EVENT_CODE
    if load64(ctx + _HAS_CALLS) != 0:
        happened = progress(ctx)
        if happened < 0:
            return happened
        if happened > 0:
            moved(ctx)
            return GO_ON
    rounds = load64(ctx + _IDLE) + 1
    store64(ctx + _IDLE, rounds)
    if rounds <= load64(ctx + _SPIN_ROUNDS):
        pause()
        return GO_ON
    now = now_ns(load64(ctx + _TIMESPEC))
    if rounds == load64(ctx + _SPIN_ROUNDS) + 1:
        store64(ctx + _IDLE_SINCE, now)
    return _rest(ctx, now, now - load64(ctx + _IDLE_SINCE))


@njit
def _rest(ctx: int, now: int, waited: int) -> int:
    if load64(ctx + _SLICE_SINCE) == 0:
        store64(ctx + _SLICE_SINCE, now)
    elif now - load64(ctx + _SLICE_SINCE) >= load64(ctx + _SLICE_NS):
        return _SLICE
    if load_acquire(ctx + _HANDOVER) != 0:
        return _SLICE
    if waited < _YIELD_NS:
        sched_yield()
    elif waited < _LONG_NS:
        usleep(_NAP_US)
    if now - load64(ctx + _LAST_POLL) >= _POLL_EVERY_NS:
        store64(ctx + _LAST_POLL, now)
        _look(ctx, _BLOCK_MS if waited >= _LONG_NS else 0)
    return GO_ON


@njit
def _look(ctx: int, timeout_ms: int) -> None:
    fds, n_fds = load64(ctx + _FDS), load64(ctx + _N_FDS)
    if poll(fds, n_fds, timeout_ms) > 0:
        for i in range(load64(ctx + _N_EVENT_FDS)):
            # struct pollfd is int fd, short events, short revents.
            if (load64(fds + i * _POLLFD_NBYTES) >> _REVENTS_SHIFT) & 0xFFFF != 0:
                store64(ctx + _EVENT, 1)
        if load64(ctx + _EVENT) == 0 and timeout_ms > 0:
            # A transport's descriptor may stay readable for a while: do not turn round at full speed.
            sched_yield()
