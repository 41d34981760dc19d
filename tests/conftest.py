"""Owns what all tests share: skips are listed with their reasons, and are failures where the capability is required."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require",
        default=os.environ.get("GFTEST_REQUIRE", ""),
        help='words, separated by commas: a skip whose reason or test name contains one is a failure; "all": any skip '
        "is. Default: $GFTEST_REQUIRE",
    )


def _required(config: pytest.Config, text: str) -> str | None:
    """The word of --require that forbids this skip, None where it may be skipped."""
    words = [word.strip().lower() for word in str(config.getoption("--require")).split(",")]
    return next((word for word in words if word and (word == "all" or word in text.lower())), None)


def _refuse(config: pytest.Config, report: Any) -> None:
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    word = _required(config, f"{report.nodeid} {reason}")
    if word is not None:
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: skipped although --require has {word!r}: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse(item.config, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse(collector.config, report)
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skips = terminalreporter.stats.get("skipped", [])
    if not skips:
        return
    terminalreporter.section(f"{len(skips)} skipped: what this run did not test", sep="-")
    rows: Counter[tuple[str, str]] = Counter()
    for report in skips:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        rows[report.nodeid.partition("::")[0], reason.removeprefix("Skipped: ")] += 1
    for (place, reason), count in sorted(rows.items()):
        terminalreporter.write_line(f"{place}: {reason}" + (f" ({count} tests)" if count > 1 else ""))
