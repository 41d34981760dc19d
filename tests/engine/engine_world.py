"""Owns a group of ranks within one process: contexts and memory as `Plane` lays them out, driven in turns by a test.

Ranks run whenever the test lets them: a slice of no length makes the engine return at its second idle round. Memory is
poisoned, has guards around it, and a call's arrays are poisoned again as soon as the call is over on their rank.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from engine_parts import POISON, Guarded, Numbers, Program, Words, shm_ends

from gfkernels.engine import executor
from gfkernels.engine.context import (
    HEADER_NBYTES,
    MAX_LANES,
    N_CTX_WORDS,
    N_KERN_WORDS,
    N_PROG_WORDS,
    Code,
    Ctx,
    Kern,
    Kind,
    Phase,
    Prog,
)
from gfkernels.plan.choose import mean_prescale
from gfkernels.plan.model import Plan
from gfkernels.plan.rules import is_packed, lengths
from gfkernels.transport.table import Channels, Slot
from gfkernels.types import N_BUFFERS, N_CHANNELS, Buffer

Array = npt.NDArray[Any]
_STALLED = 300
"""Fruitless turns of every rank after which a group is taken to be stuck."""


class Engine(Protocol):
    """The engine's entry points: those of `gfkernels.engine.executor`, or a changed copy's."""

    call: Callable[..., int]
    call_array: Callable[..., int]
    call_queued: Callable[..., int]
    resume: Callable[..., int]
    acquire: Callable[..., int]
    release: Callable[..., None]
    reenter: Callable[..., None]
    blocked_on: Callable[..., int]


COMPILED: Any = executor


class Stuck(AssertionError):
    """Every rank waits, and nothing moves."""


class Ended(AssertionError):
    """The engine answered something that no call of the test should see."""


class World:
    """The ranks of one group.

    Args:
        size: ranks.
        kind: how their arrays can be reached.
        engine: what runs them.
        ends: the transport, by rank; shared memory if none is given.
        stage_nbytes, inline_nbytes, scratch_nbytes: of every rank.
        n_windows: places in STAGE that calls with ENTER take by turns.
    """

    def __init__(
        self,
        size: int,
        *,
        kind: Kind = Kind.REGISTERED,
        engine: Engine = COMPILED,
        ends: list[Channels] | None = None,
        stage_nbytes: int = 3 << 15,
        n_windows: int = 3,
        inline_nbytes: int = 4096,
        scratch_nbytes: int = 1 << 14,
    ) -> None:
        self.size, self.kind, self.engine, self.n_windows = size, kind, engine, n_windows
        self.ends = ends or shm_ends(size)
        self.aborts = np.zeros((size, 8), np.int64)
        self.headers = np.zeros((size, 2 * HEADER_NBYTES // 8), np.int64)
        self.stage = [Guarded(stage_nbytes) for _ in range(size)]
        self.inline = [[Guarded(inline_nbytes) for _ in range(2)] for _ in range(size)]
        self.scratch = [Guarded(scratch_nbytes) for _ in range(size)]
        self.bases = np.zeros((size, size, N_CHANNELS), np.int64)
        self.pcs = np.zeros((size, MAX_LANES), np.int64)
        self.next_peers = np.zeros((size, MAX_LANES), np.int64)
        self._keep: list[Any] = []
        self.places = [self._words(2, size, N_BUFFERS) for _ in range(size)]
        self.words = np.zeros((size, N_CTX_WORDS), np.int64)
        for rank in range(size):
            self._fill(rank)

    def _words(self, *shape: int) -> Words:
        words: Words = np.zeros(shape, np.int64)
        self._keep.append(words)
        return words

    def _fill(self, rank: int) -> None:
        words, size, end = self.words[rank], self.size, self.ends[rank]
        for q in range(size):
            for parity in (0, 1):
                self.places[rank][parity, q, Buffer.INLINE] = self.inline[q][parity].address
        headers, stages = self._words(size), self._words(size)
        stages[:] = [self.stage[q].address for q in range(size)]
        headers[:] = [self.headers[q].ctypes.data for q in range(size)]
        words[Ctx.RANK], words[Ctx.SIZE] = rank, size
        words[Ctx.PLACES], words[Ctx.HEADERS] = self.places[rank].ctypes.data, headers.ctypes.data
        words[Ctx.STAGES] = stages.ctypes.data
        words[Ctx.SHIFTS] = self._words(size).ctypes.data
        # All of this process is the arena, or nothing is.
        words[Ctx.ARENA_NBYTES] = 1 << 62 if self.kind == Kind.REGISTERED else 0
        words[Ctx.CMA_OK], words[Ctx.BEST_KIND] = self.kind == Kind.CMA, Kind.REGISTERED
        words[Ctx.CHANNELS] = words[Ctx.TABLE] = words[Ctx.CMA_CHANNELS] = end.table.ctypes.data
        words[Ctx.HAS_CALLS] = bool(end.table[:, [Slot.BEGIN, Slot.PROGRESS, Slot.FLUSH]].any())
        words[Ctx.BASES], words[Ctx.PCS] = self.bases[rank].ctypes.data, self.pcs[rank].ctypes.data
        words[Ctx.ENDS], words[Ctx.NEXT_PEERS] = self._words(MAX_LANES).ctypes.data, self.next_peers[rank].ctypes.data
        words[Ctx.POINTERS] = self._words(4 * size + 8).ctypes.data
        words[Ctx.COUNTS], words[Ctx.LANDINGS] = self._words(8).ctypes.data, self._words(2, N_BUFFERS, 2).ctypes.data
        words[Ctx.TIMESPEC] = self._words(2).ctypes.data
        words[Ctx.ABORT], words[Ctx.FDS] = self.aborts[rank].ctypes.data, self._words(4).ctypes.data

    # -- programs ----------------------------------------------------------------------------------------------

    def program(
        self, plan: Plan, numbers: Numbers, *, signature: int | None = None, kinds: Sequence[int] = (0, 1, 2)
    ) -> Program:
        """The words of one rank's plan.

        Args:
            plan: what runs.
            numbers: what is added.
            signature: what ranks compare at ENTER; None: the plan's hash.
            kinds: memory kinds whose variant is there.
        """
        sizes = lengths(plan)
        n_arrays = len(plan.parameter("counts")) if plan.collective == "allreduce_many" else 1
        words: Words = np.zeros(N_PROG_WORDS, np.int64)
        program = Program(plan, words, [words])
        kernel_rows, args = np.zeros((n_arrays, N_KERN_WORDS), np.int64), np.zeros((n_arrays, 2), np.float64)
        for i in range(n_arrays):
            packed = is_packed(plan, i)
            wire = (numbers.wire or numbers.dtype) if packed else None
            args[i] = mean_prescale(numbers.op, numbers.dtype, wire, self.size)
            kernel_rows[i, Kern.COMBINE] = numbers.kernel(packed)
            kernel_rows[i, Kern.ITEMSIZE] = numbers.dtype.itemsize
            kernel_rows[i, Kern.WIRE_ITEMSIZE] = (wire or numbers.dtype).itemsize
            kernel_rows[i, Kern.ARGS] = args[i : i + 1].ctypes.data
        words[Prog.SIGNATURE] = plan.hash64 if signature is None else signature
        words[Prog.PLAN_HASH], words[Prog.COUNT] = plan.hash64, plan.count
        words[Prog.HAS_ENTER], words[Prog.N_ARRAYS] = plan.has_enter, n_arrays
        words[Prog.USES_ARRAYS] = _reaches_arrays(plan)
        words[Prog.KERNELS] = kernel_rows.ctypes.data
        words[Prog.X_NBYTES] = sizes[Buffer.X] * numbers.dtype.itemsize
        words[Prog.OUT_NBYTES] = sizes.get(Buffer.OUT, 0) * numbers.dtype.itemsize
        words[Prog.SCRATCH] = self.scratch[plan.rank].address
        words[Prog.SCRATCH_NBYTES] = self.scratch[plan.rank].nbytes
        if plan.n_pre:
            words[Prog.PRE_STEPS], words[Prog.N_PRE] = plan.steps.ctypes.data, plan.n_pre
            words[Prog.PRE_SPANS] = plan.spans.ctypes.data
        program.keep += [kernel_rows, args]
        if n_arrays > 1:
            self._place_many(program, n_arrays, sizes, numbers.dtype.itemsize)
        if numbers.op is not None and plan.collective == "allreduce" and not plan.parameter("out"):
            words[Prog.DESCRIPTOR] = id(numbers.dtype.numpy)
            program.keep.append(numbers.dtype.numpy)
        window_nbytes = -(-plan.stage_elements * int(kernel_rows[0, Kern.WIRE_ITEMSIZE]) // 64) * 64
        fits = self.n_windows * window_nbytes <= self.stage[plan.rank].nbytes
        n_windows = self.n_windows if plan.has_enter and fits else 1
        for kind in kinds:
            program.install(kind, window_nbytes=window_nbytes, n_windows=n_windows)
        return program

    def _place_many(self, program: Program, n: int, sizes: dict[int, int], itemsize: int) -> None:
        words, rank = program.words, program.plan.rank
        nbytes = np.array([sizes[N_BUFFERS + i] * itemsize for i in range(n - 1)], np.int64)
        places = np.zeros((2, self.size, N_BUFFERS + n - 1), np.int64)
        places[:, :, :N_BUFFERS] = self.places[rank]
        program.addresses = np.zeros(n - 1, np.int64)
        words[Prog.NBYTES], words[Prog.ADDRESSES] = nbytes.ctypes.data, program.addresses.ctypes.data
        words[Prog.PLACES], words[Prog.N_COLUMNS] = places.ctypes.data, places.shape[2]
        program.keep += [nbytes, places]

    # -- one rank ----------------------------------------------------------------------------------------------

    def ctx(self, rank: int) -> int:
        """The address of a rank's context."""
        return int(self.words[rank].ctypes.data)

    def call(self, rank: int, program: Program, x: int, out: int = 0) -> Code:
        """Begins a blocking call."""
        return Code(self.engine.call(self.ctx(rank), program.address, x, out))

    def resume(self, rank: int) -> Code:
        """Goes on with it."""
        # Naps and poll(2) come after long waits; a test that drives ranks in turns has none.
        self.words[rank, Ctx.IDLE] = 0
        return Code(self.engine.resume(self.ctx(rank)))

    # What the user of a rank does with an array; another kind of memory may put itself between.

    def adopt(self, array: Guarded) -> None:
        """A call on this array is about to begin."""

    def write(self, array: Guarded, data: bytes) -> None:
        """The user fills an array."""
        array.bytes[:] = np.frombuffer(data, np.uint8)

    def read(self, array: Guarded) -> bytes:
        """The user reads an array."""
        return array.bytes.tobytes()

    def _progress(self) -> bytes:
        places = self.words[:, [Ctx.PHASE, Ctx.ENTERED, Ctx.N_CALLS, Ctx.SEQUENCE_WORD]]
        return places.tobytes() + self.pcs.tobytes() + self.next_peers.tobytes()

    # -- whole calls -------------------------------------------------------------------------------------------

    def run(self, plans: Sequence[Plan], given: Sequence[Sequence[Array]], numbers: Numbers) -> list[list[Array]]:
        """One call on all ranks, as `Machine.run`."""
        return self.run_calls([plans], [given], numbers)[0]

    def run_calls(
        self,
        calls: Sequence[Sequence[Plan]],
        given: Sequence[Sequence[Sequence[Array]]],
        numbers: Numbers,
        *,
        seed: int = 0,
        order: Callable[[int], int] | None = None,
    ) -> list[list[list[Array]]]:
        """Several calls in a row, as `Machine.run_calls`; ranks take turns by lot, or as `order` says."""
        lot = random.Random(seed)
        sessions = [Session(self, rank, calls, given, numbers) for rank in range(self.size)]
        stalled, before = 0, b""
        while any(not s.over for s in sessions):
            left = [s.rank for s in sessions if not s.over]
            rank = lot.choice(left) if order is None else left[order(len(left)) % len(left)]
            sessions[rank].turn()
            now = self._progress()
            stalled, before = (0, now) if now != before else (stalled + 1, before)
            if stalled > _STALLED * self.size:
                raise Stuck(f"ranks {left} wait for ever: {self._where()}")
        return self.harvest(sessions)

    def run_in_threads(
        self, calls: Sequence[Sequence[Plan]], given: Sequence[Sequence[Sequence[Array]]], numbers: Numbers
    ) -> list[list[list[Array]]]:
        """The same with a thread a rank, which the engine lets run at once."""
        sessions = [Session(self, rank, calls, given, numbers) for rank in range(self.size)]
        errors: list[BaseException] = []

        def work(session: Session) -> None:
            try:
                while not session.over and not errors:
                    session.turn()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(s,)) for s in sessions]
        self.words[:, Ctx.SLICE_NS] = 50_000_000
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.words[:, Ctx.SLICE_NS] = 0
        if errors:
            raise errors[0]
        return self.harvest(sessions)

    def _where(self) -> list[str]:
        return [f"rank {r}: {Phase(w[Ctx.PHASE]).name} of call {w[Ctx.SEQUENCE]}" for r, w in enumerate(self.words)]

    def harvest(self, sessions: Sequence[Session]) -> list[list[list[Array]]]:
        for session in sessions:
            session.check()
        self.check_guards()
        return [[list(s.results[i]) for s in sessions] for i in range(len(sessions[0].results))]

    def check_guards(self) -> None:
        """Fails where somebody wrote beside STAGE, INLINE or SCRATCH."""
        for rank in range(self.size):
            self.stage[rank].check(f"rank {rank}'s STAGE")
            self.scratch[rank].check(f"rank {rank}'s SCRATCH")
            for part in self.inline[rank]:
                part.check(f"rank {rank}'s INLINE")


def _reaches_arrays(plan: Plan) -> bool:
    far = plan.spans["rank"] != plan.rank
    is_array = ~np.isin(plan.spans["buffer"], (Buffer.STAGE, Buffer.INLINE, Buffer.SCRATCH))
    # The kinds of all ranks matter where any rank reaches into an array: a root does not, its readers do.
    return bool((far & is_array).any()) or plan.name in ("direct.registered", "direct.cma")


class Session:
    """One rank's series of calls."""

    def __init__(
        self,
        world: World,
        rank: int,
        calls: Sequence[Sequence[Plan]],
        given: Sequence[Sequence[Sequence[Array]]],
        numbers: Numbers,
    ) -> None:
        self.world, self.rank, self.numbers = world, rank, numbers
        self.results: list[list[Array]] = []
        self._memory: list[dict[int, Guarded]] = []
        self._programs: dict[int, Program] = {}
        self._calls: Iterator[tuple[Plan, Sequence[Array]]] = iter(
            [(plans[rank], arrays[rank]) for plans, arrays in zip(calls, given, strict=True)]
        )
        self._running: Plan | None = None
        self.over = False

    def turn(self) -> None:
        """Begins the next call, or goes on with the running one."""
        if self._running is None:
            following = next(self._calls, None)
            if following is None:
                self.over = True
                return
            code = self._begin(*following)
        else:
            code = self.world.resume(self.rank)
        if code is Code.DONE:
            self._finish()
        elif code is not Code.SLICE:
            raise Ended(f"rank {self.rank}: {code.name} in {self.world._where()[self.rank]}")

    def _begin(self, plan: Plan, arrays: Sequence[Array]) -> Code:
        itemsize, memory = self.numbers.dtype.itemsize, {}
        for buffer, n in lengths(plan).items():
            if buffer in (Buffer.X, Buffer.OUT) or buffer >= N_BUFFERS:
                memory[buffer] = Guarded(n * itemsize, align=itemsize)
                self.world.adopt(memory[buffer])
        for buffer in memory:
            index = 0 if buffer == Buffer.X else buffer - N_BUFFERS + 1
            if buffer != Buffer.OUT:
                self.world.write(memory[buffer], np.ascontiguousarray(arrays[index]).tobytes())
        program = self._programs.get(id(plan))
        if program is None:
            program = self._programs[id(plan)] = self.world.program(plan, self.numbers)
        for buffer, guarded in memory.items():
            if buffer >= N_BUFFERS:
                program.addresses[buffer - N_BUFFERS] = guarded.address
        self._memory.append(memory)
        self._running = plan
        out = memory[Buffer.OUT].address if Buffer.OUT in memory and memory[Buffer.OUT].nbytes else 0
        return self.world.call(self.rank, program, memory[Buffer.X].address, out)

    def _finish(self) -> None:
        plan, memory = self._running, self._memory[-1]
        assert plan is not None
        if plan.collective == "allreduce_many":
            keys = [b for b in sorted(memory) if b != Buffer.OUT]
        else:
            out = plan.collective in ("reduce_scatter", "allgather") or plan.parameter("out", False)
            keys = [int(Buffer.OUT if out else Buffer.X)]
        self.results.append([np.frombuffer(self.world.read(memory[key]), self.numbers.dtype.numpy) for key in keys])
        for guarded in memory.values():
            self.world.write(guarded, bytes([POISON]) * guarded.nbytes)
        self._running = None

    def check(self) -> None:
        """Fails where somebody wrote beside an array, or into it after its call."""
        for index, memory in enumerate(self._memory):
            for buffer, guarded in memory.items():
                name = f"buffer {buffer} of rank {self.rank} in call {index}"
                guarded.check(name)
                assert (guarded.bytes == POISON).all(), f"somebody wrote into {name} after the call"
