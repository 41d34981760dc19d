"""Owns the form of a plan: a frozen record of rows and spans for one rank, and the builder that writes them.

Rows lie in this order: optional pre-steps (lane 0, run before anything is known of the peers), at most one ENTER row,
then the lanes, each contiguous. Pre-steps run first; lanes are concurrent.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gfkernels.errors import GfkernelsError
from gfkernels.types import N_CHANNELS, SPAN_DTYPE, STEP_DTYPE, Buffer, StepOp

DATA: Final = 0
"""Channel of data arrivals (lane 0 of a ring; every plan that needs one channel only)."""
CREDITS: Final = 1
"""Channel of returned slots (lane 0 of a ring)."""
EVERYONE: Final = -1
"""Peer of SIGNAL and WAIT: every other rank."""
NO_SIGNAL: Final = -1
"""Channel of a PUT that raises no arrivals."""
MAX_RING_LANES: Final = N_CHANNELS // 2
"""Concurrent lanes that put to the same peer need a data and a credit counter each: a shared counter would not tell
whose message has come."""

MOST_ELEMENTS: Final = 1 << 59
"""Of all ranks together: offsets in bytes fit in 63 bits."""

Span = tuple[int, int, int, int]
"""(rank, buffer, offset, count) in elements of the buffer's dtype."""


class PlanError(GfkernelsError):
    """A plan is wrong, or cannot be built from these parameters; the message names rank, row and reason."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What one rank does in one collective.

    Attributes:
        name: the algorithm, e.g. "ring" or "direct.registered".
        collective: "allreduce", "reduce_scatter", "allgather", "broadcast", "barrier" or "allreduce_many".
        rank: whose rows these are.
        size: number of ranks.
        count: elements of every rank's input array (the sum over arrays for "allreduce_many").
        parameters: everything else the builder was given that all ranks share.
        steps: the rows, `STEP_DTYPE`.
        spans: what `src` and `dst` of a row index, `SPAN_DTYPE`.
        lane_starts: int64[n_lanes + 1]; lane i owns the rows [lane_starts[i], lane_starts[i + 1]).
        n_pre: rows before ENTER.
        has_enter: whether row `n_pre` is ENTER.
        expects: int64[size, N_CHANNELS]; arrivals that this rank gets from each peer through this call, late credits
            included.
        stage_elements: how much of STAGE is used, in elements of its dtype.
        scratch_elements: how much of SCRATCH is used.
        inline_elements: how much of INLINE is used; bytes for "allreduce_many", whose arrays may differ in dtype.
    """

    name: str
    collective: str
    rank: int
    size: int
    count: int
    parameters: tuple[tuple[str, Any], ...]
    steps: npt.NDArray[Any]
    spans: npt.NDArray[Any]
    lane_starts: npt.NDArray[np.int64]
    n_pre: int
    has_enter: bool
    expects: npt.NDArray[np.int64]
    stage_elements: int
    scratch_elements: int
    inline_elements: int

    @property
    def n_lanes(self) -> int:
        """Number of concurrent lanes (0: nothing to do after ENTER)."""
        return len(self.lane_starts) - 1

    @cached_property
    def hash(self) -> str:
        """16 hexadecimal digits, the same on all ranks: what was built from what, not the rows of this rank."""
        text = f"{self.name}|{self.collective}|{self.size}|{self.count}|{self.parameters!r}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def hash64(self) -> int:
        """`hash` as a non-negative int64, for headers."""
        return int(self.hash, 16) >> 1

    def parameter(self, name: str, default: Any = None) -> Any:
        """One of `parameters` by name."""
        return dict(self.parameters).get(name, default)


class PlanBuilder:
    """Writes the rows of one rank's plan. Methods append to the current lane.

    Args:
        name, collective, rank, size, count: as in `Plan`.
        parameters: what else determines the plan; equal on all ranks.
    """

    def __init__(self, name: str, collective: str, rank: int, size: int, count: int, **parameters: Any) -> None:
        if size < 1 or not 0 <= rank < size:
            raise PlanError(f"rank {rank} of size {size}: expected 0 <= rank < size")
        if count < 0:
            raise PlanError(f"rank {rank}: count {count} is negative")
        if count * size > MOST_ELEMENTS:
            raise PlanError(f"rank {rank}: {count} elements of {size} ranks: at most {MOST_ELEMENTS} in all")
        self.name = name
        self.collective = collective
        self.rank = rank
        self.size = size
        self.count = count
        self.parameters = tuple(sorted(parameters.items()))
        self.stage_elements = 0
        self.scratch_elements = 0
        self.inline_elements = 0
        self._spans = bytearray()
        self._n_spans = 0
        self._pre = bytearray()
        self._n_pre = 0
        self._entered = False
        self._lanes: dict[int, bytearray] = {}
        self._lane = 0
        self._rows = self._pre
        self._expects: npt.NDArray[np.int64] = np.zeros((size, N_CHANNELS), np.int64)

    def own(self, buffer: int, offset: int, count: int) -> Span:
        """A span of this rank's own buffer."""
        return (self.rank, buffer, offset, count)

    def lane(self, lane: int) -> None:
        """Rows that follow belong to this lane."""
        self._lane = lane
        rows = self._lanes.get(lane)
        if rows is None:
            rows = self._lanes[lane] = bytearray()
        self._rows = rows

    def enter(self) -> None:
        """The header exchange and barrier; what was written before becomes pre-steps. Lane 0 follows."""
        if self._entered or self._lanes:
            raise PlanError(f"rank {self.rank}: a plan has one ENTER, before all lanes")
        self._row(StepOp.ENTER, peer=EVERYONE)
        self._n_pre = len(self._pre) // _ROW.size - 1
        self._entered = True
        self.lane(0)

    def combine(
        self,
        src_wire: Sequence[Span],
        src_array: Sequence[Span],
        dst_wire: Sequence[Span],
        dst_array: Sequence[Span],
        *,
        flags: int = 0,
        segment: int = 0,
        array_index: int = 0,
    ) -> None:
        """dsts <- op over srcs, in this order."""
        src = self._add(*src_wire, *src_array)
        dst = self._add(*dst_wire, *dst_array)
        count = (src_wire or src_array)[0][3]
        self._rows += _ROW.pack(
            _COMBINE,
            self._lane,
            -1,
            -1,
            0,
            count,
            flags,
            src,
            len(src_wire),
            len(src_array),
            dst,
            len(dst_wire),
            len(dst_array),
            segment,
            array_index,
            0,
        )

    def convert(
        self, src: Span, dst: Span, *, packed: bool, raw: bool = False, segment: int = 0, array_index: int = 0
    ) -> None:
        """Moves a span between an array (X, OUT, SCRATCH) and a wire-typed buffer, or between two arrays.

        Args:
            src: where from.
            dst: where to.
            packed: False: bytes are copied. True: a COMBINE of one source rounds to the wire's dtype.
            raw: the source is this rank's contribution (mean scales it when it is packed).
            segment: for pictures.
            array_index: which array of many.
        """
        if not packed:
            self.copy(src, dst, segment=segment, array_index=array_index)
            return
        from_wire, to_wire = src[1] in _WIRE_BUFFERS, dst[1] in _WIRE_BUFFERS
        self.combine(
            [src] if from_wire else [],
            [] if from_wire else [src],
            [dst] if to_wire else [],
            [] if to_wire else [dst],
            flags=1 if raw else 0,
            segment=segment,
            array_index=array_index,
        )

    def copy(self, src: Span, dst: Span, *, segment: int = 0, array_index: int = 0) -> None:
        """dst <- src, byte for byte, both addressable here."""
        self._row(StepOp.COPY, count=src[3], spans=(src, dst), segment=segment, array_index=array_index)

    def put(
        self, peer: int, src: Span, dst: Span, *, channel: int = DATA, segment: int = 0, array_index: int = 0
    ) -> None:
        """Writes the own span into the peer's and raises its arrivals on `channel` (NO_SIGNAL: does not)."""
        spans = (src, dst)
        self._row(StepOp.PUT, peer, channel, count=src[3], spans=spans, segment=segment, array_index=array_index)

    def get(self, peer: int, src: Span, dst: Span, *, segment: int = 0, array_index: int = 0) -> None:
        """Reads the peer's span into the own one."""
        self._row(StepOp.GET, peer, -1, count=src[3], spans=(src, dst), segment=segment, array_index=array_index)

    def signal(self, peer: int = EVERYONE, *, channel: int = DATA, segment: int = 0) -> None:
        """Raises arrivals at the peer by one. Nothing is written for a group of one."""
        if self.size > 1:
            self._row(StepOp.SIGNAL, peer, channel, segment=segment)

    def wait(self, peer: int, value: int, *, channel: int = DATA, segment: int = 0) -> None:
        """Waits until `value` arrivals of this call have come. Nothing is written for a group of one."""
        if self.size > 1:
            self._row(StepOp.WAIT, peer, channel, value, segment=segment)

    def expect(self, peer: int, arrivals: int, *, channel: int = DATA) -> None:
        """Says that the peer's plan sends this many arrivals in all (peer EVERYONE: each other rank's)."""
        if peer == EVERYONE:
            self._expects[:, channel] = arrivals
            self._expects[self.rank, channel] = 0
        else:
            self._expects[peer, channel] = arrivals

    def exit_barrier(self) -> None:
        """Nobody leaves before everybody is here; the plan's only use of channel 0."""
        self.signal()
        self.wait(EVERYONE, 1)
        self.expect(EVERYONE, 1)

    def build(self) -> Plan:
        """The finished plan."""
        body = bytearray(self._pre)
        if not self._entered and body:
            raise PlanError(f"rank {self.rank}: rows before any lane and no ENTER: call lane(0) first")
        starts = [len(body) // _ROW.size]
        for _, rows in sorted(self._lanes.items()):
            if rows:
                body += rows
                starts.append(len(body) // _ROW.size)
        steps = np.frombuffer(bytes(body), STEP_DTYPE) if body else np.zeros(0, STEP_DTYPE)
        spans = np.frombuffer(bytes(self._spans), SPAN_DTYPE) if self._spans else np.zeros(0, SPAN_DTYPE)
        return Plan(
            name=self.name,
            collective=self.collective,
            rank=self.rank,
            size=self.size,
            count=self.count,
            parameters=self.parameters,
            steps=steps,
            spans=spans,
            lane_starts=np.array(starts, np.int64),
            n_pre=self._n_pre,
            has_enter=self._entered,
            expects=self._expects,
            stage_elements=self.stage_elements,
            scratch_elements=self.scratch_elements,
            inline_elements=self.inline_elements,
        )

    def _add(self, *spans: Span) -> int:
        first = self._n_spans
        for span in spans:
            self._spans += _SPAN.pack(*span)
        self._n_spans = first + len(spans)
        return first

    def _row(
        self,
        op: int,
        peer: int = -1,
        channel: int = -1,
        value: int = 0,
        *,
        count: int = 0,
        spans: tuple[Span, ...] = (),
        segment: int = 0,
        array_index: int = 0,
    ) -> None:
        first = self._add(*spans) if spans else 0
        one = 1 if spans else 0
        self._rows += _ROW.pack(
            op, self._lane, peer, channel, value, count, 0, first, 0, one, first + one, 0, one, segment, array_index, 0
        )


_ROW: Final = struct.Struct(f"={len(STEP_DTYPE.names or ())}q")
_SPAN: Final = struct.Struct(f"={len(SPAN_DTYPE.names or ())}q")
_COMBINE: Final = int(StepOp.COMBINE)
_WIRE_BUFFERS: Final = (Buffer.STAGE, Buffer.INLINE)


def slices(count: int, size: int, align_elements: int = 1) -> list[int]:
    """Bounds of a balanced cut of `count` elements into `size` slices at multiples of `align_elements`.

    Returns:
        size + 1 offsets; slice r is [bounds[r], bounds[r + 1]) and may be empty.
    """
    base, extra = divmod(-(-count // align_elements), size)
    return [min(count, align_elements * (r * base + min(r, extra))) for r in range(size + 1)]


def pieces(start: int, stop: int, length: int) -> list[tuple[int, int]]:
    """Cuts [start, stop) into (offset, count) pieces of at most `length` elements."""
    return [(at, min(length, stop - at)) for at in range(start, stop, length)]


def block_of(rank: int, size: int, count: int) -> int:
    """Elements of one rank's block of a reduce_scatter over arrays of `count` elements."""
    block, rest = divmod(count, size)
    if rest:
        raise PlanError(f"rank {rank}: reduce_scatter of {count} elements over {size} ranks: not divisible")
    return block
