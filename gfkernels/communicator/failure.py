"""Owns the end of a communicator: breaking it on all ranks, what each of them raises, and the table of a mismatch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from gfkernels.communicator.programs import Program
from gfkernels.communicator.roll_call import RollCall, describe, differences, ranks
from gfkernels.communicator.site import graveyard
from gfkernels.engine.context import Ctx, Phase
from gfkernels.engine.executor import blocked_on
from gfkernels.errors import (
    CommunicatorBroken,
    GfkernelsError,
    MismatchError,
    PeerLostError,
    TransportError,
    UsageError,
    WaitTimeout,
)
from gfkernels.trace import log
from gfkernels.transport.table import Fault

if TYPE_CHECKING:
    from gfkernels.communicator.core import Core

_TABLE_S: Final = 2.0
_ANSWERS_S: Final = 1.0
"""How long a rank that is in the call may take to say so: it polls for news, but may share its core."""
_CAUSE_S: Final = 1.0
_LAST_WORDS_S: Final = 0.2
"""How much later than the end of its connection the reason for it may arrive from a peer."""
_SHOWN: Final = 5


class PeerRefused(UsageError):
    """Another rank refused the call that this one was waiting in; nothing has moved, and the communicator goes on."""

    def __init__(self, message: str, attempt: int = 0) -> None:
        super().__init__(message)
        self.attempt = attempt


class Failure:
    """What went wrong on one communicator.

    Attributes:
        cause: what broke it here; None while it works.
        heard: abort events of peers.
        roll_call: what the ranks say of the call that failed.
        out: ranks that have said that they are out of the failed call.
        closed: ranks that have closed this communicator.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self.cause: BaseException | None = None
        self.heard: list[dict[str, Any]] = []
        self.roll_call = RollCall(core)
        self.out: set[int] = set()
        self.closed: set[int] = set()

    def where(self, program: Program) -> str:
        """For messages: the call, the rank and the communicator."""
        core = self._core
        number = int(core.words[Ctx.SEQUENCE])
        return f"call #{number} {program.request} on rank {core.rank} of {core.size} ({core.name})"

    def gone(self) -> list[tuple[int, str]]:
        """Ranks that will never answer again, and why. Who died comes first: others may have left because of that."""
        core = self._core
        found = [
            (q, core.site.events.gone(world_rank) or ("left" if q in self.closed else ""))
            for q, world_rank in enumerate(core.members)
            if q != core.rank
        ]
        return sorted([(q, why) for q, why in found if why], key=lambda one: one[1] == "left")

    def lost(self, program: Program, q: int, why: str) -> PeerLostError:
        """The error of a call that cannot go on without rank `q`."""
        return PeerLostError(f"{self.where(program)} lost rank {q}: {why}", q)

    # -- what to raise -----------------------------------------------------------------------------------------

    def of_fault(self, program: Program) -> GfkernelsError:
        """The error for a transport function's fault."""
        fault, peer, error = self._core.plane.fault()
        if fault is Fault.MISMATCH:
            return self.mismatch(program, peer, self._core.plane.mismatched_call(peer))
        if fault is Fault.PEER_LOST and self._wait_for_cause(_LAST_WORDS_S) is not None:
            # It gave up rather than died, and says why.
            return self.of_abort(program)
        # A neighbour that gave up ends its connection too.
        for q, why in self.gone():
            if why != "left":
                return self.lost(program, q, why)
        error.args = (f"{self.where(program)}: {error}",)
        return error

    def of_abort(self, program: Program) -> GfkernelsError:
        """The error for a peer's abort: of the same kind as the peer's own, naming it."""
        event = self._wait_for_cause()
        if event is None:
            return self._of_silence(program)
        rank, kind, text = int(event["rank"]), str(event["kind"]), str(event["message"])
        if kind == "MismatchError":
            return self.mismatch(program, rank, int(event["sequence"]))
        if event.get("roll"):
            self.roll_call.answer(program, int(event["sequence"]))
            text = f"{text} {ranks(self.roll_call.absent(_ANSWERS_S))}"
        told = f"{self.where(program)} was ended by rank {rank}, which {text}"
        if kind == "PeerLostError":
            return PeerLostError(told, int(event.get("lost", -1)))
        if kind == "UsageError":
            return UsageError(f"{self.where(program)}: {text}")
        return WaitTimeout(told) if kind == "WaitTimeout" else TransportError(told)

    def _of_silence(self, program: Program) -> GfkernelsError:
        # The abort word came, its explanation did not: rank 0 passes explanations on, and may be the one that died.
        core = self._core
        if gone := self.gone():
            return self.lost(program, *gone[0])
        self.roll_call.answer(program, int(core.words[Ctx.SEQUENCE]))
        silent = self.roll_call.absent(_LAST_WORDS_S)
        if core.rank not in silent and 0 in (core.members[q] for q in silent):
            return WaitTimeout(f"{self.where(program)} was ended by a peer, and {ranks(silent)} does not respond")
        return TransportError(f"{self.where(program)} was ended by a peer")

    def _wait_for_cause(self, seconds: float = _CAUSE_S) -> dict[str, Any] | None:
        core, deadline = self._core, time.monotonic() + seconds
        while not self.heard:
            core.hear_news()
            # Only a death makes the explanation hopeless: a rank that left in order may be why another gave up.
            lost = any(world_rank in core.site.events.lost for world_rank in core.others)
            if self.heard or time.monotonic() >= deadline or lost:
                break
            time.sleep(0.002)
        return self.heard[0] if self.heard else None

    def mismatch(self, program: Program, peer: int, sequence: int) -> MismatchError:
        """The error with what every rank asked for in call number `sequence`, which may be over on this rank."""
        # Peers must stop waiting for us, and answer.
        self._tell("MismatchError", f"found rank {peer} in another call", {"sequence": sequence})
        self.roll_call.answer(program, sequence)
        table = self.roll_call.table(_TABLE_S)
        where = self.where(program)
        if sequence < int(self._core.words[Ctx.SEQUENCE]):
            where += f" found that call #{sequence} has failed"
        return MismatchError(
            f"{where}: the ranks are not in the same call{differences(table)}:\n{describe(table)}\nNothing was written "
            "into the arrays of ranks that had not begun to move data",
            table,
        )

    def timeout(self, program: Program) -> WaitTimeout:
        """The error where nothing has moved for too long, with the ranks that are to blame."""
        core = self._core
        sequence, waited = int(core.words[Ctx.SEQUENCE]), f"waited {core.config.timeout_s:g} s for"
        missing = [q for q in range(core.size) if q != core.rank and blocked_on(core.ctx, q)]
        if core.words[Ctx.PHASE] != Phase.ENTER:
            # Inside a plan a rank waits for others that may be waiting too; in ENTER it sees who has come.
            self._tell("WaitTimeout", waited, {"sequence": sequence, "roll": True})
            self.roll_call.answer(program, sequence)
            missing = self.roll_call.absent(_ANSWERS_S) or missing
        return WaitTimeout(
            f"{self.where(program)} {waited} {ranks(missing)}. Are they stuck, or in other code? timeout_s "
            "(GFKERNELS_TIMEOUT_S) sets the time"
        )

    # -- breaking ----------------------------------------------------------------------------------------------

    def break_up(self, error: BaseException, program: Program | None, keep: Any) -> None:
        """Breaks the communicator here and on all peers; `keep` lives until none of them can touch it any more."""
        core = self._core
        if self.cause is not None:
            return
        self.cause = error
        core.plane.refuse()
        core.plane.sever()
        extra = {"lost": error.rank} if isinstance(error, PeerLostError) else {}
        self._tell(type(error).__name__, self._reason(error, program), extra)
        core.site.events.post({"event": "out", "comm": core.name, "rank": core.rank}, core.others)
        graveyard.bury(self.is_safe(), (keep, program, core.plane))
        if program is not None:
            recent = [str(item.request) for item in list(core.history)[-_SHOWN:]]
            log.info("communicator %s is broken: %s. Calls before: %s", core.name, error, "; ".join(recent) or "none")

    def _tell(self, kind: str, message: str, extra: dict[str, Any]) -> None:
        core = self._core
        event = {"event": "abort", "comm": core.name, "rank": core.rank, "kind": kind, "message": message, **extra}
        core.site.events.post(event, core.others)
        core.plane.tell_abort()

    def is_safe(self) -> Callable[[], bool]:
        """A question for the graveyard: is every peer out of this communicator's calls, or dead?"""
        core = self._core

        def safe() -> bool:
            events = core.site.events
            core.hear_news()
            done = self.out | self.closed
            return all(
                q in done or q == core.rank or world_rank in events.left or events.ended(world_rank)
                for q, world_rank in enumerate(core.members)
            )

        return safe

    def broken(self) -> GfkernelsError:
        """The error of every call after the failure."""
        core = self._core
        if self.cause is None:
            return CommunicatorBroken(
                f"communicator {core.name} was shut down on rank {core.rank}: call gfkernels.init for a new one"
            )
        first_line = str(self.cause).partition("\n")[0].rstrip(":")
        return CommunicatorBroken(
            f"communicator {core.name} was broken on rank {core.rank} by {type(self.cause).__name__}: {first_line}. "
            "Shut it down and call gfkernels.init for a new one",
            self.cause,
        )

    def _reason(self, error: BaseException, program: Program | None) -> str:
        """What this rank did, for peers' messages: "waited 5 s for rank 1", "lost rank 2: left"."""
        if isinstance(error, KeyboardInterrupt):
            return "was interrupted (KeyboardInterrupt)"
        if not isinstance(error, GfkernelsError):
            return f"failed: {type(error).__name__}: {error}"
        text = str(error).partition("\n")[0]
        # Peers name the call themselves, and this rank is named already.
        for prefix in () if program is None else (self.where(program),):
            text = text.removeprefix(prefix).lstrip(": ")
        text = text.removeprefix(f"rank {self._core.rank} ")
        return f"found {text}" if text.startswith("rank ") else text
