"""Ranks that are in different calls all raise, with a table of who asked for what; nobody's array is touched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fault_calls import ODD
from fault_world import World

pytestmark = pytest.mark.faults
KINDS = {
    "count": "count",
    "large count": "count",
    "dtype": "dtype",
    "op": "op",
    "order": "call",
    "wire": "wire",
    "root": "root",
    "list": "plan",
}
"""Which column of the table differs."""


@pytest.mark.parametrize(
    ("way", "kinds"),
    [
        ("auto", ["count", "order"]),
        ("tcp", ["count"]),
        pytest.param("auto", list(KINDS), marks=pytest.mark.slow),
        pytest.param("cma", ["large count", "dtype"], marks=pytest.mark.slow),
        pytest.param("tcp", [kind for kind in KINDS if kind != "root"], marks=pytest.mark.slow),
    ],
)
def test_a_mismatch_shows_every_rank_the_table(start: Callable[..., World], way: str, kinds: list[str]) -> None:
    world = start("fault_calls:mismatch", kinds, transport=way, timeout_s=20)
    for kind in kinds:
        for rank in world.all():
            one = world.report(rank)
            assert one["error"] == "MismatchError" and one["picklable"], (kind, one)
            table = one["table"]
            assert [row["rank"] for row in table] == [0, 1, 2], (kind, one)
            assert not any("state" in row for row in table), (kind, one)
            column = KINDS[kind]
            assert table[0].get(column) == table[2].get(column) != table[ODD].get(column), (kind, table)
            assert one["seconds"] < 5
            assert world.report(rank, "array")["clean"] or way == "tcp", kind
            assert world.report(rank, "after")["error"] == "CommunicatorBroken"
    world.end()


@pytest.mark.parametrize("way", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_rank_that_is_not_in_the_call_is_shown(start: Callable[..., World], way: str) -> None:
    world = start("fault_calls:mismatch", ["absent"], transport=way, timeout_s=20)
    for rank in (0, 1):
        one = world.report(rank)
        assert one["error"] == "MismatchError", one
        assert one["table"][2] == {"rank": 2, "state": "not in the call"}, one
        assert one["table"][0]["count"] != one["table"][1]["count"]
        assert world.report(rank, "array")["clean"] or way == "tcp"
        assert world.report(rank, "after")["error"] == "CommunicatorBroken"
    world.tell("come", [2])
    assert world.report(2)["error"] is not None
    world.end()


@pytest.mark.slow
def test_differing_roots_over_tcp(start: Callable[..., World]) -> None:
    # Roots only send, and may have returned before a receiver finds out: their next call tells the same tale.
    world = start("fault_calls:mismatch", ["root"], transport="tcp", timeout_s=20)
    for rank in world.all():
        errors = [world.report(rank, what) for what in ("call", "after")]
        first = next(one for one in errors if one["error"] is not None)
        assert first["error"] == "MismatchError", errors
        assert [(row["call"], row["sequence"], row["root"]) for row in first["table"]] == [
            ("broadcast", 1, 0), ("broadcast", 1, 1), ("broadcast", 1, 0)
        ], first  # fmt: skip
    world.end()
