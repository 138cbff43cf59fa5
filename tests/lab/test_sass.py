"""lab/sass: blocks, loops and counts of listings written here."""

from __future__ import annotations

from collections import Counter

import pytest

from cycle_model.sass.flow import Function
from cycle_model.sass.tools import parse
from lab.sass import softmax
from lab.sass.softmax import SoftmaxLoop


def listing(text: str, name: str = "kernel") -> str:
    """A listing as nvdisasm prints it: a line that ends in a colon is a label, others are
    instructions."""
    lines, address = [f'\t.section\t.text.{name},"ax",@progbits', f".text.{name}:"], 0
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.endswith(":"):
            lines.append(line)
            continue
        opcode, _, times = line.partition(" * ")
        for _ in range(int(times or 1)):
            lines.append(f"        /*{address:04x}*/                   {opcode} ;")
            address += 16
    return "\n".join(lines)


def function_of(text: str) -> Function:
    (function,) = parse(listing(text))
    return function


def loop_of(text: str) -> SoftmaxLoop:
    (loop,) = softmax.softmax_loops(function_of(text))
    return loop


LOOP = """
    MOV R1, R2
    .L_x_0:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0
    @!P0 BRA `(.L_x_9)
    .L_x_1:
    LDTM.x32 R4, tmem[UR4] * 4
    FMNMX3.NAN R3, R4, R5, R6, !PT * 64
    STS [R9], R3
    MUFU.EX2 R4, R4 * 128
    VOTE.ANY P1, !P1
    @!P1 BRA `(.L_x_2)
    LDTM.x16 R40, tmem[UR5]
    FMUL2 R40, R40.F32x2.HI_LO, R9.F32 * 8
    STTM.x16 tmem[UR5], R40
    .L_x_2:
    STTM.x32 tmem[UR4], R4 * 2
    SYNCS.ARRIVE.TRANS64.ART0 RZ, [UR4+0x78], R0
    FADD2 R8, R8.F32x2.HI_LO, R4.F32x2.HI_LO * 64
    BRA.U UP0, `(.L_x_0)
    EXIT
    .L_x_9:
    MOV R8, UR4
    .L_x_10:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R8], R0
    @!P0 NANOSLEEP.SYNCS 0x989680
    @!P0 BRA `(.L_x_10)
    BRA `(.L_x_1)
"""
BODY = 2 + 4 + 64 + 1 + 128 + 2 + 2 + 1 + 64 + 1


def test_counts_between_head_and_back_edge():
    function, loop = function_of(LOOP), loop_of(LOOP)
    assert loop.address == 16
    assert (loop.total, loop.tiles, len(loop.correction)) == (BODY, 1, 10)
    assert {kind: count for kind, count in loop.kinds().items() if count} == {
        "MUFU.EX2": 128,
        "FADD2": 64,
        "FMNMX": 64,
        "LDTM, STTM": 6,
        "STS, LDS": 1,
        "barriers": 2,  # the first try of the wait, and the arrival: no repeated try
        "branches": 4,
    }
    assert not loop.masked
    assert loop.nested == ()
    assert softmax.other_loops(function) == {}
    assert softmax.exponentials_outside(function) == 0


COPIES = """
    MOV R1, R2
    .L_x_0:
    LDTM.x32 R4, tmem[UR4] * 4
    VOTE.ANY P1, !P1
    @P1 BRA `(.L_x_3)
    VOTE.ANY P2, !P2
    @P2 BRA `(.L_x_4)
    MUFU.EX2 R4, R4 * 128
    BRA `(.L_x_5)
    .L_x_3:
    FMUL R4, R4, R5 * 8
    MUFU.EX2 R4, R4 * 128
    BRA `(.L_x_5)
    .L_x_4:
    FADD R4, R4, R5 * 64
    MUFU.EX2 R4, R4 * 128
    .L_x_5:
    STTM.x32 tmem[UR4], R4 * 2
    BRA.U UP0, `(.L_x_0)
    EXIT
"""


def test_copies_for_rare_rows_do_not_count():
    """The shortest of three copies remains, although the branch to it also leads to a longer
    one."""
    loop = loop_of(COPIES)
    assert loop.opcodes()["MUFU"] == 128
    assert loop.total == 4 + 2 + 2 + 128 + 1 + 2 + 1
    rare = {"MUFU": 256, "FADD": 64, "FMUL": 8, "BRA": 1}
    assert Counter(item.word for item in loop.rare) == rare


def test_positions_are_shares_of_the_body():
    places = loop_of(LOOP).publishes()
    before_p = BODY - 68
    assert places.load == (3 / BODY, 6 / BODY)
    assert places.statistics == 71 / BODY
    assert places.p == ((before_p + 1) / BODY, (before_p + 2) / BODY)
    assert places.ready == (before_p + 3) / BODY
    assert places.adds_after == 64


def test_an_arrival_behind_the_row_sum_is_late():
    head, arrive, tail = LOOP.partition("    SYNCS.ARRIVE.TRANS64.ART0 RZ, [UR4+0x78], R0\n")
    late = head + tail.replace("    BRA.U UP0", arrive + "    BRA.U UP0", 1)
    places = loop_of(late).publishes()
    assert places.ready == (BODY - 1) / BODY
    assert places.adds_after == 0


def test_p_in_shared_memory_is_not_taken_for_statistics():
    text = LOOP.replace("STTM.x32 tmem[UR4], R4 * 2", "STS.128 [R9+0x10], R4 * 16")
    places = loop_of(text).publishes()
    assert places.statistics == 71 / (BODY + 14)
    assert places.p[1] - places.p[0] == pytest.approx(15 / (BODY + 14))


def test_a_body_of_two_tiles_is_counted_per_tile():
    text = LOOP.replace("tmem[UR4] * 4", "tmem[UR4] * 8").replace("R4, R4 * 128", "R4, R4 * 256")
    loop = loop_of(text)
    assert loop.tiles == 2
    assert loop.total == (BODY + 4 + 128) / 2
    assert loop.kinds()["MUFU.EX2"] == 128


def test_cold_blocks_behind_the_exit_belong_to_the_loop():
    """A correction that ptxas moves out of line is still the correction."""
    begin, end = LOOP.index("    LDTM.x16"), LOOP.index("    .L_x_2:")
    moved = LOOP[begin:end]
    text = LOOP[:begin] + LOOP[end:] + "    .L_x_20:\n" + moved + "    BRA `(.L_x_2)\n"
    text = text.replace("@!P1 BRA `(.L_x_2)", "@P1 BRA `(.L_x_20)")
    loop = loop_of(text)
    assert (loop.total, len(loop.correction)) == (BODY, 11)


@pytest.mark.parametrize("target", [".L_x_5", ".L_x_2"])
def test_bsync_goes_on_where_its_bssy_says(target):
    """An out-of-line reconvergence jumps; the usual one directly precedes its own target."""
    text = f"""
        BSSY.RECONVERGENT B0, `(.L_x_2)
        BSSY.RECONVERGENT B1, `({target})
        MOV R1, R2
        BSYNC.RECONVERGENT B1
        .L_x_2:
        MOV R1, R3
        .L_x_5:
        EXIT
    """
    function = function_of(text)
    after = {".L_x_5": 2, ".L_x_2": 1}[target]
    assert function.blocks[0].successors == [after]


def test_guards_decide_whether_a_block_falls_through():
    text = """
        @P0 EXIT
        BRA `(.L_x_1)
        MOV R1, R2
        .L_x_1:
        BRA.U !UP3, `(.L_x_2)
        MOV R1, R2
        .L_x_2:
        EXIT
        .L_x_3:
        BRA `(.L_x_3)
    """
    function = function_of(text)
    assert [block.successors for block in function.blocks] == [[1], [3], [3], [4, 5], [5], [], [6]]
    assert function.order == [0, 1, 3, 4, 5] or function.order == [0, 1, 3, 5, 4]
    assert function.loops == {}  # nothing reaches the looping block


def test_work_in_another_loop_is_reported():
    """Examples are a mask that was split off, and an inner loop with an unknown trip count."""
    split = """
        .L_x_30:
        LDTM.x32 R4, tmem[UR4]
        FSEL R4, R4, -INF , P0 * 32
        STTM.x32 tmem[UR4], R4
        @P0 BRA `(.L_x_30)
    """
    function = function_of(split + LOOP)
    assert softmax.other_loops(function) == {0: {"LDTM": 1, "FSEL": 32, "STTM": 1}}
    inside = LOOP.replace("    STS [R9], R3\n", "    .L_x_40:\nF2FP R1, R2\n@P0 BRA `(.L_x_40)\n")
    assert len(loop_of(inside).nested) == 1
    assert softmax.other_loops(function_of(inside)) == {}


def test_straight_exponentials_are_outside():
    function = function_of("MUFU.EX2 R4, R4 * 128\n" + LOOP)
    assert softmax.exponentials_outside(function) == 128


def test_spills_and_parked_uniform_registers():
    text = LOOP.replace("STS [R9], R3", "STL [R1], R3\nLDL R3, [R1]\nMOV.SPILL R14, UR27")
    loop = loop_of(text)
    assert loop.spills == 2
    assert loop.kinds()["spills"] == 2
    assert loop.kinds()["moves"] == 1


def test_a_mask_makes_a_masked_loop():
    text = LOOP.replace("STS [R9], R3", "R2P PR, R2.B1, 0x7f * 16\nFSEL R4, R4, -INF , P0 * 128")
    loop = loop_of(text)
    assert loop.masked
    assert loop.kinds()["mask"] == 144


def test_every_kernel_of_a_listing():
    functions = parse(listing("EXIT", "one") + "\n" + listing("MOV R1, R2\nEXIT", "two"))
    assert [(f.name, len(f.instructions)) for f in functions] == [("one", 1), ("two", 2)]
