"""Synchronisation that others' kernels, known to be right on hardware, rely on; each entry names
one.
"""

from __future__ import annotations

from tests.ptxemu.check_pairs import parts
from tests.ptxemu.check_pairs.scenario import Lacks, Scenario

SCENARIOS = {
    "equal values stored by two warps": Scenario(
        """// FlashAttention-4, flash_bwd_preprocess: rows that two tiles share.
        all:
            add.u32 %r2, %lane, 1; //~other: add.u32 %r2, %thread, 1;
            st.global.b32 [%out], %r2; //:fill
        """,
        Lacks("other", "barrier", "fill", "fill"),
        warps=2,
    ),
    "equal values of tiles that overlap": Scenario(
        """// The last tile of a row begins early, so that it ends with the row.
        all:
            mad.wide.u32 %d1, %warp, 64, %out;
            mad.lo.u32 %r2, %warp, 16, %lane; //~other: mad.lo.u32 %r2, %warp, 17, %lane;
            st.global.b32 [%d1], %r2; //:fill
        """,
        Lacks("other", "barrier", "fill", "fill"),
        warps=2,
    ),
    "one value stored by two warps": Scenario(
        """// CUTLASS, dense_gemm_ptr_array.py: every warp copies the tensor maps.
        all:
            mov.u32 %r2, 7; //~other: add.u32 %r2, %warp, 7;
            st.global.b32 [%output], %r2; //:fill
        """,
        Lacks("other", "barrier", "fill", "fill"),
        warps=2,
    ),
    "a flag of shared memory that two warps set": Scenario(
        """// CUDA C++ as `if (found) any = 1;`, whose threads may store it on two lines.
        all:
            mov.u32 %r2, 7; //~other: add.u32 %r2, %warp, 7;
            st.shared.b32 [slot], %r2; //:one
            bar.sync 0; //-read
            ld.shared.b32 %r3, [slot]; //:use
            bar.sync 0;
        warp 0: st.shared.b32 [slot+4], 5;
        warp 1: st.shared.b32 [slot+4], 5;
        """,
        Lacks("other", "barrier", "one", "one"),
        Lacks("read", "barrier", "use", "one"),
        warps=2,
    ),
    "equal words of shared memory stored by two warps": Scenario(
        """// Triton stores a small tensor once in each warp that holds it.
        all:
            add.u32 %r2, %lane, 1; //~other: add.u32 %r2, %thread, 1;
            st.shared.b32 [%mine], %r2; //:fill
        """,
        Lacks("other", "barrier", "fill", "fill"),
        warps=2,
    ),
    "equal tiles stored by two warps": Scenario(
        f"""// CUTLASS, tma_load_store.py: each of its warps stores the tile.
        warp 0:
            st.shared.b32 [%mine], %lane;
            st.shared.b32 [%mine+128], %thread; //~other: st.shared.b32 [%mine+128], 7;
            fence.proxy.async;
        all:
            bar.sync 1, 64;
            mov.u32 %r1, tile;
            mad.lo.u32 %r1, %warp, 128, %r1;
            {parts.TMA_STORE.replace("tile]", "%r1]")} //:store
            {parts.DRAIN}
        """,
        Lacks("other", "barrier", "store", "store"),
        warps=2,
    ),
    "equal copies to a peer by two warps": Scenario(
        f"""// CUTLASS, 01_gemm_split_k_fp16.py: each of four warps copies the tile to the peer.
        cta 0 warp 0:
            st.shared.b32 [%mine], %lane;
            fence.proxy.async;
        cta 0: bar.sync 1, 64;
        cta 1 warp 0: {parts.expect(256)}
        cta 0 warp 0: {parts.copy_to_peer("spare")} //:first
        cta 0 warp 1:
            mov.u32 %r3, tile; //~other: mov.u32 %r3, spare;
            {parts.copy_to_peer("spare", "%r3")} //:second
        cta 1: wait.cluster full, 0;
        """,
        Lacks("other", "try_wait", "first", "second"),
    ),
    "ordinary stores before cp.async.mbarrier.arrive": Scenario(
        """// NVIDIA, fmha_bwd.py: rows beyond the end are filled with zeros.
        warp 0:
            cp.async.ca.shared.global [%mine], [%in], 4;
            st.shared.b32 [%mine+128], %zero; //:fill //-late
            cp.async.mbarrier.arrive.noinc.shared.b64 [full];
            //~late: st.shared.b32 [%mine+128], %zero; //:fill
        warp 1:
            wait full, 0;
            ld.shared.b32 %r2, [%mine+128]; //:use
        """,
        Lacks("late", "barrier", "fill", "use"),
    ),
    "tcgen05.fence behind a relaxed wait": Scenario(
        f"""// CUTLASS, cute_ext/blackwell/dense_gemm_2sm.py: the epilogue waits for accumulators.
        warp 0: {parts.MULTIPLY}
        all:
            POLL: mbarrier.try_wait.parity.relaxed.cluster.shared::cta.b64 %again, [done], 0;
            @!%again bra POLL;
            tcgen05.fence::after_thread_sync; //-fence
            {parts.READ_WHOLE}
        """,
        Lacks("fence", "tcgen05.commit", "mma", "read"),
    ),
    "landed bytes and a relaxed cluster barrier": Scenario(
        f"""// CUTLASS, tma_multicast.py: one CTA waits for the bytes and tells the other.
        cta 0 warp 0: {parts.bulk_load()}
        cta 0: wait full, 0; //-wait
        all:
            barrier.cluster.arrive.relaxed.aligned;
            barrier.cluster.wait.aligned;
        cta 1: ld.shared::cluster.b32 %r2, [%theirs]; //:use
        cta 0: wait full, 0;
        """,
        Lacks("wait", "try_wait", "load", "use"),
        warps=2,
    ),
}
