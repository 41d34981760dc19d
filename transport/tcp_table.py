"""Owns the C functions of the TCP transport's table, as `Slot` describes them, over a connection's record."""

from __future__ import annotations

from typing import Final

from numba import types

from gfkernels.native.jit import cfunc
from gfkernels.native.memory import load64, store64
from gfkernels.transport import framed as c
from gfkernels.transport import tcp_frames as f
from gfkernels.transport.framed_code import begin_call, check_left, check_put, fail
from gfkernels.transport.table import AGAIN, OK, Fault
from gfkernels.transport.tcp_stream import append_early, blocked, put_payload, put_signal, receive, send, waiting

_I64 = types.int64
_PROTOCOL: Final = int(Fault.PROTOCOL)


@cfunc(_I64(*(_I64,) * 8))
def put(state: int, peer: int, channel: int, src: int, dst: int, buffer: int, offset: int, nbytes: int) -> int:
    """See `Slot.PUT`; `dst` is not used: the receiver resolves buffer and offset itself."""
    fault = check_left(state)
    if fault < 0:
        return fault
    fault = check_put(state, channel, nbytes)
    if fault < 0:
        return fault
    if nbytes > 0:
        return put_payload(state, channel, src, buffer, offset, nbytes)
    if channel < 0:
        return OK
    return put_signal(state, channel)


@cfunc(_I64(_I64, _I64, _I64))
def poll(state: int, peer: int, channel: int) -> int:
    """See `Slot.POLL`. Makes no system call: PROGRESS receives."""
    fault = check_left(state)
    if fault < 0:
        return fault
    return load64(state + c.ARRIVALS + 8 * channel)


@cfunc(_I64(_I64))
def progress(state: int) -> int:
    """See `Slot.PROGRESS`. Reports bytes moved since it last did, so what PUT moved counts too."""
    fault = -load64(state + c.FAULT)
    if fault < 0:
        return fault
    if waiting(state):
        sent = send(state)
        if sent < 0:
            return sent
    got = receive(state)
    if got < 0:
        return got
    moved = load64(state + c.MOVED)
    store64(state + c.MOVED, 0)
    return moved + got


@cfunc(_I64(_I64, _I64, _I64, _I64))
def begin(state: int, sequence: int, signature: int, buffers: int) -> int:
    """See `Slot.BEGIN`."""
    return begin_call(state, sequence, signature, buffers)


@cfunc(_I64(_I64))
def flush(state: int) -> int:
    """See `Slot.FLUSH`. After OK no payload lands until the next BEGIN."""
    fault = -load64(state + c.FAULT)
    if fault < 0:
        return fault
    sent = send(state)
    if sent < 0:
        return sent
    if waiting(state):
        return blocked(state)
    if load64(state + f.LAND_LEFT) > 0:
        return fail(state, _PROTOCOL, f.REASON_CUT, load64(state + c.CALL), load64(state + f.LAND_LEFT))
    store64(state + c.LANDING, 0)
    return OK


@cfunc(_I64(_I64))
def goodbye(state: int) -> int:
    """Queues the goodbye frame; OK | AGAIN | -Fault. Nothing may be put afterwards."""
    fault = -load64(state + c.FAULT)
    if fault < 0:
        return fault
    if load64(state + f.SEND_DEAD) != 0:
        return OK
    if load64(state + f.PAYLOAD) == f.PAYLOAD_SENDING:
        return AGAIN
    if not append_early(state, f.KIND_GOODBYE, -1, 0, 0, 0):
        return AGAIN
    return OK
