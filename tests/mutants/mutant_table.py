"""Owns the mutants that are told from the product by driving ranks in turns, each with the check that it fails.

Those that take a weakly ordered machine to be told are in tests/engine/weak_mutants.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A change of one place.

    Attributes:
        module: whose source changes.
        old: what is there, exactly once.
        new: what is put there.
        check: the function of mutant_checks.py that fails then.
        breaks: what would go wrong, for people.
    """

    module: str
    old: str
    new: str
    check: str
    breaks: str


MUTANTS: dict[str, Mutant] = {
    "headers-not-compared": Mutant(
        "gfkernels.engine.entry",
        "            if load64(header + _H_SIGNATURE) != signature:\n",
        "            if load64(header + _H_SIGNATURE) == 0:\n",
        "a_mismatch_is_found",
        "ranks reduce arrays of different sizes with each other",
    ),
    "attempts-not-told-apart": Mutant(
        "gfkernels.engine.entry",
        "    store64(ctx + _SEQUENCE_WORD, (sequence << ATTEMPT_BITS) | load64(ctx + _ATTEMPT))\n",
        "    store64(ctx + _SEQUENCE_WORD, sequence << ATTEMPT_BITS)\n",
        "attempts_do_not_meet",
        "a header of a call that was called back counts as the next one's",
    ),
    "signals-repeated-after-again": Mutant(
        "gfkernels.engine.rows",
        ("            if code != DID:\n                store64(place, peer)\n"),
        "            if code != DID:\n",
        "a_signal_is_sent_once",
        "a full connection makes a rank signal others twice, and a later wait is passed too early",
    ),
    "abort-not-looked-at": Mutant(
        "gfkernels.engine.waiting",
        "    if load_acquire(load64(ctx + _ABORT)) != 0:\n",
        "    if load_acquire(load64(ctx + _ABORT)) == -1:\n",
        "abort_ends_a_wait",
        "a rank whose peers gave up waits for its own time-out",
    ),
    "event-without-another-round": Mutant(
        "gfkernels.engine.waiting",
        ("        _look(ctx, _BLOCK_MS if waited >= _LONG_NS else 0)\n    return GO_ON\n"),
        (
            "        _look(ctx, _BLOCK_MS if waited >= _LONG_NS else 0)\n"
            "    return _EVENT_CODE if load64(ctx + _EVENT) != 0 else GO_ON\n"
        ),
        "last_words_are_heard",
        "what a peer sent just before it left is lost",
    ),
    "pending-calls-overtaken": Mutant(
        "gfkernels.engine.executor",
        "    if load_acquire(ctx + _PENDING) != 0:\n",
        "    if load_acquire(ctx + _PENDING) == -1:\n",
        "pending_calls_go_first",
        "a blocking call overtakes asynchronous ones, on some ranks",
    ),
    "flush-left-out": Mutant(
        "gfkernels.engine.executor",
        "                if load64(ctx + _HAS_CALLS) == 0:\n",
        "                if load64(ctx + _HAS_CALLS) >= 0:\n",
        "a_call_ends_with_a_flush",
        "a rank leaves with its last signal still in a queue, and its peer waits for ever",
    ),
    "graveyard-lets-go": Mutant(
        "gfkernels.communicator.site",
        "kept = [entry for entry in entries if not entry[0]()]",
        "kept = [entry for entry in entries if entry[0]()]",
        "graves_are_kept",
        "a slow peer writes into memory that has been given to somebody else",
    ),
}
