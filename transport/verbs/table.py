"""Owns the C functions of the verbs transport's table, as `Slot` describes them, over the links of a peer's row."""

from __future__ import annotations

from typing import Final

from numba import types

from gfkernels.native.jit import cfunc, njit
from gfkernels.native.memory import load64, store64
from gfkernels.transport import framed as c
from gfkernels.transport.framed_code import begin_call, check_left, check_put, fail
from gfkernels.transport.table import AGAIN, OK, Fault
from gfkernels.transport.verbs import words as w
from gfkernels.transport.verbs.arrive import take_in
from gfkernels.transport.verbs.post import find_region, room
from gfkernels.transport.verbs.send import announce, blocked, let_out, put_payload, put_signal, say
from gfkernels.types import N_BUFFERS

_I64 = types.int64
_PROTOCOL: Final = int(Fault.PROTOCOL)


@njit
def _link(row: int, channel: int) -> int:
    # A lane has one rail: rails do not know of one another's order, and a lane's messages must keep theirs.
    return load64(row + w.ROW_LINKS + 8 * ((max(channel, 0) >> 1) % load64(row + w.ROW_N_LINKS)))


@njit
def _plan_announcement(link: int, buffers: int) -> None:
    """Writes down where this call's buffers are, if a put to one of them may need more than a frame."""
    largest = 0
    for buffer in range(N_BUFFERS):
        largest = max(largest, load64(buffers + 16 * buffer + 8))
    if largest <= load64(link + w.PAYLOAD_NBYTES):
        store64(link + w.ANNOUNCE_DUE, 0)
        return
    own = load64(link + w.OWN_ROWS)
    for buffer in range(N_BUFFERS):
        address, nbytes = load64(buffers + 16 * buffer), load64(buffers + 16 * buffer + 8)
        store64(own + 24 * buffer, address)
        store64(own + 24 * buffer + 8, nbytes)
        store64(own + 24 * buffer + 16, find_region(link, address, nbytes, 1) if address != 0 and nbytes > 0 else -1)
    store64(link + w.ANNOUNCE_DUE, 1)


@cfunc(_I64(*(_I64,) * 8))
def put(row: int, peer: int, channel: int, src: int, dst: int, buffer: int, offset: int, nbytes: int) -> int:
    """See `Slot.PUT`; `dst` is not used: where a buffer of the peer lies is what it has announced.

    A put with payload and no channel has no place in the order of several rails, and is refused there.
    """
    link = _link(row, channel)
    fault = check_left(link)
    if fault < 0:
        return fault
    if load64(link + c.LEFT) != 0:
        return OK  # the peer is through with this call, and needs no more of it
    fault = check_put(link, channel, nbytes)
    if fault < 0:
        return fault
    if nbytes > 0 and channel < 0 and load64(row + w.ROW_N_LINKS) > 1:
        return fail(link, _PROTOCOL, c.REASON_ARGUMENT, 0, nbytes)
    if nbytes > 0:
        return put_payload(link, channel, src, buffer, offset, nbytes)
    if channel < 0:
        return OK
    return put_signal(link, channel)


@cfunc(_I64(_I64, _I64, _I64))
def poll(row: int, peer: int, channel: int) -> int:
    """See `Slot.POLL`. Asks no queue: PROGRESS does."""
    link = _link(row, channel)
    fault = check_left(link)
    return fault if fault < 0 else load64(link + c.ARRIVALS + 8 * channel)


@cfunc(_I64(_I64))
def progress(row: int) -> int:
    """See `Slot.PROGRESS`."""
    moved = 0
    for i in range(load64(row + w.ROW_N_LINKS)):
        link = load64(row + w.ROW_LINKS + 8 * i)
        code = -load64(link + c.FAULT)
        if code < 0:
            return code
        code = take_in(link)
        if code < 0:
            return code
        moved += code
        code = let_out(link)
        if code < 0:
            return code
        moved += load64(link + c.MOVED)
        store64(link + c.MOVED, 0)
    return moved


@cfunc(_I64(_I64, _I64, _I64, _I64))
def begin(row: int, sequence: int, signature: int, buffers: int) -> int:
    """See `Slot.BEGIN`. A buffer that is long enough for it is announced to the peer."""
    for i in range(load64(row + w.ROW_N_LINKS)):
        link = load64(row + w.ROW_LINKS + 8 * i)
        code = begin_call(link, sequence, signature, buffers)
        if code < 0:
            return code
        _plan_announcement(link, buffers)
        code = announce(link)
        if code < 0:
            return code
    return OK


@cfunc(_I64(_I64))
def flush(row: int) -> int:
    """See `Slot.FLUSH`. After OK no payload lands until the next BEGIN."""
    for i in range(load64(row + w.ROW_N_LINKS)):
        link = load64(row + w.ROW_LINKS + 8 * i)
        fault = -load64(link + c.FAULT)
        if fault < 0:
            return fault
        code = let_out(link)
        if code < 0:
            return code
        if load64(link + w.ANNOUNCE_DUE) != 0:
            return blocked(link)
        store64(link + c.LANDING, 0)
    return OK


@cfunc(_I64(_I64))
def goodbye(row: int) -> int:
    """Sends the goodbye on all links; OK | AGAIN | -Fault. Nothing may be put afterwards, and it is called once."""
    for i in range(load64(row + w.ROW_N_LINKS)):
        link = load64(row + w.ROW_LINKS + 8 * i)
        fault = -load64(link + c.FAULT)
        if fault < 0:
            return fault
        if not room(link, 0):
            return blocked(link) if i == 0 else AGAIN
        code = say(link, w.KIND_GOODBYE)
        if code < 0:
            return code
    return OK


@cfunc(_I64(_I64))
def probe(row: int) -> int:
    """Sends the probe on all links, before anything else is put; OK | -Fault. To be called once."""
    for i in range(load64(row + w.ROW_N_LINKS)):
        link = load64(row + w.ROW_LINKS + 8 * i)
        code = say(link, w.KIND_PROBE)
        if code < 0:
            return code
    return OK
