"""The pyverbs path: what it reads of C work requests, what it writes into C completions, and how it fails."""

from __future__ import annotations

import ctypes
import errno
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_pyverbs import Bag, Card

from gfkernels.transport.verbs import layout as v
from gfkernels.transport.verbs import reference
from gfkernels.transport.verbs.reference import Reference

_POST = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_POLL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_int64)


class Rig:
    """A queue pair and a completion queue behind C functions, and room for C structs."""

    def __init__(self) -> None:
        self.card = Card()
        verbs = self.card.verbs()
        self.qp = verbs.QP(None, Bag(cap=Bag(max_inline_data=0)))
        self.cq = verbs.CQ()
        self.reference = Reference(verbs)
        self.qp_number = self.reference.add_qp(self.qp)
        self.cq_number = self.reference.add_cq(self.cq)
        self.memory = np.zeros(4096, np.uint8)
        self.bad = ctypes.c_int64(-1)
        functions = self.reference.functions
        self.send, self.recv = _POST(functions.post_send), _POST(functions.post_recv)
        self.poll = _POLL(functions.poll_cq)

    def at(self, offset: int) -> int:
        return int(self.memory.ctypes.data) + offset

    def put(self, offset: int, value: int, nbytes: int = 8) -> None:
        self.memory[offset : offset + nbytes] = np.frombuffer(value.to_bytes(nbytes, "little"), np.uint8)

    def build_send(self, at: int, following: int, ident: int, num_sge: int) -> None:
        """Field by field, where the layout has them."""
        self.put(at + v.WR_ID, ident)
        self.put(at + v.WR_NEXT, self.at(following) if following else 0)
        self.put(at + v.WR_SG_LIST, self.at(at + 256))
        self.put(at + v.WR_NUM_SGE, num_sge, 4)
        self.put(at + v.WR_OPCODE, v.OPCODE_WRITE_WITH_IMM, 4)
        self.put(at + v.WR_SEND_FLAGS, v.SEND_SIGNALED | v.SEND_INLINE, 4)
        self.put(at + v.WR_IMM, 0xDEADBEEF, 4)
        self.put(at + v.WR_REMOTE_ADDR, (1 << 63) + ident)
        self.put(at + v.WR_RKEY, 0xFFFFFFFE, 4)
        self.put(at + 256 + v.SGE_ADDR, 0x7FFF_0000_1000)
        self.put(at + 256 + v.SGE_LENGTH, 0xFFFFFFF0, 4)
        self.put(at + 256 + v.SGE_LKEY, 0x80000001, 4)

    def build_recv(self, at: int, following: int, ident: int, num_sge: int = 0) -> None:
        self.put(at + v.WR_ID, ident)
        self.put(at + v.WR_NEXT, self.at(following) if following else 0)
        self.put(at + v.WR_NUM_SGE, num_sge, 4)


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A fresh one."""
    yield Rig()


def test_structs_are_those_of_the_layout() -> None:
    assert reference.WC.size == v.WC_NBYTES and reference.SGE.size == v.SGE_NBYTES
    assert reference.SEND_WR.size == v.WR_RKEY + 4 and reference.RECV_WR.size == v.WR_NUM_SGE + 4


def test_a_list_of_sends(rig: Rig) -> None:
    rig.build_send(0, 512, ident=(1 << 48) | 5, num_sge=1)
    rig.build_send(512, 0, ident=6, num_sge=0)
    assert rig.send(rig.qp_number, rig.at(0), ctypes.addressof(rig.bad)) == 0
    first, second = rig.qp.sent
    assert (first["wr_id"], second["wr_id"]) == ((1 << 48) | 5, 6)
    assert (first["num_sge"], second["num_sge"]) == (1, 0)
    assert first["sge"] == (0x7FFF_0000_1000, 0xFFFFFFF0, 0x80000001)
    assert (first["opcode"], first["send_flags"]) == (v.OPCODE_WRITE_WITH_IMM, v.SEND_SIGNALED | v.SEND_INLINE)
    assert (first["imm_data"], first["rkey"], first["remote"]) == (0xDEADBEEF, 0xFFFFFFFE, (1 << 63) + (1 << 48) + 5)
    assert rig.bad.value == -1


def test_a_list_of_receives(rig: Rig) -> None:
    for i in range(3):
        rig.build_recv(64 * i, 64 * (i + 1) if i < 2 else 0, ident=(1 << 47) | (9 << 48) | i)
    assert rig.recv(rig.qp_number, rig.at(0), ctypes.addressof(rig.bad)) == 0
    assert rig.qp.received == [((1 << 47) | (9 << 48) | i, 0) for i in range(3)]


def test_completions(rig: Rig) -> None:
    rig.cq.completions = [
        Bag(
            wr_id=(1 << 63) | i,
            status=i,
            opcode=129,
            vendor_err=0x88,
            byte_len=77,
            imm_data=0xFEDCBA98,
            qp_num=0x1234,
        )
        for i in range(5)
    ]
    assert rig.poll(rig.cq_number, 3, rig.at(0)) == 3
    assert rig.poll(rig.cq_number, 16, rig.at(3 * v.WC_NBYTES)) == 2
    assert rig.poll(rig.cq_number, 16, rig.at(0)) == 0
    for i in range(5):
        wc = rig.memory[i * v.WC_NBYTES : (i + 1) * v.WC_NBYTES]
        words = wc[8:].view(np.uint32)
        assert wc[:8].view(np.uint64)[0] == (1 << 63) | i
        got = [int(words[(offset - 8) // 4]) for offset in (v.WC_STATUS, v.WC_OPCODE, v.WC_VENDOR_ERR, v.WC_BYTE_LEN)]
        assert got == [i, 129, 0x88, 77]
        assert [int(words[(offset - 8) // 4]) for offset in (v.WC_IMM, v.WC_QP_NUM)] == [0xFEDCBA98, 0x1234]


def test_a_full_queue(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.card.fail["post"] = 1
    rig.build_send(0, 512, 1, 0)
    rig.build_send(512, 0, 2, 0)
    with caplog.at_level(logging.ERROR, "gfkernels"):
        assert rig.send(rig.qp_number, rig.at(0), ctypes.addressof(rig.bad)) == errno.ENOMEM
    assert rig.bad.value == rig.at(512) and "queue is full" in caplog.text
    rig.build_recv(0, 512, 1)
    rig.build_recv(512, 0, 2)
    assert rig.recv(rig.qp_number, rig.at(0), 0) == errno.ENOMEM


@pytest.mark.parametrize("what", ["send", "recv", "poll"])
def test_an_exception_is_an_error_and_not_silence(rig: Rig, what: str, caplog: pytest.LogCaptureFixture) -> None:
    rig.reference.forget()
    calls: dict[str, Any] = {
        "send": lambda: rig.send(rig.qp_number, rig.at(0), ctypes.addressof(rig.bad)),
        "recv": lambda: rig.recv(rig.qp_number, rig.at(0), ctypes.addressof(rig.bad)),
        "poll": lambda: rig.poll(rig.cq_number, 1, rig.at(0)),
    }
    with caplog.at_level(logging.ERROR, "gfkernels"):
        assert calls[what]() == (-1 if what == "poll" else errno.EIO)
    assert "IndexError" in caplog.text


def test_what_it_does_not_carry(rig: Rig) -> None:
    rig.build_send(0, 0, 1, num_sge=2)
    rig.build_recv(512, 0, 1, num_sge=1)
    assert rig.send(rig.qp_number, rig.at(0), 0) == errno.EIO
    assert rig.recv(rig.qp_number, rig.at(512), 0) == errno.EIO
    assert rig.qp.sent == [] and rig.qp.received == []
