"""Owns the verbs end of a rank: from connected queue pairs to the table that the engine drives, and what went wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from gfkernels.transport import framed as c
from gfkernels.transport.framed import FramedChannels
from gfkernels.transport.table import AGAIN, N_SLOTS, Slot
from gfkernels.transport.verbs import layout as v
from gfkernels.transport.verbs import words as w
from gfkernels.transport.verbs.post import BATCH_SLOT_NBYTES
from gfkernels.transport.verbs.table import begin, flush, goodbye, poll, probe, progress, put
from gfkernels.types import N_BUFFERS

_DRAIN_POLL_S: Final = 0.002
_LINE: Final = 64


@dataclass(frozen=True)
class Functions:
    """Addresses of C functions with the signatures of `ibv_post_send`, `ibv_post_recv` and `ibv_poll_cq`.

    Attributes:
        post_send: `int (qp, wr, bad_wr)`.
        post_recv: `int (qp, wr, bad_wr)`.
        poll_cq: `int (cq, n, wc)`.
        keep: what must stay alive while they may be called.
    """

    post_send: int
    post_recv: int
    poll_cq: int
    keep: object = None


@dataclass(frozen=True)
class LinkEnd:
    """One connected queue pair, with DEPTH receives posted (no scatter elements) and none of its frames sent yet.

    Attributes:
        peer: the rank at the other end.
        device: number of the device (rail) it belongs to.
        qp: first argument of the post functions.
        cq: first argument of `poll_cq`; all queue pairs of a device share one.
        functions: what posts and polls.
        frames_at: `frames_nbytes(slot_nbytes)` bytes of zeroed registered memory to send frames from.
        frames_lkey: its local key.
        slots_at: as many bytes that the peer may write frames to; the peer knows address and rkey.
        far_frames: the peer's `slots_at`.
        far_frames_rkey: its remote key.
        slot_nbytes: of one frame with its header; the same at both ends.
        inline_nbytes: what the queue pair takes inline, 0 for nothing.
        most_nbytes: of one RDMA write.
        regions: `Regions.address` of the device.
    """

    peer: int
    device: int
    qp: int
    cq: int
    functions: Functions
    frames_at: int
    frames_lkey: int
    slots_at: int
    far_frames: int
    far_frames_rkey: int
    slot_nbytes: int
    inline_nbytes: int
    most_nbytes: int
    regions: int


def frames_nbytes(slot_nbytes: int) -> int:
    """Bytes of frame memory at each end and for each direction of a link."""
    return w.DEPTH * slot_nbytes


@dataclass
class VerbsChannels(FramedChannels):
    """The verbs end of a rank: its table, and the links under it.

    Attributes:
        links: by peer, the records of its links as int64 words.
        compiled: messages go without the interpreter; False where pyverbs carries them.
        stop: moves all queue pairs to ERR: nothing that peers send lands any more.
        release: closes queue pairs and memory; called once.
    """

    reasons: ClassVar[dict[int, str]] = w.REASONS
    links: dict[int, list[npt.NDArray[np.int64]]] = field(default_factory=dict)
    compiled: bool = True
    stop: Callable[[], None] | None = None
    release: Callable[[], None] | None = None

    def record(self, peer: int) -> npt.NDArray[np.int64]:
        """The first of the links to `peer` with a fault, else the first."""
        links = self.links[peer]
        return next((words for words in links if words[c.FAULT // 8] != 0), links[0])

    def explain(self, peer: int) -> str:
        """What is wrong with the links to `peer`, in words."""
        words = self.record(peer)
        status = v.STATUSES.get(int(words[c.FAULT_GOT // 8]), "unknown")
        text = self.reason(peer, status=status, vendor=int(words[w.FAULT_VENDOR // 8]))
        return f"rank {peer} over RDMA: {text}"

    def probe(self, timeout_s: float) -> list[int]:
        """Writes to all peers once, over every link; the peers whose own probes did not come in time.

        To be called once, by all ranks, before anything else is put.

        Raises:
            TransportError: a link failed.
        """
        states = {peer: int(self.table[peer, Slot.STATE]) for peer in self.links}
        for peer, state in states.items():
            if probe.ctypes(state) < 0:
                raise self.error(peer)
        silent = list(states)
        deadline = time.monotonic() + timeout_s
        while silent and time.monotonic() < deadline:
            for peer, state in states.items():
                if progress.ctypes(state) < 0:
                    raise self.error(peer)
            silent = [peer for peer in silent if not all(words[w.PROBED // 8] for words in self.links[peer])]
            if silent:
                time.sleep(_DRAIN_POLL_S)
        return silent

    def close(self, timeout_s: float = 2.0, *, leave: bool = True) -> None:
        """See `FramedChannels.close`."""
        if leave and self.links:
            self._say_goodbye(time.monotonic() + timeout_s)
        release, self.release, self.stop = self.release, None, None
        self.links = {}
        self.table[:] = 0
        if release is not None:
            release()

    def sever(self) -> None:
        """See `FramedChannels.sever`: moves all queue pairs to ERR."""
        if self.stop is not None:
            self.stop()

    def close_in_child(self) -> None:
        """See `FramedChannels.close_in_child`."""
        self.stop = self.release = None
        self.links = {}
        self.table[:] = 0

    def _say_goodbye(self, deadline: float) -> None:
        say, push = goodbye.ctypes, progress.ctypes
        states = {peer: int(self.table[peer, Slot.STATE]) for peer in self.links}
        unsaid = set(states)
        while time.monotonic() < deadline:
            unsaid -= {peer for peer in unsaid if say(states[peer]) != AGAIN}
            busy = False
            for peer, links in self.links.items():
                # A card that has answered for the last request has got all of them. A faulty link has nothing to send,
                # and a peer that has left, whose card may answer no more, needs nothing.
                sound = push(states[peer]) >= 0
                busy |= sound and any(
                    words[w.DONE // 8] < words[w.SIGNALLED // 8] and words[c.LEFT // 8] == 0 for words in links
                )
            if not unsaid and not busy:
                return
            time.sleep(_DRAIN_POLL_S)


def channels(
    rank: int,
    size: int,
    links: Sequence[LinkEnd],
    release: Callable[[], None] | None = None,
    stop: Callable[[], None] | None = None,
) -> VerbsChannels:
    """The table of a rank over connected queue pairs.

    Args:
        rank: this rank.
        size: ranks in the group.
        links: all peers have the same number of them, at most MAX_RAILS, and those of one device share a queue.
        release: closes the queue pairs and what they use.
        stop: moves the queue pairs to ERR.
    """
    by_index = np.zeros(max(1, len(links)), np.int64)
    keep: list[object] = [by_index, [end.functions for end in links]]
    ordered: dict[int, list[npt.NDArray[np.int64]]] = {}
    for index, end in enumerate(sorted(links, key=lambda end: (end.peer, end.device))):
        words, memory = _record(index, end, int(by_index.ctypes.data))
        by_index[index] = words.ctypes.data
        ordered.setdefault(end.peer, []).append(words)
        keep += [words, memory]
    rows = np.zeros((size, w.ROW_NBYTES // 8), np.int64)
    keep.append(rows)
    connected = VerbsChannels(
        table=np.zeros((size, N_SLOTS), np.int64),
        keep=keep,
        block_fds=[],
        rank=rank,
        links=ordered,
        compiled=all(end.functions.keep is None for end in links),
        stop=stop,
        release=release,
    )
    for peer, records in ordered.items():
        row = rows[peer]
        row[w.ROW_N_LINKS // 8] = len(records)
        for i, words in enumerate(records):
            row[w.ROW_LINKS // 8 + i] = words.ctypes.data
        connected.install(peer, row.ctypes.data, put=put, poll=poll, progress=progress, begin=begin, flush=flush)
    return connected


def _record(index: int, end: LinkEnd, by_index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """A link's record, and the private memory that it points into."""
    parts = {
        w.WCS: w.POLL_BATCH * v.WC_NBYTES,
        w.BATCH_AT: w.BATCH * BATCH_SLOT_NBYTES,
        w.RECVS_AT: w.REPOST_EVERY * v.RECV_WR_NBYTES,
        w.QUEUE: 8 * w.DEPTH,
        w.FAR: 24 * N_BUFFERS,
        w.OWN_ROWS: 24 * N_BUFFERS,
    }
    memory: npt.NDArray[np.uint8] = np.zeros(sum(-(-n // _LINE) * _LINE for n in parts.values()) + _LINE, np.uint8)
    record: npt.NDArray[np.int64] = np.zeros(w.RECORD_NBYTES // 8, np.int64)
    values = {
        w.INDEX: index,
        w.QP: end.qp,
        w.CQ: end.cq,
        w.POST_SEND: end.functions.post_send,
        w.POST_RECV: end.functions.post_recv,
        w.POLL_CQ: end.functions.poll_cq,
        w.LINKS: by_index,
        w.REGIONS: end.regions,
        c.CALL: -1,
        w.FAR_CALL: -1,
        w.FRAMED_CALL: -1,
        w.VERIFIED_CALL: -1,
        w.GRANTED: w.DEPTH,
        w.FRAMES_AT: end.frames_at,
        w.FRAMES_LKEY: end.frames_lkey,
        w.FAR_FRAMES: end.far_frames,
        w.FAR_FRAMES_RKEY: end.far_frames_rkey,
        w.SLOT_NBYTES: end.slot_nbytes,
        w.PAYLOAD_NBYTES: end.slot_nbytes - c.HEADER_NBYTES,
        w.INLINE_NBYTES: end.inline_nbytes,
        w.MOST_NBYTES: end.most_nbytes,
        w.SLOTS_AT: end.slots_at,
    }
    at = -(-int(memory.ctypes.data) // _LINE) * _LINE
    for word, nbytes in parts.items():
        values[word] = at
        at += -(-nbytes // _LINE) * _LINE
    for word, value in values.items():
        record[word // 8] = value
    recvs = memory[values[w.RECVS_AT] - int(memory.ctypes.data) :].view(np.int64)
    for i in range(w.REPOST_EVERY):
        follows = i + 1 < w.REPOST_EVERY
        row = recvs[i * v.RECV_WR_NBYTES // 8 :]
        row[v.WR_ID // 8] = recv_id(index)
        row[v.WR_NEXT // 8] = values[w.RECVS_AT] + (i + 1) * v.RECV_WR_NBYTES if follows else 0
    return record, memory


def recv_id(index: int) -> int:
    """The id of every receive posted for the link with this index: those of a rank, by peer and then by device."""
    return w.ID_RECV | index << w.ID_LINK_SHIFT
