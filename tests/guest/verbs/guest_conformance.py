"""In the guest: the public conformance suite over real queue pairs, posted to by machine code and through pyverbs."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace

from guest_rig import QUICK

from gfkernels.transport.conformance import DRIVERS, Subject, checks_for
from gfkernels.transport.table import Channels
from gfkernels.transport.verbs.channels import VerbsChannels
from gfkernels.transport.verbs.connect import connect
from gfkernels.transport.verbs.loopback import in_threads
from gfkernels.transport.verbs.rail import close_rails, open_rails
from gfkernels.transport.verbs.settings import Settings

TOO_LARGE = frozenset({"offsets_above_2_31", "counts_above_2_32"})
"""Need more memory than the guest has; the same compiled code does them on the host, over an imitation."""


class Meshes:
    """Makes meshes of ranks in this process, and closes them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def mesh(self, size: int) -> Sequence[Channels]:
        """All ranks, connected."""

        def part(rank: int, exchange: object) -> VerbsChannels:
            rails = open_rails(self._settings)
            ends = connect(rank, size, exchange=exchange, rails=rails, settings=self._settings)  # type: ignore[arg-type]
            release = ends.release

            def close() -> None:
                assert release is not None
                release()
                close_rails(rails)

            ends.release = close
            return ends

        return in_threads(part, size)

    @staticmethod
    def leave(ends: Channels) -> None:
        """In order."""
        assert isinstance(ends, VerbsChannels)
        ends.close()


SLOW_WAY = frozenset(
    {
        "signals_are_counted",
        "sizes_and_offsets",
        "signals_do_not_overtake",
        "both_directions_full",
        "later_call_is_held_back",
        "signatures_are_compared",
        "leaving_is_no_fault_until_the_next_call",
    }
)
"""Of the pyverbs path: the compiled halves are the same, and this is about what lies under them."""


def main() -> int:
    """Runs the checks named on the command line after the way to post, or all that make sense; 0 where they pass."""
    way, *wanted = sys.argv[1:]
    reference = {"machine-code": False, "pyverbs": True}[way]
    # No `crash`: a card says nothing of a peer that died while nothing was sent to it. The engine watches it.
    meshes = Meshes(replace(QUICK, reference=reference))
    subject = Subject(f"verbs-{way}", meshes.mesh, leave=meshes.leave, streamed=False)
    names = [check.__name__ for check in checks_for(subject)]
    chosen = set(wanted) or ({*names} - TOO_LARGE if not reference else {*names} & SLOW_WAY)
    failed = 0
    for check in checks_for(subject):
        if check.__name__ not in chosen:
            continue
        start = time.monotonic()
        try:
            check(subject, DRIVERS["compiled"])
            verdict = "ok"
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            verdict = f"FAILED ({error})"
            failed += 1
        print(f"{way}: {check.__name__}: {verdict}, {time.monotonic() - start:.1f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
