"""Owns what ranks do with arrays of all kinds: strided, odd, refused, of other frameworks, between real ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import exact_sums as truth
import numpy as np
from exact_sums import Array
from rank_async import raises

import gfkernels as gf


def _views() -> dict[str, Callable[[], tuple[Array, Array]]]:
    """By name: the memory, and an odd view of it."""

    def of(shape: tuple[int, ...], cut: Callable[[Array], Array], dtype: Any = np.float32) -> Callable[[], Any]:
        def make() -> tuple[Array, Array]:
            memory = np.full(shape, -77, dtype)
            return memory, cut(memory)

        return make

    return {
        "columns": of((60, 80), lambda a: a[:, ::2]),
        "reversed": of((60, 80), lambda a: a[::-1, ::-1]),
        "transposed": of((60, 80), lambda a: a.T),
        "fortran": lambda: (memory := np.full((31, 17), -77.0, order="F"), memory),
        "window": of((300, 200), lambda a: a[50:250, 3:150]),
        "three axes": of((7, 9, 11), lambda a: a.transpose(2, 0, 1)[1:, ::3]),
        "every third": of((30_000,), lambda a: a[1::3], np.int16),
        "scalar array": of((), lambda a: a, np.float64),
        "one element": of((5, 5), lambda a: a[2:3, 2:3]),
        "empty": of((4, 0, 3), lambda a: a[:, :, ::2]),
        "unaligned by a byte": lambda: _unaligned(),
        "added axis": of((400,), lambda a: a[::2, None]),
    }


def _unaligned() -> tuple[Array, Array]:
    raw = np.full(4 * 1000 + 5, 0xA5, np.uint8)
    return raw, raw[1 : 1 + 4000].view(np.float32)


def strided(seed: int) -> list[str]:
    """Odd views are reduced and written back; what lies between their elements stays."""
    comm, told = gf.init(), []
    for name, make in _views().items():
        for call in ("allreduce", "out", "async", "handle", "many", "broadcast"):
            memory, view = make()
            shape, dtype = view.shape, truth.name_of(view)
            inputs = [truth.values([seed, 7], dtype, view.size, q).reshape(shape) for q in range(comm.size)]
            before = _raw(memory).copy()
            unsigned = view.view(f"u{view.itemsize}")
            unsigned[...] = 0
            zeros = _raw(memory).copy()
            unsigned[...] = ~unsigned.dtype.type(0)
            between = _raw(memory) == zeros
            own = inputs[comm.rank]
            view[...] = own
            want = _reduce(comm, call, view, own, inputs)
            what = f"{name} {call}"
            plan = "" if comm.last_call is None else comm.last_call.plan_name
            if call == "broadcast" or comm.size == 1 or plan.startswith("direct"):
                truth.check_bits(view.copy(), want, what)
            else:
                truth.within_bound("sum", view.copy().reshape(-1), [x.reshape(-1) for x in inputs], None, what)
            assert (_raw(memory) == before)[between].all(), f"{what}: wrote between the elements"
            told.append(what + truth.digest(view))
    return told


def _raw(memory: Array) -> Array:
    return np.asarray(memory.reshape(-1, order="A").view(np.uint8))


def _reduce(comm: gf.Communicator, call: str, view: Array, own: Array, inputs: Sequence[Array]) -> Array:
    """Makes the call on the view, and gives what it must hold then."""
    if call == "broadcast":
        root = comm.size - 1
        assert comm.broadcast(view, root) is view
        return inputs[root]
    if call == "out":
        assert comm.allreduce(own, out=view) is view
    elif call == "async":
        assert comm.allreduce(view, async_op=True).wait() is view
    elif call == "handle":
        handle = comm.plan_allreduce(view)
        other = view.copy()
        handle()
        view[...] = other  # a handle sees what the array holds at each call
        assert handle() is view
    elif call == "many":
        (result,) = comm.allreduce_many([view])
        assert result is view
    else:
        assert comm.allreduce(view) is view
    want = truth.documented("sum", [x.reshape(-1) for x in inputs]) if comm.size > 1 else own.reshape(-1)
    return want.reshape(view.shape)


class _Sub(np.ndarray):
    """A subclass whose indexing means something else."""

    def __getitem__(self, key: Any) -> Any:
        raise AssertionError("the library indexed a subclass")


def refused() -> None:
    """What cannot be reduced is named, on every rank, and the next call works."""
    comm = gf.init()
    n = comm.size
    frozen, x = np.ones(3), np.arange(10, dtype=np.float32)
    frozen.flags.writeable = False
    bad: list[tuple[Any, str]] = [
        (frozen, "read-only"),
        (np.ma.masked_array(np.ones(3)), "masked"),
        (np.float32(3), "scalar"),
        (np.array([object()]), "object"),
        (np.zeros(2, [("a", "f4")]), "structured"),
        (np.zeros(3, np.complex64), "complex64"),
        (np.zeros(3, ">f4"), "byte order"),
        (np.zeros(3, "M8[s]"), "datetime64"),
        (np.array(["a"]), "<U1"),
        ([1.0, 2.0], "list"),
        (3.5, "float"),
        (None, "NoneType"),
        (np.broadcast_to(np.ones(1), 5), "read-only"),
        (np.lib.stride_tricks.as_strided(x, (3, 2), (4, 4)), "same address"),
    ]
    for item, word in bad:
        raises(gf.UsageError, word, partial(comm.allreduce, item))
        raises(gf.UsageError, word, partial(comm.plan_allreduce, item))
        raises(gf.UsageError, word, partial(comm.allreduce_many, [x, item]))
        raises(gf.UsageError, word, partial(comm.allreduce, item, async_op=True))
        y = np.ones(2)
        assert comm.allreduce(y)[0] == n, word
    many: Any = comm.allreduce_many
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("shares part", lambda: comm.allreduce(x[:6], out=x[4:])),
        ("shares part", lambda: comm.allreduce(x[::2], out=x[:5])),
        ("shape", lambda: comm.allreduce(x, out=np.empty(11, np.float32))),
        ("dtype", lambda: comm.allreduce(x, out=np.empty(10))),
        ("read-only", lambda: comm.allreduce(np.ones(3), out=frozen)),
        ("op='add'", lambda: comm.allreduce(x, "add")),
        ("wire='int8'", lambda: comm.allreduce(x, wire="int8")),
        ("int32", lambda: comm.allreduce(np.ones(3, np.int32), wire="float16")),
        ("mean", lambda: comm.allreduce(np.ones(3, np.int32), "mean")),
        ("bool", lambda: comm.allreduce(np.ones(3, bool))),
        ("root=", lambda: comm.broadcast(x, n)),
        ("root=", lambda: comm.broadcast(x, -1)),
        ("root=", lambda: comm.broadcast(x, True)),
        ("()", lambda: comm.reduce_scatter(np.zeros(()))),
        ("shape", lambda: comm.allgather(x, out=np.empty((n + 1, 10), np.float32))),
        ("list", partial(many, x)),
        ("share memory", lambda: comm.allreduce_many([x[:6], x[5:]])),
        ("share memory", lambda: comm.allreduce_many([x, x])),
    ]
    if n > 1:
        calls.append(("divisible", lambda: comm.reduce_scatter(np.zeros(n + 1))))
    before = x.copy()
    for word, call in calls:
        raises(gf.UsageError, word, call)
        truth.check_bits(x, before, f"{word}: x")
        assert comm.allreduce(np.ones(2))[0] == n, word


def accepted() -> None:
    """`out` that is x, read-only inputs beside an output, subclasses, foreign interfaces, arrays within others."""
    comm = gf.init()
    n = comm.size
    x = np.ones(4)
    assert comm.allreduce(x, out=x) is x and (x == n).all()
    view = np.ones(9)
    assert comm.allreduce(view[:], out=view[:]).base is view and (view == n).all()
    frozen, out = np.ones(3), np.empty(3)
    frozen.flags.writeable = False
    assert (comm.allreduce(frozen, out=out) == n).all()
    assert comm.allgather(frozen).sum() == 3 * n
    sub = np.ones(50).view(_Sub)
    assert comm.allreduce(sub) is sub and (sub.view(np.ndarray) == n).all()
    both = np.ones(10, np.float32)
    comm.allreduce(both[:5], out=both[5:])  # neighbours do not overlap
    assert (both[:5] == 1).all() and (both[5:] == n).all()

    class Foreign:
        def __init__(self) -> None:
            self.memory = np.ones(3000, np.int16)
            self.__array_interface__ = self.memory.__array_interface__

    foreign = Foreign()
    assert comm.allreduce(foreign) is foreign and (foreign.memory == n).all()
    with gf.register(np.ones(100_000)) as registered:
        assert (comm.allreduce(registered) == n).all()
    raises(gf.UsageError, "registered", lambda: gf.unregister(registered))


def torch_tensors(seed: int) -> list[str]:
    """Tensors of every type, strided, with gradients; torch's counter of changes goes up with every write."""
    import torch

    comm, told = gf.init(), []
    n, r = comm.size, comm.rank
    types = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32,
             torch.int64, torch.uint8)  # fmt: skip
    for dtype in types:
        for count in (1, 97, 50_001):
            t = torch.full((count,), r + 1, dtype=dtype)
            before = t._version
            assert comm.allreduce(t) is t
            assert (t == n * (n + 1) // 2).all(), (dtype, count)
            assert t._version > before, "torch was not told"
            o = torch.zeros_like(t)
            assert comm.allreduce(torch.full((count,), 1, dtype=dtype), out=o) is o and (o == n).all()
    flags = torch.tensor([r == 0, True, False])
    comm.allreduce(flags, "max")
    assert flags.tolist() == [True, True, False]
    wide = torch.zeros(40, 60)
    odd = wide[:, ::3].t()
    odd.fill_(1)
    version = wide._version
    assert comm.allreduce(odd) is odd and (odd == n).all() and wide.sum() == n * odd.numel()
    assert wide._version > version
    handle = comm.plan_allreduce(odd)
    version = wide._version
    handle()
    assert (odd == n * n).all() and (wide._version > version or n == 1)  # alone, a handle writes nothing
    work = comm.allreduce(torch.ones(7), async_op=True)
    assert isinstance(work.wait(), torch.Tensor) and (work.result == n).all()
    gathered = comm.allgather(torch.full((3,), r, dtype=torch.bfloat16))
    assert isinstance(gathered, torch.Tensor) and gathered.dtype == torch.bfloat16
    assert gathered[:, 0].tolist() == list(range(n))
    half = torch.from_numpy(truth.values([seed, 8], "float32", 4097, r))
    comm.allreduce(half, "mean", wire="float16")
    told.append(truth.digest(half.numpy()))
    leaf = torch.ones(3, requires_grad=True)
    raises(gf.UsageError, "requires grad", lambda: comm.allreduce(leaf))
    with torch.no_grad():
        assert (comm.allreduce(leaf) == n).all()
    kept = torch.ones(3, requires_grad=True)
    factor = torch.ones(3)
    loss = (kept * factor).sum()
    comm.allreduce(factor)
    if n > 1:
        raises(RuntimeError, "modified by an inplace operation", loss.backward)
    raises(gf.UsageError, "", lambda: comm.allreduce(torch.ones(3).to_sparse()))
    raises(gf.UsageError, "", lambda: comm.allreduce(torch.ones(3, dtype=torch.complex64)))
    raises(gf.UsageError, "", lambda: comm.allreduce(torch.ones(3, device="meta")))
    assert (comm.allreduce(torch.ones(2)) == n).all()
    return told


def jax_arrays() -> None:
    """Immutable arrays give new ones."""
    import jax.numpy as jnp

    comm = gf.init()
    n = comm.size
    for dtype in (jnp.float32, jnp.bfloat16, jnp.int32):
        x = jnp.ones(3000, dtype)
        y = comm.allreduce(x)
        assert type(y) is type(x) and y is not x and (y == n).all() and (x == 1).all()
    assert (comm.broadcast(jnp.full(4, comm.rank), n - 1) == n - 1).all()
    (z,) = comm.allreduce_many([jnp.ones(5)])
    assert (z == n).all() and (comm.allreduce(jnp.ones(5), async_op=True).wait() == n).all()
    raises(gf.UsageError, "immutable", lambda: comm.allreduce(np.ones(5, np.float32), out=jnp.ones(5)))
