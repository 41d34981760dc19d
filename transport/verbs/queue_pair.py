"""Owns a queue pair's life: made, brought up against its peer's, and moved to the error state."""

from __future__ import annotations

import errno
import secrets
from dataclasses import dataclass
from typing import Any, Final

from gfkernels.errors import ConnectError, UnavailableError
from gfkernels.transport import framed as c
from gfkernels.transport.verbs import words as w
from gfkernels.transport.verbs.compat import error_code
from gfkernels.transport.verbs.device import Device, Owned
from gfkernels.transport.verbs.settings import Settings

_INLINE_STEPS: Final = (c.HEADER_NBYTES + 256, 220, 128, c.HEADER_NBYTES, 0)
"""Bytes that a request may carry itself: cards have limits of their own and say no to more."""
_HOPS: Final = 64
_RNR_RETRY: Final = 6  # of a peer that has no receive posted, which credits rule out; 7 would be for ever
_RNR_TIMER: Final = 12  # 0.64 ms
_MTU_NBYTES: Final = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}


@dataclass(frozen=True)
class Path:
    """Where the other end of a queue pair is.

    Attributes:
        port: number of the own port.
        gid_index: row of the own GID table.
        gid: the peer's GID; None: packets go by LID alone.
        lid: the peer's LID; 0 on Ethernet.
        mtu: enum ibv_mtu, the same at both ends.
    """

    port: int
    gid_index: int
    gid: str | None
    lid: int
    mtu: int

    def __str__(self) -> str:
        """For errors."""
        where = f"GID {self.gid} from row {self.gid_index}" if self.gid else f"LID {self.lid}"
        return f"{where}, MTU {_MTU_NBYTES.get(self.mtu, self.mtu)}"


class QueuePair:
    """An RC queue pair in the state RESET.

    Attributes:
        owned: pyverbs' QP.
        number: by which the peer addresses it.
        psn: number of the first packet it sends: a random one, so that packets of an earlier connection are strangers.
        inline_nbytes: what a request may carry itself.
    """

    def __init__(self, device: Device, cq: Owned) -> None:
        """Makes it, with SEND_DEPTH requests and DEPTH receives.

        Raises:
            UnavailableError: the card makes no more of them.
        """
        self._device = device
        self._verbs = device.verbs
        most = int(device.limits.max_qp_wr)
        if max(w.SEND_DEPTH, w.DEPTH) > most:
            raise UnavailableError(
                f"RDMA device {device.name} has queues of {most} requests, and {max(w.SEND_DEPTH, w.DEPTH)} are needed",
                "Use another device",
            )
        self.owned, self.inline_nbytes = self._create(cq)
        self.number = int(self.owned.thing.qp_num)
        self.psn = secrets.randbits(24)

    def _create(self, cq: Owned) -> tuple[Owned, int]:
        verbs = self._verbs
        for inline in _INLINE_STEPS:
            cap = verbs.QPCap(
                max_send_wr=w.SEND_DEPTH, max_recv_wr=w.DEPTH, max_send_sge=1, max_recv_sge=1, max_inline_data=inline
            )
            attributes = verbs.QPInitAttr(
                qp_type=verbs.enums.IBV_QPT_RC, scq=cq.thing, rcq=cq.thing, cap=cap, sq_sig_all=0
            )
            try:
                return Owned(self._device, verbs.QP(self._device.pd, attributes)), inline
            except verbs.Error as error:
                if inline == _INLINE_STEPS[-1]:
                    raise UnavailableError(
                        f"RDMA device {self._device.name} made no queue pair: {error}",
                        f"It has room for {self._device.limits.max_qp} in all programs together; fewer ranks on this "
                        "host need fewer",
                    ) from error
        raise AssertionError("the last step returns or raises")

    def to_init(self, port: int) -> None:
        """Receives can be posted afterwards."""
        enums = self._verbs.enums
        attributes = self._attributes(enums.IBV_QPS_INIT)
        attributes.port_num = port
        attributes.pkey_index = 0
        attributes.qp_access_flags = self._verbs.access
        mask = enums.IBV_QP_PKEY_INDEX | enums.IBV_QP_PORT | enums.IBV_QP_ACCESS_FLAGS
        self._modify(attributes, mask, f"port {port}")

    def post_receives(self, ident: int, count: int) -> None:
        """Posts receives without memory: messages are written, and only their immediates come this way."""
        verbs = self._verbs
        # pyverbs 44 makes no request without an element, but lets it be taken away.
        request = verbs.RecvWR(wr_id=ident, num_sge=1, sg=[verbs.SGE(0, 0, 0)])
        request.num_sge = 0
        try:
            for _ in range(count):
                self.owned.thing.post_recv(request)
        except verbs.Error as error:
            raise ConnectError(f"RDMA device {self._device.name} takes no receive: {error}") from error

    def to_ready(self, path: Path, number: int, psn: int, settings: Settings) -> None:
        """Connects it with the peer's queue pair, which need not be ready yet.

        Args:
            path: to the peer.
            number: of the peer's queue pair.
            psn: the peer's.
            settings: time-outs and classes of service.
        """
        enums = self._verbs.enums
        there = f"queue pair {number} at {path}"
        attributes = self._attributes(enums.IBV_QPS_RTR)
        attributes.path_mtu = path.mtu
        attributes.dest_qp_num = number
        attributes.rq_psn = psn
        attributes.max_dest_rd_atomic = 1
        attributes.min_rnr_timer = _RNR_TIMER
        attributes.ah_attr = self._handle(path, settings)
        mask = (
            enums.IBV_QP_AV
            | enums.IBV_QP_PATH_MTU
            | enums.IBV_QP_DEST_QPN
            | enums.IBV_QP_RQ_PSN
            | enums.IBV_QP_MAX_DEST_RD_ATOMIC
            | enums.IBV_QP_MIN_RNR_TIMER
        )
        self._modify(attributes, mask, there)
        attributes = self._attributes(enums.IBV_QPS_RTS)
        attributes.sq_psn = self.psn
        attributes.timeout = settings.timeout_exponent
        attributes.retry_cnt = settings.retry_count
        attributes.rnr_retry = _RNR_RETRY
        attributes.max_rd_atomic = 1
        mask = (
            enums.IBV_QP_SQ_PSN
            | enums.IBV_QP_TIMEOUT
            | enums.IBV_QP_RETRY_CNT
            | enums.IBV_QP_RNR_RETRY
            | enums.IBV_QP_MAX_QP_RD_ATOMIC
        )
        self._modify(attributes, mask, there)

    def to_error(self) -> None:
        """Ends it: what is outstanding is flushed, and the peer can reach no memory through it."""
        if self.owned.is_open:
            self._modify(self._attributes(self._verbs.enums.IBV_QPS_ERR), 0, "the error state")

    def _handle(self, path: Path, settings: Settings) -> Any:
        verbs = self._verbs
        route = None
        if path.gid is not None:
            route = verbs.GlobalRoute(
                dgid=verbs.GID(path.gid),
                sgid_index=path.gid_index,
                hop_limit=_HOPS,
                traffic_class=settings.traffic_class,
            )
        return verbs.AHAttr(
            dlid=path.lid, sl=settings.service_level, port_num=path.port, is_global=int(route is not None), gr=route
        )

    def _attributes(self, state: int) -> Any:
        attributes = self._verbs.QPAttr()
        attributes.qp_state = state
        return attributes

    def _modify(self, attributes: Any, mask: int, what: str) -> None:
        try:
            self.owned.thing.modify(attributes, mask | self._verbs.enums.IBV_QP_STATE)
        except self._verbs.Error as error:
            unreachable = error_code(error) in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT)
            remedy = ": no route leads there, or nobody answers; can it be pinged?" if unreachable else ""
            raise ConnectError(
                f"RDMA device {self._device.name} did not move a queue pair towards {what}: {error}{remedy}"
            ) from error
