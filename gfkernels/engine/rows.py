"""Owns what a row of a plan does: spans become addresses, and a kernel or a transport function is called on them."""

from __future__ import annotations

from typing import Final

from gfkernels.engine.context import N_KERN_WORDS, Ctx, Kern, Prog
from gfkernels.engine.staging import end_streamed, fill, note, started_ns, streams
from gfkernels.native.jit import njit
from gfkernels.native.libc import copy, stream
from gfkernels.native.memory import call3, call4, call5, call8, drain_streams, load64, store64
from gfkernels.transport.table import AGAIN, N_SLOTS, Slot
from gfkernels.types import N_CHANNELS, SPAN_DTYPE, STEP_DTYPE, STREAMED, Buffer, StepOp

DID: Final = 1
"""The row is done."""
BLOCKED: Final = 0
"""It cannot go on yet; run it again. Negative: it failed with that `Fault`, and PEER names the peer."""

ROW_NBYTES: Final = STEP_DTYPE.itemsize
_LONG_NBYTES: Final = 8 << 20
"""Copies into an array from here on go past the caches. Stores through them first read the lines that they overwrite;
allgather and broadcast are 1.2 to 1.7 times faster. Half as much is still found in the L3, and was 1.5 times slower."""
_SPAN_NBYTES: Final = SPAN_DTYPE.itemsize
_SLOTS_NBYTES: Final = 8 * N_SLOTS
_KERN_NBYTES: Final = 8 * N_KERN_WORDS


def _field(name: str) -> int:
    assert STEP_DTYPE.fields is not None
    return int(STEP_DTYPE.fields[name][1])


_OP, _PEER_AT, _CHANNEL, _VALUE = _field("op"), _field("peer"), _field("channel"), _field("value")
_COUNT, _FLAGS, _SRC, _DST, _ARRAY = _field("count"), _field("flags"), _field("src"), _field("dst"), _field("array")
_N_SRC_WIRE, _N_SRC_ARRAY = _field("n_src_wire"), _field("n_src_array")
_N_DST_WIRE, _N_DST_ARRAY = _field("n_dst_wire"), _field("n_dst_array")

_COMBINE, _COPY, _PUT, _GET = int(StepOp.COMBINE), int(StepOp.COPY), int(StepOp.PUT), int(StepOp.GET)
_SIGNAL, _WAIT = int(StepOp.SIGNAL), int(StepOp.WAIT)
_STAGE, _INLINE = int(Buffer.STAGE), int(Buffer.INLINE)

_RANK, _SIZE, _PROGRAM, _SPANS = 8 * int(Ctx.RANK), 8 * int(Ctx.SIZE), 8 * int(Ctx.PROGRAM), 8 * int(Ctx.SPANS)
_BUFFERS, _N_COLUMNS, _BASES = 8 * int(Ctx.BUFFERS), 8 * int(Ctx.N_COLUMNS), 8 * int(Ctx.BASES)
_CHANNELS, _TABLE, _PEER = 8 * int(Ctx.CHANNELS), 8 * int(Ctx.TABLE), 8 * int(Ctx.PEER)
_POINTERS, _COUNTS, _NEXT_PEERS = 8 * int(Ctx.POINTERS), 8 * int(Ctx.COUNTS), 8 * int(Ctx.NEXT_PEERS)
_KERNELS = 8 * int(Prog.KERNELS)
_KERN_COMBINE, _ITEMSIZE = 8 * int(Kern.COMBINE), 8 * int(Kern.ITEMSIZE)
_WIRE_ITEMSIZE, _ARGS = 8 * int(Kern.WIRE_ITEMSIZE), 8 * int(Kern.ARGS)
_STATE, _PUT_SLOT, _POLL_SLOT, _GET_SLOT = 8 * int(Slot.STATE), 8 * int(Slot.PUT), 8 * int(Slot.POLL), 8 * int(Slot.GET)


@njit
def _itemsize(kern: int, buffer: int) -> int:
    # A plan may use STAGE without a wire dtype: then the two sizes are equal.
    return load64(kern + _WIRE_ITEMSIZE) if buffer == _STAGE or buffer == _INLINE else load64(kern + _ITEMSIZE)


@njit
def _base(ctx: int, rank: int, buffer: int) -> int:
    return load64(load64(ctx + _BUFFERS) + 8 * (rank * load64(ctx + _N_COLUMNS) + buffer))


@njit
def _address(ctx: int, kern: int, spans: int, index: int) -> int:
    span = spans + index * _SPAN_NBYTES
    buffer = load64(span + 8)
    return _base(ctx, load64(span), buffer) + load64(span + 16) * _itemsize(kern, buffer)


@njit
def _combine(ctx: int, row: int, kern: int, spans: int) -> int:
    pointers, counts = load64(ctx + _POINTERS), load64(ctx + _COUNTS)
    n_src_wire, n_src_array = load64(row + _N_SRC_WIRE), load64(row + _N_SRC_ARRAY)
    n_dst_wire, n_dst_array = load64(row + _N_DST_WIRE), load64(row + _N_DST_ARRAY)
    src, dst = load64(row + _SRC), load64(row + _DST)
    n_src = n_src_wire + n_src_array
    for i in range(n_src):
        store64(pointers + 8 * i, _address(ctx, kern, spans, src + i))
    for i in range(n_dst_wire + n_dst_array):
        store64(pointers + 8 * (n_src + i), _address(ctx, kern, spans, dst + i))
    store64(counts, n_src_wire)
    store64(counts + 8, n_src_array)
    store64(counts + 16, n_dst_wire)
    store64(counts + 24, n_dst_array)
    flags, count = load64(row + _FLAGS), load64(row + _COUNT)
    stages = load64(spans + dst * _SPAN_NBYTES + 8) == _STAGE
    nbytes = count * _itemsize(kern, _STAGE) if stages else 0
    streamed = stages and streams(ctx, load64(pointers + 8 * n_src), nbytes)
    store64(counts + 32, flags | STREAMED if streamed else flags)
    # A row of one source packs what is this rank's own: its time is that of its stores.
    since_ns = started_ns(ctx, nbytes) if n_src == 1 and not streamed else 0
    call4(load64(kern + _KERN_COMBINE), pointers, counts, count, load64(kern + _ARGS))
    if streamed:
        end_streamed(ctx)
    else:
        note(ctx, nbytes, since_ns)
    return DID


@njit
def _put(ctx: int, row: int, kern: int, spans: int) -> int:
    peer, channel = load64(row + _PEER_AT), load64(row + _CHANNEL)
    far = spans + load64(row + _DST) * _SPAN_NBYTES
    buffer = load64(far + 8)
    offset = load64(far + 16) * _itemsize(kern, buffer)
    base = _base(ctx, peer, buffer)
    dst = base + offset if base != 0 else 0
    src = _address(ctx, kern, spans, load64(row + _SRC))
    nbytes = load64(row + _COUNT) * _itemsize(kern, buffer)
    # Signals of a plan over cross-memory attach go through the transport's own table: attaching has none.
    table = load64(ctx + _TABLE) if channel < 0 else load64(ctx + _CHANNELS)
    slots = table + peer * _SLOTS_NBYTES
    code = call8(load64(slots + _PUT_SLOT), load64(slots + _STATE), peer, channel, src, dst, buffer, offset, nbytes)
    return _ended(ctx, peer, code)


@njit
def _get(ctx: int, row: int, kern: int, spans: int) -> int:
    peer = load64(row + _PEER_AT)
    near = spans + load64(row + _DST) * _SPAN_NBYTES
    nbytes = load64(row + _COUNT) * _itemsize(kern, load64(near + 8))
    dst = _address(ctx, kern, spans, load64(row + _DST))
    src = _address(ctx, kern, spans, load64(row + _SRC))
    slots = load64(ctx + _TABLE) + peer * _SLOTS_NBYTES
    return _ended(ctx, peer, call5(load64(slots + _GET_SLOT), load64(slots + _STATE), peer, dst, src, nbytes))


@njit
def _ended(ctx: int, peer: int, code: int) -> int:
    if code < 0:
        store64(ctx + _PEER, peer)
        return code
    return BLOCKED if code == AGAIN else DID


@njit
def _signal_one(ctx: int, peer: int, channel: int) -> int:
    slots = load64(ctx + _CHANNELS) + peer * _SLOTS_NBYTES
    code = call8(load64(slots + _PUT_SLOT), load64(slots + _STATE), peer, channel, 0, 0, 0, 0, 0)
    return _ended(ctx, peer, code)


@njit
def arrived(ctx: int, peer: int, channel: int, value: int) -> int:
    """Whether `value` arrivals of this call have come from `peer`: DID, BLOCKED, or a negative fault."""
    slots = load64(ctx + _CHANNELS) + peer * _SLOTS_NBYTES
    total = call3(load64(slots + _POLL_SLOT), load64(slots + _STATE), peer, channel)
    if total < 0:
        return _ended(ctx, peer, total)
    return DID if total >= load64(load64(ctx + _BASES) + 8 * (peer * N_CHANNELS + channel)) + value else BLOCKED


@njit
def _everyone(ctx: int, row: int, lane: int, is_wait: bool) -> int:
    # A row for everyone may be blocked half-way (a full socket): it must not start over, signals would count twice.
    place = load64(ctx + _NEXT_PEERS) + 8 * lane
    own, channel, value = load64(ctx + _RANK), load64(row + _CHANNEL), load64(row + _VALUE)
    for peer in range(load64(place), load64(ctx + _SIZE)):
        if peer != own:
            code = arrived(ctx, peer, channel, value) if is_wait else _signal_one(ctx, peer, channel)
            if code != DID:
                store64(place, peer)
                return code
    store64(place, 0)
    return DID


@njit
def waits_for(ctx: int, row: int, peer: int) -> int:
    """1 where this row, at which a lane stands, needs `peer` to go on: to signal, or to take what is sent to it."""
    op, of = load64(row + _OP), load64(row + _PEER_AT)
    if (of != peer and of >= 0) or (op != _WAIT and op != _PUT and op != _SIGNAL):
        return 0
    if op != _WAIT:
        return 1
    return 1 if arrived(ctx, peer, load64(row + _CHANNEL), load64(row + _VALUE)) != DID else 0


@njit
def step(ctx: int, row: int, lane: int) -> int:
    """Runs the row at this address: DID, BLOCKED, or a negative fault."""
    op = load64(row + _OP)
    if op == _WAIT or op == _SIGNAL:
        peer = load64(row + _PEER_AT)
        if peer < 0:
            return _everyone(ctx, row, lane, op == _WAIT)
        if op == _WAIT:
            return arrived(ctx, peer, load64(row + _CHANNEL), load64(row + _VALUE))
        return _signal_one(ctx, peer, load64(row + _CHANNEL))
    return work(ctx, row, load64(ctx + _SPANS))


@njit
def work(ctx: int, row: int, spans: int) -> int:
    """Runs a row that moves or combines bytes."""
    op = load64(row + _OP)
    kern = load64(load64(ctx + _PROGRAM) + _KERNELS) + load64(row + _ARRAY) * _KERN_NBYTES
    if op == _COMBINE:
        return _combine(ctx, row, kern, spans)
    if op == _PUT:
        return _put(ctx, row, kern, spans)
    if op == _GET:
        return _get(ctx, row, kern, spans)
    dst = spans + load64(row + _DST) * _SPAN_NBYTES
    buffer = load64(dst + 8)
    nbytes = load64(row + _COUNT) * _itemsize(kern, buffer)
    src, to = _address(ctx, kern, spans, load64(row + _SRC)), _address(ctx, kern, spans, load64(row + _DST))
    if buffer == _STAGE:
        fill(ctx, to, src, nbytes)
    elif nbytes < _LONG_NBYTES:
        copy(to, src, nbytes)
    else:
        stream(to, src, nbytes)
        drain_streams()
    return DID
