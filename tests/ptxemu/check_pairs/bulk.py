"""Bulk and tensor (TMA) copies, and what launch control answers."""

from __future__ import annotations

from tests.ptxemu.check_pairs.scenario import Lacks, Scenario

_LOAD = (
    "@%first cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    " [tile], [%from, {%zero, %zero}], [full];"
)
_STORE = (
    "@%first cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
    " [%to, {%zero, %zero}], [tile];"
)
_EXPECT = "@%first mbarrier.arrive.expect_tx.shared.b64 _, [full], 128;"

SCENARIOS = [
    Scenario(
        "TMA load",
        f"""
        // Whoever reads the tile has waited for its bytes.
        warp 0:
            {_EXPECT}
            {_LOAD} //:load
        warp 1:
            wait full, 0; //-wait
            ld.shared.b32 %r1, [%mine]; //:use
        """,
        {"wait": Lacks("mbarrier.try_wait", "load", "use")},
        barriers={"full": 1},
    ),
    Scenario(
        "TMA load, passed on",
        f"""
        // One warp waits for the bytes and tells another by a named barrier.
        warp 0:
            {_EXPECT}
            {_LOAD} //:load
            wait full, 0; //-wait
            bar.arrive 1, 64;
        warp 1:
            bar.sync 1, 64; //-barrier
            ld.shared.b32 %r1, [%mine]; //:use
        """,
        {"wait barrier": Lacks("mbarrier.try_wait", "load", "use")},
        barriers={"full": 1},
    ),
    Scenario(
        "TMA load into what is still read",
        f"""
        // Readers arrive before the stage is loaded again.
        warp 0:
            ld.shared.b32 %r1, [%mine]; //:use
            mbarrier.arrive.shared.b64 _, [empty];
        warp 1:
            wait empty, 0; //-wait
            {_EXPECT}
            {_LOAD} //:load
            wait full, 0;
        """,
        {"wait": Lacks("mbarrier arrival and a wait", "use", "load")},
        barriers={"full": 1, "empty": 32},
    ),
    Scenario(
        "TMA load over ordinary stores",
        f"""
        // What a warp wrote before must be visible to the async proxy, or it could come later.
        all:
            st.shared.b32 [%mine], %zero; //:fill
            fence.proxy.async.shared::cta; //-fence
            bar.warp.sync 0xffffffff; //-sync
            {_EXPECT}
            {_LOAD} //:load
            wait full, 0;
        """,
        {
            "fence": Lacks("fence.proxy.async", "fill", "load"),
            "sync": Lacks("bar.warp.sync", "fill", "load"),
        },
        barriers={"full": 1},
    ),
    Scenario(
        "ordinary stores over a TMA load",
        f"""
        // In the other direction the wait is enough.
        warp 0:
            {_EXPECT}
            {_LOAD} //:load
        warp 1:
            wait full, 0; //-wait
            st.shared.b32 [%mine], %lane; //:fill
        """,
        {"wait": Lacks("mbarrier.try_wait", "load", "fill")},
        barriers={"full": 1},
    ),
    Scenario(
        "expect_tx",
        f"""
        // The phase completes when all bytes that are expected have come: both tiles.
        warp 0:
            @%first mbarrier.arrive.expect_tx.shared.b64 _, [full], 256; \
//~half: @%first mbarrier.arrive.expect_tx.shared.b64 _, [full], 128;
            {_LOAD}
            {_LOAD.replace("[tile]", "[spare]")} //:load
        warp 1:
            wait full, 0;
            ld.shared.b32 %r1, [%mine+1024]; //:use
        """,
        {"half": Lacks("mbarrier.try_wait", "load", "use")},
        barriers={"full": 1},
    ),
    Scenario(
        "two stages",
        f"""
        // Each stage has its own mbarrier: a wait for one tells nothing of the other.
        warp 0:
            {_EXPECT}
            {_LOAD}
            {_EXPECT.replace("full", "other")}
            {_LOAD.replace("[tile]", "[spare]").replace("full", "other")} //:load
        warp 1:
            wait full, 0;
            wait other, 0; //-wait
            ld.shared.b32 %r1, [%mine+1024]; //:use
        """,
        {"wait": Lacks("mbarrier.try_wait", "load", "use")},
        barriers={"full": 1, "other": 1},
    ),
    Scenario(
        "TMA store",
        f"""
        // The writers fence, then the barrier, then one lane issues.
        warp 0:
            st.shared.b32 [%mine], %lane; //:fill
            fence.proxy.async.shared::cta; //-fence
        all:
            bar.sync 1, 64; //-barrier
        warp 1:
            {_STORE} //:store
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group 0;
        """,
        {
            "fence": Lacks("fence.proxy.async", "fill", "store"),
            "barrier": Lacks("barrier", "fill", "store"),
        },
    ),
    Scenario(
        "a fence of the issuer",
        f"""
        // Behind the barrier, the fence of the issuing warp does as well; before it, it does not.
        warp 0:
            st.shared.b32 [%mine], %lane; //:fill
        warp 1:
            //~early: fence.proxy.async;
        all:
            bar.sync 1, 64;
        warp 1:
            fence.proxy.async; //-fence //-early
            {_STORE} //:store
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group 0;
        """,
        {"fence early": Lacks("fence.proxy.async", "fill", "store")},
    ),
    Scenario(
        "a fence before the store",
        f"""
        // A proxy fence is for the writes before it.
        all:
            fence.proxy.async.shared::cta; //-right
            st.shared.b32 [%mine], %lane; //:fill
            fence.proxy.async.shared::cta; //-wrong //~global: fence.proxy.async.global;
            bar.warp.sync 0xffffffff;
            {_STORE} //:store
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group 0;
        """,
        {"wrong global": Lacks("fence.proxy.async", "fill", "store")},
    ),
    Scenario(
        "the source of a TMA store",
        f"""
        // It is written again only when it has been read.
        all:
            st.shared.b32 [%mine], %lane;
            fence.proxy.async.shared::cta;
            bar.warp.sync 0xffffffff;
            {_STORE} //:store
            cp.async.bulk.commit_group; //-commit
            cp.async.bulk.wait_group.read 0; //-wait
            bar.warp.sync 0xffffffff;
            st.shared.b32 [%mine], %lane; //:fill
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group 0;
        """,
        {"wait commit": Lacks("cp.async.bulk.wait_group.read", "store", "fill")},
    ),
    Scenario(
        "wait_group of two stages",
        f"""
        // With two stages in turn the newest store may be under way, not the one before.
        all:
            st.shared.b32 [%mine], %lane;
            st.shared.b32 [%mine+1024], %lane;
            fence.proxy.async.shared::cta;
            bar.warp.sync 0xffffffff;
            {_STORE} //:store
            cp.async.bulk.commit_group;
            mov.u32 %r1, 1;
            {_STORE.replace("[tile]", "[spare]").replace("%zero}", "%r1}")}
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group.read 1; //~more: cp.async.bulk.wait_group.read 2;
            bar.warp.sync 0xffffffff;
            st.shared.b32 [%mine], %lane; //:fill
            cp.async.bulk.wait_group 0;
        """,
        {"more": Lacks("cp.async.bulk.wait_group.read", "store", "fill")},
    ),
    Scenario(
        "wait_group of whoever issued",
        f"""
        // Groups belong to the thread that committed them: another warp learns by a barrier.
        warp 0:
            st.shared.b32 [%mine], %lane;
            fence.proxy.async.shared::cta;
            bar.warp.sync 0xffffffff;
            {_STORE} //:store
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group.read 0; //-here
        warp 1:
            //~here: cp.async.bulk.wait_group.read 0;
        all:
            bar.sync 1, 64; //-barrier
        warp 1:
            st.shared.b32 [%mine], %lane; //:fill
        """,
        {
            "here": Lacks("cp.async.bulk.wait_group.read", "store", "fill"),
            "barrier": Lacks("a barrier", "store", "fill"),
        },
    ),
    Scenario(
        "bulk load",
        """
        // As a TMA load.
        warp 0:
            @%first mbarrier.arrive.expect_tx.shared.b64 _, [full], 128;
            @%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes \
[tile], [%input], 128, [full]; //:load
        warp 1:
            wait full, 0; //-wait
            ld.shared.b32 %r1, [%mine]; //:use
        """,
        {"wait": Lacks("mbarrier.try_wait", "load", "use")},
        barriers={"full": 1},
    ),
    Scenario(
        "bulk store",
        """
        // As a TMA store.
        all:
            st.shared.b32 [%mine], %lane; //:fill
            fence.proxy.async.shared::cta; //-fence
            bar.warp.sync 0xffffffff;
            @%first cp.async.bulk.global.shared::cta.bulk_group [%output], [tile], 128; //:store
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group.read 0; //-wait
            bar.warp.sync 0xffffffff;
            st.shared.b32 [%mine], %zero; //:again
        """,
        {
            "fence": Lacks("fence.proxy.async", "fill", "store"),
            "wait": Lacks("cp.async.bulk.wait_group.read", "store", "again"),
        },
    ),
    Scenario(
        "bulk reduction",
        """
        // Its source is read in the async proxy as that of a store.
        all:
            st.shared.b32 [%mine], %lane; //:fill
            fence.proxy.async.shared::cta; //-fence
            bar.warp.sync 0xffffffff;
            @%first cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 \
[%output], [tile], 128; //:store
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group.read 0; //-wait
            bar.warp.sync 0xffffffff;
            st.shared.b32 [%mine], %zero; //:again
        """,
        {
            "fence": Lacks("fence.proxy.async", "fill", "store"),
            "wait": Lacks("cp.async.bulk.wait_group.read", "store", "again"),
        },
    ),
    Scenario(
        "bulk copy to a peer",
        """
        // CTA 1 copies into CTA 0; the source needs the fence, the reader the wait.
        cta 0:
            @%first mbarrier.arrive.expect_tx.shared.b64 _, [full], 128;
        cta 1:
            st.shared.b32 [%mine], %lane; //:fill
            fence.proxy.async; //-fence
            bar.warp.sync 0xffffffff;
            mov.u32 %r1, spare;
            mapa.shared::cluster.u32 %r1, %r1, %peer;
            mov.u32 %r2, full;
            mapa.shared::cluster.u32 %r2, %r2, %peer;
            @%first cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes \
[%r1], [tile], 128, [%r2]; //:copy
        cta 0:
            wait.cluster full, 0; //-wait
            ld.shared.b32 %r3, [%mine+1024]; //:use
        """,
        {
            "fence": Lacks("fence.proxy.async", "fill", "copy"),
            "wait": Lacks("mbarrier.try_wait", "copy", "use"),
        },
        cluster=2,
        barriers={"full": 1},
    ),
    Scenario(
        "the source of a bulk copy to a peer",
        """
        // CTA 0 tells CTA 1 that all has come, which is when the source may be overwritten.
        cta 0:
            @%first mbarrier.arrive.expect_tx.shared.b64 _, [full], 128;
        cta 1:
            mov.u32 %r1, tile;
            mapa.shared::cluster.u32 %r1, %r1, %peer;
            mov.u32 %r2, full;
            mapa.shared::cluster.u32 %r2, %r2, %peer;
            @%first cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes \
[%r1], [tile], 128, [%r2]; //:copy
        cta 0:
            wait.cluster full, 0; //-first
            mov.u32 %r2, empty;
            mapa.shared::cluster.u32 %r2, %r2, %peer;
            mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];
        cta 1:
            wait.cluster empty, 0; //-second
            st.shared.b32 [%mine], %lane; //:fill
        """,
        {"first second": Lacks("mbarrier.try_wait", "copy", "fill")},
        cluster=2,
        barriers={"full": 1, "empty": 32},
    ),
    Scenario(
        "multicast",
        """
        // CTA 0 loads into both; each waits on its own mbarrier, CTA 1 before it reads.
        all:
            @%first mbarrier.arrive.expect_tx.shared.b64 _, [full], 128;
            barrier.cluster.arrive.aligned;
            barrier.cluster.wait.aligned;
        cta 0:
            mov.b16 %h0, 3;
            @%first cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier\
::complete_tx::bytes.multicast::cluster [tile], [%from, {%zero, %zero}], [full], %h0; //:load
            wait.cluster full, 0;
        cta 1:
            wait.cluster full, 0; //-wait
            ld.shared.b32 %r1, [%mine]; //:use
        """,
        {"wait": Lacks("mbarrier.try_wait", "load", "use")},
        cluster=2,
        barriers={"full": 1},
    ),
    Scenario(
        "multicast into what a peer still reads",
        """
        // The mbarrier that says "empty" has an arrival of every CTA that is loaded into.
        all:
            @%first mbarrier.arrive.expect_tx.shared.b64 _, [full], 128;
            barrier.cluster.arrive.aligned;
            barrier.cluster.wait.aligned;
        cta 0:
            ld.shared.b32 %r1, [%mine]; //:use
            mov.u32 %r2, empty;
            mapa.shared::cluster.u32 %r2, %r2, %peer;
            mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];
        cta 1:
            wait.cluster empty, 0; //-wait
            mov.b16 %h0, 3;
            @%first cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier\
::complete_tx::bytes.multicast::cluster [tile], [%from, {%zero, %zero}], [full], %h0; //:load
        all:
            wait.cluster full, 0;
        """,
        {"wait": Lacks("mbarrier arrival and a wait", "use", "load")},
        cluster=2,
        barriers={"full": 1, "empty": 32},
    ),
    Scenario(
        "mbarrier.init for a TMA load",
        f"""
        // The async proxy sees the mbarrier after a fence.
        all:
            @%first mbarrier.init.shared.b64 [slot], 1; //:init
            fence.mbarrier_init.release.cluster; //-fence
            {_EXPECT.replace("full", "slot")}
            {_LOAD.replace("full", "slot")} //:load
            wait slot, 0;
        """,
        {"fence": Lacks("fence.mbarrier_init", "init", "load", "mbarrier")},
    ),
    Scenario(
        "clusterlaunchcontrol.try_cancel",
        """
        // The answer is read behind the wait, and the next one asked for when all have read it.
        warp 0:
            @%first mbarrier.arrive.expect_tx.shared.b64 _, [full], 16;
            @%first clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier\
::complete_tx::bytes.b128 [slot], [full]; //:ask
        warp 1:
            wait full, 0; //-wait
            ld.shared.b128 %q0, [slot]; //:use
            mbarrier.arrive.shared.b64 _, [empty];
        warp 0:
            wait empty, 0; //-read
            @%first mbarrier.arrive.expect_tx.shared.b64 _, [more], 16;
            @%first clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier\
::complete_tx::bytes.b128 [slot], [more]; //:again
            wait more, 0;
        """,
        {
            "wait": Lacks("mbarrier.try_wait", "ask", "use"),
            "read": Lacks("mbarrier.try_wait", "ask", "again"),
        },
        barriers={"full": 1, "more": 1, "empty": 32},
    ),
]
