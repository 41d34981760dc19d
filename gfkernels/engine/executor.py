"""Owns running a call: the resumable loop that takes it from its first row to its last, without the interpreter.

`call`, `call_array` and `call_arrays` admit a caller and run until the call is done or something wants the
interpreter's attention; `resume` goes on. All state is in the context, so Python may serve signals, read control events
or build a plan between.
"""

from __future__ import annotations

from gfkernels.engine.context import Code, Ctx, Owner, Phase, Prog
from gfkernels.engine.entry import NEXT, WAITING, begin, enter, has_entered, publish_again
from gfkernels.engine.rows import BLOCKED, DID, ROW_NBYTES, step, waits_for
from gfkernels.engine.waiting import GO_ON, idle, moved
from gfkernels.native.jit import njit
from gfkernels.native.memory import call1, compare_exchange, load32, load64, load_acquire, store64, store_release
from gfkernels.transport.table import AGAIN, N_SLOTS, Slot
from gfkernels.types import N_CHANNELS

_SIZE, _RANK, _LOCK, _REFUSE = 8 * int(Ctx.SIZE), 8 * int(Ctx.RANK), 8 * int(Ctx.LOCK), 8 * int(Ctx.REFUSE)
_PENDING, _PHASE, _PROGRAM = 8 * int(Ctx.PENDING), 8 * int(Ctx.PHASE), 8 * int(Ctx.PROGRAM)
_STEPS, _N_LANES, _PCS, _ENDS = 8 * int(Ctx.STEPS), 8 * int(Ctx.N_LANES), 8 * int(Ctx.PCS), 8 * int(Ctx.ENDS)
_EXPECTS, _BASES, _CHANNELS = 8 * int(Ctx.EXPECTS), 8 * int(Ctx.BASES), 8 * int(Ctx.CHANNELS)
_HAS_CALLS, _FAULT, _PEER = 8 * int(Ctx.HAS_CALLS), 8 * int(Ctx.FAULT), 8 * int(Ctx.PEER)
_ATTEMPT, _N_CALLS, _SLICE_SINCE = 8 * int(Ctx.ATTEMPT), 8 * int(Ctx.N_CALLS), 8 * int(Ctx.SLICE_SINCE_NS)
_MOVED = 8 * int(Ctx.MOVED)
_IDLE_PHASE, _ENTER, _BODY, _FLUSH = int(Phase.IDLE), int(Phase.ENTER), int(Phase.BODY), int(Phase.FLUSH)
_NOBODY, _CALLER, _QUEUE = int(Owner.NOBODY), int(Owner.CALLER), int(Owner.QUEUE)
_DONE, _FAULT_CODE, _NOT_FAST = int(Code.DONE), int(Code.FAULT), int(Code.NOT_FAST)
_QUEUED, _BUSY, _REFUSED = int(Code.QUEUED), int(Code.BUSY), int(Code.REFUSED)
_SLOT_STATE, _SLOT_FLUSH, _SLOTS_NBYTES = 8 * int(Slot.STATE), 8 * int(Slot.FLUSH), 8 * N_SLOTS
_P_COUNT, _P_DESCRIPTOR = 8 * int(Prog.COUNT), 8 * int(Prog.DESCRIPTOR)
_P_X_NBYTES, _P_OUT_NBYTES = 8 * int(Prog.X_NBYTES), 8 * int(Prog.OUT_NBYTES)

# Where CPython's numpy keeps an array's fields (`gfkernels.arrays.fast` proves it before this is used).
_A_DATA, _A_NDIM, _A_DIMENSIONS, _A_DESCR, _A_FLAGS = 16, 24, 32, 56, 64
_A_READABLE = 0x0001 | 0x0100  # C-contiguous, aligned
_A_WANTED = _A_READABLE | 0x0400  # and writeable

_LOOK_EVERY = 4096
"""Rounds in which something moved until the interpreter gets its turn all the same."""


@njit
def call(ctx: int, prog: int, x: int, out: int) -> int:
    """A blocking call on arrays at these addresses: how far it came, a `Code`."""
    code = _admit(ctx)
    return code if code != _DONE else _start(ctx, prog, x, out)


@njit
def call_array(ctx: int, prog: int, array: int) -> int:
    """A blocking call in place on the numpy array whose object is at this address; NOT_FAST where it does not fit.

    It fits where its dtype and number of elements are the program's and it is contiguous, aligned and writeable.
    """
    if not _fits(array, prog, _A_WANTED) or _count(array) != load64(prog + _P_COUNT):
        return _NOT_FAST
    code = _admit(ctx)
    return code if code != _DONE else _start(ctx, prog, load64(array + _A_DATA), 0)


@njit
def call_arrays(ctx: int, prog: int, array: int, target: int) -> int:
    """As `call_array` with a result of its own, of a shape that the caller has checked; only that must be writeable."""
    if not _fits(array, prog, _A_READABLE) or not _fits(target, prog, _A_WANTED):
        return _NOT_FAST
    x, out = load64(array + _A_DATA), load64(target + _A_DATA)
    overlap = x < out + load64(prog + _P_OUT_NBYTES) and out < x + load64(prog + _P_X_NBYTES)
    if overlap or _count(array) != load64(prog + _P_COUNT):
        return _NOT_FAST
    code = _admit(ctx)
    return code if code != _DONE else _start(ctx, prog, x, out)


@njit
def _fits(array: int, prog: int, wanted: int) -> bool:
    return load64(array + _A_DESCR) == load64(prog + _P_DESCRIPTOR) and load32(array + _A_FLAGS) & wanted == wanted


@njit
def _count(array: int) -> int:
    count, dimensions = 1, load64(array + _A_DIMENSIONS)
    for i in range(load32(array + _A_NDIM)):
        count *= load64(dimensions + 8 * i)
    return count


@njit
def call_queued(ctx: int, prog: int, x: int, out: int) -> int:
    """A call of the queue; the caller holds the engine as `Owner.QUEUE`."""
    return _start(ctx, prog, x, out)


@njit
def acquire(ctx: int, owner: int) -> int:
    """Takes the engine for `owner`: 1, or 0 where somebody has it."""
    return 1 if compare_exchange(ctx + _LOCK, _NOBODY, owner) == _NOBODY else 0


@njit
def release(ctx: int) -> None:
    """Gives the engine back, after a call that ended otherwise than done, or one that never began."""
    store64(ctx + _PHASE, _IDLE_PHASE)
    store_release(ctx + _LOCK, _NOBODY)


@njit
def _admit(ctx: int) -> int:
    if load_acquire(ctx + _REFUSE) != 0:
        return _REFUSED
    if compare_exchange(ctx + _LOCK, _NOBODY, _CALLER) != _NOBODY:
        return _BUSY
    # Only now: an asynchronous call may have been queued since, and comes first.
    if load_acquire(ctx + _PENDING) != 0:
        store_release(ctx + _LOCK, _NOBODY)
        return _QUEUED
    return _DONE


@njit
def _start(ctx: int, prog: int, x: int, out: int) -> int:
    code = begin(ctx, prog, x, out)
    return _fault(ctx, code) if code < 0 else _run(ctx)


@njit
def resume(ctx: int) -> int:
    """Goes on with the running call."""
    store64(ctx + _SLICE_SINCE, 0)
    store64(ctx + _MOVED, 0)
    return _run(ctx)


@njit
def reenter(ctx: int) -> None:
    """Publishes the running call's header again, under the context's present ATTEMPT."""
    publish_again(ctx)


@njit
def blocked_on(ctx: int, peer: int) -> int:
    """1 where the running call cannot go on without `peer`; 0 where others are missing, or nothing is."""
    if load64(ctx + _PHASE) == _ENTER:
        return 1 if has_entered(ctx, peer) == 0 else 0
    if load64(ctx + _PHASE) != _BODY:
        return 0
    steps, pcs, ends = load64(ctx + _STEPS), load64(ctx + _PCS), load64(ctx + _ENDS)
    for lane in range(load64(ctx + _N_LANES)):
        pc = load64(pcs + 8 * lane)
        if pc < load64(ends + 8 * lane) and waits_for(ctx, steps + pc * ROW_NBYTES, peer) != 0:
            return 1
    return 0


@njit
def _fault(ctx: int, code: int) -> int:
    store64(ctx + _FAULT, -code)
    return _FAULT_CODE


@njit
def _run(ctx: int) -> int:
    rounds = 0
    while True:
        phase = load64(ctx + _PHASE)
        if phase == _ENTER:
            code = enter(ctx)
            if code == NEXT:
                moved(ctx)
                continue
            if code != WAITING:
                return code
        elif phase == _BODY:
            code = _lanes(ctx)
            if code < 0:
                return _fault(ctx, code)
            if code == _ALL_DONE:
                if load64(ctx + _HAS_CALLS) == 0:
                    return _finish(ctx)
                store64(ctx + _PHASE, _FLUSH)
                continue
            if code == _SOME_MOVED:
                moved(ctx)
                rounds += 1
                if rounds < _LOOK_EVERY:
                    continue
                rounds = 0
        else:
            code = _flush(ctx)
            if code < 0:
                return _fault(ctx, code)
            if code == DID:
                return _finish(ctx)
        code = idle(ctx)
        if code < 0:
            return _fault(ctx, code)
        if code != GO_ON:
            return code


_ALL_DONE, _SOME_MOVED, _NONE_MOVED = 2, 1, 0


@njit
def _lanes(ctx: int) -> int:
    steps, pcs, ends = load64(ctx + _STEPS), load64(ctx + _PCS), load64(ctx + _ENDS)
    left, any_moved = 0, False
    for lane in range(load64(ctx + _N_LANES)):
        pc, end = load64(pcs + 8 * lane), load64(ends + 8 * lane)
        first = pc
        while pc < end:
            code = step(ctx, steps + pc * ROW_NBYTES, lane)
            if code != DID:
                store64(pcs + 8 * lane, pc)
                if code != BLOCKED:
                    return code
                break
            pc += 1
        if pc != first:
            store64(pcs + 8 * lane, pc)
            any_moved = True
        left += end - pc
    if left == 0:
        return _ALL_DONE
    return _SOME_MOVED if any_moved else _NONE_MOVED


@njit
def _flush(ctx: int) -> int:
    for peer in range(load64(ctx + _SIZE)):
        slots = load64(ctx + _CHANNELS) + peer * _SLOTS_NBYTES
        function = load64(slots + _SLOT_FLUSH)
        if function != 0:
            code = call1(function, load64(slots + _SLOT_STATE))
            if code < 0:
                store64(ctx + _PEER, peer)
                return code
            if code == AGAIN:
                return BLOCKED
    return DID


@njit
def _finish(ctx: int) -> int:
    expects = load64(ctx + _EXPECTS)
    if expects != 0:
        bases = load64(ctx + _BASES)
        for i in range(load64(ctx + _SIZE) * N_CHANNELS):
            store64(bases + 8 * i, load64(bases + 8 * i) + load64(expects + 8 * i))
    store64(ctx + _ATTEMPT, 0)
    store64(ctx + _N_CALLS, load64(ctx + _N_CALLS) + 1)
    store64(ctx + _PHASE, _IDLE_PHASE)
    store_release(ctx + _LOCK, _NOBODY)
    return _DONE
