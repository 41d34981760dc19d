"""Owns the seam between engine and transports: per peer, a row of C function pointers and the state they act on.

Every function is `int64 f(int64, …)`, called from compiled code without the GIL. Transports move bytes and know nothing
of dtypes, plans or roles. In-tree ones are `numba.cfunc`s; a test may supply ctypes callbacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

OK: Final = 0
"""`put`/`flush`: accepted; the source may be reused."""
AGAIN: Final = 1
"""`put`/`flush`: nothing can be done now; call again with the same arguments."""


class Fault(IntEnum):
    """What a transport function returns, negated, when it fails; details are in its state's error words."""

    PEER_LOST = 1
    MISMATCH = 2
    PROTOCOL = 3
    SYSTEM = 4
    UNSUPPORTED = 5


class Slot(IntEnum):
    """The words of a peer's row. A function pointer of 0 means: this transport has no such function."""

    STATE = 0
    """The transport's opaque state: first argument of every function."""
    PUT = 1
    """`put(state, peer, channel, src, dst, buffer, offset_bytes, nbytes)` -> OK | AGAIN | -Fault.
    Moves `nbytes` (0 allowed: a pure signal) from local `src` into the peer's buffer `buffer` at `offset_bytes`; `dst`
    is that place's address as far as it is known here (mapped, or the peer's own virtual address), else 0. When the
    bytes are there, the peer's arrivals on `channel` grow by one (channel -1: not). What was accepted may stay here
    until PROGRESS or FLUSH is called, so a rank that waits calls PROGRESS of every row."""
    POLL = 2
    """`poll(state, peer, channel)` -> arrivals from `peer` on `channel` since the start of time, or -Fault."""
    GET = 3
    """`get(state, peer, dst, src, nbytes)` -> OK | -Fault. Pulls from the peer's address `src` to local `dst`."""
    PROGRESS = 4
    """`progress(state)` -> number of things that happened (0: idle), or -Fault. Called while waiting."""
    BEGIN = 5
    """`begin(state, sequence, signature, buffers)` -> OK | -Fault. A call starts. `buffers`: address of rows
    (address, nbytes), one a Buffer id of this rank: where arriving bytes may land during this call."""
    FLUSH = 6
    """`flush(state)` -> OK | AGAIN | -Fault. A call ends: everything accepted by `put` has left."""


N_SLOTS: Final = 8
"""Words in a peer's row."""


@dataclass
class Channels:
    """A transport's end of all its connections, as the engine sees them.

    Attributes:
        table: int64[size, N_SLOTS]; row q says how to reach rank q (zeros for self).
        keep: whatever must stay alive while the table is in use.
        block_fds: descriptors to poll (POLLIN) when a wait has nothing to do for long.
    """

    table: npt.NDArray[np.int64]
    keep: list[object]
    block_fds: list[int]
