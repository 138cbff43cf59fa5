"""Beginnings and ends that are no races: mbarriers left open or initialised again."""

from __future__ import annotations

from tests.ptxemu.check_pairs.scenario import Lacks, Scenario

SCENARIOS = [
    Scenario(
        "bytes that nobody expects",
        """
        // All bytes that come are expected at last.
        warp 0:
            @%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes \
[tile], [%input], 128, [full];
            @%first mbarrier.arrive.expect_tx.shared.b64 _, [full], 128; //-expect
        all:
            wait full, 0; //-expect
        """,
        {"expect": Lacks("outstanding", check="mbarrier")},
        barriers={"full": 1},
        warps=2,
    ),
    Scenario(
        "exit before a load has come",
        """
        // Shared memory is there until all that was asked for has come.
        warp 0:
            fence.proxy.async.shared::cta;
            @%first mbarrier.arrive.expect_tx.shared.b64 _, [full], 128;
            @%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes \
[tile], [%input], 128, [full]; //:load
            wait full, 0; //-wait
        """,
        {"wait": Lacks("a wait for it", later="load", check="exited")},
        barriers={"full": 1},
        bare=True,
    ),
    Scenario(
        "exit before a multicast has come",
        """
        // A CTA stays for what its peer loads into it, even if it reads nothing of that.
        all:
            @%first mbarrier.arrive.expect_tx.shared.b64 _, [full], 128;
            barrier.cluster.arrive.aligned;
            barrier.cluster.wait.aligned;
        cta 0:
            mov.b16 %h0, 3;
            @%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes\
.multicast::cluster [tile], [%input], 128, [full], %h0; //:load
            wait full, 0;
        cta 1:
            wait.cluster full, 0; //-wait
        """,
        {"wait": Lacks("a wait for it", later="load", check="exited")},
        cluster=2,
        barriers={"full": 1},
        bare=True,
    ),
    Scenario(
        "mbarrier.init in flight",
        """
        // A barrier is initialised again between phases, not in the middle of one.
        all:
            @%first mbarrier.arrive.shared.b64 _, [full];
            @%first mbarrier.arrive.shared.b64 _, [full]; //-whole
            @%first mbarrier.init.shared.b64 [full], 1; //:init
        """,
        {"whole": Lacks("initialised again", later="init", check="mbarrier")},
        barriers={"full": 2},
    ),
]
