"""mbarriers between the warps of a CTA: arrivals, waits, phases, semantics and initialisation."""

from __future__ import annotations

from tests.ptxemu.check_pairs.scenario import Lacks, Scenario, handed_over

_ARRIVE = "mbarrier.arrive.shared.b64 _, [full];"
_HANDED_OVER = "mbarrier arrival and a wait"

SCENARIOS = {
    # One arrival hands over the writes of the whole warp.
    "mbarrier.try_wait": handed_over(
        Lacks("wait", _HANDED_OVER, "fill", "use"),
        signal="bar.warp.sync 0xffffffff;\n@%first mbarrier.arrive.shared.b64 _, [full];",
        wait="wait full, 0; //-wait",
    ),
    # Polling in place of waiting.
    "mbarrier.test_wait": handed_over(
        Lacks("poll", _HANDED_OVER, "fill", "use"),
        signal=_ARRIVE,
        wait="POLL: mbarrier.test_wait.parity.shared.b64 %p1, [full], 0; @!%p1 bra POLL; //-poll",
    ),
    # A warp that also arrives waits for the phase of its own arrival.
    "wait by state": handed_over(
        Lacks("poll", _HANDED_OVER, "fill", "use"),
        signal=_ARRIVE,
        wait="""mbarrier.arrive.shared.b64 %state, [full];
            POLL: mbarrier.try_wait.shared.b64 %p1, [full], %state; @!%p1 bra POLL; //-poll""",
        barriers={"full": 64},
    ),
    # An arrival covers what came before it, not what follows.
    "arrival before the store": handed_over(
        Lacks("late", _HANDED_OVER, "late", "use"),
        signal=f"{_ARRIVE}\n//~late: st.shared.b32 [%mine], %lane; //:late",
        wait="wait full, 0;",
        fill="st.shared.b32 [%mine], %lane; //-late",
    ),
    # A wait for parity 1 passes on a fresh barrier. Here warp 0 has stored long before that, so
    # that the results are right even then.
    "parity": handed_over(
        Lacks("wrong", _HANDED_OVER, "fill", "use"),
        signal=f"wait go, 0;\n{_ARRIVE}",
        wait=f"{_ARRIVE.replace('full', 'go')}\nwait full, 0; //~wrong: wait full, 1;",
    ),
    "two phases": Scenario(
        """// The second word is handed over by the second phase. Whoever skips the first wait may
        // pass the second before anything has happened, though here it does not.
        warp 0:
            st.shared.b32 [%mine], %lane;
            mbarrier.arrive.shared.b64 _, [full];
            wait go, 0;
            st.shared.b32 [%mine+128], %lane; //:second
            mbarrier.arrive.shared.b64 _, [full];
        warp 1:
            wait full, 0; //-skip
            ld.shared.b32 %r1, [%mine];
            mbarrier.arrive.shared.b64 _, [go];
            wait full, 1; //-wait
            ld.shared.b32 %r2, [%mine+128]; //:use
        """,
        Lacks("wait", _HANDED_OVER, "use", "second"),
        Lacks("skip", _HANDED_OVER, "second", "use"),
    ),
    "a stage filled twice": Scenario(
        """// Full and empty: the producer waits for the readers before it fills the stage again.
        warp 0:
            st.shared.b32 [%mine], %lane;
            mbarrier.arrive.shared.b64 _, [full];
        warp 1:
            wait full, 0;
            ld.shared.b32 %r1, [%mine]; //:use //-early
            mbarrier.arrive.shared.b64 _, [empty];
            //~early: ld.shared.b32 %r1, [%mine]; //:late
        warp 0:
            wait empty, 0; //-wait //~parity: wait empty, 1;
            st.shared.b32 [%mine], %zero; //:again
        """,
        Lacks("wait parity", _HANDED_OVER, "again", "use"),
        Lacks("early", _HANDED_OVER, "late", "again"),
    ),
    "the lanes of one warp": Scenario(
        """// Every lane arrives and waits: then each may read what its neighbour wrote.
        all:
            st.shared.b32 [%mine], %lane; //:fill
            mbarrier.arrive.shared.b64 _, [full];
            wait full, 0; //-wait
            ld.shared.b32 %r1, [%next]; //:use
        """,
        Lacks("wait", "bar.warp.sync", "fill", "use"),
    ),
    "from hand to hand": Scenario(
        """// Warp 1 passes on what warp 0 wrote: order is transitive.
        warp 0:
            st.shared.b32 [%mine], %lane; //:fill
            mbarrier.arrive.shared.b64 _, [full];
        warp 1:
            wait full, 0; //-first
            mbarrier.arrive.shared.b64 _, [passed];
        warp 2:
            wait passed, 0; //-second
            ld.shared.b32 %r1, [%mine]; //:use
        """,
        Lacks("first second", _HANDED_OVER, "fill", "use"),
    ),
    # The producer's last arrival.
    "arrive_drop": handed_over(
        Lacks("wait", _HANDED_OVER, "fill", "use"),
        signal="mbarrier.arrive_drop.shared.b64 _, [full];",
        wait=f"{_ARRIVE}\nwait full, 0; //-wait",
        barriers={"full": 64},
    ),
    # A relaxed arrival publishes only writes before a fence that precedes it.
    "arrive.relaxed": handed_over(
        Lacks("fence", "release", "fill", "use"),
        signal="""fence.acq_rel.cta; //-fence
            mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [full];""",
        wait="wait full, 0;",
    ),
    # A relaxed wait makes memory visible only at a fence after it.
    "try_wait.relaxed": handed_over(
        Lacks("fence", "acquire", "fill", "use"),
        signal=_ARRIVE,
        wait="""POLL: mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p1, [full], 0;
            @!%p1 bra POLL;
            fence.acq_rel.cta; //-fence""",
    ),
    "what lies beside an mbarrier": Scenario(
        """// Nothing but its own instructions may touch it.
        warp 0:
            @%first mbarrier.init.shared.b64 [slot], 1; //:init
            @%first st.shared.b32 [slot+8], 7; //~over: @%first st.shared.b32 [slot+4], 7; //:fill
            @%first mbarrier.inval.shared.b64 [slot];
            @%first st.shared.b32 [slot], 7;
        """,
        Lacks("over", "an index within the array", "init", "fill", "mbarrier"),
    ),
    "mbarrier.init": Scenario(
        """// Another warp arrives only after it knows that the barrier is initialised.
        warp 0: @%first mbarrier.init.shared.b64 [slot], 32; //:init
        all: bar.sync 1, 64; //-barrier
        warp 1: mbarrier.arrive.shared.b64 _, [slot]; //:arrive
        """,
        Lacks("barrier", "a barrier after mbarrier.init", "init", "arrive", "mbarrier"),
    ),
}


_SYNC = "bar.sync 1, 64; //-barrier"
_VOTE = "bar.red.or.pred %p1, 1, 64, %first; //-barrier"
_LACKS = Lacks("barrier", "barrier", "fill", "use")

SCENARIOS |= {
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
    # The producer does not block; only the consumer waits.
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
    # Both reach the same bytes.
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
