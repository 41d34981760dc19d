"""Owns what a row of the benchmark is about: the call, its arrays' contents, and the exact result they must give."""

from __future__ import annotations

import dataclasses
import math
import zlib
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gfkernels.errors import UsageError
from gfkernels.types import DType

COLLECTIVES: Final = ("allreduce", "reduce_scatter", "allgather", "broadcast", "barrier")
REDUCING: Final = ("allreduce", "reduce_scatter")

_PERIOD: Final = 65_537
"""Contents repeat after so many elements: a prime, so that no slice or segment of a plan is in step with it."""
_TILES: Final = 16
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Case:
    """One call as it is measured.

    Attributes:
        collective: one of `COLLECTIVES`.
        op: the reduction's name.
        dtype: of the arrays.
        wire: what travels instead, or None.
        n: ranks.
        rank: this process.
        in_place: the result lies where the input was.
        count: elements of the larger of a rank's two arrays, from which bandwidth is computed.
        root: of a broadcast.
    """

    collective: str
    op: str
    dtype: DType
    wire: DType | None
    n: int
    rank: int
    in_place: bool
    count: int = 0
    root: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the larger array."""
        return self.count * self.dtype.itemsize

    @property
    def source_count(self) -> int:
        """Elements that a rank gives."""
        return self.count // self.n if self.collective == "allgather" else self.count

    @property
    def target_count(self) -> int:
        """Elements that a rank gets."""
        return self.count // self.n if self.collective == "reduce_scatter" else self.count

    @property
    def bus_factor(self) -> float:
        """What algbw is multiplied with so that it compares with the hardware's bandwidth, as nccl-tests does it."""
        factors = {"allreduce": 2 * (self.n - 1) / self.n, "broadcast": 1.0 if self.n > 1 else 0.0}
        return factors.get(self.collective, (self.n - 1) / self.n)

    def sized(self, nbytes: int) -> Case:
        """This call with arrays of about `nbytes`, at least one element (one per rank where the array is divided)."""
        divisor = self.n if self.collective in ("reduce_scatter", "allgather") else 1
        count = max(1, nbytes // self.dtype.itemsize // divisor) * divisor
        return dataclasses.replace(self, count=0 if self.collective == "barrier" else count)


def parse_nbytes(text: str, option: str) -> int:
    """Reads "64M", "8", "1KiB".

    Raises:
        UsageError: it is something else.
    """
    word = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = word[-1:] if word[-1:] in ("K", "M", "G") else ""
    digits = word.removesuffix(unit) if unit else word
    if not (digits.isascii() and digits.isdecimal()) or int(digits) < 1:
        raise UsageError(f"{option} {text}: expected a number of bytes such as 8, 64K, 16M or 1G")
    return int(digits) * _UNITS[unit]


def sweep(first: int, last: int, factor: float) -> list[int]:
    """Sizes from `first` to at most `last`, each `factor` times the one before.

    Raises:
        UsageError: they do not end, or there is none.
    """
    if not 1 < factor < math.inf:
        raise UsageError(f"-f {factor:g}: sizes grow by this factor, so it must be a number above 1")
    if first > last:
        raise UsageError(f"-b {first} is above -e {last}: the sweep goes from -b up to -e")
    sizes = [first]
    while (following := max(sizes[-1] + 1, round(sizes[-1] * factor))) <= last:
        sizes.append(following)
    return sizes


class Data:
    """Fresh random contents for all ranks of a case, known to each, and what the call must make of them."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        period = min(_PERIOD, case.source_count)
        self._inputs = [_random(case, seed, rank, period) for rank in range(case.n)]
        repeats = min(_TILES, -(-case.source_count // period))
        self._tile = np.tile(self._inputs[case.rank], repeats)

    def fill(self, array: Array) -> None:
        """Puts this rank's input into an array."""
        _fill(array, self._tile)

    def wrong(self, target: Array, source: Array) -> int:
        """How many elements of a result are wrong; of an input that should have stayed as it was, likewise."""
        case, errors = self.case, 0
        if case.collective == "allgather":
            blocks = target.reshape(case.n, case.source_count)
            for block, given in zip(blocks, self._inputs, strict=True):
                errors += _differing(block, *self._moved(given))
        elif case.collective == "broadcast":
            errors += _differing(target, *self._moved(self._inputs[case.root]))
        elif case.collective in REDUCING:
            exact, tolerance = self._reduced()
            if case.collective == "reduce_scatter":
                offset = case.rank * case.target_count
                exact = np.roll(exact, -(offset % exact.size))
                tolerance = None if tolerance is None else np.roll(tolerance, -(offset % tolerance.size))
            errors += _differing(target, exact, tolerance)
        if not case.in_place:
            errors += _differing(source, self._inputs[case.rank], None)
        return errors

    def _moved(self, given: Array) -> tuple[Array, Array | None]:
        """What a block that only travels arrives as."""
        if self.case.wire is None:
            return given, None
        exact = given.astype(np.float64)
        return exact, _roundoff(self.case.wire) * np.abs(exact) + _smallest(self.case.wire)

    def _reduced(self) -> tuple[Array, Array | None]:
        """The exact reduction, and how far rounding may take the result from it (None: not at all)."""
        case, n = self.case, self.case.n
        kind = case.dtype.kind
        if case.op in ("min", "max"):
            choose = np.minimum if case.op == "min" else np.maximum
            return self._moved(choose.reduce(self._inputs))
        if kind in ("i", "u"):
            # Integers wrap around, in numpy as in the kernels.
            combine = np.add if case.op == "sum" else np.multiply
            wrapped: Array = combine.reduce(self._inputs, dtype=case.dtype.numpy)
            return wrapped, None
        travelling = case.wire or case.dtype
        # Each rank's contribution and each partial result on its way may be rounded once.
        roundings = 2 * n + 2
        unit = max(_roundoff(case.dtype), _roundoff(travelling))
        smallest = roundings * max(_smallest(case.dtype), _smallest(travelling))
        wide = np.stack([given.astype(np.float64) for given in self._inputs])
        if case.op == "prod":
            product = np.multiply.reduce(wide.astype(np.longdouble)).astype(np.float64)
            return product, roundings * unit * np.abs(product) + smallest
        if case.dtype.itemsize == 8:
            total = np.array([math.fsum(column) for column in wide.T])
        else:
            total = np.add.reduce(wide)
        bound = roundings * unit * np.add.reduce(np.abs(wide)) + smallest
        return (total / n, bound / n + smallest) if case.op == "mean" else (total, bound)


def neutral(array: Array, op: str) -> None:
    """Contents that reductions leave as they are, for calls in a row."""
    array[...] = np.array(0 if op == "sum" else 1).astype(array.dtype)


def poison(array: Array) -> None:
    """Contents that no correct result holds in more than a few places: not a number where there is one."""
    array.view(np.uint8)[...] = 0xFF


def digest(array: Array) -> int:
    """A number that differs between ranks whose bits differ."""
    return zlib.crc32(array.view(np.uint8).data)


def _random(case: Case, seed: int, rank: int, count: int) -> Array:
    random = np.random.default_rng([seed, rank])
    dtype = case.dtype
    if dtype.kind == "b":
        return random.integers(0, 2, count).astype(np.bool_)
    if dtype.kind in ("i", "u"):
        bits: Array = np.frombuffer(random.bytes(count * dtype.itemsize), dtype.numpy)
        return bits
    if case.op == "prod":
        # Near 1 in size, so that products over many ranks stay in fp16's range.
        values: Array = random.uniform(0.8, 1.25, count) * random.choice([-1.0, 1.0], count)
    else:
        values = random.standard_normal(count)
    return values.astype(dtype.numpy)


def _fill(array: Array, tile: Array) -> None:
    for start in range(0, array.size, tile.size):
        piece = array[start : start + tile.size]
        piece[...] = tile[: piece.size]


def _differing(found: Array, expected: Array, tolerance: Array | None) -> int:
    errors = 0
    for start in range(0, found.size, expected.size):
        piece = found[start : start + expected.size]
        wanted = expected[: piece.size]
        if tolerance is None:
            errors += int(np.count_nonzero(piece != wanted))
        else:
            with np.errstate(invalid="ignore"):
                good = np.abs(piece.astype(np.float64) - wanted) <= tolerance[: piece.size]
            errors += piece.size - int(np.count_nonzero(good))
    return errors


def _roundoff(dtype: DType) -> float:
    """Half the distance from 1 to the next number."""
    return {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype.name]


def _smallest(dtype: DType) -> float:
    """The distance of numbers next to 0."""
    return {"float64": 5e-324, "float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}[dtype.name]
