"""Owns running calls on a communicator: the loop around the compiled engine, its deadline, and attending to news."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from gfkernels import engine
from gfkernels.communicator.failure import Failure, PeerRefused
from gfkernels.communicator.plane import Plane
from gfkernels.communicator.programs import Program, Programs
from gfkernels.communicator.site import Site
from gfkernels.config import Config
from gfkernels.engine.context import Code, Ctx, Kind, Owner, Phase
from gfkernels.engine.executor import blocked_on, reenter
from gfkernels.errors import UsageError

_HISTORY: Final = 256
_SLICE_NS: Final = 50_000_000
_WAITING_NS: Final = 1_000_000
"""A refusal this much older than our wait was sent to somebody who was not waiting yet."""

_LAST_WORDS_S: Final = 1.0
"""How long what a peer sent before it left may be on its way."""


class Core:
    """One communicator's engine as the interpreter drives it.

    Attributes:
        site: what all communicators of the world share.
        name: equal on all ranks, unique among communicators.
        members: world ranks by rank.
        rank: this process's rank among them.
        config: the settings.
        plane: words and memory.
        programs: plans as words.
        failure: what broke the communicator, and telling the others.
        history: the last calls' programs, newest last.
        run_behind: runs a blocking call behind the asynchronous ones.
        waited_ns: how long the running call has waited without anything moving.
    """

    run_behind: Callable[[Program, int, int, Any], None]

    def __init__(self, site: Site, name: str, members: tuple[int, ...], rank: int, config: Config) -> None:
        self.site, self.name, self.members, self.rank, self.config = site, name, members, rank, config
        self._counter = 0
        self.plane = Plane(self)
        self.ctx = self.plane.ctx
        self.words = self.plane.words
        self.programs = Programs(self.plane.terrain)
        self.failure = Failure(self)
        self.history: deque[Program] = deque(maxlen=_HISTORY)
        self._left_since: dict[int, float] = {}
        self._refusals: dict[int, tuple[int, int, int, str]] = {}
        self.waited_ns = 0

    @property
    def size(self) -> int:
        """Ranks."""
        return len(self.members)

    def exchange(self, value: Any) -> list[Any]:
        """An all-gather of JSON among the members, which call it in the same order."""
        self._counter += 1
        key = f"{self.name}/{self._counter}"
        timeout = self.config.connect_timeout_s
        return self.site.session.store.gather(key, self.rank, self.size, value, timeout, self.members)

    # -- blocking calls ----------------------------------------------------------------------------------------

    def finish(self, code: int, program: Program, x: int, out: int, keep: Any) -> None:
        """Brings a blocking call to its end that the engine did not end by itself.

        Args:
            code: what the engine answered.
            program: what runs.
            x, out: addresses, in case the engine was busy and the call has yet to start.
            keep: what the addresses belong to.
        """
        while code in (Code.BUSY, Code.QUEUED):
            # The queue runs the call in its turn; an engine that is free again by now takes it at once.
            if code == Code.QUEUED or int(self.words[Ctx.LOCK]) == Owner.QUEUE:
                self.run_behind(program, x, out, keep)
                return
            if int(self.words[Ctx.LOCK]) == Owner.CALLER:
                raise UsageError(
                    f"rank {self.rank}: another thread is inside a call on communicator {self.name}. Concurrent calls "
                    "need one communicator each: split() makes more"
                )
            code = engine.call(self.ctx, program.address, x, out)
        if code == Code.REFUSED:
            raise self.refusal()
        try:
            self.waited_ns = 0
            while code != Code.DONE:
                code = self.attend(code, program)
        except BaseException as error:
            self.give_up(error, program, keep)
            raise

    def attend(self, code: int, program: Program) -> int:
        """Does what the engine asks for, and lets it go on.

        Returns:
            The next code.

        Raises:
            GfkernelsError: the call has failed; `give_up` must follow.
        """
        if code == Code.SLICE:
            self.count_slice(program)
            self.read_news(program)
        elif code == Code.EVENT:
            self.read_news(program)
        elif code == Code.NEED_PLAN:
            program.build(Kind(int(self.words[Ctx.KIND])))
        elif code == Code.ABORTED:
            raise self.failure.of_abort(program)
        elif code == Code.MISMATCH:
            raise self.failure.mismatch(program, int(self.words[Ctx.PEER]), int(self.words[Ctx.SEQUENCE]))
        elif code == Code.FAULT:
            raise self.failure.of_fault(program)
        else:
            raise AssertionError(f"the engine answered {code}")
        return int(engine.resume(self.ctx))

    def count_slice(self, program: Program) -> None:
        """Counts a slice that is over against the deadline.

        Raises:
            WaitTimeout: nothing has moved for that long.
        """
        # Slices are counted, not the clock: a job that was suspended has not timed out when it wakes.
        self.waited_ns = 0 if self.words[Ctx.MOVED] else self.waited_ns + int(self.words[Ctx.SLICE_NS])
        if self.waited_ns >= self.config.timeout_s * 1e9:
            raise self.failure.timeout(program)

    def limit_slice(self) -> None:
        """Slices are no longer than the deadline is far."""
        self.words[Ctx.SLICE_NS] = max(1_000_000, min(_SLICE_NS, int(self.config.timeout_s * 1e9)))

    # -- news --------------------------------------------------------------------------------------------------

    def read_news(self, program: Program) -> None:
        """Reads what peers have told; raises where it ends this call."""
        self.hear_news()
        if self.failure.heard:
            raise self.failure.of_abort(program)
        sequence = int(self.words[Ctx.SEQUENCE])
        for old in [number for number in self._refusals if number < sequence]:
            del self._refusals[old]
        if sequence in self._refusals:
            self._heed_refusal(*self._refusals[sequence])
        for q, why in self.failure.gone():
            if why != "left" or self._misses(q):
                raise self.failure.lost(program, q, why)

    def _misses(self, q: int) -> bool:
        """Whether this call needs something of a rank that has left."""
        if not blocked_on(self.ctx, q):
            return False
        # What it sent before leaving is in memory already, but over a network may be behind the news of its leaving.
        since = self._left_since.setdefault(q, time.monotonic())
        return self.plane.same_host or time.monotonic() - since > _LAST_WORDS_S

    def hear_news(self) -> None:
        """Takes note of what peers have told."""
        for event in self.site.events.take(self.name):
            self._hear(event)

    def _hear(self, event: dict[str, Any]) -> None:
        kind, rank = event["event"], int(event["rank"])
        if kind == "out":
            self.failure.out.add(rank)
        elif kind == "closed":
            self.failure.closed.add(rank)
        elif kind == "abort":
            self.failure.heard.append(event)
        elif kind == "answer":
            self.failure.roll_call.hear(event)
        elif kind == "refused":
            number = int(event["sequence"])
            refusal = (int(event["attempt"]), int(event["time_ns"]), rank, str(event["message"]))
            if number >= int(self.words[Ctx.SEQUENCE]):
                self._refusals[number] = max(refusal, self._refusals.get(number, refusal))

    def _heed_refusal(self, attempt: int, time_ns: int, rank: int, message: str) -> None:
        if attempt < int(self.words[Ctx.ATTEMPT]) or self.words[Ctx.PHASE] == Phase.IDLE:
            return
        text = f"rank {rank} refused call #{int(self.words[Ctx.SEQUENCE])}, and no rank took part in it: {message}"
        entering = self.words[Ctx.PHASE] == Phase.ENTER
        if entering:
            began_ns = int(self.words[Ctx.IDLE_SINCE_NS]) - _WAITING_NS
        else:
            # Clocks of several hosts do not compare: there every refusal counts as heard while waiting.
            single_host = len(self.site.session.hosts.groups) == 1
            began_ns = int(self.words[Ctx.STARTED_NS]) if single_host else 0
        if time_ns >= began_ns and entering:
            raise PeerRefused(text, attempt)
        if time_ns >= began_ns:
            # Without a common entry some data may be under way already, and cannot be called back.
            raise UsageError(f"{text}. Over TCP that breaks the communicator")
        if not entering:
            return
        # It was sent before we came: this call is the one that follows it.
        self.words[Ctx.ATTEMPT] = attempt + 1
        reenter(self.ctx)

    def refuse_locally(self, error: UsageError) -> None:
        """Tells peers that may be waiting that this rank did not make the call. No sequence number is used up."""
        if self.size == 1 or self.failure.cause is not None or self.words[Ctx.REFUSE] or self.plane.forked:
            return
        number = int(self.words[Ctx.SEQUENCE]) + int(self.words[Ctx.PENDING]) + 1
        attempt = int(self.words[Ctx.ATTEMPT])
        event = {"event": "refused", "comm": self.name, "rank": self.rank, "sequence": number, "attempt": attempt,
                 "time_ns": time.monotonic_ns(), "message": str(error)}  # fmt: skip
        self.site.events.post(event, self.others)
        if not self.words[Ctx.PENDING] and int(self.words[Ctx.LOCK]) == Owner.NOBODY:
            self.words[Ctx.ATTEMPT] = attempt + 1

    @property
    def others(self) -> list[int]:
        """World ranks of the other members."""
        return [world_rank for q, world_rank in enumerate(self.members) if q != self.rank]

    def refusal(self) -> Exception:
        """Why no call is possible any more."""
        if self.plane.forked:
            return UsageError(
                f"communicator {self.name} belongs to the process this one was forked from: call gfkernels.init here"
            )
        return self.failure.broken()

    def give_up(self, error: BaseException, program: Program, keep: Any) -> None:
        """Leaves a call that has failed; a call that was only refused is taken back, anything else breaks us."""
        if int(self.words[Ctx.LOCK]) == Owner.NOBODY or self.plane.forked:
            return
        if isinstance(error, PeerRefused):
            self.words[Ctx.SEQUENCE] -= 1
            self.words[Ctx.ATTEMPT] = error.attempt + 1
            engine.release(self.ctx)
        else:
            if self.words[Ctx.PHASE] != Phase.IDLE:
                self.failure.break_up(error, program, keep)
            engine.release(self.ctx)
