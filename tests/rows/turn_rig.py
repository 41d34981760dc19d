"""Owns several ranks' engines in one process, driven in turns: the test decides who runs when, and nothing races.

A context's slice is made so short that a call returns as soon as it is blocked. Ranks "share memory" because they are
one process; the arena of a rank is an ordinary array, and cross-memory attach is shared memory's own put and get.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gfkernels import engine
from gfkernels.communicator.programs import Program, Programs, Terrain
from gfkernels.communicator.requests import Request
from gfkernels.engine.context import HEADER_NBYTES, MAX_LANES, N_CTX_WORDS, Code, Ctx, Kind
from gfkernels.transport import shm
from gfkernels.transport.table import Slot
from gfkernels.types import DTYPES, N_BUFFERS, N_CHANNELS, Buffer, ReduceOp

STAGE_NBYTES = 64 << 10
INLINE_NBYTES = 4096
ARENA_NBYTES = 1 << 20
_LINE = 64


def aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed bytes that begin on a page."""
    memory = np.zeros(nbytes + 4096, np.uint8)
    at = -memory.ctypes.data % 4096
    return memory[at : at + nbytes]


class EngineRank:
    """One rank: its context and memory."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.keep: list[Any] = []
        self.used_nbytes = 0
        self.words: npt.NDArray[np.int64] = np.zeros(N_CTX_WORDS, np.int64)
        self.ctx = int(self.words.ctypes.data)
        self.arena = aligned(ARENA_NBYTES)
        self.control = aligned(4096 + 2 * HEADER_NBYTES + shm.arrivals_nbytes(size) + 2 * INLINE_NBYTES)
        self.stage = aligned(STAGE_NBYTES)
        self.scratch = aligned(1 << 20)
        self.arrivals = int(self.control.ctypes.data) + 4096 + 2 * HEADER_NBYTES
        self.inline = self.arrivals + shm.arrivals_nbytes(size)

    def memory(self, *shape: int) -> npt.NDArray[np.int64]:
        """Words that live as long as the rank."""
        words: npt.NDArray[np.int64] = np.zeros(shape, np.int64)
        self.keep.append(words)
        return words

    def array(self, values: npt.NDArray[Any], registered: bool) -> npt.NDArray[Any]:
        """A copy of `values`, in the arena or outside it."""
        if not registered:
            return values.copy()
        view = self.arena[self.used_nbytes : self.used_nbytes + values.nbytes].view(values.dtype)
        self.used_nbytes += -(-values.nbytes // _LINE) * _LINE
        view[...] = values
        return view


class Rig:
    """A group of ranks.

    Args:
        size: ranks.
        cma: whether ordinary memory may be reached.
        engine: the compiled one, or another with the same functions.
        settings: of `choose`, over small defaults.
    """

    def __init__(self, size: int, *, cma: bool = True, engine: Any = engine, **settings: Any) -> None:
        self.size, self.engine = size, engine
        self.ranks = [EngineRank(r, size) for r in range(size)]
        defaults = {"plan": "auto", "segment_bytes": None, "lanes": None, "inline_bytes": 256,
                    "staging_bytes": STAGE_NBYTES, "cma_min_bytes": 0}  # fmt: skip
        self.settings = {**defaults, **settings}
        self.channels = [shm.channels(r, [rank.arrivals for rank in self.ranks]) for r in range(size)]
        self.programs = [Programs(self._wire(rank, cma)) for rank in self.ranks]

    def _wire(self, me: EngineRank, cma: bool) -> Terrain:
        size, words = self.size, me.words
        places = me.memory(2, size, N_BUFFERS)
        headers, shifts, stages = me.memory(size), me.memory(size), me.memory(size)
        for q, rank in enumerate(self.ranks):
            headers[q] = rank.control.ctypes.data + 4096
            stages[q] = rank.stage.ctypes.data
            for parity in (0, 1):
                places[parity, q, Buffer.INLINE] = rank.inline + parity * INLINE_NBYTES
        table = self.channels[me.rank].table
        words[Ctx.RANK], words[Ctx.SIZE] = me.rank, size
        words[Ctx.PLACES], words[Ctx.HEADERS] = places.ctypes.data, headers.ctypes.data
        words[Ctx.SHIFTS], words[Ctx.STAGES] = shifts.ctypes.data, stages.ctypes.data
        words[Ctx.CHANNELS] = words[Ctx.TABLE] = words[Ctx.CMA_CHANNELS] = table.ctypes.data
        words[Ctx.CMA_OK], words[Ctx.BEST_KIND] = cma, Kind.REGISTERED
        words[Ctx.ARENA], words[Ctx.ARENA_NBYTES] = me.arena.ctypes.data, ARENA_NBYTES
        words[Ctx.ABORT] = me.control.ctypes.data
        words[Ctx.HAS_CALLS] = bool(table[:, [Slot.BEGIN, Slot.PROGRESS, Slot.FLUSH]].any())
        shapes: list[tuple[Ctx, tuple[int, ...]]] = [
            (Ctx.BASES, (size, N_CHANNELS)),
            (Ctx.PCS, (MAX_LANES,)),
            (Ctx.ENDS, (MAX_LANES,)),
            (Ctx.NEXT_PEERS, (MAX_LANES,)),
            (Ctx.POINTERS, (4 * size + 8,)),
            (Ctx.COUNTS, (8,)),
            (Ctx.LANDINGS, (2, N_BUFFERS, 2)),
            (Ctx.TIMESPEC, (2,)),
            (Ctx.FDS, (1,)),
        ]
        for word, shape in shapes:
            words[word] = me.memory(*shape).ctypes.data
        return Terrain(me.rank, size, True, dict(self.settings), places, lambda _: int(me.scratch.ctypes.data))

    def request(self, collective: str, dtype: str, count: int, **more: Any) -> list[Program]:
        """Every rank's program."""
        request = Request(collective, more.pop("op", ReduceOp.SUM), DTYPES[dtype], elements=count, **more)
        return [programs.get(request) for programs in self.programs]

    def start(self, r: int, program: Program, x: int, out: int = 0) -> int:
        """Begins a call on one rank and builds what it asks for; what the engine answered."""
        return self._built(r, program, int(self.engine.call(self.ranks[r].ctx, program.address, x, out)))

    def resume(self, r: int, program: Program | None = None) -> int:
        """Lets one rank go on."""
        return self._built(r, program, int(self.engine.resume(self.ranks[r].ctx)))

    def _built(self, r: int, program: Program | None, code: int) -> int:
        while code == Code.NEED_PLAN and program is not None:
            program.build(Kind(int(self.ranks[r].words[Ctx.KIND])))
            code = int(self.engine.resume(self.ranks[r].ctx))
        return code

    def run(
        self,
        programs: Sequence[Program],
        xs: Sequence[npt.NDArray[Any]],
        outs: Sequence[npt.NDArray[Any]] | None = None,
        *,
        turn: Callable[[list[int]], int] | None = None,
        limit: int = 100_000,
    ) -> None:
        """Runs one call on all ranks; `turn` picks who runs next among those not done (None: one after the other)."""
        waiting, begun = list(range(self.size)), set[int]()
        while waiting:
            r = waiting[0] if turn is None else turn(waiting)
            limit -= 1
            assert limit > 0, f"ranks {waiting} never finish"
            if r in begun:
                code = self.resume(r, programs[r])
            else:
                begun.add(r)
                code = self.start(r, programs[r], xs[r].ctypes.data, outs[r].ctypes.data if outs else 0)
            assert code in (Code.DONE, Code.SLICE), Code(code)
            if code == Code.DONE:
                waiting.remove(r)
            elif turn is None:
                waiting.append(waiting.pop(0))
