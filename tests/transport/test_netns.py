"""TCP between two network namespaces: real processes, a real interface whose byte counters show what passed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import netns
import pytest

_OK, _REASON = netns.available()
pytestmark = [pytest.mark.net, pytest.mark.slow, pytest.mark.skipif(not _OK, reason=_REASON)]

_SCRIPT = str(Path(__file__).with_name("netns_rank.py"))
_ROOT = str(Path(__file__).parents[2])


def _ring(wire: netns.Wire, folder: Path, sides: list[int], nbytes: int, turns: int) -> list[dict[str, Any]]:
    size = len(sides)
    env = {"PYTHONPATH": os.pathsep.join([_ROOT, os.environ.get("PYTHONPATH", "")])}
    ranks = [
        wire.start(
            side,
            [sys.executable, _SCRIPT, *map(str, (rank, size, folder, nbytes, turns)), wire.addresses[side]],
            env=env,
        )
        for rank, side in enumerate(sides)
    ]
    results = []
    try:
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, f"rank {rank}: {err}"
            results.append(json.loads(out))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return results


def _check_counters(wire: netns.Wire, before: list[int], payload: int) -> None:
    for side in (0, 1):
        passed = wire.sent_nbytes(side) - before[side]
        assert payload <= passed < 1.1 * payload + 200_000, f"{passed} bytes left namespace {side}, payload {payload}"


def test_payload_crosses_the_wire(tmp_path: Path) -> None:
    nbytes, turns = 1 << 20, 16
    with netns.wire() as wire:
        before = [wire.sent_nbytes(side) for side in (0, 1)]
        results = _ring(wire, tmp_path, [0, 1], nbytes, turns)
        assert [r["wrong"] for r in results] == [0, 0]
        # An IPv4 peer of a dual-stack listener reads ::ffff:10.…
        assert all(r["peer"].endswith(a) for r, a in zip(results, reversed(wire.addresses), strict=True)), results
        _check_counters(wire, before, nbytes * turns)


def test_same_namespace_uses_loopback(tmp_path: Path) -> None:
    """Ranks 0, 1 in one namespace, 2, 3 in the other: a ring crosses the wire once each way."""
    nbytes, turns = 300_001, 6
    with netns.wire() as wire:
        before = [wire.sent_nbytes(side) for side in (0, 1)]
        results = _ring(wire, tmp_path, [0, 0, 1, 1], nbytes, turns)
        assert [r["wrong"] for r in results] == [0] * 4
        assert "127.0.0.1" in results[0]["peer"], "ranks of one namespace did not use loopback"
        _check_counters(wire, before, nbytes * turns)


def test_slow_wire(tmp_path: Path) -> None:
    """A token bucket of 200 Mbit/s: full sockets, many partial sends, and the rate is that of the wire."""
    nbytes, turns = 2 << 20, 4
    with netns.wire(rate="200mbit") as wire:
        before = [wire.sent_nbytes(side) for side in (0, 1)]
        results = _ring(wire, tmp_path, [0, 1], nbytes, turns)
        assert [r["wrong"] for r in results] == [0, 0]
        _check_counters(wire, before, nbytes * turns)
        # Not a benchmark: faster than the wire would mean that the payload went another way.
        assert min(r["seconds"] for r in results) > 0.8 * nbytes * turns / 25e6
