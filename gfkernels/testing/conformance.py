"""The public conformance suite: what every transport's table must do. See `gfkernels.transport.conformance`."""

from __future__ import annotations

from gfkernels.transport.conformance import CHECKS, DRIVERS, ConformanceError, Driver, Subject, checks_for

__all__ = ["CHECKS", "DRIVERS", "ConformanceError", "Driver", "Subject", "checks_for"]
