"""Observations of a run: arrivals without a waiter, and the last bulk waits of a warp."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

import ptxemu
from lab.silicon.conformance.ptx_program import aligned_copy
from ptxemu.mutation.carried import UNREACHED, Carried, instead
from ptxemu.mutation.observe import observe
from tests.ptxemu.check_pairs import parts
from tests.ptxemu.check_pairs.scenario import Scenario, write

KERNEL = write(
    Scenario(
        f"""
        all:
            @%first mbarrier.arrive.shared.b64 _, [full]; //:heard
            wait full, 0;
            @%first mbarrier.arrive.shared.b64 _, [full]; //:unheard
            {parts.commit("full")} //:lost
            {parts.FILL_FOR_ASYNC}
            {parts.BULK_STORE}
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group.read 0; //:followed
            cp.async.bulk.wait_group.read 0; //:again
            {parts.FILL_FOR_ASYNC}
            {parts.BULK_STORE}
            cp.async.bulk.commit_group; //:commit
            cp.async.bulk.wait_group.read 0; //:wait
            setp.ne.u32 %p2, %zero, 0;
            @%p2 bar.sync 0; //:never
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
    assert observed.unheard == {KERNEL.names["unheard"], KERNEL.names["lost"]}
    assert observed.executed >= {KERNEL.names["heard"], KERNEL.names["wait"]}
    assert KERNEL.names["never"] not in observed.executed
    assert KERNEL.names["again"] in observed.implied
    assert not {KERNEL.names["followed"], KERNEL.names["wait"]} & observed.implied
    assert observed.last == {KERNEL.names["commit"], KERNEL.names["wait"]}
    assert out.tolist() == list(range(32))


def test_what_else_orders_a_pair_is_told_by_line():
    wait = SimpleNamespace(opcode="bar.sync", line=7)
    kernel, none, other = Carried(), Carried(), Carried()
    kernel.pairs[3, 9].add(7)
    none.pairs[3, 9].add(0)
    other.pairs[3, 9].add(8)
    assert instead(kernel, other, wait) == "lines 3 before 9 by 8"
    assert instead(kernel, none, wait) == ""
    assert instead(other, other, wait) == UNREACHED
    arrival = SimpleNamespace(opcode="mbarrier.arrive.shared.b64", line=1)
    assert instead(kernel, other, arrival) == "lines 3 before 9 by 8"
    assert instead(kernel, none, arrival) == ""
    assert instead(kernel, kernel, arrival) == UNREACHED
    assert instead(kernel, other, SimpleNamespace(opcode="fence.proxy.async", line=7)) == ""
