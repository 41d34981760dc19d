"""Owns the limit on pinned memory: whether so much more may be registered, and what lifts the limit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CAP_IPC_LOCK: Final = 14

REMEDY: Final = (
    "Raise it: in /etc/security/limits.d/rdma.conf the lines '* soft memlock unlimited' and '* hard memlock unlimited' "
    "and a new login; LimitMEMLOCK=infinity for a systemd unit, slurmd's among them (Slurm hands its own limit on, or "
    "PropagateResourceLimitsExcept=MEMLOCK); docker run --ulimit memlock=-1 --cap-add=IPC_LOCK"
)


@dataclass(frozen=True)
class Memlock:
    """What this process may pin.

    Attributes:
        limit_nbytes: the soft limit; None: no limit.
        pinned_nbytes: pinned so far.
        exempt: the limit does not apply to this process (CAP_IPC_LOCK, which root has).
    """

    limit_nbytes: int | None
    pinned_nbytes: int
    exempt: bool

    def shortage(self, nbytes: int) -> str | None:
        """Why `nbytes` more cannot be pinned, None where they can, as far as is known before it is tried."""
        if self.exempt or self.limit_nbytes is None or self.pinned_nbytes + nbytes <= self.limit_nbytes:
            return None
        return (
            f"{nbytes:,} bytes are to be registered with the card and {self.pinned_nbytes:,} are already pinned, but "
            f"the limit of locked memory (ulimit -l, RLIMIT_MEMLOCK) is {self.limit_nbytes:,} bytes"
        )


def memlock(status: Path = Path("/proc/self/status")) -> Memlock:
    """The limit as it is now.

    Args:
        status: what the kernel says of this process.
    """
    import resource  # which Windows does not have, where this module is imported as well

    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    fields = {}
    try:
        for line in status.read_text().splitlines():
            name, _, value = line.partition(":")
            fields[name] = value.split()
    except OSError:
        pass
    capabilities = int(fields.get("CapEff", ["0"])[0], 16)
    return Memlock(
        limit_nbytes=None if soft == resource.RLIM_INFINITY else soft,
        # Registered memory counts as pinned, mlock'ed as locked; both are held against the limit, each for itself.
        pinned_nbytes=int(fields.get("VmPin", ["0"])[0]) * 1024,
        exempt=bool(capabilities >> _CAP_IPC_LOCK & 1),
    )
