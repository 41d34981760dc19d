"""Owns the loops: writes the LLVM IR of the one function that does COMBINE for an (op, dtype, wire).

The function is `int64 combine(int64 pointers, int64 counts, int64 n, int64 args)`. It goes over the elements in
blocks; within a block everything is loaded and reduced before anything is stored, since a source and a destination may
be the same span. Blocks are wide vectors, then narrower ones, then single elements, all written by the same code, so
that an element's bits do not depend on where in the array it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from llvmlite import ir

from gfkernels.kernels.elements import F64, I64, Lanes, Variant
from gfkernels.types import FINAL, RAW_SOURCES, ROUND_RAW, STREAMED, DType, ReduceOp

_BLOCK_BYTES: Final = 128
"""Bytes of accumulator in the widest blocks: four AVX2 registers."""
_SMALL_BLOCK_BYTES: Final = 32
_UNROLLED_RANKS: Final = (2, 4)
"""Array sources (and destinations) for which blocks without inner loops are written out too, where it pays."""


class _Emitter:
    def __init__(self, variant: Variant, triple: str, native_half: bool) -> None:
        self.variant = variant
        self.native_half = native_half
        self.module = ir.Module(name=variant.name)
        self.module.triple = triple
        function_type = ir.FunctionType(I64, [I64] * 4)
        self.function = ir.Function(self.module, function_type, variant.name)
        self.builder = ir.IRBuilder(self.function.append_basic_block("entry"))
        self.pointers, self.counts, self.n, self.args = self.function.args

    # -- small helpers -----------------------------------------------------------------------------------------

    def _word(self, base: Any, index: int | Any, kind: Any = I64) -> Any:
        """The 8-byte word number `index` at address `base`."""
        offset = I64(8 * index) if isinstance(index, int) else self.builder.shl(index, I64(3))
        pointer = self.builder.inttoptr(self.builder.add(base, offset), kind.as_pointer())
        return self.builder.load(pointer, align=8, typ=kind)

    @contextmanager
    def _loop(self, start: Any, stop: Any, step: int = 1) -> Iterator[Any]:
        """Runs the body for the index from `start` while it is below `stop`."""
        builder = self.builder
        before = builder.block
        head = builder.append_basic_block("head")
        body = builder.append_basic_block("body")
        done = builder.append_basic_block("done")
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(I64)
        index.add_incoming(start, before)
        builder.cbranch(builder.icmp_signed("<", index, stop), body, done)
        builder.position_at_end(body)
        yield index
        index.add_incoming(builder.add(index, I64(step)), builder.block)
        builder.branch(head)
        builder.position_at_end(done)

    def _variable(self, kind: Any) -> Any:
        """A stack slot in the entry block, where LLVM turns it into registers."""
        with self.builder.goto_entry_block():
            return self.builder.alloca(kind)

    def _choose(self, condition: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        """A value by a branch, for work that only one side should pay."""
        with self.builder.if_else(condition) as (then, otherwise):
            with then:
                first = yes()
                first_block = self.builder.block
            with otherwise:
                second = no()
                second_block = self.builder.block
        result = self.builder.phi(first.type)
        result.add_incoming(first, first_block)
        result.add_incoming(second, second_block)
        return result

    # -- the function ------------------------------------------------------------------------------------------

    def emit(self) -> str:
        builder = self.builder
        self.n_src_wire, self.n_src_array, self.n_dst_wire, self.n_dst_array, self.flags = (
            self._word(self.counts, index) for index in range(5)
        )
        self.n_src = builder.add(self.n_src_wire, self.n_src_array)
        self.destinations = builder.add(self.pointers, builder.shl(self.n_src, I64(3)))
        if self.variant.op != ReduceOp.MEAN:
            self._all_blocks(plain=True)
        else:
            # Written out twice rather than asked in every block.
            with builder.if_else(self._prepare_mean()) as (then, otherwise):
                with then:
                    self._all_blocks(plain=True)
                with otherwise:
                    self._all_blocks(plain=False)
        builder.ret(I64(0))
        return str(self.module)

    def _all_blocks(self, plain: bool) -> None:
        """Every element; `plain`: MEAN needs no prescale and no division but the multiplication by `reciprocal`."""
        done: Any = I64(0)
        itemsize = self.variant.compute_itemsize
        for nbytes in (_BLOCK_BYTES, _SMALL_BLOCK_BYTES, itemsize):
            width = nbytes // itemsize
            stop = self.builder.and_(self.n, I64(-width))
            if nbytes == _BLOCK_BYTES:
                self._wide_blocks(stop, width, plain)
            else:
                with self._loop(done, stop, width) as index:
                    self._block(index, width, plain)
            done = stop

    def _wide_blocks(self, stop: Any, width: int, plain: bool) -> None:
        """Elements 0 … stop, past the caches into the first destination where the flags say so."""
        builder = self.builder
        streamed = builder.icmp_signed("!=", builder.and_(self.flags, I64(STREAMED)), I64(0))
        with builder.if_else(streamed, likely=False) as (then, otherwise):
            with then, self._loop(I64(0), stop, width) as index:
                self._block(index, width, plain, streamed=True)
            with otherwise:
                if plain and self.variant.unrolls:
                    self._fixed_blocks(stop, width)
                else:
                    with self._loop(I64(0), stop, width) as index:
                        self._block(index, width, plain)

    def _fixed_blocks(self, stop: Any, width: int) -> None:
        """Elements 0 … stop: without inner loops where a few ranks' arrays are combined in place, else with them."""
        builder = self.builder
        done = builder.append_basic_block("blocks_done")
        for ranks in _UNROLLED_RANKS:
            both = [builder.icmp_signed("==", number, I64(ranks)) for number in (self.n_src, self.n_dst_array)]
            with builder.if_then(builder.and_(*both)):
                addresses = [self._word(self.pointers, number) for number in range(2 * ranks)]
                with self._loop(I64(0), stop, width) as index:
                    self._fixed_block(index, width, addresses)
                builder.branch(done)
        with self._loop(I64(0), stop, width) as index:
            self._block(index, width, plain=True)
        builder.branch(done)
        builder.position_at_end(done)

    def _fixed_block(self, index: Any, width: int, addresses: list[Any]) -> None:
        """As `_block`, for as many array sources as destinations, at known addresses, no wire."""
        builder, variant = self.builder, self.variant
        dtype = variant.dtype
        lanes = Lanes(builder, width, variant, self.native_half)
        offset = builder.mul(index, I64(dtype.itemsize))
        sources, destinations = addresses[: len(addresses) // 2], addresses[len(addresses) // 2 :]
        value: Any = None
        for source in sources:
            operand = self._contribution(lanes, lanes.load(builder.add(source, offset), dtype), plain=True)
            value = operand if value is None else lanes.reduce(variant.op, value, operand)
        bits = lanes.narrow(lanes.canonical(self._scaled(lanes, value, plain=True)), dtype)
        for destination in destinations:
            lanes.store(bits, builder.add(destination, offset), dtype)

    def _prepare_mean(self) -> Any:
        """Reads the scale factors; returns whether a multiplication at the end is all that is needed."""
        builder = self.builder
        kind = self.variant.compute
        one, zero = ir.Constant(F64, 1.0), I64(0)
        raw = builder.icmp_signed("!=", builder.and_(self.flags, I64(RAW_SOURCES)), zero)
        final = builder.icmp_signed("!=", builder.and_(self.flags, I64(FINAL)), zero)
        prescale = builder.select(raw, self._word(self.args, 0, F64), one)
        divisor = builder.select(final, self._word(self.args, 1, F64), one)
        if self.variant.scales_late:
            divisor = builder.fdiv(divisor, prescale)
        reciprocal = builder.fdiv(one, divisor)
        # Multiplying by the reciprocal of a power of two gives the quotient's very bits, several times faster.
        mantissa = builder.and_(builder.bitcast(divisor, I64), I64((1 << 52) - 1))
        divides = builder.icmp_signed("!=", mantissa, zero)
        scales = builder.fcmp_unordered("!=", prescale, one)
        if kind != F64:
            prescale, divisor, reciprocal = (builder.fptrunc(x, kind) for x in (prescale, divisor, reciprocal))
        self.prescale, self.divisor, self.reciprocal = prescale, divisor, reciprocal
        self.divides = divides
        return builder.not_(divides if self.variant.scales_late else builder.or_(divides, scales))

    def _block(self, index: Any, width: int, plain: bool, streamed: bool = False) -> None:
        """Reduces and stores elements index … index + width - 1; `streamed`: the first destination past the caches."""
        builder, variant = self.builder, self.variant
        dtype, wire = variant.dtype, variant.wire
        lanes = Lanes(builder, width, variant, self.native_half)
        kind = lanes.vector(variant.compute)
        accumulator = self._variable(kind)

        def at(number: Any, base: Any, element: DType) -> Any:
            return builder.add(self._word(base, number), builder.mul(index, I64(element.itemsize)))

        def array_source(number: Any) -> Any:
            return self._contribution(lanes, lanes.load(at(number, self.pointers, dtype), dtype), plain)

        def wire_source(number: Any) -> Any:
            assert wire is not None
            return lanes.load(at(number, self.pointers, wire), wire)

        def accumulate(value: Any) -> None:
            so_far = builder.load(accumulator, typ=kind)
            builder.store(lanes.reduce(variant.op, so_far, value), accumulator)

        if wire is None:
            builder.store(array_source(I64(0)), accumulator)
            first_array: Any = I64(1)
        else:
            some = builder.icmp_signed(">", self.n_src_wire, I64(0))
            first = self._choose(some, lambda: wire_source(I64(0)), lambda: array_source(I64(0)))
            builder.store(first, accumulator)
            with self._loop(I64(1), self.n_src_wire) as number:
                accumulate(wire_source(number))
            first_array = builder.select(some, self.n_src_wire, I64(1))
        with self._loop(first_array, self.n_src) as number:
            accumulate(array_source(number))

        value = lanes.canonical(self._scaled(lanes, builder.load(accumulator, typ=kind), plain))
        n_dst = builder.add(self.n_dst_wire, self.n_dst_array)
        begin = I64(1 if streamed else 0)
        if wire is None:
            bits = lanes.narrow(value, dtype)
            if streamed:
                lanes.stream(bits, at(I64(0), self.destinations, dtype), dtype)
            with self._loop(begin, n_dst) as number:
                lanes.store(bits, at(number, self.destinations, dtype), dtype)
            return
        wire_bits = lanes.narrow(value, wire)
        if streamed:
            lanes.stream(wire_bits, at(I64(0), self.destinations, wire), wire)
        with self._loop(begin, self.n_dst_wire) as number:
            lanes.store(wire_bits, at(number, self.destinations, wire), wire)
        with builder.if_then(builder.icmp_signed(">", self.n_dst_array, I64(0))):
            bits = lanes.narrow(lanes.widen(wire_bits, wire), dtype)
            with self._loop(self.n_dst_wire, n_dst) as number:
                lanes.store(bits, at(number, self.destinations, dtype), dtype)

    def _scaled(self, lanes: Lanes, total: Any, plain: bool) -> Any:
        """The reduced value, divided where this step completes a mean."""
        if self.variant.op != ReduceOp.MEAN:
            return total

        def scaled() -> Any:
            return self.builder.fmul(total, lanes.broadcast(self.reciprocal))

        def divided() -> Any:
            return self.builder.fdiv(total, lanes.broadcast(self.divisor))

        return scaled() if plain else self._choose(self.divides, divided, scaled)

    def _contribution(self, lanes: Lanes, value: Any, plain: bool) -> Any:
        """An array-typed source as it is added: scaled, and rounded to the wire, where the step says so."""
        builder, wire = self.builder, self.variant.wire
        if self.variant.op == ReduceOp.MEAN and not plain and not self.variant.scales_late:
            value = builder.fmul(value, lanes.broadcast(self.prescale))
        if wire is None:
            return value
        unrounded = value
        rounds = builder.icmp_signed("!=", builder.and_(self.flags, I64(ROUND_RAW)), I64(0))
        return self._choose(
            rounds, lambda: lanes.widen(lanes.narrow(lanes.canonical(unrounded), wire), wire), lambda: unrounded
        )


def emit(variant: Variant, triple: str, native_half: bool) -> str:
    """The LLVM IR text of the variant's module.

    Args:
        variant: what the kernel does.
        triple: the target's triple.
        native_half: whether the target has instructions that convert fp16 (F16C on x86; always on aarch64).
    """
    return _Emitter(variant, triple, native_half).emit()
