"""Runs the public conformance suite on all in-tree transports, through compiled code and through ctypes."""

from __future__ import annotations

import pytest
from meshes import SUBJECTS

from gfkernels.transport.conformance import DRIVERS, Check, Subject, checks_for

_FIRST = next(iter(DRIVERS))


@pytest.mark.parametrize("driver", [pytest.param(d, marks=() if d == _FIRST else pytest.mark.slow) for d in DRIVERS])
@pytest.mark.parametrize(
    ("subject", "check"),
    [
        pytest.param(s, check, id=f"{s.name}-{check.__name__}", marks=pytest.mark.slow if turn % 3 else ())
        for s in SUBJECTS
        for turn, check in enumerate(checks_for(s))
    ],
)
def test_conformance(subject: Subject, check: Check, driver: str) -> None:
    check(subject, DRIVERS[driver])
