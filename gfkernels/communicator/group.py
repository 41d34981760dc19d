"""Owns what a communicator is besides its collectives: who takes part, running a program, splitting, and the end."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from gfkernels import engine
from gfkernels.communicator.core import Core
from gfkernels.communicator.plane import fast_arrays
from gfkernels.communicator.programs import Program
from gfkernels.communicator.requests import Request
from gfkernels.communicator.site import Site, graveyard
from gfkernels.communicator.work import Queue
from gfkernels.config import Config
from gfkernels.engine.context import Ctx, Kind
from gfkernels.errors import CommunicatorBroken, GfkernelsError, PeerLostError, UsageError

G = TypeVar("G", bound="Group")


@dataclass(frozen=True)
class CallInfo:
    """How a call went.

    Attributes:
        request: the call, for people.
        plan_name: the algorithm, such as "direct.registered" or "ring".
        plan_hash: 16 hexadecimal digits, the same on all ranks.
        path: "registered", "cma", "staged", "inline", "verbs" or "tcp": how bytes reached the peers.
    """

    request: str
    plan_name: str
    plan_hash: str
    path: str


class Group:
    """Ranks that call together; see `Communicator`."""

    def __init__(self, site: Site, name: str, members: tuple[int, ...], config: Config, *, owns_site: bool) -> None:
        self.rank = members.index(site.rank)
        self.size = len(members)
        self.config = config
        self._site, self._name, self._members, self._owns_site = site, name, members, owns_site
        self._closed = False
        self._pid = os.getpid()
        self._splits = 0
        self._parts: weakref.WeakSet[Group] = weakref.WeakSet()
        self._fast: dict[Any, Program] = {}
        self._last: dict[str, Program] = {}
        self._barrier: Program | None = None
        self._fast_arrays = fast_arrays()
        self._broken: BaseException | None = None
        self._core: Core | None = None
        self._ctx = 0
        if self.size > 1:
            self._core = Core(site, name, members, self.rank, config)
            self._queue = Queue(self._core)
            self._core.run_behind = self._run_behind
            self._core.limit_slice()
            self._ctx = self._core.ctx
            self._append = self._core.history.append

    # -- who and where -----------------------------------------------------------------------------------------

    @property
    def local_rank(self) -> int:
        """This rank's place among the group's ranks on its host."""
        return self._local().index(self._site.rank)

    @property
    def local_size(self) -> int:
        """How many of the group's ranks share this host."""
        return len(self._local())

    def _local(self) -> list[int]:
        return [rank for rank in self._site.session.hosts.local_ranks if rank in self._members]

    @property
    def transport(self) -> str:
        """What carries this group: "shm" (and cross-memory attach where it works), "cma", "verbs", "tcp", "self"."""
        return "self" if self._core is None else self._core.plane.transport

    @property
    def passed_over(self) -> list[str]:
        """Faster ways that are not used, each with the reason."""
        return list(self._site.whys)

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<Communicator {self._name}: rank {self.rank} of {self.size}, {self.transport}{state}>"

    @property
    def history(self) -> list[dict[str, Any]]:
        """The last 256 calls that were begun here, oldest first."""
        return [] if self._core is None else [program.request.row() for program in self._core.history]

    @property
    def last_call(self) -> CallInfo | None:
        """How the last call went; None before the first one, and in a group of one."""
        core = self._core
        if core is None or not core.history:
            return None
        program = core.history[-1]
        kind = Kind(int(core.words[Ctx.KIND])) if core.plane.same_host else Kind.STAGED
        plan = program.plan(kind)
        _, _, variant = plan.name.partition(".")
        path = variant or kind.name.lower()
        return CallInfo(
            str(program.request), plan.name, plan.hash, path if core.plane.same_host else core.plane.transport
        )

    # -- running -----------------------------------------------------------------------------------------------

    def _run(self, program: Program, x: int, out: int, keep: Any) -> None:
        core = self._core
        assert core is not None
        self._append(program)
        try:
            code = engine.call(self._ctx, program.address, x, out)
            if code != 0:
                core.finish(code, program, x, out, keep)
        except GfkernelsError:
            raise
        except BaseException as error:
            self._interrupted(error, program, keep)
            raise

    def _run_behind(self, program: Program, x: int, out: int, keep: Any) -> None:
        self._queue.submit(program, x, out, keep, lambda: None, start=False).wait()

    def _interrupted(self, error: BaseException, program: Program, keep: Any) -> None:
        # A signal's handler may raise between the engine's return and the first line that could look at its answer.
        if self._core is not None and not self._core.words[Ctx.PENDING]:
            self._core.give_up(error, program, keep)

    def _program(self, request: Request) -> Program:
        assert self._core is not None
        return self._core.programs.get(request)

    # -- life --------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                f"rank {self.rank}: process {os.getpid()} was forked from {self._pid}, whose communicator this is: "
                "call gfkernels.init in the new process"
            )
        if self._core is not None and self._core.words[Ctx.REFUSE]:
            raise self._core.refusal()
        if self._closed or self._broken is not None:
            raise CommunicatorBroken(f"communicator {self._name} was shut down or aborted", self._broken)

    @property
    def is_usable(self) -> bool:
        """Whether calls are possible: not shut down, not broken, not inherited through fork."""
        try:
            self._check_usable()
        except GfkernelsError:
            return False
        return True

    def split(self: G, color: int | None, key: int = 0) -> G | None:
        """Makes a communicator of the ranks that give the same color. All ranks of this one call it together.

        Args:
            color: which group this rank joins; None: none.
            key: ranks are ordered by it, then by their rank here.

        Returns:
            The new communicator, or None where `color` is None.

        Raises:
            UsageError: color or key is no integer.
        """
        self._check_usable()
        for name, value in (("color", color), ("key", key)):
            if value is not None and (isinstance(value, bool) or not hasattr(value, "__index__")):
                raise UsageError(f"split({name}={value!r}): expected an integer")
        self._splits += 1
        graveyard.reap()
        told = [[color, key]] if self._core is None else self._core.exchange([color, key])
        if color is None:
            return None
        chosen = sorted((k, q) for q, (c, k) in enumerate(told) if c == color)
        members = tuple(self._members[q] for _, q in chosen)
        name = f"{self._name}/{self._splits}.{color}"
        part = type(self)(self._site, name, members, self.config, owns_site=False)
        self._parts.add(part)
        return part

    def abort(self, reason: str) -> None:
        """Breaks the communicator on all ranks: whoever is in a call raises, naming this rank and the reason."""
        self._broken = CommunicatorBroken(f"rank {self.rank} aborted the communicator: {reason}")
        if self._core is not None and self._core.failure.cause is None:
            self._core.failure.break_up(self._broken, None, None)

    def crash(self, error: BaseException) -> None:
        """As `abort`, for a process that ends by an error: peers that wait for this rank raise `PeerLostError`."""
        lost = PeerLostError(f"rank {self.rank} ended by {type(error).__name__}: {error}", self.rank)
        self._broken = lost
        if self._core is not None and self._core.failure.cause is None:
            self._core.failure.break_up(lost, None, None)

    def shutdown(self) -> None:
        """Lets go of the communicator and of those split from it: finishes what is queued, says goodbye.

        Waits for no other rank's calls.
        Ranks that later wait for this one raise `PeerLostError(rank, "left")`.
        """
        if self._closed:
            return
        self._closed = True
        self._fast.clear()
        self._last.clear()
        core = self._core
        if os.getpid() != self._pid:
            return
        for part in list(self._parts):
            part.shutdown()
        if core is not None:
            broken = core.failure.cause is not None
            if not broken:
                self._queue.drain()
            self._queue.stop()
            safe = core.failure.is_safe()
            core.site.events.post({"event": "closed", "comm": self._name, "rank": self.rank}, core.others)
            core.plane.close(leave=not broken, is_safe=safe)
        if self._owns_site:
            self._site.close()
        graveyard.reap()

    def __enter__(self: G) -> G:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, GfkernelsError) and self.is_usable:
            self.abort(f"left its with block by {type(error).__name__}: {error}")
        self.shutdown()
