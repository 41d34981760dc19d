"""What ranks do in test_collectives.py: every collective on fresh random input, against exact sums."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import gfkernels as gf
from gfkernels.types import DTYPES

FLOATS = [name for name, dtype in DTYPES.items() if dtype.kind == "f"]
INTEGERS = [name for name, dtype in DTYPES.items() if dtype.kind in "iu"]
SEED = int(sys.argv[2])
Array = npt.NDArray[Any]


def values(dtype: str, count: int, rank: int, salt: int = 0) -> Array:
    """One rank's input; every rank can make every rank's."""
    rng = np.random.default_rng([SEED, salt, count, rank])
    element = DTYPES[dtype].numpy
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(bool)
    if DTYPES[dtype].kind == "f":
        return (rng.standard_normal(count) * 2.0 ** rng.integers(-4, 4, count)).astype(np.float32).astype(element)
    info = np.iinfo(np.dtype(dtype))
    return rng.integers(info.min, info.max, count, dtype=np.dtype(dtype), endpoint=True)


def place(array: Array, registered: bool) -> Array:
    """The values in memory of gfkernels, or in numpy's."""
    if not registered:
        return array.copy()
    memory = gf.empty(array.shape, array.dtype)
    memory[...] = array
    return memory


def exact(op: str, inputs: list[Array]) -> Array:
    """The reduction in the highest precision that numpy has; integers modulo 2^n."""
    stacked = np.stack([x if x.dtype.kind in "iub" else x.astype(np.longdouble) for x in inputs])
    if op in ("min", "max"):
        return np.asarray(getattr(stacked, op)(axis=0))
    if op == "prod":
        return np.asarray(np.prod(stacked, axis=0, dtype=stacked.dtype))
    total = np.sum(stacked, axis=0, dtype=stacked.dtype)
    return np.asarray(total / len(inputs) if op == "mean" else total)


def check(op: str, got: Array, inputs: list[Array], wire: str | None = None, hops: int | None = None) -> None:
    """Integers, min and max exactly; floats within the roundings that the path is allowed."""
    want = exact(op, inputs)
    if got.dtype.kind in "iub":
        assert np.array_equal(got, want), (op, got.dtype, got[:4], want[:4])
        return
    steps = len(inputs) + 1 if hops is None else hops
    narrow = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
    rounding = max(narrow[str(got.dtype)], narrow[wire] if wire else 0.0)
    magnitude = np.sum(np.abs(np.stack([x.astype(np.longdouble) for x in inputs])), axis=0)
    if op == "prod":
        magnitude = np.abs(want)
    if op in ("min", "max"):
        magnitude = np.max(np.abs(np.stack([x.astype(np.longdouble) for x in inputs])), axis=0)
    smallest = {"float16": 2.0**-24, "bfloat16": 2.0**-133}.get(wire or str(got.dtype), 0.0)
    bound = magnitude * rounding * steps + smallest * steps
    error = np.abs(got.astype(np.longdouble) - want)
    assert np.all(error <= bound), (op, got.dtype, wire, float(np.max(error - bound)), got.shape)


def same_bits(comm: gf.Communicator, array: Array) -> None:
    """All ranks hold the same bytes."""
    raw = np.frombuffer(array.tobytes(), np.uint8).astype(np.int64)
    digest = np.array([np.sum(raw * (np.arange(raw.size) % 8191 + 1))], np.int64)
    everyone = comm.allgather(digest)
    assert np.all(everyone == everyone[0]), everyone


def sizes(comm: gf.Communicator) -> list[int]:
    """Awkward ones: around the number of ranks, the inline limit, a segment, the switch to cross-memory attach."""
    n = comm.size
    return sorted({0, 1, 2, n - 1, n, n + 1, 97, 2048, 2049, 8192, 8193, 40_009, 524_287, 524_289})


def case_allreduce(comm: gf.Communicator) -> None:
    """Every op and dtype, in and out of place, in memory of both kinds and mixed."""
    r, n = comm.rank, comm.size
    for name in DTYPES:
        kind = DTYPES[name].kind
        ops = ["min", "max"] if kind == "b" else ["sum", "prod", "min", "max"] + (["mean"] if kind == "f" else [])
        for op in ops:
            for number, count in enumerate([0, 1, n + 1, 97, 5003]):
                inputs = [values(name, count, q) for q in range(n)]
                if op == "prod" and kind == "f":
                    inputs = [np.sign(x.astype(np.float32)).astype(x.dtype) + x * 0 for x in inputs]
                for registered in (False, True, r % 2 == 0):
                    x = place(inputs[r], registered)
                    out = np.full_like(x, 1) if number % 2 else None
                    got = gf.allreduce(x, op, out=out)
                    assert got is (x if out is None else out)
                    check(op, got, inputs)
                    same_bits(comm, got)
                    if out is not None:
                        assert x.tobytes() == inputs[r].tobytes()


def case_sizes(comm: gf.Communicator) -> None:
    """Awkward sizes, whole and unaligned, twice over with the same bits."""
    r, n = comm.rank, comm.size
    for count in sizes(comm):
        inputs = [values("float32", count + 1, q)[1:] for q in range(n)]
        first = None
        for registered in (False, True):
            x = place(np.concatenate([[np.float32(7)], inputs[r]]), registered)
            gf.allreduce(x[1:])
            assert x[0] == 7
            check("sum", x[1:], inputs)
            same_bits(comm, x[1:])
            first = x[1:].tobytes() if first is None else first
            info = comm.last_call
            if n > 1 and info is not None and info.plan_name.startswith("direct"):
                assert x[1:].tobytes() == first  # every path of `direct` gives the same bits


def case_special_values(comm: gf.Communicator) -> None:
    """NaN travels, -0 is below +0, infinities stay, a narrow mean does not overflow, subnormals live."""
    r, n = comm.rank, comm.size
    for name in FLOATS:
        element = DTYPES[name].numpy
        for op in ("sum", "min", "max", "mean"):
            x = np.ones(40, np.float32).astype(element)
            x[3] = np.nan if r == n - 1 else 1
            assert np.isnan(gf.allreduce(x, op).astype(np.float32)[3])
        zero = np.array([-0.0 if r == 0 else 0.0], np.float32).astype(element)
        if n > 1:
            assert np.signbit(gf.allreduce(zero.copy(), "min").astype(np.float32))[0]
            assert not np.signbit(gf.allreduce(zero.copy(), "max").astype(np.float32))[0]
        top = np.full(33, np.finfo(np.float16).max if name == "float16" else 1e4, np.float32).astype(element)
        mean = gf.allreduce(top.copy(), "mean")
        assert np.allclose(mean.astype(np.float64), top.astype(np.float64), rtol=2e-2)
        tiny = np.full(9, np.nextafter(np.array(0, element), np.array(1, element)), element)
        assert np.all(gf.allreduce(tiny.copy(), "max") == tiny) and tiny[0] != 0


def case_wire(comm: gf.Communicator) -> None:
    """Narrow wires under every float, rounded the same everywhere."""
    r, n = comm.rank, comm.size
    for name in FLOATS:
        for wire in ("float16", "bfloat16"):
            for op in ("sum", "mean", "max"):
                for count in (1, 97, 5003, 40_009):
                    inputs = [values(name, count, q) for q in range(n)]
                    x = place(inputs[r], count % 2 == 0)
                    check(op, gf.allreduce(x, op, wire=wire), inputs, wire, hops=2 * n + 2)
                    same_bits(comm, x)
    try:
        gf.allreduce(np.ones(3, np.int32), wire="float16")
    except gf.UsageError as error:
        assert "int32" in str(error)
    else:
        raise AssertionError("wire= of integers was taken")


def case_others(comm: gf.Communicator) -> None:
    """reduce_scatter, allgather, broadcast, barrier."""
    r, n = comm.rank, comm.size
    for count in (0, 1, 97, 8193, 131_075):
        for registered in (False, True):
            inputs = [values("float32", n * count, q) for q in range(n)]
            x = place(inputs[r], registered)
            block = gf.reduce_scatter(x, "sum")
            check("sum", block, [q[r * count : (r + 1) * count] for q in inputs])
            assert x.tobytes() == inputs[r].tobytes()
            pieces = [values("int16", count, q, 1) for q in range(n)]
            whole = gf.allgather(place(pieces[r], registered))
            assert whole.shape == (n, count)
            assert all(np.array_equal(whole[q], pieces[q]) for q in range(n))
            for root in range(n):
                y = place(values("float64", count, r, 2), registered)
                assert gf.broadcast(y, root) is y
                assert y.tobytes() == values("float64", count, root, 2).tobytes()
    for wire in ("float16", "bfloat16"):
        whole = gf.allgather(values("float32", 97, r), wire=wire)
        assert np.allclose(whole[0], values("float32", 97, 0), rtol=2e-2)
        same_bits(comm, whole)
    for _ in range(20):
        gf.barrier()


def case_many(comm: gf.Communicator) -> None:
    """Lists of arrays of mixed sizes and dtypes."""
    r, n = comm.rank, comm.size
    plan = [("float32", 5), ("float16", 3000), ("int64", 0), ("bfloat16", 77), ("float32", 200_003), ("uint8", 1)] * 3
    for registered in (False, True, r == 0):
        lists = [[values(name, count, q, i) for i, (name, count) in enumerate(plan)] for q in range(n)]
        xs = [place(x, registered) for x in lists[r]]
        results = gf.allreduce_many(xs)
        assert all(result is x for result, x in zip(results, xs, strict=True))
        for i, x in enumerate(xs):
            check("sum", x, [lists[q][i] for q in range(n)])
    assert gf.allreduce_many([]) == []
    x = np.ones(10, np.float32)
    try:
        gf.allreduce_many([x[:6], x[5:]])
    except gf.UsageError as error:
        assert "share memory" in str(error)
    else:
        raise AssertionError("overlapping arrays were taken")


def case_persistent(comm: gf.Communicator) -> None:
    """Handles see what the array holds when they are called, strided arrays too."""
    n = comm.size
    x, y = gf.zeros(1000), np.zeros((20, 20), np.float32)[:, ::2]
    h, k = gf.plan_allreduce(x), gf.plan_allreduce(y, "max")
    for i in range(1, 4):
        x[:], y[...] = i, comm.rank + i
        assert h() is x and np.all(x == n * i)
        k()
        assert np.all(y == n - 1 + i)


def case_async(comm: gf.Communicator) -> None:
    """Several in flight, in program order; blocking ones behind them; waits that run out."""
    n = comm.size
    xs = [np.full(count, 1.0, np.float32) for count in (1, 5000, 300_000, 3, 70_000)]
    works = [gf.allreduce(x, async_op=True) for x in xs]
    y = np.ones(7)
    gf.allreduce(y)
    assert np.all(y == n) and all(work.done() for work in works)
    assert all(np.all(work.result == n) and work.wait() is x for work, x in zip(works, xs, strict=True))
    if n == 1:
        return
    if comm.rank:
        time.sleep(0.6)
        gf.allreduce(np.ones(4))
        return
    work = gf.allreduce(np.ones(4), async_op=True)
    try:
        work.wait(0.2)
    except gf.WaitTimeout:
        assert not work.done()
    else:
        raise AssertionError("a work ended without its peers")
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work.wait()))
    thread.start()
    thread.join(60)
    assert results and np.all(results[0] == n)


def case_split(comm: gf.Communicator) -> None:
    """Parts in colors and orders, nested, and two of them used at once from two threads."""
    r, n = comm.rank, comm.size
    part = comm.split(r % 2, -r)
    assert part is not None
    ranks = sorted((q for q in range(n) if q % 2 == r % 2), reverse=True)
    assert part.size == len(ranks) and ranks[part.rank] == r
    x = np.full(100, float(r))
    part.allreduce(x)
    assert np.all(x == sum(ranks))
    assert comm.split(None) is None if r == 0 else comm.split(0) is not None
    one, two = comm.split(0), comm.split(0)
    assert one is not None and two is not None
    failures: list[BaseException] = []

    def use(which: gf.Communicator) -> None:
        try:
            for i in range(60):
                y = np.full(i * 50 + 1, 1.0)
                which.allreduce(y)
                assert np.all(y == n)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(which,)) for which in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    for each in (part, one, two):
        each.shutdown()


def case_arrays(comm: gf.Communicator) -> None:
    """Strided, Fortran, 0-d, zero-size and refused arrays; the communicator survives every refusal."""
    r, n = comm.rank, comm.size
    big = np.zeros((6, 8), np.float32)
    for view in (big[:, ::2], big[::-1], big.T, np.asfortranarray(big), big[2:4, 1:3], np.zeros((), np.float32)):
        view[...] = r + 1
        assert gf.allreduce(view) is view
        assert np.all(view == n * (n + 1) / 2)
    frozen = np.ones(3)
    frozen.flags.writeable = False
    bad: list[tuple[Any, str]] = [
        (frozen, "read-only"), (np.ma.masked_array(np.ones(3)), "masked"), (np.float32(3), "scalar"),
        (np.array([object()]), "object"), (np.zeros(2, [("a", "f4")]), "structured"), ([1, 2], "list"),
        (np.zeros(3, np.complex64), "complex64"), (np.zeros(3, ">f4"), "byte order"),
    ]  # fmt: skip
    for item, word in bad:
        try:
            gf.allreduce(item)
        except gf.UsageError as error:
            assert word in str(error), (word, str(error))
        else:
            raise AssertionError(f"{word} was taken")
    x = np.arange(10, dtype=np.float32)
    try:
        gf.allreduce(x[:6], out=x[4:])
    except gf.UsageError as error:
        assert "shares part" in str(error)
    assert gf.allreduce(frozen, out=np.empty(3))[0] == n
    y = np.ones(4)
    assert np.all(gf.allreduce(y, out=y) == n)


def case_torch(comm: gf.Communicator) -> None:
    """torch tensors of every float type, strided, and torch's rules about writing."""
    import torch

    r, n = comm.rank, comm.size
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32):
        for count in (1, 5000):
            t = torch.full((count,), r + 1, dtype=dtype)
            before = t._version
            assert gf.allreduce(t) is t
            assert torch.all(t == n * (n + 1) // 2) and (t._version > before or n == 1)
    t = torch.ones(4, 6)[:, ::2]
    gf.allreduce(t)
    assert torch.all(t == n)
    try:
        gf.allreduce(torch.ones(3, requires_grad=True))
    except gf.UsageError as error:
        assert "requires grad" in str(error)
    with torch.no_grad():
        gf.allreduce(torch.ones(3, requires_grad=True))


def case_life(comm: gf.Communicator) -> None:
    """init twice gives the same; after shutdown a new one; other settings are refused meanwhile."""
    assert gf.init() is comm and gf.is_initialized()
    try:
        gf.init(timeout_s=17)
    except gf.UsageError as error:
        assert "shutdown" in str(error)
    assert (gf.rank(), gf.size()) == (comm.rank, comm.size) == (gf.local_rank(), gf.local_size())
    gf.barrier()
    gf.shutdown()
    assert not gf.is_initialized()
    try:
        gf.allreduce(np.ones(2))
    except gf.UsageError as error:
        assert "gfkernels.init" in str(error)
    with gf.init() as again:
        assert np.all(again.allreduce(np.ones(2)) == again.size)
    gf.init()
    gf.barrier()


CASES: dict[str, Callable[[gf.Communicator], None]] = {
    name.removeprefix("case_"): function for name, function in list(globals().items()) if name.startswith("case_")
}

if __name__ == "__main__":
    gf.init()
    for case in sys.argv[1].split(","):
        CASES[case](gf.default_communicator())
    gf.shutdown()
