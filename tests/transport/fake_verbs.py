"""A card for the verbs transport's compiled half: queue pairs within this process that follow the rules of RC.

It is stricter than real ones where those only say that anything may happen: memory is read when a request is carried
out, at some later poll and not when it was posted, so that a source used again too early is seen; a receive that is
missing, a queue that runs over, and a key that does not hold are recorded in `Fabric.sins` and fail the test.
"""

from __future__ import annotations

import ctypes
import errno
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gfkernels.transport import framed as c
from gfkernels.transport.verbs import layout as v
from gfkernels.transport.verbs import words as w
from gfkernels.transport.verbs.channels import Functions, LinkEnd, VerbsChannels, channels, frames_nbytes, recv_id
from gfkernels.transport.verbs.reference import RECV_WR, SEND_WR, SGE, WC
from gfkernels.transport.verbs.regions import Regions

SLOT_NBYTES = 8192 + c.HEADER_NBYTES
_POST = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_POLL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_int64)
_EVERYWHERE = (1 << 62, 0x11, 0x22)


@dataclass
class Request:
    """A posted work request that is not carried out yet, or not answered yet."""

    ident: int
    opcode: int
    signalled: bool
    imm: int
    src: int
    nbytes: int
    dst: int
    rkey: int
    inline: bytes | None


@dataclass
class Pair:
    """A queue pair."""

    number: int
    cq: Queue
    peer: Pair | None = None
    sends: deque[Request] = field(default_factory=deque)
    unanswered: deque[Request] = field(default_factory=deque)
    receives: deque[int] = field(default_factory=deque)
    broken: bool = False
    silent: bool = False
    """The process behind it is dead: nobody answers."""


@dataclass
class Queue:
    """A completion queue: (id, status, opcode, byte_len, imm, qp_num) each."""

    capacity: int
    entries: deque[tuple[int, int, int, int, int, int]] = field(default_factory=deque)


class Fabric:
    """Everything that is connected. Its callbacks may be called from any thread.

    Attributes:
        sins: what real hardware would punish, sooner or later.
        n_requests: work requests posted.
        n_posts: calls that posted them.
        n_written: bytes that went straight into a buffer, not into frame memory.
        kill_request: called before a request is carried out; True makes it fail as if the network had lost it.
    """

    def __init__(self, seed: int = 1, *, inline_nbytes: int = 64, most_nbytes: int = 1 << 20) -> None:
        self.sins: list[str] = []
        self.n_requests = self.n_posts = self.n_written = 0
        self.kill_request: Callable[[Pair, Request], int] = lambda pair, request: 0
        self.inline_nbytes, self.most_nbytes = inline_nbytes, most_nbytes
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._pairs: dict[int, Pair] = {}
        self._queues: dict[int, Queue] = {}
        self._frames: list[tuple[int, int]] = []
        self._keep: list[Any] = [_POST(self._post_send), _POST(self._post_recv), _POLL(self._poll)]
        send, receive, poll = [int(ctypes.cast(function, ctypes.c_void_p).value or 0) for function in self._keep]
        self.functions = Functions(send, receive, poll, keep=self._keep)

    # -- building ----------------------------------------------------------------------------------------------

    def mesh(self, size: int, *, n_rails: int = 1, registered: Iterable[int] = ()) -> list[VerbsChannels]:
        """All ranks' ends, connected; all memory of the ranks in `registered` counts as registered."""
        regions = [[Regions() for _ in range(n_rails)] for _ in range(size)]
        for rank in set(registered) & set(range(size)):
            for one in regions[rank]:
                one.add(0, *_EVERYWHERE)
        queues = {}
        for rank in range(size):
            for rail in range(n_rails):
                queues[rank, rail] = self._queue((size - 1) * (w.SEND_DEPTH + w.DEPTH))
        order = [(peer, rail) for peer in range(size) for rail in range(n_rails)]
        pairs: dict[tuple[int, int, int], Pair] = {}
        memory: dict[tuple[int, int, int], int] = {}
        for rank in range(size):
            others = [(peer, rail) for peer, rail in order if peer != rank]
            for index, (peer, rail) in enumerate(others):
                number = 100 + len(self._pairs)
                pair = self._pairs[number] = Pair(number, self._queues[queues[rank, rail]])
                pair.receives.extend([recv_id(index)] * w.DEPTH)
                pairs[rank, peer, rail] = pair
                both = np.zeros(2 * frames_nbytes(SLOT_NBYTES) // 8, np.int64)
                self._keep.append(both)
                memory[rank, peer, rail] = int(both.ctypes.data)
                self._frames.append((int(both.ctypes.data), int(both.ctypes.data) + both.nbytes))
        ends = []
        for rank in range(size):
            links = []
            for peer, rail in order:
                if peer == rank:
                    continue
                pair = pairs[rank, peer, rail]
                pair.peer = pairs[peer, rank, rail]
                own, far = memory[rank, peer, rail], memory[peer, rank, rail]
                links.append(
                    LinkEnd(
                        peer=peer,
                        device=rail,
                        qp=pair.number,
                        cq=queues[rank, rail],
                        functions=self.functions,
                        frames_at=own,
                        frames_lkey=7,
                        slots_at=own + frames_nbytes(SLOT_NBYTES),
                        far_frames=far + frames_nbytes(SLOT_NBYTES),
                        far_frames_rkey=8,
                        slot_nbytes=SLOT_NBYTES,
                        inline_nbytes=self.inline_nbytes,
                        most_nbytes=self.most_nbytes,
                        regions=regions[rank][rail].address,
                    )
                )
            mine = [pairs[key] for key in pairs if key[0] == rank]
            end = channels(rank, size, links, release=lambda mine=mine: self._release(mine))  # type: ignore[misc]
            end.keep.append((self, regions))
            ends.append(end)
        return ends

    def _queue(self, capacity: int) -> int:
        number = 9000 + len(self._queues)
        self._queues[number] = Queue(capacity)
        return number

    def _release(self, pairs: list[Pair]) -> None:
        with self._lock:
            for pair in pairs:
                pair.silent = True
                self._flush(pair)

    def kill(self, end: VerbsChannels) -> None:
        """The process of this end is dead: peers get no answers any more."""
        release, end.release = end.release, None
        if release is not None:
            release()

    # -- the verbs -----------------------------------------------------------------------------------------------

    def _post_send(self, qp: int, wr: int, bad: int) -> int:
        with self._lock:
            pair = self._pairs[qp]
            self.n_posts += 1
            while wr:
                raw = ctypes.string_at(wr, v.SEND_WR_NBYTES)
                ident, follows, sg_list, n_sge, opcode, flags, imm, dst, rkey = SEND_WR.unpack_from(raw)
                src = nbytes = lkey = 0
                if n_sge:
                    src, nbytes, lkey = SGE.unpack(ctypes.string_at(sg_list, v.SGE_NBYTES))
                if len(pair.sends) + len(pair.unanswered) >= w.SEND_DEPTH:
                    self.sins.append("the send queue ran over")
                    return errno.ENOMEM
                inline = None
                if flags & v.SEND_INLINE:
                    if nbytes > self.inline_nbytes:
                        self.sins.append(f"{nbytes} bytes inline")
                        return errno.EINVAL
                    inline = ctypes.string_at(src, nbytes)
                elif nbytes and lkey not in (7, _EVERYWHERE[1]):
                    self.sins.append(f"local key {lkey}")
                if nbytes > self.most_nbytes:
                    self.sins.append(f"one write of {nbytes} bytes")
                signalled = bool(flags & v.SEND_SIGNALED)
                pair.sends.append(Request(ident, opcode, signalled, imm, src, nbytes, dst, rkey, inline))
                self.n_requests += 1
                wr = follows
            if pair.broken:
                self._flush(pair)
            return 0

    def _post_recv(self, qp: int, wr: int, bad: int) -> int:
        with self._lock:
            while wr:
                ident, follows, _, n_sge = RECV_WR.unpack_from(ctypes.string_at(wr, v.RECV_WR_NBYTES))
                if n_sge:
                    self.sins.append("a receive with scatter elements")
                pair = self._pairs[qp]
                if len(pair.receives) >= w.DEPTH:
                    self.sins.append("the receive queue ran over")
                pair.receives.append(ident)
                wr = follows
            return 0

    def _poll(self, cq: int, n: int, wcs: int) -> int:
        with self._lock:
            queue = self._queues[cq]
            for pair in list(self._pairs.values()):
                if pair.cq is queue:
                    self._work(pair)
                    if pair.peer is not None:
                        self._work(pair.peer)
            n_taken = min(n, len(queue.entries))
            for i in range(n_taken):
                ident, status, opcode, byte_len, imm, number = queue.entries.popleft()
                vendor = 0x77 if status else 0
                raw = WC.pack(ident, status, opcode, vendor, byte_len, imm, number)
                ctypes.memmove(wcs + i * v.WC_NBYTES, raw, len(raw))
            return n_taken

    def _work(self, pair: Pair) -> None:
        """Carries out some of what was posted, and answers some of what was carried out."""
        if pair.broken or pair.silent:
            return
        for _ in range(self._random.randint(0, 8)):
            if not pair.sends:
                break
            request = pair.sends.popleft()
            status = self._carry_out(pair, request)
            if status:
                self._complete(pair.cq, (request.ident, status, 0, 0, 0, pair.number))
                self._break(pair)
                return
            pair.unanswered.append(request)
        for _ in range(self._random.randint(0, 8)):
            if pair.unanswered:
                request = pair.unanswered.popleft()
                if request.signalled:
                    self._complete(pair.cq, (request.ident, 0, request.opcode, 0, 0, pair.number))

    def _carry_out(self, pair: Pair, request: Request) -> int:
        peer = pair.peer
        assert peer is not None
        if status := self.kill_request(pair, request):
            return status
        if peer.silent or peer.broken:
            return v.STATUS_RETRY_EXCEEDED
        if request.opcode == v.OPCODE_WRITE_WITH_IMM and not peer.receives:
            self.sins.append("a write with immediate found no receive posted")
            return v.STATUS_RNR_RETRY_EXCEEDED
        if request.nbytes:
            in_frames = any(start <= request.dst and request.dst + request.nbytes <= end for start, end in self._frames)
            if request.rkey != (8 if in_frames else _EVERYWHERE[2]):
                self.sins.append(f"remote key {request.rkey} at {request.dst:#x}")
                return 10
            self.n_written += 0 if in_frames else request.nbytes
            if request.inline is not None:
                ctypes.memmove(request.dst, request.inline, request.nbytes)
            else:
                ctypes.memmove(request.dst, request.src, request.nbytes)
        if request.opcode == v.OPCODE_WRITE_WITH_IMM:
            ident = peer.receives.popleft()
            self._complete(peer.cq, (ident, 0, 129, request.nbytes, request.imm, peer.number))
        return 0

    def _break(self, pair: Pair) -> None:
        pair.broken = True
        self._flush(pair)

    def _flush(self, pair: Pair) -> None:
        for request in [*pair.unanswered, *pair.sends]:
            self._complete(pair.cq, (request.ident, v.STATUS_FLUSHED, 0, 0, 0, pair.number))
        for ident in pair.receives:
            self._complete(pair.cq, (ident, v.STATUS_FLUSHED, 0, 0, 0, pair.number))
        pair.unanswered.clear()
        pair.sends.clear()
        pair.receives.clear()

    def _complete(self, queue: Queue, entry: tuple[int, int, int, int, int, int]) -> None:
        if len(queue.entries) >= queue.capacity:
            self.sins.append("the completion queue ran over")
        queue.entries.append(entry)
