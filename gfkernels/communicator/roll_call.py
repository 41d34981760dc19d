"""Owns the roll call of a failed call: each rank tells the others what it was in, and who does not answer is missed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from gfkernels.communicator.programs import Program
from gfkernels.engine.context import N_RECENT, Ctx, Kind

if TYPE_CHECKING:
    from gfkernels.communicator.core import Core

_FIELDS: Final = ("call", "op", "dtype", "count", "wire", "root", "out", "plan")
_POLL_S: Final = 0.005


class RollCall:
    """What the ranks of one communicator have told about the call in which it broke.

    Answers travel as control events, which rank 0 passes on in order: who has an answer has all that came before it,
    also where its sender is gone by now.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._rows: dict[int, dict[str, Any]] = {}
        self._own: dict[str, Any] | None = None

    def hear(self, event: dict[str, Any]) -> None:
        """Takes a peer's answer, or the echo of this rank's own."""
        self._rows[int(event["rank"])] = event["row"]

    def answer(self, program: Program, sequence: int) -> dict[str, Any]:
        """Tells everybody once what this rank asked for in call number `sequence`, or is in if it has not come so far.

        Args:
            program: the running call's.
            sequence: the failed call's number; a rank that has left it answers from memory.
        """
        if self._own is None:
            core = self._core
            self._own = self._row(program, sequence)
            event = {"event": "answer", "comm": core.name, "rank": core.rank, "row": self._own}
            core.site.events.post(event, core.members)
        return self._own

    def table(self, seconds: float) -> list[dict[str, Any]]:
        """What each rank asked for, after this rank has answered; ranks that do not answer have a `state` instead."""
        self._collect(seconds)
        core = self._core
        rows = dict(self._rows)
        if self._own is not None:
            rows[core.rank] = self._own
        return [rows.get(q) or {"rank": q, "state": self._gone(q) or "not in the call"} for q in range(core.size)]

    def absent(self, seconds: float) -> list[int]:
        """Ranks that do not answer though they have the time for it: they are not in the call, or cannot run.

        Empty where nothing can be said, since answers do not come through at all.
        """
        self._collect(seconds)
        core = self._core
        if core.rank not in self._rows:
            # Not even our own answer has come back. World rank 0 passes answers on, and must have stopped.
            return [q for q, world_rank in enumerate(core.members) if world_rank == 0]
        return [q for q in range(core.size) if q not in self._rows]

    def _collect(self, seconds: float) -> None:
        core, deadline = self._core, time.monotonic() + seconds
        while True:
            core.hear_news()
            if all(q in self._rows or self._gone(q) for q in range(core.size)) or time.monotonic() >= deadline:
                return
            time.sleep(_POLL_S)

    def _gone(self, q: int) -> str:
        return "" if q == self._core.rank else self._core.site.events.gone(self._core.members[q])

    def _row(self, program: Program, sequence: int) -> dict[str, Any]:
        core = self._core
        running = int(core.words[Ctx.SEQUENCE])
        if sequence < running:
            earlier = self._earlier(sequence)
            if earlier is None:
                return {"rank": core.rank, "state": f"in call #{running} by now"}
            program = earlier
        plan = program.plans.get(Kind.REGISTERED) or next(iter(program.plans.values()), None)
        row = {"rank": core.rank, "sequence": min(sequence, running), **program.request.row()}
        return {**row, "plan": plan.hash if plan is not None else ""}

    def _earlier(self, sequence: int) -> Program | None:
        words = self._core.words
        if int(words[Ctx.SEQUENCE]) - sequence >= N_RECENT:
            return None
        return self._core.programs.at(int(words[Ctx.RECENT + sequence % N_RECENT]))


def describe(table: list[dict[str, Any]]) -> str:
    """The table in lines, one a rank."""
    return "\n".join(f"  {_line(row)}" for row in table)


def differences(table: list[dict[str, Any]]) -> str:
    """What the ranks do not agree in: " (count differs)"."""
    rows = [row for row in table if "state" not in row]
    differing = [f for f in _FIELDS if len({repr(row.get(f)) for row in rows}) > 1]
    differing = [f for f in differing if f != "plan"] or differing
    return f" ({', '.join(differing)} differ{'s' * (len(differing) == 1)})" if differing else ""


def ranks(numbers: list[int]) -> str:
    """For messages: "rank 1", "ranks 1, 2", or "its peers" for none."""
    return f"rank{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}" if numbers else "its peers"


def _line(row: dict[str, Any]) -> str:
    if "state" in row:
        return f"rank {row['rank']}: {row['state']}"
    facts = ", ".join(f"{k}={v}" for k, v in row.items() if k not in ("rank", "sequence", "call"))
    return f"rank {row['rank']}: call #{row['sequence']} {row['call']} ({facts})"
