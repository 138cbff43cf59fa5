"""Edges that kernels of others, known right on hardware, rely on; each names one of them."""

from __future__ import annotations

from tests.ptxemu.check_pairs.scenario import Lacks, Scenario
from tests.ptxemu.check_pairs.tensor import _COMMIT, _MMA

_ADDRESS = """
            mad.lo.u32 %r1, %lane, 4, %zero;
            cvt.u64.u32 %d0, %r1;
"""

SCENARIOS = [
    Scenario(
        "equal values stored by two warps",
        f"""
        // FlashAttention-4, flash_bwd_preprocess: rows that two tiles share.
        all: {_ADDRESS}
            add.u64 %d0, %d0, %output;
            add.u32 %r2, %lane, 1; //~other: add.u32 %r2, %thread, 1;
            st.global.b32 [%d0], %r2; //:fill
        """,
        {"other": Lacks("barrier", "fill", "fill")},
        warps=2,
    ),
    Scenario(
        "one value stored by two warps",
        """
        // CUTLASS, dense_gemm_ptr_array.py: every warp copies the tensor maps.
        all:
            mov.u32 %r2, 7; //~other: add.u32 %r2, %warp, 7;
            st.global.b32 [%output], %r2; //:fill
        """,
        {"other": Lacks("barrier", "fill", "fill")},
        warps=2,
    ),
    Scenario(
        "equal tiles stored by two warps",
        """
        // CUTLASS, tma_load_store.py: each of its warps stores the tile.
        warp 0:
            st.shared.b32 [%mine], %lane;
            st.shared.b32 [%mine+128], %thread; //~other: st.shared.b32 [%mine+128], 7;
            fence.proxy.async;
        all:
            bar.sync 1, 64;
            mov.u32 %r1, tile;
            mad.lo.u32 %r1, %warp, 128, %r1;
            @%first cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group \
[%to, {%zero, %zero}], [%r1]; //:store
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group 0;
        """,
        {"other": Lacks("barrier", "store", "store")},
        warps=2,
    ),
    Scenario(
        "equal copies to a peer by two warps",
        """
        // CUTLASS, 01_gemm_split_k_fp16.py: each of four warps copies the tile to the peer.
        cta 0 warp 0:
            st.shared.b32 [%mine], %lane;
            fence.proxy.async;
        cta 0:
            bar.sync 1, 64;
            mapa.shared::cluster.u32 %r1, spare, %peer;
            mapa.shared::cluster.u32 %r2, full, %peer;
        cta 1:
            @%one mbarrier.arrive.expect_tx.shared.b64 _, [full], 256;
        cta 0 warp 0:
            @%first cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes \
[%r1], [tile], 128, [%r2]; //:first
        cta 0 warp 1:
            mov.u32 %r3, tile; //~other: mov.u32 %r3, spare;
            @%first cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes \
[%r1], [%r3], 128, [%r2]; //:second
        cta 1:
            wait.cluster full, 0;
        """,
        {"other": Lacks("try_wait", "first", "second")},
        cluster=2,
        barriers={"full": 1},
    ),
    Scenario(
        "ordinary stores before cp.async.mbarrier.arrive",
        f"""
        // NVIDIA, fmha_bwd.py: rows beyond the end are filled with zeros.
        warp 0: {_ADDRESS}
            add.u64 %d0, %d0, %input;
            cp.async.ca.shared.global [%mine], [%d0], 4;
            st.shared.b32 [%mine+128], %zero; //:fill //-late
            cp.async.mbarrier.arrive.noinc.shared.b64 [full];
            //~late: st.shared.b32 [%mine+128], %zero; //:fill
        warp 1:
            wait full, 0;
            ld.shared.b32 %r2, [%mine+128]; //:use
        """,
        {"late": Lacks("barrier", "fill", "use")},
        barriers={"full": 32},
    ),
    Scenario(
        "tcgen05.fence behind a relaxed wait",
        f"""
        // CUTLASS, cute_ext/blackwell/dense_gemm_2sm.py: its epilogue waits for the accumulators.
        warp 0:
            {_MMA} //:mma
            {_COMMIT}
        all:
            POLL: mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 %again, [done], 0;
            @!%again bra POLL;
            tcgen05.fence::after_thread_sync; //-fence
            tcgen05.ld.sync.aligned.32x32b.x4.b32 {{%r1, %r2, %r3, %r4}}, [%lanes]; //:read
            tcgen05.wait::ld.sync.aligned;
            wait done, 0;
        """,
        {"fence": Lacks("tcgen05.commit", "mma", "read")},
        barriers={"done": 1},
    ),
    Scenario(
        "landed bytes and a relaxed cluster barrier",
        """
        // CUTLASS, tma_multicast.py: one CTA waits for the bytes and tells the other.
        cta 0:
            @%one mbarrier.arrive.expect_tx.shared.b64 _, [full], 128;
            @%one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes \
[tile], [%input], 128, [full]; //:load
            wait full, 0; //-wait
        all:
            barrier.cluster.arrive.relaxed.aligned;
            barrier.cluster.wait.aligned;
        cta 1:
            mapa.shared::cluster.u32 %r1, %mine, %peer;
            ld.shared::cluster.b32 %r2, [%r1]; //:use
        cta 0:
            wait full, 0;
        """,
        {"wait": Lacks("try_wait", "load", "use")},
        cluster=2,
        barriers={"full": 1},
        warps=2,
    ),
]
