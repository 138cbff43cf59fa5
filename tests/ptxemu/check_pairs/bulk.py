"""Bulk and tensor (TMA) copies, and answers of launch control."""

from __future__ import annotations

from tests.ptxemu.check_pairs import parts
from tests.ptxemu.check_pairs.scenario import Lacks, Scenario, handed_over


def _ask(barrier: str) -> str:
    """Request the work of a cluster that does not run yet; the answer has 16 bytes."""
    return f"""{parts.expect(16, barrier)}
        @%first clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128\
 [slot], [{barrier}];"""


_ARRIVE = "cp.async.mbarrier.arrive.noinc.shared.b64 [full];"  # once copies have landed
_SAME_STAGE = parts.TMA_LOAD.replace("full", "other")

SCENARIOS = {
    # The reader of the tile has waited for its bytes.
    "TMA load": handed_over(
        Lacks("wait", "mbarrier.try_wait", "load", "use"),
        fill=parts.tma_load(),
        wait="wait full, 0; //-wait",
    ),
    # One warp waits for the bytes, and signals another by a named barrier.
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
    "expect_tx before an arrival": Scenario(
        f"""// cp.async arrives asynchronously: by then the bytes need not be announced.
        warp 0:
            @%first mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [full], 128; //:expect
            {parts.BULK_LOAD}
            bar.warp.sync -1;
            mbarrier.arrive.shared.b64 _, [full]; //~copies: {_ARRIVE}
        warp 1:
            wait full, 0;
            ld.shared.b32 %r1, [%mine];
        """,
        Lacks("copies", "arrive.expect_tx", later="expect", check="mbarrier"),
    ),
    "expect_tx and the arrival of another warp": Scenario(
        f"""// That arrival has to come later, or the phase may end without the bytes.
        warp 0:
            @%first mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [full], 128; //:expect
            {parts.BULK_LOAD}
            bar.arrive 1, 64; //-barrier
        warp 1:
            bar.sync 1, 64; //-barrier
            @%first mbarrier.arrive.shared.b64 _, [full];
            wait full, 0;
            ld.shared.b32 %r1, [%mine];
        """,
        Lacks("barrier", "arrive.expect_tx", later="expect", check="mbarrier"),
    ),
    "more bytes while some are outstanding": Scenario(
        f"""// A phase that lacks bytes may be given more, without another arrival.
        warp 0:
            {parts.expect()}
            @%first mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [full], 128;
            {parts.TMA_LOAD}
            {parts.TMA_LOAD.replace("[tile]", "[spare]")}
        warp 1:
            wait full, 0;
            ld.shared.b32 %r1, [%mine+1024];
        """,
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
        f"""// A barrier orders them; the fence is for the manual alone (test_check_manual.py).
        warp 0:
            @%first mbarrier.init.shared.b64 [slot], 1; //:init
            @%first fence.mbarrier_init.release.cluster;
        all: bar.sync 1, 64; //-barrier
        warp 1: {parts.tma_load(barrier="slot")}
        all:
            bar.sync 1, 64;
            wait slot, 0;
        """,
        Lacks("barrier", "a barrier after mbarrier.init", "init", "load", "mbarrier"),
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


_COPY = "cp.async.ca.shared.global [%mine], [%in], 4; //:copy"

SCENARIOS |= {
    "cp.async.wait_group": Scenario(
        f"""// A lane reads what it copied itself.
        all:
            {_COPY}
            cp.async.commit_group; //-commit
            cp.async.wait_group 0; //-wait
            ld.shared.b32 %r2, [%mine]; //:use
        """,
        Lacks("wait", "cp.async.wait_group", "copy", "use"),
        Lacks("commit", "cp.async.commit_group", "copy", "use"),
    ),
    "cp.async.wait_group 1": Scenario(
        f"""// The newest group may be under way; of older ones the data is there.
        all:
            {_COPY}
            cp.async.commit_group;
            cp.async.ca.shared.global [%mine+128], [%in], 4;
            cp.async.commit_group;
            cp.async.wait_group 1; //~more: cp.async.wait_group 2;
            ld.shared.b32 %r2, [%mine]; //:use
            cp.async.wait_group 0;
        """,
        Lacks("more", "cp.async.wait_group", "copy", "use"),
    ),
    "cp.async for another lane": Scenario(
        f"""// Waiting for groups tells a lane of its own copies alone.
        all:
            {_COPY}
            cp.async.wait_all;
            bar.warp.sync -1; //-meet
            ld.shared.b32 %r2, [%next]; //:use
        """,
        Lacks("meet", "bar.warp.sync", "copy", "use"),
    ),
    "cp.async over cp.async": Scenario(
        f"""// Copies of one thread are in no order but that of its waits.
        all:
            cp.async.ca.shared.global [%mine], [%in], 4; //:before
            cp.async.wait_all; //-wait
            {_COPY}
            cp.async.wait_all;
            ld.shared.b32 %r2, [%mine];
        """,
        Lacks("wait", "cp.async.wait_group", "before", "copy"),
    ),
    # Another warp needs a barrier after the wait.
    "cp.async.wait_all": handed_over(
        Lacks("wait", "cp.async.wait_group", "copy", "use"),
        Lacks("barrier", "barrier", "copy", "use"),
        signal="cp.async.wait_all; //-wait\nbar.sync 1, 64; //-barrier",
        wait="bar.sync 1, 64; //-barrier",
        fill=_COPY,
    ),
    # The mbarrier signals that the copies of all lanes have arrived.
    "cp.async.mbarrier.arrive.noinc": handed_over(
        Lacks("plain", "cp.async.mbarrier.arrive", "copy", "use"),
        Lacks("wait", "an mbarrier arrival and a wait", "copy", "use"),
        signal=f"{_ARRIVE} //~plain: mbarrier.arrive.shared.b64 _, [full];",
        wait="wait full, 0; //-wait",
        fill=_COPY,
    ),
    # Without .noinc the instruction offsets its own arrival, so another one has to complete the
    # phase.
    "cp.async.mbarrier.arrive": handed_over(
        Lacks("arrive", "cp.async.mbarrier.arrive", "copy", "use"),
        signal="""cp.async.mbarrier.arrive.shared.b64 [full]; //-arrive
            mbarrier.arrive.shared.b64 _, [full];""",
        wait="wait full, 0;",
        fill=_COPY,
    ),
    "cp.async into what is still read": Scenario(
        f"""// The readers arrive before the next copy is issued.
        warp 0:
            ld.shared.b32 %r2, [%mine]; //:use
            mbarrier.arrive.shared.b64 _, [empty];
        warp 1:
            wait empty, 0; //-wait
            {_COPY}
            cp.async.wait_all;
        """,
        Lacks("wait", "mbarrier arrival and a wait", "use", "copy"),
    ),
    "cp.async over ordinary stores": Scenario(
        f"""// cp.async is no part of the async proxy: between lanes, their barrier is enough.
        all:
            st.shared.b32 [%next], %zero; //:fill
            bar.warp.sync 0xffffffff; //-sync
            {_COPY}
            cp.async.wait_all;
        """,
        Lacks("sync", "bar.warp.sync", "fill", "copy"),
    ),
    "cp.async to an MMA": Scenario(
        f"""// An MMA reads it without a proxy fence: kernels right on hardware rely on that.
        warp 0:
            mad.wide.u32 %d0, %lane, 16, %input;
            mov.u32 %r2, a;
            mad.lo.u32 %r2, %lane, 16, %r2;
            cp.async.cg.shared.global [%r2], [%d0], 16; //:copy
            {_ARRIVE}
        warp 1:
            wait full, 0; //-wait
            {parts.MULTIPLY}
        """,
        Lacks("wait", "an mbarrier arrival and a wait", "copy", "mma"),
    ),
}

# Bytes are announced without an arrival: an arrival of the phase has to come after expect_tx.
_ANNOUNCE = f"""@%first mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [full], 128; //:expect
            {parts.BULK_LOAD}"""

SCENARIOS |= {
    "expect_tx and an arrival": Scenario(
        f"""// The warp that announces arrives; in the variant another warp does.
        warp 0:
            {_ANNOUNCE}
            @%first mbarrier.arrive.shared.b64 _, [full]; //-other
        warp 1:
            //~other: @%first mbarrier.arrive.shared.b64 _, [full];
            wait full, 0;
            ld.shared.b32 %r1, [%mine];
        """,
        Lacks("other", "an arrival after expect_tx", "expect", check="mbarrier"),
    ),
    "expect_tx and asynchronous arrivals": Scenario(
        f"""// They may come as soon as they are issued.
        warp 0:
            {_ANNOUNCE}
            bar.arrive 1, 64; //-order
        warp 1:
            bar.sync 1, 64; //-order
            cp.async.ca.shared.global [%mine+1024], [%in], 4;
            {_ARRIVE}
        warp 2:
            wait full, 0;
            ld.shared.b32 %r1, [%mine];
            ld.shared.b32 %r2, [%mine+1024];
        """,
        Lacks("order", "an arrival after expect_tx", "expect", check="mbarrier"),
        barriers={"full": 32},
    ),
    "expect_tx after arrive.expect_tx": Scenario(
        f"""// Bytes that were announced before are still missing.
        all:
            {parts.expect(64)}
            @%first mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [full], 64;
            {parts.BULK_LOAD}
            wait full, 0;
            ld.shared.b32 %r1, [%mine];
        """,
    ),
}


# Tensor maps in global memory that the kernel writes itself need a release and an acquire of the
# tensormap proxy between the write and the instruction that uses the map.

_PLACE = "add.u64 %d3, %output, 8192;"
_READ = """mad.wide.u32 %d1, %lane, 4, %from;
    ld.b32 %r1, [%d1];"""
_WRITE = f"""{_PLACE}
    {_READ}
    mad.wide.u32 %d2, %lane, 4, %d3;
    st.global.b32 [%d2], %r1; //:fill"""
_RELEASE = "fence.proxy.tensormap::generic.release.gpu;"
_ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%d3], 128;"
_OTHER = "fence.proxy.tensormap::generic.acquire.gpu [%output], 128;"
_LOAD = f"""{parts.expect()}
    {parts.TMA_LOAD.replace("%from", "%d3")} //:load
    wait full, 0;"""
_MISSING_RELEASE, _MISSING_ACQUIRE = "generic.release", "generic.acquire"
_EDIT = "@%first tensormap.replace.tile.global_address.{}.b1024.b64 [{}], %input; //:edit"
_SYNC = "bar.warp.sync 0xffffffff;"
_FLAG = "[%output+4096]"
_POLL = (
    f"{{ POLL: ld.acquire.gpu.global.b32 %r1, {_FLAG}; setp.ne.u32 %p1, %r1, 1; @%p1 bra POLL; }}"
)

SCENARIOS |= {
    "a tensor map that its warp has stored": Scenario(
        f"""// Ordinary stores, then the warp itself loads through the map.
        warp 0:
            {_WRITE}
            {_RELEASE} //-release
            {_SYNC}
            {_ACQUIRE} //-acquire //~other: {_OTHER}
            {_LOAD}
        """,
        Lacks("release", _MISSING_RELEASE, "fill", "load"),
        Lacks("acquire other", _MISSING_ACQUIRE, "fill", "load"),
    ),
    "a tensor map that another warp has stored": Scenario(
        f"""// The acquire is behind the barrier, and another warp may make it.
        all: {_PLACE}
        warp 0:
            {_WRITE}
            {_RELEASE} //-release
        all: bar.sync 1, 96; //-barrier
        warp 1: {_ACQUIRE} //-acquire
        all: bar.sync 2, 96; //-second
        warp 2:
            {_LOAD}
        """,
        Lacks("release", _MISSING_RELEASE, "fill", "load"),
        Lacks("acquire barrier", _MISSING_ACQUIRE, "fill", "load"),
        Lacks("second", _MISSING_ACQUIRE, "fill", "load"),
        barriers={"full": 1},
    ),
    "a tensor map edited in global memory": Scenario(
        f"""// tensormap.replace by one lane; the map was complete before.
        warp 0:
            {_WRITE}
            {_SYNC}
            {_EDIT.format("global", "%d3")}
            {_RELEASE} //-release
            {_SYNC}
            {_ACQUIRE} //-acquire
            {_LOAD}
        """,
        Lacks("release", _MISSING_RELEASE, "edit", "load"),
        Lacks("acquire", _MISSING_ACQUIRE, "edit", "load"),
    ),
    "a tensor map edited in shared memory": Scenario(
        f"""// tensormap.cp_fenceproxy copies it to global memory, and is a release.
        warp 0:
            {_PLACE}
            {_READ}
            st.shared.b32 [%mine], %r1;
            {_SYNC} //-first
            mov.u32 %r2, tile;
            {_EDIT.format("shared::cta", "%r2")}
            {_SYNC} //-sync
            tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned\
 [%d3], [%r2], 128; //:copy
            {_ACQUIRE} //-acquire
            {_LOAD.replace("[tile]", "[spare]")}
        """,
        Lacks("acquire", _MISSING_ACQUIRE, "copy", "load"),
        Lacks("sync", "bar.warp.sync", "edit", "copy"),
    ),
    "a tensor map of another CTA": Scenario(
        f"""// Released by a flag in global memory, acquired behind it.
        all: {_PLACE}
        cta 0:
            {_WRITE}
            {_RELEASE} //-release
            {_SYNC}
            @%first st.release.gpu.global.b32 {_FLAG}, 1;
        cta 1:
            {_POLL}
            {_ACQUIRE} //-acquire
            {_LOAD}
        """,
        Lacks("release", _MISSING_RELEASE, "fill", "load"),
        Lacks("acquire", _MISSING_ACQUIRE, "fill", "load"),
    ),
}
