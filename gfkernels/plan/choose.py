"""Owns which plan a collective follows: a pure function of topology, size and settings, the same on every rank.

Crossovers are constants with their reasons; measured tuning may replace the numbers, never the rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from gfkernels.errors import UsageError
from gfkernels.plan import direct, doubling, ring
from gfkernels.plan.model import MAX_RING_LANES, Plan
from gfkernels.types import DType, ReduceOp

LINE_NBYTES: Final = 64
"""Slices of a `direct` plan begin on cache lines, so that no two owners write to the same one."""
INLINE_NBYTES: Final = 8192
"""Up to here every rank reducing everything (N reads of the array each) costs less than the exit barrier that slices
need: one barrier saved is about a microsecond, in which a core reads some 10 KB of its peers' caches."""
CMA_SEGMENT_NBYTES: Final = 256 << 10
"""A system call's cost (0.5 us, and the peer's pages have to be looked up) is a few per cent of such a piece's copy."""
CMA_MIN_NBYTES: Final = 2 << 20
"""Below, staging an allreduce is faster though it copies more: it stays in the caches and enters no kernel. For 4 ranks
they meet between 1 MiB (Zen 3) and 4 MiB (Zen 4)."""
CMA_MIN_NBYTES_OF_TWO: Final = 32 << 20
"""As CMA_MIN_NBYTES, for 2 ranks, who stage in two phases, not three, and seldom share a core: 1.7 to 2.3 against 1.75
to 2.75 ms at 16 MiB, 8 against 9 at 64 MiB. Measured on Zen 4 only; with three phases they met near 4 MiB on Zen 3."""
STAGED_SEGMENT_NBYTES: Final = 256 << 10
"""Large enough to hide a barrier per tick, small enough that a segment stays in the L2."""
STAGED_SLOTS: Final = 6
"""Two segments each being packed, reduced and unpacked, or three of two ranks: before one is filled again, a peer has
read more than its L2 holds, and no longer keeps the slot's lines."""
STAGE_CYCLE_NBYTES: Final = 2 << 20
"""Small calls take turns in so much of STAGE for the same reason: between 2 ranks 64 KiB took 6 us instead of 13, and
256 KiB 15 instead of 25 to 40. Much more than that is found in no cache, and gains less."""
RING_SEGMENT_NBYTES: Final = 64 << 10
"""A message stays in the L2 from arrival to departure, and one send call carries it."""
RING_SLOTS: Final = 8
"""Four lines take turns while four messages are under way: about the bandwidth-delay product of 25 Gbit/s at 80 us."""
RING_MIN_SEGMENT_NBYTES: Final = 4096
"""Shorter messages cost more in calls than they gain in overlap."""
MAX_ROWS: Final = 1 << 17
"""A plan that would have more rows gets longer segments, as far as staging allows: a row and its spans cost about 200
bytes and 3 us, and the plan for an array of many GiB should stay within 25 MB and half a second."""
ROWS_LIMIT: Final = 1 << 22
"""More rows than this are refused: the plan alone would take a GB."""
DOUBLING_NBYTES: Final = 32 << 10
"""Up to here on the wire (for 4 ranks or more) latency counts: log2 N exchanges against 2(N - 1) hops. A ring moves
2(N - 1)/N of the array, doubling log2 N of it; at 10 Gbit/s and 30 us a hop they meet near this size for 4 ranks."""

_PAGE_NBYTES: Final = 4096

PLANS: Final = ("auto", "direct", "ring", "recursive_doubling")


@dataclass(frozen=True)
class Choice:
    """A builder with all its arguments but the rank.

    Attributes:
        builder: the function.
        size: number of ranks.
        count: elements of the input.
        arguments: keyword arguments.
        packed: whether the kernel must be compiled with a wire dtype (the array's own if none is set).
        reaches_arrays: whether peers reach into X or OUT by mapping or cross-memory attach.
    """

    builder: Callable[..., Plan]
    size: int
    count: int
    arguments: tuple[tuple[str, Any], ...]
    packed: bool
    reaches_arrays: bool

    def build(self, rank: int) -> Plan:
        """The plan of one rank; repeated calls return the same object."""
        return _build(self, rank)

    @property
    def kind(self) -> str:
        """For logs, e.g. "direct.allreduce(variant=cma, ...)"."""
        module = self.builder.__module__.rsplit(".", 1)[-1]
        return f"{module}.{self.builder.__name__}({', '.join(f'{k}={v}' for k, v in self.arguments)})"


@functools.lru_cache(maxsize=64)
def _build(choice: Choice, rank: int) -> Plan:
    return choice.builder(rank, choice.size, choice.count, **dict(choice.arguments))


def mean_prescale(op: ReduceOp, dtype: DType, wire: DType | None, size: int) -> tuple[float, float]:
    """Mean's (prescale, divisor), the two arguments of a kernel; (1, 1) for other reductions.

    What has 16 bits is scaled by 2^-k before it is added, k = round(log2 sqrt(size)), and divided by size * 2^-k after.
    """
    if op != ReduceOp.MEAN:
        return 1.0, 1.0
    if (wire or dtype).itemsize != 2:
        return 1.0, float(size)
    # round(log2(size) / 2) in whole numbers: 2^(2k - 1) <= size < 2^(2k + 1).
    prescale = 2.0 ** -(size.bit_length() // 2)
    return prescale, size * prescale


def stage_windows(nbytes: int, staging_bytes: int) -> tuple[int, int]:
    """How calls that need `nbytes` of STAGE share it by turns.

    Returns:
        Bytes of a window, and how many there are: odd, so that a loop of two calls a turn, one of them perhaps
        a barrier, comes to all of them. (One and not two where two fit: 2 and 3 windows of 1 MiB gained nothing.)
    """
    window_nbytes = -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES
    n_windows = min(STAGE_CYCLE_NBYTES, staging_bytes) // window_nbytes
    return window_nbytes, max(1, (n_windows - 1) | 1)


def choose(
    collective: str,
    *,
    size: int,
    count: int,
    itemsize: int,
    wire_itemsize: int | None = None,
    wired: bool = False,
    prescaled: bool = False,
    same_host: bool = True,
    variant: str = "registered",
    plan: str = "auto",
    out: bool = False,
    root: int = 0,
    segment_bytes: int | None = None,
    lanes: int | None = None,
    inline_bytes: int = INLINE_NBYTES,
    staging_bytes: int = 16 << 20,
    cma_min_bytes: int | None = None,
) -> Choice:
    """Which plan to build.

    Args:
        collective: "allreduce", "reduce_scatter", "allgather", "broadcast" or "barrier".
        size: number of ranks.
        count: elements of a rank's input.
        itemsize: bytes of an array's element.
        wire_itemsize: bytes of a wire's element; None: as `itemsize`.
        wired: a wire dtype other than the array's is set.
        prescaled: mean scales contributions beforehand (`mean_prescale` is not 1).
        same_host: all ranks share a host and its ENTER.
        variant: the common way to the ranks' arrays on one host: "registered", "cma" or "staged".
        plan: the configured algorithm.
        out: the result of allreduce goes to another array than the input.
        root: of a broadcast.
        segment_bytes: configured bytes of a message.
        lanes: configured concurrent lanes.
        inline_bytes: arrays up to this size on the wire may go inline.
        staging_bytes: bytes of STAGE that a plan may use.
        cma_min_bytes: an allreduce of less goes through STAGE where the variant is "cma"; 0: none does; None: what was
            measured to be best.

    Raises:
        UsageError: the configured plan cannot do this collective here, or would be too long.
    """
    if plan not in PLANS:
        raise UsageError(f"plan={plan!r}: expected one of {', '.join(PLANS)}")
    wire = itemsize if wire_itemsize is None else wire_itemsize
    if collective == "barrier":
        return _choice(direct.barrier, size, 0, False, False, enter=same_host)
    if plan == "direct" and not same_host:
        raise UsageError('plan="direct" needs all ranks on one host. Use plan="auto" or "ring" between hosts')
    if plan == "recursive_doubling" and collective != "allreduce":
        # A setting of the whole communicator, and there is no such algorithm for the other collectives.
        plan = "auto"
    if cma_min_bytes is None:
        cma_min_bytes = CMA_MIN_NBYTES_OF_TWO if size == 2 else CMA_MIN_NBYTES
    if variant == "cma" and collective == "allreduce" and count * itemsize < cma_min_bytes:
        variant = "staged"
    if plan == "direct" or (plan == "auto" and same_host):
        return _direct(collective, size, count, itemsize, wire, wired, variant, out, root, segment_bytes, inline_bytes,
                       staging_bytes)  # fmt: skip
    packed = wired or prescaled
    rounds = 2 + size.bit_length()
    fits = rounds * count * wire <= staging_bytes
    if plan == "recursive_doubling" and not fits:
        raise UsageError(
            f'plan="recursive_doubling" of {count} elements over {size} ranks needs {rounds * count * wire} bytes of '
            f'staging, staging_bytes is {staging_bytes}. Raise it or use plan="ring"'
        )
    small = count * wire <= DOUBLING_NBYTES and fits
    if collective == "allreduce" and (plan == "recursive_doubling" or (plan == "auto" and small)):
        return _choice(doubling.allreduce, size, count, packed, False, packed=packed, out=out, enter=same_host)
    return _ring(
        collective, size, count, wire, wired, packed, same_host, out, root, segment_bytes, lanes, staging_bytes
    )


def _choice(
    builder: Callable[..., Plan], size: int, count: int, is_packed: bool, reaches_arrays: bool, **arguments: Any
) -> Choice:
    return Choice(builder, size, count, tuple(sorted(arguments.items())), is_packed, reaches_arrays)


def _direct(
    collective: str, size: int, count: int, itemsize: int, wire: int, wired: bool, variant: str, out: bool, root: int,
    segment_bytes: int | None, inline_bytes: int, staging_bytes: int,
) -> Choice:  # fmt: skip
    arguments: dict[str, Any] = {}
    align = max(1, LINE_NBYTES // min(itemsize, wire))
    if collective != "broadcast":
        arguments["packed"] = wired
    if collective == "allreduce":
        arguments |= {"out": out, "align_elements": align}
    if collective == "broadcast":
        arguments["root"] = root
    if count * wire <= inline_bytes:
        variant = "inline"
    if variant == "cma":
        nbytes = segment_bytes or max(CMA_SEGMENT_NBYTES, 2 * count * itemsize // MAX_ROWS)
        arguments["segment_elements"] = _even(-(-count // size), nbytes // itemsize, align)
        _check_rows_limit(count, -(-count // size), arguments["segment_elements"], 2 * size)
    if variant == "staged":
        nbytes = segment_bytes or max(STAGED_SEGMENT_NBYTES, (size + 4) * count * wire // MAX_ROWS)
        arguments["segment_elements"] = _even(count, min(nbytes, staging_bytes // STAGED_SLOTS) // wire, align)
        arguments["slots"] = STAGED_SLOTS
        _check_rows_limit(count, count, arguments["segment_elements"], size + 4)
    arguments["variant"] = variant
    builder = getattr(direct, collective)
    return _choice(builder, size, count, wired, variant in ("registered", "cma"), **arguments)


def _ring(
    collective: str, size: int, count: int, wire: int, wired: bool, packed: bool, same_host: bool, out: bool, root: int,
    segment_bytes: int | None, lanes: int | None, staging_bytes: int,
) -> Choice:  # fmt: skip
    n_lanes = min(lanes or MAX_RING_LANES, MAX_RING_LANES)
    align = max(1, LINE_NBYTES // wire)
    chunk = count
    if collective in ("allreduce", "reduce_scatter"):
        chunk = -(-count // size)
    if collective == "allreduce":
        chunk = -(-chunk // align) * align
    # A chunk should make enough messages for all lines of all lanes to have one.
    share = -(-chunk // (n_lanes * RING_SLOTS // 2 * align)) * align * wire
    hops = {"allreduce": 2 * (size - 1), "broadcast": 1}.get(collective, size - 1)
    wanted = max(min(RING_SEGMENT_NBYTES, max(RING_MIN_SEGMENT_NBYTES, share)), 5 * hops * chunk * wire // MAX_ROWS)
    # On one host a neighbour's array is not always mapped; between hosts a put names it by offset.
    direct_write = not wired and not same_host
    unbounded = direct_write and collective in ("allgather", "broadcast")
    limit = (segment_bytes or wanted) if unbounded else staging_bytes // (n_lanes * (RING_SLOTS + 1))
    segment = _even(chunk, min(segment_bytes or wanted, limit) // wire, align, n_lanes)
    _check_rows_limit(count, chunk, segment, 5 * hops)
    arguments: dict[str, Any] = {
        "enter": same_host,
        "segment_elements": segment,
        "lanes": n_lanes,
        "slots": RING_SLOTS,
    }
    if collective == "broadcast":
        arguments |= {"root": root, "direct_write": direct_write}
        packed = False
    else:
        arguments["packed"] = wired if collective == "allgather" else packed
    if collective == "allreduce":
        arguments |= {"out": out, "direct_write": direct_write, "align_elements": align}
    if collective == "allgather":
        arguments["direct_write"] = direct_write
        packed = wired
    return _choice(getattr(ring, collective), size, count, packed, False, **arguments)


def _check_rows_limit(count: int, length: int, segment: int, rows_each: int) -> None:
    rows = -(-length // segment) * rows_each
    if rows > ROWS_LIMIT:
        raise UsageError(
            f"an array of {count} elements in segments of {segment} makes a plan of about {rows} rows, at most "
            f"{ROWS_LIMIT} are allowed. Raise segment_bytes or staging_bytes, or split the array"
        )


def _even(length: int, most: int, align: int, turns: int = 1) -> int:
    """Elements of a segment: pieces of a `length` that are alike, so that no short one ends the pipeline.

    Args:
        length: what is cut.
        most: elements of a segment at most.
        align: segments begin at multiples of this, unless `most` is less.
        turns: if there are several segments, make a multiple of this many.
    """
    most = max(1, most // align * align or most)
    parts = -(-length // most)
    if parts > 1:
        parts = -(-parts // turns) * turns
    each = -(-length // max(1, parts))
    return max(1, min(most, -(-each // align) * align))
