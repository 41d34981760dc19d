"""Owns the slow way to post and poll: C callbacks that carry work requests to pyverbs and completions back.

It runs the same compiled data path as the fast way, with the interpreter in each call: for comparison, and where the
provider's functions cannot be found. Requests are posted one by one.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from dataclasses import dataclass
from typing import Any, Final

from gfkernels.trace import log
from gfkernels.transport.verbs import layout as v
from gfkernels.transport.verbs.channels import Functions
from gfkernels.transport.verbs.compat import Pyverbs, error_code

_POST = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_POLL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_int64)

# The structs as `layout` has them; tests compare.
SEND_WR: Final = struct.Struct("=QQQiiIIQI")  # id, next, sg_list, num_sge, opcode, flags, imm, address, rkey
RECV_WR: Final = struct.Struct("=QQQi")  # id, next, sg_list, num_sge
SGE: Final = struct.Struct("=QII")  # address, length, lkey
WC: Final = struct.Struct("=QiiIIII16x")  # id, status, opcode, vendor_err, byte_len, imm, qp_num


@dataclass(frozen=True)
class _Pair:
    """A queue pair with requests to use again and again: pyverbs never frees them."""

    qp: Any
    send: Any
    sge: Any
    recv: Any


def _at(form: struct.Struct, address: int) -> tuple[Any, ...]:
    return form.unpack(ctypes.string_at(address, form.size))


class Reference:
    """The functions, and the queue pairs and completion queues that they act on, by number.

    Attributes:
        functions: to be called with those numbers in place of pointers. One thread at a time posts to a queue pair.
    """

    def __init__(self, verbs: Pyverbs) -> None:
        self._verbs = verbs
        self._pairs: list[_Pair] = []
        self._queues: list[Any] = []
        callbacks = (_POST(self._post_send), _POST(self._post_recv), _POLL(self._poll_cq))
        send, recv, poll = (int(ctypes.cast(callback, ctypes.c_void_p).value or 0) for callback in callbacks)
        self.functions = Functions(send, recv, poll, keep=callbacks)

    def add_qp(self, qp: Any) -> int:
        """The number of a queue pair of pyverbs."""
        verbs = self._verbs
        sge = verbs.SGE(0, 0, 0)
        send = verbs.SendWR(num_sge=1, sg=[sge])
        send.sg_list = sge  # by reference from here on
        recv = verbs.RecvWR(num_sge=1, sg=[sge])
        recv.num_sge = 0
        self._pairs.append(_Pair(qp, send, sge, recv))
        return len(self._pairs) - 1

    def add_cq(self, cq: Any) -> int:
        """The number of a completion queue of pyverbs."""
        self._queues.append(cq)
        return len(self._queues) - 1

    def forget(self) -> None:
        """Lets go of all objects; a call afterwards answers with an error."""
        self._pairs, self._queues = [], []

    def _post_send(self, number: int, wr: int, bad: int) -> int:
        try:
            pair = self._pairs[number]
            send, sge = pair.send, pair.sge
            while wr:
                ident, following, sg_list, num_sge, opcode, flags, imm, address, rkey = _at(SEND_WR, wr)
                if num_sge > 1:
                    raise ValueError(f"{num_sge} scatter elements, expected at most 1")
                if num_sge:
                    sge.addr, sge.length, sge.lkey = _at(SGE, sg_list)
                send.wr_id, send.opcode, send.send_flags, send.imm_data = ident, opcode, flags, imm
                send.num_sge = num_sge
                send.set_wr_rdma(rkey, address)
                pair.qp.post_send(send)
                wr = following
            return 0
        except Exception as error:
            return _refuse("posting a send", error, wr, bad)

    def _post_recv(self, number: int, wr: int, bad: int) -> int:
        try:
            pair = self._pairs[number]
            while wr:
                ident, following, _, num_sge = _at(RECV_WR, wr)
                if num_sge:
                    raise ValueError(f"a receive with {num_sge} scatter elements, expected none")
                pair.recv.wr_id = ident
                pair.qp.post_recv(pair.recv)
                wr = following
            return 0
        except Exception as error:
            return _refuse("posting a receive", error, wr, bad)

    def _poll_cq(self, number: int, most: int, wc: int) -> int:
        try:
            n, completions = self._queues[number].poll(most)
            for i, done in enumerate(completions):
                record = WC.pack(
                    done.wr_id, done.status, done.opcode, done.vendor_err, done.byte_len, done.imm_data, done.qp_num
                )
                ctypes.memmove(wc + i * v.WC_NBYTES, record, v.WC_NBYTES)
            return int(n)
        except Exception as error:
            log.error("RDMA through pyverbs: polling failed: %s: %s", type(error).__name__, error)
            return -1


def _refuse(what: str, error: Exception, wr: int, bad: int) -> int:
    """The errno for an exception: C code is above us, where none can be raised."""
    log.error("RDMA through pyverbs: %s failed: %s: %s", what, type(error).__name__, error)
    if bad:
        ctypes.c_int64.from_address(bad).value = wr
    return error_code(error) or errno.EIO
