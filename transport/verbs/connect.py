"""Owns how the ranks of a group connect over RDMA: what they tell each other, in which order, and who hears of failure.

All ranks take the same steps. In each, a rank does its part and the results are exchanged, a failure among them: so
either all ranks go on or all raise, and none waits for one that gave up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from gfkernels.errors import ConnectError, TransportError, UnavailableError
from gfkernels.trace import log
from gfkernels.transport import framed as c
from gfkernels.transport.meeting import Exchange
from gfkernels.transport.verbs import words as w
from gfkernels.transport.verbs.channels import VerbsChannels, channels
from gfkernels.transport.verbs.rail import Rail
from gfkernels.transport.verbs.settings import Settings
from gfkernels.transport.verbs.side import Side

PAYLOAD_NBYTES: Final = 8192
"""Of a frame, if nothing else is said: what is shorter, or not registered, travels in frames."""


def connect(
    rank: int,
    size: int,
    *,
    exchange: Exchange,
    rails: Sequence[Rail] | UnavailableError,
    settings: Settings | None = None,
    payload_nbytes: int = PAYLOAD_NBYTES,
    timeout_s: float = 30.0,
) -> VerbsChannels:
    """Connects this rank to all others of its group over every rail, and sends a probe each way. All ranks call it.

    Args:
        rank: this rank within the group.
        size: ranks in the group.
        exchange: called four times at most, by all ranks equally often.
        rails: what this rank uses, from `rail.open_rails`, or why there is nothing: the others must learn of it. The
            caller closes them after the channels.
        settings: of the queue pairs.
        payload_nbytes: of a frame; the same on all ranks.
        timeout_s: for the probes.

    Raises:
        UnavailableError: this rank cannot use RDMA; every other rank gets a ConnectError that says so.
        ConnectError: a peer cannot be reached, or does not fit; names ranks, devices, addresses and the remedy.
    """
    if size == 1:
        return channels(rank, size, [])
    settings = settings or Settings()
    slot_nbytes = c.HEADER_NBYTES + payload_nbytes
    step = _Steps(rank, exchange)
    hellos = step("use RDMA", lambda: _hello(rails, slot_nbytes))
    assert not isinstance(rails, UnavailableError)
    _compare(hellos)
    peers = [peer for peer in range(size) if peer != rank]
    abouts = [[hellos[peer]["rails"][number] for peer in peers] for number in range(len(rails))]
    sides = [Side(rail, peers, settings, slot_nbytes) for rail in rails]

    def stop() -> None:
        for side in sides:
            side.stop()

    def release() -> None:
        for side in sides:
            side.close()

    try:
        # Links are numbered by peer, then by rail: `channels` sorts them like that.
        indices = [[i * len(rails) + number for i in range(len(peers))] for number in range(len(rails))]
        offers = step(
            "prepare for RDMA",
            lambda: _by_peer(rank, size, [side.prepare(indices[n]) for n, side in enumerate(sides)]),
        )
        mine = [[offers[peer][rank][number] for peer in peers] for number in range(len(rails))]

        def join() -> None:
            for number, side in enumerate(sides):
                side.join(abouts[number], mine[number])

        step("connect over RDMA", join)
        ends = [link for n, side in enumerate(sides) for link in side.links(n, abouts[n], mine[n])]
        connected = channels(rank, size, ends, release, stop)
    except BaseException:
        release()
        raise
    try:
        step("reach its peers over RDMA", lambda: _probe(rank, connected, hellos, timeout_s))
    except BaseException:
        connected.close(leave=False)
        raise
    for number, rail in enumerate(rails):
        log.debug("RDMA: rail %d is %s, to %d peers", number, rail.choice.port.name, len(peers))
    return connected


class _Steps:
    """Does this rank's part and exchanges the result; raises on all ranks where one of them failed."""

    def __init__(self, rank: int, exchange: Exchange) -> None:
        self._rank = rank
        self._exchange = exchange

    def __call__(self, what: str, part: Callable[[], Any]) -> list[Any]:
        failure: Exception | None = None
        try:
            said: dict[str, Any] = {"value": part()}
        except Exception as error:
            failure = error
            said = {"error": f"{type(error).__name__}: {error}"}
        answers = self._exchange(said)
        if failure is not None:
            raise failure
        failed = {other: answer["error"] for other, answer in enumerate(answers) if "error" in answer}
        if failed:
            first, why = next(iter(failed.items()))
            more = f" (and so did ranks {', '.join(map(str, list(failed)[1:]))})" if len(failed) > 1 else ""
            raise ConnectError(f"rank {first} failed to {what}{more}: {why}")
        return [answer["value"] for answer in answers]


def _hello(rails: Sequence[Rail] | UnavailableError, slot_nbytes: int) -> dict[str, Any]:
    if isinstance(rails, UnavailableError):
        raise rails
    return {
        "version": w.VERSION,
        "order": sys.byteorder,
        "slot": slot_nbytes,
        "depth": w.DEPTH,
        "rails": [rail.about() for rail in rails],
    }


def _compare(hellos: Sequence[dict[str, Any]]) -> None:
    """Every rank compares the same values, so that all of them raise or none does."""
    first = hellos[0]
    for other, hello in enumerate(hellos):
        for name, what, remedy in (
            ("version", "version of the RDMA transport", "install the same release of gfkernels on all hosts"),
            ("order", "byte order", "use hosts of one kind"),
            ("depth", "number of receives", "install the same release of gfkernels on all hosts"),
            ("slot", "size of frames", "give all ranks the same settings"),
        ):
            if hello[name] != first[name]:
                raise ConnectError(
                    f"rank {other} has another {what} than rank 0: {hello[name]}, not {first[name]}: {remedy}"
                )
        ours, theirs = first["rails"], hello["rails"]
        if len(ours) != len(theirs):
            raise ConnectError(
                f"rank {other} has {len(theirs)} RDMA rails ({_ports(theirs)}) and rank 0 has {len(ours)} "
                f"({_ports(ours)}): name as many devices in GFKERNELS_VERBS_DEVICE on all hosts"
            )
        for mine, its in zip(ours, theirs, strict=True):
            for name in ("layer", "kind"):
                if mine[name] != its[name]:
                    raise ConnectError(
                        f"{its['port']} of rank {other} is {its[name]} and {mine['port']} of rank 0 is {mine[name]}: "
                        "choose devices of one network with GFKERNELS_VERBS_DEVICE, in the same order on all hosts"
                    )


def _ports(rails: Sequence[dict[str, Any]]) -> str:
    return ", ".join(rail["port"] for rail in rails)


def _by_peer(rank: int, size: int, by_rail: Sequence[Sequence[dict[str, int]]]) -> list[list[dict[str, int]]]:
    """For each rank of the group, this one's offer on each rail; nothing for itself."""
    result: list[list[dict[str, int]]] = [[] for _ in range(size)]
    for number, peer in enumerate(peer for peer in range(size) if peer != rank):
        result[peer] = [offers[number] for offers in by_rail]
    return result


def _probe(rank: int, connected: VerbsChannels, hellos: Sequence[dict[str, Any]], timeout_s: float) -> None:
    reason = f"no message came through in {timeout_s:g} s"
    try:
        silent = connected.probe(timeout_s)
    except TransportError as error:
        reason = str(error)
        silent = [peer for peer in connected.links if connected.fault(peer) is not None]
    if silent:
        ways = "; ".join(
            f"{here['port']} ({_address(here)}) to {there['port']} ({_address(there)})"
            for here, there in zip(hellos[rank]["rails"], hellos[silent[0]]["rails"], strict=True)
        )
        others = f", nor ranks {', '.join(map(str, silent[1:]))}" if len(silent) > 1 else ""
        raise ConnectError(
            f"rank {rank} does not reach rank {silent[0]}{others} over RDMA: {reason}. Tried {ways}. Check that the "
            "ports are on one network (for RoCE: ping between their addresses, UDP port 4791 open, one VLAN), or "
            "choose other ones with GFKERNELS_VERBS_DEVICE"
        )


def _address(about: dict[str, Any]) -> str:
    return f"GID {about['gid']}" if about["global"] else f"LID {about['lid']}"
