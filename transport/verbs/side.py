"""Owns this rank's side of a rail: a completion queue, a queue pair a peer, frame memory, and how they are called."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Sequence
from typing import Any, Final

from gfkernels.trace import log
from gfkernels.transport.verbs import words as w
from gfkernels.transport.verbs.channels import Functions, LinkEnd, frames_nbytes, recv_id
from gfkernels.transport.verbs.device import Owned, Registration
from gfkernels.transport.verbs.provider import Pointers, ProviderError, find_functions, find_pointers
from gfkernels.transport.verbs.queue_pair import QueuePair
from gfkernels.transport.verbs.rail import Rail
from gfkernels.transport.verbs.reference import Reference
from gfkernels.transport.verbs.settings import Settings

_DRAIN_S: Final = 0.2


class Side:
    """Made, filled by `prepare`, connected by `join`, described by `links`, and closed once."""

    def __init__(self, rail: Rail, peers: Sequence[int], settings: Settings, slot_nbytes: int) -> None:
        self._rail = rail
        self._peers = list(peers)
        self._settings = settings
        self._slot_nbytes = slot_nbytes
        self._frames_nbytes = frames_nbytes(slot_nbytes)
        self._cq: Owned | None = None
        self._pairs: list[QueuePair] = []
        self._memory: mmap.mmap | None = None
        self._address = 0
        self._registration: Registration | None = None
        self._reference: Reference | None = None

    def prepare(self, indices: Sequence[int]) -> list[dict[str, int]]:
        """Makes everything and posts the receives.

        Args:
            indices: of each peer's link among all links of the rank.

        Returns:
            For each peer what it must know of its link: queue pair, first packet, where it may write frames.

        Raises:
            UnavailableError: the card, or the limit of locked memory, has no room for it.
            ConnectError: a queue pair cannot be brought up.
        """
        device = self._rail.device
        nbytes = max(1, len(self._peers)) * 2 * self._frames_nbytes
        memory = self._memory = mmap.mmap(-1, nbytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._registration = device.register(self._address, nbytes, listed=False)
        self._cq = device.create_cq(self._settings.cq_entries or len(self._peers) * (w.SEND_DEPTH + w.DEPTH))
        offers = []
        for number, index in enumerate(indices):
            pair = QueuePair(device, self._cq)
            self._pairs.append(pair)
            pair.to_init(self._rail.choice.port.number)
            pair.post_receives(recv_id(index), w.DEPTH)
            offers.append(
                {
                    "qp": pair.number,
                    "psn": pair.psn,
                    "slots": self._frames(number) + self._frames_nbytes,
                    "rkey": self._registration.rkey,
                }
            )
        return offers

    def _frames(self, number: int) -> int:
        """Where a link's memory is: frames to send from, then slots for those of the peer."""
        return self._address + number * 2 * self._frames_nbytes

    def join(self, abouts: Sequence[dict[str, Any]], offers: Sequence[dict[str, int]]) -> None:
        """Connects each queue pair with its peer's.

        Args:
            abouts: of the peers' ports.
            offers: what the peers' `prepare` returned for this rank.

        Raises:
            ConnectError: a peer cannot be reached.
        """
        for pair, about, offer in zip(self._pairs, abouts, offers, strict=True):
            pair.to_ready(self._rail.path(about), offer["qp"], offer["psn"], self._settings)

    def links(
        self, rail_number: int, abouts: Sequence[dict[str, Any]], offers: Sequence[dict[str, int]]
    ) -> list[LinkEnd]:
        """The links as the data path wants them."""
        assert self._registration is not None
        places, functions = self._places()
        return [
            LinkEnd(
                peer=peer,
                device=rail_number,
                qp=places[number][0],
                cq=places[number][1],
                functions=functions,
                frames_at=self._frames(number),
                frames_lkey=self._registration.lkey,
                slots_at=self._frames(number) + self._frames_nbytes,
                far_frames=offers[number]["slots"],
                far_frames_rkey=offers[number]["rkey"],
                slot_nbytes=self._slot_nbytes,
                inline_nbytes=self._pairs[number].inline_nbytes,
                most_nbytes=min(self._rail.most_nbytes, abouts[number]["most"]),
                regions=self._rail.device.regions.address,
            )
            for number, peer in enumerate(self._peers)
        ]

    def _places(self) -> tuple[list[tuple[int, int]], Functions]:
        """(qp, cq) of each link, and the functions that take them."""
        device = self._rail.device
        if not self._settings.reference:
            try:
                found = [self._pointers(pair) for pair in self._pairs]
                functions, library = find_functions(found[0].context)
                log.debug("RDMA: %s is posted to and polled by machine code in %s", device.name, library)
                return [(one.qp, one.cq) for one in found], functions
            except ProviderError as error:
                log.warning(
                    "RDMA: %s is driven through pyverbs, which is slow: its C functions were not found (%s)",
                    device.name,
                    error,
                )
        assert self._cq is not None
        reference = self._reference = Reference(device.verbs)
        cq = reference.add_cq(self._cq.thing)
        return [(reference.add_qp(pair.owned.thing), cq) for pair in self._pairs], reference.functions

    def _pointers(self, pair: QueuePair) -> Pointers:
        assert self._cq is not None
        device = self._rail.device
        return find_pointers(pair.owned.thing, self._cq.thing, device.pd, device.context)

    def stop(self) -> None:
        """Ends the queue pairs: what peers send lands no more; may be repeated."""
        for pair in self._pairs:
            try:
                pair.to_error()
            except Exception as error:
                log.debug("RDMA: %s", error)

    def close(self) -> None:
        """Ends the queue pairs, waits until what they had outstanding is flushed, and closes all; may be repeated."""
        self.stop()
        self._drain()
        if self._reference is not None:
            self._reference.forget()
        for pair in self._pairs:
            pair.owned.close()
        self._pairs = []
        for owned in (self._cq, self._registration):
            if owned is not None:
                owned.close()
        self._cq = self._registration = None
        # The memory is unmapped with the last reference to this object, not here: records may still name it.

    def _drain(self) -> None:
        if self._cq is None or not self._cq.is_open:
            return
        deadline = time.monotonic() + _DRAIN_S
        try:
            while time.monotonic() < deadline and self._cq.thing.poll(w.DEPTH)[0] > 0:
                pass
        except Exception as error:
            log.debug("RDMA: draining the completion queue: %s", error)
