"""Owns the tests of `gfkernels demo`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gfkernels.cli.demo import duration, rate


@pytest.mark.slow
def test_the_demo_explains_itself_and_every_row_is_right(gfkernels: Callable[..., Any]) -> None:
    done = gfkernels("demo", "-n", "2")
    assert done.code == 0, done.err
    assert done.err == ""
    rows = [line for line in done.out.splitlines() if "✓" in line]
    assert len(rows) == 12
    assert "✗" not in done.out
    assert any("over tcp, sent as float16" in row for row in rows)
    assert [
        word for word in ("2 processes", "registered", "effective", "What next", "gf.allreduce") if word not in done.out
    ] == []
    assert max(len(line) for line in done.out.splitlines()) <= 120


@pytest.mark.slow
def test_alone(gfkernels: Callable[..., Any]) -> None:
    done = gfkernels("demo", "-n", "1")
    assert done.code == 0, done.err
    assert "tcp" not in done.out.split("What next")[0]


@pytest.mark.parametrize(("value", "text"), [(3.456, "3.46 µs"), (999, "999 µs"), (1234, "1.23 ms"), (2.5e6, "2.5 s")])
def test_durations(value: float, text: str) -> None:
    assert duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.00032, "0.32 MB/s"), (0.5, "500 MB/s"), (1.0, "1.0 GB/s"), (12.34, "12.3 GB/s")]
)
def test_rates(value: float, text: str) -> None:
    assert rate(value) == text
