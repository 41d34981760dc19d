"""For tests of programs that use gfkernels: real ranks on this host, and the conformance suite for transports.

    from gfkernels.testing import run_ranks

    def total(start):  # at the top level of a module: every rank imports it
        x = np.full(10, start + gf.init().rank)
        return float(gf.allreduce(x)[0])

    def test_total():
        assert run_ranks(3, total, args=(1,)) == [6.0] * 3

`gfkernels.testing.conformance` checks a transport of your own; it compiles as it is imported.
"""

from __future__ import annotations

from gfkernels.testing.pool import Outcome, RankPool, RanksFailed, run_ranks

__all__ = ["Outcome", "RankPool", "RanksFailed", "run_ranks"]
