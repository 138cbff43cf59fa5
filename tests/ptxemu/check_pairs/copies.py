"""cp.async: groups, and mbarriers that track it."""

from __future__ import annotations

from tests.ptxemu.check_pairs.scenario import Lacks, Scenario

_ADDRESS = """
            mad.lo.u32 %r1, %lane, 4, %zero;
            cvt.u64.u32 %d0, %r1;
            add.u64 %d0, %d0, %input;
"""

SCENARIOS = [
    Scenario(
        "cp.async.wait_group",
        f"""
        // A lane reads what it copied itself.
        all: {_ADDRESS}
            cp.async.ca.shared.global [%mine], [%d0], 4; //:copy
            cp.async.commit_group; //-commit
            cp.async.wait_group 0; //-wait
            ld.shared.b32 %r2, [%mine]; //:use
        """,
        {"wait commit": Lacks("cp.async.wait_group", "copy", "use")},
    ),
    Scenario(
        "cp.async.wait_group 1",
        f"""
        // The newest group may be under way; of older ones the data is there.
        all: {_ADDRESS}
            cp.async.ca.shared.global [%mine], [%d0], 4; //:copy
            cp.async.commit_group;
            cp.async.ca.shared.global [%mine+128], [%d0], 4;
            cp.async.commit_group;
            cp.async.wait_group 1; //~more: cp.async.wait_group 2;
            ld.shared.b32 %r2, [%mine]; //:use
            cp.async.wait_group 0;
        """,
        {"more": Lacks("cp.async.wait_group", "copy", "use")},
    ),
    Scenario(
        "cp.async.wait_all",
        f"""
        // Another lane, and another warp, need a barrier behind the wait.
        warp 0: {_ADDRESS}
            cp.async.ca.shared.global [%mine], [%d0], 4; //:copy
            cp.async.wait_all; //-wait
        all:
            bar.sync 1, 64; //-barrier
        warp 1:
            ld.shared.b32 %r2, [%mine]; //:use
        """,
        {
            "wait": Lacks("cp.async.wait_group", "copy", "use"),
            "barrier": Lacks("barrier", "copy", "use"),
        },
    ),
    Scenario(
        "cp.async.mbarrier.arrive.noinc",
        f"""
        // The mbarrier tells when the copies of all lanes are there.
        warp 0: {_ADDRESS}
            cp.async.ca.shared.global [%mine], [%d0], 4; //:copy
            cp.async.mbarrier.arrive.noinc.shared.b64 [full]; \
//~plain: mbarrier.arrive.shared.b64 _, [full];
        warp 1:
            wait full, 0; //-wait
            ld.shared.b32 %r2, [%mine]; //:use
        """,
        {
            "plain": Lacks("cp.async.mbarrier.arrive", "copy", "use"),
            "wait": Lacks("an mbarrier arrival and a wait", "copy", "use"),
        },
        barriers={"full": 32},
    ),
    Scenario(
        "cp.async.mbarrier.arrive",
        f"""
        // Without .noinc it makes up for its own arrival, and another one completes the phase.
        warp 0: {_ADDRESS}
            cp.async.ca.shared.global [%mine], [%d0], 4; //:copy
            cp.async.mbarrier.arrive.shared.b64 [full]; //-arrive
            mbarrier.arrive.shared.b64 _, [full];
        warp 1:
            wait full, 0;
            ld.shared.b32 %r2, [%mine]; //:use
        """,
        {"arrive": Lacks("cp.async.mbarrier.arrive", "copy", "use")},
        barriers={"full": 32},
    ),
    Scenario(
        "cp.async into what is still read",
        f"""
        // The readers arrive before the next copy is issued.
        warp 0:
            ld.shared.b32 %r2, [%mine]; //:use
            mbarrier.arrive.shared.b64 _, [empty];
        warp 1: {_ADDRESS}
            wait empty, 0; //-wait
            cp.async.ca.shared.global [%mine], [%d0], 4; //:copy
            cp.async.wait_all;
        """,
        {"wait": Lacks("mbarrier arrival and a wait", "use", "copy")},
        barriers={"empty": 32},
    ),
    Scenario(
        "cp.async over ordinary stores",
        f"""
        // cp.async is no part of the async proxy: between lanes, their barrier is enough.
        all: {_ADDRESS}
            st.shared.b32 [%next], %zero; //:fill
            bar.warp.sync 0xffffffff; //-sync
            cp.async.ca.shared.global [%mine], [%d0], 4; //:copy
            cp.async.wait_all;
        """,
        {"sync": Lacks("bar.warp.sync", "fill", "copy")},
    ),
    Scenario(
        "cp.async to an MMA",
        """
        // An MMA reads what was copied without a proxy fence: kernels right on hardware rely on it.
        warp 0:
            mad.lo.u32 %r1, %lane, 16, %zero;
            cvt.u64.u32 %d0, %r1;
            add.u64 %d0, %d0, %input;
            mov.u32 %r2, a;
            add.u32 %r2, %r2, %r1;
            cp.async.cg.shared.global [%r2], [%d0], 16; //:copy
            cp.async.mbarrier.arrive.noinc.shared.b64 [full];
        warp 1:
            wait full, 0; //-wait
            @%first tcgen05.mma.cta_group::1.kind::f16 [%tmem], %a, %b, %idesc, 0; //:mma
            @%first tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [done];
        all:
            wait done, 0;
        """,
        {"wait": Lacks("an mbarrier arrival and a wait", "copy", "mma")},
        barriers={"full": 32, "done": 1},
    ),
]
