"""What callers pass: arrays of any framework, seen as addresses, and the checks that keep results from being wrong."""

from gfkernels.arrays.host import HostArray
from gfkernels.arrays.inspect import empty_like, inspect, overlap_check

__all__ = ["HostArray", "empty_like", "inspect", "overlap_check"]
