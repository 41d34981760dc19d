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
    NEED_PLAN = 10
    """All ranks have entered and KIND is the common memory kind, whose variant is not built yet: build, then resume."""


class Ctx(IntEnum):
    """Words of a communicator's context. "Address of int64[n]" means: of memory that lives as long as the context."""

    RANK = 0
    SIZE = 1
    SEQUENCE = 2
    """Calls started so far; the running call's number."""
    ATTEMPT = 3
    """How often call number SEQUENCE + 1 was refused on some rank before it began (0 nearly always)."""
    LOCK = 4
    """An `Owner`."""
    REFUSE = 5
    """Not 0: every call is refused at once (broken, closed, forked)."""
    PENDING = 6
    """Asynchronous calls queued or running."""
    PROGRAM = 7
    """The running call's program."""
    PHASE = 8
    STEPS = 9
    SPANS = 10
    N_LANES = 11
    EXPECTS = 12
    PCS = 13
    """Address of int64[MAX_LANES]: each lane's next row; a finished lane is at its end."""
    ENDS = 14
    """Address of int64[MAX_LANES]."""
    NEXT_PEERS = 15
    """Address of int64[MAX_LANES]: where a row that addresses everyone goes on."""
    BUFFERS = 16
    """Address of int64[size][N_COLUMNS]: where each rank's buffers lie in the running call, as far as known here."""
    N_COLUMNS = 17
    PLACES = 18
    """Address of int64[2][size][N_BUFFERS]: BUFFERS of calls over one array, by the call's parity."""
    CHANNELS = 19
    """Address of the transport's table int64[size][N_SLOTS]."""
    CMA_CHANNELS = 20
    """Address of the table that moves payload when the common kind is cross-memory attach (0: not possible)."""
    TABLE = 21
    """Address of the table that moves payload in the running call."""
    HAS_CALLS = 22
    """1: the transport has BEGIN, PROGRESS or FLUSH."""
    BASES = 23
    """Address of int64[size][N_CHANNELS]: arrivals of all earlier calls."""
    POINTERS = 24
    """Address of a COMBINE's addresses."""
    COUNTS = 25
    """Address of a COMBINE's five counts."""
    HEADERS = 26
    """Address of int64[size]: every rank's header areas as mapped here."""
    SHIFTS = 27
    """Address of int64[size]: what turns an address in a rank's arena, as that rank sees it, into ours."""
    ARENA = 28
    ARENA_NBYTES = 29
    CMA_OK = 30
    """1: ordinary memory may be reached by cross-memory attach."""
    BEST_KIND = 31
    """The best `Kind` that the configuration allows: an explicit transport never uses a better one."""
    ABORT = 32
    """Address of this rank's abort word."""
    FDS = 33
    """Address of pollfd[N_FDS]; the first N_EVENT_FDS end a wait, the others only wake it."""
    N_FDS = 34
    N_EVENT_FDS = 35
    SPIN_ROUNDS = 36
    """Idle rounds that spin before yielding."""
    TIMESPEC = 37
    SLICE_NS = 38
    IDLE = 39
    """Idle rounds since something moved."""
    IDLE_SINCE_NS = 40
    LAST_POLL_NS = 41
    SLICE_SINCE_NS = 42
    EVENT = 43
    """1: a watched descriptor was seen readable, and the lanes get one more round before the wait ends."""
    MOVED = 44
    """1: something moved in this slice."""
    FAULT = 45
    PEER = 46
    KIND = 47
    """The common memory kind that ENTER found for the running call."""
    OWN_KIND = 48
    ENTERED = 49
    """Next peer whose header ENTER still waits for."""
    SEQUENCE_WORD = 50
    """What the running call's header carries: SEQUENCE and ATTEMPT in one."""
    LANDINGS = 51
    """Address of int64[2][N_BUFFERS][2] (address, nbytes): where a transport may put arriving bytes; the second half,
    all zeros, is for peers from which none come."""
    N_CALLS = 53
    """Calls finished."""
    STARTED_NS = 55
    """When the running call began; only for calls without ENTER."""
    HANDOVER = 54
    """1: another thread wants to run the queue; whoever runs it returns at its next idle round."""
    STREAMED_ROWS = 56
    """How many more rows that fill STAGE go past the caches, as this rank found, before it tries through them again.
    Not positive: none; -1: the last row that went through the caches was slow."""
    STAGES = 57
    """Address of int64[size]: where every rank's STAGE begins, as far as known here."""
    STREAMS = 58
    """1: a rank has found that the running call's rows should fill STAGE past the caches."""
    RECENT = 59
    """The first of N_RECENT words: programs of the last calls without ENTER, by sequence number modulo N_RECENT."""


class Owner(IntEnum):
    """Who is inside the engine."""

    NOBODY = 0
    CALLER = 1
    """A thread in a blocking call."""
    QUEUE = 2
    """Whoever is running the queue of asynchronous calls."""


ATTEMPT_BITS: Final = 16
N_RECENT: Final = 16
N_CTX_WORDS: Final = int(Ctx.RECENT) + N_RECENT
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
    """Words of a program: a collective on arrays of one size, free of addresses of arrays."""

    SIGNATURE = 0
    """Equal on all ranks, or they are not in the same call."""
    CODE = 1
    """collective, op, dtype and wire packed into one word, for tables of mismatches."""
    COUNT = 2
    PLAN_HASH = 3
    HAS_ENTER = 4
    USES_ARRAYS = 5
    """1: peers reach into X or OUT, so the memory kinds matter."""
    N_ARRAYS = 6
    KERNELS = 7
    """Address of int64[N_ARRAYS][N_KERN_WORDS]."""
    PRE_STEPS = 8
    N_PRE = 9
    PRE_SPANS = 10
    X_NBYTES = 11
    OUT_NBYTES = 12
    SCRATCH = 13
    """Address of the private scratch buffer."""
    SCRATCH_NBYTES = 14
    PLACES = 15
    """Address of int64[2][size][N_COLUMNS] where the call is over many arrays; 0: the context's."""
    N_COLUMNS = 16
    ADDRESSES = 17
    """Address of int64[N_ARRAYS - 1]: arrays from the second on."""
    NBYTES = 18
    """Address of int64[N_ARRAYS - 1]: their sizes."""
    DESCRIPTOR = 19
    """id of the numpy dtype that the fast path takes; 0: no fast path."""
    VARIANTS = 20
    """Three groups of `Variant` words, indexed by Kind."""


class Variant(IntEnum):
    """Words of a program's variant."""

    STEPS = 0
    SPANS = 1
    N_LANES = 2
    LANE_STARTS = 3
    EXPECTS = 4
    """Address of int64[size][N_CHANNELS], or 0 when the variant uses no signals."""
    PRESENT = 5
    WINDOW_NBYTES = 6
    """In call s the plan's STAGE is the window number s % N_WINDOWS of so many bytes."""
    N_WINDOWS = 7


N_VARIANT_WORDS: Final = 8
N_PROG_WORDS: Final = 20 + 3 * N_VARIANT_WORDS


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
    """A `Kind`, and bit KIND_BITS where this rank fills STAGE past the caches."""
    X = 3
    OUT = 4
    CODE = 5
    COUNT = 6
    PLAN_HASH = 7
    MORE = 8


KIND_BITS: Final = 8
HEADER_NBYTES: Final = 64 * 1024
"""Bytes of one header area: room for a call over `MAX_ARRAYS` arrays; only touched pages take memory."""
MAX_ARRAYS: Final = HEADER_NBYTES // 8 - 16
