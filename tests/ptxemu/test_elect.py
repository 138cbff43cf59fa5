"""Branches round a block that one elected lane executes: lanes part and meet as after others."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from ptxemu.module import Module
from tests.ptxemu.kernels import POINTER, kernel, launch

# The branch, and a use of the predicate after it.
FORMS = {
    "negated": ("elect.sync %r1|%p1, -1;\nnot.pred %p2, %p1;\n@%p2 bra LATER;\n", "%p1"),
    "inverse": ("elect.sync %r1|%p1, -1;\n@!%p1 bra LATER;\n", "%p1"),
    "negation": ("elect.sync %r1|%p1, -1;\nnot.pred %p2, %p1;\n@%p2 bra LATER;\n", "%p2"),
    "the others": ("elect.sync %r1|%p1, -1;\n@%p1 bra LATER;\n", "%p1"),
    "two lanes": ("mov.u32 %r9, 0x30;\nelect.sync %r1|%p1, %r9;\n@!%p1 bra LATER;\n", "%p1"),
}


def program(form: str, *, used: bool) -> str:
    """The lanes that do not branch add 100 to their word; all of them add 1, or the use."""
    branch, predicate = FORMS[form]
    use = f"selp.b32 %r4, 1000, 2000, {predicate};\nadd.u32 %r4, %r4, %r1;\n"
    return kernel(
        f"{POINTER}ld.global.b32 %r3, [%rd2];\nmov.u32 %r4, 1;\n{branch}"
        f"add.u32 %r3, %r3, 100;\nLATER:\n{use * used}add.u32 %r3, %r3, %r4;\n"
        "st.global.b32 [%rd2], %r3;",
        ".param .u64 d",
    )


def expected(form: str, *, used: bool) -> np.ndarray:
    lanes = np.arange(48) % 32
    leader = 4 if form == "two lanes" else 0
    chosen = lanes == leader
    added = chosen if form != "the others" else ~chosen
    true = ~chosen if form == "negation" else chosen
    last = np.where(true, 1000, 2000) + leader if used else 1
    return np.arange(48) + 100 * added + last


@pytest.mark.parametrize("policy", ["round-robin", "random", "adversarial"])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_elected_lanes_execute_a_block(form, used, policy):
    lanes = np.arange(48, dtype=np.uint32)
    launch(program(form, used=used), lanes, block=(48,), policy=policy)
    np.testing.assert_array_equal(lanes, expected(form, used=used))


@pytest.mark.parametrize("wanted", [False, True])
def test_a_guard_may_say_less_than_the_election(wanted):
    """The block before a guarded instruction has no branch as its last step."""
    lanes = np.zeros(32, np.uint32)
    body = f"""{POINTER}ld.global.b32 %r3, [%rd2];
        mov.u32 %r4, {int(wanted)};
        setp.ne.u32 %p2, %r4, 0;
        elect.sync %r1|%p1, -1;
        and.pred %p1, %p1, %p2;
        @%p1 add.u32 %r3, %r3, 100;
        st.global.b32 [%rd2], %r3;"""
    launch(kernel(body, ".param .u64 d"), lanes, block=(32,))
    np.testing.assert_array_equal(lanes, [100 * wanted] + 31 * [0])


@pytest.mark.parametrize("form", FORMS)
def test_counts_are_those_of_separate_lanes(form, monkeypatch):
    def counted() -> dict:
        report = launch(Module(program(form, used=False)), np.zeros(32, np.uint32))
        return {name: asdict(report)[name] for name in ("by_warp", "counts", "bytes")}

    together = counted()
    monkeypatch.setattr("ptxemu.machine.state._LONG", 1 << 20)  # no branch is skirted
    assert counted() == together
