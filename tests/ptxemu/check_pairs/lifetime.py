"""Beginnings and ends that are no races: mbarriers left open or initialised again."""

from __future__ import annotations

from tests.ptxemu.check_pairs import parts
from tests.ptxemu.check_pairs.scenario import Lacks, Scenario

SCENARIOS = {
    "bytes that nobody expects": Scenario(
        f"""// All bytes that come are expected at last.
        warp 0:
            {parts.BULK_LOAD}
            {parts.expect()} //-expect
        all: wait full, 0; //-expect
        """,
        Lacks("expect", "outstanding", check="mbarrier"),
        warps=2,
    ),
    "exit before a load has come": Scenario(
        f"""// Shared memory is there until all that was asked for has come.
        warp 0:
            fence.proxy.async.shared::cta;
            {parts.bulk_load()}
            wait full, 0; //-wait
        """,
        Lacks("wait", "a wait for it", later="load", check="exited"),
        bare=True,
    ),
    "exit before a multicast has come": Scenario(
        f"""// A CTA stays for what its peer loads into it, even if it reads nothing of that.
        all:
            {parts.expect()}
            {parts.MEET}
        cta 0:
            {parts.multicast(parts.BULK_LOAD)}
            wait full, 0;
        cta 1: wait.cluster full, 0; //-wait
        """,
        Lacks("wait", "a wait for it", later="load", check="exited"),
        bare=True,
    ),
    "one CTA group in a kernel": Scenario(
        f"""// What never runs counts, as ptxas refuses the text.
        warp 0:
            {parts.alloc()}
            {parts.dealloc().replace("%tmem", "0")}
            setp.lt.u32 %p2, %lane, 0;
            //~mixed: @%p2 tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned; //:other
        """,
        Lacks("mixed", ".cta_group", later="other", check="cta_group"),
        bare=True,
    ),
    "mbarrier.init in flight": Scenario(
        """// A barrier is initialised again between phases, not in the middle of one.
        all:
            @%first mbarrier.arrive.shared.b64 _, [full];
            @%first mbarrier.arrive.shared.b64 _, [full]; //-whole
            @%first mbarrier.init.shared.b64 [full], 1; //:init
        """,
        Lacks("whole", "initialised again", later="init", check="mbarrier"),
        barriers={"full": 2},
    ),
}
