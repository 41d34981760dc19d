"""Owns `recursive_doubling` allreduce: log2 N exchanges of whole (small) arrays.

Both operands of every addition are rounded to the wire, and the lower rank's comes first, so partners compute equal
bits. When N is no power of two, the ranks beyond the largest one lend their contribution to a partner and get the
result back. Every exchange has a slot of its own, so a credit per exchange and call is enough.
"""

from __future__ import annotations

from gfkernels.plan.model import CREDITS, DATA, Plan, PlanBuilder, Span
from gfkernels.types import FINAL, Buffer

STAGE, X, OUT = int(Buffer.STAGE), int(Buffer.X), int(Buffer.OUT)


def allreduce(
    rank: int,
    size: int,
    count: int,
    *,
    packed: bool = False,
    out: bool = False,
    enter: bool = False,
) -> Plan:
    """Recursive doubling through STAGE.

    Args:
        rank: whose plan.
        size: number of ranks.
        count: elements of the array; STAGE holds 2 + log2(size) times as many.
        packed: as for `ring.allreduce`.
        out: the result goes to OUT instead of X.
        enter: begin with ENTER (shared memory).
    """
    b = PlanBuilder("recursive_doubling", "allreduce", rank, size, count, packed=packed, out=out, enter=enter)
    if enter:
        b.enter()
    b.lane(0)
    target = OUT if out else X
    if size == 1 or count == 0:
        if out and count:
            b.copy(b.own(X, 0, count), b.own(OUT, 0, count))
        return b.build()
    core = 1 << (size.bit_length() - 1)
    rounds = core.bit_length() - 1
    own = b.own(STAGE, 0, count)
    fold = count  # where an extra's contribution, or the result for an extra, lands
    b.stage_elements = (2 + rounds) * count

    def send(peer: int, at: int, label: int) -> None:
        b.wait(peer, 0, channel=CREDITS, segment=label)
        b.put(peer, own, (peer, STAGE, at, count), segment=label)
        b.expect(peer, 1, channel=CREDITS)

    def receive(peer: int, at: int, label: int) -> Span:
        b.wait(peer, 1, channel=DATA, segment=label)
        b.expect(peer, 1, channel=DATA)
        return b.own(STAGE, at, count)

    b.convert(b.own(X, 0, count), own, packed=packed, raw=True)
    if rank >= core:
        partner = rank - core
        send(partner, fold, 0)
        arrived = receive(partner, fold, rounds + 1)
        b.convert(arrived, b.own(target, 0, count), packed=packed, segment=rounds + 1)
        b.signal(partner, channel=CREDITS, segment=rounds + 1)
        return b.build()
    extra = rank + core
    operands: list[tuple[int, bool]] = [(extra, True)] if extra < size else []
    operands += [(rank ^ (1 << k), False) for k in range(rounds)]
    for index, (peer, folding) in enumerate(operands):
        label = 0 if folding else (rank ^ peer).bit_length()
        at = fold if folding else (1 + label) * count
        if not folding:
            send(peer, at, label)
        arrived = receive(peer, at, label)
        pair = [own, arrived] if rank < peer else [arrived, own]
        last = index + 1 == len(operands)
        flags = FINAL if last else 0
        keep = [own] if not last or extra < size else []
        result = [b.own(target, 0, count)] if last else []
        if packed:
            b.combine(pair, [], keep, result, flags=flags, segment=label)
        else:
            # Contributions lie in STAGE unscaled, hence no RAW_SOURCES: unpacked plans have nothing to scale.
            b.combine([], pair, [], keep + result, flags=flags, segment=label)
        b.signal(peer, channel=CREDITS, segment=label)
    if extra < size:
        send(extra, fold, rounds + 1)
    return b.build()
