"""Owns what arrives, as compiled code: completions are taken from the queue, messages opened in their order."""

from __future__ import annotations

from gfkernels.native.jit import njit
from gfkernels.native.libc import copy, memcpy
from gfkernels.native.memory import call3, load32, load64, store64
from gfkernels.transport import framed as c
from gfkernels.transport.framed_code import arrived, check_channel, check_magic, check_signature, fail, landing_place
from gfkernels.transport.table import Fault
from gfkernels.transport.verbs import layout as v
from gfkernels.transport.verbs import words as w
from gfkernels.transport.verbs.post import as_int32, give_back
from gfkernels.types import N_CHANNELS

_PEER_LOST, _PROTOCOL, _SYSTEM = int(Fault.PEER_LOST), int(Fault.PROTOCOL), int(Fault.SYSTEM)
_TAKEN, _LATER = 1, 0


@njit
def _poll_all(link: int) -> int:
    """Takes completions of all links that share this one's queue. How many, or -Fault of this link."""
    total = 0
    while True:
        wcs = load64(link + w.WCS)
        n = as_int32(call3(load64(link + w.POLL_CQ), load64(link + w.CQ), w.POLL_BATCH, wcs))
        if n < 0:
            return fail(link, _SYSTEM, w.REASON_POLL, 0, n)
        for i in range(n):
            _complete(load64(link + w.LINKS), wcs + i * v.WC_NBYTES)
        total += n
        if n < w.POLL_BATCH:
            return total


@njit
def _complete(links: int, wc: int) -> None:
    number = load64(wc + v.WC_ID)
    link = load64(links + 8 * (number >> w.ID_LINK_SHIFT))
    status = load32(wc + v.WC_STATUS)
    if status != v.STATUS_SUCCESS:
        _failed(link, status, load32(wc + v.WC_VENDOR_ERR))
        return
    if number & w.ID_RECV == 0:
        # Requests of a queue pair complete in order, so this one speaks for those that did not ask.
        done = number & w.ID_NUMBER_MASK
        if done + 1 > load64(link + w.DONE):
            store64(link + w.DONE, done + 1)
        return
    message = load64(link + w.ARRIVED)
    if message - load64(link + w.OPENED) >= w.DEPTH:
        fail(link, _PROTOCOL, w.REASON_OVERRUN, w.DEPTH, w.DEPTH + 1)
        return
    imm = load32(wc + v.WC_IMM) & 0xFFFFFFFF
    if imm & w.IMM_KIND_MASK == w.IMM_CREDIT:
        # Whatever waits in front of it: held messages would else keep us from sending what ends the call.
        store64(link + w.GRANTED, load64(link + w.GRANTED) + (imm >> w.IMM_CALL_SHIFT))
    elif imm & w.IMM_KIND_MASK == w.IMM_FRAME:
        # Before what is behind it in the queue: the end of the peer's queue pair is no fault from now on.
        at = load64(link + w.SLOTS_AT) + message % w.DEPTH * load64(link + w.SLOT_NBYTES)
        if load64(at + c.MAGIC) == w.MAGIC_WORD and load64(at + c.KIND) == w.KIND_GOODBYE:
            store64(link + c.LEFT_CALL, load64(at + c.SEQUENCE))
            store64(link + c.LEFT, 1)
    store64(load64(link + w.QUEUE) + 8 * (message % w.DEPTH), imm)
    store64(link + w.ARRIVED, message + 1)


@njit
def _failed(link: int, status: int, vendor: int) -> None:
    # A peer that left in order takes its queue pair with it; what is flushed followed an earlier error.
    if load64(link + c.LEFT) != 0 or (status == v.STATUS_FLUSHED and load64(link + c.FAULT) != 0):
        return
    lost = status == v.STATUS_RETRY_EXCEEDED or status == v.STATUS_RNR_RETRY_EXCEEDED
    store64(link + w.FAULT_VENDOR, vendor)
    fail(link, _PEER_LOST if lost else _SYSTEM, w.REASON_STATUS, 0, status)


@njit
def _open_messages(link: int) -> int:
    """Opens what has arrived, as far as it belongs to this call or an earlier one. How many, or -Fault."""
    opened = 0
    while load64(link + w.OPENED) < load64(link + w.ARRIVED):
        number = load64(link + w.OPENED)
        imm = load64(load64(link + w.QUEUE) + 8 * (number % w.DEPTH))
        kind = imm & w.IMM_KIND_MASK
        taken = _TAKEN
        if kind == w.IMM_FRAME:
            taken = _open_frame(link, load64(link + w.SLOTS_AT) + number % w.DEPTH * load64(link + w.SLOT_NBYTES))
        elif kind != w.IMM_CREDIT:
            taken = _open_short(link, imm, kind)
        if taken < 0:
            return taken
        if taken == _LATER:
            break
        store64(link + w.OPENED, number + 1)
        store64(link + w.UNPOSTED, load64(link + w.UNPOSTED) + 1)
        opened += 1
    code = give_back(link)
    return code if code < 0 else opened


@njit
def take_in(link: int) -> int:
    """Polls, and opens what has come. How many things happened, or -Fault."""
    polled = _poll_all(link)
    if polled < 0:
        return polled
    opened = _open_messages(link)
    return opened if opened < 0 else polled + opened


@njit
def _open_short(link: int, imm: int, kind: int) -> int:
    """A SIGNAL or WRITE: all it says is in the immediate."""
    call = load64(link + c.CALL)
    half = w.CALL_PERIOD // 2
    sequence = call + ((imm >> w.IMM_CALL_SHIFT) - call + half) % w.CALL_PERIOD - half
    if sequence > call:
        return _LATER
    channel = (imm >> w.IMM_CHANNEL_SHIFT) & w.IMM_CHANNEL_MASK
    if sequence > load64(link + w.VERIFIED_CALL):
        return fail(link, _PROTOCOL, w.REASON_UNSIGNED, call, sequence)
    if kind == w.IMM_WRITE and (sequence < call or load64(link + c.LANDING) == 0):
        return fail(link, _PROTOCOL, c.REASON_LATE, call, sequence)
    if channel < N_CHANNELS:
        arrived(link, channel)
    elif channel != w.IMM_CHANNEL_MASK:
        return fail(link, _PROTOCOL, c.REASON_CHANNEL, N_CHANNELS, channel)
    return _TAKEN


@njit
def _open_frame(link: int, at: int) -> int:
    code = check_magic(link, at, w.MAGIC_WORD)
    if code < 0:
        return code
    kind, sequence = load64(at + c.KIND), load64(at + c.SEQUENCE)
    if kind == w.KIND_PROBE:
        store64(link + w.PROBED, 1)
        return _TAKEN
    if kind == w.KIND_GOODBYE:
        return _TAKEN
    call = load64(link + c.CALL)
    if sequence > call:
        return _LATER
    code = check_signature(link, at)
    if code < 0:
        return code
    if sequence > load64(link + w.VERIFIED_CALL):
        store64(link + w.VERIFIED_CALL, sequence)
    nbytes = load64(at + c.NBYTES)
    if kind == w.KIND_ANNOUNCE:
        if nbytes == w.ANNOUNCE_NBYTES and sequence == call:
            memcpy(load64(link + w.FAR), at + c.HEADER_NBYTES, nbytes)
            store64(link + w.FAR_CALL, sequence)
        return _TAKEN
    code = check_channel(link, at)
    if code < 0:
        return code
    if nbytes != 0:
        code = _land(link, at, nbytes, kind)
        if code < 0:
            return code
    if kind == w.KIND_DATA:
        arrived(link, load64(at + c.CHANNEL))
    return _TAKEN


@njit
def _land(link: int, at: int, nbytes: int, kind: int) -> int:
    place = landing_place(link, at)
    if place < 0 or kind == w.KIND_WANT:
        return place
    if nbytes > load64(link + w.PAYLOAD_NBYTES):
        return fail(link, _PROTOCOL, c.REASON_BOUNDS, load64(link + w.PAYLOAD_NBYTES), nbytes)
    copy(place, at + c.HEADER_NBYTES, nbytes)
    return _TAKEN
