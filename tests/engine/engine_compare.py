"""Owns comparing the engine with the slow executor: what a family can add, random arrays, and equal bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from engine_parts import Numbers
from engine_world import World
from plan_families import FAMILIES

from gfkernels.engine.context import Kind
from gfkernels.plan.execute import Machine
from gfkernels.plan.model import Plan
from gfkernels.types import DTYPES, ReduceOp

Array = npt.NDArray[Any]

PLAIN = Numbers(DTYPES["float32"])
WIRED = Numbers(DTYPES["float32"], ReduceOp.SUM, DTYPES["float16"])
NARROW_MEAN = Numbers(DTYPES["float16"], ReduceOp.MEAN)
WHOLE = Numbers(DTYPES["int32"], ReduceOp.MAX)

# Without ENTER nobody knows where a peer's array lies: such plans need a transport that finds it (test_callbacks.py).
NEEDS_FRAMES = [name for name in FAMILIES if "landing1" in name and "enter0" in name]
ON_SHM = [name for name in FAMILIES if name not in NEEDS_FRAMES]


def kind_of(name: str) -> Kind:
    """The memory kind that a family is for."""
    return Kind.CMA if "-cma" in name else Kind.STAGED if "-staged" in name else Kind.REGISTERED


def numbers_of(name: str, choice: int = 0) -> Numbers:
    """What a family can add: plans without a wire add plain numbers, the others have a wire or a mean's scale."""
    if "packed1" not in name:
        return (PLAIN, WHOLE)[choice % 2]
    may_scale = "landing1" not in name and "many" not in name and not name.startswith("direct")
    return NARROW_MEAN if may_scale and choice % 2 else WIRED


def inputs(seed: int, calls: list[list[Plan]], numbers: Numbers) -> list[list[list[Array]]]:
    """Random arrays: whole numbers of all sizes, or fractions that round at every step."""
    lot = np.random.default_rng(seed)

    def one(count: int) -> Array:
        if numbers.dtype.kind == "f":
            return np.asarray(lot.standard_normal(count).astype(numbers.dtype.numpy))
        return lot.integers(-(2**31), 2**31, count).astype(numbers.dtype.numpy)

    return [[[one(n) for n in (plan.parameter("counts") or [plan.count])] for plan in plans] for plans in calls]


def compare(world: World, calls: list[list[Plan]], numbers: Numbers, seed: int, *, threads: bool = False) -> None:
    """Runs calls on both, and compares all bytes of all results."""
    given_ = inputs(seed, calls, numbers)
    machine = Machine(world.size, numbers.dtype, op=numbers.op, wire=numbers.wire, seed=seed)
    # One call after the other: what a plan computes does not depend on who runs when.
    want = [machine.run(plans, arrays) for plans, arrays in zip(calls, given_, strict=True)]
    got = (
        world.run_in_threads(calls, given_, numbers) if threads else world.run_calls(calls, given_, numbers, seed=seed)
    )
    for call in range(len(calls)):
        for rank in range(world.size):
            for index, (a, b) in enumerate(zip(got[call][rank], want[call][rank], strict=True)):
                assert a.tobytes() == b.tobytes(), f"call {call}, rank {rank}, array {index}: {a} is not {b}"
