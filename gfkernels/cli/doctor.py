"""Owns `gfkernels doctor`: its options, and how findings are shown."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Final

import typer

_SIGNS: Final = {"ok": ("✓", "green"), "note": ("·", "dim"), "warn": ("!", "yellow"), "fail": ("✗", "bold red")}


def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON.")] = False,
    run: Annotated[bool, typer.Option("--run/--no-run", help="Start two ranks and reduce arrays.")] = True,
) -> None:
    """Look at this machine: what is usable, what is not and why, and what to do.

    Exit code 0 where the basics work, 1 where something must be mended first.
    """
    from gfkernels import __version__
    from gfkernels.doctor import examine, works

    findings = examine(run=run)
    healthy = works(findings)
    if as_json:
        rows = [finding.row() for finding in findings]
        print(json.dumps({"gfkernels": __version__, "works": healthy, "findings": rows}, indent=2))
    else:
        _show(findings, healthy)
    raise typer.Exit(0 if healthy else 1)


def _show(findings: list[Any], healthy: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console() if sys.stdout.isatty() else Console(width=140)
    table = Table(box=None, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            table.add_row("", Text(topic, style="bold"), "")
        sign, style = _SIGNS[finding.state]
        # Text, since what was found may hold brackets.
        body = Text(finding.found)
        if finding.advice:
            body.append(f"\n→ {finding.advice}", style=style)
        table.add_row(Text(sign, style=style), Text(finding.name), body)
    console.print(table)
    counts = {state: sum(finding.state == state for finding in findings) for state in _SIGNS}
    if healthy:
        text, style = "gfkernels works here", "bold green"
    else:
        text, style = "gfkernels does not work here yet: see ✗", "bold red"
    more = ", ".join(
        f"{counts[state]} {word}" for state, word in (("fail", "to mend"), ("warn", "could be better")) if counts[state]
    )
    console.print(Text(f"\n{text}{f' ({more})' if more else ''}", style=style))
