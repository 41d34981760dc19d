"""Owns programs: a request's plans as words that the engine reads, made once and found again by request."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gfkernels import kernels
from gfkernels.communicator.requests import REDUCING, Request
from gfkernels.engine.context import (
    MAX_ARRAYS,
    MAX_LANES,
    N_KERN_WORDS,
    N_PROG_WORDS,
    N_VARIANT_WORDS,
    Kern,
    Kind,
    Prog,
    Variant,
)
from gfkernels.errors import UsageError
from gfkernels.native.libc import publish
from gfkernels.plan import choose, many
from gfkernels.plan.model import Plan, PlanBuilder
from gfkernels.types import DTYPES, N_BUFFERS, DType, ReduceOp

_CACHED: Final = 512
"""Programs kept by request: training loops use a handful, a sweep over sizes must not grow without end."""
_VARIANTS: Final = {Kind.STAGED: "staged", Kind.CMA: "cma", Kind.REGISTERED: "registered"}


@dataclass(frozen=True)
class Terrain:
    """What plans depend on besides the request: the same on all ranks.

    Attributes:
        rank: this rank.
        size: ranks.
        same_host: all share this host's memory, and calls begin with ENTER.
        settings: `plan`, `segment_bytes`, `lanes`, `inline_bytes`, `staging_bytes` as `choose` takes them.
        places: where INLINE of all ranks lies: int64[2][size][N_BUFFERS], by call parity.
        scratch: gives the address of at least so many bytes of private memory.
    """

    rank: int
    size: int
    same_host: bool
    settings: dict[str, Any]
    places: npt.NDArray[np.int64]
    scratch: Callable[[int], int]


@dataclass(eq=False)
class Program:
    """A request's words, and the memory under them.

    Attributes:
        request: what it does.
        words: `Prog` words.
        builders: by memory kind, how to build the plan.
        wire_itemsize: bytes of an element of STAGE; plans over many arrays use none.
        plans: by memory kind, those built so far.
        addresses: where the second and further arrays of a list are; filled in before a call.
    """

    request: Request
    terrain: Terrain
    words: npt.NDArray[np.int64]
    builders: dict[Kind, Callable[[], Plan]]
    wire_itemsize: int = 0
    plans: dict[Kind, Plan] = field(default_factory=dict)
    keep: list[Any] = field(default_factory=list)
    address: int = 0
    addresses: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def build(self, kind: Kind) -> None:
        """Makes the plan for one memory kind."""
        plan = self.builders[kind]()
        if plan.n_lanes > MAX_LANES:
            raise UsageError(f"plan {plan.name} has {plan.n_lanes} lanes, the engine runs {MAX_LANES}")
        same = [other for other, builder in self.builders.items() if builder == self.builders[kind]]
        for other in same:
            self._install(other, plan)

    def _install(self, kind: Kind, plan: Plan) -> None:
        self.plans[kind] = plan
        starts = np.ascontiguousarray(plan.lane_starts, np.int64)
        expects = np.ascontiguousarray(plan.expects, np.int64)
        self.keep += [plan, starts, expects]
        at = int(Prog.VARIANTS) + int(kind) * N_VARIANT_WORDS
        if plan.scratch_elements:
            self.words[Prog.SCRATCH] = self.terrain.scratch(plan.scratch_elements * self._scratch_itemsize())
        group = self.words[at : at + N_VARIANT_WORDS]
        group[Variant.STEPS] = plan.steps.ctypes.data
        group[Variant.SPANS] = plan.spans.ctypes.data
        group[Variant.N_LANES] = plan.n_lanes
        group[Variant.LANE_STARTS] = starts.ctypes.data
        group[Variant.EXPECTS] = expects.ctypes.data if expects.any() else 0
        stage_nbytes = plan.stage_elements * self.wire_itemsize
        # Without ENTER a rank may be calls ahead of those who read its STAGE, and one place keeps them in order.
        group[Variant.WINDOW_NBYTES], group[Variant.N_WINDOWS] = stage_nbytes, 1
        if self.terrain.same_host and stage_nbytes:
            group[Variant.WINDOW_NBYTES], group[Variant.N_WINDOWS] = choose.stage_windows(
                stage_nbytes, int(self.terrain.settings["staging_bytes"])
            )
        # Last: another thread may be in ENTER of this program, and takes the variant as soon as it is there.
        publish(int(group[Variant.PRESENT :].ctypes.data), 1)

    def _scratch_itemsize(self) -> int:
        return 8 if self.request.dtype is None else self.request.dtype.itemsize

    def plan(self, kind: int) -> Plan:
        """The plan that runs with this common memory kind."""
        if Kind(kind) not in self.plans:
            self.build(Kind(kind))
        return self.plans[Kind(kind)]


class Programs:
    """The programs of one communicator. Safe for threads."""

    def __init__(self, terrain: Terrain) -> None:
        self.terrain = terrain
        self._lock = threading.Lock()
        self._cache: OrderedDict[Any, Program] = OrderedDict()

    def get(self, request: Request) -> Program:
        """The program of a request over one array (or none).

        Raises:
            UsageError: the request has no meaning, or the configured plan cannot do it.
        """
        program = self._cache.get(request)
        if program is None:
            program = self._make(request)
            self._remember(request, program)
        return program

    def get_many(self, op: ReduceOp, arrays: Sequence[tuple[DType, int]], wire: DType | None) -> Program:
        """The program of an allreduce over a list of arrays, in place; on one host only.

        Args:
            op: the reduction.
            arrays: dtype and elements of each.
            wire: dtype that travels for floats; None: each one's own.

        Raises:
            UsageError: too many arrays for one call, or a request without meaning.
        """
        key = ("many", op, tuple((dtype.code, count) for dtype, count in arrays), wire)
        program = self._cache.get(key)
        if program is None:
            program = self._make_many(op, arrays, wire)
            self._remember(key, program)
        return program

    def at(self, address: int) -> Program | None:
        """The program whose words lie at an address; None where it has been forgotten since."""
        with self._lock:
            return next((program for program in self._cache.values() if program.address == address), None)

    def _remember(self, key: Any, program: Program) -> None:
        with self._lock:
            self._cache[key] = program
            while len(self._cache) > _CACHED:
                self._cache.popitem(last=False)

    def _make(self, request: Request) -> Program:
        terrain = self.terrain
        dtype = request.dtype or DTYPES["uint8"]
        wire = effective_wire(dtype, request.wire)
        prescale, divisor = choose.mean_prescale(request.op, dtype, wire, terrain.size)
        choices = {
            kind: choose.choose(
                request.collective,
                size=terrain.size,
                count=request.elements,
                itemsize=dtype.itemsize,
                wire_itemsize=(wire or dtype).itemsize,
                wired=wire is not None,
                prescaled=prescale != 1.0,
                same_host=terrain.same_host,
                variant=variant,
                out=request.out,
                root=request.root,
                **terrain.settings,
            )
            for kind, variant in _VARIANTS.items()
        }
        # Where mapped arrays are reached into, the kinds of memory matter.
        some = choices[Kind.REGISTERED]
        kernel = self._kernel(request, dtype, wire or (dtype if some.packed else None))
        rows = self._kern_rows([(kernel, dtype, wire)], prescale, divisor)
        words = np.zeros(N_PROG_WORDS, np.int64)
        builders: dict[Kind, Callable[[], Plan]] = {kind: _Builder(c, terrain.rank) for kind, c in choices.items()}
        wire_itemsize = (wire or dtype).itemsize
        program = Program(request, terrain, words, builders, wire_itemsize, keep=[words, *rows])
        elements = {
            "allgather": terrain.size * request.elements,
            "reduce_scatter": request.elements // terrain.size,
            "allreduce": request.elements if request.out else 0,
        }
        words[Prog.X_NBYTES] = request.elements * dtype.itemsize
        words[Prog.OUT_NBYTES] = elements.get(request.collective, 0) * dtype.itemsize
        words[Prog.USES_ARRAYS] = some.reaches_arrays
        # The settings are agreed through the names of all plans: ranks with others would not fit together.
        names = [choice.kind for choice in choices.values()]
        self._finish(program, rows, request.signature(*names), n_arrays=1)
        if request.dtype is not None:
            words[Prog.DESCRIPTOR] = id(dtype.numpy)
            program.keep.append(dtype.numpy)
        return program

    def _make_many(self, op: ReduceOp, arrays: Sequence[tuple[DType, int]], wire: DType | None) -> Program:
        terrain, n = self.terrain, len(arrays)
        if n > MAX_ARRAYS:
            raise UsageError(f"allreduce_many of {n} arrays: at most {MAX_ARRAYS} in one call; split the list")
        wires = [effective_wire(dtype, wire) if dtype.kind == "f" else None for dtype, _ in arrays]
        request = Request("allreduce_many", op, None, wire, sum(count for _, count in arrays))
        kinds = {(dtype, w) for (dtype, _), w in zip(arrays, wires, strict=True)}
        kernels.prepare([(op, dtype, w) for dtype, w in kinds])
        rows: list[npt.NDArray[Any]] = []
        table = np.zeros((n, N_KERN_WORDS), np.int64)
        args = np.zeros((n, 2), np.float64)
        for i, ((dtype, _), w) in enumerate(zip(arrays, wires, strict=True)):
            args[i] = choose.mean_prescale(op, dtype, w, terrain.size)
            table[i, Kern.COMBINE] = kernels.combine(op, dtype, w)
            table[i, Kern.ITEMSIZE] = dtype.itemsize
            table[i, Kern.WIRE_ITEMSIZE] = (w or dtype).itemsize
            table[i, Kern.ARGS] = args[i : i + 1].ctypes.data
        rows += [table, args]
        builders: dict[Kind, Callable[[], Plan]] = {Kind.STAGED: _EntryBuilder(terrain.rank, terrain.size)}
        for kind, variant in ((Kind.CMA, "cma"), (Kind.REGISTERED, "registered")):
            builders[kind] = _ManyBuilder(
                terrain.rank,
                terrain.size,
                tuple(count for _, count in arrays),
                variant,
                tuple(w is not None for w in wires),
                tuple(dtype.itemsize for dtype, _ in arrays),
                tuple((w or dtype).itemsize for (dtype, _), w in zip(arrays, wires, strict=True)),
                int(terrain.settings["inline_bytes"]),
                int(terrain.settings.get("segment_bytes") or choose.CMA_SEGMENT_NBYTES),
            )
        words = np.zeros(N_PROG_WORDS, np.int64)
        program = Program(request, terrain, words, builders, keep=[words, *rows])
        words[Prog.X_NBYTES] = arrays[0][1] * arrays[0][0].itemsize
        words[Prog.USES_ARRAYS] = 1
        sizes = np.array([count * dtype.itemsize for dtype, count in arrays[1:]] or [0], np.int64)
        addresses = np.zeros(max(1, n - 1), np.int64)
        words[Prog.NBYTES], words[Prog.ADDRESSES] = sizes.ctypes.data, addresses.ctypes.data
        places = np.zeros((2, terrain.size, N_BUFFERS + n - 1), np.int64)
        places[:, :, :N_BUFFERS] = terrain.places
        words[Prog.PLACES], words[Prog.N_COLUMNS] = places.ctypes.data, places.shape[2]
        program.keep += [sizes, places]
        program.addresses = addresses
        agreed = [(dtype.code, count) for dtype, count in arrays]
        settings = sorted((k, repr(v)) for k, v in terrain.settings.items())
        self._finish(program, rows, request.signature(agreed, settings), n_arrays=n)
        return program

    def _finish(self, program: Program, rows: Sequence[npt.NDArray[Any]], signature: int, *, n_arrays: int) -> None:
        words, request = program.words, program.request
        words[Prog.SIGNATURE] = signature
        words[Prog.CODE], words[Prog.COUNT] = request.code, request.elements
        words[Prog.N_ARRAYS], words[Prog.KERNELS] = n_arrays, rows[0].ctypes.data
        words[Prog.HAS_ENTER] = self.terrain.same_host
        program.address = int(words.ctypes.data)
        # The pre-steps run before the common kind is known; they are those of every kind.
        likeliest = Kind.REGISTERED if self.terrain.same_host else Kind.STAGED
        program.build(likeliest)
        plan = program.plans[likeliest]
        words[Prog.PLAN_HASH] = plan.hash64
        if plan.n_pre:
            words[Prog.PRE_STEPS], words[Prog.N_PRE] = plan.steps.ctypes.data, plan.n_pre
            words[Prog.PRE_SPANS] = plan.spans.ctypes.data

    def _kernel(self, request: Request, dtype: DType, wire: DType | None) -> int:
        if request.collective not in REDUCING and wire is None:
            return 0
        key = (request.op, dtype, wire)
        kernels.prepare([key])
        return kernels.combine(*key)

    def _kern_rows(
        self, arrays: Sequence[tuple[int, DType, DType | None]], prescale: float, divisor: float
    ) -> list[npt.NDArray[Any]]:
        args = np.array([prescale, divisor], np.float64)
        table = np.zeros((len(arrays), N_KERN_WORDS), np.int64)
        for i, (kernel, dtype, wire) in enumerate(arrays):
            table[i, Kern.COMBINE] = kernel
            table[i, Kern.ITEMSIZE] = dtype.itemsize
            table[i, Kern.WIRE_ITEMSIZE] = (wire or dtype).itemsize
            table[i, Kern.ARGS] = args.ctypes.data
        return [table, args]


@dataclass(frozen=True)
class _Builder:
    choice: choose.Choice
    rank: int

    def __call__(self) -> Plan:
        return self.choice.build(self.rank)


@dataclass(frozen=True)
class _EntryBuilder:
    """Nothing but ENTER: where arrays of a list turn out to be out of reach, they are then reduced one by one."""

    rank: int
    size: int

    def __call__(self) -> Plan:
        builder = PlanBuilder("entry", "barrier", self.rank, self.size, 0)
        builder.enter()
        return builder.build()


@dataclass(frozen=True)
class _ManyBuilder:
    rank: int
    size: int
    counts: tuple[int, ...]
    variant: str
    packed: tuple[bool, ...]
    itemsizes: tuple[int, ...]
    wire_itemsizes: tuple[int, ...]
    inline_bytes: int
    segment_bytes: int

    def __call__(self) -> Plan:
        return many.allreduce_many(
            self.rank,
            self.size,
            self.counts,
            variant=self.variant,
            packed=self.packed,
            itemsizes=self.itemsizes,
            wire_itemsizes=self.wire_itemsizes,
            inline_nbytes=self.inline_bytes,
            segment_elements=max(1, self.segment_bytes // max(self.itemsizes)),
        )


def effective_wire(dtype: DType, wire: DType | None) -> DType | None:
    """The wire dtype where it differs from the array's; integers and narrow floats of that dtype travel as they are."""
    return None if wire is None or wire.name == dtype.name else wire
