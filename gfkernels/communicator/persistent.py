"""Owns the persistent allreduce: a handle that has its program and addresses, and only runs."""

from __future__ import annotations

from typing import Any

from gfkernels import engine
from gfkernels.arrays.host import HostArray
from gfkernels.communicator.core import Core
from gfkernels.communicator.programs import Program
from gfkernels.engine.context import Ctx, Kind
from gfkernels.errors import GfkernelsError, UsageError

_call = engine.call


class PersistentCall:
    """An allreduce in place of one array, made by `plan_allreduce`. Calling it runs it and returns the array.

    All ranks call theirs in the same order as their other collectives. The handle keeps the array alive.
    """

    __slots__ = ("_address", "_append", "_array", "_core", "_ctx", "_plain", "_program", "_program_address", "_value")

    def __init__(self, core: Core | None, program: Program | None, array: HostArray) -> None:
        self._core, self._program, self._array = core, program, array
        self._address = array.address
        self._ctx = 0 if core is None else core.ctx
        self._program_address = 0 if program is None else program.address
        # Where the memory is the array's own and nobody has to be told, there is nothing to do around the call.
        self._plain = core is not None and array.staging is None and array.framework == "numpy"
        self._append: Any = None if core is None else core.history.append
        self._value = array.original

    def __call__(self) -> Any:
        """Reduces what the array holds now.

        Returns:
            The array (a new one where it is immutable).

        Raises:
            As `Communicator.allreduce`.
        """
        if self._plain:
            try:
                code = _call(self._ctx, self._program_address, self._address, 0)
                self._append(self._program)
                if code == 0:
                    return self._value
                self._finish(code)
            except GfkernelsError:
                raise
            except BaseException as error:
                self._interrupted(error)
                raise
            return self._value
        return self._around()

    def _around(self) -> Any:
        array = self._array
        if self._core is None:
            return array.result()
        if not self._core.words[Ctx.REFUSE]:
            array.refresh()
        try:
            code = _call(self._ctx, self._program_address, self._address, 0)
            self._append(self._program)
            if code != 0:
                self._finish(code)
        except GfkernelsError:
            raise
        except BaseException as error:
            self._interrupted(error)
            raise
        array.finish()
        return array.result()

    def _finish(self, code: int) -> None:
        assert self._core is not None and self._program is not None
        self._core.finish(code, self._program, self._address, 0, self._array)

    def _interrupted(self, error: BaseException) -> None:
        if self._core is not None and self._program is not None and not self._core.words[Ctx.PENDING]:
            self._core.give_up(error, self._program, self._array)

    @property
    def kind(self) -> Kind:
        """How peers reached the arrays in the last call of this communicator."""
        return Kind.REGISTERED if self._core is None else Kind(int(self._core.words[Ctx.KIND]))

    @property
    def plan_name(self) -> str:
        """The algorithm, such as "direct.registered", for the memory that this rank's array has."""
        return "alone" if self._program is None else self._program.plan(self._likely_kind()).name

    @property
    def plan_hash(self) -> str:
        """16 hexadecimal digits that are the same on all ranks."""
        return "" if self._program is None else self._program.plan(self._likely_kind()).hash

    def _likely_kind(self) -> Kind:
        core = self._core
        if core is None:
            raise UsageError("a group of one has no plan")
        words, array = core.words, self._array
        if not core.plane.same_host:
            return Kind.STAGED
        inside = core.site.arena.contains(array.address, max(1, array.nbytes)) if array.nbytes else True
        kind = Kind.REGISTERED if inside else (Kind.CMA if words[Ctx.CMA_OK] else Kind.STAGED)
        return min(kind, Kind(int(words[Ctx.BEST_KIND])))

    def __repr__(self) -> str:
        return f"<PersistentCall {self._program.request if self._program else 'alone'}>"
