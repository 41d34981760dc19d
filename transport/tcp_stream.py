"""Owns the two directions of a connection as compiled code: gathering sends, scattering receives, judging headers."""

from __future__ import annotations

from typing import Final

from gfkernels.native.jit import njit
from gfkernels.native.libc import errno, memcpy, recvmsg, sendmsg
from gfkernels.native.memory import load64, store64
from gfkernels.transport import framed as c
from gfkernels.transport import tcp_frames as f
from gfkernels.transport.framed_code import (
    arrived,
    check_channel,
    check_magic,
    check_signature,
    fail,
    landing_place,
    write_header,
)
from gfkernels.transport.table import AGAIN, OK, Fault

_MSG_DONTWAIT: Final = 0x40
_MSG_NOSIGNAL: Final = 0x4000
_EINTR, _EAGAIN, _ENOBUFS, _ENOMEM = 4, 11, 105, 12
_EPIPE, _ECONNRESET = 32, 104
_ECONNABORTED, _ENOTCONN, _ETIMEDOUT, _EHOSTUNREACH, _ENETUNREACH, _ENETDOWN = 103, 107, 110, 113, 101, 100

# struct msghdr on 64-bit Linux, followed by our three iovecs.
_MSG_IOV, _MSG_IOVLEN, _IOVS = 16, 24, 64
MESSAGE_NBYTES: Final = _IOVS + 3 * 16

# One call of PUT or PROGRESS moves at most about this much, so that no lane starves the others.
_BUDGET: Final = 4 << 20
_PIECE: Final = 1 << 20

_PEER_LOST, _SYSTEM = int(Fault.PEER_LOST), int(Fault.SYSTEM)


@njit
def _fail_errno(state: int, code: int) -> int:
    store64(state + f.FAULT_ERRNO, code)
    lost = (
        code == _EPIPE
        or code == _ECONNRESET
        or code == _ECONNABORTED
        or code == _ENOTCONN
        or code == _ETIMEDOUT
        or code == _EHOSTUNREACH
        or code == _ENETUNREACH
        or code == _ENETDOWN
    )
    if lost:
        return fail(state, _PEER_LOST, f.REASON_CLOSED, 0, code)
    return fail(state, _SYSTEM, f.REASON_SYSTEM, 0, code)


@njit
def _busy(code: int) -> bool:
    return code == _EAGAIN or code == _ENOBUFS or code == _ENOMEM


@njit
def _set_iov(message: int, index: int, address: int, nbytes: int) -> None:
    store64(message + _IOVS + 16 * index, address)
    store64(message + _IOVS + 16 * index + 8, nbytes)


@njit
def append_early(state: int, kind: int, channel: int, buffer: int, offset: int, nbytes: int) -> bool:
    end = load64(state + f.EARLY_END)
    if end + c.HEADER_NBYTES > f.QUEUE_NBYTES:
        return False
    write_header(load64(state + f.EARLY) + end, state, f.MAGIC_WORD, kind, channel, buffer, offset, nbytes)
    store64(state + f.EARLY_END, end + c.HEADER_NBYTES)
    return True


@njit
def _send_dead(state: int, code: int) -> int:
    # Credits to a peer that has left in order are nobody's loss, so only payload makes this a fault here; whether the
    # peer left or died is what the receiving side finds at the end of the stream.
    store64(state + f.SEND_DEAD, 1)
    store64(state + f.EARLY_START, 0)
    store64(state + f.EARLY_END, 0)
    store64(state + f.LATE_END, 0)
    if load64(state + f.PAYLOAD) == f.PAYLOAD_SENDING:
        return _fail_errno(state, code)
    return 0


@njit
def _send_once(state: int) -> int:
    """One sendmsg of all that waits. Bytes that left, 0 when the socket is full or nothing waits, or -Fault."""
    message = load64(state + f.MESSAGE)
    start = load64(state + f.EARLY_START)
    early = load64(state + f.EARLY_END) - start
    n_iov = 0
    if early > 0:
        _set_iov(message, 0, load64(state + f.EARLY) + start, early)
        n_iov = 1
    piece = 0
    late = 0
    if load64(state + f.PAYLOAD) == f.PAYLOAD_SENDING:
        left = load64(state + f.PAYLOAD_LEFT)
        piece = min(left, _PIECE)
        _set_iov(message, n_iov, load64(state + f.PAYLOAD_AT), piece)
        n_iov += 1
        late = load64(state + f.LATE_END)
        if piece == left and late > 0:
            _set_iov(message, n_iov, load64(state + f.LATE), late)
            n_iov += 1
    if n_iov == 0:
        return 0
    store64(message + _MSG_IOV, message + _IOVS)
    store64(message + _MSG_IOVLEN, n_iov)
    while True:
        sent = sendmsg(load64(state + f.FD), message, _MSG_DONTWAIT | _MSG_NOSIGNAL)
        if sent >= 0:
            break
        code = errno()
        if _busy(code):
            return 0
        if code == _EPIPE or code == _ECONNRESET:
            return _send_dead(state, code)
        if code != _EINTR:
            return _fail_errno(state, code)
    rest = sent
    step = min(rest, early)
    if step == early:
        store64(state + f.EARLY_START, 0)
        store64(state + f.EARLY_END, 0)
    else:
        store64(state + f.EARLY_START, start + step)
    rest -= step
    if piece > 0:
        step = min(rest, piece)
        rest -= step
        left = load64(state + f.PAYLOAD_LEFT) - step
        store64(state + f.PAYLOAD_AT, load64(state + f.PAYLOAD_AT) + step)
        store64(state + f.PAYLOAD_LEFT, left)
        if left == 0:
            # What was to follow the payload is now what comes first.
            store64(state + f.PAYLOAD, f.PAYLOAD_SENT)
            freed = load64(state + f.EARLY)
            store64(state + f.EARLY, load64(state + f.LATE))
            store64(state + f.LATE, freed)
            store64(state + f.EARLY_START, rest if rest < late else 0)
            store64(state + f.EARLY_END, late if rest < late else 0)
            store64(state + f.LATE_END, 0)
    store64(state + c.MOVED, load64(state + c.MOVED) + sent)
    return sent


@njit
def waiting(state: int) -> bool:
    return load64(state + f.EARLY_END) > 0 or load64(state + f.PAYLOAD) == f.PAYLOAD_SENDING


@njit
def send(state: int) -> int:
    """Sends until nothing waits, the socket is full or the budget is spent. Bytes that left, or -Fault."""
    total = 0
    while total < _BUDGET and waiting(state):
        sent = _send_once(state)
        if sent < 0:
            return sent
        if sent == 0:
            break
        total += sent
    return total


@njit
def _refill(state: int, land_at: int, land_left: int) -> int:
    """One recvmsg into the landing place, then into `ahead`. Bytes that came, 0 when there are none, or -Fault."""
    message = load64(state + f.MESSAGE)
    end = load64(state + f.AHEAD_END)
    n_iov = 0
    if land_left > 0:
        _set_iov(message, 0, land_at, land_left)
        n_iov = 1
    _set_iov(message, n_iov, load64(state + f.AHEAD) + end, f.AHEAD_NBYTES - end)
    store64(message + _MSG_IOV, message + _IOVS)
    store64(message + _MSG_IOVLEN, n_iov + 1)
    while True:
        got = recvmsg(load64(state + f.FD), message, _MSG_DONTWAIT)
        if got > 0:
            break
        if got == 0:
            return fail(state, _PEER_LOST, f.REASON_CLOSED, 0, 0)
        code = errno()
        if _busy(code):
            return 0
        if code != _EINTR:
            return _fail_errno(state, code)
    if got > land_left:
        store64(state + f.AHEAD_END, end + got - land_left)
    store64(state + c.MOVED, load64(state + c.MOVED) + got)
    return got


@njit
def _open_frame(state: int, at: int) -> int:
    """Judges the header at `at`. 1: taken; 0: belongs to a later call; or -Fault."""
    code = check_magic(state, at, f.MAGIC_WORD)
    if code < 0:
        return code
    sequence = load64(at + c.SEQUENCE)
    if load64(at + c.KIND) == f.KIND_GOODBYE:
        store64(state + c.LEFT, 1)
        store64(state + c.LEFT_CALL, sequence)
        return 1
    if sequence > load64(state + c.CALL):
        return 0
    code = check_signature(state, at)
    if code < 0:
        return code
    code = check_channel(state, at)
    if code < 0:
        return code
    channel, nbytes = load64(at + c.CHANNEL), load64(at + c.NBYTES)
    if nbytes == 0:
        arrived(state, channel)
        return 1
    place = landing_place(state, at)
    if place < 0:
        return place
    store64(state + f.LAND_AT, place)
    store64(state + f.LAND_LEFT, nbytes)
    store64(state + f.LAND_CHANNEL, channel)
    return 1


@njit
def _land(state: int) -> int:
    """Moves payload of the open frame. Bytes moved, 0 when none came, or -Fault."""
    left = load64(state + f.LAND_LEFT)
    at = load64(state + f.LAND_AT)
    start = load64(state + f.AHEAD_START)
    step = min(left, load64(state + f.AHEAD_END) - start)
    if step > 0:
        memcpy(at, load64(state + f.AHEAD) + start, step)
        store64(state + f.AHEAD_START, start + step)
    else:
        store64(state + f.AHEAD_START, 0)
        store64(state + f.AHEAD_END, 0)
        got = _refill(state, at, left)
        if got <= 0:
            return got
        step = min(left, got)
    store64(state + f.LAND_AT, at + step)
    store64(state + f.LAND_LEFT, left - step)
    if step == left:
        arrived(state, load64(state + f.LAND_CHANNEL))
    return step


@njit
def receive(state: int) -> int:
    """Takes what has come, up to the budget. Bytes and frames handled, 0: nothing, or -Fault."""
    total = 0
    while total < _BUDGET and load64(state + c.LEFT) == 0:
        if load64(state + f.LAND_LEFT) > 0:
            moved = _land(state)
            if moved <= 0:
                return moved if moved < 0 else total
            total += moved
            continue
        start = load64(state + f.AHEAD_START)
        held = load64(state + f.AHEAD_END) - start
        if held >= c.HEADER_NBYTES:
            taken = _open_frame(state, load64(state + f.AHEAD) + start)
            if taken <= 0:
                return taken if taken < 0 else total
            store64(state + f.AHEAD_START, start + c.HEADER_NBYTES)
            total += c.HEADER_NBYTES
            continue
        if start > 0:
            # Less than a header is left: 63 bytes at most, so source and destination cannot overlap past this.
            for i in range(held):
                _move_byte(load64(state + f.AHEAD) + i, load64(state + f.AHEAD) + start + i)
            store64(state + f.AHEAD_START, 0)
            store64(state + f.AHEAD_END, held)
        got = _refill(state, 0, 0)
        if got <= 0:
            return got if got < 0 else total
    return total


@njit
def _move_byte(to: int, source: int) -> None:
    memcpy(to, source, 1)


@njit
def _is_open_put(state: int, channel: int, src: int, buffer: int, offset: int, nbytes: int) -> bool:
    return (
        load64(state + f.KEY_SRC) == src
        and load64(state + f.KEY_NBYTES) == nbytes
        and load64(state + f.KEY_OFFSET) == offset
        and load64(state + f.KEY_BUFFER) == buffer
        and load64(state + f.KEY_CHANNEL) == channel
    )


@njit
def blocked(state: int) -> int:
    """What a put or flush that cannot send answers, after it has received from its peer."""
    got = receive(state)
    return got if got < 0 else AGAIN


@njit
def put_signal(state: int, channel: int) -> int:
    if load64(state + f.SEND_DEAD) != 0:
        return OK
    if load64(state + f.PAYLOAD) == f.PAYLOAD_SENDING:
        end = load64(state + f.LATE_END)
        if end + c.HEADER_NBYTES <= f.QUEUE_NBYTES:
            write_header(load64(state + f.LATE) + end, state, f.MAGIC_WORD, f.KIND_PUT, channel, 0, 0, 0)
            store64(state + f.LATE_END, end + c.HEADER_NBYTES)
            return OK
    elif append_early(state, f.KIND_PUT, channel, 0, 0, 0):
        # It leaves with the next payload, or with PROGRESS as soon as nothing moves here: a system call of its own
        # would cost more than what it says.
        return OK
    sent = send(state)
    return sent if sent < 0 else blocked(state)


@njit
def put_payload(state: int, channel: int, src: int, buffer: int, offset: int, nbytes: int) -> int:
    if load64(state + f.SEND_DEAD) != 0:
        return _fail_errno(state, _EPIPE)
    phase = load64(state + f.PAYLOAD)
    mine = phase != f.PAYLOAD_NONE and _is_open_put(state, channel, src, buffer, offset, nbytes)
    if phase == f.PAYLOAD_NONE and append_early(state, f.KIND_PUT, channel, buffer, offset, nbytes):
        store64(state + f.PAYLOAD, f.PAYLOAD_SENDING)
        store64(state + f.PAYLOAD_AT, src)
        store64(state + f.PAYLOAD_LEFT, nbytes)
        store64(state + f.KEY_CHANNEL, channel)
        store64(state + f.KEY_SRC, src)
        store64(state + f.KEY_BUFFER, buffer)
        store64(state + f.KEY_OFFSET, offset)
        store64(state + f.KEY_NBYTES, nbytes)
        mine = True
    sent = send(state)
    if sent < 0:
        return sent
    if mine and load64(state + f.PAYLOAD) == f.PAYLOAD_SENT:
        store64(state + f.PAYLOAD, f.PAYLOAD_NONE)
        return OK
    return blocked(state)
