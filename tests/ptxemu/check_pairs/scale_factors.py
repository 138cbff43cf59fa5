"""tcgen05.cp and the scale factors of block-scaled MMAs."""

from __future__ import annotations

from tests.ptxemu.check_pairs import parts
from tests.ptxemu.check_pairs.scenario import Lacks, Scenario

# a and b are also operands of 128 x 8 x 32 e4m3; scale factors: A in columns 16 to 19, B in 20
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
_MULTIPLY = f"{_MMA} //:mma\n{parts.commit()}"
_PAIR_MMA = _MMA.replace("::1", "::2").replace(".block32", "")
_COPY = f"{_COPY_A} //:copy\n{parts.commit()}"
_ZEROS = f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%lanes], {{{', '.join(['%zero'] * 8)}}};"


def _scaled(body: str, *lacks: Lacks, barriers: dict[str, int] | None = None) -> Scenario:
    return Scenario(f"{_SET}{body}", *lacks, barriers=barriers)


SCENARIOS = {
    "a load to tcgen05.cp": _scaled(
        f"""// Nothing but the wait for the bytes; the MMA behind the copies needs no wait at all.
        warp 0: {parts.bulk_load(nbytes=512)}
        warp 1:
            wait full, 0; //-wait
            {_COPY_A} //:copy
            {_COPY_B}
            {_MULTIPLY}
        """,
        Lacks("wait", "mbarrier.try_wait", "load", "copy"),
    ),
    "ordinary stores to tcgen05.cp": _scaled(
        f"""// Shared memory is read in the async proxy.
        warp 0:
            st.shared.b32 [%mine], %zero; //:fill
            fence.proxy.async.shared::cta; //-fence
        all: bar.sync 1, 128; //-barrier
        warp 1: {_COPY}
        """,
        Lacks("fence", "fence.proxy.async", "fill", "copy"),
        Lacks("barrier", "barrier", "fill", "copy"),
    ),
    "tcgen05.cp to the next load": _scaled(
        f"""// Shared memory is free again when the copy has completed.
        warp 0:
            {_COPY}
            wait done, 0; //-wait
            {parts.bulk_load(nbytes=512)}
        all: wait full, 0;
        """,
        Lacks("wait", "tcgen05.commit", "copy", "load"),
    ),
    "tcgen05.cp to tcgen05.ld": _scaled(
        f"""// The copy has completed behind the wait for the commit behind it.
        warp 0: {_COPY}
        warp 1:
            wait done, 0; //-wait
            add.u32 %lanes, %lanes, 16;
            {parts.READ_WHOLE}
        """,
        Lacks("wait", "tcgen05.commit", "copy", "read"),
    ),
    "tcgen05.ld to tcgen05.cp": _scaled(
        f"""// Columns are overwritten when all has been read from them.
        warp 0:
            add.u32 %lanes, %lanes, 16;
            {parts.READ} //:read
            tcgen05.wait::ld.sync.aligned; //-complete
            mbarrier.arrive.shared.b64 _, [free];
        warp 1:
            wait free, 0; //-wait
            {_COPY}
        """,
        Lacks("complete", "tcgen05.wait::ld", "read", "copy"),
        Lacks("wait", "an mbarrier arrival and a wait", "read", "copy"),
    ),
    "tcgen05.st of scale factors to an MMA": _scaled(
        f"""// Each warp writes its quarter of the lanes.
        add.u32 %lanes, %lanes, 16;
        {_ZEROS} //:store
        tcgen05.wait::st.sync.aligned; //-complete
        mbarrier.arrive.shared.b64 _, [full];
        warp 1:
            wait full, 0; //-wait
            {_MULTIPLY}
        """,
        Lacks("complete", "tcgen05.wait::st", "store", "mma"),
        Lacks("wait", "an mbarrier arrival and a wait", "store", "mma"),
        barriers={"full": 128},
    ),
    "scale factors of the next MMA": _scaled(
        f"""// Copies and MMAs of one thread run in order, those of two threads do not.
        warp 0:
            {_COPY_A}
            {_COPY_B}
            {_MMA}
            {_COPY_A}
            {_COPY_B}
            {_MMA} //:mma
            {parts.commit("handed")}
        warp 1:
            wait handed, 0; //-wait
            {_COPY_A} //:copy
            {_COPY_B}
            {_MMA}
            {parts.commit()}
        """,
        Lacks("wait", "tcgen05.commit", "mma", "copy"),
    ),
    "scale factors in two CTAs": _scaled(
        f"""// CTA 0 copies and multiplies for both: what CTA 1 wrote needs its own fence.
        mov.u32 %idesc, 0x10840000;
        mov.b16 %h0, 3;
        cta 1 warp 0:
            st.shared.b32 [%mine], %zero; //:fill
            fence.proxy.async; //-fence
        all:
            barrier.cluster.arrive.aligned; //~relaxed: barrier.cluster.arrive.relaxed.aligned;
            barrier.cluster.wait.aligned;
        cta 0 warp 0:
            {_COPY_A.replace("::1", "::2")} //:copy
            {_COPY_B.replace("::1", "::2")}
            {_PAIR_MMA} //:mma
            {parts.COMMIT_TO_PAIR}
        cta 1 warp 1:
            wait.cluster done, 0; //-wait
            {parts.READ_WHOLE}
        """,
        Lacks("fence", "fence.proxy.async", "fill", "copy"),
        Lacks("relaxed", "release", "fill", "copy"),
        Lacks("wait", "tcgen05.commit", "mma", "read"),
    ),
    "a narrow A to the MMA of another thread": _scaled(
        f"""// The same for elements that get a byte each on the way to tensor memory.
        mov.u32 %idesc, 0x08020290;
        warp 0:
            @%first tcgen05.cp.cta_group::1.128x256b.b8x16.b4x16_p64 [%r20], %a; //:copy
            {parts.commit("handed")}
        warp 1:
            wait handed, 0; //-wait
            @%first tcgen05.mma.cta_group::1.kind::f8f6f4 [%tmem], [%r20], %b, %idesc, 0; //:mma
            {parts.commit()}
        """,
        Lacks("wait", "tcgen05.commit", "copy", "mma"),
    ),
    "rows of A that an MMA moves": _scaled(
        f"""// A is not only read then.
        mov.u32 %idesc, 0x08020010;
        add.u32 %lanes, %lanes, 16;
        {_ZEROS}
        tcgen05.wait::st.sync.aligned;
        bar.sync 1, 128;
        warp 0:
            @%first tcgen05.mma.cta_group::1.kind::f8f6f4.ashift.collector::a::discard\
 [%tmem], [%r20], %b, %idesc, 0; //:mma
            {parts.commit()}
        warp 1:
            wait done, 0; //-wait
            {parts.READ_WHOLE}
        """,
        Lacks("wait", "tcgen05.commit", "mma", "read"),
    ),
    "scale factors of B in the upper half of the lanes of a pair": _scaled(
        f"""// M = 128 by a pair: the MMA of CTA 0 reads the last quarter of CTA 1's, too.
        mov.u32 %idesc, 0x08840000;
        add.u32 %lanes, %lanes, 16;
        mov.b16 %h0, 3;
        {_ZEROS}
        tcgen05.wait::st.sync.aligned;
        {parts.MEET}
        cta 1 warp 3:
            add.u32 %lanes, %lanes, 4;
            tcgen05.st.sync.aligned.32x32b.x1.b32 [%lanes], {{%zero}}; //:store
            tcgen05.wait::st.sync.aligned; //-complete
        all: {parts.MEET}
        cta 0 warp 0:
            {_PAIR_MMA} //:mma
            {parts.COMMIT_TO_PAIR}
        """,
        Lacks("complete", "tcgen05.wait::st", "store", "mma"),
    ),
}
