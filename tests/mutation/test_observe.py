"""What a run shows: arrivals that nobody waits for, and the last bulk waits of a warp."""

from __future__ import annotations

import numpy as np

import ptxemu
from ptxemu.mutation.observe import observe
from tests.ptxemu.check_pairs import parts
from tests.ptxemu.check_pairs.scenario import Scenario, write
from workbench.conformance.ptx_program import aligned_copy

KERNEL = write(
    Scenario(
        f"""
        all:
            @%first mbarrier.arrive.shared.b64 _, [full]; //:heard
            wait full, 0;
            @%first mbarrier.arrive.shared.b64 _, [full]; //:unheard
            {parts.FILL_FOR_ASYNC}
            {parts.BULK_STORE}
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group.read 0; //:followed
            {parts.FILL_FOR_ASYNC}
            {parts.BULK_STORE}
            cp.async.bulk.commit_group; //:commit
            cp.async.bulk.wait_group.read 0; //:wait
        """,
        bare=True,
    )
)


def test_what_a_run_shows():
    out = aligned_copy(np.zeros(32, np.uint32))
    params = [out.ctypes.data.to_bytes(8, "little")] * 2 + [bytes(128)] * 2

    def run(options):
        ptxemu.load(KERNEL.text).launch(grid=(1,), block=(32,), params=params, options=options)

    observed = observe(run)
    assert observed.unheard == {KERNEL.names["unheard"]}
    assert observed.last == {KERNEL.names["commit"], KERNEL.names["wait"]}
    assert out.tolist() == list(range(32))
