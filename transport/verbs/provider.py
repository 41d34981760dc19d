"""Owns the C pointers inside pyverbs' objects: found, and verified before compiled code may call through them.

pyverbs hands none out. Cython keeps them in the words of its objects, so those words are searched for one that points
to what a queue pair must look like: its number, its type, and the context, domain and completion queue that its
siblings are known to wrap. All memory is read through a file, which answers a wrong address with an error, not a crash.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gfkernels.transport.verbs import layout as v
from gfkernels.transport.verbs.channels import Functions

Read = Callable[[int, int], bytes]
"""`read(address, nbytes)`; OSError where not all of them are mapped."""

_OBJECT_HEAD_NBYTES: Final = 16  # reference count and type


class ProviderError(Exception):
    """The pointers were not found, or are not what they should be; the text says which."""


@dataclass(frozen=True)
class Pointers:
    """The C objects of one queue pair.

    Attributes:
        qp: `struct ibv_qp *`.
        cq: `struct ibv_cq *`, of both directions.
        context: `struct ibv_context *`.
    """

    qp: int
    cq: int
    context: int


def read_memory(address: int, nbytes: int) -> bytes:
    """This process's memory, OSError where it is not mapped."""
    if not 0 <= address < 1 << 63:
        raise OSError(f"{address:#x} is no address")
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        data = memory.read(nbytes)
    if len(data) != nbytes:
        raise OSError(f"only {len(data)} of {nbytes} bytes at {address:#x} can be read")
    return data


def _words(thing: Any, read: Read) -> list[int]:
    nbytes = type(thing).__basicsize__ - _OBJECT_HEAD_NBYTES
    data = read(id(thing) + _OBJECT_HEAD_NBYTES, nbytes)
    return [word for word in struct.unpack(f"={nbytes // 8}Q", data[: nbytes // 8 * 8]) if word]


def _u64(read: Read, address: int) -> int:
    return int(struct.unpack("=Q", read(address, 8))[0])


def _u32(read: Read, address: int) -> int:
    return int(struct.unpack("=I", read(address, 4))[0])


def find_pointers(qp: Any, cq: Any, pd: Any, context: Any, read: Read = read_memory) -> Pointers:
    """The C objects under pyverbs' objects, where all that can be known of them agrees.

    Args:
        qp: an RC queue pair with `cq` for both directions.
        cq: its completion queue.
        pd: its protection domain.
        context: its device's context.
        read: reads memory.

    Raises:
        ProviderError: no word of `qp` points to such a queue pair, or more than one does; says what failed.
    """
    try:
        known = {name: _words(thing, read) for name, thing in (("context", context), ("pd", pd), ("cq", cq))}
        candidates = dict.fromkeys(_words(qp, read))
    except OSError as error:
        raise ProviderError(f"pyverbs' objects cannot be read: {error}") from error
    found, reasons = [], []
    for word in candidates:
        try:
            if _u32(read, word + v.QP_NUM) != qp.qp_num:
                continue
            found.append(_check(word, known, read))
        except OSError:
            continue
        except ProviderError as error:
            reasons.append(str(error))
    if len(found) == 1:
        return found[0]
    if found:
        raise ProviderError(f"{len(found)} words of the QP object point to a queue pair")
    raise ProviderError("; ".join(reasons) or f"no word of the QP object points to queue pair number {qp.qp_num}")


def _check(qp: int, known: dict[str, list[int]], read: Read) -> Pointers:
    kind = _u32(read, qp + v.QP_TYPE)
    if kind != v.QP_TYPE_RC:
        raise ProviderError(f"the queue pair has type {kind}, expected RC ({v.QP_TYPE_RC})")
    fields = (
        ("context", v.QP_CONTEXT, "context"),
        ("protection domain", v.QP_PD, "pd"),
        ("send queue", v.QP_SEND_CQ, "cq"),
        ("receive queue", v.QP_RECV_CQ, "cq"),
    )
    values = {}
    for name, offset, owner in fields:
        values[name] = _u64(read, qp + offset)
        if values[name] not in known[owner]:
            raise ProviderError(f"the queue pair's {name} is {values[name]:#x}, which pyverbs' object does not wrap")
    cq, context = values["send queue"], values["context"]
    if values["receive queue"] != cq:
        raise ProviderError("the queue pair sends and receives through different completion queues")
    if _u64(read, cq + v.CQ_CONTEXT) != context:
        raise ProviderError("the completion queue belongs to another context than the queue pair")
    return Pointers(qp, cq, context)


def find_functions(context: int, read: Read = read_memory, maps: str | None = None) -> tuple[Functions, str]:
    """The provider's functions in the context's table, and the library that they are in.

    Args:
        context: `struct ibv_context *`, verified.
        read: reads memory.
        maps: what is mapped, as /proc/self/maps has it; None: read now.

    Raises:
        ProviderError: a function is missing, or lies in nothing that is a library's code.
    """
    code = _libraries(Path("/proc/self/maps").read_text() if maps is None else maps)
    addresses = {}
    library = ""
    for name, offset in (
        ("post_send", v.CONTEXT_POST_SEND),
        ("post_recv", v.CONTEXT_POST_RECV),
        ("poll_cq", v.CONTEXT_POLL_CQ),
    ):
        try:
            address = _u64(read, context + offset)
        except OSError as error:
            raise ProviderError(f"the context cannot be read: {error}") from error
        if address == 0:
            raise ProviderError(f"the provider has no {name}")
        place = next((path for start, end, path in code if start <= address < end), None)
        if place is None:
            raise ProviderError(f"the provider's {name} is {address:#x}, where no library has code")
        addresses[name], library = address, place
    return Functions(**addresses), library


def _libraries(maps: str) -> list[tuple[int, int, str]]:
    """(start, end, path) of executable mappings of shared libraries."""
    found = []
    for line in maps.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and "x" in fields[1] and ".so" in fields[5].rpartition("/")[2]:
            start, _, end = fields[0].partition("-")
            found.append((int(start, 16), int(end, 16), fields[5]))
    return found
