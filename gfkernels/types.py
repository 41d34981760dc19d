"""The vocabulary all layers share: element types, reductions, and the rows that a plan is made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np


class ReduceOp(IntEnum):
    """A reduction. `MEAN` is `SUM` with a scale before and a division after."""

    SUM = 0
    MEAN = 1
    PROD = 2
    MIN = 3
    MAX = 4

    @property
    def label(self) -> str:
        """The name users write: "sum", "mean", "prod", "min", "max"."""
        return self.name.lower()


@dataclass(frozen=True)
class DType:
    """An element type: its name, size in bytes and numpy dtype. `kind` is "f", "i", "u" or "b"."""

    name: str
    code: int
    itemsize: int
    kind: str

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The numpy dtype; bfloat16 is ml_dtypes'."""
        if self.name == "bfloat16":
            # Importing it takes a second in some versions, and only those who use bfloat16 arrays need it.
            import ml_dtypes

            bfloat16: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16)
            return bfloat16
        return np.dtype(self.name)


DTYPES: Final[dict[str, DType]] = {
    name: DType(name, code, itemsize, kind)
    for code, (name, itemsize, kind) in enumerate(
        [
            ("float64", 8, "f"),
            ("float32", 4, "f"),
            ("float16", 2, "f"),
            ("bfloat16", 2, "f"),
            ("int8", 1, "i"),
            ("int16", 2, "i"),
            ("int32", 4, "i"),
            ("int64", 8, "i"),
            ("uint8", 1, "u"),
            ("uint16", 2, "u"),
            ("uint32", 4, "u"),
            ("uint64", 8, "u"),
            ("bool", 1, "b"),
        ]
    )
}
_BY_NUMPY: Final[dict[np.dtype[Any], DType]] = {one.numpy: one for one in DTYPES.values() if one.name != "bfloat16"}


def from_numpy(dtype: np.dtype[Any]) -> DType | None:
    """The element type of a numpy dtype; None where there is none."""
    found = _BY_NUMPY.get(dtype)
    if found is None and dtype.name == "bfloat16":
        found = _BY_NUMPY[dtype] = DTYPES["bfloat16"]
    return found


class StepOp(IntEnum):
    """What a row of a plan does. Within a lane rows run in order; lanes run concurrently."""

    ENTER = 0
    """Publish this call's header to the ranks of the host, wait for theirs, compare. A full barrier."""
    COMBINE = 1
    """dsts <- op over srcs. All spans are addressable here: own buffers, or a same-host peer's mapped ones."""
    COPY = 2
    """One dst <- one src, byte for byte; both addressable here."""
    PUT = 3
    """Write the local src span into the peer's dst span; then the peer's arrivals on `channel` go up by one
    (channel -1: no signal)."""
    GET = 4
    """Read the peer's src span into the local dst span."""
    SIGNAL = 5
    """Raise arrivals on `channel` at the peer by one (peer -1: at every other rank)."""
    WAIT = 6
    """Wait until arrivals on `channel` from the peer, counted from the start of the call, reach `value`
    (peer -1: from every other rank)."""


class Buffer(IntEnum):
    """Where a span lies. Offsets and counts are in elements of the buffer's dtype."""

    X = 0
    """The caller's input array (dtype: the array's); in place, also the output."""
    OUT = 1
    """The caller's output array where it is another one (dtype: the array's)."""
    STAGE = 2
    """The rank's shared staging area, bounded, reachable by all local ranks and by puts (dtype: the wire's). Offsets
    count from the call's window of it."""
    INLINE = 3
    """A small shared area next to the header, double-buffered by call, written before ENTER (dtype: the wire's)."""
    SCRATCH = 4
    """Private scratch memory (dtype: the array's)."""


N_BUFFERS: Final = 5
"""Buffers a rank has in an ordinary plan; a plan over many arrays numbers further inputs from here on."""

RAW_SOURCES: Final = 1
"""Step flag: the array-typed sources are ranks' raw contributions: scale (mean) and, where a wire dtype is set and
the step is ROUND_RAW, round each to it before adding."""
FINAL: Final = 2
"""Step flag: this COMBINE completes the reduction (mean divides here)."""
ROUND_RAW: Final = 4
"""Step flag: round every array-typed source to the wire dtype first (direct plans: all paths give equal bits)."""
STREAMED: Final = 8
"""Kernel flag, which the engine adds and no plan carries: the first destination, which begins on a cache line, is
written past the caches. Until `drain_streams` nobody may be told of it."""

STEP_DTYPE: Final = np.dtype(
    [
        (name, np.int64)
        for name in (
            "op",
            "lane",
            "peer",
            "channel",
            "value",
            "count",
            "flags",
            "src",  # index of the first source in the span table: wire-typed ones first, then array-typed ones
            "n_src_wire",
            "n_src_array",
            "dst",  # index of the first destination, ordered likewise
            "n_dst_wire",
            "n_dst_array",
            "segment",  # for people and pictures: which segment of the pipeline this row works on
            "array",  # which array of a call over many (0 otherwise): chooses the kernel
            "reserved",
        )
    ]
)
SPAN_DTYPE: Final = np.dtype([("rank", np.int64), ("buffer", np.int64), ("offset", np.int64), ("count", np.int64)])
N_CHANNELS: Final = 4
"""Arrival counters per pair of ranks: 0 data, 1 credits, 2 and 3 free for plans."""
