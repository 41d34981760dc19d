"""Owns asynchronous calls: the queue of a communicator, the thread that runs it, and the handles callers wait on."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from gfkernels import engine
from gfkernels.communicator.core import Core
from gfkernels.communicator.programs import Program
from gfkernels.engine.context import Code, Ctx, Owner
from gfkernels.errors import GfkernelsError, WaitTimeout
from gfkernels.trace import log

_POLL_S: Final = 0.02
_JOIN_S: Final = 5.0


class Work:
    """An asynchronous call. Keeps its arrays alive until it is over.

    Calls of one communicator run in the order in which they were made. Waiting runs them, so the waiting thread loses
    no time to being woken.
    """

    def __init__(self, queue: Queue | None, describe: str) -> None:
        self._queue = queue
        self._describe = describe
        self._over = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        self._raised = False

    def done(self) -> bool:
        """Whether the call is over (successfully or not); never waits."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the call to end.

        Args:
            timeout: seconds; None: as long as the communicator's own deadline allows.

        Returns:
            The reduced array.

        Raises:
            WaitTimeout: it is not over yet; the call goes on, and may be waited for again.
            GfkernelsError: the call failed; the communicator is broken.
        """
        if not self._over.is_set() and self._queue is not None:
            self._queue.run_until(self, timeout)
        if self._error is not None:
            self._raised = True
            raise self._error
        return self._value

    @property
    def result(self) -> Any:
        """The reduced array, waited for."""
        return self.wait()

    def synchronize(self) -> None:
        """Blocks the host until the result is in memory. On the host that is what `wait` does."""
        self.wait()

    def __repr__(self) -> str:
        state = "running" if not self.done() else ("failed" if self._error is not None else "done")
        return f"<Work {self._describe}: {state}>"

    def _end(self, value: Any, error: BaseException | None) -> None:
        self._value, self._error = value, error
        self._over.set()

    def __del__(self) -> None:
        if self._error is not None and not self._raised:
            log.warning("%s failed, and nobody waited for it: %s", self._describe, self._error)


class _Entry:
    """A call that waits for its turn."""

    def __init__(self, program: Program, x: int, out: int, keep: Any, finish: Callable[[], Any], work: Work) -> None:
        self.program, self.x, self.out, self.keep, self.finish, self.work = program, x, out, keep, finish, work
        self.prepare: Callable[[], None] | None = None


class Queue:
    """The asynchronous calls of one communicator, in program order.

    Whoever holds `_turn` runs them: the progress thread, or a thread that waits for one of them, which then need not
    be woken. The engine itself is held (`Owner.QUEUE`) from a call's first row to its last.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._entries: deque[_Entry] = deque()
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._wake = threading.Event()
        self._running: _Entry | None = None
        self._waiters = 0
        self._thread: threading.Thread | None = None
        self._stopping = False
        _queues.add(self)

    def submit(
        self, program: Program, x: int, out: int, keep: Any, finish: Callable[[], Any], *, start: bool = True
    ) -> Work:
        """Appends a call.

        Args:
            program: what runs.
            x, out: addresses.
            keep: what they belong to.
            finish: run after the call; gives the work's value.
            start: see to it that somebody runs it, also if nobody waits.
        """
        work = Work(self, f"{program.request} on rank {self._core.rank}")
        with self._lock:
            if self._stopping or self._core.words[Ctx.REFUSE]:
                raise self._core.refusal()
            self._entries.append(_Entry(program, x, out, keep, finish, work))
            self._core.words[Ctx.PENDING] += 1
        if start:
            self._start_thread()
            self._wake.set()
        return work

    def run_until(self, work: Work, timeout: float | None) -> None:
        """Runs the queue until a call is over.

        Raises:
            WaitTimeout: it is not over in time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not work.done():
            left = _POLL_S if deadline is None else min(_POLL_S, deadline - time.monotonic())
            if left <= 0:
                raise WaitTimeout(f"{work._describe} is not over after {timeout:g} s; it goes on")
            self._take_turn(left, deadline)
            work._over.wait(0 if self._turn_is_free() else left)

    def _turn_is_free(self) -> bool:
        return not self._turn.locked()

    def _take_turn(self, seconds: float, deadline: float | None) -> None:
        """One stretch of the queue in this thread, if the thread that runs it lets go in time."""
        self._count_waiter(1)
        try:
            taken = self._turn.acquire(timeout=max(0.0, seconds))
        finally:
            self._count_waiter(-1)
        if not taken:
            return
        try:
            left_ns = 50_000_000 if deadline is None else int(max(0.0, deadline - time.monotonic()) * 1e9)
            self._stretch(min(50_000_000, max(1_000_000, left_ns)))
        finally:
            self._turn.release()

    def _count_waiter(self, change: int) -> None:
        with self._lock:
            self._waiters += change
            self._core.words[Ctx.HANDOVER] = 1 if self._waiters else 0

    def _stretch(self, slice_ns: int) -> bool:
        """Runs the first call until it ends or a slice is over; False where there is none. The caller has the turn."""
        core = self._core
        entry = self._running
        if entry is None:
            with self._lock:
                entry = self._entries[0] if self._entries else None
            if entry is None:
                return False
            if core.words[Ctx.REFUSE]:
                self._over(entry, core.refusal())
                return True
        core.words[Ctx.SLICE_NS] = slice_ns
        try:
            if self._running is None:
                if not engine.acquire(core.ctx, Owner.QUEUE):
                    time.sleep(0)  # a blocking call in another thread; it began before this one was queued
                    return True
                self._running = entry
                core.waited_ns = 0
                code = engine.call_queued(core.ctx, entry.program.address, entry.x, entry.out)
            else:
                code = engine.resume(core.ctx)
            while code not in (Code.DONE, Code.SLICE):
                code = core.attend(code, entry.program)
            if code == Code.SLICE:
                core.count_slice(entry.program)
                core.read_news(entry.program)
                return True
        except BaseException as error:
            core.give_up(error, entry.program, (entry.keep, entry))
            self._running = None
            self._over(entry, error)
            if not isinstance(error, GfkernelsError):
                raise
            return True
        finally:
            core.limit_slice()
        self._running = None
        self._over(entry, None)
        return True

    def _over(self, entry: _Entry, error: BaseException | None) -> None:
        value = None
        if error is None:
            try:
                value = entry.finish()
            except BaseException as failure:
                error = failure
        with self._lock:
            self._entries.popleft()
            self._core.words[Ctx.PENDING] -= 1
        entry.work._end(value, error)

    # -- the thread --------------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        with self._lock:
            if self._thread is None:
                # A daemon: the interpreter joins others before atexit could stop them.
                self._thread = threading.Thread(
                    target=_run_thread, args=(weakref.ref(self), self._wake), name="gfkernels-progress", daemon=True
                )
                self._thread.start()

    def drain(self) -> None:
        """Runs what is queued to its end; errors stay with their works."""
        while True:
            with self._lock:
                work = self._entries[-1].work if self._entries else None
            if work is None:
                return
            try:
                self.run_until(work, None)
            except GfkernelsError as error:
                log.debug("draining the queue: %s", error)

    def stop(self) -> None:
        """Ends the thread; queued calls that have not begun fail."""
        if self._core.plane.forked:
            return
        with self._lock:
            self._stopping = True
        if self.has_work():
            log.warning("%d asynchronous calls were not over when communicator %s ended", len(self._entries),
                        self._core.name)  # fmt: skip
        # Whoever runs the queue returns at its next idle round and finds that it shall not go on.
        self._core.plane.refuse()
        self._core.words[Ctx.HANDOVER] = 1
        self._wake.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_S)
        with self._lock:
            entries = [entry for entry in self._entries if entry is not self._running]
        for entry in entries:
            with self._lock:
                self._entries.remove(entry)
                self._core.words[Ctx.PENDING] -= 1
            entry.work._end(None, self._core.refusal())

    def has_work(self) -> bool:
        """Whether calls are queued or running."""
        return bool(self._entries)


def _run_thread(queue_ref: Any, wake: threading.Event) -> None:
    while True:
        wake.wait()
        queue = queue_ref()
        if queue is None:
            return
        if queue._stopping and not queue.has_work():
            return
        wake.clear()
        while queue.has_work() and not (queue._stopping and queue._core.words[Ctx.REFUSE]):
            if queue._waiters:
                time.sleep(0.0002)  # somebody waits for a result, and runs the queue
                continue
            with queue._turn:
                queue._stretch(50_000_000)
        if queue._stopping:
            return
        del queue


_queues: weakref.WeakSet[Queue] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for queue in list(_queues):
        queue.stop()
