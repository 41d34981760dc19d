"""Owns starting this package's own modules as ranks on this host, with the same package that runs here."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gfkernels.bootstrap import World, discover
from gfkernels.cli.run import launch

PACKAGE_PARENT = Path(__file__).resolve().parent.parent.parent


def launched_world() -> World | None:
    """The world that a launcher has put this process into; None where there is none.

    Raises:
        ConfigError: the launcher's variables make no sense.
    """
    world = discover(os.environ)
    return None if world.source == "single process" else world


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's variables, so that a child imports the same gfkernels, also from a source tree on `sys.path`."""
    environ = {**os.environ, **(changes or {})}
    installed = [*site.getsitepackages(), site.getusersitepackages()] if hasattr(site, "getsitepackages") else []
    if str(PACKAGE_PARENT) not in installed:
        paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        if str(PACKAGE_PARENT) not in paths:
            environ["PYTHONPATH"] = os.pathsep.join([*paths, str(PACKAGE_PARENT)])
    return environ


def run_ranks(
    module: str,
    arguments: Sequence[str],
    n: int,
    *,
    changes: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> int:
    """Runs a module of this package as `n` ranks, whose output goes where ours goes.

    Returns:
        The job's exit code.
    """
    sys.stdout.flush()
    return launch([module, *arguments], n, module=True, tag_output=False, environ=environment(changes), timeout=timeout)
