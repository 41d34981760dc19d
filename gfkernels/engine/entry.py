"""Owns the start of a call: admission, where its buffers lie, and on one host the exchange of headers.

ENTER is a full barrier: a rank that has passed it knows that all ranks are in this call. So a header area, and an
INLINE area, written in call s may be written again in call s + 2: whoever is in s + 1 has left s. STAGE, written
after ENTER, may be written again in call s + 1, whichever window of it a call uses.
"""

from __future__ import annotations

from typing import Final

from gfkernels.engine.context import (
    ATTEMPT_BITS,
    HEADER_NBYTES,
    KIND_BITS,
    N_RECENT,
    N_VARIANT_WORDS,
    Code,
    Ctx,
    Header,
    Kind,
    Phase,
    Prog,
    Variant,
)
from gfkernels.engine.rows import ROW_NBYTES, work
from gfkernels.engine.staging import count_down
from gfkernels.native.jit import njit
from gfkernels.native.libc import now_ns
from gfkernels.native.memory import call4, load64, load_acquire, store64, store_release
from gfkernels.transport.table import N_SLOTS, Slot
from gfkernels.types import N_BUFFERS, N_CHANNELS, Buffer

NEXT: Final = 1
"""The call goes on to its next phase."""
WAITING: Final = 0

_RANK, _SIZE, _SEQUENCE = 8 * int(Ctx.RANK), 8 * int(Ctx.SIZE), 8 * int(Ctx.SEQUENCE)
_ATTEMPT, _SEQUENCE_WORD = 8 * int(Ctx.ATTEMPT), 8 * int(Ctx.SEQUENCE_WORD)
_PROGRAM, _PHASE = 8 * int(Ctx.PROGRAM), 8 * int(Ctx.PHASE)
_BUFFERS, _N_COLUMNS, _PLACES = 8 * int(Ctx.BUFFERS), 8 * int(Ctx.N_COLUMNS), 8 * int(Ctx.PLACES)
_HEADERS, _SHIFTS, _STAGES = 8 * int(Ctx.HEADERS), 8 * int(Ctx.SHIFTS), 8 * int(Ctx.STAGES)
_ARENA, _ARENA_NBYTES = 8 * int(Ctx.ARENA), 8 * int(Ctx.ARENA_NBYTES)
_CMA_OK, _BEST_KIND = 8 * int(Ctx.CMA_OK), 8 * int(Ctx.BEST_KIND)
_KIND, _OWN_KIND = 8 * int(Ctx.KIND), 8 * int(Ctx.OWN_KIND)
_CHANNELS, _CMA_CHANNELS, _TABLE = 8 * int(Ctx.CHANNELS), 8 * int(Ctx.CMA_CHANNELS), 8 * int(Ctx.TABLE)
_ABORT = 8 * int(Ctx.ABORT)
_STREAMS = 8 * int(Ctx.STREAMS)
_ENTERED, _PEER, _HAS_CALLS = 8 * int(Ctx.ENTERED), 8 * int(Ctx.PEER), 8 * int(Ctx.HAS_CALLS)
_STEPS, _SPANS, _N_LANES = 8 * int(Ctx.STEPS), 8 * int(Ctx.SPANS), 8 * int(Ctx.N_LANES)
_EXPECTS, _PCS, _ENDS = 8 * int(Ctx.EXPECTS), 8 * int(Ctx.PCS), 8 * int(Ctx.ENDS)
_NEXT_PEERS, _LANDINGS = 8 * int(Ctx.NEXT_PEERS), 8 * int(Ctx.LANDINGS)
_IDLE, _EVENT, _MOVED = 8 * int(Ctx.IDLE), 8 * int(Ctx.EVENT), 8 * int(Ctx.MOVED)
_RECENT = 8 * int(Ctx.RECENT)
_SLICE_SINCE, _STARTED, _TIMESPEC = 8 * int(Ctx.SLICE_SINCE_NS), 8 * int(Ctx.STARTED_NS), 8 * int(Ctx.TIMESPEC)

_P_SIGNATURE, _P_CODE, _P_COUNT = 8 * int(Prog.SIGNATURE), 8 * int(Prog.CODE), 8 * int(Prog.COUNT)
_P_HASH, _P_ENTER, _P_USES_ARRAYS = 8 * int(Prog.PLAN_HASH), 8 * int(Prog.HAS_ENTER), 8 * int(Prog.USES_ARRAYS)
_P_N_ARRAYS, _P_PRE, _P_N_PRE = 8 * int(Prog.N_ARRAYS), 8 * int(Prog.PRE_STEPS), 8 * int(Prog.N_PRE)
_P_PRE_SPANS, _P_X_NBYTES, _P_OUT_NBYTES = 8 * int(Prog.PRE_SPANS), 8 * int(Prog.X_NBYTES), 8 * int(Prog.OUT_NBYTES)
_P_SCRATCH, _P_SCRATCH_NBYTES = 8 * int(Prog.SCRATCH), 8 * int(Prog.SCRATCH_NBYTES)
_P_PLACES, _P_N_COLUMNS = 8 * int(Prog.PLACES), 8 * int(Prog.N_COLUMNS)
_P_ADDRESSES, _P_NBYTES, _P_VARIANTS = 8 * int(Prog.ADDRESSES), 8 * int(Prog.NBYTES), 8 * int(Prog.VARIANTS)
_V_STEPS, _V_SPANS, _V_N_LANES = 8 * int(Variant.STEPS), 8 * int(Variant.SPANS), 8 * int(Variant.N_LANES)
_V_STARTS, _V_EXPECTS, _V_PRESENT = 8 * int(Variant.LANE_STARTS), 8 * int(Variant.EXPECTS), 8 * int(Variant.PRESENT)
_V_WINDOW_NBYTES, _V_N_WINDOWS = 8 * int(Variant.WINDOW_NBYTES), 8 * int(Variant.N_WINDOWS)
_VARIANT_NBYTES = 8 * N_VARIANT_WORDS

_H_SIGNATURE, _H_KIND, _H_X = 8 * int(Header.SIGNATURE), 8 * int(Header.KIND), 8 * int(Header.X)
_H_OUT, _H_CODE, _H_COUNT = 8 * int(Header.OUT), 8 * int(Header.CODE), 8 * int(Header.COUNT)
_H_HASH, _H_MORE = 8 * int(Header.PLAN_HASH), 8 * int(Header.MORE)

_X, _OUT, _STAGE, _SCRATCH = 8 * int(Buffer.X), 8 * int(Buffer.OUT), 8 * int(Buffer.STAGE), 8 * int(Buffer.SCRATCH)
_MORE = 8 * N_BUFFERS
_REGISTERED, _CMA, _STAGED = int(Kind.REGISTERED), int(Kind.CMA), int(Kind.STAGED)
_KIND_MASK: Final = (1 << KIND_BITS) - 1
_PHASE_ENTER, _PHASE_BODY = int(Phase.ENTER), int(Phase.BODY)
_MISMATCH, _NEED_PLAN, _ABORTED = int(Code.MISMATCH), int(Code.NEED_PLAN), int(Code.ABORTED)
_SLOT_STATE, _SLOT_BEGIN, _SLOTS_NBYTES = 8 * int(Slot.STATE), 8 * int(Slot.BEGIN), 8 * N_SLOTS


@njit
def begin(ctx: int, prog: int, x: int, out: int) -> int:
    """Starts a call on arrays at these addresses (out 0: none): NEXT, or a negative fault."""
    sequence = load64(ctx + _SEQUENCE) + 1
    store64(ctx + _SEQUENCE, sequence)
    store64(ctx + _SEQUENCE_WORD, (sequence << ATTEMPT_BITS) | load64(ctx + _ATTEMPT))
    store64(ctx + _PROGRAM, prog)
    store64(ctx + _IDLE, 0)
    store64(ctx + _EVENT, 0)
    store64(ctx + _SLICE_SINCE, 0)
    store64(ctx + _MOVED, 0)
    row = _place_own(ctx, prog, sequence, x, out)
    store64(ctx + _TABLE, load64(ctx + _CHANNELS))
    if load64(prog + _P_ENTER) == 0:
        _choose(ctx, prog, _STAGED)
        # Without a common entry a rank may be calls ahead when a peer finds that they disagreed in an earlier one.
        store64(ctx + _RECENT + 8 * (sequence % N_RECENT), prog)
        store64(ctx + _STARTED, now_ns(load64(ctx + _TIMESPEC)))
        if load64(ctx + _HAS_CALLS) != 0:
            code = _begin_transport(ctx, prog, row, sequence)
            if code < 0:
                return code
        store64(ctx + _PHASE, _PHASE_BODY)
        return NEXT
    pre, spans = load64(prog + _P_PRE), load64(prog + _P_PRE_SPANS)
    for i in range(load64(prog + _P_N_PRE)):
        work(ctx, pre + i * ROW_NBYTES, spans)
    _publish(ctx, prog, x, out)
    store64(ctx + _ENTERED, 0)
    store64(ctx + _PHASE, _PHASE_ENTER)
    return NEXT


@njit
def _place_own(ctx: int, prog: int, sequence: int, x: int, out: int) -> int:
    n_columns, places = load64(prog + _P_N_COLUMNS), load64(prog + _P_PLACES)
    if places == 0:
        n_columns, places = N_BUFFERS, load64(ctx + _PLACES)
    buffers = places + 8 * (sequence & 1) * load64(ctx + _SIZE) * n_columns
    store64(ctx + _BUFFERS, buffers)
    store64(ctx + _N_COLUMNS, n_columns)
    row = buffers + 8 * load64(ctx + _RANK) * n_columns
    store64(row + _X, x)
    store64(row + _OUT, out)
    more = load64(prog + _P_ADDRESSES)
    for i in range(load64(prog + _P_N_ARRAYS) - 1):
        store64(row + _MORE + 8 * i, load64(more + 8 * i))
    return row


@njit
def _begin_transport(ctx: int, prog: int, row: int, sequence: int) -> int:
    landings, expects = load64(ctx + _LANDINGS), load64(ctx + _EXPECTS)
    for buffer in range(N_BUFFERS):
        store64(landings + 16 * buffer, load64(row + 8 * buffer))
        store64(landings + 16 * buffer + 8, 0)
    store64(landings + 2 * _X + 8, load64(prog + _P_X_NBYTES))
    store64(landings + 2 * _OUT + 8, load64(prog + _P_OUT_NBYTES))
    store64(landings + 2 * _STAGE + 8, load64(prog + _P_VARIANTS + _STAGED * _VARIANT_NBYTES + _V_WINDOW_NBYTES))
    nowhere = landings + 16 * N_BUFFERS
    for peer in range(load64(ctx + _SIZE)):
        slots = load64(ctx + _CHANNELS) + peer * _SLOTS_NBYTES
        function = load64(slots + _SLOT_BEGIN)
        if function != 0:
            # From a rank that has no part in this one's plan nothing may come.
            lands = landings if _sends(expects, peer) else nowhere
            code = call4(function, load64(slots + _SLOT_STATE), sequence, load64(prog + _P_SIGNATURE), lands)
            if code < 0:
                store64(ctx + _PEER, peer)
                return code
    return NEXT


@njit
def _sends(expects: int, peer: int) -> bool:
    arrivals = 0
    if expects != 0:
        for channel in range(N_CHANNELS):
            arrivals += load64(expects + 8 * (peer * N_CHANNELS + channel))
    return arrivals != 0


@njit
def _kind_of(ctx: int, address: int, nbytes: int) -> int:
    base = load64(ctx + _ARENA)
    if nbytes == 0 or (address >= base and address + nbytes <= base + load64(ctx + _ARENA_NBYTES)):
        return _REGISTERED
    return _CMA if load64(ctx + _CMA_OK) != 0 else _STAGED


@njit
def _publish(ctx: int, prog: int, x: int, out: int) -> None:
    word = load64(ctx + _SEQUENCE_WORD)
    sequence = load64(ctx + _SEQUENCE)
    header = load64(load64(ctx + _HEADERS) + 8 * load64(ctx + _RANK)) + (sequence & 1) * HEADER_NBYTES
    kind = _REGISTERED
    if load64(prog + _P_USES_ARRAYS) != 0:
        kind = min(_kind_of(ctx, x, load64(prog + _P_X_NBYTES)), load64(ctx + _BEST_KIND))
        kind = min(kind, _kind_of(ctx, out, load64(prog + _P_OUT_NBYTES)))
        more, sizes = load64(prog + _P_ADDRESSES), load64(prog + _P_NBYTES)
        for i in range(load64(prog + _P_N_ARRAYS) - 1):
            kind = min(kind, _kind_of(ctx, load64(more + 8 * i), load64(sizes + 8 * i)))
            store64(header + _H_MORE + 8 * i, load64(more + 8 * i))
    store64(ctx + _OWN_KIND, kind)
    store64(header + _H_SIGNATURE, load64(prog + _P_SIGNATURE))
    # A call counts as a row: a rank that fills no STAGE for a while would else never take its wish back.
    store64(header + _H_KIND, kind | (count_down(ctx) << KIND_BITS))
    store64(header + _H_X, x)
    store64(header + _H_OUT, out)
    store64(header + _H_CODE, load64(prog + _P_CODE))
    store64(header + _H_COUNT, load64(prog + _P_COUNT))
    store64(header + _H_HASH, load64(prog + _P_HASH))
    store_release(header, word)


@njit
def publish_again(ctx: int) -> None:
    """The running call's header, under the present ATTEMPT: a refused attempt before it is over."""
    sequence = load64(ctx + _SEQUENCE)
    word = (sequence << ATTEMPT_BITS) | load64(ctx + _ATTEMPT)
    store64(ctx + _SEQUENCE_WORD, word)
    store64(ctx + _ENTERED, 0)
    header = load64(load64(ctx + _HEADERS) + 8 * load64(ctx + _RANK)) + (sequence & 1) * HEADER_NBYTES
    store_release(header, word)


@njit
def has_entered(ctx: int, peer: int) -> int:
    """1 where the peer's header is that of the running call."""
    area = (load64(ctx + _SEQUENCE) & 1) * HEADER_NBYTES
    header = load64(load64(ctx + _HEADERS) + 8 * peer) + area
    return 1 if load_acquire(header) == load64(ctx + _SEQUENCE_WORD) else 0


@njit
def enter(ctx: int) -> int:
    """Looks at the peers' headers: NEXT once all are in this call, WAITING, or a `Code` above NEXT."""
    prog, own, size = load64(ctx + _PROGRAM), load64(ctx + _RANK), load64(ctx + _SIZE)
    word, headers = load64(ctx + _SEQUENCE_WORD), load64(ctx + _HEADERS)
    area = (load64(ctx + _SEQUENCE) & 1) * HEADER_NBYTES
    signature, entered = load64(prog + _P_SIGNATURE), load64(ctx + _ENTERED)
    complete = True
    for peer in range(entered, size):
        header = load64(headers + 8 * peer) + area
        if peer != own:
            if load_acquire(header) != word:
                complete = False
                continue
            # Compared as they come: a rank that never enters must not hide that two others disagree.
            if load64(header + _H_SIGNATURE) != signature:
                store64(ctx + _PEER, peer)
                return _MISMATCH
        if complete:
            store64(ctx + _ENTERED, peer + 1)
    if not complete:
        return WAITING
    if load_acquire(load64(ctx + _ABORT)) != 0:
        # A peer entered, gave up, and is gone from the call: its header stays, but nothing more will come from it.
        return _ABORTED
    kind, streams = load64(ctx + _OWN_KIND), 0
    for peer in range(size):
        facts = load64(load64(headers + 8 * peer) + area + _H_KIND)
        kind, streams = min(kind, facts & _KIND_MASK), streams | (facts >> KIND_BITS)
    store64(ctx + _KIND, kind)
    store64(ctx + _STREAMS, streams)
    if load64(prog + _P_USES_ARRAYS) != 0:
        _place_peers(ctx, prog, kind, area)
    return _choose(ctx, prog, kind)


@njit
def _place_peers(ctx: int, prog: int, kind: int, area: int) -> None:
    if kind == _STAGED:
        return
    own, buffers, n_columns = load64(ctx + _RANK), load64(ctx + _BUFFERS), load64(ctx + _N_COLUMNS)
    n_more = load64(prog + _P_N_ARRAYS) - 1
    for peer in range(load64(ctx + _SIZE)):
        if peer != own:
            header = load64(load64(ctx + _HEADERS) + 8 * peer) + area
            # Cross-memory attach names the peer's own addresses; mapped memory is elsewhere here.
            shift = load64(load64(ctx + _SHIFTS) + 8 * peer) if kind == _REGISTERED else 0
            row = buffers + 8 * peer * n_columns
            store64(row + _X, load64(header + _H_X) + shift)
            store64(row + _OUT, load64(header + _H_OUT) + shift)
            for i in range(n_more):
                store64(row + _MORE + 8 * i, load64(header + _H_MORE + 8 * i) + shift)
    if kind == _CMA:
        store64(ctx + _TABLE, load64(ctx + _CMA_CHANNELS))


@njit
def _place_stages(ctx: int, variant: int) -> None:
    n_windows, at = load64(variant + _V_N_WINDOWS), 0
    if n_windows > 1:
        at = load64(ctx + _SEQUENCE) % n_windows * load64(variant + _V_WINDOW_NBYTES)
    stages, row, row_nbytes = load64(ctx + _STAGES), load64(ctx + _BUFFERS), 8 * load64(ctx + _N_COLUMNS)
    for peer in range(load64(ctx + _SIZE)):
        store64(row + _STAGE, load64(stages + 8 * peer) + at)
        row += row_nbytes


@njit
def _choose(ctx: int, prog: int, kind: int) -> int:
    variant = prog + _P_VARIANTS + kind * _VARIANT_NBYTES
    if load_acquire(variant + _V_PRESENT) == 0:
        return _NEED_PLAN
    n_lanes, starts = load64(variant + _V_N_LANES), load64(variant + _V_STARTS)
    pcs, ends, peers = load64(ctx + _PCS), load64(ctx + _ENDS), load64(ctx + _NEXT_PEERS)
    _place_stages(ctx, variant)
    # Late, since building a variant may have made the scratch memory larger.
    row = load64(ctx + _BUFFERS) + 8 * load64(ctx + _RANK) * load64(ctx + _N_COLUMNS)
    store64(row + _SCRATCH, load64(prog + _P_SCRATCH))
    store64(ctx + _STEPS, load64(variant + _V_STEPS))
    store64(ctx + _SPANS, load64(variant + _V_SPANS))
    store64(ctx + _EXPECTS, load64(variant + _V_EXPECTS))
    store64(ctx + _N_LANES, n_lanes)
    for lane in range(n_lanes):
        store64(pcs + 8 * lane, load64(starts + 8 * lane))
        store64(ends + 8 * lane, load64(starts + 8 * (lane + 1)))
        store64(peers + 8 * lane, 0)
    store64(ctx + _PHASE, _PHASE_BODY)
    return NEXT
