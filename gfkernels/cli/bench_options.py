"""Owns the options of `gfkernels bench`: their rules, and their way from the launching process to the ranks."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gfkernels import Config, kernels
from gfkernels.cli.bench_case import COLLECTIVES, REDUCING, Case, parse_nbytes, sweep
from gfkernels.errors import UnavailableError, UsageError
from gfkernels.types import DTYPES, ReduceOp

MEMORIES: Final = ("registered", "ordinary", "both")
OPS: Final = tuple(op.label for op in ReduceOp)
WIRES: Final = ("float16", "bfloat16")
PICTURES: Final = (".svg", ".png")


@dataclass(frozen=True)
class Options:
    """What to measure and what to write; see `gfkernels bench --help`.

    Attributes:
        settings: options of `gfkernels.init`, as text.
        peers: by peer, "" or why it is left out; empty: none was asked for.
    """

    collective: str = "allreduce"
    first: str = "8"
    last: str = "64M"
    factor: float = 4.0
    dtype: str = "float32"
    op: str = "sum"
    wire: str | None = None
    memory: str = "both"
    out_of_place: bool = False
    persistent: bool = False
    iters: int = 0
    warmup: int = 3
    check: bool = True
    json_file: str | None = None
    plot_file: str | None = None
    settings: dict[str, str] = field(default_factory=dict)
    peers: dict[str, str] = field(default_factory=dict)

    def dumps(self) -> str:
        """As text for a rank's command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def loads(cls, text: str) -> Options:
        """The reverse of `dumps`."""
        return cls(**json.loads(text))

    def validate(self) -> None:
        """Finds what is wrong before any process is started.

        Raises:
            UsageError, ConfigError, UnavailableError: says which option and what it takes.
        """
        _one_of("collective", self.collective, COLLECTIVES)
        _one_of("--dtype", self.dtype, tuple(DTYPES))
        _one_of("--op", self.op, OPS)
        _one_of("--memory", self.memory, MEMORIES)
        dtype, wire = DTYPES[self.dtype], None
        if self.wire is not None:
            _one_of("--wire", self.wire, WIRES)
            wire = DTYPES[self.wire]
            if self.collective in ("broadcast", "barrier"):
                raise UsageError(f"--wire {self.wire}: a {self.collective} sends the arrays as they are")
        if self.collective in REDUCING or wire is not None:
            kernels.check(ReduceOp[self.op.upper()], dtype, wire)
        if self.collective != "allreduce" and (self.persistent or self.out_of_place):
            option = "--persistent" if self.persistent else "--out-of-place"
            raise UsageError(f"{option} is for allreduce, not for {self.collective}")
        if self.persistent and self.out_of_place:
            raise UsageError("--persistent handles work in place: leave out --out-of-place")
        _ = self.sizes
        Config.load(self.settings, os.environ)
        self._check_files()

    def _check_files(self) -> None:
        if self.json_file not in (None, "-"):
            _check_folder("--json", str(self.json_file))
        if self.plot_file is None:
            return
        if Path(self.plot_file).suffix not in PICTURES:
            raise UsageError(f"--plot {self.plot_file}: expected a name that ends in {' or '.join(PICTURES)}")
        _check_folder("--plot", self.plot_file)
        if self.collective == "barrier":
            raise UsageError("--plot draws over sizes, and a barrier has none")
        if importlib.util.find_spec("matplotlib") is None:
            raise UnavailableError("--plot needs matplotlib, which is not installed", "pip install 'gfkernels[plot]'")

    @property
    def sizes(self) -> list[int]:
        """The sweep, in bytes."""
        if self.collective == "barrier":
            return [0]
        return sweep(parse_nbytes(self.first, "-b"), parse_nbytes(self.last, "-e"), self.factor)

    @property
    def memories(self) -> Sequence[str]:
        """The kinds of memory that ours is measured with."""
        if self.collective == "barrier":
            return ("gfkernels",)
        return ("registered", "ordinary") if self.memory == "both" else (self.memory,)

    def case(self, n: int, rank: int) -> Case:
        """The call, of no size yet."""
        in_place = self.collective == "broadcast" or (self.collective == "allreduce" and not self.out_of_place)
        op = self.op if self.collective in REDUCING else "sum"
        wire = DTYPES[self.wire] if self.wire else None
        return Case(self.collective, op, DTYPES[self.dtype], wire, n, rank, in_place)

    def cases(self, n: int, rank: int) -> list[Case]:
        """Every call of the sweep; sizes that come to the same number of elements count once."""
        return list(dict.fromkeys(self.case(n, rank).sized(nbytes) for nbytes in self.sizes))

    def about(self) -> str:
        """One line on what is measured."""
        parts = [self.collective]
        if self.collective in REDUCING:
            parts.append(self.op)
        if self.collective != "barrier":
            parts.append(self.dtype)
        if self.wire:
            parts.append(f"travelling as {self.wire}")
        if self.collective == "allreduce":
            parts.append("out of place" if self.out_of_place else "in place")
        if self.persistent:
            parts.append("through a persistent handle")
        return " ".join(parts)

    def extra(self) -> dict[str, Any]:
        """What JSON lines say beyond the case."""
        return {"persistent": self.persistent}


def _one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UsageError(f"{option} {value}: expected one of {', '.join(allowed)}")


def _check_folder(option: str, path: str) -> None:
    folder = Path(path).resolve().parent
    if Path(path).is_dir():
        raise UsageError(f"{option} {path}: that is a folder, expected a file's name")
    if not folder.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {folder}")
    if not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise UsageError(f"{option} {path}: no permission to write there")
