"""Owns posting as compiled code: work requests in batches, frames, credits, receives, and the first fault of a link."""

from __future__ import annotations

from typing import Final

from gfkernels.native.jit import njit
from gfkernels.native.libc import memcpy
from gfkernels.native.memory import call3, load64, store32, store64
from gfkernels.transport import framed as c
from gfkernels.transport.framed_code import fail, write_header
from gfkernels.transport.table import Fault
from gfkernels.transport.verbs import layout as v
from gfkernels.transport.verbs import words as w

BATCH_SLOT_NBYTES: Final = v.SEND_WR_NBYTES + 64
"""A work request and its scatter element, a cache line each."""
_SYSTEM = int(Fault.SYSTEM)


@njit
def as_int32(value: int) -> int:
    """What a C function returned: an int leaves the upper half of the register undefined."""
    return (value << 32) >> 32


@njit
def post(link: int) -> int:
    """Posts what is pending. Work requests posted, or -Fault."""
    pending = load64(link + w.PENDING)
    if pending == 0:
        return 0
    first = load64(link + w.BATCH_AT)
    store64(first + (pending - 1) * BATCH_SLOT_NBYTES + v.WR_NEXT, 0)
    store64(link + w.PENDING, 0)
    code = as_int32(call3(load64(link + w.POST_SEND), load64(link + w.QP), first, link + w.BAD_WR))
    if code != 0:
        return fail(link, _SYSTEM, w.REASON_POST, 0, code)
    store64(link + c.MOVED, load64(link + c.MOVED) + pending)
    return pending


@njit
def room(link: int, reserve: int) -> bool:
    """Whether one more message, or write without one, can be added now."""
    if load64(link + w.SENT) >= load64(link + w.GRANTED) - reserve:
        return False
    return load64(link + w.POSTED) - load64(link + w.DONE) < w.SEND_DEPTH


@njit
def add(
    link: int, opcode: int, flags: int, imm: int, src: int, nbytes: int, lkey: int, dst: int, rkey: int, signalled: bool
) -> int:
    """Adds a work request to the batch, which is posted when it is full. Its number plus one, or -Fault."""
    number = load64(link + w.POSTED)
    if signalled or number + 1 - load64(link + w.SIGNALLED) >= w.SIGNAL_EVERY:
        flags |= v.SEND_SIGNALED
        store64(link + w.SIGNALLED, number + 1)
    at = load64(link + w.BATCH_AT) + load64(link + w.PENDING) * BATCH_SLOT_NBYTES
    element = at + v.SEND_WR_NBYTES
    store64(element + v.SGE_ADDR, src)
    store32(element + v.SGE_LENGTH, nbytes)
    store32(element + v.SGE_LKEY, lkey)
    store64(at + v.WR_ID, (load64(link + w.INDEX) << w.ID_LINK_SHIFT) | (number & w.ID_NUMBER_MASK))
    store64(at + v.WR_NEXT, at + BATCH_SLOT_NBYTES)
    store64(at + v.WR_SG_LIST, element)
    store32(at + v.WR_NUM_SGE, 1 if nbytes > 0 else 0)
    store32(at + v.WR_OPCODE, opcode)
    store32(at + v.WR_SEND_FLAGS, flags)
    store32(at + v.WR_IMM, imm)
    store64(at + v.WR_REMOTE_ADDR, dst)
    store32(at + v.WR_RKEY, rkey)
    store64(link + w.POSTED, number + 1)
    pending = load64(link + w.PENDING) + 1
    store64(link + w.PENDING, pending)
    if pending == w.BATCH:
        code = post(link)
        if code < 0:
            return code
    return number + 1


@njit
def immediate(link: int, kind: int, channel: int) -> int:
    """The 32 bits of a message of the running call."""
    call = load64(link + c.CALL) % w.CALL_PERIOD
    return kind | ((channel & w.IMM_CHANNEL_MASK) << w.IMM_CHANNEL_SHIFT) | (call << w.IMM_CALL_SHIFT)


@njit
def add_message(link: int, imm: int, src: int, nbytes: int, lkey: int, dst: int, rkey: int, signalled: bool) -> int:
    """Adds a write with immediate; the caller has seen that there is room. The request's number plus one, or -Fault."""
    store64(link + w.SENT, load64(link + w.SENT) + 1)
    flags = v.SEND_INLINE if 0 < nbytes <= load64(link + w.INLINE_NBYTES) else 0
    return add(link, v.OPCODE_WRITE_WITH_IMM, flags, imm, src, nbytes, lkey, dst, rkey, signalled)


@njit
def add_frame(link: int, kind: int, channel: int, buffer: int, offset: int, src: int, nbytes: int) -> int:
    """Adds a frame with a copy of `nbytes` from `src` (0: that only speaks of them); there is room.

    The request's number plus one, or -Fault.
    """
    slot = load64(link + w.SENT) % w.DEPTH * load64(link + w.SLOT_NBYTES)
    at = load64(link + w.FRAMES_AT) + slot
    write_header(at, link, w.MAGIC_WORD, kind, channel, buffer, offset, nbytes)
    carried = nbytes if src != 0 else 0
    if carried > 0:
        memcpy(at + c.HEADER_NBYTES, src, carried)
    if kind != w.KIND_GOODBYE and kind != w.KIND_PROBE:
        store64(link + w.FRAMED_CALL, load64(link + c.CALL))
    return add_message(
        link,
        immediate(link, w.IMM_FRAME, channel),
        at,
        c.HEADER_NBYTES + carried,
        load64(link + w.FRAMES_LKEY),
        load64(link + w.FAR_FRAMES) + slot,
        load64(link + w.FAR_FRAMES_RKEY),
        kind == w.KIND_GOODBYE,  # closing waits until it has been received
    )


@njit
def give_back(link: int) -> int:
    """Posts receives again in batches and tells the peer of them in larger ones. 0, or -Fault."""
    while load64(link + w.UNPOSTED) >= w.REPOST_EVERY:
        code = as_int32(
            call3(load64(link + w.POST_RECV), load64(link + w.QP), load64(link + w.RECVS_AT), link + w.BAD_WR)
        )
        if code != 0:
            return fail(link, _SYSTEM, w.REASON_POST, 0, code)
        store64(link + w.UNPOSTED, load64(link + w.UNPOSTED) - w.REPOST_EVERY)
        store64(link + w.OWED, load64(link + w.OWED) + w.REPOST_EVERY)
    owed = load64(link + w.OWED)
    if owed >= w.RETURN_EVERY and room(link, 0):
        store64(link + w.OWED, 0)
        code = add_message(link, w.IMM_CREDIT | (owed << w.IMM_CALL_SHIFT), 0, 0, 0, 0, 0, False)
        if code < 0:
            return code
    return 0


@njit
def find_region(link: int, address: int, nbytes: int, key: int) -> int:
    """The lkey (`key` 0) or rkey (`key` 1) of the registered memory that holds these bytes, or -1."""
    regions = load64(link + w.REGIONS)
    for i in range(load64(regions)):
        row = regions + 8 + 32 * i
        if load64(row) <= address and address + nbytes <= load64(row + 8):
            return load64(row + 16 + 8 * key)
    return -1
