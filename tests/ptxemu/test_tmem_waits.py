"""tcgen05.ld and .st under late schedules: nothing stands for tcgen05.wait."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptxemu.kernels import POINTER, kernel, launch

SHARED = ".shared .align 16 .b32 fixed[4];\n"
ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10], 32;\n"
DEALLOC = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;\n"
BEGIN = f"""{POINTER}mov.u32 %r10, fixed;
{ALLOC}ld.shared.b32 %r1, [%r10];
add.u32 %r2, %r0, 5;
tcgen05.st.sync.aligned.32x32b.x2.b32 [%r1], {{%r2, %r0}};
tcgen05.wait::st.sync.aligned;
"""
LOAD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r3, %r4}, [%r1];\n"
WAIT = "tcgen05.wait::ld.sync.aligned;\n"
END = f"st.global.b32 [%rd2], %r5;\n{DEALLOC}"
BRANCH = "setp.eq.u32 %p0, %r1, 0xffffff;\n@%p0 bra L;\nL:\n"  # the next block
ADD = "add.u32 %r5, %r3, %r4;\n"
RIGHT = 2 * np.arange(32, dtype=np.uint32) + 5
POISONED = np.full(32, 2**32 - 2, np.uint32)


def result(body: str, policy: str) -> np.ndarray:
    out = np.zeros(32, np.uint32)
    launch(kernel(BEGIN + body + END, ".param .u64 d", SHARED), out, policy=policy, seed=1)
    return out


BODIES = {  # and whether a register is used before the wait
    "waited": (LOAD + WAIT + ADD, False),
    "waited in the next block": (LOAD + BRANCH + WAIT + ADD, False),
    "moved before the wait": (
        f"{LOAD}mov.b32 %r6, %r3;\n{WAIT}add.u32 %r5, %r6, %r4;\n",
        False,
    ),
    "no wait": (LOAD + ADD, True),
    "no wait, the next block": (LOAD + BRANCH + ADD, True),
    "used before the wait": (LOAD + ADD + WAIT, True),
    "a wait for stores": (LOAD + WAIT.replace("::ld", "::st") + ADD, True),
    "the wait of an earlier load": (LOAD + WAIT + LOAD + ADD, True),
}


@pytest.mark.parametrize("policy", ["round-robin", "random", "adversarial"])
@pytest.mark.parametrize("name", BODIES)
def test_registers_land_at_the_wait_at_the_latest_moment(name: str, policy: str):
    body, early = BODIES[name]
    expected = POISONED if early and policy == "adversarial" else RIGHT
    np.testing.assert_array_equal(result(body, policy), expected)


def test_a_deallocation_waits_for_no_load():
    """Freed and allocated again, the columns hold poison, which a late load reads."""
    body = LOAD + DEALLOC + ALLOC + WAIT + ADD
    np.testing.assert_array_equal(result(body, "adversarial"), POISONED)


def test_a_store_lands_at_its_wait():
    late = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {%r0};\n"
    wait = WAIT.replace("::ld", "::st")
    moved = np.arange(32, dtype=np.uint32) * 2
    for between, expected in ((wait, moved), ("", RIGHT)):
        body = late + between + LOAD + WAIT + ADD
        np.testing.assert_array_equal(result(body, "adversarial"), expected)
        np.testing.assert_array_equal(result(body, "round-robin"), moved)
