"""Clusters: their barrier, mbarriers and shared memory of a peer, st.async, exits."""

from __future__ import annotations

from tests.ptxemu.check_pairs import parts
from tests.ptxemu.check_pairs.scenario import Lacks, Scenario

_STORE_ASYNC = """mapa.shared::cluster.u32 %r2, full, %peer;
    st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%theirs], %lane, [%r2];"""
_REDUCE = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32"
_REDUCE_ASYNC = f"""mapa.shared::cluster.u32 %r2, full, %peer; and.b32 %r4, %theirs, -5;
    {_REDUCE} [%r4], %lane, [%r2];"""

SCENARIOS = {
    "barrier.cluster": Scenario(
        """// Each CTA writes into its peer, then reads what the peer wrote.
        all:
            st.shared::cluster.b32 [%theirs], %lane; //:fill
            barrier.cluster.arrive.aligned; //~relaxed: barrier.cluster.arrive.relaxed.aligned;
            barrier.cluster.wait.aligned; //-late
            ld.shared.b32 %r2, [%mine]; //:use
            //~late: barrier.cluster.wait.aligned;
        """,
        Lacks("relaxed", "release", "fill", "use"),
        Lacks("late", "barrier", "fill", "use"),
    ),
    "a fence before barrier.cluster.arrive.relaxed": Scenario(
        """// The fence releases what came before it; reads of a peer's memory this time.
        all:
            st.shared.b32 [%mine], %lane; //:fill
            fence.acq_rel.cluster; //-fence
            barrier.cluster.arrive.relaxed.aligned;
            barrier.cluster.wait.aligned;
            ld.shared::cluster.b32 %r2, [%theirs]; //:use
        """,
        Lacks("fence", "release", "fill", "use"),
    ),
    "the lanes of one warp at barrier.cluster": Scenario(
        """// It orders the threads of one CTA, too.
        all:
            st.shared.b32 [%mine], %lane; //:fill
            barrier.cluster.arrive.aligned;
            barrier.cluster.wait.aligned; //-late
            ld.shared.b32 %r1, [%next]; //:use
            //~late: barrier.cluster.wait.aligned;
        """,
        Lacks("late", "bar.warp.sync", "fill", "use"),
    ),
    "mbarrier of a peer": Scenario(
        f"""// CTA 0 writes into CTA 1 and arrives there.
        cta 0:
            st.shared::cluster.b32 [%theirs], %lane; //:fill
            {parts.arrive_at_peer()} \
//~cta: mbarrier.arrive.release.cta.shared::cluster.b64 _, [%r2];
        cta 1:
            wait.cluster full, 0; //-wait //~narrow: wait.cta full, 0;
            ld.shared.b32 %r3, [%mine]; //:use
        """,
        Lacks("cta narrow", "scope", "fill", "use"),
        Lacks("wait", "mbarrier arrival and a wait", "use", "fill"),
    ),
    "a fence before a relaxed arrival at a peer": Scenario(
        f"""// The same with a fence; it must be of the cluster's scope.
        cta 0:
            st.shared::cluster.b32 [%theirs], %lane; //:fill
            fence.acq_rel.cluster; //-fence //~cta: fence.acq_rel.cta;
            {parts.arrive_at_peer(semantics="relaxed.cluster")}
        cta 1:
            wait.cluster full, 0;
            ld.shared.b32 %r3, [%mine]; //:use
        """,
        Lacks("fence", "release", "fill", "use"),
        Lacks("cta", "scope", "fill", "use"),
    ),
    "global memory that a peer has written": Scenario(
        f"""// Only an acquire of the cluster's scope makes the L1 cache forget what it had.
        cta 0:
            st.global.b32 [%out], %lane; //:fill
            {parts.arrive_at_peer()}
        cta 1:
            wait.cluster full, 0; //~narrow: wait.cta full, 0;
            ld.global.b32 %r3, [%out]; //:use
        """,
        Lacks("narrow", "scope", "fill", "use"),
    ),
    "a stage in a peer filled twice": Scenario(
        f"""// CTA 1 tells CTA 0 that it has read, before CTA 0 writes again.
        cta 0:
            st.shared::cluster.b32 [%theirs], %lane;
            {parts.arrive_at_peer()}
        cta 1:
            wait.cluster full, 0;
            ld.shared.b32 %r3, [%mine]; //:use
            {parts.arrive_at_peer()}
        cta 0:
            wait.cluster full, 0; //-wait
            st.shared::cluster.b32 [%theirs], %zero; //:again
        """,
        Lacks("wait", "mbarrier arrival and a wait", "again", "use"),
    ),
    "st.async": Scenario(
        f"""// CTA 1 stores into CTA 0, whose mbarrier counts the bytes.
        cta 0: {parts.expect()}
        cta 1: {_STORE_ASYNC} //:fill
        cta 0:
            wait.cluster full, 0; //-wait
            ld.shared.b32 %r3, [%mine]; //:use
        """,
        Lacks("wait", "mbarrier.try_wait", "fill", "use"),
    ),
    "red.async of two lanes into one word": Scenario(
        f"""// They meet in any order; whoever reads waits for their bytes.
        cta 0: {parts.expect()}
        cta 1: {_REDUCE_ASYNC} //:fill
        cta 0:
            wait.cluster full, 0; //-wait
            ld.shared.b32 %r3, [%mine]; //:use
        """,
        Lacks("wait", "mbarrier.try_wait", "fill", "use"),
    ),
    "st.async into what is still read": Scenario(
        f"""// CTA 1 lets CTA 0 go on when it has read.
        cta 1:
            {parts.expect()}
            ld.shared.b32 %r3, [%mine]; //:use
            {parts.arrive_at_peer("empty")}
        cta 0:
            wait.cluster empty, 0; //-wait
            {_STORE_ASYNC} //:fill
        cta 1: wait.cluster full, 0;
        """,
        Lacks("wait", "mbarrier arrival and a wait", "use", "fill"),
    ),
    "fence.mbarrier_init": Scenario(
        f"""// A relaxed barrier is enough for a peer to use an mbarrier that was fenced.
        all:
            @%first mbarrier.init.shared.b64 [slot], 32; //:init
            fence.mbarrier_init.release.cluster; //-fence
            barrier.cluster.arrive.relaxed.aligned;
            barrier.cluster.wait.aligned;
            {parts.arrive_at_peer("slot")} //:arrive
            wait.cluster slot, 0;
        """,
        Lacks("fence", "fence.mbarrier_init", "init", "arrive", "mbarrier"),
    ),
    "fence.mbarrier_init for a copy": Scenario(
        f"""// The same for a copy that signals the mbarrier of the peer.
        all:
            @%first mbarrier.init.shared.b64 [slot], 1; //:init
            fence.mbarrier_init.release.cluster; //-fence
            barrier.cluster.arrive.relaxed.aligned;
            barrier.cluster.wait.aligned;
        cta 0:
            {parts.FILL_FOR_ASYNC}
            {parts.copy_to_peer("spare").replace("full", "slot")} //:copy
        cta 1:
            {parts.expect(barrier="slot")}
            wait.cluster slot, 0;
        """,
        Lacks("fence", "fence.mbarrier_init", "init", "copy", "mbarrier"),
    ),
    "exit after a peer's stores": Scenario(
        f"""// CTA 1 stays until CTA 0 has written into it.
        all: {parts.MEET}
        cta 0: st.shared::cluster.b32 [%theirs], %lane; //:fill
        all:
            barrier.cluster.arrive.aligned; //-stay
            barrier.cluster.wait.aligned; //-stay
        """,
        Lacks("stay", "cluster barrier before the exit", later="fill", check="exited"),
        bare=True,
    ),
    "exit after a peer's loads": Scenario(
        f"""// CTA 1 stays until CTA 0 has read what is in it.
        all:
            st.shared.b32 [%mine], %lane;
            {parts.MEET}
        cta 0: ld.shared::cluster.b32 %r2, [%theirs]; //:use
        all:
            barrier.cluster.arrive.relaxed.aligned; //-stay
            barrier.cluster.wait.aligned; //-stay
        """,
        Lacks("stay", "cluster barrier before the exit", later="use", check="exited"),
        bare=True,
    ),
    "exit after a peer's arrival": Scenario(
        f"""// CTA 1 stays until CTA 0 has arrived at its mbarrier: here it waits for that.
        all: {parts.MEET}
        cta 0: {parts.arrive_at_peer()} //:arrive
        cta 1: wait.cluster full, 0; //-stay
        """,
        Lacks("stay", "a wait for it", later="arrive", check="exited"),
        bare=True,
    ),
}
