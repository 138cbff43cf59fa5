"""Flags in memory, atomics, and global memory between CTAs and proxies."""

from __future__ import annotations

from tests.ptxemu.check_pairs.scenario import Lacks, Scenario

# %d0: a word per lane of the output. The flag is behind them.
_ADDRESS = """
            mul.wide.u32 %d0, %lane, 4;
            add.u64 %d0, %d0, %output;
"""
_FLAG = "[%output+4096]"
_STORE = "@%first cp.async.bulk.global.shared::cta.bulk_group [%output], [tile], 128;"
_REDUCE = (
    "@%first cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%output], [tile], 128;"
)

SCENARIOS = [
    Scenario(
        "what its reader overwrites, as somebody else does",
        f"""
        // Two writes of the same are no race; the read before one of them and the other are.
        all: {_ADDRESS}
            mov.u32 %r2, 7;
        warp 0:
            ld.global.b32 %r1, [%d0]; //:use
            st.global.b32 [%d0], %r2;
        all:
            bar.sync 1, 64; //-barrier
        warp 1:
            st.global.b32 [%d0], %r2; //:refill
        """,
        {"barrier": Lacks("barrier", "use", "refill")},
    ),
    Scenario(
        "global memory within a CTA",
        f"""
        // A barrier orders global memory between the warps of a CTA.
        warp 0: {_ADDRESS}
            st.global.b32 [%d0], %lane; //:fill
        all:
            bar.sync 1, 64; //-barrier
        warp 1: {_ADDRESS}
            ld.global.b32 %r1, [%d0]; //:use
        """,
        {"barrier": Lacks("barrier", "fill", "use")},
    ),
    Scenario(
        "a flag",
        f"""
        // CTA 0 releases a flag, CTA 1 polls it with an acquire.
        cta 0: {_ADDRESS}
            st.global.b32 [%d0], %lane; //:fill
            bar.warp.sync 0xffffffff;
            mov.u32 %r1, 1;
            @%first st.release.gpu.global.b32 {_FLAG}, %r1; \
//~release: @%first st.relaxed.gpu.global.b32 {_FLAG}, %r1; \
//~narrow: @%first st.release.cta.global.b32 {_FLAG}, %r1;
        cta 1: {_ADDRESS}
            POLL: ld.acquire.gpu.global.b32 %r1, {_FLAG}; //-poll \
//~acquire: POLL: ld.relaxed.gpu.global.b32 %r1, {_FLAG}; \
//~near: POLL: ld.acquire.cta.global.b32 %r1, {_FLAG};
            setp.eq.u32 %p1, %r1, 0; //-poll
            @%p1 bra POLL; //-poll
            ld.global.b32 %r2, [%d0]; //:use
        """,
        {
            "release narrow": Lacks("a release", "fill", "use"),
            "acquire near poll": Lacks("an acquire", "fill", "use"),
        },
        grid=2,
    ),
    Scenario(
        "a flag for the whole CTA",
        f"""
        // One warp stores, another releases; one polls, another reads.
        cta 0 warp 0: {_ADDRESS}
            st.global.b32 [%d0], %lane; //:fill
        cta 0:
            bar.sync 1, 64; //-before
        cta 0 warp 1:
            mov.u32 %r1, 1;
            @%first st.release.gpu.global.b32 {_FLAG}, %r1;
        cta 1 warp 0:
            POLL: ld.acquire.gpu.global.b32 %r1, {_FLAG};
            setp.eq.u32 %p1, %r1, 0;
            @%p1 bra POLL;
        cta 1:
            bar.sync 1, 64; //-behind
        cta 1 warp 1: {_ADDRESS}
            ld.global.b32 %r2, [%d0]; //:use
        """,
        {
            "before": Lacks("a release", "fill", "use"),
            "behind": Lacks("an acquire", "fill", "use"),
        },
        grid=2,
    ),
    Scenario(
        "a flag passed on",
        f"""
        // CTA 1 waits for CTA 0 and tells CTA 2.
        cta 0: {_ADDRESS}
            st.global.b32 [%d0], %lane; //:fill
            bar.warp.sync 0xffffffff;
            mov.u32 %r1, 1;
            @%first st.release.gpu.global.b32 {_FLAG}, %r1;
        cta 1:
            POLL: ld.acquire.gpu.global.b32 %r1, {_FLAG}; \
//~first: POLL: ld.relaxed.gpu.global.b32 %r1, {_FLAG};
            setp.eq.u32 %p1, %r1, 0;
            @%p1 bra POLL;
            @%first st.release.gpu.global.b32 [%output+8192], %r1;
        cta 2: {_ADDRESS}
            AGAIN: ld.acquire.gpu.global.b32 %r1, [%output+8192]; \
//~second: AGAIN: ld.relaxed.gpu.global.b32 %r1, [%output+8192];
            setp.eq.u32 %p1, %r1, 0;
            @%p1 bra AGAIN;
            ld.global.b32 %r2, [%d0]; //:use
        """,
        {"first second": Lacks("an acquire", "fill", "use")},
        grid=3,
    ),
    Scenario(
        "a flag with fences",
        f"""
        // Relaxed accesses, and a fence on either side.
        cta 0: {_ADDRESS}
            st.global.b32 [%d0], %lane; //:fill
            fence.acq_rel.gpu; //-before
            bar.warp.sync 0xffffffff;
            mov.u32 %r1, 1;
            @%first st.relaxed.gpu.global.b32 {_FLAG}, %r1;
        cta 1: {_ADDRESS}
            POLL: ld.relaxed.gpu.global.b32 %r1, {_FLAG};
            setp.eq.u32 %p1, %r1, 0;
            @%p1 bra POLL;
            fence.acq_rel.gpu; //-behind
            ld.global.b32 %r2, [%d0]; //:use
        """,
        {
            "before": Lacks("a release", "fill", "use"),
            "behind": Lacks("an acquire", "fill", "use"),
        },
        grid=2,
    ),
    Scenario(
        "a counter",
        f"""
        // Whoever comes last, by an atomic, reads what the others wrote.
        all: {_ADDRESS}
            mul.wide.u32 %d1, %rank, 128;
            add.u64 %d1, %d1, %d0;
            st.global.b32 [%d1], %lane; //:fill
            bar.warp.sync 0xffffffff;
            mov.u32 %r1, 0;
            @%first atom.acq_rel.gpu.global.add.u32 %r1, {_FLAG}, 1; \
//~relaxed: @%first atom.relaxed.gpu.global.add.u32 %r1, {_FLAG}, 1;
            shfl.sync.idx.b32 %r1, %r1, 0, 31, 0xffffffff;
            setp.ne.u32 %p1, %r1, 1;
            @%p1 bra DONE;
            ld.global.b32 %r2, [%d0]; //:use
            ld.global.b32 %r2, [%d0+128]; //:other
            DONE:
        """,
        {"relaxed": Lacks("a release", "fill", "use")},
        grid=2,
    ),
    Scenario(
        "red and a poll",
        f"""
        // Several arrive by red.release at one count.
        warp 0: {_ADDRESS}
            st.global.b32 [%d0], %lane; //:fill
            bar.warp.sync 0xffffffff;
            @%first red.release.gpu.global.add.u32 {_FLAG}, 1; \
//~relaxed: @%first red.relaxed.gpu.global.add.u32 {_FLAG}, 1;
        warp 1: {_ADDRESS}
            st.global.b32 [%d0+128], %lane;
            bar.warp.sync 0xffffffff;
            @%first red.release.gpu.global.add.u32 {_FLAG}, 1;
        warp 2: {_ADDRESS}
            POLL: ld.acquire.gpu.global.b32 %r1, {_FLAG};
            setp.ne.u32 %p1, %r1, 2;
            @%p1 bra POLL;
            ld.global.b32 %r2, [%d0]; //:use
            ld.global.b32 %r2, [%d0+128];
        """,
        {"relaxed": Lacks("release", "fill", "use")},
    ),
    Scenario(
        "a flag in shared memory",
        """
        // The same within a CTA.
        warp 0:
            @%first st.shared.b32 [slot], %zero;
        all:
            bar.sync 0;
        warp 0:
            mov.u32 %r1, 1;
            st.shared.b32 [%mine], %lane; //:fill
            bar.warp.sync 0xffffffff;
            @%first st.release.cta.shared.b32 [slot], %r1; \
//~release: @%first st.relaxed.cta.shared.b32 [slot], %r1;
        warp 1:
            POLL: ld.acquire.cta.shared.b32 %r1, [slot]; \
//~acquire: POLL: ld.relaxed.cta.shared.b32 %r1, [slot];
            setp.eq.u32 %p1, %r1, 0;
            @%p1 bra POLL;
            ld.shared.b32 %r2, [%mine]; //:use
        """,
        {
            "release": Lacks("release", "fill", "use"),
            "acquire": Lacks("acquire", "fill", "use"),
        },
    ),
    Scenario(
        "atomics in shared memory",
        """
        // Atomics do not race with one another, with an ordinary access they do.
        warp 0:
            st.shared.b32 [%mine], %zero;
        all:
            bar.sync 0;
        warp 1:
            atom.shared.add.u32 %r1, [%mine], 1;
            ld.shared.b32 %r1, [%mine];
        all:
            bar.sync 0;
        warp 0:
            atom.shared.add.u32 %r1, [%mine], 1; //:add
        warp 1:
            atom.shared.add.u32 %r1, [%mine], 1; \
//~plain: st.shared.b32 [%mine], %zero; //:plain
        """,
        {"plain": Lacks("barrier", "add", "plain")},
    ),
    Scenario(
        "atomics in global memory",
        f"""
        // The same between CTAs.
        cta 0: {_ADDRESS}
            red.global.add.u32 [%d0], 1; //:add
        cta 1: {_ADDRESS}
            red.global.add.u32 [%d0], 1; //~plain: st.global.b32 [%d0], %zero; //:plain
        """,
        {"plain": Lacks("a release", "add", "plain")},
        grid=2,
    ),
    Scenario(
        "bulk store to an ordinary load",
        f"""
        // wait_group without .read: then the writes are done.
        all: {_ADDRESS}
            st.shared.b32 [%mine], %lane;
            fence.proxy.async.shared::cta;
            bar.warp.sync 0xffffffff;
            {_STORE} //:store
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group 0; //~read: cp.async.bulk.wait_group.read 0;
            bar.warp.sync 0xffffffff;
            ld.global.b32 %r1, [%d0]; //:use
        """,
        {"read": Lacks("not .read", "store", "use")},
    ),
    Scenario(
        "bulk store to another CTA",
        f"""
        // The flag is released when the store is complete.
        cta 0:
            st.shared.b32 [%mine], %lane;
            fence.proxy.async.shared::cta;
            bar.warp.sync 0xffffffff;
            {_STORE} //:store
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group 0; //~read: cp.async.bulk.wait_group.read 0;
            mov.u32 %r1, 1;
            @%first st.release.gpu.global.b32 {_FLAG}, %r1;
        cta 1: {_ADDRESS}
            POLL: ld.acquire.gpu.global.b32 %r1, {_FLAG};
            setp.eq.u32 %p1, %r1, 0;
            @%p1 bra POLL;
            ld.global.b32 %r2, [%d0]; //:use
        """,
        {"read": Lacks("not .read", "store", "use")},
        grid=2,
    ),
    Scenario(
        "ordinary stores to a bulk load",
        f"""
        // The async proxy reads global memory that was written by the generic one.
        all: {_ADDRESS}
            st.global.b32 [%d0], %lane; //:fill
            fence.proxy.async.global; //-fence //~shared: fence.proxy.async.shared::cta;
            bar.warp.sync 0xffffffff;
            @%first mbarrier.arrive.expect_tx.shared.b64 _, [full], 128;
            @%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes \
[tile], [%output], 128, [full]; //:load
            wait full, 0;
        """,
        {"fence shared": Lacks("fence.proxy.async", "fill", "load")},
        barriers={"full": 1},
    ),
    Scenario(
        "ordinary stores to a bulk load of another CTA",
        f"""
        // The same between CTAs, the fence behind the acquire.
        cta 0: {_ADDRESS}
            st.global.b32 [%d0], %lane; //:fill
            bar.warp.sync 0xffffffff;
            mov.u32 %r1, 1;
            @%first st.release.gpu.global.b32 {_FLAG}, %r1;
        cta 1:
            POLL: ld.acquire.gpu.global.b32 %r1, {_FLAG};
            setp.eq.u32 %p1, %r1, 0;
            @%p1 bra POLL;
            fence.proxy.async.global; //-fence
            bar.warp.sync 0xffffffff;
            @%first mbarrier.arrive.expect_tx.shared.b64 _, [full], 128;
            @%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes \
[tile], [%output], 128, [full]; //:load
            wait full, 0;
        """,
        {"fence": Lacks("fence.proxy.async", "fill", "load")},
        grid=2,
        barriers={"full": 1},
    ),
    Scenario(
        "bulk store over a bulk store",
        f"""
        // The second goes to the same place when the first is complete.
        all:
            st.shared.b32 [%mine], %lane;
            fence.proxy.async.shared::cta;
            bar.warp.sync 0xffffffff;
            {_STORE} //:first
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group 0; //~read: cp.async.bulk.wait_group.read 0;
            {_STORE} //:second
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group 0;
        """,
        {"read": Lacks("not .read", "first", "second")},
    ),
    Scenario(
        "bulk reductions",
        f"""
        // Reductions do not race with one another, with a store they do.
        all:
            st.shared.b32 [%mine], %lane;
            fence.proxy.async.shared::cta;
            bar.warp.sync 0xffffffff;
        cta 0:
            {_REDUCE} //:add
        cta 1:
            {_REDUCE} //~plain: {_STORE} //:store
        all:
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group 0;
        """,
        {"plain": Lacks("a release", "add", "store")},
        grid=2,
    ),
    Scenario(
        "griddepcontrol.wait",
        f"""
        // What the launch before wrote, and what it read, is touched behind the wait.
        warp 0: {_ADDRESS}
            griddepcontrol.launch_dependents;
            griddepcontrol.wait; //-wait //-late
            ld.global.b32 %r1, [%d0]; //:use
            //~late: griddepcontrol.wait;
            st.global.b32 [%d0], %lane; //:fill
        """,
        {"wait late": Lacks("griddepcontrol.wait", later="use")},
        again=True,
        warps=2,
    ),
    Scenario(
        "griddepcontrol.wait of another warp",
        f"""
        // One warp waits; a barrier tells the others.
        warp 0:
            griddepcontrol.wait;
        all:
            bar.sync 1, 64; //-barrier
        warp 1: {_ADDRESS}
            st.global.b32 [%d0], %lane; //:fill
        """,
        {"barrier": Lacks("griddepcontrol.wait", later="fill")},
        again=True,
    ),
    Scenario(
        "neighbouring bytes",
        """
        // Warps may write neighbouring bytes without a barrier, but not the same.
        all:
            add.u32 %mine, %mine, %warp; //~same: add.u32 %mine, %mine, 0;
            st.shared.b8 [%mine], %lane; //:fill
        """,
        {"same": Lacks("barrier", "fill", "fill")},
        warps=2,
    ),
]
