"""Owns TCP as a transport: frames over non-blocking sockets, sent and received by compiled code.

Payload goes from the source array to the socket and from the socket into the destination buffer, with no copy between.
What the engine must know:

- A put that answers AGAIN may have sent part of its frame. Its source stays in use until the same put answers OK, and
  PROGRESS goes on sending it. Other puts with payload to that peer answer AGAIN meanwhile; signals queue behind it.
- PUT and FLUSH that cannot send receive from *their* peer, so that two full sockets cannot deadlock a pair. In a ring
  of more, each rank sends to one peer and receives from another: call PROGRESS of all rows when nothing moves.
- Frames of a later call stay unread until BEGIN; payload lands only between BEGIN and FLUSH; a signal of an earlier
  call (a credit returned late) counts whenever it comes.
- A descriptor in `block_fds` stays readable while a later call's frames wait in it, and after its peer has left:
  polling it then returns at once, so a wait must also yield.
- A peer that leaves in order says goodbye with the number of its last call. Only in later calls is it lost.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import termios
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from gfkernels.transport import framed as c
from gfkernels.transport import tcp_frames as f
from gfkernels.transport.framed import FramedChannels
from gfkernels.transport.table import AGAIN, N_SLOTS, Slot
from gfkernels.transport.tcp_stream import MESSAGE_NBYTES
from gfkernels.transport.tcp_table import begin, flush, goodbye, poll, progress, put

LOOPBACK_BUFFER_NBYTES: Final = 256 << 10
"""SO_SNDBUF and SO_RCVBUF on loopback: what is under way stays in the cache, measured at about twice the rate that the
kernel's own tuning reaches with its megabytes. Between hosts that tuning is left alone: it knows the round trip."""

_MEMORY_NBYTES: Final = 2 * f.QUEUE_NBYTES + f.AHEAD_NBYTES + -(-MESSAGE_NBYTES // 64) * 64
_DRAIN_POLL_S: Final = 0.002


@dataclass
class TcpChannels(FramedChannels):
    """The TCP end of a rank: its table, and the sockets under it.

    Attributes:
        sockets: by peer; what a forked child must close (`close_in_child`).
        records: int64[size, words], the state of each connection (see `tcp_frames`).
    """

    reasons: ClassVar[dict[int, str]] = f.REASONS
    sockets: dict[int, socket.socket] = field(default_factory=dict)
    records: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))

    @property
    def fds(self) -> list[int]:
        """Descriptors of all connections that are open."""
        return [sock.fileno() for sock in self.sockets.values()]

    def record(self, peer: int) -> npt.NDArray[np.int64]:
        """The record of the connection to `peer`."""
        return self.records[peer]

    def explain(self, peer: int) -> str:
        """What is wrong with the connection to `peer`, in words."""
        code = int(self.records[peer, f.FAULT_ERRNO // 8])
        return f"rank {peer} over TCP: {self.reason(peer)}" + (f" ({os.strerror(code)})" if code else "")

    def signatures(self, peer: int) -> tuple[int, int]:
        """After `Fault.MISMATCH`: this rank's signature and the one that `peer` sent."""
        words = self.records[peer]
        return int(words[c.FAULT_EXPECTED // 8]), int(words[c.FAULT_GOT // 8])

    def close(self, timeout_s: float = 2.0, *, leave: bool = True) -> None:
        """See `FramedChannels.close`."""
        deadline = time.monotonic() + timeout_s
        if leave:
            self._say_goodbye(deadline)
        for sock in self.sockets.values():
            sock.close()
        self.sockets.clear()
        self.block_fds.clear()
        self.table[:] = 0

    def sever(self) -> None:
        """Nothing to be done: bytes land only where a running call of this rank receives."""

    def close_in_child(self) -> None:
        """Gives up a forked child's copies of the sockets; the parent's connections go on."""
        self.close(leave=False)

    def _say_goodbye(self, deadline: float) -> None:
        say, push = goodbye.ctypes, flush.ctypes
        unsaid, unsent = set(self.sockets), set(self.sockets)
        while unsent:
            for peer in list(unsent):
                state = int(self.table[peer, Slot.STATE])
                if peer in unsaid and say(state) != AGAIN:
                    unsaid.discard(peer)
                if push(state) != AGAIN and peer not in unsaid:
                    unsent.discard(peer)
            if time.monotonic() >= deadline:
                return
            if unsent:
                time.sleep(_DRAIN_POLL_S)
        # Closing a socket with unread bytes in it resets the connection, and that would destroy what is still on its
        # way to the peer: wait until the peer's kernel has all of it, reading and dropping late credits meanwhile.
        waiting = dict(self.sockets)
        for sock in waiting.values():
            _quietly_shut(sock)
        while waiting and time.monotonic() < deadline:
            for peer, sock in list(waiting.items()):
                if _peer_is_done(sock):
                    del waiting[peer]
            if waiting:
                select.select(list(waiting.values()), [], [], _DRAIN_POLL_S)


def _quietly_shut(sock: socket.socket) -> None:
    with suppress(OSError):  # the peer was faster
        sock.shutdown(socket.SHUT_WR)


def _peer_is_done(sock: socket.socket) -> bool:
    """Whether the peer has left too or has all that was sent to it, and nothing is unread here."""
    try:
        while True:
            if not sock.recv(1 << 16, socket.MSG_DONTWAIT):
                return True
    except BlockingIOError:
        pass
    except OSError:
        return True
    unsent = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4))[0]
    return int(unsent) == 0


def tune(sock: socket.socket) -> None:
    """Sets a connected socket's options for frames."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if str(sock.getpeername()[0]) in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOOPBACK_BUFFER_NBYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOOPBACK_BUFFER_NBYTES)
    sock.setblocking(False)


def channels(rank: int, size: int, sockets: dict[int, socket.socket]) -> TcpChannels:
    """The table of a rank over connected stream sockets, which it takes over.

    Args:
        rank: this rank.
        size: ranks in the group.
        sockets: by peer; a peer without one has a row of zeros.
    """
    records = np.zeros((size, f.RECORD_NBYTES // 8), np.int64)
    memory = np.zeros((size, _MEMORY_NBYTES // 8), np.int64)
    ends = TcpChannels(
        table=np.zeros((size, N_SLOTS), np.int64),
        keep=[records, memory],
        block_fds=[sock.fileno() for sock in sockets.values()],
        rank=rank,
        sockets=dict(sockets),
        records=records,
    )
    for peer, sock in sockets.items():
        at = int(memory[peer].ctypes.data)
        words = records[peer]
        words[f.FD // 8] = sock.fileno()
        words[c.CALL // 8] = -1
        words[f.EARLY // 8] = at
        words[f.LATE // 8] = at + f.QUEUE_NBYTES
        words[f.AHEAD // 8] = at + 2 * f.QUEUE_NBYTES
        words[f.MESSAGE // 8] = at + 2 * f.QUEUE_NBYTES + f.AHEAD_NBYTES
        ends.install(peer, words.ctypes.data, put=put, poll=poll, progress=progress, begin=begin, flush=flush)
    return ends
