"""Owns what an element is to a kernel: how lanes are loaded, widened, rounded, combined and stored, in LLVM IR.

A value is a vector of `width` lanes. Storage types are what lies in memory (16-bit floats as their bits), compute types
are what arithmetic is done in: fp32 for floats up to 32 bits, fp64 for float64, the integers themselves. Two detours
for 16-bit floats without a wire, because converting costs more than the memory traffic does: min and max compare
sortable 16-bit keys, and bfloat16 is widened in pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from llvmlite import ir

from gfkernels.native.memory import LINE_NBYTES, past_the_caches
from gfkernels.types import DType, ReduceOp

I1: Final = ir.IntType(1)
I16: Final = ir.IntType(16)
I32: Final = ir.IntType(32)
I64: Final = ir.IntType(64)
F32: Final = ir.FloatType()
F64: Final = ir.DoubleType()
HALF: Final = ir.HalfType()

_QUIET_NAN: Final = {4: 0x7FC00000, 8: 0x7FF8000000000000}
_QUIET_NAN_16: Final = {"float16": 0x7E00, "bfloat16": 0x7FC0}
_BRANCH_WIDTH: Final = 16
_INFINITY: Final = {"float16": 0x7C00, "bfloat16": 0x7F80}


def storage_type(dtype: DType) -> Any:
    """The LLVM type of one element in memory; 16-bit floats and bool are plain integers there."""
    if dtype.name == "float32":
        return F32
    if dtype.name == "float64":
        return F64
    return ir.IntType(8 * dtype.itemsize)


@dataclass(frozen=True)
class Variant:
    """What one kernel does. `wire` None: nothing but the array's dtype travels."""

    op: ReduceOp
    dtype: DType
    wire: DType | None

    @property
    def name(self) -> str:
        """A name that is a C identifier, a file name, and unique to the variant."""
        return f"combine_{self.op.label}_{self.dtype.name}_{self.wire.name if self.wire else 'none'}"

    @property
    def keyed(self) -> bool:
        """Whether elements are compared as sortable 16-bit keys: exact, and no conversion is needed."""
        return self.op in (ReduceOp.MIN, ReduceOp.MAX) and self.wire is None and self._is_narrow

    @property
    def paired(self) -> bool:
        """Whether lanes are kept in the order "even elements, then odd ones", which spares bfloat16 all shuffles."""
        return self.dtype.name == "bfloat16" and self.wire is None and not self.keyed

    @property
    def scales_late(self) -> bool:
        """Whether MEAN may scale the sum instead of its terms, with equal bits: fp16 values are so far from the ends
        of fp32 that a power of two can be taken out. Not so with a wire, whose sources come scaled.
        """
        return self.dtype.name == "float16" and self.wire is None

    @property
    def unrolls(self) -> bool:
        """Whether conversions keep the core so busy that inner loops would show: 1.2× faster without. All other
        kernels wait for memory, loops or not.
        """
        return self.wire is None and self._is_narrow

    @property
    def _is_narrow(self) -> bool:
        return self.dtype.name in ("float16", "bfloat16")

    @property
    def compute(self) -> Any:
        """The LLVM type that one element is added (multiplied, compared) in."""
        if self.dtype.name == "float64":
            return F64
        return F32 if self.dtype.kind == "f" and not self.keyed else ir.IntType(8 * self.dtype.itemsize)

    @property
    def compute_itemsize(self) -> int:
        """Bytes of one element of the compute type."""
        return 4 if self.compute == F32 else self.dtype.itemsize


class Lanes:
    """Emits operations on `width` lanes of one kernel.

    Args:
        builder: the IR builder to emit with.
        width: lanes of a value.
        variant: what the kernel does.
        native_half: whether the target converts fp16 by instructions. Without them LLVM would emit calls to
            compiler-rt functions that a process need not hold, so integer code is emitted instead.
    """

    def __init__(self, builder: Any, width: int, variant: Variant, native_half: bool) -> None:
        self.builder = builder
        self.width = width
        self.variant = variant
        self.native_half = native_half
        self.is_float = variant.compute in (F32, F64)
        self.paired = variant.paired and width > 1

    # -- building blocks ---------------------------------------------------------------------------------------

    def vector(self, element: Any) -> Any:
        """The vector type of our width."""
        return ir.VectorType(element, self.width)

    def splat(self, element: Any, value: float) -> Any:
        """A constant in every lane."""
        return ir.Constant(self.vector(element), [ir.Constant(element, value)] * self.width)

    def broadcast(self, scalar: Any) -> Any:
        """A run-time scalar in every lane."""
        first = self.builder.insert_element(ir.Constant(self.vector(scalar.type), ir.Undefined), scalar, I32(0))
        return self.builder.shuffle_vector(
            first, ir.Constant(first.type, ir.Undefined), ir.Constant(self.vector(I32), [I32(0)] * self.width)
        )

    def _as_int(self, value: Any) -> Any:
        return self.builder.bitcast(value, self.vector(I64 if value.type.element == F64 else I32))

    def _intrinsic(self, name: str, *values: Any) -> Any:
        kinds = [value.type for value in values]
        suffix = {F32: "f32", F64: "f64"}[kinds[0].element]
        function_type = ir.FunctionType(kinds[0], kinds)
        module = self.builder.module
        full_name = f"{name}.v{self.width}{suffix}"
        function = module.globals.get(full_name) or ir.Function(module, function_type, full_name)
        return self.builder.call(function, list(values))

    # -- memory ------------------------------------------------------------------------------------------------

    def load(self, address: Any, dtype: DType) -> Any:
        """Lanes at `address` (aligned to the itemsize only), widened to the compute type."""
        storage = self.vector(storage_type(dtype))
        pointer = self.builder.inttoptr(address, storage.as_pointer())
        return self.widen(self.builder.load(pointer, align=dtype.itemsize, typ=storage), dtype)

    def store(self, bits: Any, address: Any, dtype: DType) -> None:
        """Writes lanes of the storage type to `address`."""
        self.builder.store(bits, self.builder.inttoptr(address, bits.type.as_pointer()), align=dtype.itemsize)

    def stream(self, bits: Any, address: Any, dtype: DType) -> None:
        """As `store`, past the caches, to an address that is a multiple of what is written or of a cache line."""
        align = min(self.width * dtype.itemsize, LINE_NBYTES)
        store = self.builder.store(bits, self.builder.inttoptr(address, bits.type.as_pointer()), align=align)
        past_the_caches(self.builder.module, store)

    # -- conversions -------------------------------------------------------------------------------------------

    def widen(self, bits: Any, dtype: DType) -> Any:
        """Storage lanes of `dtype` as compute lanes; always exact."""
        builder = self.builder
        if self.variant.keyed:
            return self._encode(bits)
        if dtype.name == "float16":
            bits = self._half_to_float(bits)
        elif dtype.name == "bfloat16":
            bits = builder.bitcast(self._bfloat_to_high_half(bits), self.vector(F32))
        if self.variant.compute == F64 and bits.type.element == F32:
            return builder.fpext(bits, self.vector(F64))
        return bits

    def narrow(self, value: Any, dtype: DType) -> Any:
        """Compute lanes rounded once, to nearest even, to storage lanes of `dtype`.

        The lanes hold no NaN but the canonical one: see `canonical`.
        """
        if self.variant.keyed:
            return self._decode(value)
        if dtype.name not in ("float16", "bfloat16"):
            return value
        if value.type.element == F64:
            value = self._round_to_odd(value)
        return self._float_to_half(value) if dtype.name == "float16" else self._float_to_bfloat(value)

    def canonical(self, value: Any) -> Any:
        """The value with every NaN made the positive quiet one without payload; bools made 0 or 1."""
        builder = self.builder
        if self.variant.dtype.kind == "b":
            one = self.splat(value.type.element, 1)
            return builder.select(builder.icmp_unsigned("<", value, one), value, one)
        if not self.is_float:
            return value  # keys are made canonical when they are decoded
        element = value.type.element
        bits = self.splat(I64, _QUIET_NAN[8]) if element == F64 else self.splat(I32, _QUIET_NAN[4])
        nan = builder.bitcast(bits, value.type)

        def replaced() -> Any:
            return builder.select(builder.fcmp_unordered("uno", value, value), nan, value)

        if self.width < _BRANCH_WIDTH:
            return replaced()
        # NaNs are rare, so one question per block pays: comparing two halves answers it for both.
        half = self.width // 2
        low, high = (builder.shuffle_vector(value, value, self._numbers(k, k + half)) for k in (0, half))
        unordered = builder.bitcast(builder.fcmp_unordered("uno", low, high), ir.IntType(half))
        before = builder.block
        with builder.if_then(builder.icmp_signed("!=", unordered, ir.IntType(half)(0)), likely=False):
            fixed = replaced()
            inside = builder.block
        result = builder.phi(value.type)
        result.add_incoming(value, before)
        result.add_incoming(fixed, inside)
        return result

    def _round_to_odd(self, value: Any) -> Any:
        """fp64 to fp32 so that rounding to 16 bits afterwards equals one direct rounding.

        Inexact results get an odd last bit (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008):
        a plain fp32 step could land on a tie that the fp64 value was not on.
        """
        builder = self.builder
        near = builder.fptrunc(value, self.vector(F32))
        back = builder.fpext(near, value.type)
        bits = self._as_int(near)
        above = builder.fcmp_ordered(">", self._intrinsic("llvm.fabs", back), self._intrinsic("llvm.fabs", value))
        bits = builder.sub(bits, builder.zext(above, bits.type))
        inexact = builder.fcmp_ordered("!=", back, value)
        return builder.bitcast(builder.or_(bits, builder.zext(inexact, bits.type)), near.type)

    def _bfloat_to_high_half(self, bits: Any) -> Any:
        """i32 lanes with the bfloat16 bits on top and zeros below."""
        builder = self.builder
        if not self.paired:
            return builder.shl(builder.zext(bits, self.vector(I32)), self.splat(I32, 16))
        half = ir.VectorType(I32, self.width // 2)
        pairs = builder.bitcast(bits, half)
        even = builder.shl(pairs, half([I32(16)] * half.count))
        odd = builder.and_(pairs, half([I32(0xFFFF0000)] * half.count))
        return builder.shuffle_vector(even, odd, self._numbers(0, self.width))

    def _float_to_bfloat(self, value: Any) -> Any:
        builder = self.builder
        bits = self._as_int(value)
        odd = builder.and_(builder.lshr(bits, self.splat(I32, 16)), self.splat(I32, 1))
        rounded = builder.add(bits, builder.add(odd, self.splat(I32, 0x7FFF)))
        if not self.paired:
            return builder.trunc(builder.lshr(rounded, self.splat(I32, 16)), self.vector(I16))
        count = self.width // 2
        half = ir.VectorType(I32, count)
        low, high = (builder.shuffle_vector(rounded, rounded, self._numbers(k, k + count)) for k in (0, count))
        low = builder.lshr(low, half([I32(16)] * count))
        high = builder.and_(high, half([I32(0xFFFF0000)] * count))
        return builder.bitcast(builder.or_(low, high), self.vector(I16))

    @staticmethod
    def _numbers(start: int, stop: int) -> Any:
        return ir.Constant(ir.VectorType(I32, stop - start), [I32(k) for k in range(start, stop)])

    # -- 16-bit floats as sortable keys --------------------------------------------------------------------------

    @property
    def _key_offset(self) -> int:
        # As signed integers with the magnitude of negative ones inverted, floats are in order, NaNs of either sign at
        # the two ends. Subtracting the key of the first value past the NaNs of one end makes these wrap round to the
        # other end: all NaNs are then above every number (MAX) or below (MIN), unsigned.
        infinity = _INFINITY[self.variant.dtype.name]
        return (infinity ^ 0xFFFF) & 0xFFFF if self.variant.op == ReduceOp.MAX else infinity + 1

    def _flip_negative(self, bits: Any) -> Any:
        builder = self.builder
        mask = builder.lshr(builder.ashr(bits, self.splat(I16, 15)), self.splat(I16, 1))
        return builder.xor(bits, mask)

    def _encode(self, bits: Any) -> Any:
        return self.builder.sub(self._flip_negative(bits), self.splat(I16, self._key_offset))

    def _decode(self, key: Any) -> Any:
        builder = self.builder
        infinity = _INFINITY[self.variant.dtype.name]
        bits = self._flip_negative(builder.add(key, self.splat(I16, self._key_offset)))
        magnitude = builder.and_(bits, self.splat(I16, 0x7FFF))
        nan = builder.icmp_signed(">", magnitude, self.splat(I16, infinity))
        return builder.select(nan, self.splat(I16, _QUIET_NAN_16[self.variant.dtype.name]), bits)

    def _half_to_float(self, bits: Any) -> Any:
        builder = self.builder
        if self.native_half:
            return builder.fpext(builder.bitcast(bits, self.vector(HALF)), self.vector(F32))
        wide = builder.zext(bits, self.vector(I32))
        magnitude = builder.and_(wide, self.splat(I32, 0x7FFF))
        sign = builder.shl(builder.and_(wide, self.splat(I32, 0x8000)), self.splat(I32, 16))
        shifted = builder.shl(magnitude, self.splat(I32, 13))
        normal = builder.add(shifted, self.splat(I32, 112 << 23))
        special = builder.or_(shifted, self.splat(I32, 0x7F800000))
        # A subnormal half is a whole number of 2^-24.
        count = builder.sitofp(magnitude, self.vector(F32))
        tiny = self._as_int(builder.fmul(count, self.splat(F32, 2.0**-24)))
        result = builder.select(builder.icmp_signed(">=", magnitude, self.splat(I32, 0x7C00)), special, normal)
        result = builder.select(builder.icmp_signed("<", magnitude, self.splat(I32, 0x0400)), tiny, result)
        return builder.bitcast(builder.or_(result, sign), self.vector(F32))

    def _float_to_half(self, value: Any) -> Any:
        builder = self.builder
        if self.native_half:
            return builder.bitcast(builder.fptrunc(value, self.vector(HALF)), self.vector(I16))
        bits = self._as_int(value)
        magnitude = builder.and_(bits, self.splat(I32, 0x7FFFFFFF))
        sign = builder.lshr(builder.and_(bits, self.splat(I32, 0x80000000)), self.splat(I32, 16))
        odd = builder.and_(builder.lshr(magnitude, self.splat(I32, 13)), self.splat(I32, 1))
        rebased = builder.add(magnitude, self.splat(I32, (0xFFF - (112 << 23)) & 0xFFFFFFFF))
        normal = builder.lshr(builder.add(rebased, odd), self.splat(I32, 13))
        # Adding 0.5 makes the adder round at bit 2^-24, the unit of subnormal halves.
        half_bits = 126 << 23
        shifted = builder.fadd(builder.bitcast(magnitude, self.vector(F32)), self.splat(F32, 0.5))
        tiny = builder.sub(self._as_int(shifted), self.splat(I32, half_bits))
        nan = builder.icmp_signed(">", magnitude, self.splat(I32, 0x7F800000))
        special = builder.select(nan, self.splat(I32, 0x7E00), self.splat(I32, 0x7C00))
        result = builder.select(builder.icmp_signed("<", magnitude, self.splat(I32, 113 << 23)), tiny, normal)
        result = builder.select(builder.icmp_signed(">=", magnitude, self.splat(I32, 143 << 23)), special, result)
        return builder.trunc(builder.or_(result, sign), self.vector(I16))

    # -- reductions --------------------------------------------------------------------------------------------

    def reduce(self, op: ReduceOp, left: Any, right: Any) -> Any:
        """One step of a reduction on compute lanes; integers wrap, NaN propagates, -0 < +0."""
        builder = self.builder
        if op in (ReduceOp.SUM, ReduceOp.MEAN):
            return builder.fadd(left, right) if self.is_float else builder.add(left, right)
        if op == ReduceOp.PROD:
            return builder.fmul(left, right) if self.is_float else builder.mul(left, right)
        if self.is_float:
            return self._intrinsic("llvm.minimum" if op == ReduceOp.MIN else "llvm.maximum", left, right)
        compare = builder.icmp_signed if self.variant.dtype.kind == "i" else builder.icmp_unsigned
        return builder.select(compare("<" if op == ReduceOp.MIN else ">", left, right), left, right)
