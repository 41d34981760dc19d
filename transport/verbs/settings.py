"""Owns what can be set about RDMA: which device, and how queue pairs behave on the wire."""

from __future__ import annotations

from dataclasses import dataclass

from gfkernels.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """How this rank uses RDMA. All ranks should have the same, but for `device`.

    Attributes:
        device: a device (`mlx5_0`), one of its ports (`mlx5_0:1`) or several rails (`mlx5_0,mlx5_1`); None: the one
            that the routes to the peers lead to, else the first that is active.
        gid_index: row of the port's GID table to use; None: found.
        timeout_exponent: an unanswered packet is sent again after 4.096 µs times two to this power (18: 1.1 s).
        retry_count: how often, before the peer counts as lost. 7 is left out: some devices take it for "for ever".
        traffic_class: of RoCE packets: eight bits, DSCP in the upper six.
        service_level: of InfiniBand packets.
        reference: post and poll through pyverbs instead of machine code: slow, for comparison.
        cq_entries: size of completion queues; None: all that can be outstanding. For tests of overruns.
    """

    device: str | None = None
    gid_index: int | None = None
    timeout_exponent: int = 18
    retry_count: int = 6
    traffic_class: int = 0
    service_level: int = 0
    reference: bool = False
    cq_entries: int | None = None

    def __post_init__(self) -> None:
        """Checks the ranges; ConfigError names what is outside."""
        for name, low, high in (
            ("gid_index", 0, 65535),
            ("timeout_exponent", 1, 31),
            ("retry_count", 0, 6),
            ("traffic_class", 0, 255),
            ("service_level", 0, 15),
            ("cq_entries", 1, 1 << 30),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"RDMA setting {name} is {value}, expected {low} to {high}")
