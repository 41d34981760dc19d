"""Owns the tests of the error classes: their bases, what they carry, and that they travel between processes."""

from __future__ import annotations

import copy
import pickle

import pytest

from gfkernels import errors
from gfkernels.bootstrap.store import StoreTimeout

EXAMPLES: list[errors.GfkernelsError] = [
    errors.GfkernelsError("plain"),
    errors.UsageError("bad shape (3,)"),
    errors.ConfigError("GFKERNELS_PLAN='x'"),
    errors.UnavailableError("no RDMA device", "Load rdma_rxe"),
    errors.BootstrapError("rank 1 is missing"),
    errors.DeviceError("CUDA_ERROR_ILLEGAL_ADDRESS"),
    errors.WaitTimeout("5 s"),
    errors.TransportError("EPIPE"),
    errors.ConnectError("10.0.0.1:80"),
    errors.PeerLostError("rank 3 died", 3),
    errors.MismatchError("call 7", [{"rank": 0, "count": 4}, {"rank": 1, "count": 5}]),
    errors.CommunicatorBroken("broken", errors.PeerLostError("rank 2 left", 2)),
    StoreTimeout("2 s", ["key"]),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_errors_are_picklable(error: errors.GfkernelsError, protocol: int) -> None:
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is type(error) and str(again) == str(error) and again.args == error.args
    state, expected = dict(again.__dict__), dict(error.__dict__)
    cause, other = state.pop("cause", None), expected.pop("cause", None)
    assert state == expected
    assert (type(cause), str(cause)) == (type(other), str(other))


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_errors_can_be_copied(error: errors.GfkernelsError) -> None:
    assert str(copy.copy(error)) == str(error)


def test_every_class_has_an_example() -> None:
    defined = {item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, Exception)}
    assert defined <= {type(error) for error in EXAMPLES}


def test_bases() -> None:
    assert all(isinstance(error, errors.GfkernelsError) for error in EXAMPLES)
    assert issubclass(errors.UsageError, ValueError)
    assert issubclass(errors.WaitTimeout, TimeoutError) and issubclass(StoreTimeout, TimeoutError)
    for kind in (errors.ConnectError, errors.PeerLostError, errors.MismatchError):
        assert issubclass(kind, errors.TransportError)
    assert not issubclass(errors.CommunicatorBroken, errors.TransportError)


def test_messages_hold_reason_and_remedy() -> None:
    error = errors.UnavailableError("no RDMA device", "Load rdma_rxe")
    assert str(error) == "no RDMA device. Load rdma_rxe"
    assert (error.reason, error.remedy) == ("no RDMA device", "Load rdma_rxe")
    assert str(errors.UnavailableError("nothing")) == "nothing"
