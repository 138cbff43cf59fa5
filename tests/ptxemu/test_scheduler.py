"""The default schedule: warps that waited together stay in step, as on hardware."""

from __future__ import annotations

import numpy as np
import pytest

import ptxemu
from ptxemu import Deadlock, HardwareRefusal
from ptxemu.codegen.blocks import build_blocks
from ptxemu.syntax.parser import parse
from tests.ptxemu.kernels import DYNAMIC, kernel, launch

# Every round reuses the buffer after only one barrier: round k + 1's store races with round k's
# load, which other schedules may show. CUTLASS's mla_decode_fp16.py does this.
EXCHANGE = """
    mov.u32 %r0, %tid.x;
    ld.param.u64 %rd0, [d];
    mad.wide.u32 %rd1, %r0, 4, %rd0;
    mov.u32 %r1, dynamic;
    mad.lo.u32 %r2, %r0, 4, %r1;
    xor.b32 %r3, %r0, 64;
    mad.lo.u32 %r3, %r3, 4, %r1;
    mov.u32 %r4, 0;
    mov.u32 %r5, 0;
ROUND:
    mad.lo.u32 %r6, %r5, 1000, %r0;
    st.shared.b32 [%r2], %r6;
    bar.sync 2, 128;
    ld.shared.b32 %r7, [%r3];
    add.u32 %r4, %r4, %r7;
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p0, %r5, 8;
    @%p0 bra ROUND;
    st.global.b32 [%rd1], %r4;
"""


def test_all_released_warps_run_before_one_runs_ahead() -> None:
    out = np.zeros(128, np.uint32)
    launch(kernel(EXCHANGE, ".param .u64 d", DYNAMIC), out, block=(128,), smem_bytes=512)
    np.testing.assert_array_equal(out, 8 * (np.arange(128) ^ 64) + 1000 * sum(range(8)))


STORE = "ld.param.u64 %rd1, [d];\nmad.wide.u32 %rd2, %r0, 4, %rd1;\nst.global.b32 [%rd2], %r1;"


def result(body: str, **how: object) -> np.ndarray:
    """Return %r1 of every lane after `body`, in which %r0 is the lane; 0 if the lane has exited."""
    out = np.zeros(32, np.uint32)
    text = kernel(f"mov.u32 %r0, %tid.x;\nmov.u32 %r1, 0;\n{body}\n{STORE}", ".param .u64 d")
    launch(text, out, **how)
    return out


def test_blocks_end_at_branches_and_start_at_labels() -> None:
    tree = parse(
        kernel("mov.u32 %r1, 1;\nL:\nadd.u32 %r1, %r1, 1;\n@%p1 bra L;\n@%p0 add.u32 %r1, %r1, 2;")
    )
    blocks = build_blocks(tree.entries["test"])
    assert [block.label for block in blocks[:3]] == [None, "L", None]
    assert blocks[1].successors == [1, 2]
    assert blocks[2].successors == [4, 3]  # skips the guarded instruction
    assert blocks[4].exits
    assert blocks[4].successors == []


def test_a_guarded_trap_is_not_an_exit() -> None:
    assert (result("setp.eq.u32 %p0, %r0, 40;\n@%p0 trap;\nmov.u32 %r1, 6;") == 6).all()
    with pytest.raises(HardwareRefusal, match="trap"):
        result("setp.eq.u32 %p0, %r0, 31;\n@%p0 trap;")


@pytest.mark.parametrize("leave", ["ret;", "ret.uni;", "exit;"])
def test_nothing_runs_after_the_end(leave: str) -> None:
    assert (result(leave) == 0).all()


def test_guarded_returns_end_some_lanes() -> None:
    out = result(
        "mov.u32 %r1, 3;\nsetp.lt.u32 %p0, %r0, 5;\n@%p0 ret;\n"
        "setp.gt.u32 %p1, %r0, 9;\n@!%p1 exit;"
    )
    np.testing.assert_array_equal(out, np.where(np.arange(32) > 9, 3, 0))


def test_a_member_mask_may_be_computed_just_before() -> None:
    """Both sides of a branch shuffle at once, each with the mask from a preceding vote."""
    body = """setp.lt.u32 %p0, %r0, 12;
mul.lo.u32 %r2, %r0, 3;
vote.sync.ballot.b32 %r3, %p0, 0xffffffff;
not.b32 %r4, %r3;
@%p0 bra LOW;
vote.sync.ballot.b32 %r5, 1, %r4;
shfl.sync.idx.b32 %r1, %r2, 20, 31, %r5;
bra DONE;
LOW:
vote.sync.ballot.b32 %r5, 1, %r3;
shfl.sync.idx.b32 %r1, %r2, 7, 31, %r5;
DONE:"""
    np.testing.assert_array_equal(result(body), np.where(np.arange(32) < 12, 21, 60))


def test_a_convergent_instruction_waits_for_the_lanes_that_it_names() -> None:
    """The side of the branch that comes first in the text has to wait for the other."""
    body = """setp.lt.u32 %p0, %r0, 16;
@%p0 bra JOIN;
mov.u32 %r6, 0;
L:
add.u32 %r6, %r6, 1;
setp.lt.u32 %p1, %r6, %r0;
@%p1 bra L;
bra.uni JOIN;
JOIN:
vote.sync.ballot.b32 %r1, 1, 0xffffffff;"""
    assert (result(body) == 0xFFFFFFFF).all()


def test_naming_a_lane_that_never_comes_is_a_deadlock() -> None:
    body = """setp.lt.u32 %p0, %r0, 16;
@%p0 bra LOW;
bar.warp.sync 0xffffffff;
bra DONE;
LOW:
vote.sync.ballot.b32 %r1, 1, 0xffffffff;
bra LOW;
DONE:"""
    with pytest.raises(Deadlock, match="other lanes"):
        result(body)


def test_exited_lanes_are_not_waited_for() -> None:
    out = result("setp.lt.u32 %p0, %r0, 3;\n@%p0 exit;\nvote.sync.ballot.b32 %r1, 1, 0xffffffff;")
    np.testing.assert_array_equal(out, np.where(np.arange(32) < 3, 0, 0xFFFFFFF8))


def test_registers_of_equal_lanes_stay_scalars() -> None:
    """This makes the emulator fast: a loop counter is one Python int, before and after a branch."""
    text = kernel(
        "mov.u32 %r1, 0;\nL:\nadd.u32 %r1, %r1, 1;\nsetp.lt.u32 %p0, %r1, 9;\n@%p0 bra L;\n"
        "mov.u32 %r2, %tid.x;\nadd.u32 %r3, %r1, %r2;"
    )
    registers = ptxemu.load(text).program(None).registers
    assert not registers.always_varying("%r1")
    assert not registers.always_varying("%p0")
    assert registers.always_varying("%r3")


def test_the_sum_of_one_number_of_all_lanes_keeps_its_sign() -> None:
    out = result("redux.sync.add.s32 %r2, -1, 0xffffffff;\nmul.lo.s32 %r1, %r2, 2;")
    np.testing.assert_array_equal(out.view(np.int32), -64)


SPIN = """ld.param.u64 %rd1, [d];
TRY: atom.global.cas.b32 %r1, [%rd1], 0, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra TRY;
membar.gl; ld.global.u32 %r2, [%rd1+4]; add.u32 %r2, %r2, 1; st.global.u32 [%rd1+4], %r2;
membar.gl; atom.global.exch.b32 %r3, [%rd1], 0;"""


def test_a_lane_that_holds_a_lock_goes_on_while_its_siblings_spin() -> None:
    """After an atomic in vain the lanes ahead have a turn, not after a hundred more."""
    words = np.zeros(2, np.uint32)
    report = launch(kernel(SPIN, ".param .u64 d"), words)
    assert words.tolist() == [0, 32]
    assert report.warp_instructions < 32 * 100
