"""tcgen05: operands of an MMA, its accumulator, two issuers, pairs of CTAs."""

from __future__ import annotations

from tests.ptxemu.check_pairs.scenario import Lacks, Scenario

_MMA = "@%first tcgen05.mma.cta_group::1.kind::f16 [%tmem], %a, %b, %idesc, 0;"
_COMMIT = "@%first tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [done];"
_LOAD = (
    "@%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [a], [%input], 4352, [full];"
)
_EXPECT = "@%first mbarrier.arrive.expect_tx.shared.b64 _, [full], 4352;"
_READ = "tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r1, %r2, %r3, %r4}, [%lanes];"
_ROW = "mov.u32 %r9, a; mad.lo.u32 %r9, %lane, 16, %r9;"  # 16 bytes of A per lane

SCENARIOS = [
    Scenario(
        "ordinary stores to an MMA",
        f"""
        // What the warps wrote is read in the async proxy.
        warp 0:
            {_ROW}
            st.shared.b32 [%r9], %zero; //:fill
            fence.proxy.async.shared::cta; //-fence
        all:
            bar.sync 1, 128; //-barrier
        warp 1:
            {_MMA} //:mma
            {_COMMIT}
        all:
            wait done, 0;
        """,
        {
            "fence": Lacks("fence.proxy.async", "fill", "mma"),
            "barrier": Lacks("barrier", "fill", "mma"),
        },
        barriers={"done": 1},
    ),
    Scenario(
        "a load to an MMA",
        f"""
        // No proxy fence between two operations of the async proxy, only the wait.
        warp 0:
            {_EXPECT}
            {_LOAD} //:load
        warp 1:
            wait full, 0; //-wait
            {_MMA} //:mma
            {_COMMIT}
        all:
            wait done, 0;
        """,
        {"wait": Lacks("mbarrier.try_wait", "load", "mma")},
        barriers={"full": 1, "done": 1},
    ),
    Scenario(
        "a load into operands",
        f"""
        // The stage is loaded again when the MMA that reads it has completed.
        warp 0:
            {_MMA} //:mma
            {_COMMIT} //-early
            //~early: {_COMMIT.replace("done", "late")}
        warp 1:
            wait done, 0; //-wait //-early
            {_EXPECT}
            {_LOAD} //:load
            wait full, 0;
            //~early: wait late, 0;
        """,
        {"wait early": Lacks("tcgen05.commit", "mma", "load")},
        barriers={"full": 1, "done": 1, "late": 1},
    ),
    Scenario(
        "ordinary stores over operands",
        f"""
        // The same with ordinary stores.
        warp 0:
            {_MMA} //:mma
            {_COMMIT}
        warp 1:
            wait done, 0; //-wait
            {_ROW}
            st.shared.b32 [%r9], %zero; //:fill
        all:
            wait done, 0;
        """,
        {"wait": Lacks("tcgen05.commit", "mma", "fill")},
        barriers={"done": 1},
    ),
    Scenario(
        "an MMA to tcgen05.ld",
        f"""
        // The accumulator is read behind the wait for the commit behind the MMA.
        warp 0:
            //~early: {_COMMIT}
            {_MMA} //:mma
            {_COMMIT} //-early
        warp 1:
            wait done, 0; //-wait
            {_READ} //:read
            tcgen05.wait::ld.sync.aligned;
        all:
            wait done, 0;
        """,
        {"wait early": Lacks("tcgen05.commit", "mma", "read")},
        barriers={"done": 1},
    ),
    Scenario(
        "tcgen05.commit of whoever issued",
        f"""
        // A commit is for the operations of its own thread, a barrier does not change that.
        warp 0:
            {_MMA} //:mma
            {_COMMIT} //-other
        all:
            bar.sync 1, 128;
        warp 1:
            //~other: {_COMMIT}
            wait done, 0;
            {_READ} //:read
            tcgen05.wait::ld.sync.aligned;
        all:
            wait done, 0;
        """,
        {"other": Lacks("tcgen05.commit", "mma", "read")},
        barriers={"done": 1},
    ),
    Scenario(
        "handed on by a commit",
        f"""
        // Warp 1 overwrites what warp 2 has read: it knows by the MMA that waited for warp 2.
        warp 2:
            ld.shared.b32 %r1, [%mine]; //:use
            mbarrier.arrive.shared.b64 _, [free];
        warp 0:
            wait free, 0; //-first
            {_MMA}
            {_COMMIT}
        warp 1:
            wait done, 0; //-second
            st.shared.b32 [%mine], %lane; //:fill
        all:
            wait done, 0;
        """,
        {"first second": Lacks("an mbarrier arrival and a wait", "fill", "use")},
        barriers={"free": 32, "done": 1},
    ),
    Scenario(
        "MMAs of one thread",
        f"""
        // They run in order: one commit behind the last is enough, one between is not.
        warp 0:
            {_MMA}
            //~between: {_COMMIT}
            {_MMA.replace(", 0;", ", 1;")} //:last
            {_COMMIT} //-between
        warp 1:
            wait done, 0;
            {_READ} //:read
            tcgen05.wait::ld.sync.aligned;
        all:
            wait done, 0;
        """,
        {"between": Lacks("tcgen05.commit", "last", "read")},
        barriers={"done": 1},
    ),
    Scenario(
        "MMAs of two warps",
        f"""
        // Two threads that issue to one accumulator have to wait for one another.
        warp 0:
            {_MMA} //:first
            {_COMMIT.replace("done", "handed")}
        warp 1:
            wait handed, 0; //-wait
            {_MMA} //:second
            {_COMMIT}
        all:
            wait done, 0;
        """,
        {"wait": Lacks("tcgen05.commit", "first", "second")},
        barriers={"handed": 1, "done": 1},
    ),
    Scenario(
        "accumulators in turn",
        f"""
        // The next MMA writes other columns than those that are being read.
        warp 0:
            {_MMA}
            {_COMMIT.replace("done", "first")}
            add.u32 %r9, %tmem, 8; //~same: mov.u32 %r9, %tmem;
            {_MMA.replace("[%tmem]", "[%r9]")} //:mma
            {_COMMIT}
        warp 1:
            wait first, 0;
            {_READ} //:read
            tcgen05.wait::ld.sync.aligned;
        all:
            wait done, 0;
        """,
        {"same": Lacks("tcgen05.commit", "mma", "read")},
        barriers={"first": 1, "done": 1},
    ),
    Scenario(
        "tcgen05.ld to an MMA",
        f"""
        // The accumulator is overwritten when all has been read from it.
        warp 0:
            {_READ} //:read
            tcgen05.wait::ld.sync.aligned; //-complete
            mbarrier.arrive.shared.b64 _, [free];
        warp 1:
            wait free, 0; //-wait
            {_MMA} //:mma
            {_COMMIT}
        all:
            wait done, 0;
        """,
        {
            "complete": Lacks("tcgen05.wait::ld", "read", "mma"),
            "wait": Lacks("an mbarrier arrival and a wait", "read", "mma"),
        },
        barriers={"free": 32, "done": 1},
    ),
    Scenario(
        "use of the registers of tcgen05.ld",
        f"""
        // A use completes the load as a wait does: kernels right on hardware rely on it.
        warp 0:
            {_READ} //:read
            add.u32 %r5, %r1, 1; //-use //~move: mov.b32 %r5, %r1;
            mbarrier.arrive.shared.b64 _, [free];
        warp 1:
            wait free, 0;
            {_MMA} //:mma
            {_COMMIT}
        all:
            wait done, 0;
        """,
        {"use move": Lacks("tcgen05.wait::ld", "read", "mma")},
        barriers={"free": 32, "done": 1},
    ),
    Scenario(
        "operands in two CTAs",
        """
        // CTA 0 issues for both: what CTA 1 wrote needs its own fence, what it reads its own wait.
        cta 1:
            mov.u32 %r9, a;
            mad.lo.u32 %r9, %thread, 16, %r9;
            st.shared.b32 [%r9], %zero; //:fill
            fence.proxy.async; //-fence
        all:
            barrier.cluster.arrive.aligned; //~relaxed: barrier.cluster.arrive.relaxed.aligned;
            barrier.cluster.wait.aligned;
        cta 0 warp 0:
            mov.u32 %r10, 0x10040010;
            mov.b16 %h0, 3;
            @%first tcgen05.mma.cta_group::2.kind::f16 [%tmem], %a, %b, %r10, 0; //:mma
            @%first tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster\
.multicast::cluster.b64 [done], %h0;
        cta 1 warp 1:
            wait.cluster done, 0; //-wait
            tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r1, %r2, %r3, %r4}, [%lanes]; //:read
            tcgen05.wait::ld.sync.aligned;
        all:
            wait.cluster done, 0;
        """,
        {
            "fence": Lacks("fence.proxy.async", "fill", "mma"),
            "relaxed": Lacks("release", "fill", "mma"),
            "wait": Lacks("tcgen05.commit", "mma", "read"),
        },
        cluster=2,
        barriers={"done": 1},
    ),
    Scenario(
        "mbarrier.init for tcgen05.commit",
        f"""
        // The arrival of a commit is one of the async proxy.
        warp 1:
            @%first mbarrier.init.shared.b64 [slot+8], 1; //:init
            fence.mbarrier_init.release.cluster; //-fence
        all:
            bar.sync 1, 128;
        warp 0:
            {_MMA}
            {_COMMIT.replace("[done]", "[slot+8]")} //:commit
            {_COMMIT}
        all:
            wait done, 0;
        """,
        {"fence": Lacks("fence.mbarrier_init", "init", "commit", "mbarrier")},
        barriers={"done": 1},
    ),
]
