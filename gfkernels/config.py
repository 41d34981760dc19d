"""Owns the settings: one documented field each, read from `init(**options)` over `GFKERNELS_*` over the defaults."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from gfkernels.errors import ConfigError
from gfkernels.trace import LEVELS

PREFIX: Final = "GFKERNELS_"
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_MIB: Final = 1 << 20


@dataclass(frozen=True)
class Setting:
    """One field of `Config`, for people.

    Attributes:
        name: the option's name in `init(**options)`.
        variable: the environment variable.
        default: the value where neither is set.
        doc: what it does.
        allowed: what it accepts, in words.
    """

    name: str
    variable: str
    default: Any
    doc: str
    allowed: str


class _Bad(ValueError):
    """A value that a parser does not take; the caller knows the setting's name."""


def _choice(*values: str) -> tuple[Callable[[Any], Any], str]:
    def parse(value: Any) -> str:
        if not isinstance(value, str) or value.strip().lower() not in values:
            raise _Bad
        return value.strip().lower()

    return parse, " | ".join(values)


def _nbytes(low: int, high: int) -> tuple[Callable[[Any], Any], str]:
    def parse(value: Any) -> int:
        if isinstance(value, str):
            match = re.fullmatch(r"\s*(\d+)\s*(?:([kmgt]?)(?:i?b)?)\s*", value, re.IGNORECASE)
            if match is None:
                raise _Bad
            value = int(match[1]) * _UNITS[(match[2] or "").lower()]
        return _checked_integer(value, low, high)

    return parse, f'bytes, {low} … {high}, also written "64KiB" or "16M" (powers of 1024)'


def _integer(low: int, high: int, unit: str = "") -> tuple[Callable[[Any], Any], str]:
    def parse(value: Any) -> int:
        if isinstance(value, str):
            if not value.strip().isdecimal():
                raise _Bad
            value = int(value)
        return _checked_integer(value, low, high)

    return parse, f"an integer, {low} … {high}{' ' + unit if unit else ''}"


def _checked_integer(value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not low <= value.__index__() <= high:
        raise _Bad
    return int(value)


def _seconds(value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        raise _Bad from None
    if isinstance(value, bool) or not 0 < seconds <= 1e7:
        raise _Bad
    return seconds


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _Bad
    return value


def _secret(value: Any) -> str:
    if not isinstance(value, str) or len(value) < 8:
        raise _Bad
    return value


def _wire(value: Any) -> str | None:
    # "none" lets the environment say what the option's None says.
    text = _choice("none", "float16", "bfloat16")[0](value)
    return None if text == "none" else text


def _setting(
    default: Any, doc: str, rule: tuple[Callable[[Any], Any], str], *, optional: bool = False, hidden: bool = False
) -> Any:
    parse, allowed = rule
    metadata = {"doc": doc, "parse": parse, "allowed": allowed, "optional": optional}
    return field(default=default, metadata=metadata, repr=not hidden)


@dataclass(frozen=True)
class Config:
    """All settings of a communicator. `Config.load` reads them, `Config.settings` lists them with their meaning."""

    transport: str = _setting(
        "auto",
        "How bytes travel. auto: shared memory where a host's ranks can map each other's arrays, cross-memory attach "
        "for ordinary arrays where a probe shows that it works; between hosts RDMA (verbs) where every one has a card, "
        "else TCP. Anything else is used or refused, never replaced.",
        _choice("auto", "shm", "cma", "tcp", "verbs"),
    )
    plan: str = _setting(
        "auto",
        "Which algorithm a collective follows. auto chooses by topology and size, the same on every rank. "
        "recursive_doubling is one for allreduce; the other collectives go on choosing.",
        _choice("auto", "direct", "ring", "recursive_doubling"),
    )
    timeout_s: float = _setting(
        600.0,
        "Seconds until a wait for other ranks raises. Long enough that a checkpoint on one rank is no failure.",
        (_seconds, "seconds, above 0"),
    )
    connect_timeout_s: float = _setting(
        120.0,
        "Seconds that init waits for all ranks to appear.",
        (_seconds, "seconds, above 0"),
    )
    segment_bytes: int | None = _setting(
        None,
        "Bytes of one message of a pipelined transfer; unset: chosen by the plan.",
        _nbytes(64, 1 << 30),
        optional=True,
    )
    lanes: int | None = _setting(
        None,
        "How many pipelines of a plan run concurrently; unset: chosen by the plan.",
        _integer(1, 16),
        optional=True,
    )
    staging_bytes: int = _setting(
        16 * _MIB,
        "Bytes of the shared staging area of a rank, through which arrays travel that others cannot map. Where "
        "ranks of a host differ, the least counts.",
        _nbytes(64 << 10, 1 << 34),
    )
    inline_bytes: int = _setting(
        8192,
        "Arrays up to this size travel next to the header of the call. Where ranks of a host differ, the least counts.",
        _nbytes(0, 1 << 20),
    )
    arena_bytes: int | None = _setting(
        None,
        "Address space for gfkernels.empty on each rank (pages cost memory only once used); unset: this host's memory.",
        _nbytes(_MIB, 1 << 46),
        optional=True,
    )
    fusion_bytes: int | None = _setting(
        None,
        "GradientFlow sends gradients once this many bytes are ready; unset: chosen by the flow.",
        _nbytes(1, 1 << 40),
        optional=True,
    )
    wire: str | None = _setting(
        None,
        "Element type that travels where a call does not say; unset: the array's own.",
        (_wire, "none | float16 | bfloat16"),
        optional=True,
    )
    secret: str | None = _setting(
        None,
        "Shared secret by which ranks recognise each other; the same on all.",
        (_secret, "at least 8 characters"),
        optional=True,
        hidden=True,
    )
    secret_file: str | None = _setting(
        None,
        "File that holds the secret; its mode must be 0600 or 0400.",
        (_text, "a path"),
        optional=True,
    )
    job_id: str | None = _setting(
        None,
        "Tells this job from others on the same machines; unset: from the launcher.",
        (_text, "any text"),
        optional=True,
    )
    log: str = _setting(
        "warning",
        "Messages below this level are dropped.",
        _choice(*LEVELS),
    )
    interface: str | None = _setting(
        None,
        "Network interface for traffic between hosts, such as eth0; unset: by route.",
        (_text, "an interface's name"),
        optional=True,
    )
    bind_address: str | None = _setting(
        None,
        "Address on which this rank listens; unset: loopback on one host, else all of its addresses.",
        (_text, "an address or name of this host"),
        optional=True,
    )
    verbs_device: str | None = _setting(
        None,
        "RDMA device, such as mlx5_0, one port of it (mlx5_0:1), or several rails (mlx5_0,mlx5_1); unset: by route.",
        (_text, "names of devices"),
        optional=True,
    )
    verbs_gid_index: int | None = _setting(
        None,
        "Row of the RDMA port's GID table; unset: RoCE takes a routable one, InfiniBand none within a subnet.",
        _integer(0, 65535),
        optional=True,
    )
    verbs_timeout: int = _setting(
        18,
        "A packet that was not acknowledged is sent again after 4.096 µs times two to this power; 18: after 1.1 s.",
        _integer(1, 31),
    )
    verbs_retry_count: int = _setting(
        6,
        "How often it is sent again before the peer counts as lost. 7 is left out: some cards take it for: for ever.",
        _integer(0, 6),
    )
    verbs_traffic_class: int = _setting(
        0,
        "Traffic class of RoCE packets, for switches with flow control by priority: DSCP in the upper six bits.",
        _integer(0, 255),
    )
    verbs_service_level: int = _setting(
        0,
        "Service level of InfiniBand packets.",
        _integer(0, 15),
    )
    verbs_path: str = _setting(
        "compiled",
        "compiled: messages are posted and polled by machine code, where its pointers can be verified. pyverbs: "
        "through the interpreter, many times slower, to compare with.",
        _choice("compiled", "pyverbs"),
    )
    ptrace: str = _setting(
        "auto",
        "auto: allow the host's other processes of this user to read this one's memory (PR_SET_PTRACER), which "
        "cross-memory attach needs under Yama. off: leave the process as it is.",
        _choice("auto", "off"),
    )
    spin_us: int | None = _setting(
        None,
        "Microseconds that a wait spins before it yields; unset: from the cores that the local ranks may use.",
        _integer(0, 10_000_000, "µs"),
        optional=True,
    )
    cache_dir: str | None = _setting(
        None,
        "Folder of compiled code; unset: gfkernels under $XDG_CACHE_HOME or ~/.cache. Read when the package is "
        "imported, so only the environment variable takes effect.",
        (_text, "a path"),
        optional=True,
    )

    @classmethod
    def load(
        cls,
        options: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
        base: Config | None = None,
    ) -> Config:
        """Reads the settings.

        Args:
            options: what `init(**options)` was given.
            environ: variables; `GFKERNELS_*` count. None: no variables.
            base: where given, it takes the place of defaults and variables.

        Raises:
            ConfigError: an unknown name (the nearest is suggested) or a value that is not allowed.
        """
        values: dict[str, Any] = {}
        fields = {item.name: item for item in dataclasses.fields(cls)}
        for variable, text in sorted((environ or {}).items()):
            if not variable.startswith(PREFIX):
                continue
            name = variable[len(PREFIX) :].lower()
            if name not in fields or variable != PREFIX + name.upper():
                raise _unknown("environment variable", variable, [PREFIX + known.upper() for known in fields])
            # Set to nothing is how shells unset a variable for one command.
            if base is None and text != "":
                values[name] = _parsed(fields[name], variable, text)
        for name, value in (options or {}).items():
            if name not in fields:
                raise _unknown("option", name, list(fields))
            values[name] = _parsed(fields[name], name, value)
        return dataclasses.replace(base, **values) if base is not None else cls(**values)

    @classmethod
    def settings(cls) -> list[Setting]:
        """Every field with its variable, default, meaning and allowed values, in order."""
        return [
            Setting(item.name, PREFIX + item.name.upper(), item.default, item.metadata["doc"], item.metadata["allowed"])
            for item in dataclasses.fields(cls)
        ]


def _parsed(item: dataclasses.Field[Any], name: str, value: Any) -> Any:
    if value is None and item.metadata["optional"]:
        return None
    try:
        return item.metadata["parse"](value)
    except _Bad:
        shown = "(hidden)" if not item.repr else repr(value)
        raise ConfigError(f"{name}={shown}: expected {item.metadata['allowed']}. {item.metadata['doc']}") from None


def _unknown(kind: str, name: str, known: list[str]) -> ConfigError:
    # Users write options in capitals and variables in small letters; the comparison should not mind.
    by_lower = {item.lower(): item for item in known}
    nearest = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    hint = f"did you mean {by_lower[nearest[0]]}?" if nearest else f"known are {', '.join(sorted(known))}"
    return ConfigError(f"unknown {kind} {name}: {hint}")
