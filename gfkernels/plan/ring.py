"""Owns `ring`: segmented, pipelined collectives that talk to two neighbours only.

A chunk visits all ranks. A lane runs some of the segments; within it, *lines* take turns. At a turn a line takes one
arrived message, works on it in its slot, passes it on and gives the slot back, so that one segment travels the whole
ring while it is in the cache. All ranks take the same turns, hence the k-th message of a link is the same for both
ends and lies in slot k mod K. With K // 2 lines a sender is K // 2 slots ahead before it needs a credit.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final, NamedTuple

from gfkernels.plan.model import MAX_RING_LANES, Plan, PlanBuilder, PlanError, Span, block_of, slices
from gfkernels.types import FINAL, RAW_SOURCES, Buffer

STAGE, X, OUT = int(Buffer.STAGE), int(Buffer.X), int(Buffer.OUT)
DEFAULT_SLOTS: Final = 8
DEFAULT_LANES: Final = 2


class _Shape(NamedTuple):
    """What kind of ring: how many messages one segment makes, and which of them carry partial sums."""

    messages: int
    """Messages that a rank sends for one segment."""
    reducing: int
    """The first so many carry partial sums; the other ones final values."""
    first_chunk: int
    """Message m of rank r belongs to chunk r + first_chunk - m."""


def allreduce(
    rank: int,
    size: int,
    count: int,
    *,
    packed: bool = False,
    out: bool = False,
    direct_write: bool = False,
    enter: bool = False,
    segment_elements: int = 16384,
    lanes: int = DEFAULT_LANES,
    slots: int = DEFAULT_SLOTS,
    align_elements: int = 16,
) -> Plan:
    """Ring allreduce: N - 1 steps that reduce, N - 1 that gather.

    Args:
        rank: whose plan.
        size: number of ranks.
        count: elements of the array.
        packed: STAGE holds the wire's dtype, and partial sums are wire-typed (a wire dtype is set, or mean scales
            contributions beforehand: then compile the kernel with the array's own dtype as its wire).
        out: the result goes to OUT (X stays) instead of X.
        direct_write: final values land in the neighbour's array, not in a slot: needs equal element sizes.
        enter: begin with ENTER (shared memory).
        segment_elements: elements of a message.
        lanes: concurrent pipelines, at most `MAX_RING_LANES` are used.
        slots: messages a receiver can hold, per lane.
        align_elements: chunks begin at multiples of this.
    """
    b = _builder("allreduce", rank, size, count, packed, out, direct_write, enter, segment_elements, lanes, slots,
                 align_elements)  # fmt: skip
    if size == 1:
        return _alone(b, OUT if out else X, count)
    bounds = slices(count, size, align_elements)
    shape = _Shape(messages=2 * (size - 1), reducing=size - 1, first_chunk=-1)
    _Ring(b, shape, bounds, OUT if out else X, packed, direct_write, segment_elements, slots).write(lanes)
    return b.build()


def reduce_scatter(
    rank: int,
    size: int,
    count: int,
    *,
    packed: bool = False,
    enter: bool = False,
    segment_elements: int = 16384,
    lanes: int = DEFAULT_LANES,
    slots: int = DEFAULT_SLOTS,
) -> Plan:
    """Ring reduce_scatter: block `rank` of the sum over all X (`count` elements, divisible) into OUT."""
    block = block_of(rank, size, count)
    b = _builder("reduce_scatter", rank, size, count, packed, True, False, enter, segment_elements, lanes, slots, 1)
    if size == 1:
        return _alone(b, OUT, count)
    bounds = [r * block for r in range(size + 1)]
    shape = _Shape(messages=size - 1, reducing=size - 1, first_chunk=-1)
    _Ring(b, shape, bounds, OUT, packed, False, segment_elements, slots).write(lanes)
    return b.build()


def allgather(
    rank: int,
    size: int,
    count: int,
    *,
    packed: bool = False,
    direct_write: bool = False,
    enter: bool = False,
    segment_elements: int = 16384,
    lanes: int = DEFAULT_LANES,
    slots: int = DEFAULT_SLOTS,
) -> Plan:
    """Ring allgather: X of every rank (`count` elements) into OUT (`size * count`)."""
    b = _builder("allgather", rank, size, count, packed, True, direct_write, enter, segment_elements, lanes, slots, 1)
    if size == 1:
        return _alone(b, OUT, count)
    bounds = [r * count for r in range(size + 1)]
    shape = _Shape(messages=size - 1, reducing=0, first_chunk=0)
    _Ring(b, shape, bounds, OUT, packed, direct_write, segment_elements, slots).write(lanes)
    return b.build()


def _builder(
    collective: str, rank: int, size: int, count: int, packed: bool, out: bool, direct_write: bool, enter: bool,
    segment_elements: int, lanes: int, slots: int, align: int,
) -> PlanBuilder:  # fmt: skip
    check_shape(segment_elements, lanes, slots)
    b = PlanBuilder(
        "ring", collective, rank, size, count, packed=packed, out=out, direct_write=direct_write, enter=enter,
        segment=segment_elements, lanes=lanes, slots=slots, align=align,
    )  # fmt: skip
    if enter:
        b.enter()
    return b


def check_shape(segment_elements: int, lanes: int, slots: int) -> None:
    """Refuses parameters no pipeline can have."""
    for name, value in (("segment_elements", segment_elements), ("lanes", lanes), ("slots", slots)):
        if value < 1:
            raise PlanError(f"{name} {value}: must be positive")
    if slots < 2:
        # A slot is given back after its message went on, which may wait for the neighbour's slot: with one slot each,
        # all ranks of the ring would wait for one another.
        raise PlanError(f"slots {slots}: a ring needs at least 2")


def _alone(b: PlanBuilder, target: int, count: int) -> Plan:
    b.lane(0)
    if target != X and count:
        b.copy(b.own(X, 0, count), b.own(target, 0, count))
    return b.build()


class _Ring:
    """One rank's rows of a ring."""

    def __init__(
        self,
        b: PlanBuilder,
        shape: _Shape,
        bounds: list[int],
        target: int,
        packed: bool,
        direct_write: bool,
        segment_elements: int,
        slots: int,
    ) -> None:
        longest = max(hi - lo for lo, hi in pairwise(bounds))
        # Shorter arrays need no more staging than their chunks.
        self.segment = max(1, min(segment_elements, longest))
        self.n_segments = -(-longest // self.segment)
        self.b, self.shape, self.bounds, self.target = b, shape, bounds, target
        self.packed, self.direct_write, self.slots = packed, direct_write, slots
        self.next, self.prev = (b.rank + 1) % b.size, (b.rank - 1) % b.size
        self.data = self.credits = self.slot_base = 0
        self.n_sent = self.n_received = self.n_out_slots = self.n_in_slots = 0

    def write(self, lanes: int) -> None:
        """Writes all lanes."""
        lanes = min(lanes, MAX_RING_LANES, self.n_segments)
        if self.shape.reducing or not self.direct_write:
            self.b.stage_elements = lanes * (self.slots + 1) * self.segment
        for lane in range(lanes):
            self.data, self.credits = 2 * lane, 2 * lane + 1
            self.slot_base = lane * (self.slots + 1) * self.segment
            self.n_sent = self.n_received = self.n_out_slots = self.n_in_slots = 0
            self.b.lane(lane)
            for segment, turn in self._turns(lane, lanes):
                if turn > 0:
                    self._receive(segment, turn - 1)
                if turn == 0:
                    self._begin(segment)
            self.b.expect(self.prev, self.n_received, channel=self.data)
            self.b.expect(self.next, self.n_out_slots, channel=self.credits)

    def _turns(self, lane: int, lanes: int) -> Iterator[tuple[int, int]]:
        """(segment, turn) in the order all ranks follow; turn 0 begins a segment, turn m takes message m - 1."""
        mine = range(lane, self.n_segments, lanes)
        lines = [mine[i :: max(1, self.slots // 2)] for i in range(max(1, self.slots // 2))]
        for index in range(max(len(line) for line in lines) + 1):
            for turn in range(self.shape.messages):
                for line in lines:
                    if turn == 0 and 0 < index <= len(line):
                        yield line[index - 1], self.shape.messages
                    if index < len(line):
                        yield line[index], turn

    def _piece(self, message: int, segment: int, sender: int) -> tuple[int, int]:
        """(offset, count) of a message; count 0: it does not exist."""
        chunk = (sender + self.shape.first_chunk - message) % self.b.size
        at = self.bounds[chunk] + segment * self.segment
        return at, max(0, min(self.segment, self.bounds[chunk + 1] - at))

    def _source(self, at: int, n: int) -> Span:
        # An allgather's input holds the own block only.
        return self.b.own(X, at - self.bounds[self.b.rank] if self.shape.reducing == 0 else at, n)

    def _result(self, at: int, n: int, rank: int) -> Span:
        whole = self.shape.messages >= self.b.size or self.shape.reducing == 0
        return (rank, self.target, at if whole else at - self.bounds[rank], n)

    def _begin(self, segment: int) -> None:
        """Message 0: the own contribution (reducing) or the own block."""
        at, n = self._piece(0, segment, self.b.rank)
        if n == 0:
            return
        b, source, gathering = self.b, self._source(at, n), self.shape.reducing == 0
        if self.packed and not (gathering and self.direct_write):
            out_slot = b.own(STAGE, self.slot_base + self.slots * self.segment, n)
            b.convert(source, out_slot, packed=True, raw=not gathering, segment=segment)
            if gathering:
                b.convert(out_slot, self._result(at, n, b.rank), packed=True, segment=segment)
            source = out_slot
        elif gathering:
            own = self._result(at, n, b.rank)
            b.convert(source, own, packed=self.packed, segment=segment)
            if self.packed:
                source = own
        self._send(0, segment, source, at, n)

    def _send(self, message: int, segment: int, source: Span, at: int, n: int) -> None:
        b = self.b
        if self.direct_write and message >= self.shape.reducing:
            target = self._result(at, n, self.next)
        else:
            k = self.n_out_slots
            # The first put waits for all credits of earlier calls, with value 0.
            if k == 0 or k >= self.slots:
                b.wait(self.next, max(0, k - self.slots + 1), channel=self.credits, segment=segment)
            target = (self.next, STAGE, self.slot_base + k % self.slots * self.segment, n)
            self.n_out_slots += 1
        b.put(self.next, source, target, channel=self.data, segment=segment)
        self.n_sent += 1

    def _receive(self, segment: int, message: int) -> None:
        """Takes message `message` of a segment, passes on what becomes of it, gives the slot back."""
        at, n = self._piece(message, segment, self.prev)
        if n == 0:
            return
        b, shape = self.b, self.shape
        self.n_received += 1
        b.wait(self.prev, self.n_received, channel=self.data, segment=segment)
        result = self._result(at, n, b.rank) if message >= shape.reducing - 1 else (0, 0, 0, 0)
        last = message + 1 == shape.messages
        if self.direct_write and message >= shape.reducing:
            if not last:
                self._send(message + 1, segment, result, at, n)
            return
        slot = b.own(STAGE, self.slot_base + self.n_in_slots % self.slots * self.segment, n)
        self.n_in_slots += 1
        passed = slot
        if message < shape.reducing:
            final = message + 1 == shape.reducing
            # The partial sum stays in its slot; the owner of a chunk keeps the value that it passes on.
            keep_in_slot = not final or not (last or self.direct_write)
            if final and not keep_in_slot:
                passed = result
            stage = [slot] if keep_in_slot else []
            array = [result] if final else []
            own = self._source(at, n)
            flags = RAW_SOURCES | (FINAL if final else 0)
            if self.packed:
                b.combine([slot], [own], stage, array, flags=flags, segment=segment)
            else:
                b.combine([], [slot, own], [], stage + array, flags=flags, segment=segment)
        else:
            b.convert(slot, result, packed=self.packed, segment=segment)
        if not last:
            self._send(message + 1, segment, passed, at, n)
        b.signal(self.prev, channel=self.credits, segment=segment)


def broadcast(
    rank: int,
    size: int,
    count: int,
    *,
    root: int = 0,
    direct_write: bool = False,
    enter: bool = False,
    segment_elements: int = 16384,
    lanes: int = DEFAULT_LANES,
    slots: int = DEFAULT_SLOTS,
) -> Plan:
    """Pipelined chain from the root round the ring; in X."""
    if not 0 <= root < size:
        raise PlanError(f"root {root}: expected 0 <= root < {size}")
    check_shape(segment_elements, lanes, slots)
    b = PlanBuilder(
        "ring", "broadcast", rank, size, count, root=root, direct_write=direct_write, enter=enter,
        segment=segment_elements, lanes=lanes, slots=slots,
    )  # fmt: skip
    if enter:
        b.enter()
    b.lane(0)
    if size == 1 or count == 0:
        return b.build()
    length = min(segment_elements, count)
    n_segments = -(-count // length)
    lanes = min(lanes, MAX_RING_LANES, n_segments)
    b.stage_elements = 0 if direct_write else lanes * slots * length
    after, before = (rank + 1) % size, (rank - 1) % size
    sends, receives = after != root, rank != root
    for lane in range(lanes):
        b.lane(lane)
        data, credits_ = 2 * lane, 2 * lane + 1
        mine = range(lane, n_segments, lanes)
        for k, segment in enumerate(mine):
            at = segment * length
            n = min(length, count - at)
            own = b.own(X, at, n)
            slot = (lane * slots + k % slots) * length
            if receives:
                b.wait(before, k + 1, channel=data, segment=segment)
                if not direct_write:
                    b.copy(b.own(STAGE, slot, n), own, segment=segment)
                    b.signal(before, channel=credits_, segment=segment)
            if sends and direct_write:
                b.put(after, own, (after, X, at, n), channel=data, segment=segment)
            elif sends:
                if k == 0 or k >= slots:
                    b.wait(after, max(0, k - slots + 1), channel=credits_, segment=segment)
                b.put(after, own, (after, STAGE, slot, n), channel=data, segment=segment)
        if receives:
            b.expect(before, len(mine), channel=data)
        if sends and not direct_write:
            b.expect(after, len(mine), channel=credits_)
    return b.build()
