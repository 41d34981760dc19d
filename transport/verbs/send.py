"""Owns putting as compiled code: short spans and unregistered memory in frames, the rest straight into place."""

from __future__ import annotations

from gfkernels.native.jit import njit
from gfkernels.native.memory import load64, store64
from gfkernels.transport import framed as c
from gfkernels.transport.framed_code import fail
from gfkernels.transport.table import AGAIN, OK, Fault
from gfkernels.transport.verbs import words as w
from gfkernels.transport.verbs.arrive import take_in
from gfkernels.transport.verbs.layout import OPCODE_WRITE
from gfkernels.transport.verbs.post import add, add_frame, add_message, find_region, immediate, post, room
from gfkernels.types import N_BUFFERS, N_CHANNELS

_PROTOCOL = int(Fault.PROTOCOL)
_RESERVE = w.RESERVE


@njit
def blocked(link: int) -> int:
    """What a put answers that cannot go on, after it has let the link work: AGAIN, or -Fault."""
    code = post(link)
    if code < 0:
        return code
    code = take_in(link)
    return code if code < 0 else AGAIN


@njit
def announce(link: int) -> int:
    """Sends the announcement that is due, if there is room. 0, or -Fault."""
    if load64(link + w.ANNOUNCE_DUE) == 0 or not room(link, _RESERVE):
        return 0
    store64(link + w.ANNOUNCE_DUE, 0)
    code = add_frame(link, w.KIND_ANNOUNCE, -1, 0, 0, load64(link + w.OWN_ROWS), w.ANNOUNCE_NBYTES)
    return min(code, 0)


@njit
def let_out(link: int) -> int:
    """Sends the announcement that is due, and posts what is pending. 0, or -Fault."""
    code = announce(link)
    return code if code < 0 else min(post(link), 0)


@njit
def say(link: int, kind: int) -> int:
    """Sends a frame that is nothing but its header, at once; there is room. OK, or -Fault."""
    code = add_frame(link, kind, -1, 0, 0, 0, 0)
    if code >= 0:
        code = post(link)
    return code if code < 0 else OK


@njit
def put_signal(link: int, channel: int) -> int:
    if not room(link, _RESERVE):
        return blocked(link)
    if load64(link + w.FRAMED_CALL) != load64(link + c.CALL):
        code = add_frame(link, w.KIND_DATA, channel, 0, 0, 0, 0)
    else:
        code = add_message(link, immediate(link, w.IMM_SIGNAL, channel), 0, 0, 0, 0, 0, False)
    return code if code < 0 else OK


@njit
def put_payload(link: int, channel: int, src: int, buffer: int, offset: int, nbytes: int) -> int:
    if nbytes <= load64(link + w.PAYLOAD_NBYTES):
        if not room(link, _RESERVE):
            return blocked(link)
        code = add_frame(link, w.KIND_DATA, channel, buffer, offset, src, nbytes)
        return code if code < 0 else OK
    row = link + w.PUTS + w.PUT_NBYTES * (channel if channel >= 0 else N_CHANNELS)
    if load64(row + w.P_PHASE) == w.PHASE_NONE:
        code = _open_put(link, row, src, buffer, offset, nbytes)
        if code != OK:
            return code
    if load64(row + w.P_PHASE) == w.PHASE_FRAMES:
        return _go_on_in_frames(link, row, channel)
    return _go_on_writing(link, row, channel)


@njit
def _open_put(link: int, row: int, src: int, buffer: int, offset: int, nbytes: int) -> int:
    phase, lkey = w.PHASE_FRAMES, find_region(link, src, nbytes, 0)
    if lkey >= 0:
        if load64(link + w.FRAMED_CALL) != load64(link + c.CALL):
            if not room(link, _RESERVE):
                return blocked(link)
            code = add_frame(link, w.KIND_WANT, -1, buffer, offset, 0, nbytes)
            if code < 0:
                return code
        if load64(link + w.FAR_CALL) != load64(link + c.CALL):
            return blocked(link)
        if buffer < 0 or buffer >= N_BUFFERS or offset < 0:
            return fail(link, _PROTOCOL, c.REASON_ARGUMENT, 0, buffer if offset >= 0 else offset)
        far = load64(link + w.FAR) + 24 * buffer
        if nbytes > load64(far + 8) - offset:
            return fail(link, _PROTOCOL, w.REASON_FAR_BOUNDS, load64(far + 8), offset + nbytes)
        if load64(far + 16) >= 0:
            phase = w.PHASE_WRITE
    store64(row + w.P_SRC, src)
    store64(row + w.P_BUFFER, buffer)
    store64(row + w.P_OFFSET, offset)
    store64(row + w.P_NBYTES, nbytes)
    store64(row + w.P_MOVED, 0)
    store64(row + w.P_LKEY, lkey)
    store64(row + w.P_PHASE, phase)
    return OK


@njit
def _go_on_in_frames(link: int, row: int, channel: int) -> int:
    """Copies piece after piece into frames; the source is free with the last."""
    nbytes, most = load64(row + w.P_NBYTES), load64(link + w.PAYLOAD_NBYTES)
    moved = load64(row + w.P_MOVED)
    while moved < nbytes:
        if not room(link, _RESERVE):
            return blocked(link)
        piece = min(most, nbytes - moved)
        kind = w.KIND_DATA if moved + piece == nbytes else w.KIND_MORE
        offset = load64(row + w.P_OFFSET) + moved
        code = add_frame(link, kind, channel, load64(row + w.P_BUFFER), offset, load64(row + w.P_SRC) + moved, piece)
        if code < 0:
            return code
        moved += piece
        store64(row + w.P_MOVED, moved)
    store64(row + w.P_PHASE, w.PHASE_NONE)
    return OK


@njit
def _go_on_writing(link: int, row: int, channel: int) -> int:
    """Posts what is left of the put, the last piece with the immediate; OK once the card has read all of it."""
    nbytes, most = load64(row + w.P_NBYTES), load64(link + w.MOST_NBYTES)
    far = load64(link + w.FAR) + 24 * load64(row + w.P_BUFFER)
    moved = load64(row + w.P_MOVED)
    while moved < nbytes:
        if not room(link, _RESERVE):
            return blocked(link)
        piece = min(most, nbytes - moved)
        src, dst = load64(row + w.P_SRC) + moved, load64(far) + load64(row + w.P_OFFSET) + moved
        lkey, rkey = load64(row + w.P_LKEY), load64(far + 16)
        if moved + piece == nbytes:
            code = add_message(link, immediate(link, w.IMM_WRITE, channel), src, piece, lkey, dst, rkey, True)
            store64(row + w.P_LAST, code)
        else:
            code = add(link, OPCODE_WRITE, 0, 0, src, piece, lkey, dst, rkey, False)
        if code < 0:
            return code
        moved += piece
        store64(row + w.P_MOVED, moved)
    code = blocked(link)
    if code < 0:
        return code
    if load64(link + w.DONE) < load64(row + w.P_LAST):
        return AGAIN
    store64(row + w.P_PHASE, w.PHASE_NONE)
    return OK
