"""Named barriers of a CTA, and the lanes of a warp."""

from __future__ import annotations

from tests.ptxemu.check_pairs.scenario import Lacks, Scenario, handed_over

_SYNC = "bar.sync 1, 64; //-barrier"
_VOTE = "bar.red.or.pred %p1, 1, 64, %first; //-barrier"
_LACKS = Lacks("barrier", "barrier", "fill", "use")

SCENARIOS = {
    "bar.sync": handed_over(_LACKS, signal=_SYNC, wait=_SYNC),
    "bar.sync, readers first": Scenario(
        """// Warp 1 reads what warp 0 overwrites.
        warp 0: st.shared.b32 [%mine], %lane;
        all: bar.sync 1, 64;
        warp 1: ld.shared.b32 %r1, [%mine]; //:use
        all: bar.sync 1, 64; //-barrier
        warp 0: st.shared.b32 [%mine], %zero; //:again
        """,
        Lacks("barrier", "barrier", "again", "use"),
    ),
    # The producer goes on; only the consumer waits.
    "bar.arrive": handed_over(
        Lacks("wait", "barrier", "fill", "use"),
        Lacks("late", "barrier", "again", "use"),
        signal="bar.arrive 1, 64;\n//~late: st.shared.b32 [%mine], %lane; //:again",
        wait="bar.sync 1, 64; //-wait",
    ),
    "bar.red": handed_over(_LACKS, signal=_VOTE, wait=_VOTE),
    "one id for two pairs of warps": Scenario(
        """// Warps 0 and 1 meet, then warps 2 and 3: these must not be there before the first two.
        warp 0:
            bar.sync 1, 64;
            bar.arrive 2, 96;
        warp 1: bar.sync 1, 64;
        warp 2:
            bar.sync 2, 96; //-order
            bar.sync 1, 64;
        warp 3:
            bar.sync 2, 96; //-order
            bar.sync 1, 64; //:reused
        """,
        Lacks("order", "barrier id", later="reused", check="barrier"),
    ),
    "bar.arrive twice": Scenario(
        """// A warp that does not wait has to know that the phase before is complete.
        warp 1:
            bar.arrive 1, 64;
            bar.sync 2, 64; //-order
            bar.arrive 1, 64; //:reused
        warp 0:
            bar.sync 1, 64;
            bar.arrive 2, 64; //-order
            bar.sync 1, 64;
        """,
        Lacks("order", "barrier id", later="reused", check="barrier"),
    ),
    "barriers of two ids": Scenario(
        """// Warp 0 meets warp 1 at barrier 1, warp 2 at barrier 2: 2 sees what warp 1 wrote.
        warp 1:
            st.shared.b32 [%mine], %lane; //:fill
            bar.arrive 1, 64;
        warp 0:
            bar.sync 1, 64; //-first
            bar.arrive 2, 64;
        warp 2:
            bar.sync 2, 64; //-second
            ld.shared.b32 %r1, [%mine]; //:use
        """,
        Lacks("first second", "barrier", "fill", "use"),
    ),
    "bar.warp.sync": Scenario(
        """// Each lane reads what its neighbour wrote.
        all:
            st.shared.b32 [%mine], %lane; //:fill
            bar.warp.sync 0xffffffff; //-sync
            ld.shared.b32 %r1, [%next]; //:use
        """,
        Lacks("sync", "bar.warp.sync", "fill", "use"),
    ),
    "bar.warp.sync, readers first": Scenario(
        """// Each lane overwrites what its neighbour reads.
        all:
            st.shared.b32 [%mine], %lane;
            bar.warp.sync 0xffffffff;
            ld.shared.b32 %r1, [%next]; //:use
            bar.warp.sync 0xffffffff; //-sync
            st.shared.b32 [%mine], %zero; //:again
        """,
        Lacks("sync", "bar.warp.sync", "use", "again"),
    ),
    # They reach the same bytes.
    "generic addresses": handed_over(
        _LACKS,
        signal=_SYNC,
        wait=_SYNC,
        fill="""cvt.u64.u32 %d0, %mine;
            cvta.shared.u64 %d0, %d0;
            st.b32 [%d0], %lane; //:fill""",
    ),
    "lanes that are off": Scenario(
        """// Each warp writes half of the words, by predicate and by branch.
        warp 0:
            setp.lt.u32 %p1, %lane, 16; //~all: setp.lt.u32 %p1, %lane, 17;
            @%p1 st.shared.b32 [%mine], %lane; //:low
        warp 1:
            setp.lt.u32 %p1, %lane, 16; //~more: setp.lt.u32 %p1, %lane, 15;
            @%p1 bra AFTER;
            st.shared.b32 [%mine], %lane; //:high
            AFTER:
        """,
        Lacks("all more", "barrier", "low", "high"),
    ),
    # Warp 0 stores a matrix.
    "stmatrix": handed_over(
        _LACKS,
        signal=_SYNC,
        wait=_SYNC,
        fill="""and.b32 %r2, %lane, 7;
            mov.u32 %r3, tile;
            mad.lo.u32 %r2, %r2, 16, %r3;
            stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r2], {%lane}; //:fill""",
    ),
    "ldmatrix": Scenario(
        """// Rows that other lanes of the warp wrote.
        all:
            mov.u32 %r3, tile;
            mad.lo.u32 %r2, %lane, 16, %r3;
            st.shared.v4.b32 [%r2], {%lane, %lane, %lane, %lane}; //:fill
            bar.warp.sync 0xffffffff; //-sync
            xor.b32 %r2, %r2, 128;
            ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r2]; //:use
        """,
        Lacks("sync", "bar.warp.sync", "fill", "use"),
    ),
}
