"""Owns what arrives, as compiled code: completions are taken from the queue, messages opened in their order."""

from __future__ import annotations

from gfkernels.native.jit import njit
from gfkernels.native.libc import copy, memcpy
from gfkernels.native.memory import call3, load32, load64, store64
from gfkernels.transport.table import Fault
from gfkernels.transport.verbs import layout as v
from gfkernels.transport.verbs import words as w
from gfkernels.transport.verbs.post import fail, give_back
from gfkernels.types import N_BUFFERS, N_CHANNELS

_PEER_LOST, _MISMATCH = int(Fault.PEER_LOST), int(Fault.MISMATCH)
_PROTOCOL, _SYSTEM = int(Fault.PROTOCOL), int(Fault.SYSTEM)
_TAKEN, _LATER = 1, 0


@njit
def poll_all(link: int) -> int:
    """Takes completions of all links that share this one's queue. How many, or -Fault of this link."""
    total = 0
    while True:
        wcs = load64(link + w.WCS)
        n = (call3(load64(link + w.POLL_CQ), load64(link + w.CQ), w.POLL_BATCH, wcs) << 32) >> 32
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
    arrived = load64(link + w.ARRIVED)
    if arrived - load64(link + w.OPENED) >= w.DEPTH:
        fail(link, _PROTOCOL, w.REASON_OVERRUN, w.DEPTH, w.DEPTH + 1)
        return
    imm = load32(wc + v.WC_IMM) & 0xFFFFFFFF
    if imm & w.IMM_KIND_MASK == w.IMM_CREDIT:
        # Whatever waits in front of it: held messages would else keep us from sending what ends the call.
        store64(link + w.GRANTED, load64(link + w.GRANTED) + (imm >> w.IMM_CALL_SHIFT))
    elif imm & w.IMM_KIND_MASK == w.IMM_FRAME:
        # Before what is behind it in the queue: the end of the peer's queue pair is no fault from now on.
        at = load64(link + w.SLOTS_AT) + arrived % w.DEPTH * load64(link + w.SLOT_NBYTES)
        if load64(at + w.F_MAGIC) == w.MAGIC_WORD and load64(at + w.F_KIND) == w.KIND_GOODBYE:
            store64(link + w.LEFT_CALL, load64(at + w.F_SEQUENCE))
            store64(link + w.LEFT, 1)
    store64(load64(link + w.QUEUE) + 8 * (arrived % w.DEPTH), imm)
    store64(link + w.ARRIVED, arrived + 1)


@njit
def _failed(link: int, status: int, vendor: int) -> None:
    # A peer that left in order takes its queue pair with it; what is flushed followed an earlier error.
    if load64(link + w.LEFT) != 0 or (status == v.STATUS_FLUSHED and load64(link + w.FAULT) != 0):
        return
    lost = status == v.STATUS_RETRY_EXCEEDED or status == v.STATUS_RNR_RETRY_EXCEEDED
    store64(link + w.FAULT_VENDOR, vendor)
    fail(link, _PEER_LOST if lost else _SYSTEM, w.REASON_STATUS, 0, status)


@njit
def open_messages(link: int) -> int:
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
def _arrived(link: int, channel: int) -> None:
    at = link + w.ARRIVALS + 8 * channel
    store64(at, load64(at) + 1)


@njit
def _open_short(link: int, imm: int, kind: int) -> int:
    """A SIGNAL or WRITE: all it says is in the immediate."""
    call = load64(link + w.CALL)
    half = w.CALL_PERIOD // 2
    sequence = call + ((imm >> w.IMM_CALL_SHIFT) - call + half) % w.CALL_PERIOD - half
    if sequence > call:
        return _LATER
    channel = (imm >> w.IMM_CHANNEL_SHIFT) & w.IMM_CHANNEL_MASK
    if sequence > load64(link + w.VERIFIED_CALL):
        return fail(link, _PROTOCOL, w.REASON_UNSIGNED, call, sequence)
    if kind == w.IMM_WRITE and (sequence < call or load64(link + w.LANDING) == 0):
        return fail(link, _PROTOCOL, w.REASON_LATE, call, sequence)
    if channel < N_CHANNELS:
        _arrived(link, channel)
    elif channel != w.IMM_CHANNEL_MASK:
        return fail(link, _PROTOCOL, w.REASON_CHANNEL, N_CHANNELS, channel)
    return _TAKEN


@njit
def _open_frame(link: int, at: int) -> int:
    if load64(at + w.F_MAGIC) != w.MAGIC_WORD:
        return fail(link, _PROTOCOL, w.REASON_MAGIC, w.MAGIC_WORD, load64(at + w.F_MAGIC))
    kind, sequence = load64(at + w.F_KIND), load64(at + w.F_SEQUENCE)
    if kind == w.KIND_PROBE:
        store64(link + w.PROBED, 1)
        return _TAKEN
    if kind == w.KIND_GOODBYE:
        return _TAKEN
    call = load64(link + w.CALL)
    if sequence > call:
        return _LATER
    signature = load64(at + w.F_SIGNATURE)
    signed = load64(link + w.SIGNATURES) + 16 * (sequence % w.N_SIGNATURES)
    if sequence >= 0 and load64(signed) == sequence and load64(signed + 8) != signature:
        store64(link + w.FAULT_CALL, sequence)
        return fail(link, _MISMATCH, w.REASON_SIGNATURE, load64(signed + 8), signature)
    if sequence > load64(link + w.VERIFIED_CALL):
        store64(link + w.VERIFIED_CALL, sequence)
    nbytes = load64(at + w.F_NBYTES)
    if kind == w.KIND_ANNOUNCE:
        if nbytes == w.ANNOUNCE_NBYTES and sequence == call:
            memcpy(load64(link + w.FAR), at + w.HEADER_NBYTES, nbytes)
            store64(link + w.FAR_CALL, sequence)
        return _TAKEN
    channel = load64(at + w.F_CHANNEL)
    if channel < -1 or channel >= N_CHANNELS:
        return fail(link, _PROTOCOL, w.REASON_CHANNEL, N_CHANNELS, channel)
    if nbytes != 0:
        code = _land(link, at, nbytes, sequence, call, kind)
        if code < 0:
            return code
    if channel >= 0 and kind == w.KIND_DATA:
        _arrived(link, channel)
    return _TAKEN


@njit
def _land(link: int, at: int, nbytes: int, sequence: int, call: int, kind: int) -> int:
    if sequence < call or load64(link + w.LANDING) == 0:
        return fail(link, _PROTOCOL, w.REASON_LATE, call, sequence)
    buffer = load64(at + w.F_BUFFER)
    if buffer < 0 or buffer >= N_BUFFERS:
        return fail(link, _PROTOCOL, w.REASON_BUFFER, N_BUFFERS, buffer)
    row = load64(link + w.BUFFERS) + 16 * buffer
    offset, space = load64(at + w.F_OFFSET), load64(row + 8)
    # Subtracted, not added: the sum of two words that a peer chose could wrap around.
    if offset < 0 or nbytes < 0 or offset > space or nbytes > space - offset or load64(row) == 0:
        return fail(link, _PROTOCOL, w.REASON_BOUNDS, space, offset + nbytes)
    if kind == w.KIND_WANT:
        return _TAKEN
    if nbytes > load64(link + w.PAYLOAD_NBYTES):
        return fail(link, _PROTOCOL, w.REASON_BOUNDS, load64(link + w.PAYLOAD_NBYTES), nbytes)
    copy(load64(row) + offset, at + w.HEADER_NBYTES, nbytes)
    return _TAKEN
