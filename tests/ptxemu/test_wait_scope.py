"""Waits for an mbarrier by their scope: what they are told, and what they order."""

from __future__ import annotations

import pytest

import ptxemu
from ptxemu.findings import Finding
from tests.ptxemu.check_pairs import parts
from tests.ptxemu.check_pairs.run import launch
from tests.ptxemu.check_pairs.scenario import Scenario, write

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
    """(check, a word of the message) of each."""
    words = ("names no scope", "is of scope .cta", "not ordered")
    return sorted(
        {(f.check, next((word for word in words if word in f.message), "?")) for f in findings}
    )


RACE = ("race", "not ordered")
SAID = {
    # what the arrival is, the wait: what is said always, and what is said by the strict rules
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
    """Though a peer arrives at the barrier, too."""
    assert said(found(OWN, barriers={"full": 64})) == [("manual", "is of scope .cta")]
    alone = OWN.replace("st.shared.b32 [%mine], %lane;", "").replace(
        "cta 0 warp 0:", "cta 0 warp 0: st.shared::cluster.b32 [%theirs], %lane;"
    )
    assert RACE in said(found(alone, barriers={"full": 64}))


@pytest.mark.parametrize("signal", ["copy", "arrival of its own"])
def test_the_scope_of_the_cta_is_enough_for_copies_and_own_threads(signal: str) -> None:
    """A peer's copy is of the async proxy, whose bytes the mbarrier itself makes visible."""
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
