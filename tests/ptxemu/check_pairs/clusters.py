"""Clusters: their barrier, mbarriers and shared memory of a peer, st.async, exits."""

from __future__ import annotations

from tests.ptxemu.check_pairs.scenario import Lacks, Scenario

SCENARIOS = [
    Scenario(
        "barrier.cluster",
        """
        // Each CTA writes into its peer, then reads what the peer wrote.
        all:
            mapa.shared::cluster.u32 %r1, %mine, %peer;
            st.shared::cluster.b32 [%r1], %lane; //:fill
            barrier.cluster.arrive.aligned; //~relaxed: barrier.cluster.arrive.relaxed.aligned;
            barrier.cluster.wait.aligned; //-late
            ld.shared.b32 %r2, [%mine]; //:use
            //~late: barrier.cluster.wait.aligned;
        """,
        {
            "relaxed": Lacks("release", "fill", "use"),
            "late": Lacks("barrier", "fill", "use"),
        },
        cluster=2,
    ),
    Scenario(
        "a fence before barrier.cluster.arrive.relaxed",
        """
        // The fence releases what came before it; reads of a peer's memory this time.
        all:
            st.shared.b32 [%mine], %lane; //:fill
            fence.acq_rel.cluster; //-fence
            barrier.cluster.arrive.relaxed.aligned;
            barrier.cluster.wait.aligned;
            mapa.shared::cluster.u32 %r1, %mine, %peer;
            ld.shared::cluster.b32 %r2, [%r1]; //:use
        """,
        {"fence": Lacks("release", "fill", "use")},
        cluster=2,
    ),
    Scenario(
        "the lanes of one warp at barrier.cluster",
        """
        // It orders the threads of one CTA, too.
        all:
            st.shared.b32 [%mine], %lane; //:fill
            barrier.cluster.arrive.aligned;
            barrier.cluster.wait.aligned; //-late
            ld.shared.b32 %r1, [%next]; //:use
            //~late: barrier.cluster.wait.aligned;
        """,
        {"late": Lacks("bar.warp.sync", "fill", "use")},
        cluster=2,
    ),
    Scenario(
        "mbarrier of a peer",
        """
        // CTA 0 writes into CTA 1 and arrives there.
        cta 0:
            mapa.shared::cluster.u32 %r1, %mine, %peer;
            mov.u32 %r2, full;
            mapa.shared::cluster.u32 %r2, %r2, %peer;
            st.shared::cluster.b32 [%r1], %lane; //:fill
            mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2]; \
//~cta: mbarrier.arrive.release.cta.shared::cluster.b64 _, [%r2];
        cta 1:
            wait.cluster full, 0; //-wait
            ld.shared.b32 %r3, [%mine]; //:use
        """,
        {
            "cta": Lacks("scope", "fill", "use"),
            "wait": Lacks("mbarrier arrival and a wait", "use", "fill"),
        },
        cluster=2,
        barriers={"full": 32},
    ),
    Scenario(
        "a fence before a relaxed arrival at a peer",
        """
        // The same with a fence; it must be of the cluster's scope.
        cta 0:
            mapa.shared::cluster.u32 %r1, %mine, %peer;
            mov.u32 %r2, full;
            mapa.shared::cluster.u32 %r2, %r2, %peer;
            st.shared::cluster.b32 [%r1], %lane; //:fill
            fence.acq_rel.cluster; //-fence //~cta: fence.acq_rel.cta;
            mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%r2];
        cta 1:
            wait.cluster full, 0;
            ld.shared.b32 %r3, [%mine]; //:use
        """,
        {
            "fence": Lacks("release", "fill", "use"),
            "cta": Lacks("scope", "fill", "use"),
        },
        cluster=2,
        barriers={"full": 32},
    ),
    Scenario(
        "a stage in a peer filled twice",
        """
        // CTA 1 tells CTA 0 that it has read, before CTA 0 writes again.
        all:
            mov.u32 %r2, full;
            mapa.shared::cluster.u32 %r2, %r2, %peer;
        cta 0:
            mapa.shared::cluster.u32 %r1, %mine, %peer;
            st.shared::cluster.b32 [%r1], %lane;
            mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];
        cta 1:
            wait.cluster full, 0;
            ld.shared.b32 %r3, [%mine]; //:use
            mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];
        cta 0:
            wait.cluster full, 0; //-wait
            st.shared::cluster.b32 [%r1], %zero; //:again
        """,
        {"wait": Lacks("mbarrier arrival and a wait", "again", "use")},
        cluster=2,
        barriers={"full": 32},
    ),
    Scenario(
        "st.async",
        """
        // CTA 1 stores into CTA 0, whose mbarrier counts the bytes.
        cta 0:
            @%first mbarrier.arrive.expect_tx.shared.b64 _, [full], 128;
        cta 1:
            mapa.shared::cluster.u32 %r1, %mine, %peer;
            mov.u32 %r2, full;
            mapa.shared::cluster.u32 %r2, %r2, %peer;
            st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %lane, [%r2]; //:fill
        cta 0:
            wait.cluster full, 0; //-wait
            ld.shared.b32 %r3, [%mine]; //:use
        """,
        {"wait": Lacks("mbarrier.try_wait", "fill", "use")},
        cluster=2,
        barriers={"full": 1},
    ),
    Scenario(
        "st.async into what is still read",
        """
        // CTA 1 lets CTA 0 go on when it has read.
        cta 1:
            @%first mbarrier.arrive.expect_tx.shared.b64 _, [full], 128;
            ld.shared.b32 %r3, [%mine]; //:use
            mov.u32 %r2, empty;
            mapa.shared::cluster.u32 %r2, %r2, %peer;
            mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];
        cta 0:
            mapa.shared::cluster.u32 %r1, %mine, %peer;
            mov.u32 %r2, full;
            mapa.shared::cluster.u32 %r2, %r2, %peer;
            wait.cluster empty, 0; //-wait
            st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %lane, [%r2]; //:fill
        cta 1:
            wait.cluster full, 0;
        """,
        {"wait": Lacks("mbarrier arrival and a wait", "use", "fill")},
        cluster=2,
        barriers={"full": 1, "empty": 32},
    ),
    Scenario(
        "fence.mbarrier_init",
        """
        // A relaxed barrier is enough for a peer to use an mbarrier that was fenced.
        all:
            @%first mbarrier.init.shared.b64 [slot], 32; //:init
            fence.mbarrier_init.release.cluster; //-fence
            barrier.cluster.arrive.relaxed.aligned;
            barrier.cluster.wait.aligned;
            mov.u32 %r1, slot;
            mapa.shared::cluster.u32 %r1, %r1, %peer;
            mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1]; //:arrive
            wait.cluster slot, 0;
        """,
        {"fence": Lacks("fence.mbarrier_init", "init", "arrive", "mbarrier")},
        cluster=2,
    ),
    Scenario(
        "exit after a peer's stores",
        """
        // CTA 1 stays until CTA 0 has written into it.
        all:
            barrier.cluster.arrive.aligned;
            barrier.cluster.wait.aligned;
        cta 0:
            mapa.shared::cluster.u32 %r1, %mine, %peer;
            st.shared::cluster.b32 [%r1], %lane; //:fill
        all:
            barrier.cluster.arrive.aligned; //-stay
            barrier.cluster.wait.aligned; //-stay
        """,
        {"stay": Lacks("cluster barrier before the exit", later="fill", check="exited")},
        cluster=2,
        bare=True,
    ),
    Scenario(
        "exit after a peer's loads",
        """
        // CTA 1 stays until CTA 0 has read what is in it.
        all:
            st.shared.b32 [%mine], %lane;
            barrier.cluster.arrive.aligned;
            barrier.cluster.wait.aligned;
        cta 0:
            mapa.shared::cluster.u32 %r1, %mine, %peer;
            ld.shared::cluster.b32 %r2, [%r1]; //:use
        all:
            barrier.cluster.arrive.relaxed.aligned; //-stay
            barrier.cluster.wait.aligned; //-stay
        """,
        {"stay": Lacks("cluster barrier before the exit", later="use", check="exited")},
        cluster=2,
        bare=True,
    ),
    Scenario(
        "exit after a peer's arrival",
        """
        // CTA 1 stays until CTA 0 has arrived at its mbarrier: here it waits for that.
        all:
            barrier.cluster.arrive.aligned;
            barrier.cluster.wait.aligned;
        cta 0:
            mov.u32 %r2, full;
            mapa.shared::cluster.u32 %r2, %r2, %peer;
            mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2]; //:arrive
        cta 1:
            wait.cluster full, 0; //-stay
        """,
        {"stay": Lacks("a wait for it", later="arrive", check="exited")},
        cluster=2,
        barriers={"full": 32},
        bare=True,
    ),
]
