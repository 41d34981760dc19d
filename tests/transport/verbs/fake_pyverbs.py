"""Owns an imitation of pyverbs' objects: records what is done with them, and fails on demand."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any, ClassVar

from gfkernels.transport.verbs.compat import Pyverbs

ENUMS = SimpleNamespace(
    IBV_ACCESS_LOCAL_WRITE=1,
    IBV_ACCESS_REMOTE_WRITE=2,
    IBV_QPT_RC=2,
    IBV_QP_STATE=1,
    IBV_QP_ACCESS_FLAGS=8,
    IBV_QP_PKEY_INDEX=16,
    IBV_QP_PORT=32,
    IBV_QP_AV=128,
    IBV_QP_PATH_MTU=256,
    IBV_QP_TIMEOUT=512,
    IBV_QP_RETRY_CNT=1024,
    IBV_QP_RNR_RETRY=2048,
    IBV_QP_RQ_PSN=4096,
    IBV_QP_MAX_QP_RD_ATOMIC=8192,
    IBV_QP_MIN_RNR_TIMER=32768,
    IBV_QP_SQ_PSN=65536,
    IBV_QP_MAX_DEST_RD_ATOMIC=131072,
    IBV_QP_DEST_QPN=1048576,
    IBV_QPS_INIT=1,
    IBV_QPS_RTR=2,
    IBV_QPS_RTS=3,
    IBV_QPS_ERR=6,
)


class FakeError(Exception):
    """As pyverbs raises it."""

    def __init__(self, text: str, error_code: int = -1) -> None:
        super().__init__(text)
        self.error_code = error_code


class Bag:
    """An object with the attributes it is given."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Card:
    """What the objects of one test share.

    Attributes:
        closed: names of the classes of closed objects, in order.
        fail: by class: the errno with which the next one fails to be made.
        modified: (state, mask, attributes) of every change of a queue pair.
        most_inline: a queue pair that is to have more is refused.
    """

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.fail: dict[str, int] = {}
        self.modified: list[tuple[int, int, dict[str, Any]]] = []
        self.most_inline = 128
        self.limits = SimpleNamespace(max_cqe=1000, max_qp_wr=500, max_qp=10, max_mr=20)
        self.events: list[int] = []

    def verbs(self, *, copies_on_fork: bool = True) -> Pyverbs:
        """The parts of pyverbs, over this card."""
        card = self

        class Thing:
            name: ClassVar[str]

            def __init__(self, *args: Any, **options: Any) -> None:
                self.args, self.options, self.is_closed = args, options, False
                code = card.fail.pop(type(self).__name__, 0)
                if code:
                    raise FakeError(f"no {type(self).__name__}: {os.strerror(code)}", code)

            def close(self) -> None:
                assert not self.is_closed, f"{type(self).__name__} was closed twice"
                self.is_closed = True
                card.closed.append(type(self).__name__)

        class Context(Thing):
            def query_device(self) -> Any:
                return card.limits

            def get_async_event(self) -> Any:
                if not card.events:
                    raise FakeError("nothing", errno.EAGAIN)
                return Bag(event_type=card.events.pop(0), ack=lambda: None)

        class PD(Thing):
            pass

        class MR(Thing):
            lkey, rkey = 0x11, 0x22

        class CQ(Thing):
            completions: list[Any]

            def poll(self, most: int) -> tuple[int, list[Any]]:
                taken = getattr(self, "completions", [])[:most]
                self.completions = getattr(self, "completions", [])[most:]
                return len(taken), taken

        class QP(Thing):
            qp_num = 0x77

            def __init__(self, pd: Any, attributes: Any) -> None:
                super().__init__(pd, attributes)
                self.sent: list[dict[str, Any]] = []
                self.received: list[tuple[int, int]] = []
                if attributes.cap.max_inline_data > card.most_inline:
                    raise FakeError("too much inline", errno.EINVAL)

            def modify(self, attributes: Any, mask: int) -> None:
                code = card.fail.pop("modify", 0)
                if code:
                    raise FakeError("not modified", code)
                card.modified.append((attributes.qp_state, mask, dict(vars(attributes))))

            def post_send(self, wr: Any) -> None:
                self._fail_at(len(self.sent))
                record = dict(vars(wr))
                record["sge"] = (wr.sg_list.addr, wr.sg_list.length, wr.sg_list.lkey)
                self.sent.append(record)

            def post_recv(self, wr: Any) -> None:
                self._fail_at(len(self.received))
                self.received.append((wr.wr_id, wr.num_sge))

            def _fail_at(self, number: int) -> None:
                if card.fail.get("post") == number:
                    raise FakeError("queue is full", errno.ENOMEM)

        class SGE(Bag):
            def __init__(self, addr: int, length: int, lkey: int) -> None:
                super().__init__(addr=addr, length=length, lkey=lkey)

        class SendWR(Bag):
            def set_wr_rdma(self, rkey: int, addr: int) -> None:
                self.__dict__.update(rkey=rkey, remote=addr)

        class RecvWR(Bag):
            wr_id: int
            num_sge: int

        return Pyverbs(
            enums=ENUMS,
            Error=FakeError,
            Context=Context,
            PD=PD,
            MR=MR,
            DmaBufMR=None,
            CQ=CQ,
            QP=QP,
            QPCap=Bag,
            QPInitAttr=Bag,
            QPAttr=Bag,
            AHAttr=Bag,
            GlobalRoute=Bag,
            GID=str,
            SGE=SGE,
            SendWR=SendWR,
            RecvWR=RecvWR,
            copies_on_fork=copies_on_fork,
        )
