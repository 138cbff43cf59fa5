"""mbarrier arithmetic: phases, transaction counts in any order, drops, and refusals."""

from __future__ import annotations

import pytest

import ptxemu
from ptxemu.errors import HardwareRefusal
from ptxemu.findings import Finding
from ptxemu.machine.mbarrier import MAX_COUNT, MBarrier
from tests.ptxemu.check_pairs import parts
from tests.ptxemu.check_pairs.scenario import Scenario, launch, write


class Sleeper:
    """A stand-in for a warp: remembers which fragments were woken."""

    def __init__(self) -> None:
        self.woken: list[object] = []

    def wake(self, fragment: object) -> None:
        self.woken.append(fragment)


def test_phases_follow_arrivals() -> None:
    barrier = MBarrier(0x400, "cta (0,0,0)", 3)
    assert barrier.done(1)  # the phase before the first counts as complete
    for phase in range(4):
        assert not barrier.done(phase & 1)
        states = [barrier.arrive() for _ in range(3)]
        assert [state & 0xFFFFFFFF for state in states] == [phase] * 3
        assert [state >> 32 for state in states] == [3, 2, 1]  # the count that was pending before
        assert barrier.done(phase & 1)
        assert barrier.pending == 3


# count -> steps, each with the phase after it
SEQUENCES = {
    "an arrival for many": (40, [("arrive", 39, 0), ("arrive", 1, 1)]),
    "lanes that complete phases midway": (16, [("arrive_each", 32, 2), ("arrive_each", 8, 2)]),
    "expected first": (
        2, [("expect", 96, 0), ("arrive", 1, 0), ("complete", 64, 0), ("complete", 32, 0)]
    ),
    "bytes first": (
        2, [("complete", 64, 0), ("complete", 32, 0), ("expect", 96, 0), ("arrive", 1, 0)]
    ),
    "bytes in between": (
        2, [("complete", 64, 0), ("expect", 96, 0), ("arrive", 1, 0), ("complete", 32, 0)]
    ),
    "the last bytes complete it": (
        1,
        [
            ("expect", 32, 0), ("arrive", 1, 0), ("complete", 16, 0),
            ("expect", 16, 0), ("complete", 16, 0), ("complete", 16, 1),
        ],
    ),
    "a drop, of later phases too": (2, [("drop", 1, 0), ("arrive", 1, 1), ("arrive", 1, 2)]),
}  # fmt: skip
LEFT = {"lanes that complete phases midway": 8, "a drop, of later phases too": 1}  # otherwise all


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences(name: str) -> None:
    count, steps = SEQUENCES[name]
    barrier = MBarrier(0x400, "cta (0,0,0)", count)
    for step, argument, phase in steps:
        if step == "drop":
            barrier.arrive(argument, drop=True)
        else:
            getattr(barrier, step)(argument)
        assert barrier.phase == phase
        assert (barrier.done(phase & 1), barrier.done(phase & 1 ^ 1)) == (False, True)
    if count == 2 and not barrier.phase:  # only the second arrival is outstanding
        assert (barrier.tx, barrier.pending) == (0, 1)
        barrier.arrive()
        assert (barrier.phase, barrier.tx) == (1, 0)
    assert barrier.pending == LEFT.get(name, count)


def test_too_many_arrivals_in_one_are_refused() -> None:
    with pytest.raises(HardwareRefusal, match="5 arrivals, 4 pending; its count of 4 is less"):
        MBarrier(0x400, "cta (0,0,0)", 4).arrive(5)


def test_an_arrival_before_the_phase_is_complete_is_explained() -> None:
    barrier = MBarrier(0x400, "cta (0,0,0)", 1)
    barrier.expect(48)
    barrier.arrive()
    with pytest.raises(HardwareRefusal, match="phase 0 has all of its 1 and lacks 48 bytes"):
        barrier.arrive()


def test_waiters_are_woken_once_when_the_phase_completes() -> None:
    barrier, warp = MBarrier(0x400, "cta (0,0,0)", 1), Sleeper()
    barrier.waiters.append((warp, "fragment"))
    barrier.expect(8)
    barrier.arrive()
    assert not warp.woken
    barrier.complete(8)
    assert warp.woken == ["fragment"]
    barrier.arrive()
    assert warp.woken == ["fragment"]


@pytest.mark.parametrize("count", [0, -1, MAX_COUNT + 1])
def test_count_limits(count: int) -> None:
    with pytest.raises(HardwareRefusal, match="count"):
        MBarrier(0x400, "cta (0,0,0)", count)


@pytest.mark.parametrize("sign", [1, -1])
def test_transaction_count_limits(sign: int) -> None:
    barrier = MBarrier(0x400, "cta (0,0,0)", 1)
    change = barrier.expect if sign > 0 else barrier.complete
    change(MAX_COUNT)
    with pytest.raises(HardwareRefusal, match="transaction count"):
        change(1)
    with pytest.raises(HardwareRefusal, match="32 lanes announced 65536 bytes each"):
        MBarrier(0x400, "cta (0,0,0)", 1).expect(1 << 16, 32)


def test_description_names_what_is_outstanding() -> None:
    barrier = MBarrier(0x440, "cta (0,0,0)", 5)
    barrier.arrive(2)
    barrier.expect(48)
    text = barrier.describe()
    for part in ("0x440", "phase 0", "3 of 5 arrivals", "48 bytes"):
        assert part in text


HANDED_OVER = """
    cta 0:
        st.shared::cluster.b32 [%theirs], %lane;
        {arrival}
    cta 1:
        {wait}
        ld.shared.b32 %r3, [%mine];
"""
NO_SCOPE = parts.arrive_at_peer().replace(".release.cluster", "")
OF_CTA = parts.arrive_at_peer(semantics="release.cta")


def found(body: str, *, strict: bool = False, **how: object) -> list[Finding]:
    text = write(Scenario(body, **how)).text
    return launch(Scenario(body, **how), ptxemu.load(text), strict=strict).findings


def said(findings: list[Finding]) -> list[tuple[str, str]]:
    """(check, a phrase of the message) of each finding."""
    words = ("names no scope", "is of scope .cta", "not ordered")
    return sorted(
        {(f.check, next((word for word in words if word in f.message), "?")) for f in findings}
    )


RACE = ("race", "not ordered")
SAID = {
    # arrival, wait, findings always, and findings by the strict rules
    "cluster, cluster": (parts.arrive_at_peer(), "wait.cluster full, 0;", [], []),
    "cluster, none": (
        parts.arrive_at_peer(), "wait full, 0;", [], [("manual", "names no scope")],
    ),
    "cluster, cta": (
        parts.arrive_at_peer(), "wait.cta full, 0;", [("manual", "is of scope .cta"), RACE], [],
    ),
    "none, cluster": (NO_SCOPE, "wait.cluster full, 0;", [], [("manual", "names no scope")]),
    "cta, cluster": (
        OF_CTA, "wait.cluster full, 0;", [("manual", "is of scope .cta"), RACE], [],
    ),
    "cta, cta": (OF_CTA, "wait.cta full, 0;", [("manual", "is of scope .cta"), RACE], []),
}  # fmt: skip


@pytest.mark.parametrize("pair", SAID)
def test_both_sides_are_judged_alike(pair: str) -> None:
    arrival, wait, always, strictly = SAID[pair]
    body = HANDED_OVER.format(arrival=arrival, wait=wait)
    assert said(found(body)) == always
    assert said(found(body, strict=True)) == sorted([*always, *strictly])


def test_a_fence_behind_the_wait_orders_what_the_peer_has_told() -> None:
    wait = "wait.cta full, 0;\nfence.acq_rel.cluster;"
    body = HANDED_OVER.format(arrival=parts.arrive_at_peer(), wait=wait)
    assert said(found(body)) == [("manual", "is of scope .cta")]


OWN = f"""
    cta 1 warp 0:
        st.shared.b32 [%mine], %lane;
        mbarrier.arrive.shared.b64 _, [full];
    cta 0 warp 0: {parts.arrive_at_peer()}
    cta 1 warp 1:
        wait.cta full, 0;
        ld.shared.b32 %r3, [%mine];
"""


def test_what_the_own_cta_has_told_is_ordered() -> None:
    """A peer arrives at the barrier, too."""
    assert said(found(OWN, barriers={"full": 64})) == [("manual", "is of scope .cta")]
    alone = OWN.replace("st.shared.b32 [%mine], %lane;", "").replace(
        "cta 0 warp 0:", "cta 0 warp 0: st.shared::cluster.b32 [%theirs], %lane;"
    )
    assert RACE in said(found(alone, barriers={"full": 64}))


@pytest.mark.parametrize("signal", ["copy", "arrival of its own"])
def test_the_scope_of_the_cta_is_enough_for_copies_and_own_threads(signal: str) -> None:
    """A peer's copy is of the async proxy, and the mbarrier itself makes its bytes visible."""
    if signal == "copy":
        body = f"""
            cta 0:
                {parts.FILL_FOR_ASYNC}
                {parts.copy_to_peer("spare")}
            cta 1:
                @%one mbarrier.arrive.expect_tx.shared.b64 _, [full], 128;
                wait.cta full, 0;
                ld.shared.b32 %r3, [spare];
        """
        barriers = {"full": 1}
    else:
        body = """
            warp 0:
                st.shared.b32 [%mine], %lane;
                mbarrier.arrive.shared.b64 _, [full];
            warp 1:
                wait.cta full, 0;
                ld.shared.b32 %r3, [%mine];
        """
        barriers = {"full": 32}
    findings = found(body, barriers=barriers)
    assert not [f for f in findings if "scope" in str(f) or f.check == "race"]


@pytest.mark.parametrize("arrive", ["mbarrier.arrive", "cp.async.mbarrier.arrive.noinc"])
@pytest.mark.parametrize("count", [31, 32])
def test_a_count_of_all_lanes_but_one(arrive: str, count: int) -> None:
    """The surplus counts in the next phase, where it would show only after many phases."""
    operands = "_, [full]" if arrive == "mbarrier.arrive" else "[full]"
    body = f"""
        warp 0:
            mad.wide.u32 %d0, %lane, 16, %input;
            cp.async.ca.shared.global [%mine], [%d0], 4;
            {arrive}.shared.b64 {operands};
        warp 1:
            wait full, 0;
    """
    findings = found(body, barriers={"full": count})
    surplus = [f for f in findings if "some count in the next phase" in f.message]
    assert len(surplus) == (count == 31)
    for each in surplus:
        assert "32 arrivals of one instruction, 31 of 31 pending" in each.message
        assert arrive.partition(".noinc")[0] in str(each)
