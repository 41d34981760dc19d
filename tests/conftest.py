"""Owns what all tests share: a warm cache of compiled code; skips that are listed, or refused, with reasons."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_WARM_UP = Path(__file__).with_name("warm_up.py")
_GUEST = Path(__file__).with_name("guest")
_COLD_S = 300
"""Compiling everything takes about 30 s of one core."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require",
        default=os.environ.get("GFTEST_REQUIRE", ""),
        help='words, separated by commas: a skip whose reason or test name contains one is a failure; "all": any skip '
        "is. Default: $GFTEST_REQUIRE",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compiles once, before xdist's workers would all do it at the same time and run into each other's deadlines."""
    if hasattr(session.config, "workerinput") or not getattr(session.config.option, "numprocesses", None):
        return
    command = [sys.executable, "-m", "gfkernels", "run", "-n", "2", "--timeout", str(_COLD_S), str(_WARM_UP)]
    root = _WARM_UP.parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise pytest.UsageError(f"two ranks could not reduce 8 numbers, so no test will:\n{done.stdout}{done.stderr}")


def pytest_report_header() -> str:
    """Says in which interpreter the tests of an emulated guest run, or why they will not."""
    said = subprocess.run(
        [sys.executable, _GUEST / "guest_setup.py", "--state"], capture_output=True, text=True, check=False
    )
    return (said.stdout or said.stderr).strip()


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
