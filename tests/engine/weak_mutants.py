"""Owns the mutants of engine and shared memory that a weakly ordered machine is to tell from the product."""

from __future__ import annotations

from dataclasses import dataclass

REGISTERED, STAGED = "direct-registered-allreduce-packed0-out0", "direct-staged-allreduce-packed1-out0"
INLINE, BROADCAST = "direct-inline-allreduce-packed1-out0", "direct-registered-broadcast"
RING, DOUBLING = "ring-allreduce-packed0-out0-landing0-enter1", "doubling-packed0-out0-enter1"
_ENGINE = "gfkernels.engine."
_SHM = "gfkernels.transport.shm"


@dataclass(frozen=True)
class WeakMutant:
    """A change of one place.

    Attributes:
        module: whose source changes.
        changes: (what stands there exactly once, what is put there).
        families: plans that go wrong then, each of them.
        breaks: what would go wrong, for people.
    """

    module: str
    changes: tuple[tuple[str, str], ...]
    families: tuple[str, ...]
    breaks: str


_PUT_ENDS = "    return OK\n\n\n@cfunc(_I64(_I64, _I64, _I64))"
_PUBLISH = "    store64(ctx + _OWN_KIND, kind)\n    store64(header"
_PRE_STEPS = "    pre, spans = load64(prog + _P_PRE)"
_MISSED = "            if code != DID:\n                store64(place, peer)"
_BLOCKED = "                if code != BLOCKED:\n                    return code\n"
_ENTERED = "            store64(ctx + _ENTERED"
_AREA = "(sequence & 1) * HEADER_NBYTES\n    kind = _REGISTERED"
_COPY = "    if nbytes > 0:\n        copy(dst, src, nbytes)\n"

MUTANTS: dict[str, WeakMutant] = {
    "signal: plain store for release": WeakMutant(
        _SHM,
        (("store_release(load64(words + _OUT), sent)", "store64(load64(words + _OUT), sent)"),),
        (REGISTERED, STAGED, RING),
        "a signal overtakes the bytes that it announces",
    ),
    "arrivals: plain load for acquire": WeakMutant(
        _SHM,
        (("return load_acquire(load64(state", "return load64(load64(state"),),
        (REGISTERED, STAGED, RING),
        "bytes are read from before the signal that announced them",
    ),
    "put: signal before the copy": WeakMutant(
        _SHM,
        ((_COPY, ""), (_PUT_ENDS, _COPY + _PUT_ENDS)),
        (RING, DOUBLING),
        "a peer sees the signal of bytes that are not there",
    ),
    "past the caches: nobody waits": WeakMutant(
        _ENGINE + "staging",
        (("    drain_streams()\n", ""),),
        (STAGED, "direct-staged-allreduce-packed0-out0"),
        "a signal overtakes bytes that went past the caches, which its release does not order",
    ),
    "header: plain store for release": WeakMutant(
        _ENGINE + "entry",
        (("_P_HASH))\n    store_release(header, word)", "_P_HASH))\n    store64(header, word)"),),
        (INLINE, REGISTERED),
        "a header is seen before the small array, or the address, that it stands for",
    ),
    "header: plain load for acquire": WeakMutant(
        _ENGINE + "entry",
        (("            if load_acquire(header) != word:", "            if load64(header) != word:"),),
        (INLINE, REGISTERED),
        "an address or a small array of two calls ago is taken for this call's",
    ),
    "header: sequence before the rest": WeakMutant(
        _ENGINE + "entry",
        ((_PUBLISH, "    store_release(header, word)\n" + _PUBLISH),),
        (REGISTERED,),
        "a peer uses the address of an array of two calls ago",
    ),
    "header: before the pre-steps": WeakMutant(
        _ENGINE + "entry",
        ((_PRE_STEPS, "    _publish(ctx, prog, x, out)\n" + _PRE_STEPS),),
        (INLINE,),
        "a peer that sees the header reads a small array that is not there yet",
    ),
    "ENTER: forgets the last rank": WeakMutant(
        _ENGINE + "entry",
        (("    for peer in range(entered, size):", "    for peer in range(entered, size - 1):"),),
        (INLINE, REGISTERED, BROADCAST),
        "a rank goes on before the last one has called",
    ),
    "ENTER: forgets whom it has missed": WeakMutant(
        _ENGINE + "entry",
        (("        if complete:\n" + _ENTERED, "        if peer >= 0:\n" + _ENTERED),),
        (INLINE, REGISTERED),
        "a rank that was late once is never looked at again",
    ),
    "INLINE: one copy": WeakMutant(
        _ENGINE + "entry",
        (("places + 8 * (sequence & 1) * load64(ctx + _SIZE)", "places + 8 * 0 * load64(ctx + _SIZE)"),),
        (INLINE,),
        "a rank that is one call ahead overwrites a small array that a slow one still reads",
    ),
    "header: one area": WeakMutant(
        _ENGINE + "entry",
        (
            (_AREA, "0 * HEADER_NBYTES\n    kind = _REGISTERED"),
            ("    area = (load64(ctx + _SEQUENCE) & 1) * HEADER_NBYTES\n    signature", "    area = 0\n    signature"),
        ),
        (INLINE,),
        "a rank that is one call ahead overwrites the header that a slow one waits for",
    ),
    "bases: not moved": WeakMutant(
        _ENGINE + "executor",
        (("load64(bases + 8 * i) + load64(expects + 8 * i)", "load64(bases + 8 * i)"),),
        (REGISTERED, STAGED, RING, DOUBLING),
        "signals of the last call count for this one",
    ),
    "WAIT: for one less": WeakMutant(
        _ENGINE + "rows",
        (("N_CHANNELS + channel)) + value else", "N_CHANNELS + channel)) + value - 1 else"),),
        (REGISTERED, STAGED, RING, DOUBLING),
        "no WAIT waits for what it names",
    ),
    "WAIT for everyone: for one only": WeakMutant(
        _ENGINE + "rows",
        ((_MISSED, "            if is_wait and code == DID:\n                break\n" + _MISSED),),
        (REGISTERED, STAGED),
        "a rank leaves while others still read its array",
    ),
    "lanes: a blocked row is passed": WeakMutant(
        _ENGINE + "executor",
        ((_BLOCKED + "                break\n", _BLOCKED),),
        (REGISTERED, RING, DOUBLING),
        "rows of a lane overtake one another",
    ),
}

_TAKE = "    if compare_exchange(ctx + _LOCK, _NOBODY, _CALLER) != _NOBODY:\n"
_GIVE = "    store_release(ctx + _LOCK, _NOBODY)\n"
_LAST = "    store64(ctx + _PHASE, _IDLE_PHASE)\n" + _GIVE + "    return _DONE"
_COUNT = "    store64(ctx + _ATTEMPT, 0)\n    store64(ctx + _N_CALLS"

LOCK_MUTANTS = {
    "lock: taken without looking": (_TAKE, _TAKE.replace("!= _NOBODY", "== -1"), "two threads run one call"),
    "lock: looked at, then taken": (
        _TAKE + "        return _BUSY\n",
        "    if load_acquire(ctx + _LOCK) != _NOBODY:\n        return _BUSY\n    store_release(ctx + _LOCK, _CALLER)\n",
        "two threads that look at the same time both go in",
    ),
    "lock: given back by a plain store": (
        _LAST,
        _LAST.replace("store_release", "store64"),
        "the next thread goes in before it can see what the last one wrote",
    ),
    "lock: given back before the counters": (_COUNT, _GIVE + _COUNT, "a call is counted once where two were made"),
}
"""Changes of `gfkernels.engine.executor`: (what stands there exactly once, what is put there, what would go wrong)."""
