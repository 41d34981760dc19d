"""Owns a weakly ordered machine: it interprets the engine's sources, and shows each thread memory as late as allowed.

Plain stores to shared memory wait in their thread's buffer and become visible in any order; a store with release order
makes all earlier ones visible first, but for those past the caches, which only `drain_streams` orders. A plain load may
give any value that the place has held since what the thread has acquired: a load with acquire order acquires everything
that was visible when the value that it reads was written. That is the memory model of LLVM, less what no processor does
(values out of thin air). Threads take turns at every access to shared memory, by lot.
"""

from __future__ import annotations

import bisect
import ctypes
import random
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from changed_sources import Changes, Sources, as_pointer, uncompiled
from engine_parts import Guarded, Numbers, shm_ends
from engine_world import Array, Session, Stuck, World

from gfkernels.engine.context import Ctx, Kind
from gfkernels.plan.model import Plan
from gfkernels.types import STREAMED

_I64 = ctypes.c_int64
_FIRST_FUNCTION = 1 << 60
_LONG_ALWAYS = ("_LONG_NBYTES: Final = 8 << 20", "_LONG_NBYTES: Final = 1")
_STREAM_ALWAYS = ("    return wanted and", "    return nbytes > 0 or")
_IDLE_LIMIT = 4000
"""Idle turns in a row, of all threads together, after which they are taken to wait for ever."""


class _Stop(BaseException):
    """Another thread has failed."""


class Wild(AssertionError):
    """A row works on memory that belongs to no buffer."""


class WeakMemory:
    """Shared memory and the threads that use it.

    Args:
        n_threads: threads; each must `enter` first.
        seed: of all lots.
        numbers: what COMBINE adds.
    """

    def __init__(self, n_threads: int, seed: int, numbers: Numbers | None = None) -> None:
        self._lot, self._numbers = random.Random(seed), numbers or Numbers()
        self._turns = [threading.Semaphore(0) for _ in range(n_threads)]
        self._alive = [True] * n_threads
        self._me = threading.local()
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._pending: list[list[tuple[int, bytes]]] = [[] for _ in range(n_threads)]
        self._streams: list[list[tuple[int, bytes]]] = [[] for _ in range(n_threads)]
        self._log: list[tuple[int, int, bytes]] = []  # (thread, address, what was there)
        self._written: dict[int, int] = {}
        self._acquired = [0] * n_threads
        self._seen: list[dict[int, int]] = [{} for _ in range(n_threads)]
        self._idle, self._now = 0, 1_000_000_000
        self._functions: list[Callable[..., int]] = []
        self.failure: BaseException | None = None

    def share(self, address: int, nbytes: int) -> None:
        """What lies there is shared between threads."""
        if nbytes:
            at = bisect.bisect(self._starts, address)
            self._starts.insert(at, address)
            self._stops.insert(at, address + nbytes)

    def _is_shared(self, address: int) -> bool:
        at = bisect.bisect(self._starts, address)
        return at > 0 and address < self._stops[at - 1]

    def _check(self, address: int, nbytes: int) -> None:
        at = bisect.bisect(self._starts, address)
        if nbytes and (at == 0 or address + nbytes > self._stops[at - 1]):
            raise Wild(f"{nbytes} bytes at {address:#x}, where no buffer is")

    # -- turns -------------------------------------------------------------------------------------------------

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        """Runs one function a thread to the end of all; raises the first failure."""
        threads = [threading.Thread(target=self._work, args=(i, work)) for i, work in enumerate(works)]
        for thread in threads:
            thread.start()
        self._turns[self._lot.randrange(len(works))].release()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        for index in range(len(works)):
            self._drain_all(index)
            self._drain_streams(index)

    def _work(self, index: int, work: Callable[[], None]) -> None:
        self._me.index = index
        self._turns[index].acquire()
        try:
            if self.failure is None:
                work()
        except _Stop:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        self._alive[index] = False
        left = [i for i, alive in enumerate(self._alive) if alive]
        if left:
            self._turns[self._lot.choice(left)].release()

    def _point(self, chance: float = 0.15) -> None:
        """Others may come first, and what somebody stored may become visible."""
        if self._lot.random() < 0.3:
            self._drain_one(self._lot.randrange(len(self._pending)))
        if self._lot.random() < chance:
            others = [i for i, alive in enumerate(self._alive) if alive and i != self._me.index]
            if others:
                self._turns[self._lot.choice(others)].release()
                self._turns[self._me.index].acquire()
                if self.failure is not None:
                    raise _Stop

    def idle(self, *_: int) -> int:
        """Nothing to do: others go first."""
        self._idle += 1
        if self._idle > _IDLE_LIMIT:
            raise Stuck("all ranks wait for ever")
        self._point(1.0)
        return 0

    # -- stores ------------------------------------------------------------------------------------------------

    def _show(self, thread: int, address: int, data: bytes) -> None:
        self._log.append((thread, address, ctypes.string_at(address, len(data))))
        ctypes.memmove(address, data, len(data))
        self._written[address] = len(self._log)
        self._idle = 0

    def _drain_one(self, thread: int) -> None:
        queue, streams = self._pending[thread], self._streams[thread]
        queue = self._lot.choice((queue, streams)) if streams else queue
        if queue:
            index = self._lot.randrange(len(queue))
            address, data = queue[index]
            if not any(a < address + len(data) and address < a + len(d) for a, d in queue[:index]):
                self._show(thread, *queue.pop(index))

    def _drain_all(self, thread: int) -> None:
        for address, data in self._pending[thread]:
            self._show(thread, address, data)
        self._pending[thread].clear()

    def _drain_streams(self, thread: int) -> None:
        for address, data in self._streams[thread]:
            self._show(thread, address, data)
        self._streams[thread].clear()

    def _settle(self, address: int, nbytes: int) -> None:
        """A thread sees its own stores to a place in their order."""
        me = self._me.index
        for queue, drain in ((self._pending[me], self._drain_all), (self._streams[me], self._drain_streams)):
            if any(a < address + nbytes and address < a + len(d) for a, d in queue):
                drain(me)

    def store(self, address: int, data: bytes, streamed: bool = False) -> None:
        """Plain, or past the caches."""
        if not data:
            return
        if not self._is_shared(address):
            ctypes.memmove(address, data, len(data))
            return
        if streamed or self._streams[self._me.index]:
            self._settle(address, len(data))
        (self._streams if streamed else self._pending)[self._me.index].append((address, data))
        self._point()

    def store_release(self, address: int, value: int) -> None:
        """With release order."""
        self._drain_all(self._me.index)
        self._point()
        self._show(self._me.index, address, bytes(_I64(value)))

    # -- loads -------------------------------------------------------------------------------------------------

    def load(self, address: int, nbytes: int) -> bytes:
        """Plain: as it is, or as it was at any time since what was acquired."""
        if not nbytes or not self._is_shared(address):
            return ctypes.string_at(address, nbytes)
        self._point()
        me = self._me.index
        self._settle(address, nbytes)
        floor = max(self._acquired[me], self._seen[me].get(address, 0))
        when = self._lot.choice((floor, len(self._log)))
        self._seen[me][address] = when
        return self._as_it_was(address, nbytes, when)

    def _as_it_was(self, address: int, nbytes: int, when: int) -> bytes:
        data = bytearray(ctypes.string_at(address, nbytes))
        own: set[int] = set()
        for thread, at, before in reversed(self._log[when:]):
            for i in range(max(at, address), min(at + len(before), address + nbytes)):
                # A thread sees its own stores at once, and nothing older behind them.
                if thread == self._me.index:
                    own.add(i)
                elif i not in own:
                    data[i - address] = before[i - at]
        return bytes(data)

    def load_acquire(self, address: int) -> int:
        """With acquire order."""
        self._point()
        me = self._me.index
        self._settle(address, 8)
        self._acquired[me] = max(self._acquired[me], self._written.get(address, 0))
        return int(_I64.from_address(address).value)

    def compare_exchange(self, address: int, expected: int, desired: int) -> int:
        """With both orders."""
        self._drain_all(self._me.index)
        found = self.load_acquire(address)
        if found == expected:
            self._show(self._me.index, address, bytes(_I64(desired)))
        return found

    # -- what stands in for the compiled world -----------------------------------------------------------------

    def register(self, function: Callable[..., int]) -> int:
        """The number under which a table names a function of ours."""
        self._functions.append(function)
        return _FIRST_FUNCTION + len(self._functions) - 1

    def call(self, function: int, *arguments: int) -> int:
        """A call through a pointer."""
        if function >= _FIRST_FUNCTION:
            return int(self._functions[function - _FIRST_FUNCTION](*arguments))
        return self._combine(function, *arguments)

    def _combine(self, kernel: int, pointers: int, counts: int, n: int, args: int) -> int:
        given = (_I64 * 5).from_address(counts)
        n_src_wire, n_src, n_dst_wire, n_dst, flags = given
        # The kernel works on copies, which lie anywhere.
        given[4] = flags & ~STREAMED
        plain, wire = self._numbers.dtype.itemsize, (self._numbers.wire or self._numbers.dtype).itemsize
        sizes = [wire] * n_src_wire + [plain] * n_src + [wire] * n_dst_wire + [plain] * n_dst
        places = (_I64 * len(sizes)).from_address(pointers)
        targets = len(sizes) - n_dst_wire - n_dst
        copies = [ctypes.create_string_buffer(max(1, n * size)) for size in sizes]
        for place, size in zip(places, sizes, strict=True):
            self._check(place, n * size)
        for i in range(targets):
            copies[i].raw = self.load(places[i], n * sizes[i]) or b"\0"
        moved = (_I64 * len(sizes))(*(ctypes.addressof(copy) for copy in copies))
        ctypes.CFUNCTYPE(_I64, *(_I64,) * 4)(kernel)(ctypes.addressof(moved), counts, n, args)
        for i in range(targets, len(sizes)):
            streamed = i == targets and bool(flags & STREAMED)
            self._store_parts(places[i], copies[i].raw[: n * sizes[i]], sizes[i], streamed)
        return 0

    def _store_parts(self, address: int, data: bytes, unit: int, streamed: bool) -> None:
        cut = len(data) // (2 * unit) * unit
        self.store(address, data[:cut], streamed)
        self.store(address + cut, data[cut:], streamed)

    def _copy(self, dst: int, src: int, nbytes: int, streamed: bool = False) -> None:
        self._check(src, nbytes)
        self._check(dst, nbytes)
        self._store_parts(dst, self.load(src, nbytes), 1, streamed)

    def _stream(self, dst: int, src: int, nbytes: int) -> None:
        self._copy(dst, src, nbytes, streamed=True)

    def _clock(self, timespec: int) -> int:
        self._now += 1000
        return self._now

    def stand_ins(self) -> dict[str, Any]:
        """Modules for the engine's and the transport's sources."""
        calls = {f"call{n}": self.call for n in (1, 3, 4, 5, 8)}
        memory = SimpleNamespace(
            load64=lambda a: int.from_bytes(self.load(a, 8), "little", signed=True),
            load32=lambda a: int.from_bytes(self.load(a, 4), "little", signed=True),
            store64=lambda a, v: self.store(a, bytes(_I64(v))),
            load_acquire=self.load_acquire, store_release=self.store_release,
            compare_exchange=self.compare_exchange, pause=self.idle, LINE_NBYTES=64,
            drain_streams=lambda: self._drain_streams(self._me.index), **calls,
        )  # fmt: skip
        libc = SimpleNamespace(
            copy=self._copy, stream=self._stream, now_ns=self._clock, sched_yield=self.idle, usleep=self.idle,
            poll=lambda *_: 0,
        )  # fmt: skip
        jit = SimpleNamespace(njit=uncompiled, cfunc=as_pointer(self.register))
        names = ("jit", "libc", "memory")
        return {f"gfkernels.native.{name}": part for name, part in zip(names, (jit, libc, memory), strict=True)}


class WeakWorld(World):
    """Ranks on a weakly ordered machine, run by the engine's sources with changes.

    Args:
        size: ranks.
        seed: of all lots.
        changes: to the sources.
        kind: how arrays can be reached.
        numbers: what is added.
        n_threads: threads; None: one a rank.
        n_windows: as in `World`.
        streamed: whatever is written to STAGE, or copied into an array, goes past the caches.
    """

    def __init__(
        self,
        size: int,
        seed: int,
        *,
        changes: Changes | None = None,
        kind: Kind = Kind.REGISTERED,
        numbers: Numbers | None = None,
        n_threads: int | None = None,
        streamed: bool = False,
        n_windows: int = 3,
    ) -> None:
        self.memory, self._numbers = WeakMemory(n_threads or size, seed, numbers), numbers or Numbers()
        engine = [f"gfkernels.engine.{name}" for name in ("executor", "entry", "rows", "staging", "waiting")]
        if streamed:
            more = {"gfkernels.engine.staging": _STREAM_ALWAYS, "gfkernels.engine.rows": _LONG_ALWAYS}
            changes = {
                **(changes or {}),
                **{name: [*(changes or {}).get(name, ()), change] for name, change in more.items()},
            }
        sources = Sources([*engine, "gfkernels.transport.shm"], changes, self.memory.stand_ins())
        ends = shm_ends(size, sources.module("gfkernels.transport.shm"))
        executor = sources.module("gfkernels.engine.executor")
        super().__init__(size, kind=kind, engine=executor, ends=ends, n_windows=n_windows)
        self.words[:, Ctx.SLICE_NS] = 1 << 60
        for counters in ends[0].keep[-1]:  # type: ignore[attr-defined]
            self.memory.share(int(counters.ctypes.data), counters.nbytes)
        for header in self.headers:
            self.memory.share(int(header.ctypes.data), header.nbytes)
        for part in [*self.stage, *self.scratch, *(copy for pair in self.inline for copy in pair)]:
            self.adopt(part)

    def adopt(self, array: Guarded) -> None:
        self.memory.share(array.address, array.nbytes)

    def write(self, array: Guarded, data: bytes) -> None:
        self.memory.store(array.address, data)

    def read(self, array: Guarded) -> bytes:
        return self.memory.load(array.address, array.nbytes)

    def run_weakly(self, calls: Sequence[Sequence[Plan]], given: Sequence[Sequence[Sequence[Array]]]) -> list[Any]:
        """Runs calls on all ranks at once; results as `run_calls`."""
        sessions = [Session(self, rank, calls, given, self._numbers) for rank in range(self.size)]

        def work(session: Session) -> Callable[[], None]:
            def run() -> None:
                while not session.over:
                    session.turn()

            return run

        self.memory.run([work(session) for session in sessions])
        return self.harvest(sessions)


def weak_inputs(seed: int, calls: Sequence[Sequence[Plan]], numbers: Numbers) -> list[list[list[Array]]]:
    """Small whole numbers, all different from the poison."""
    lot = np.random.default_rng(seed)

    def one(plan: Plan) -> list[Array]:
        return [lot.integers(1, 9, n).astype(numbers.dtype.numpy) for n in (plan.parameter("counts") or [plan.count])]

    return [[one(plan) for plan in plans] for plans in calls]
