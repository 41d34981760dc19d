"""Owns what an element is to a kernel: how lanes are loaded, widened, rounded, combined and stored, in LLVM IR.

A value is a vector of `width` lanes. Storage types are what lies in memory (16-bit floats as their bits), compute types
are what arithmetic is done in: fp32 for floats up to 32 bits, fp64 for float64, the integers themselves.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir

from gfkernels.types import DType, ReduceOp

I1: Final = ir.IntType(1)
I16: Final = ir.IntType(16)
I32: Final = ir.IntType(32)
I64: Final = ir.IntType(64)
F32: Final = ir.FloatType()
F64: Final = ir.DoubleType()
HALF: Final = ir.HalfType()

_QUIET_NAN: Final = {4: 0x7FC00000, 8: 0x7FF8000000000000}


def storage_type(dtype: DType) -> Any:
    """The LLVM type of one element in memory; 16-bit floats and bool are plain integers there."""
    if dtype.name == "float32":
        return F32
    if dtype.name == "float64":
        return F64
    return ir.IntType(8 * dtype.itemsize)


def compute_type(dtype: DType) -> Any:
    """The LLVM type that one element is added (multiplied, compared) in."""
    if dtype.name == "float64":
        return F64
    return F32 if dtype.kind == "f" else ir.IntType(8 * dtype.itemsize)


def compute_itemsize(dtype: DType) -> int:
    """Bytes of one element of the compute type."""
    return max(dtype.itemsize, 4) if dtype.kind == "f" else dtype.itemsize


class Lanes:
    """Emits operations on `width` lanes of one kernel.

    Args:
        builder: the IR builder to emit with.
        width: lanes of a value.
        dtype: the array's element type, which fixes the compute type.
        native_half: whether the target converts fp16 by instructions. Without them LLVM would emit calls to
            compiler-rt functions that a process need not hold, so integer code is emitted instead.
    """

    def __init__(self, builder: Any, width: int, dtype: DType, native_half: bool) -> None:
        self.builder = builder
        self.width = width
        self.dtype = dtype
        self.native_half = native_half
        self.compute = compute_type(dtype)
        self.is_float = dtype.kind == "f"

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

    # -- conversions -------------------------------------------------------------------------------------------

    def widen(self, bits: Any, dtype: DType) -> Any:
        """Storage lanes of `dtype` as compute lanes; always exact."""
        if dtype.name == "float16":
            bits = self._half_to_float(bits)
        elif dtype.name == "bfloat16":
            wide = self.builder.zext(bits, self.vector(I32))
            bits = self.builder.bitcast(self.builder.shl(wide, self.splat(I32, 16)), self.vector(F32))
        if self.compute == F64 and bits.type.element == F32:
            return self.builder.fpext(bits, self.vector(F64))
        return bits

    def narrow(self, value: Any, dtype: DType) -> Any:
        """Compute lanes rounded once, to nearest even, to storage lanes of `dtype`.

        The lanes hold no NaN but the canonical one: see `canonical`.
        """
        if dtype.name not in ("float16", "bfloat16"):
            return value
        if value.type.element == F64:
            value = self._round_to_odd(value)
        return self._float_to_half(value) if dtype.name == "float16" else self._float_to_bfloat(value)

    def canonical(self, value: Any) -> Any:
        """The value with every NaN made the positive quiet one without payload; bools made 0 or 1."""
        builder = self.builder
        if self.dtype.kind == "b":
            one = self.splat(value.type.element, 1)
            return builder.select(builder.icmp_unsigned("<", value, one), value, one)
        if not self.is_float:
            return value
        element = value.type.element
        bits = self.splat(I64, _QUIET_NAN[8]) if element == F64 else self.splat(I32, _QUIET_NAN[4])
        nan = builder.bitcast(bits, value.type)
        return builder.select(builder.fcmp_unordered("uno", value, value), nan, value)

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

    def _float_to_bfloat(self, value: Any) -> Any:
        builder = self.builder
        bits = self._as_int(value)
        odd = builder.and_(builder.lshr(bits, self.splat(I32, 16)), self.splat(I32, 1))
        rounded = builder.add(bits, builder.add(odd, self.splat(I32, 0x7FFF)))
        return builder.trunc(builder.lshr(rounded, self.splat(I32, 16)), self.vector(I16))

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
        compare = builder.icmp_signed if self.dtype.kind == "i" else builder.icmp_unsigned
        return builder.select(compare("<" if op == ReduceOp.MIN else ">", left, right), left, right)
