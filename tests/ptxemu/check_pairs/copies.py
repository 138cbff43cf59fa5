"""cp.async: groups, and mbarriers that track it."""

from __future__ import annotations

from tests.ptxemu.check_pairs import parts
from tests.ptxemu.check_pairs.scenario import Lacks, Scenario, handed_over

_COPY = "cp.async.ca.shared.global [%mine], [%in], 4; //:copy"
_ARRIVE = "cp.async.mbarrier.arrive.noinc.shared.b64 [full];"

SCENARIOS = {
    "cp.async.wait_group": Scenario(
        f"""// A lane reads what it copied itself.
        all:
            {_COPY}
            cp.async.commit_group; //-commit
            cp.async.wait_group 0; //-wait
            ld.shared.b32 %r2, [%mine]; //:use
        """,
        Lacks("wait", "cp.async.wait_group", "copy", "use"),
        Lacks("commit", "cp.async.commit_group", "copy", "use"),
    ),
    "cp.async.wait_group 1": Scenario(
        f"""// The newest group may be under way; of older ones the data is there.
        all:
            {_COPY}
            cp.async.commit_group;
            cp.async.ca.shared.global [%mine+128], [%in], 4;
            cp.async.commit_group;
            cp.async.wait_group 1; //~more: cp.async.wait_group 2;
            ld.shared.b32 %r2, [%mine]; //:use
            cp.async.wait_group 0;
        """,
        Lacks("more", "cp.async.wait_group", "copy", "use"),
    ),
    "cp.async for another lane": Scenario(
        f"""// Waiting for groups tells a lane of its own copies alone.
        all:
            {_COPY}
            cp.async.wait_all;
            bar.warp.sync -1; //-meet
            ld.shared.b32 %r2, [%next]; //:use
        """,
        Lacks("meet", "bar.warp.sync", "copy", "use"),
    ),
    "cp.async over cp.async": Scenario(
        f"""// Copies of one thread are in no order but that of its waits.
        all:
            cp.async.ca.shared.global [%mine], [%in], 4; //:before
            cp.async.wait_all; //-wait
            {_COPY}
            cp.async.wait_all;
            ld.shared.b32 %r2, [%mine];
        """,
        Lacks("wait", "cp.async.wait_group", "before", "copy"),
    ),
    # Another warp needs a barrier behind the wait.
    "cp.async.wait_all": handed_over(
        Lacks("wait", "cp.async.wait_group", "copy", "use"),
        Lacks("barrier", "barrier", "copy", "use"),
        signal="cp.async.wait_all; //-wait\nbar.sync 1, 64; //-barrier",
        wait="bar.sync 1, 64; //-barrier",
        fill=_COPY,
    ),
    # The mbarrier tells when the copies of all lanes are there.
    "cp.async.mbarrier.arrive.noinc": handed_over(
        Lacks("plain", "cp.async.mbarrier.arrive", "copy", "use"),
        Lacks("wait", "an mbarrier arrival and a wait", "copy", "use"),
        signal=f"{_ARRIVE} //~plain: mbarrier.arrive.shared.b64 _, [full];",
        wait="wait full, 0; //-wait",
        fill=_COPY,
    ),
    # Without .noinc it makes up for its own arrival, and another one completes the phase.
    "cp.async.mbarrier.arrive": handed_over(
        Lacks("arrive", "cp.async.mbarrier.arrive", "copy", "use"),
        signal="""cp.async.mbarrier.arrive.shared.b64 [full]; //-arrive
            mbarrier.arrive.shared.b64 _, [full];""",
        wait="wait full, 0;",
        fill=_COPY,
    ),
    "cp.async into what is still read": Scenario(
        f"""// The readers arrive before the next copy is issued.
        warp 0:
            ld.shared.b32 %r2, [%mine]; //:use
            mbarrier.arrive.shared.b64 _, [empty];
        warp 1:
            wait empty, 0; //-wait
            {_COPY}
            cp.async.wait_all;
        """,
        Lacks("wait", "mbarrier arrival and a wait", "use", "copy"),
    ),
    "cp.async over ordinary stores": Scenario(
        f"""// cp.async is no part of the async proxy: between lanes, their barrier is enough.
        all:
            st.shared.b32 [%next], %zero; //:fill
            bar.warp.sync 0xffffffff; //-sync
            {_COPY}
            cp.async.wait_all;
        """,
        Lacks("sync", "bar.warp.sync", "fill", "copy"),
    ),
    "cp.async to an MMA": Scenario(
        f"""// An MMA reads it without a proxy fence: kernels right on hardware rely on that.
        warp 0:
            mad.wide.u32 %d0, %lane, 16, %input;
            mov.u32 %r2, a;
            mad.lo.u32 %r2, %lane, 16, %r2;
            cp.async.cg.shared.global [%r2], [%d0], 16; //:copy
            {_ARRIVE}
        warp 1:
            wait full, 0; //-wait
            {parts.MULTIPLY}
        """,
        Lacks("wait", "an mbarrier arrival and a wait", "copy", "mma"),
    ),
}
