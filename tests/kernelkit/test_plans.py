"""Roles, arrivals, edges and memory maps: arithmetic by hand, and what each check refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernelkit.plan.barriers import BarrierPlan, NamedBarrier
from kernelkit.plan.edges import Edge, EdgePlan, Reach, Signal, arrivals
from kernelkit.plan.smem import SmemBuffer, SmemPlan
from kernelkit.plan.tmem import TmemPlan, TmemRange
from kernelkit.plan.warps import Role, RolePlan

ROLES = RolePlan(
    (Role("compute", 0, 4, "rows"), Role("issue", 4, 1, "mma"), Role("load", 5, 1, "tma"))
)
RING = Edge("tiles", "load", "issue", 3, Signal.TMA, "tile", 4096, release=Signal.UMMA)
QUESTION = Edge("s", "issue", "compute", 2, Signal.UMMA, "S", freed_by="p")
ANSWER = Edge("p", "compute", "issue", 2, Signal.THREADS, "P", freed_by="s")


def test_threads_and_arrivals():
    assert (ROLES.warps, ROLES.threads) == (6, 192)
    assert arrivals(ROLES["compute"], Signal.THREADS) == 4 * 32
    assert arrivals(ROLES["load"], Signal.TMA) == 1
    assert arrivals(ROLES["issue"], Signal.UMMA) == 1


def test_only_one_warp_issues_copies_and_products():
    with pytest.raises(ValueError, match="4 warps"):
        arrivals(ROLES["compute"], Signal.TMA)


def test_roles_cover_the_warps_in_order():
    ROLES.check()
    with pytest.raises(KeyError, match="no role 'epilogue'"):
        ROLES["epilogue"]


def test_a_legal_register_split():
    # Two warpgroups of softmax, one of correction, the rest: 128 x (2 x 192 + 80 + 48) = 65536.
    roles = (Role("softmax", 0, 8, "", 192), Role("fix", 8, 4, "", 80), Role("rest", 12, 4, "", 48))
    RolePlan(roles).check()


def test_edges():
    plan = EdgePlan(ROLES, (RING, QUESTION, ANSWER))
    plan.check()
    assert (plan.full("tiles").arrivals, plan.empty("tiles").arrivals) == (1, 1)
    assert plan.full("p").arrivals == 128
    assert plan.barrier_bytes == 8 * (3 + 3 + 2 + 2)


TAIL = Edge("tail", "load", "compute", 1, Signal.TMA, "last tile", 512, freed_by="exit")
HANDED = Edge("rows", "load", "compute", 2, Signal.TMA, "rows", 512, release=Signal.THREADS)


@pytest.mark.parametrize(
    ("edge", "full", "empty"),
    [
        # (signal reaches, arrivals, bytes announced) of one stage. The role that issues MMAs runs
        # in the leader, so: copies of both CTAs, 2 x 4096 bytes, one announcement; a commit to each
        # CTA's own barrier; the 128 threads of both CTAs; edges between roles of one CTA are as
        # without a pair.
        (RING, (Reach.LEADER, 1, 8192), (Reach.BOTH, 1, 0)),
        (QUESTION, (Reach.BOTH, 1, 0), None),
        (ANSWER, (Reach.LEADER, 256, 0), None),
        (TAIL, (Reach.OWN, 1, 512), None),
        (HANDED, (Reach.OWN, 1, 512), (Reach.OWN, 128, 0)),
    ],
)
def test_edges_of_a_pair(edge, full, empty):
    plan = EdgePlan(ROLES, (RING, QUESTION, ANSWER, TAIL, HANDED), ctas=2)
    plan.check()

    def read(completion):
        assert completion.stages == edge.stages
        return completion.reach, completion.arrivals, completion.tx_bytes

    assert read(plan.full(edge.name)) == full
    if empty:
        assert read(plan.empty(edge.name)) == empty
    single = replace(plan, ctas=1).full(edge.name)
    assert single.reach is Reach.OWN
    assert single.tx_bytes == edge.tx_bytes


def test_who_leads_a_pair():
    plan = EdgePlan(ROLES, (RING, QUESTION, ANSWER), ctas=2)
    assert [role.name for role in ROLES.roles if plan.leads(role.name)] == ["issue"]
    assert not replace(plan, ctas=1).leads("issue")
    # No role issues MMAs: the two CTAs are independent.
    assert not EdgePlan(ROLES, (HANDED,), ctas=2).leads("load")


ROWS = NamedBarrier("rows", ("compute",), 64, "", count=2)
ALL = NamedBarrier("all", ("compute", "load"), 160, "")


def test_ids_of_named_barriers():
    plan = BarrierPlan(ROLES, (ROWS, ALL, replace(ROWS, name="last", count=12)))
    plan.check()
    assert [plan.ids(name) for name in ("rows", "all", "last")] == [
        range(1, 3), range(3, 4), range(4, 16)
    ]  # fmt: skip
    assert plan["all"].threads == 160
    with pytest.raises(KeyError, match="no named barrier 'some'"):
        plan.ids("some")
    with pytest.raises(KeyError, match="no role 'store'"):
        BarrierPlan(ROLES, (replace(ALL, roles=("store",)),)).check()


def test_shared_memory_offsets():
    plan = SmemPlan(
        (SmemBuffer("bars", 40, align=8), SmemBuffer("a", 1000, 2), SmemBuffer("b", 16))
    )
    # 40 -> next multiple of 1024; 2 x 1000 ends at 3024 -> next multiple of 1024 is 3072.
    assert plan.offsets() == {"bars": (0, 40), "a": (1024, 3024), "b": (3072, 3088)}
    plan.check()


def test_tensor_memory():
    s, p, o = (
        TmemRange("S", 0, 128, ""),
        TmemRange("P", 64, 64, "", "S"),
        TmemRange("O", 128, 64, ""),
    )
    plan = TmemPlan((s, p, o))
    plan.check()
    assert plan.allocated == 256  # 192 columns, rounded up to a power of two
    assert TmemPlan((replace(o, begin=0, columns=1),)).allocated == 32  # least allocation
    assert plan["P"].end == 128


# In a pair the leader's threads would have to arrive in both CTAs.
WORD = Edge("word", "issue", "compute", 1, Signal.THREADS, "word", freed_by="exit")
BACK = replace(
    HANDED, name="back", producer="compute", consumer="issue", signal=Signal.THREADS, tx_bytes=0
)
CANNOT_WORK = [
    (RolePlan((ROLES.roles[0], replace(ROLES.roles[1], first_warp=5))),
     "starts at warp 5, expected 4"),
    (RolePlan((Role("all", 0, 33, ""),)), "1056 threads, limit 1024"),
    (RolePlan((Role("a", 0, 4, "", 200), Role("b", 4, 2, "", 40))), "6 warps"),
    (RolePlan((Role("a", 0, 6, "", 200), Role("b", 6, 2, "", 40))), "warps 4..7"),
    (RolePlan((Role("a", 0, 4, "", 100),)), "100 registers"),
    # 12 warps x 32 threads x 240 registers. A launch of 384 threads gets at most 168 for each.
    (RolePlan((Role("a", 0, 12, "", 240),)), "92160 registers in all, limit 64512: 168 a thread"),
    (RolePlan((Role("a", 0, 8, "", 200), Role("b", 8, 4, "", 112))), "65536 registers in all"),
    (EdgePlan(ROLES, (RING, RING)), "names repeat"),
    (EdgePlan(ROLES, (replace(RING, stages=0),)), "0 stages"),
    (EdgePlan(ROLES, (replace(RING, tx_bytes=0),)), "0 bytes"),
    (EdgePlan(ROLES, (replace(ANSWER, tx_bytes=16, freed_by="exit"),)), "16 bytes"),
    (EdgePlan(ROLES, (replace(RING, release=None),)), "either a release or a freed_by"),
    (EdgePlan(ROLES, (replace(RING, freed_by="exit"),)), "either a release or a freed_by"),
    (EdgePlan(ROLES, (QUESTION, replace(ANSWER, producer="load", signal=Signal.UMMA))),
     "cannot be freed by"),
    (EdgePlan(ROLES, (RING,), ctas=4), "4 CTAs"),
    (EdgePlan(ROLES, (RING, WORD), ctas=2), "word: only UMMA signals reach both"),
    (EdgePlan(ROLES, (RING, BACK), ctas=2), "back: only UMMA signals reach both"),
    (BarrierPlan(ROLES, (ROWS, replace(ROWS, threads=128))), "names of named barriers repeat"),
    (BarrierPlan(ROLES, (ROWS, replace(ALL, count=14))), "16 named barriers .rows, all., limit 15"),
    (BarrierPlan(ROLES, (replace(ROWS, threads=160),)), "128 threads of compute"),
    (BarrierPlan(ROLES, (replace(ROWS, threads=40),)), "40 threads: whole warps"),
    (BarrierPlan(ROLES, (replace(ROWS, count=0),)), "count 0, at least 1"),
    (SmemPlan((SmemBuffer("huge", 232449),)), "limit 232448"),
    (TmemPlan((TmemRange("S", 0, 128, ""), TmemRange("O", 64, 64, ""))), "a declared alias"),
    (TmemPlan((TmemRange("S", 0, 64, ""), TmemRange("P", 32, 64, "", "S"))), "is not inside S"),
    (TmemPlan((TmemRange("O", 256, 257, ""),)), "1024 TMEM columns, limit 512"),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "words"), CANNOT_WORK)
def test_what_cannot_work_is_refused(plan, words):
    with pytest.raises(ValueError, match=words):
        plan.check()
