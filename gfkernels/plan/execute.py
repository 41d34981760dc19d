"""Owns the slow executor: all ranks of a plan in one process, on numpy arrays, in a seeded random interleaving.

It does what the compiled engine does, byte for byte; only the order of independent things is drawn by lot. With
`late_puts` a PUT's bytes and every signal wait in a queue per lane and peer, as on a network, and arrive when the lot
says so.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gfkernels.plan.choose import mean_prescale
from gfkernels.plan.model import EVERYONE, Plan, PlanError
from gfkernels.plan.reference import combine
from gfkernels.plan.rules import WIRE_BUFFERS, fail, is_packed, lengths
from gfkernels.types import N_BUFFERS, N_CHANNELS, Buffer, DType, ReduceOp, StepOp

Array = npt.NDArray[Any]
_POISON = 0xA5


@dataclass
class _Rank:
    """One rank's memory and where it stands."""

    call: int = 0
    n_calls: int = 0
    lanes: dict[int, list[int]] = field(default_factory=dict)
    in_body: bool = False
    entered: bool = False


class Machine:
    """Ranks with memory that lasts over calls: STAGE, INLINE and arrival counters.

    Args:
        size: number of ranks.
        dtype: of the arrays.
        op: the reduction.
        wire: what travels (None: the arrays' own).
        seed: of the interleaving.
        late_puts: whether bytes and signals may arrive late.
    """

    def __init__(
        self,
        size: int,
        dtype: DType,
        *,
        op: ReduceOp = ReduceOp.SUM,
        wire: DType | None = None,
        seed: int = 0,
        late_puts: bool = True,
    ) -> None:
        self.size, self.dtype, self.op = size, dtype, op
        self.wire = None if wire is not None and wire.name == dtype.name else wire
        self.late_puts = late_puts
        self._random = random.Random(seed)
        self._arrivals = np.zeros((size, size, N_CHANNELS), np.int64)  # [receiver, sender, channel]
        self._bases = np.zeros_like(self._arrivals)
        self._stage = [np.zeros(0, np.uint8) for _ in range(size)]
        self._inline = [[np.zeros(0, np.uint8) for _ in range(2)] for _ in range(size)]
        self._calls = 0

    def run(self, plans: Sequence[Plan], arrays: Sequence[Sequence[Array]]) -> list[list[Array]]:
        """One call on all ranks.

        Args:
            plans: one per rank.
            arrays: per rank its input arrays (one, or the list of "allreduce_many"); not changed.

        Returns:
            Per rank: [output] (X in place, else OUT), or the list of arrays.

        Raises:
            PlanError: nothing can go on.
        """
        return self.run_calls([plans], [arrays])[0]

    def run_calls(
        self, calls: Sequence[Sequence[Plan]], inputs: Sequence[Sequence[Sequence[Array]]]
    ) -> list[list[list[Array]]]:
        """Several calls; a rank that has finished one begins the next at once, while others are still busy."""
        return _Interleaving(self, calls, inputs).run()


class _Interleaving:
    def __init__(
        self, machine: Machine, calls: Sequence[Sequence[Plan]], inputs: Sequence[Sequence[Sequence[Array]]]
    ) -> None:
        self.m, self.calls, self.inputs = machine, calls, inputs
        self.size = machine.size
        self.ranks = [_Rank(n_calls=len(calls)) for _ in range(self.size)]
        self.memory: list[list[dict[int, Array]]] = [[{} for _ in range(self.size)] for _ in calls]
        self.entered = [0] * len(calls)
        self.results: list[list[list[Array]]] = [[[] for _ in range(self.size)] for _ in calls]
        self.links: dict[tuple[int, int, int], deque[tuple[int, int, Array | None, tuple[int, ...]]]] = {}
        for rank in range(self.size):
            self._reserve(rank)

    def _reserve(self, rank: int) -> None:
        """STAGE and INLINE as large as any call needs, poisoned where new."""
        m = self.m
        size_of = (m.wire or m.dtype).itemsize
        stage = max(plans[rank].stage_elements for plans in self.calls) * max(size_of, m.dtype.itemsize)
        inline = max(plans[rank].inline_elements for plans in self.calls) * max(size_of, m.dtype.itemsize)
        m._stage[rank] = _grown(m._stage[rank], stage)
        m._inline[rank] = [_grown(part, inline) for part in m._inline[rank]]

    def run(self) -> list[list[list[Array]]]:
        for rank in range(self.size):
            self._begin(rank)
        while any(state.call < state.n_calls for state in self.ranks):
            choices: list[tuple[str, Any]] = [
                ("step", (rank, lane)) for rank, state in enumerate(self.ranks) for lane in state.lanes
            ]
            choices += [("land", key) for key, queue in self.links.items() if queue]
            self.m._random.shuffle(choices)
            if not any(self._land(key) if what == "land" else self._turn(*key) for what, key in choices):
                self._deadlock()
        while any(self.links.values()):
            for key in list(self.links):
                while self.links[key]:
                    self._land(key)
        self.m._calls += len(self.calls)
        return self.results

    def _deadlock(self) -> None:
        for rank, state in enumerate(self.ranks):
            for row, _ in state.lanes.values():
                raise fail(self.calls[state.call][rank], row, "deadlock: waits for ever")
        raise PlanError("deadlock")

    def _begin(self, rank: int) -> None:
        state = self.ranks[rank]
        if state.call == state.n_calls:
            return
        plan = self.calls[state.call][rank]
        memory = self.memory[state.call][rank]
        given = self.inputs[state.call][rank]
        for buffer, n in lengths(plan).items():
            index = 0 if buffer == Buffer.X else buffer - N_BUFFERS + 1
            if buffer == Buffer.X or buffer >= N_BUFFERS:
                memory[buffer] = np.ascontiguousarray(given[index]).copy().view(np.uint8).reshape(-1)
            elif buffer in (Buffer.OUT, Buffer.SCRATCH):
                memory[buffer] = np.full(n * self.m.dtype.itemsize, _POISON, np.uint8)
        memory[Buffer.STAGE] = self.m._stage[rank]
        memory[Buffer.INLINE] = self.m._inline[rank][(self.m._calls + state.call) % 2]
        first = plan.n_pre + int(plan.has_enter)
        state.in_body, state.entered = first == 0, False
        state.lanes = self._lanes(plan) if state.in_body else {0: [0, first]}
        if not state.lanes:
            self._finish(rank)

    def _lanes(self, plan: Plan) -> dict[int, list[int]]:
        starts = plan.lane_starts.tolist()
        return {lane: [starts[lane], starts[lane + 1]] for lane in range(plan.n_lanes)}

    def _turn(self, rank: int, lane: int) -> bool:
        """A lane goes on for a random number of rows."""
        state = self.ranks[rank]
        if lane not in state.lanes:
            return False
        plan, place = self.calls[state.call][rank], state.lanes[lane]
        moved = False
        for _ in range(self.m._random.choice((1, 1, 2, 5, 20))):
            if place[0] == place[1] or not self._step(plan, rank, lane, place[0]):
                break
            place[0] += 1
            moved = True
        if place[0] == place[1]:
            del state.lanes[lane]
            if not state.lanes and not state.in_body:
                state.in_body = True
                state.lanes = self._lanes(plan)
            if not state.lanes:
                self._finish(rank)
            return True
        return moved

    def _finish(self, rank: int) -> None:
        state = self.ranks[rank]
        plan, memory = self.calls[state.call][rank], self.memory[state.call][rank]
        dtype = self.m.dtype.numpy
        if plan.collective == "allreduce_many":
            keys = [b for b in sorted(memory) if b == Buffer.X or b >= N_BUFFERS]
        else:
            out = plan.collective in ("reduce_scatter", "allgather") or plan.parameter("out", False)
            keys = [int(Buffer.OUT if out else Buffer.X)]
        self.results[state.call][rank] = [memory[key].view(dtype).copy() for key in keys]
        for key in {*keys, int(Buffer.X), int(Buffer.OUT)} & memory.keys():
            # The caller has its memory back: whoever still uses it is caught by the comparison.
            memory[key][:] = _POISON
        self.m._bases[rank] += plan.expects
        state.call += 1
        self._begin(rank)

    # -- rows --------------------------------------------------------------------------------------------------

    def _view(self, span: tuple[int, ...], wire: bool, call: int) -> Array:
        rank, buffer, offset, count = span
        dtype = (self.m.wire if wire and self.m.wire else self.m.dtype).numpy
        return (
            self.memory[call][rank][buffer]
            .view(np.uint8)[offset * dtype.itemsize : (offset + count) * dtype.itemsize]
            .view(dtype)
        )

    def _step(self, plan: Plan, rank: int, lane: int, row: int) -> bool:
        step = plan.steps[row]
        op, peer, channel, call = int(step["op"]), int(step["peer"]), int(step["channel"]), self.ranks[rank].call
        if op == StepOp.ENTER:
            if not self.ranks[rank].entered:
                self.ranks[rank].entered = True
                self.entered[call] += 1
            return self.entered[call] == self.size
        if op == StepOp.WAIT:
            sources = [q for q in range(self.size) if q != rank] if peer == EVERYONE else [peer]
            needs = self.m._bases[rank, sources, channel] + int(step["value"])
            return bool(np.all(self.m._arrivals[rank, sources, channel] >= needs))
        if op == StepOp.SIGNAL:
            for q in range(self.size) if peer == EVERYONE else (peer,):
                if q != rank:
                    self._send((rank, lane, q), call, channel, None, ())
            return True
        packed = is_packed(plan, int(step["array"])) and self.m.wire is not None
        src, n_wire, n_array = int(step["src"]), int(step["n_src_wire"]), int(step["n_src_array"])
        dst, n_dst_wire, n_dst_array = int(step["dst"]), int(step["n_dst_wire"]), int(step["n_dst_array"])
        sources = plan.spans[src : src + n_wire + n_array].tolist()
        targets = plan.spans[dst : dst + n_dst_wire + n_dst_array].tolist()
        if op == StepOp.COMBINE:
            self._combine(plan, step, sources, targets, call)
            return True
        typed = packed and sources[0][1] in WIRE_BUFFERS
        data = self._view(sources[0], typed, call).copy()
        if op == StepOp.PUT:
            self._send((rank, lane, peer), call, channel, data, targets[0])
        else:
            self._view(targets[0], typed, call)[:] = data
        return True

    def _combine(
        self, plan: Plan, step: Any, sources: list[tuple[int, ...]], targets: list[tuple[int, ...]], call: int
    ) -> None:
        m, n_wire, n_dst_wire = self.m, int(step["n_src_wire"]), int(step["n_dst_wire"])
        # A plan may be packed for mean's scale alone; its wire is then the arrays' own dtype.
        wire = (m.wire or m.dtype) if is_packed(plan, int(step["array"])) else None
        prescale, divisor = mean_prescale(m.op, m.dtype, wire, self.size)
        to_wire, to_array = combine(
            m.op,
            m.dtype,
            wire,
            [self._view(s, True, call) for s in sources[:n_wire]],
            [self._view(s, False, call) for s in sources[n_wire:]],
            flags=int(step["flags"]),
            prescale=prescale,
            divisor=divisor,
        )
        for index, target in enumerate(targets):
            value = to_wire if index < n_dst_wire else to_array
            assert value is not None
            self._view(target, index < n_dst_wire, call)[:] = value

    def _send(
        self, key: tuple[int, int, int], call: int, channel: int, data: Array | None, target: tuple[int, ...]
    ) -> None:
        queue = self.links.setdefault(key, deque())
        queue.append((call, channel, data, target))
        if not self.m.late_puts:
            while queue and self._land(key):
                pass

    def _land(self, key: tuple[int, int, int]) -> bool:
        """The oldest message of a link arrives; False: its receiver has not begun that call."""
        sender, _, receiver = key
        queue = self.links[key]
        if not queue:
            return False
        call, channel, data, target = queue[0]
        if data is not None:
            is_stage = target[1] == Buffer.STAGE
            if not is_stage and self.ranks[receiver].call < call:
                return False
            wire = is_stage and self.m.wire is not None and is_packed(self.calls[call][sender], 0)
            rank, buffer, offset, count = target
            dtype = (self.m.wire if wire and self.m.wire else self.m.dtype).numpy
            home = self.m._stage[receiver] if is_stage else self.memory[call][rank][buffer]
            home[offset * dtype.itemsize : (offset + count) * dtype.itemsize] = data.view(np.uint8)
        queue.popleft()
        if channel >= 0:
            self.m._arrivals[receiver, sender, channel] += 1
        return True


def _grown(memory: Array, nbytes: int) -> Array:
    if len(memory) >= nbytes:
        return memory
    grown = np.full(nbytes, _POISON, np.uint8)
    grown[: len(memory)] = memory
    return grown
