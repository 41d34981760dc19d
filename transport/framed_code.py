"""Owns how compiled code writes headers, judges what a peer sends, and keeps the common words of a record."""

from __future__ import annotations

from gfkernels.native.jit import njit
from gfkernels.native.libc import memcpy
from gfkernels.native.memory import load64, store64
from gfkernels.transport import framed as c
from gfkernels.transport.table import OK, Fault
from gfkernels.types import N_BUFFERS, N_CHANNELS

_PEER_LOST, _MISMATCH, _PROTOCOL = int(Fault.PEER_LOST), int(Fault.MISMATCH), int(Fault.PROTOCOL)


@njit
def fail(state: int, fault: int, reason: int, expected: int, got: int) -> int:
    # The first fault explains those that follow from it.
    if load64(state + c.FAULT) == 0:
        store64(state + c.FAULT, fault)
        store64(state + c.FAULT_REASON, reason)
        store64(state + c.FAULT_EXPECTED, expected)
        store64(state + c.FAULT_GOT, got)
    return -load64(state + c.FAULT)


@njit
def check_left(state: int) -> int:
    """0, or -Fault: also where the peer has left and will not join the running call."""
    if load64(state + c.LEFT) != 0 and load64(state + c.CALL) > load64(state + c.LEFT_CALL):
        return fail(state, _PEER_LOST, c.REASON_LEFT, load64(state + c.CALL), load64(state + c.LEFT_CALL))
    return -load64(state + c.FAULT)


@njit
def write_header(
    at: int, state: int, magic: int, kind: int, channel: int, buffer: int, offset: int, nbytes: int
) -> None:
    store64(at + c.MAGIC, magic)
    store64(at + c.KIND, kind)
    store64(at + c.SEQUENCE, load64(state + c.CALL))
    store64(at + c.SIGNATURE, load64(state + c.CALL_SIGNATURE))
    store64(at + c.CHANNEL, channel)
    store64(at + c.BUFFER, buffer)
    store64(at + c.OFFSET, offset)
    store64(at + c.NBYTES, nbytes)


@njit
def begin_call(state: int, sequence: int, signature: int, buffers: int) -> int:
    """Takes down a call that starts; the table of N_BUFFERS rows is copied. OK, or -Fault."""
    fault = -load64(state + c.FAULT)
    if fault < 0:
        return fault
    if sequence < load64(state + c.CALL):
        return fail(state, _PROTOCOL, c.REASON_ARGUMENT, load64(state + c.CALL), sequence)
    store64(state + c.CALL, sequence)
    store64(state + c.CALL_SIGNATURE, signature)
    signed = state + c.SIGNATURES + 16 * (sequence % c.N_SIGNATURES)
    store64(signed, sequence)
    store64(signed + 8, signature)
    memcpy(state + c.BUFFERS, buffers, 16 * N_BUFFERS)
    store64(state + c.LANDING, 1)
    return OK


@njit
def check_put(state: int, channel: int, nbytes: int) -> int:
    """0, or -Fault: this rank's own put makes no sense."""
    if channel < -1 or channel >= N_CHANNELS:
        return fail(state, _PROTOCOL, c.REASON_ARGUMENT, 0, channel)
    if nbytes < 0:
        return fail(state, _PROTOCOL, c.REASON_ARGUMENT, 0, nbytes)
    return 0


@njit
def check_magic(state: int, at: int, magic: int) -> int:
    """0, or -Fault: what lies at `at` is no header of this transport."""
    if load64(at + c.MAGIC) != magic:
        return fail(state, _PROTOCOL, c.REASON_MAGIC, magic, load64(at + c.MAGIC))
    return 0


@njit
def check_signature(state: int, at: int) -> int:
    """0, or -Fault: in the header's call, this one or an earlier one, the peer asked for something else."""
    sequence, signature = load64(at + c.SEQUENCE), load64(at + c.SIGNATURE)
    signed = state + c.SIGNATURES + 16 * (sequence % c.N_SIGNATURES)
    if sequence >= 0 and load64(signed) == sequence and load64(signed + 8) != signature:
        store64(state + c.FAULT_CALL, sequence)
        return fail(state, _MISMATCH, c.REASON_SIGNATURE, load64(signed + 8), signature)
    return 0


@njit
def check_channel(state: int, at: int) -> int:
    """0, or -Fault: the header names a channel that is none."""
    channel = load64(at + c.CHANNEL)
    if channel < -1 or channel >= N_CHANNELS:
        return fail(state, _PROTOCOL, c.REASON_CHANNEL, N_CHANNELS, channel)
    return 0


@njit
def landing_place(state: int, at: int) -> int:
    """Where the payload of the header at `at` belongs, or -Fault: it comes too late, or would be out of bounds."""
    sequence, call = load64(at + c.SEQUENCE), load64(state + c.CALL)
    if sequence < call or load64(state + c.LANDING) == 0:
        return fail(state, _PROTOCOL, c.REASON_LATE, call, sequence)
    buffer = load64(at + c.BUFFER)
    if buffer < 0 or buffer >= N_BUFFERS:
        return fail(state, _PROTOCOL, c.REASON_BUFFER, N_BUFFERS, buffer)
    row = state + c.BUFFERS + 16 * buffer
    offset, nbytes, space = load64(at + c.OFFSET), load64(at + c.NBYTES), load64(row + 8)
    # Subtracted, not added: the sum of two words that a peer chose could wrap around.
    if offset < 0 or nbytes < 0 or offset > space or nbytes > space - offset or load64(row) == 0:
        return fail(state, _PROTOCOL, c.REASON_BOUNDS, space, offset + nbytes)
    return load64(row) + offset


@njit
def arrived(state: int, channel: int) -> None:
    """Counts an arrival; channel -1: none."""
    if channel >= 0:
        count = state + c.ARRIVALS + 8 * channel
        store64(count, load64(count) + 1)
