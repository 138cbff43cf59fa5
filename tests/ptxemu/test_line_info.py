"""Line information: which place of which file an instruction is from."""

from __future__ import annotations

from ptxemu.syntax.parser import parse
from ptxemu.syntax.tree import Instr

PTX = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry first()
{
    .reg .b32 %r<9>;
    mov.u32 %r0, 0;
    .loc 1 10 4
    mov.u32 %r1, 1;
    .loc 1 0 0
    mov.u32 %r2, 2;
    .loc 2 7 3, function_name $L__info_string0+4, inlined_at 1 10 4
    mov.u32 %r3, 3;
    {
    .loc 2 90 1, function_name $L__info_string1, inlined_at 2 7 3
    mov.u32 %r4, 4;
    }
LABEL:
    mov.u32 %r5, 5;
    .loc 2 8 1, function_name $L__info_string1, inlined_at 1 77 2
    mov.u32 %r6, 6;
    // begin inline asm
    {
    .loc 1 80 2
    mov.u32 %r8, 8;
    }
    // end inline asm
    mov.u32 %r8, 8;
    .loc 1 99 0
    mov.u32 %r8, 8;
    .loc 9 1 1
    mov.u32 %r7, 7;
    ret;
}
.visible .entry second()
{
    ret;
}
    .file 1 "folder/kernel.py"
    .file 2 "folder/helpers.py", 1700000000, 4096
.section .debug_str
{
$L__info_string0:
.b8 104, 0
}
"""
TREE = parse(PTX)


def instructions(entry: str) -> list[Instr]:
    return [item for item in TREE.entries[entry].body if isinstance(item, Instr)]


def test_the_innermost_frame_is_the_source():
    assert [instr.source for instr in instructions("first")] == [
        "",
        "folder/kernel.py:10",
        "folder/kernel.py:10",  # line 0: made by the compiler
        "folder/helpers.py:7",
        "folder/helpers.py:90",
        "folder/helpers.py:90",
        "folder/helpers.py:8",
        "folder/helpers.py:8",  # lines of inline assembly are none of the file
        "folder/helpers.py:8",  # nor is a statement in column 0
        "folder/helpers.py:8",
        "file 9:1",  # not in the table
        "file 9:1",
    ]


def test_a_function_starts_without_a_place():
    assert [instr.source for instr in instructions("second")] == [""]


def test_inlined_calls_are_kept_from_the_inside_out():
    frames = {i.operands[1].value: i.location.frames() for i in instructions("first")[1:-1]}
    assert frames[3] == ["folder/helpers.py:7", "folder/kernel.py:10"]
    assert frames[4] == ["folder/helpers.py:90", "folder/helpers.py:7", "folder/kernel.py:10"]
    assert frames[6] == ["folder/helpers.py:8", "folder/kernel.py:77"]


def test_places_make_no_instruction_different():
    for changed in (PTX.replace(".loc", "// "), PTX.replace(".loc 1 10 4", ".loc 1 11 4")):
        assert parse(changed).entries["first"].body == TREE.entries["first"].body
