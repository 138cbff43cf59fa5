"""Bulk and tensor (TMA) copies, and what launch control answers."""

from __future__ import annotations

from tests.ptxemu.check_pairs import parts
from tests.ptxemu.check_pairs.scenario import Lacks, Scenario, handed_over


def _ask(barrier: str) -> str:
    """For the work of a cluster that does not run yet; 16 bytes answer."""
    return f"""{parts.expect(16, barrier)}
        @%first clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128\
 [slot], [{barrier}];"""


_SAME_STAGE = parts.TMA_LOAD.replace("full", "other")

SCENARIOS = {
    # Whoever reads the tile has waited for its bytes.
    "TMA load": handed_over(
        Lacks("wait", "mbarrier.try_wait", "load", "use"),
        fill=parts.tma_load(),
        wait="wait full, 0; //-wait",
    ),
    # One warp waits for the bytes and tells another by a named barrier.
    "TMA load, passed on": handed_over(
        Lacks("wait barrier", "mbarrier.try_wait", "load", "use"),
        fill=parts.tma_load(),
        signal="wait full, 0; //-wait\nbar.arrive 1, 64;",
        wait="bar.sync 1, 64; //-barrier",
    ),
    "TMA load into what is still read": Scenario(
        f"""// Readers arrive before the stage is loaded again.
        warp 0:
            ld.shared.b32 %r1, [%mine]; //:use
            mbarrier.arrive.shared.b64 _, [empty];
        warp 1:
            wait empty, 0; //-wait
            {parts.tma_load()}
            wait full, 0;
        """,
        Lacks("wait", "mbarrier arrival and a wait", "use", "load"),
    ),
    "TMA load over ordinary stores": Scenario(
        f"""// What a warp wrote before must be visible to the async proxy, or it could come later.
        all:
            st.shared.b32 [%mine], %zero; //:fill
            fence.proxy.async.shared::cta; //-fence
            bar.warp.sync 0xffffffff; //-sync
            {parts.tma_load()}
            wait full, 0;
        """,
        Lacks("fence", "fence.proxy.async", "fill", "load"),
        Lacks("sync", "bar.warp.sync", "fill", "load"),
    ),
    "ordinary stores over a TMA load": Scenario(
        f"""// In the other direction the wait is enough.
        warp 0: {parts.tma_load()}
        warp 1:
            wait full, 0; //-wait
            st.shared.b32 [%mine], %lane; //:fill
        """,
        Lacks("wait", "mbarrier.try_wait", "load", "fill"),
    ),
    "expect_tx": Scenario(
        f"""// The phase completes when all bytes that are expected have come: both tiles.
        warp 0:
            {parts.expect(256)} //~half: {parts.expect(128)}
            {parts.TMA_LOAD}
            {parts.TMA_LOAD.replace("[tile]", "[spare]")} //:load
        warp 1:
            wait full, 0;
            ld.shared.b32 %r1, [%mine+1024]; //:use
        """,
        Lacks("half", "expect_tx", "load", "use"),
    ),
    "a wait whose answer decides": Scenario(
        f"""// mbarrier.try_wait may fail at any time: whoever does not look knows nothing.
        all:
            {parts.tma_load()}
            wait full, 0; //~blind: mbarrier.try_wait.parity.shared.b64 %p1, [full], 0;
            ld.shared.b32 %r1, [%mine]; //:use
            wait full, 0;
        """,
        Lacks("blind", "mbarrier.try_wait", "load", "use"),
    ),
    "two stages": Scenario(
        f"""// Each stage has its own mbarrier: a wait for one tells nothing of the other.
        warp 0:
            {parts.expect()}
            {parts.TMA_LOAD} //:first
            {parts.tma_load("spare", "other")} //~same: {_SAME_STAGE} //:second
        warp 1:
            wait full, 0;
            wait other, 0; //-wait
            ld.shared.b32 %r1, [%mine+1024]; //:use
        """,
        Lacks("wait", "mbarrier.try_wait", "load", "use"),
        Lacks("same", "an index of the stage", "first", "second"),
    ),
    "TMA store": Scenario(
        f"""// The writers fence, then the barrier, then one lane issues.
        warp 0:
            st.shared.b32 [%mine], %lane; //:fill
            fence.proxy.async.shared::cta; //-fence
        all: bar.sync 1, 64; //-barrier
        warp 1:
            {parts.TMA_STORE} //:store
            {parts.DRAIN}
        """,
        Lacks("fence", "fence.proxy.async", "fill", "store"),
        Lacks("barrier", "barrier", "fill", "store"),
    ),
    "a fence of the issuer": Scenario(
        f"""// Behind the barrier the fence of the issuing warp does as well, before it it does not.
        warp 0: st.shared.b32 [%mine], %lane; //:fill
        warp 1:
            //~early: fence.proxy.async;
        all: bar.sync 1, 64;
        warp 1:
            fence.proxy.async; //-fence //-early
            {parts.TMA_STORE} //:store
            {parts.DRAIN}
        """,
        Lacks("fence early", "fence.proxy.async", "fill", "store"),
    ),
    "a fence before the store": Scenario(
        f"""// A proxy fence is for the writes before it.
        all:
            fence.proxy.async.shared::cta; //-right
            st.shared.b32 [%mine], %lane; //:fill
            fence.proxy.async.shared::cta; //-wrong //~global: fence.proxy.async.global;
            bar.warp.sync 0xffffffff;
            {parts.TMA_STORE} //:store
            {parts.DRAIN}
        """,
        Lacks("wrong global", "fence.proxy.async", "fill", "store"),
    ),
    "the source of a TMA store": Scenario(
        f"""// It is written again only when it has been read.
        all:
            {parts.FILL_FOR_ASYNC}
            {parts.TMA_STORE} //:store
            cp.async.bulk.commit_group; //-commit
            cp.async.bulk.wait_group.read 0; //-wait
            bar.warp.sync 0xffffffff;
            st.shared.b32 [%mine], %lane; //:fill
            {parts.DRAIN}
        """,
        Lacks("wait", "cp.async.bulk.wait_group.read", "store", "fill"),
        Lacks("commit", "cp.async.bulk.commit_group", "store", "fill"),
    ),
    "wait_group of two stages": Scenario(
        f"""// With two stages in turn the newest store may be under way, not the one before.
        all:
            st.shared.b32 [%mine], %lane;
            st.shared.b32 [%mine+1024], %lane;
            fence.proxy.async.shared::cta;
            bar.warp.sync 0xffffffff;
            {parts.TMA_STORE} //:store
            cp.async.bulk.commit_group;
            mov.u32 %r1, 1;
            {parts.TMA_STORE.replace("[tile]", "[spare]").replace("%zero}", "%r1}")}
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group.read 1; //~more: cp.async.bulk.wait_group.read 2;
            bar.warp.sync 0xffffffff;
            st.shared.b32 [%mine], %lane; //:fill
            cp.async.bulk.wait_group 0;
        """,
        Lacks("more", "cp.async.bulk.wait_group.read", "store", "fill"),
    ),
    "wait_group of whoever issued": Scenario(
        f"""// Groups belong to the thread that committed them: another warp learns by a barrier.
        warp 0:
            {parts.FILL_FOR_ASYNC}
            {parts.TMA_STORE} //:store
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group.read 0; //-here
        warp 1:
            //~here: cp.async.bulk.wait_group.read 0;
        all: bar.sync 1, 64; //-barrier
        warp 1: st.shared.b32 [%mine], %lane; //:fill
        """,
        Lacks("here", "cp.async.bulk.wait_group.read", "store", "fill"),
        Lacks("barrier", "a barrier", "store", "fill"),
    ),
    "bulk load": handed_over(
        Lacks("wait", "mbarrier.try_wait", "load", "use"),
        fill=parts.bulk_load(),
        wait="wait full, 0; //-wait",
    ),
    **{
        name: Scenario(
            f"""// As a TMA store: the source is read in the async proxy.
            all:
                st.shared.b32 [%mine], %lane; //:fill
                fence.proxy.async.shared::cta; //-fence
                bar.warp.sync 0xffffffff;
                {instruction} //:store
                cp.async.bulk.commit_group;
                cp.async.bulk.wait_group.read 0; //-wait
                bar.warp.sync 0xffffffff;
                st.shared.b32 [%mine], %zero; //:again
            """,
            Lacks("fence", "fence.proxy.async", "fill", "store"),
            Lacks("wait", "cp.async.bulk.wait_group.read", "store", "again"),
        )
        for name, instruction in (
            ("bulk store", parts.BULK_STORE),
            ("bulk reduction", parts.BULK_REDUCTION),
        )
    },
    "bulk copy to a peer": Scenario(
        f"""// CTA 1 copies into CTA 0; the source needs the fence, the reader the wait.
        cta 0: {parts.expect()}
        cta 1:
            st.shared.b32 [%mine], %lane; //:fill
            fence.proxy.async; //-fence
            bar.warp.sync 0xffffffff;
            {parts.copy_to_peer("spare")} //:copy
        cta 0:
            wait.cluster full, 0; //-wait
            ld.shared.b32 %r3, [%mine+1024]; //:use
        """,
        Lacks("fence", "fence.proxy.async", "fill", "copy"),
        Lacks("wait", "mbarrier.try_wait", "copy", "use"),
    ),
    "the source of a bulk copy to a peer": Scenario(
        f"""// CTA 0 tells CTA 1 that all has come, which is when the source may be overwritten.
        cta 0: {parts.expect()}
        cta 1: {parts.copy_to_peer("tile")} //:copy
        cta 0:
            wait.cluster full, 0; //-first
            {parts.arrive_at_peer("empty")}
        cta 1:
            wait.cluster empty, 0; //-second
            st.shared.b32 [%mine], %lane; //:fill
        """,
        Lacks("first second", "mbarrier.try_wait", "copy", "fill"),
    ),
    "multicast": Scenario(
        f"""// CTA 0 loads into both; each waits on its own mbarrier, CTA 1 before it reads.
        all:
            {parts.expect()}
            {parts.MEET}
        cta 0:
            {parts.multicast(parts.TMA_LOAD)}
            wait.cluster full, 0;
        cta 1:
            wait.cluster full, 0; //-wait
            ld.shared.b32 %r1, [%mine]; //:use
        """,
        Lacks("wait", "mbarrier.try_wait", "load", "use"),
    ),
    "multicast into what a peer still reads": Scenario(
        f"""// The mbarrier that says "empty" has an arrival of every CTA that is loaded into.
        all:
            {parts.expect()}
            {parts.MEET}
        cta 0:
            ld.shared.b32 %r1, [%mine]; //:use
            {parts.arrive_at_peer("empty")}
        cta 1:
            wait.cluster empty, 0; //-wait
            {parts.multicast(parts.TMA_LOAD)}
        all: wait.cluster full, 0;
        """,
        Lacks("wait", "mbarrier arrival and a wait", "use", "load"),
    ),
    "mbarrier.init for a TMA load": Scenario(
        f"""// The async proxy sees the mbarrier after a fence.
        all:
            @%first mbarrier.init.shared.b64 [slot], 1; //:init
            fence.mbarrier_init.release.cluster; //-fence
            {parts.tma_load(barrier="slot")}
            wait slot, 0;
        """,
        Lacks("fence", "fence.mbarrier_init", "init", "load", "mbarrier"),
    ),
    "clusterlaunchcontrol.try_cancel": Scenario(
        f"""// The answer is read behind the wait, and the next one asked for when all have read it.
        warp 0: {_ask("full")} //:ask
        warp 1:
            wait full, 0; //-wait
            ld.shared.b128 %q0, [slot]; //:use
            mbarrier.arrive.shared.b64 _, [empty];
        warp 0:
            wait empty, 0; //-read
            {_ask("more")} //:again
            wait more, 0;
        """,
        Lacks("wait", "mbarrier.try_wait", "ask", "use"),
        Lacks("read", "mbarrier.try_wait", "ask", "again"),
    ),
}
