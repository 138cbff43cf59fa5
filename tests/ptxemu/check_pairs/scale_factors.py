"""tcgen05.cp and the scale factors of block-scaled MMAs."""

from __future__ import annotations

from tests.ptxemu.check_pairs.scenario import Lacks, Scenario

# a and b are operands of 128 x 8 x 32 e4m3, too; scale factors of A in columns 16 to 19, B in 20
_SET = """mov.u32 %r0, tile;
and.b32 %r0, %r0, 0x3ffff;
shr.u32 %r0, %r0, 4;
cvt.u64.u32 %d0, %r0;
or.b64 %d0, %d0, 0x0000400800080000;
mov.u32 %idesc, 0x08820000;
add.u32 %r20, %tmem, 16;
add.u32 %r21, %tmem, 20;
"""
_COPY_A = "@%first tcgen05.cp.cta_group::1.32x128b.warpx4 [%r20], %d0;"
_COPY_B = "@%first tcgen05.cp.cta_group::1.32x128b.warpx4 [%r21], %d0;"
_MMA = (
    "@%first tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32"
    " [%tmem], %a, %b, %idesc, [%r20], [%r21], 0;"
)
_COMMIT = "@%first tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [done];"
_HANDED = _COMMIT.replace("done", "handed")
_ZEROS = f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r22], {{{', '.join(['%zero'] * 8)}}};"
_READ = "tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r1, %r2, %r3, %r4}, [%r22];"

SCENARIOS = [
    Scenario(
        "a load to tcgen05.cp",
        f"""
        // Nothing but the wait for the bytes; the MMA behind the copies needs no wait at all.
        {_SET}
        warp 0:
            @%first mbarrier.arrive.expect_tx.shared.b64 _, [full], 512;
            @%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes\
 [tile], [%input], 512, [full]; //:load
        warp 1:
            wait full, 0; //-wait
            {_COPY_A} //:copy
            {_COPY_B}
            {_MMA}
            {_COMMIT}
        all:
            wait done, 0;
        """,
        {"wait": Lacks("mbarrier.try_wait", "load", "copy")},
        barriers={"full": 1, "done": 1},
    ),
    Scenario(
        "ordinary stores to tcgen05.cp",
        f"""
        // Shared memory is read in the async proxy.
        {_SET}
        warp 0:
            st.shared.b32 [%mine], %zero; //:fill
            fence.proxy.async.shared::cta; //-fence
        all:
            bar.sync 1, 128; //-barrier
        warp 1:
            {_COPY_A} //:copy
            {_COMMIT}
        all:
            wait done, 0;
        """,
        {
            "fence": Lacks("fence.proxy.async", "fill", "copy"),
            "barrier": Lacks("barrier", "fill", "copy"),
        },
        barriers={"done": 1},
    ),
    Scenario(
        "tcgen05.cp to the next load",
        f"""
        // Shared memory is free again when the copy has completed.
        {_SET}
        warp 0:
            {_COPY_A} //:copy
            {_COMMIT}
            wait done, 0; //-wait
            @%first mbarrier.arrive.expect_tx.shared.b64 _, [full], 512;
            @%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes\
 [tile], [%input], 512, [full]; //:load
        all:
            wait full, 0;
        """,
        {"wait": Lacks("tcgen05.commit", "copy", "load")},
        barriers={"full": 1, "done": 1},
    ),
    Scenario(
        "tcgen05.cp to tcgen05.ld",
        f"""
        // The copy has completed behind the wait for the commit behind it.
        {_SET}
        warp 0:
            {_COPY_A} //:copy
            {_COMMIT}
        warp 1:
            wait done, 0; //-wait
            add.u32 %r22, %lanes, 16;
            {_READ} //:read
            tcgen05.wait::ld.sync.aligned;
        all:
            wait done, 0;
        """,
        {"wait": Lacks("tcgen05.commit", "copy", "read")},
        barriers={"done": 1},
    ),
    Scenario(
        "tcgen05.ld to tcgen05.cp",
        f"""
        // Columns are overwritten when all has been read from them.
        {_SET}
        warp 0:
            add.u32 %r22, %lanes, 16;
            {_READ} //:read
            tcgen05.wait::ld.sync.aligned; //-complete
            mbarrier.arrive.shared.b64 _, [free];
        warp 1:
            wait free, 0; //-wait
            {_COPY_A} //:copy
            {_COMMIT}
        all:
            wait done, 0;
        """,
        {
            "complete": Lacks("tcgen05.wait::ld", "read", "copy"),
            "wait": Lacks("an mbarrier arrival and a wait", "read", "copy"),
        },
        barriers={"free": 32, "done": 1},
    ),
    Scenario(
        "tcgen05.st of scale factors to an MMA",
        f"""
        // Each warp writes its quarter of the lanes.
        {_SET}
        add.u32 %r22, %lanes, 16;
        {_ZEROS} //:store
        tcgen05.wait::st.sync.aligned; //-complete
        mbarrier.arrive.shared.b64 _, [full];
        warp 1:
            wait full, 0; //-wait
            {_MMA} //:mma
            {_COMMIT}
        all:
            wait done, 0;
        """,
        {
            "complete": Lacks("tcgen05.wait::st", "store", "mma"),
            "wait": Lacks("an mbarrier arrival and a wait", "store", "mma"),
        },
        barriers={"full": 128, "done": 1},
    ),
    Scenario(
        "scale factors of the next MMA",
        f"""
        // Copies and MMAs of one thread run in order, those of two threads do not.
        {_SET}
        warp 0:
            {_COPY_A}
            {_COPY_B}
            {_MMA}
            {_COPY_A}
            {_COPY_B}
            {_MMA} //:mma
            {_HANDED}
        warp 1:
            wait handed, 0; //-wait
            {_COPY_A} //:copy
            {_COPY_B}
            {_MMA}
            {_COMMIT}
        all:
            wait done, 0;
        """,
        {"wait": Lacks("tcgen05.commit", "mma", "copy")},
        barriers={"handed": 1, "done": 1},
    ),
    Scenario(
        "scale factors in two CTAs",
        """
        // CTA 0 copies and multiplies for both: what CTA 1 wrote needs its own fence.
        mov.u32 %r0, tile;
        and.b32 %r0, %r0, 0x3ffff;
        shr.u32 %r0, %r0, 4;
        cvt.u64.u32 %d0, %r0;
        or.b64 %d0, %d0, 0x0000400800080000;
        mov.u32 %r10, 0x10840000;
        add.u32 %r20, %tmem, 16;
        add.u32 %r21, %tmem, 20;
        mov.b16 %h0, 3;
        cta 1 warp 0:
            st.shared.b32 [%mine], %zero; //:fill
            fence.proxy.async; //-fence
        all:
            barrier.cluster.arrive.aligned; //~relaxed: barrier.cluster.arrive.relaxed.aligned;
            barrier.cluster.wait.aligned;
        cta 0 warp 0:
            @%first tcgen05.cp.cta_group::2.32x128b.warpx4 [%r20], %d0; //:copy
            @%first tcgen05.cp.cta_group::2.32x128b.warpx4 [%r21], %d0;
            @%first tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale\
 [%tmem], %a, %b, %r10, [%r20], [%r21], 0; //:mma
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
            "fence": Lacks("fence.proxy.async", "fill", "copy"),
            "relaxed": Lacks("release", "fill", "copy"),
            "wait": Lacks("tcgen05.commit", "mma", "read"),
        },
        cluster=2,
        barriers={"done": 1},
    ),
    Scenario(
        "a narrow A to the MMA of another thread",
        f"""
        // The same for elements that get a byte each on the way to tensor memory.
        mov.u32 %idesc, 0x08020290;
        add.u32 %r20, %tmem, 16;
        warp 0:
            @%first tcgen05.cp.cta_group::1.128x256b.b8x16.b4x16_p64 [%r20], %a; //:copy
            {_HANDED}
        warp 1:
            wait handed, 0; //-wait
            @%first tcgen05.mma.cta_group::1.kind::f8f6f4 [%tmem], [%r20], %b, %idesc, 0; //:mma
            {_COMMIT}
        all:
            wait done, 0;
        """,
        {"wait": Lacks("tcgen05.commit", "copy", "mma")},
        barriers={"handed": 1, "done": 1},
    ),
    Scenario(
        "rows of A that an MMA moves",
        f"""
        // A is not only read then.
        mov.u32 %idesc, 0x08020010;
        add.u32 %r20, %tmem, 16;
        add.u32 %r22, %lanes, 16;
        {_ZEROS}
        tcgen05.wait::st.sync.aligned;
        bar.sync 1, 128;
        warp 0:
            @%first tcgen05.mma.cta_group::1.kind::f8f6f4.ashift.collector::a::discard\
 [%tmem], [%r20], %b, %idesc, 0; //:mma
            {_COMMIT}
        warp 1:
            wait done, 0; //-wait
            {_READ} //:read
            tcgen05.wait::ld.sync.aligned;
        all:
            wait done, 0;
        """,
        {"wait": Lacks("tcgen05.commit", "mma", "read")},
        barriers={"done": 1},
    ),
    Scenario(
        "scale factors of B in the upper half of the lanes of a pair",
        f"""
        // M = 128 by a pair: the MMA of CTA 0 reads the last quarter of CTA 1's, too.
        mov.u32 %idesc, 0x08840000;
        add.u32 %r20, %tmem, 16;
        add.u32 %r21, %tmem, 20;
        add.u32 %r22, %lanes, 16;
        mov.b16 %h0, 3;
        {_ZEROS}
        tcgen05.wait::st.sync.aligned;
        barrier.cluster.arrive.aligned;
        barrier.cluster.wait.aligned;
        cta 1 warp 3:
            add.u32 %r22, %r22, 4;
            tcgen05.st.sync.aligned.32x32b.x1.b32 [%r22], {{%zero}}; //:store
            tcgen05.wait::st.sync.aligned; //-complete
        all:
            barrier.cluster.arrive.aligned;
            barrier.cluster.wait.aligned;
        cta 0 warp 0:
            @%first tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale\
 [%tmem], %a, %b, %idesc, [%r20], [%r21], 0; //:mma
            @%first tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster\
.multicast::cluster.b64 [done], %h0;
        all:
            wait.cluster done, 0;
        """,
        {"complete": Lacks("tcgen05.wait::st", "store", "mma")},
        cluster=2,
        barriers={"done": 1},
    ),
]
