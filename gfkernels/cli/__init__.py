"""The command line: `gfkernels run | bench | demo | doctor | plan`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from gfkernels._version import __version__
from gfkernels.cli.bench import bench_command
from gfkernels.cli.demo import demo_command
from gfkernels.cli.doctor import doctor_command
from gfkernels.cli.plan import plan_command
from gfkernels.cli.run import CONTEXT_SETTINGS, run_command
from gfkernels.errors import ConfigError, GfkernelsError, UsageError

__all__ = ["app", "main"]

app = typer.Typer(
    name="gfkernels",
    help="Collectives for arrays of any framework, between processes and machines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gfkernels {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def _clear(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command whose errors are messages: exit code 2 for what the user can write differently, else 1."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except GfkernelsError as error:
            print(f"gfkernels {command.__name__.removesuffix('_command')}: {error}", file=sys.stderr)
            raise typer.Exit(2 if isinstance(error, UsageError | ConfigError) else 1) from None

    return run


app.command("run", context_settings=CONTEXT_SETTINGS)(_clear(run_command))
app.command("bench")(_clear(bench_command))
app.command("demo")(_clear(demo_command))
app.command("doctor")(_clear(doctor_command))
app.command("plan")(_clear(plan_command))


def main() -> None:
    """Entry point of the `gfkernels` program."""
    app()
