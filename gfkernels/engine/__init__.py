"""The compiled data plane: a resumable executor that runs a plan's rows over a transport's function pointers."""

from __future__ import annotations

from gfkernels.engine.executor import acquire, call, call_array, call_arrays, call_queued, release, resume
from gfkernels.engine.prepare import prepare

__all__ = ["acquire", "call", "call_array", "call_arrays", "call_queued", "prepare", "release", "resume"]
