"""Owns the mutants: one wait, signal, order or atomic of the product less each, and the check that must then fail."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A change of one place.

    Attributes:
        name: as in docs/mutants.md.
        path: file below the package.
        old: what is there, exactly once.
        new: what is put there.
        check: the function of mutant_checks.py that fails then.
        breaks: what would go wrong, for people.
    """

    name: str
    path: str
    old: str
    new: str
    check: str
    breaks: str


MUTANTS = [
    Mutant(
        "enter-forgets-the-last-rank",
        "engine/entry.py",
        "    for peer in range(entered, size):\n        header = load64(headers + 8 * peer) + area\n",
        "    for peer in range(entered, size - 1):\n        header = load64(headers + 8 * peer) + area\n",
        "entry_waits_for_all",
        "a rank reads the last rank's array before that one has called",
    ),
    Mutant(
        "header-before-pre-steps",
        "engine/entry.py",
        "    pre, spans = load64(prog + _P_PRE), load64(prog + _P_PRE_SPANS)\n",
        "    _publish(ctx, prog, x, out)\n    pre, spans = load64(prog + _P_PRE), load64(prog + _P_PRE_SPANS)\n",
        "pre_steps_come_before_the_header",
        "a peer that sees the header reads a small array that is not there yet",
    ),
    Mutant(
        "one-inline-area",
        "engine/entry.py",
        "    buffers = places + 8 * (sequence & 1) * load64(ctx + _SIZE) * n_columns\n",
        "    buffers = places\n",
        "a_fast_rank_spoils_no_slow_one",
        "a rank that is one call ahead overwrites a small array that a slow one still reads",
    ),
    Mutant(
        "one-header-area",
        "engine/entry.py",
        "    area = (load64(ctx + _SEQUENCE) & 1) * HEADER_NBYTES\n    signature",
        "    area = 0\n    signature",
        "a_fast_rank_spoils_no_slow_one",
        "a rank that is one call ahead overwrites a header that a slow one still waits for",
    ),
    Mutant(
        "headers-not-compared",
        "engine/entry.py",
        "            if load64(header + _H_SIGNATURE) != signature:\n",
        "            if load64(header + _H_SIGNATURE) == 0:\n",
        "a_mismatch_is_found",
        "ranks reduce arrays of different sizes with each other",
    ),
    Mutant(
        "attempts-not-told-apart",
        "engine/entry.py",
        "    store64(ctx + _SEQUENCE_WORD, (sequence << ATTEMPT_BITS) | load64(ctx + _ATTEMPT))\n",
        "    store64(ctx + _SEQUENCE_WORD, sequence << ATTEMPT_BITS)\n",
        "attempts_do_not_meet",
        "a header of a call that was called back counts as the next one's",
    ),
    Mutant(
        "put-signals-first",
        "transport/shm.py",
        "    if nbytes > 0:\n        copy(dst, src, nbytes)\n    if channel >= 0:",
        "    if nbytes > 0 and channel < 0:\n        copy(dst, src, nbytes)\n    if channel >= 0:",
        "bytes_come_with_their_signal",
        "a peer sees the signal of bytes that are not there",
    ),
    Mutant(
        "bases-stand-still",
        "engine/executor.py",
        "            store64(bases + 8 * i, load64(bases + 8 * i) + load64(expects + 8 * i))\n",
        "            store64(bases + 8 * i, load64(bases + 8 * i))\n",
        "signals_of_an_earlier_call_do_not_count",
        "the exit barrier of a second call is passed with the first one's signals",
    ),
    Mutant(
        "signals-repeated-after-again",
        "engine/rows.py",
        "            if code != DID:\n                store64(place, peer)\n",
        "            if code != DID:\n",
        "a_signal_is_sent_once",
        "a full connection makes a rank signal others twice, and a later wait is passed too early",
    ),
    Mutant(
        "row-passed-though-blocked",
        "engine/rows.py",
        "+ value else BLOCKED\n",
        "+ value else DID\n",
        "signals_of_an_earlier_call_do_not_count",
        "no WAIT waits",
    ),
    Mutant(
        "abort-not-looked-at",
        "engine/waiting.py",
        "    if load_acquire(load64(ctx + _ABORT)) != 0:\n",
        "    if load_acquire(load64(ctx + _ABORT)) == -1:\n",
        "abort_ends_a_wait",
        "a rank whose peers gave up waits for its own time-out",
    ),
    Mutant(
        "event-without-another-round",
        "engine/waiting.py",
        "        _look(ctx, _BLOCK_MS if waited >= _LONG_NS else 0)\n    return GO_ON\n",
        "        _look(ctx, _BLOCK_MS if waited >= _LONG_NS else 0)\n"
        "    return _EVENT_CODE if load64(ctx + _EVENT) != 0 else GO_ON\n",
        "last_words_are_heard",
        "what a peer sent just before it left is lost",
    ),
    Mutant(
        "pending-calls-overtaken",
        "engine/executor.py",
        "    if load_acquire(ctx + _PENDING) != 0:\n",
        "    if load_acquire(ctx + _PENDING) == -1:\n",
        "pending_calls_go_first",
        "a blocking call overtakes asynchronous ones, on some ranks",
    ),
    Mutant(
        "flush-left-out",
        "engine/executor.py",
        "                if load64(ctx + _HAS_CALLS) == 0:\n",
        "                if load64(ctx + _HAS_CALLS) >= 0:\n",
        "a_call_ends_with_a_flush",
        "a rank leaves with its last signal still in a queue, and its peer waits for ever",
    ),
    Mutant(
        "plain-store-for-release",
        "native/memory.py",
        'builder.store_atomic(args[1], _pointer(builder, args[0], _I64), "release", 8)',
        "builder.store(args[1], _pointer(builder, args[0], _I64))",
        "stores_release",
        "on a weakly ordered machine a signal overtakes the bytes it announces",
    ),
    Mutant(
        "plain-load-for-acquire",
        "native/memory.py",
        'return builder.load_atomic(_pointer(builder, args[0], _I64), "acquire", 8, typ=_I64)',
        "return builder.load(_pointer(builder, args[0], _I64), typ=_I64)",
        "loads_acquire",
        "on a weakly ordered machine bytes are read from before their signal",
    ),
    Mutant(
        "graveyard-lets-go",
        "communicator/site.py",
        "kept = [entry for entry in entries if not entry[0]()]",
        "kept = [entry for entry in entries if entry[0]()]",
        "graves_are_kept",
        "a slow peer writes into memory that has been given to somebody else",
    ),
]
