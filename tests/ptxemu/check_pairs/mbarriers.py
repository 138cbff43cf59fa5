"""mbarriers between the warps of a CTA: arrivals, waits, phases, semantics and initialisation."""

from __future__ import annotations

from tests.ptxemu.check_pairs.scenario import Lacks, Scenario

SCENARIOS = [
    Scenario(
        "mbarrier.try_wait",
        """
        // One arrival hands over what the whole warp wrote.
        warp 0:
            st.shared.b32 [%mine], %lane; //:fill
            bar.warp.sync 0xffffffff;
            @%first mbarrier.arrive.shared.b64 _, [full];
        warp 1:
            wait full, 0; //-wait
            ld.shared.b32 %r1, [%mine]; //:use
        """,
        {"wait": Lacks("mbarrier arrival and a wait", "fill", "use")},
        barriers={"full": 1},
    ),
    Scenario(
        "mbarrier.test_wait",
        """
        // Polling in place of waiting.
        warp 0:
            st.shared.b32 [%mine], %lane; //:fill
            mbarrier.arrive.shared.b64 _, [full];
        warp 1:
            POLL: mbarrier.test_wait.parity.shared.b64 %p1, [full], 0; //-poll
            @!%p1 bra POLL; //-poll
            ld.shared.b32 %r1, [%mine]; //:use
        """,
        {"poll": Lacks("mbarrier arrival and a wait", "fill", "use")},
        barriers={"full": 32},
    ),
    Scenario(
        "wait by state",
        """
        // A warp that arrives, too, waits for the phase that its arrival belongs to.
        warp 0:
            st.shared.b32 [%mine], %lane; //:fill
            mbarrier.arrive.shared.b64 _, [full];
        warp 1:
            mbarrier.arrive.shared.b64 %state, [full];
            POLL: mbarrier.try_wait.shared.b64 %p1, [full], %state; //-poll
            @!%p1 bra POLL; //-poll
            ld.shared.b32 %r1, [%mine]; //:use
        """,
        {"poll": Lacks("mbarrier arrival and a wait", "fill", "use")},
        barriers={"full": 64},
    ),
    Scenario(
        "arrival before the store",
        """
        // An arrival tells what came before it, not what follows.
        warp 0:
            st.shared.b32 [%mine], %lane; //-late
            mbarrier.arrive.shared.b64 _, [full];
            //~late: st.shared.b32 [%mine], %lane; //:late
        warp 1:
            wait full, 0;
            ld.shared.b32 %r1, [%mine]; //:use
        """,
        {"late": Lacks("mbarrier arrival and a wait", "late", "use")},
        barriers={"full": 32},
    ),
    Scenario(
        "parity",
        """
        // A fresh barrier lets a wait for parity 1 pass. Warp 0 has stored long before that happens
        // here, so that the results are right even then.
        warp 0:
            st.shared.b32 [%mine], %lane; //:fill
            wait go, 0;
            mbarrier.arrive.shared.b64 _, [full];
        warp 1:
            mbarrier.arrive.shared.b64 _, [go];
            wait full, 0; //~wrong: wait full, 1;
            ld.shared.b32 %r1, [%mine]; //:use
        """,
        {"wrong": Lacks("mbarrier arrival and a wait", "fill", "use")},
        barriers={"full": 32, "go": 32},
    ),
    Scenario(
        "two phases",
        """
        // The second word is handed over by the second phase. Whoever skips the first wait may pass
        // the second before anything has happened, though here it does not.
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
        {
            "wait": Lacks("mbarrier arrival and a wait", "use", "second"),
            "skip": Lacks("mbarrier arrival and a wait", "second", "use"),
        },
        barriers={"full": 32, "go": 32},
    ),
    Scenario(
        "a stage filled twice",
        """
        // Full and empty: the producer waits for the readers before it fills the stage again.
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
        {
            "wait parity": Lacks("mbarrier arrival and a wait", "again", "use"),
            "early": Lacks("mbarrier arrival and a wait", "late", "again"),
        },
        barriers={"full": 32, "empty": 32},
    ),
    Scenario(
        "the lanes of one warp",
        """
        // Every lane arrives and waits: then each may read what its neighbour wrote.
        all:
            st.shared.b32 [%mine], %lane; //:fill
            mbarrier.arrive.shared.b64 _, [full];
            wait full, 0; //-wait
            ld.shared.b32 %r1, [%next]; //:use
        """,
        {"wait": Lacks("bar.warp.sync", "fill", "use")},
        barriers={"full": 32},
    ),
    Scenario(
        "from hand to hand",
        """
        // Warp 1 passes on what warp 0 wrote: order is transitive.
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
        {"first second": Lacks("mbarrier arrival and a wait", "fill", "use")},
        barriers={"full": 32, "passed": 32},
    ),
    Scenario(
        "arrive_drop",
        """
        // The producer arrives for the last time.
        warp 0:
            st.shared.b32 [%mine], %lane; //:fill
            mbarrier.arrive_drop.shared.b64 _, [full];
        warp 1:
            mbarrier.arrive.shared.b64 _, [full];
            wait full, 0; //-wait
            ld.shared.b32 %r1, [%mine]; //:use
        """,
        {"wait": Lacks("mbarrier arrival and a wait", "fill", "use")},
        barriers={"full": 64},
    ),
    Scenario(
        "arrive.relaxed",
        """
        // An arrival that is relaxed tells of memory only what a fence came behind.
        warp 0:
            st.shared.b32 [%mine], %lane; //:fill
            fence.acq_rel.cta; //-fence
            mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [full];
        warp 1:
            wait full, 0;
            ld.shared.b32 %r1, [%mine]; //:use
        """,
        {"fence": Lacks("release", "fill", "use")},
        barriers={"full": 32},
    ),
    Scenario(
        "try_wait.relaxed",
        """
        // A wait that is relaxed learns of memory only at the fence behind it.
        warp 0:
            st.shared.b32 [%mine], %lane; //:fill
            mbarrier.arrive.shared.b64 _, [full];
        warp 1:
            POLL: mbarrier.try_wait.parity.relaxed.cta.shared::cta.b64 %p1, [full], 0;
            @!%p1 bra POLL;
            fence.acq_rel.cta; //-fence
            ld.shared.b32 %r1, [%mine]; //:use
        """,
        {"fence": Lacks("acquire", "fill", "use")},
        barriers={"full": 32},
    ),
    Scenario(
        "mbarrier.init",
        """
        // Another warp arrives only after it knows that the barrier is initialised.
        warp 0:
            @%first mbarrier.init.shared.b64 [slot], 32; //:init
        all:
            bar.sync 1, 64; //-barrier
        warp 1:
            mbarrier.arrive.shared.b64 _, [slot]; //:arrive
        """,
        {"barrier": Lacks("a barrier behind mbarrier.init", "init", "arrive", "mbarrier")},
    ),
]
