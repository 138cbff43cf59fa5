"""Edits of the machine code: what they keep, and which are refused."""

from __future__ import annotations

import numpy as np
import pytest

from cycle_model.binding.bound import BoundLaunch, BoundWarp
from cycle_model.edits import edits_of, rewritten
from cycle_model.gpus import GPUS
from cycle_model.grid import LaunchModel
from cycle_model.launch import bind
from cycle_model.rewrite import OF_TWO, registers_of
from cycle_model.sass.flow import Control, Function, Instruction
from ptxemu.record.recording import Recording, WarpRecord

H100 = GPUS["H100"]


def launch_of(*lines: tuple[str, str, Control]) -> BoundLaunch:
    """A loop of instructions (opcode, operands, control word) that one warp runs twice."""
    items = [Instruction(16 * k, "", *line) for k, line in enumerate(lines)]
    end = len(items)
    items += [Instruction(16 * end, "P0", "BRA", "`(.L)", Control(5))]
    items += [Instruction(16 * end + 16, "", "EXIT", "", Control(5))]
    record = WarpRecord(0, 0, 0, np.zeros(0, np.uint32), [], np.zeros(0, np.int64))
    recording = Recording("kernel", (1,) * 3, (32,) * 3, (1,) * 3, 0, [], [], "sm_90a", [record])
    launch = BoundLaunch(Function("kernel", items, {".L": 0}), recording)
    path = np.array([*range(end + 1), *range(end + 2)], np.int32)
    launch._bound = {0: [BoundWarp(record, path, np.zeros(0, np.int64), (), 0.0, 0)]}
    return launch


def changed(launch: BoundLaunch, text: str) -> BoundLaunch:
    return rewritten(launch, edits_of(text))


def words(launch: BoundLaunch) -> list[str]:
    return [item.opcode for item in launch.function.instructions]


STORE = launch_of(
    ("FADD", "R1, R2, R3", Control(4)),
    ("MUFU.RCP", "R9, R8", Control(2, writes=0)),
    ("FMUL", "R4, R5, R6", Control(2)),
    ("STS", "[R7], R1", Control(3, waits=0b10)),
    ("FMUL", "R10, R9, R6", Control(2, waits=1)),
)


def test_a_store_moves_up_with_its_waits():
    moved = changed(STORE, "move STS by -2")
    assert words(moved)[:4] == ["FADD", "STS", "MUFU.RCP", "FMUL"]
    controls = [item.control for item in moved.function.instructions]
    assert controls[1].waits == 0b10
    assert controls[4].waits == 0b11, "what waited through it keeps waiting"
    assert controls[3].stall == 5, "the one before its old place takes over its stall"
    assert controls[0].stall == 8, "as far from the sum that it stores as it was"


def test_what_cannot_be_passed_is_said():
    with pytest.raises(ValueError, match=r"-2 at most: FADD at 0x0 needs or makes R1"):
        changed(STORE, "move STS by -3")
    with pytest.raises(ValueError, match=r"\+1 at most: BRA at 0x50 is a jump"):
        changed(STORE, "move STS by 2")
    with pytest.raises(ValueError, match="say which"):
        changed(STORE, "move FMUL by 1")
    with pytest.raises(ValueError, match="R9"):
        changed(STORE, "move MUFU.RCP by 3")


def test_landmarks_follow_a_move(decoded):
    """Every event stays with its instruction, and the launch still ends."""
    bound = bind(decoded)
    items = bound.function.instructions
    store = next(item for item in items if item.opcode.startswith("LDGDEPBAR"))
    for by in (-1, 1):
        try:
            moved = changed(bound, f"move {store.address:#x} by {by}")
        except ValueError:
            continue
        break
    else:
        pytest.fail("no place beside it")
    for before, after in zip(bound.cluster(0), moved.cluster(0), strict=True):
        old = [items[k].address for k in before.path[before.at].tolist()]
        new = moved.function.instructions
        assert [new[k].address for k in after.path[after.at].tolist()] == old
    assert LaunchModel(moved, H100).predict().cycles > 0


def exponentials(count: int, stall: int = 10) -> BoundLaunch:
    return launch_of(*[("MUFU.EX2", f"R{k}, R{k + 40}", Control(stall)) for k in range(count)])


def test_emulated_exponentials():
    """Two of eight become FlashAttention-4's instructions, and the path grows by their number."""
    before = exponentials(16)
    after = changed(before, "emulate MUFU.EX2=1/4")
    assert words(after).count("MUFU.EX2") == 12
    assert all(words(after).count(word) == 2 * OF_TWO.count(word) for word in set(OF_TWO))
    (one,), (other,) = before.cluster(0), after.cluster(0)
    assert len(other.path) - len(one.path) == 2 * 2 * (len(OF_TWO) - 2)
    executed = [after.function.instructions[k].opcode for k in other.path.tolist()]
    assert executed[-1] == "EXIT"
    assert executed.count("MUFU.EX2") == 24
    fast, slow = (LaunchModel(each, H100).predict().cycles for each in (after, before))
    assert fast < slow


def test_exponentials_closer_together():
    items = changed(exponentials(8), "apart MUFU.EX2=8").function.instructions
    assert [item.control.stall for item in items[:8]] == [8] * 7 + [10]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("emulate MUFU.EX2=1/4", "has 8 MUFU.EX2"),
        ("emulate MUFU.EX2=2/3", "a share such as"),
        ("stall MUFU.EX2=-1", "not within 0 .. 15"),
        ("clock=-1", "not within 0"),
        ("move MUFU.EX2@9 by 1", "there are 6"),
        ("move MUFU.EX2@0 by 1", "K at least 1"),
        ("move MUFU.EX2", "move OPCODE by N"),
    ],
)
def test_refusals(text, match):
    with pytest.raises(ValueError, match=match):
        changed(exponentials(6), text)


@pytest.mark.parametrize(
    ("opcode", "operands", "writes", "reads"),
    [
        ("FFMA2", "R4, R6.F32x2.HI_LO, UR4.F32, R0.F32", {"R4", "R5"}, {"R6", "R7", "R0", "R1"}),
        ("STS.64", "[R2+0x10], R8", set(), {"R2", "R8", "R9"}),
        ("ISETP.GT.AND", "P3, PT, R2, -0x1, PT", {"P3"}, {"R2"}),
        ("REDUX.SUM", "UR4, R2", {"UR4"}, {"R2"}),
        ("LDTM.x2", "R4, tmem[UR5]", {"R4", "R5"}, {"UR5"}),
    ],
)
def test_registers(opcode, operands, writes, reads):
    found = registers_of(Instruction(0, "", opcode, operands))
    assert found.writes == writes
    assert found.reads >= reads
