"""The errors users see: one class per thing a caller can do, all picklable, each naming value, rank, remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class GfkernelsError(Exception):
    """Base of every error that gfkernels raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Keyword-only attributes would be lost by the default, which calls cls(*args).
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[GfkernelsError], args: tuple[Any, ...], state: Mapping[str, Any]) -> GfkernelsError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class UsageError(GfkernelsError, ValueError):
    """The call itself is wrong (argument, array, order of calls); nothing was sent and no sequence number consumed."""


class ConfigError(GfkernelsError):
    """A setting (`GFKERNELS_*`, an option of `init`, a launcher's variable) is unknown or has a bad value."""


class UnavailableError(GfkernelsError):
    """Something that was asked for by name cannot be used here.

    Attributes:
        reason: what was found.
        remedy: what would make it usable.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(f"{reason}. {remedy}" if remedy else reason)
        self.reason = reason
        self.remedy = remedy


class BootstrapError(GfkernelsError):
    """The ranks could not find, or would not accept, each other."""


class DeviceError(GfkernelsError):
    """A device (GPU, driver) reported an error."""


class WaitTimeout(GfkernelsError, TimeoutError):
    """Time ran out: that of `Work.wait(timeout)`, and the call goes on; or `timeout_s`, and the communicator breaks."""


class TransportError(GfkernelsError):
    """Moving bytes failed; the communicator is broken afterwards."""


class ConnectError(TransportError):
    """A connection to a peer could not be made."""


class PeerLostError(TransportError):
    """A peer died, left, or closed its connection while this rank needed it.

    Attributes:
        rank: the peer's rank, or -1 where it is not known.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class MismatchError(TransportError):
    """The ranks asked for different things in the same call.

    Attributes:
        table: one mapping per rank: `rank, call, sequence, op, dtype, count, plan`, or `rank` and `state` for a
            rank that was not in the call.
    """

    def __init__(self, message: str, table: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(message)
        self.table = [dict(row) for row in table]


class CommunicatorBroken(GfkernelsError):
    """An earlier failure broke this communicator; make a new one with `init`.

    Attributes:
        cause: the error that broke it.
    """

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.cause = cause
