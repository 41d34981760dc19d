"""Finding C pointers in pyverbs' objects: over imitated memory, in which every single wrong field must be refused."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import pytest

from gfkernels.transport.verbs import layout as v
from gfkernels.transport.verbs.provider import ProviderError, find_functions, find_pointers, read_memory

QP, QP2, CQ, CONTEXT, PD, OTHER = 0x10000, 0x18000, 0x20000, 0x30000, 0x40000, 0x50000
NUMBER = 0x1234
CODE = 0x7F0000001000
MAPS = """\
7f0000000000-7f0000001000 r--p 00000000 08:01 1 /usr/lib/libibverbs/librxe-rdmav34.so
7f0000001000-7f0000004000 r-xp 00001000 08:01 1 /usr/lib/libibverbs/librxe-rdmav34.so
7f0000010000-7f0000014000 r-xp 00000000 00:00 0
7f0000020000-7f0000024000 r-xp 00000000 08:01 2 /usr/bin/python3.11
7f0000030000-7f0000034000 rw-p 00000000 08:01 3 /usr/lib/libother.so.1
"""


class Wrapper:
    """Stands for an object of pyverbs; six words of C."""

    __slots__ = ("a", "b", "c", "d", "e", "f")

    qp_num = NUMBER


class Memory:
    """Words by address, and what the wrappers hold."""

    def __init__(self) -> None:
        self.bytes: dict[int, int] = {}
        self.qp, self.cq, self.pd, self.context = (Wrapper() for _ in range(4))
        self.wrap(self.qp, OTHER, QP)
        self.wrap(self.cq, CQ, 7)
        self.wrap(self.pd, 0, PD)
        self.wrap(self.context, CONTEXT, OTHER)
        self.put_qp(QP)
        self.put64(CQ + v.CQ_CONTEXT, CONTEXT)
        for i, offset in enumerate((v.CONTEXT_POST_SEND, v.CONTEXT_POST_RECV, v.CONTEXT_POLL_CQ)):
            self.put64(CONTEXT + offset, CODE + 64 * i)

    def put_qp(self, at: int) -> None:
        for offset, value in (
            (v.QP_CONTEXT, CONTEXT),
            (v.QP_PD, PD),
            (v.QP_SEND_CQ, CQ),
            (v.QP_RECV_CQ, CQ),
        ):
            self.put64(at + offset, value)
        self.put32(at + v.QP_NUM, NUMBER)
        self.put32(at + v.QP_TYPE, v.QP_TYPE_RC)

    def wrap(self, thing: object, *words: int) -> None:
        for i in range(Wrapper.__basicsize__ // 8 - 2):
            self.put64(id(thing) + 16 + 8 * i, words[i] if i < len(words) else 0)

    def unmap(self, at: int) -> None:
        del self.bytes[at]

    def confuse(self) -> None:
        self.put_qp(QP2)
        self.wrap(self.qp, QP2, QP)

    def put64(self, at: int, value: int) -> None:
        self.bytes.update(enumerate(struct.pack("=Q", value), at))

    def put32(self, at: int, value: int) -> None:
        self.bytes.update(enumerate(struct.pack("=I", value), at))

    def read(self, at: int, nbytes: int) -> bytes:
        try:
            return bytes(self.bytes[at + i] for i in range(nbytes))
        except KeyError as error:
            raise OSError(f"nothing at {error}") from None

    def find(self) -> Any:
        return find_pointers(self.qp, self.cq, self.pd, self.context, self.read)

    def functions(self, maps: str = MAPS) -> Any:
        return find_functions(CONTEXT, self.read, maps)


def test_found() -> None:
    memory = Memory()
    found = memory.find()
    assert (found.qp, found.cq, found.context) == (QP, CQ, CONTEXT)
    functions, library = memory.functions()
    assert (functions.post_send, functions.post_recv, functions.poll_cq) == (CODE, CODE + 64, CODE + 128)
    assert functions.keep is None and library.endswith("librxe-rdmav34.so")


WRONG: dict[str, tuple[Callable[[Memory], None], str]] = {
    "number": (lambda m: m.put32(QP + v.QP_NUM, NUMBER + 1), "no word of the QP object"),
    "type": (lambda m: m.put32(QP + v.QP_TYPE, 3), "type 3, expected RC"),
    "context": (lambda m: m.put64(QP + v.QP_CONTEXT, 0x99), "context is 0x99"),
    "domain": (lambda m: m.put64(QP + v.QP_PD, 0x99), "protection domain is 0x99"),
    "send queue": (lambda m: m.put64(QP + v.QP_SEND_CQ, 0x99), "send queue is 0x99"),
    "receive queue": (lambda m: m.put64(QP + v.QP_RECV_CQ, 0x99), "receive queue is 0x99"),
    "two queues": (lambda m: m.put64(QP + v.QP_RECV_CQ, 7), "different completion queues"),
    "queue of another context": (lambda m: m.put64(CQ + v.CQ_CONTEXT, OTHER), "another context"),
    "queue not mapped": (lambda m: m.unmap(CQ), "no word of the QP object"),
    "object not readable": (lambda m: m.unmap(id(m.pd) + 16), "cannot be read"),
    "two candidates": (lambda m: m.confuse(), "2 words"),
    "nothing": (lambda m: m.wrap(m.qp), "no word of the QP object"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_field_is_refused(name: str) -> None:
    memory = Memory()
    spoil, reason = WRONG[name]
    spoil(memory)
    with pytest.raises(ProviderError, match=reason):
        memory.find()


@pytest.mark.parametrize("offset", [v.CONTEXT_POST_SEND, v.CONTEXT_POST_RECV, v.CONTEXT_POLL_CQ])
@pytest.mark.parametrize(
    ("address", "reason"),
    [
        (0, "has no p"),
        (0x7F0000000010, "no library has code"),  # the library's, not executable
        (0x7F0000010010, "no library has code"),  # executable, of no file
        (0x7F0000020010, "no library has code"),  # a program's
        (0x7F0000030010, "no library has code"),  # data
        (0x7F0000004000, "no library has code"),  # just behind
    ],
)
def test_a_wrong_function_is_refused(offset: int, address: int, reason: str) -> None:
    memory = Memory()
    memory.put64(CONTEXT + offset, address)
    with pytest.raises(ProviderError, match=reason):
        memory.functions()


def test_a_context_that_cannot_be_read() -> None:
    memory = Memory()
    memory.unmap(CONTEXT + v.CONTEXT_POST_RECV)
    with pytest.raises(ProviderError, match="cannot be read"):
        memory.functions()


def test_real_memory() -> None:
    data = ctypes.create_string_buffer(b"some bytes that lie there")
    assert read_memory(ctypes.addressof(data), 10) == b"some bytes"
    for address in (0, 8, -8, 1 << 62, 1 << 63):
        with pytest.raises(OSError):
            read_memory(address, 8)


def test_real_maps_have_libraries() -> None:
    libc = ctypes.CDLL(None)
    address = ctypes.cast(libc.getpid, ctypes.c_void_p).value
    block = (ctypes.c_int64 * 64)()
    for offset in (v.CONTEXT_POST_SEND, v.CONTEXT_POST_RECV, v.CONTEXT_POLL_CQ):
        block[offset // 8] = address or 0
    functions, library = find_functions(ctypes.addressof(block))
    assert functions.poll_cq == address and ".so" in library
