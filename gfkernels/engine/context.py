"""Owns the words that Python and the compiled engine share: a communicator's context, a call's program, exit codes."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class Code(IntEnum):
    """How a stretch of the engine ended."""

    DONE = 0
    SLICE = 1
    """The time slice is over and the call is not: serve signals, then resume."""
    EVENT = 2
    """A watched descriptor is readable and nothing moves: a peer died or the control connection has news."""
    ABORTED = 3
    """The abort word of this rank is set."""
    MISMATCH = 4
    """Another rank asked for something else; PEER tells who."""
    FAULT = 5
    """A transport function failed; FAULT and PEER tell how and for whom."""
    NOT_FAST = 6
    """The array cannot take the fast path; nothing was done."""
    QUEUED = 7
    """Asynchronous calls are pending; nothing was done."""
    BUSY = 8
    """Another thread is inside the engine; nothing was done."""
    REFUSED = 9
    """The communicator is broken, closed, or was inherited through fork; nothing was done."""


class Ctx(IntEnum):
    """Words of a communicator's context."""

    RANK = 0
    SIZE = 1
    SEQUENCE = 2
    """Calls started so far; the running call's number."""
    LOCK = 3
    """0 free, 1 held."""
    REFUSE = 4
    """Not 0: every call is refused at once (broken, closed, forked)."""
    PENDING = 5
    """Asynchronous calls queued or running."""
    PROGRAM = 6
    """The running call's program; 0: none."""
    PHASE = 7
    LANES_LEFT = 8
    STEPS = 9
    SPANS = 10
    N_LANES = 11
    EXPECTS = 12
    PCS = 13
    """Address of int64[MAX_LANES]: each lane's next row; a finished lane is at its end."""
    ENDS = 14
    """Address of int64[MAX_LANES]."""
    BUFFERS = 15
    """Address of int64[size][N_COLUMNS]: where each rank's buffers lie, as far as known here."""
    N_COLUMNS = 16
    CHANNELS = 17
    """Address of the staged/mapped table int64[size][N_SLOTS]."""
    CMA_CHANNELS = 18
    """Address of the table used when the common path is cross-memory attach (0: not possible)."""
    TABLE = 19
    """Address of the table in use by the running call."""
    BASES = 20
    """Address of int64[size][N_CHANNELS]: arrivals of all earlier calls."""
    POINTERS = 21
    """Scratch for a COMBINE's addresses."""
    COUNTS = 22
    HEADERS = 23
    """Address of int64[size]: every rank's header area as mapped here (0: this group has no ENTER)."""
    ARENA_BASES = 24
    """Address of int64[size]: every rank's arena as mapped here."""
    ARENA_NBYTES = 25
    ABORT = 26
    """Address of this rank's abort word."""
    FDS = 27
    """Address of pollfd[N_FDS]; the first N_EVENT_FDS end a wait, the others only wake it."""
    N_FDS = 28
    N_EVENT_FDS = 29
    SPIN = 30
    """Idle rounds that spin before yielding."""
    TIMESPEC = 31
    SLICE_NS = 32
    NOW_NS = 33
    IDLE = 34
    IDLE_SINCE_NS = 35
    LAST_POLL_NS = 36
    SLICE_START_NS = 37
    FAULT = 38
    PEER = 39
    EVENT_FD = 40
    """Index of the descriptor that ended the wait."""
    KIND = 41
    """The common memory kind that ENTER found for the running call."""
    STAGE = 42
    """Own INLINE areas' base (parity copies) ..."""
    INLINE_NBYTES = 43
    INLINES = 44
    """Address of int64[size]: every rank's INLINE area as mapped here."""
    CMA_OK = 45
    """1: ordinary memory may be reached by cross-memory attach."""
    IOV = 46
    """Landing table for BEGIN: int64[N_BUFFERS][2] (address, nbytes)."""
    ENTERED = 47
    """Next peer whose header ENTER still waits for."""
    STEPS_RUN = 48
    """Rows executed so far, all calls: for tests and doctor."""


N_CTX_WORDS: Final = 64
MAX_LANES: Final = 64


class Phase(IntEnum):
    """Where in a call the engine stands."""

    IDLE = 0
    ENTER = 1
    BODY = 2
    FLUSH = 3


class Kind(IntEnum):
    """How a rank's arrays can be reached by its same-host peers, worst first; a call takes the worst of all ranks'."""

    STAGED = 0
    CMA = 1
    REGISTERED = 2


class Prog(IntEnum):
    """Words of a program."""

    SIGNATURE = 0
    CODE = 1
    """collective, op, dtype and wire packed into one word, for tables of mismatches."""
    COUNT = 2
    PLAN_HASH = 3
    HAS_ENTER = 4
    USES_ARRAYS = 5
    """1: peers reach into X/OUT, so their memory kind matters."""
    N_ARRAYS = 6
    KERNELS = 7
    """Address of int64[n_arrays][Kern]."""
    PRE_STEPS = 8
    N_PRE = 9
    PRE_SPANS = 10
    NBYTES_X = 11
    NBYTES_OUT = 12
    SCRATCH = 13
    """Address of the private scratch buffer."""
    VARIANTS = 16
    """Three groups of `Variant` words, indexed by Kind."""


class Variant(IntEnum):
    """Words of a program's variant."""

    STEPS = 0
    SPANS = 1
    N_LANES = 2
    LANE_STARTS = 3
    EXPECTS = 4
    """Address of int64[size][N_CHANNELS], or 0 when the variant uses no signals."""
    USE_CMA = 5
    PRESENT = 6


N_VARIANT_WORDS: Final = 8
N_PROG_WORDS: Final = 16 + 3 * N_VARIANT_WORDS


class Kern(IntEnum):
    """Words of a program's kernel row, one an array."""

    COMBINE = 0
    ITEMSIZE = 1
    WIRE_ITEMSIZE = 2
    ARGS = 3


N_KERN_WORDS: Final = 4


class Header(IntEnum):
    """Words of a rank's header, one area per call parity; addresses of a call over many arrays follow."""

    SEQUENCE = 0
    SIGNATURE = 1
    KIND = 2
    X = 3
    OUT = 4
    CODE = 5
    COUNT = 6
    PLAN_HASH = 7
    MORE = 8


HEADER_NBYTES: Final = 64 * 1024
"""Bytes of one header area: room for a call over `MAX_ARRAYS` arrays; only touched pages take memory."""
MAX_ARRAYS: Final = HEADER_NBYTES // 8 - 16
