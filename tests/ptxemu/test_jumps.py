"""brx.idx: lanes that choose one target or several, lists of labels, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from ptxemu.errors import HardwareRefusal, PtxSyntaxError
from tests.ptxemu.kernels import POINTER, kernel, launch

LISTS = {
    "one line": "table: .branchtargets $A, $B, $C;\n",
    "several lines": "table:\n.branchtargets\n$A,\n$B,\n\n  $C;\n",
}
# out[lane] = 10, 21 or 32 by the target, and 1000 times the number of rounds
BODY = """{list}mov.u32 %r9, 0; mov.u32 %r5, 0;
AGAIN:
{choose}
{jump} %r1, table;
$A: add.u32 %r9, %r9, 10; bra.uni $END;
$B: add.u32 %r9, %r9, 21; bra.uni $END;
$C: add.u32 %r9, %r9, 32;
$END:
add.u32 %r9, %r9, 1000;
add.u32 %r5, %r5, 1;
setp.lt.u32 %p1, %r5, {rounds};
@%p1 bra AGAIN;
shfl.sync.idx.b32 %r8, %r9, 3, 31, 0xffffffff;
st.global.b32 [%rd2], %r9;
"""
ADDS = np.array([10, 21, 32])
X = np.arange(32, dtype=np.uint32)


def run(choose: str, *, form: str = "one line", jump: str = "brx.idx", rounds: int = 1, **how):
    out = np.zeros(32, np.uint32)
    body = BODY.format(list=LISTS[form], choose=choose, jump=jump, rounds=rounds)
    launch(kernel(POINTER + body, ".param .u64 d"), out, **how)
    return out


@pytest.mark.parametrize("policy", ["round-robin", "adversarial"])
@pytest.mark.parametrize("form", LISTS)
@pytest.mark.parametrize("jump", ["brx.idx", "brx.idx.uni"])
def test_one_target_for_all_lanes(jump: str, form: str, policy: str) -> None:
    choose = "mov.u32 %r1, %r5;"
    assert (run(choose, form=form, jump=jump, rounds=3, policy=policy) == 3063).all()


@pytest.mark.parametrize("policy", ["round-robin", "adversarial"])
@pytest.mark.parametrize("check", [False, True])
def test_lanes_part_and_meet_again(policy: str, check: bool) -> None:
    choose = "add.u32 %r1, %r0, %r5; rem.u32 %r1, %r1, 3;"
    expected = sum(ADDS[(X + k) % 3] + 1000 for k in range(4))
    assert (run(choose, rounds=4, policy=policy, check=check) == expected).all()


def test_some_lanes_jump() -> None:
    """Lanes whose guard is false go on behind the jump, at the first target."""
    choose = "mov.u32 %r1, 2; setp.lt.u32 %p2, %r0, 5;"
    expected = np.where(X < 5, 1032, 1010)
    assert (run(choose, jump="@%p2 brx.idx") == expected).all()


def test_modifiers_may_stand_apart_from_the_word() -> None:
    """As in CUTLASS's inline assembly for copies with a cache hint."""
    choose = "mov .u32 %r1, 1; add .s32 %r1, %r1, 0;"
    assert (run(choose, jump="brx .idx .uni") == 1021).all()


def test_a_function_has_lists_of_its_own() -> None:
    function = """.func (.reg .b32 y) pick (.reg .b32 x)
    {
    table: .branchtargets ZERO, ONE;
    brx.idx x, table;
    ZERO: mov.u32 y, 7; ret;
    ONE: mov.u32 y, 9; ret;
    }
    """
    body = "and.b32 %r1, %r0, 1; call (%r9), pick, (%r1); call (%r8), pick, (0);"
    body += "add.u32 %r9, %r9, %r8; st.global.b32 [%rd2], %r9;"
    out = np.zeros(32, np.uint32)
    launch(kernel(POINTER + body, ".param .u64 d", function), out)
    assert (out == np.where(X % 2, 16, 14)).all()


@pytest.mark.parametrize("choose", ["mov.u32 %r1, 3;", "mov.u32 %r1, %r0;"])
def test_an_index_beyond_the_list_is_refused(choose: str) -> None:
    with pytest.raises(HardwareRefusal, match=r"index 3 .*has 3 labels") as caught:
        run(choose)
    assert "brx.idx" in caught.value.text


@pytest.mark.parametrize("jump", ["brx.idx %r1, %r2;", "brx.idx %r1, nothing;", "brx.idx %r1;"])
def test_a_list_has_to_be_named(jump: str) -> None:
    with pytest.raises(PtxSyntaxError, match="branchtargets") as caught:
        launch(kernel(jump))
    assert caught.value.line


def test_an_unknown_label_is_a_syntax_error() -> None:
    with pytest.raises(PtxSyntaxError, match="unknown label 'NOWHERE'"):
        launch(kernel("table: .branchtargets NOWHERE;\nbrx.idx %r1, table;"))
