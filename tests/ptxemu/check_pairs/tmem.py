"""Tensor memory between warps: tcgen05.st, tcgen05.ld, allocation."""

from __future__ import annotations

from tests.ptxemu.check_pairs.scenario import Lacks, Scenario

_WRITE = "tcgen05.st.sync.aligned.32x32b.x4.b32 [%lanes], {%lane, %lane, %lane, %lane};"
_READ = "tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r1, %r2, %r3, %r4}, [%lanes];"
_ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 32;"
_DEALLOC = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tmem, 32;"

SCENARIOS = [
    Scenario(
        "tcgen05.st to an MMA",
        """
        // A in tensor memory, as the P of attention.
        warp 0:
            add.u32 %lanes, %lanes, 16;
            tcgen05.st.sync.aligned.32x32b.x4.b32 [%lanes], {%lane, %lane, %lane, %lane}; //:store
            tcgen05.wait::st.sync.aligned; //-complete
            mbarrier.arrive.shared.b64 _, [full];
        warp 1:
            wait full, 0; //-wait
            add.u32 %r9, %tmem, 16;
            @%first tcgen05.mma.cta_group::1.kind::f16 [%tmem], [%r9], %b, %idesc, 0; //:mma
            @%first tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [done];
        all:
            wait done, 0;
        """,
        {
            "complete": Lacks("tcgen05.wait::st", "store", "mma"),
            "wait": Lacks("an mbarrier arrival and a wait", "store", "mma"),
        },
        barriers={"full": 32, "done": 1},
    ),
    Scenario(
        "an MMA to tcgen05.st",
        """
        // A in tensor memory is written again when the MMA that reads it has completed.
        warp 0:
            add.u32 %r9, %tmem, 16;
            @%first tcgen05.mma.cta_group::1.kind::f16 [%tmem], [%r9], %b, %idesc, 0; //:mma
            @%first tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [done];
        warp 1:
            wait done, 0; //-wait
            add.u32 %lanes, %lanes, 16;
            tcgen05.st.sync.aligned.32x32b.x4.b32 [%lanes], {%lane, %lane, %lane, %lane}; //:store
            tcgen05.wait::st.sync.aligned;
        all:
            wait done, 0;
        """,
        {"wait": Lacks("tcgen05.commit", "mma", "store")},
        barriers={"done": 1},
    ),
    Scenario(
        "tcgen05.st to tcgen05.ld of another warp",
        f"""
        // Warps 0 and 4 reach the same lanes.
        warp 0:
            {_WRITE} //:store
            tcgen05.wait::st.sync.aligned; //-complete
            bar.sync 1, 64; //-barrier
        warp 4:
            bar.sync 1, 64; //-barrier
            mov.u32 %lanes, %tmem;
            {_READ} //:read
            tcgen05.wait::ld.sync.aligned;
        """,
        {
            "complete": Lacks("tcgen05.wait::st", "store", "read"),
            "barrier": Lacks("a barrier", "store", "read"),
        },
    ),
    Scenario(
        "tcgen05.ld to tcgen05.st of another warp",
        f"""
        // The other way round.
        warp 0:
            {_READ} //:read
            tcgen05.wait::ld.sync.aligned; //-complete
            bar.sync 1, 64; //-barrier
        warp 4:
            bar.sync 1, 64; //-barrier
            mov.u32 %lanes, %tmem;
            {_WRITE} //:store
            tcgen05.wait::st.sync.aligned;
        """,
        {
            "complete": Lacks("tcgen05.wait::ld", "read", "store"),
            "barrier": Lacks("a barrier", "read", "store"),
        },
    ),
    Scenario(
        "tcgen05.st to tcgen05.ld",
        f"""
        // Within one warp the two wait for one another, too.
        warp 0:
            {_WRITE} //:store
            tcgen05.wait::st.sync.aligned; //-complete
            {_READ} //:read
            tcgen05.wait::ld.sync.aligned;
        """,
        {"complete": Lacks("tcgen05.wait::st", "store", "read")},
    ),
    Scenario(
        "tcgen05.ld to tcgen05.st",
        f"""
        // As an accumulator is corrected in place.
        warp 0:
            {_READ} //:read
            tcgen05.wait::ld.sync.aligned; //-complete
            {_WRITE} //:store
            tcgen05.wait::st.sync.aligned;
        """,
        {"complete": Lacks("tcgen05.wait::ld", "read", "store")},
    ),
    Scenario(
        "tcgen05.alloc",
        f"""
        // The address comes by shared memory, and the columns may be used once the others know.
        warp 0:
            {_ALLOC} //:alloc
            tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
        all:
            bar.sync 1, 128; //-address //-columns
            ld.shared.b32 %tmem, [slot]; //:address
            shl.b32 %lanes, %warp, 21;
            add.u32 %lanes, %lanes, %tmem;
        warp 1:
            {_WRITE} //:store
            tcgen05.wait::st.sync.aligned;
        all:
            bar.sync 1, 128;
        warp 0:
            {_DEALLOC}
        """,
        {
            "address": Lacks("a barrier", "alloc", "address"),
            "columns": Lacks("the allocation", "alloc", "store"),
        },
        warps=4,
        bare=True,
        columns=0,
    ),
    Scenario(
        "tcgen05.dealloc",
        f"""
        // Columns are given back when nobody uses them any more.
        warp 0:
            {_ALLOC}
            tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
        all:
            bar.sync 1, 128;
            ld.shared.b32 %tmem, [slot];
            shl.b32 %lanes, %warp, 21;
            add.u32 %lanes, %lanes, %tmem;
        warp 1:
            {_READ} //:read
            tcgen05.wait::ld.sync.aligned; //-complete
        all:
            bar.sync 1, 128; //-barrier
        warp 0:
            {_DEALLOC} //:dealloc //-never
        """,
        {
            "complete": Lacks("tcgen05.wait::ld", "read", "dealloc"),
            "barrier": Lacks("deallocat", "dealloc", "read"),
            "never": Lacks("tcgen05.dealloc", check="tmem"),
        },
        warps=4,
        bare=True,
        columns=0,
    ),
    Scenario(
        "tcgen05.dealloc under a load that is used later",
        f"""
        // A load that is not complete yet matters if its registers are used.
        warp 0:
            {_ALLOC}
            tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
        all:
            bar.sync 1, 128;
            ld.shared.b32 %tmem, [slot];
            shl.b32 %lanes, %warp, 21;
            add.u32 %lanes, %lanes, %tmem;
        warp 1:
            {_READ} //:read
            setp.eq.u32 %p1, %lane, 32; //~used: setp.ne.u32 %p1, %lane, 32;
        all:
            bar.sync 1, 128;
        warp 0:
            {_DEALLOC} //:dealloc
            bar.arrive 2, 64;
        warp 1:
            bar.sync 2, 64;
            @!%p1 bra DONE;
            st.shared.b32 [%mine], %r1;
            DONE:
        """,
        {"used": Lacks("tcgen05.wait::ld", "read", "dealloc")},
        warps=4,
        bare=True,
        columns=0,
    ),
    Scenario(
        "an MMA to tcgen05.dealloc",
        """
        // The columns are in use until the MMA has completed.
        warp 0:
            tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 32;
            tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
            ld.shared.b32 %tmem, [slot];
            @%first tcgen05.mma.cta_group::1.kind::f16 [%tmem], %a, %b, %idesc, 0; //:mma
            @%first tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [done];
            wait done, 0; //-wait
            tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tmem, 32; //:dealloc
        """,
        {"wait": Lacks("tcgen05.commit", "mma", "dealloc")},
        warps=4,
        barriers={"done": 1},
        bare=True,
        columns=0,
    ),
]
