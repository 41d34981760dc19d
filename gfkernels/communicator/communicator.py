"""Owns `Communicator`: the collectives as users call them, on any framework's arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from gfkernels import arrays, engine
from gfkernels.arrays.host import HostArray
from gfkernels.communicator.group import Group
from gfkernels.communicator.many import reduce_list
from gfkernels.communicator.persistent import PersistentCall
from gfkernels.communicator.programs import Program
from gfkernels.communicator.requests import Request, parse_op, parse_wire
from gfkernels.communicator.work import Work
from gfkernels.engine.context import Code
from gfkernels.errors import GfkernelsError, UsageError
from gfkernels.types import DType, ReduceOp

_NDARRAY: Final = np.ndarray
_call_array, _call_arrays = engine.call_array, engine.call_arrays
_NOT_FAST: Final = int(Code.NOT_FAST)
_NEW: Final = np.empty
_REMEMBERED: Final = 512
"""Calls that `_repeat` knows: of a model's tensors each size once."""


class Communicator(Group):
    """A group of ranks that call collectives together, in the same order.

    Made by `gfkernels.init` and `split`. A context manager: leaving it shuts it down. Calls of one communicator come
    from one thread at a time; several threads take a communicator each.

    Attributes:
        rank: this process's rank in the group.
        size: ranks in the group.
        config: the settings.
    """

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
        # Most calls are like the last one: these lines are what 8 bytes cost above the engine itself.
        if out is None and wire is None and not async_op and type(x) is _NDARRAY and type(op) is str:
            program = self._last.get(op)
            if program is not None:
                try:
                    code = _call_array(self._ctx, program.address, id(x))
                    if code != _NOT_FAST:
                        self._append(program)
                        if code != 0:
                            self._finish(code, program, x, None)
                        return x
                except GfkernelsError:
                    raise
                except BaseException as error:
                    self._interrupted(error, program, x)
                    raise
        if not async_op and self._repeat("allreduce", op, wire, x, out):
            return x if out is None else out

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

        return self._collective(prepare, async_op, op, wire, x)

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
        if type(x) is _NDARRAY and x.ndim and not async_op:
            target = _NEW((x.shape[0] // self.size, *x.shape[1:]), x.dtype) if out is None else out
            if self._repeat("reduce_scatter", op, wire, x, target):
                return target

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

        return self._collective(prepare, async_op, op, wire, x)

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
        if type(x) is _NDARRAY and not async_op:
            target = _NEW((self.size, *x.shape), x.dtype) if out is None else out
            if self._repeat("allgather", None, wire, x, target):
                return target

        def prepare() -> tuple[Request, HostArray, HostArray | None]:
            array = arrays.inspect(x, writable=False)
            target = self._target(array, out, (self.size, *array.shape), "allgather")
            wire_dtype = self._wire(wire, array.dtype)
            return Request("allgather", ReduceOp.SUM, array.dtype, wire_dtype, array.count), array, target

        return self._collective(prepare, async_op, None, wire, x)

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
        if not async_op and type(root) is int and self._repeat("broadcast", root, None, x, None):
            return x

        def prepare() -> tuple[Request, HostArray, HostArray | None]:
            if isinstance(root, bool) or not hasattr(root, "__index__") or not 0 <= root.__index__() < self.size:
                raise UsageError(f"root={root!r}: expected a rank, 0 to {self.size - 1}")
            array = arrays.inspect(x, writable=self.rank != root)
            return Request("broadcast", dtype=array.dtype, elements=array.count, root=root.__index__()), array, None

        return self._collective(prepare, async_op, root, None, x)

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

    def _repeat(self, collective: str, how: Any, wire: Any, x: Any, out: Any) -> bool:
        """Makes a call like an earlier one, of which compiled code checks the rest; False: it did nothing.

        Args:
            collective: its name.
            how: the op, or the root.
            wire: as for the collective.
            x: the input, which is also the result where `out` is None.
            out: the result.
        """
        if type(x) is not _NDARRAY or (out is not None and type(out) is not _NDARRAY):
            return False
        try:
            shape = None if out is None else out.shape
            program = self._fast.get((collective, how, wire, x.shape, shape, id(x.dtype)))
        except TypeError:  # an argument that no table can hold, which is an error for `_collective` to explain
            return False
        if program is None:
            return False
        try:
            if out is None:
                code = _call_array(self._ctx, program.address, id(x))
            else:
                code = _call_arrays(self._ctx, program.address, id(x), id(out))
            if code == _NOT_FAST:
                return False
            self._append(program)
            if code != 0:
                self._finish(code, program, x, out)
        except GfkernelsError:
            raise
        except BaseException as error:
            self._interrupted(error, program, (x, out))
            raise
        return True

    def _finish(self, code: int, program: Program, x: Any, out: Any) -> None:
        assert self._core is not None
        target = 0 if out is None else int(out.ctypes.data)
        self._core.finish(code, program, int(x.ctypes.data), target, (x, out))

    def _remember(self, request: Request, how: Any, wire: Any, x: Any, target: HostArray | None, program: Any) -> None:
        # What compiled code may see of an array is fixed only for numpy's own class.
        out = None if target is None else target.original
        if not self._fast_arrays or type(x) is not _NDARRAY or not (out is None or type(out) is _NDARRAY):
            return
        if len(self._fast) >= _REMEMBERED:
            self._fast.clear()
        shape = None if out is None else out.shape
        self._fast[request.collective, how, wire, x.shape, shape, id(x.dtype)] = program
        if request.collective == "allreduce" and out is None and wire is None:
            self._last[how] = program

    def _collective(
        self,
        prepare: Callable[[], tuple[Request, HostArray, HostArray | None]],
        async_op: bool,
        how: Any,
        wire: Any,
        x: Any,
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
        self._remember(request, how, wire, x, target, program)
        self._run(program, array.address, out_address, (array, target))
        return finish()

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


def _copy_alone(request: Request, array: HostArray, target: HostArray | None) -> None:
    """A group of one: the reduction of one array is that array."""
    if target is not None and array.nbytes:
        import ctypes

        ctypes.memmove(target.address, array.address, array.nbytes)
