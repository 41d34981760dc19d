"""Owns `Communicator`: the collectives as users call them, on any framework's arrays."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final

import numpy as np

from gfkernels import arrays, engine
from gfkernels.arrays.host import HostArray
from gfkernels.communicator.core import Core
from gfkernels.communicator.many import reduce_list
from gfkernels.communicator.persistent import PersistentCall
from gfkernels.communicator.plane import fast_arrays
from gfkernels.communicator.programs import Program
from gfkernels.communicator.requests import Request, parse_op, parse_wire
from gfkernels.communicator.site import Site, graveyard
from gfkernels.communicator.work import Queue, Work
from gfkernels.config import Config
from gfkernels.engine.context import Code, Ctx
from gfkernels.errors import CommunicatorBroken, GfkernelsError, PeerLostError, UsageError
from gfkernels.types import DType, ReduceOp

_NDARRAY: Final = np.ndarray


class Communicator:
    """A group of ranks that call collectives together, in the same order.

    Made by `gfkernels.init` and `split`. A context manager: leaving it shuts it down. Calls of one communicator come
    from one thread at a time; several threads take a communicator each.

    Attributes:
        rank: this process's rank in the group.
        size: ranks in the group.
        config: the settings.
    """

    def __init__(self, site: Site, name: str, members: tuple[int, ...], config: Config, *, owns_site: bool) -> None:
        self.rank = members.index(site.rank)
        self.size = len(members)
        self.config = config
        self._site, self._name, self._members, self._owns_site = site, name, members, owns_site
        self._closed = False
        self._pid = os.getpid()
        self._splits = 0
        self._parts: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self._fast: dict[Any, Program] = {}
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
        """What carries this group: "shm" (also cross-memory attach where it works), "cma", "tcp", or "self"."""
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

    # -- collectives -------------------------------------------------------------------------------------------

    def allreduce(
        self, x: Any, op: str = "sum", *, out: Any = None, wire: str | None = None, async_op: bool = False
    ) -> Any:
        """Reduces arrays of all ranks element by element; every rank gets the result, with identical bits.

        Args:
            x: an array of any framework, of the same number of elements and dtype on all ranks. Reduced in place
                unless `out` is given. Strided arrays go through a temporary; immutable ones give a new array.
            op: "sum", "mean" (floats only), "prod", "min" or "max".
            out: an array like `x` for the result; then `x` may be read-only. On all ranks or on none.
            wire: "float16" or "bfloat16": what floats travel as; they are added in fp32 all the same. None: the
                configuration's `wire`, else the array's own dtype.
            async_op: return a `Work` at once; `x` and `out` are the library's until it is over.

        Returns:
            `x` (or `out`, or a new array where `x` is immutable), or a `Work` for it.

        Raises:
            UsageError: a bad argument; nothing was sent, and peers that wait for this call raise too.
            MismatchError: ranks called different things; its table shows them all.
            PeerLostError, WaitTimeout, TransportError: the call failed, the communicator is broken, and the array's
                contents are undefined.
            CommunicatorBroken: an earlier call failed.
        """
        if out is None and wire is None and not async_op and type(x) is _NDARRAY:
            program = self._fast.get(op)
            if program is not None:
                try:
                    code = engine.call_array(self._ctx, program.address, id(x))
                    if code == 0:
                        self._append(program)
                        return x
                    if code != Code.NOT_FAST:
                        assert self._core is not None
                        self._append(program)
                        self._core.finish(code, program, int(x.ctypes.data), 0, x)
                        return x
                except GfkernelsError:
                    raise
                except BaseException as error:
                    self._interrupted(error, program, x)
                    raise
        return self._allreduce(x, op, out, wire, async_op)

    def _allreduce(self, x: Any, op: str, out: Any, wire: str | None, async_op: bool) -> Any:
        def prepare() -> tuple[Request, HostArray, HostArray | None]:
            reduction = parse_op(op)
            array = arrays.inspect(x, writable=out is None)
            target = None
            if out is not None:
                target = arrays.inspect(out, role="out")
                if arrays.overlap_check(array, target):
                    array, target = target, None
            request = Request(
                "allreduce", reduction, array.dtype, self._wire(wire, array.dtype), array.count, target is not None
            )
            return request, array, target

        return self._collective(prepare, async_op, memo=op if wire is None and out is None else None)

    def reduce_scatter(
        self, x: Any, op: str = "sum", *, out: Any = None, wire: str | None = None, async_op: bool = False
    ) -> Any:
        """Reduces, and leaves rank r the r-th of `size` equal blocks along the first axis.

        Args:
            x: array whose first dimension is divisible by the number of ranks; it stays as it is.
            op: as for `allreduce`.
            out: array of shape (x.shape[0] // size, *x.shape[1:]) for the block; None: a new one.
            wire: as for `allreduce`.
            async_op: as for `allreduce`.

        Returns:
            The block, or a `Work` for it.

        Raises:
            As `allreduce`.
        """

        def prepare() -> tuple[Request, HostArray, HostArray | None]:
            reduction = parse_op(op)
            array = arrays.inspect(x, writable=False)
            if not array.shape or array.shape[0] % self.size:
                raise UsageError(
                    f"reduce_scatter over {self.size} ranks of an array of shape {array.shape}: the first dimension "
                    f"must be divisible by {self.size}"
                )
            shape = (array.shape[0] // self.size, *array.shape[1:])
            target = self._target(array, out, shape, "reduce_scatter")
            wire_dtype = self._wire(wire, array.dtype)
            return Request("reduce_scatter", reduction, array.dtype, wire_dtype, array.count), array, target

        return self._collective(prepare, async_op)

    def allgather(self, x: Any, *, out: Any = None, wire: str | None = None, async_op: bool = False) -> Any:
        """Gives every rank the arrays of all ranks.

        Args:
            x: array of the same shape and dtype on all ranks.
            out: array of shape (size, *x.shape); None: a new one.
            wire: what floats travel as: every block is rounded to it, the own one too.
            async_op: as for `allreduce`.

        Returns:
            The array of shape (size, *x.shape), or a `Work` for it.

        Raises:
            As `allreduce`.
        """

        def prepare() -> tuple[Request, HostArray, HostArray | None]:
            array = arrays.inspect(x, writable=False)
            target = self._target(array, out, (self.size, *array.shape), "allgather")
            wire_dtype = self._wire(wire, array.dtype)
            return Request("allgather", ReduceOp.SUM, array.dtype, wire_dtype, array.count), array, target

        return self._collective(prepare, async_op)

    def broadcast(self, x: Any, root: int = 0, *, async_op: bool = False) -> Any:
        """Copies the root's array into everybody's.

        Args:
            x: array of the same number of elements and dtype on all ranks; written on all but the root.
            root: the rank whose array is copied.
            async_op: as for `allreduce`.

        Returns:
            `x` (a new array where it is immutable), or a `Work` for it.

        Raises:
            As `allreduce`.
        """

        def prepare() -> tuple[Request, HostArray, HostArray | None]:
            if isinstance(root, bool) or not hasattr(root, "__index__") or not 0 <= root.__index__() < self.size:
                raise UsageError(f"root={root!r}: expected a rank, 0 to {self.size - 1}")
            array = arrays.inspect(x, writable=self.rank != root)
            return Request("broadcast", dtype=array.dtype, count=array.count, root=root.__index__()), array, None

        return self._collective(prepare, async_op)

    def barrier(self) -> None:
        """Returns once all ranks have called it."""
        program = self._barrier
        if program is None:
            self._check_usable()
            if self._core is None:
                return
            program = self._barrier = self._program(Request("barrier"))
        self._run(program, 0, 0, None)

    def allreduce_many(self, xs: Sequence[Any], op: str = "sum", *, wire: str | None = None) -> list[Any]:
        """Reduces a list of arrays in place, with one synchronisation for all of them and no packing of large ones.

        Args:
            xs: arrays of the same sizes and dtypes, in the same order, on all ranks; none may overlap another.
            op: as for `allreduce`.
            wire: as for `allreduce`; integer arrays travel as they are.

        Returns:
            The arrays (new ones for immutable ones).

        Raises:
            As `allreduce`.
        """
        self._check_usable()
        return reduce_list(self, xs, op, wire)

    def plan_allreduce(self, x: Any, op: str = "sum", *, wire: str | None = None) -> PersistentCall:
        """Prepares an allreduce in place that is made many times: checks and set-up are paid here, once.

        Args:
            x: as for `allreduce`; it must not be freed, moved or resized while the handle is used.
            op, wire: as for `allreduce`.

        Returns:
            A handle; calling it reduces what `x` holds then, and returns `x`.

        Raises:
            UsageError: a bad argument. Nothing is sent before the first call.
        """
        self._check_usable()
        reduction = parse_op(op)
        array = arrays.inspect(x)
        request = Request("allreduce", reduction, array.dtype, self._wire(wire, array.dtype), array.count)
        program = None if self._core is None else self._core.programs.get(request)
        return PersistentCall(self._core, program, array)

    # -- the common path ---------------------------------------------------------------------------------------

    def _collective(
        self, prepare: Callable[[], tuple[Request, HostArray, HostArray | None]], async_op: bool, memo: Any = None
    ) -> Any:
        """One call: checks, the program, the engine, the result."""
        self._check_usable()
        try:
            request, array, target = prepare()
            self._check_request(request)
            program = None if self._core is None else self._program(request)
        except UsageError as error:
            if self._core is not None:
                self._core.refuse_locally(error)
            raise
        result = array if target is None else target

        def finish() -> Any:
            if request.collective != "broadcast" or self.rank != request.root:
                result.finish()
            return result.result()

        if program is None:
            _copy_alone(request, array, target)
            value = finish()
            if not async_op:
                return value
            work = Work(None, str(request))
            work._end(value, None)
            return work
        out_address = 0 if target is None else target.address
        if async_op:
            self._append(program)
            return self._queue.submit(program, array.address, out_address, (array, target), finish)
        if memo is not None and self._fast_arrays and array.framework == "numpy":
            self._fast[memo] = program
        self._run(program, array.address, out_address, (array, target))
        return finish()

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

    def _check_request(self, request: Request) -> None:
        from gfkernels import kernels

        if request.collective in ("allreduce", "reduce_scatter") or request.wire is not None:
            assert request.dtype is not None
            kernels.check(request.op, request.dtype, request.wire)

    def _wire(self, wire: Any, dtype: DType) -> DType | None:
        chosen = parse_wire(wire, self.config.wire)
        # A default from the configuration is for arrays of floats; asked for in the call, it is refused for others.
        return None if wire is None and dtype.kind != "f" else chosen

    def _target(self, array: HostArray, out: Any, shape: tuple[int, ...], name: str) -> HostArray:
        if out is None:
            return arrays.empty_like(array, shape)
        target = arrays.inspect(out, role="out")
        if arrays.overlap_check(array, target, shape):
            raise UsageError(f"out of {name} is x itself; pass another array")
        return target

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

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
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
        part = Communicator(self._site, name, members, self.config, owns_site=False)
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

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, GfkernelsError) and self.is_usable:
            self.abort(f"left its with block by {type(error).__name__}: {error}")
        self.shutdown()


def _copy_alone(request: Request, array: HostArray, target: HostArray | None) -> None:
    """A group of one: the reduction of one array is that array."""
    if target is not None and array.nbytes:
        import ctypes

        ctypes.memmove(target.address, array.address, array.nbytes)
