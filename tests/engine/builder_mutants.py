"""Owns the mutants of plan builders: one wait, signal or order less in a source of `gfkernels.plan`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BuilderMutant:
    """A change of one place of a builder.

    Attributes:
        module: of `gfkernels.plan`.
        old: what stands there exactly once.
        new: what is put there.
        families: plans (tests/plan/plan_families.py) that go wrong then.
        shape: size, count, elements of a segment.
        breaks: what would go wrong, for people.
        also: a second change that belongs to it.
    """

    module: str
    old: str
    new: str
    families: tuple[str, ...]
    shape: tuple[int, int, int]
    breaks: str
    also: tuple[tuple[str, str], ...] = ()


_REGISTERED = ("direct-registered-allreduce-packed0-out0", "direct-registered-allgather-packed0")
_STAGED = ("direct-staged-allreduce-packed1-out0", "direct-staged-reduce_scatter-packed0")
_RING = ("ring-allreduce-packed0-out0-landing0-enter0", "ring-allreduce-packed1-out1-landing0-enter1")
_DOUBLING = ("doubling-packed0-out0-enter0", "doubling-packed1-out1-enter1")
_LONG = (3, 150, 15)
_SLOT_WAIT = "                b.wait(self.next, max(0, k - self.slots + 1), channel=self.credits, segment=segment)\n"
_EXIT = "        self.signal()\n        self.wait(EVERYONE, 1)\n"
_SIGNAL = "        if tick < last - depth:\n            b.signal(segment=tick)\n"
_LAST = _SIGNAL + "    b.expect(EVERYONE, max(0, last - depth))"
_PACK = "            slot = tick % slots * segment_elements\n            # What this rank owns"
_FILL = "        if tick < len(segments):\n            at, n = segments[tick]\n" + _PACK

MUTANTS: dict[str, BuilderMutant] = {
    "exit barrier: no WAIT": BuilderMutant(
        "model", _EXIT, "        self.signal()\n", _REGISTERED, (3, 40, 16),
        "a rank leaves, and its caller reuses the array, while peers read it",
    ),
    "exit barrier: no SIGNAL": BuilderMutant(
        "model", _EXIT, "        self.wait(EVERYONE, 1)\n", _REGISTERED, (3, 40, 16), "everybody waits for ever",
    ),
    "exit barrier: WAIT before SIGNAL": BuilderMutant(
        "model", _EXIT, "        self.wait(EVERYONE, 1)\n        self.signal()\n", _REGISTERED, (3, 40, 16),
        "everybody waits for ever",
    ),
    "many: no exit barrier": BuilderMutant(
        "many", "    if sliced:\n        b.exit_barrier()\n", "", ("many-registered-packed0", "many-cma-packed0"),
        (3, 600, 16), "a rank leaves while peers still write into its arrays",
    ),
    "reduce_scatter: no exit barrier": BuilderMutant(
        "direct", "lo, hi, segment_elements=segment_elements, everywhere=False, shift=lo\n            )\n"
        "        b.exit_barrier()\n",
        "lo, hi, segment_elements=segment_elements, everywhere=False, shift=lo\n            )\n",
        ("direct-registered-reduce_scatter-packed0", "direct-cma-reduce_scatter-packed0"), (3, 12, 4),
        "a rank leaves while peers still read its array",
    ),
    "broadcast: the root does not wait": BuilderMutant(
        "direct", "            b.wait(EVERYONE, 1)\n            b.expect(EVERYONE, 1)\n",
        "            b.expect(EVERYONE, 1)\n", ("direct-registered-broadcast", "direct-cma-broadcast"), (3, 40, 16),
        "the root's caller reuses the array while others read it",
    ),
    "broadcast: a reader does not signal": BuilderMutant(
        "direct", "        else:\n            b.signal(root)\n", "", ("direct-registered-broadcast",), (3, 40, 16),
        "the root waits for ever",
    ),
    "staged: a tick does not wait": BuilderMutant(
        "staged", "        b.wait(EVERYONE, tick - depth + 1, segment=tick)\n", "        pass\n", _STAGED, (3, 80, 16),
        "segments are reduced before all have packed them",
    ),
    "staged: a tick waits for the tick before": BuilderMutant(
        "staged", "b.wait(EVERYONE, tick - depth + 1, segment=tick)", "b.wait(EVERYONE, tick - depth, segment=tick)",
        _STAGED, (3, 80, 16), "segments are reduced before all have packed them",
    ),
    "staged: signals a tick too early": BuilderMutant(
        "staged", _FILL, _SIGNAL + _FILL,
        ("direct-staged-allreduce-packed1-out0",), (3, 80, 16), "a signal is sent before what it announces is done",
        also=((_LAST, "    b.expect(EVERYONE, max(0, last - depth))"),),
    ),
    "staged: the last signals are left out": BuilderMutant(
        "staged", _LAST, _LAST.replace("if tick < last - depth", "if tick < last - 2 * depth"), _STAGED[:1],
        (3, 80, 16), "everybody waits for ever in the last tick",
    ),
    "staged broadcast: the root overtakes its readers": BuilderMutant(
        "staged", "                b.wait(EVERYONE, index - slots + 1, segment=index)\n", "                pass\n",
        ("direct-staged-broadcast",), (3, 80, 16), "a slot is filled while somebody reads it",
    ),
    "staged broadcast: a reader does not wait": BuilderMutant(
        "staged", "            b.wait(root, index + 1, segment=index)\n", "", ("direct-staged-broadcast",), (3, 80, 16),
        "a slot is read before it is full",
    ),
    "doubling: adds what has not come": BuilderMutant(
        "doubling", "        b.wait(peer, 1, channel=DATA, segment=label)\n", "", _DOUBLING, (5, 20, 8),
        "a rank adds what its partner sent in an earlier call",
    ),
    "doubling: a slot is not waited for": BuilderMutant(
        "doubling", "        b.wait(peer, 0, channel=CREDITS, segment=label)\n", "", _DOUBLING[:1], (5, 20, 8),
        "the next call overwrites what a slow partner still reads",
    ),
    "doubling: a slot is not given back": BuilderMutant(
        "doubling", "        b.signal(peer, channel=CREDITS, segment=label)\n", "", _DOUBLING, (5, 20, 8),
        "the next call waits for ever",
    ),
    "ring: reduces what has not come": BuilderMutant(
        "ring", "        b.wait(self.prev, self.n_received, channel=self.data, segment=segment)\n", "", _RING, _LONG,
        "a rank adds bytes of an earlier message",
    ),
    "ring: waits for one message less": BuilderMutant(
        "ring", "b.wait(self.prev, self.n_received, channel", "b.wait(self.prev, self.n_received - 1, channel", _RING,
        _LONG, "a rank adds bytes of an earlier message",
    ),
    "ring: no put waits for a slot": BuilderMutant(
        "ring", _SLOT_WAIT,
        "                pass\n", _RING, _LONG, "a message overwrites one that the neighbour still reads",
    ),
    "ring: the first put of a call does not wait": BuilderMutant(
        "ring", "            if k == 0 or k >= self.slots:", "            if k >= self.slots:", _RING[:1],
        _LONG,
        "a fast rank's next call overwrites what its neighbour still reads",
    ),
    "ring: a slot is given back before it is passed on": BuilderMutant(
        "ring", "        if not last:\n            self._send(message + 1, segment, passed, at, n)\n        b.signal(",
        "        b.signal(self.prev, channel=self.credits, segment=segment)\n        if not last:\n"
        "            self._send(message + 1, segment, passed, at, n)\n        (lambda *_, **__: None)(",
        _RING, _LONG, "a message is sent on while the next one lands in its slot",
    ),
    "ring: a slot is not given back": BuilderMutant(
        "ring", "        b.signal(self.prev, channel=self.credits, segment=segment)\n", "", _RING, _LONG,
        "the neighbour waits for ever",
    ),
    "ring broadcast: no put waits for a slot": BuilderMutant(
        "ring", "                    b.wait(after, max(0, k - slots + 1), channel=credits_, segment=segment)\n",
        "                    pass\n", ("ring-broadcast-landing0-enter0",), (3, 80, 4),
        "a message overwrites one that the neighbour still reads",
    ),
    "inline: published behind ENTER": BuilderMutant(
        "direct", '        publish(b, Buffer.X, count, packed=packed)\n        b.enter()\n        if count:\n',
        '        b.enter()\n        publish(b, Buffer.X, count, packed=packed)\n        if count:\n',
        ("direct-inline-allreduce-packed0-out0", "direct-inline-allreduce-packed1-out1"), (3, 20, 8),
        "a small array is read before it is there",
    ),
}  # fmt: skip
