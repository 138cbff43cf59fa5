"""The grammar: literals, operands, declarations, scopes, lines."""

from __future__ import annotations

import pytest

from ptxemu.errors import PtxSyntaxError
from ptxemu.syntax.parser import parse
from ptxemu.syntax.tree import Addr, Entry, Imm, Instr, Not, Pair, Reg, Special, Sym, Vec
from tests.ptxemu.kernels import kernel, launch

REGS = ".reg .pred %p<4>; .reg .b32 %r<9>, %one; .reg .b64 %rd<4>; .reg .b128 %q;"


def body(text: str, before: str = "") -> list:
    """The statements of a kernel."""
    tree = parse(
        f".version 8.7\n.target sm_100a\n{before}.visible .entry k()\n{{ {REGS}\n{text}\n}}"
    )
    return tree.entries["k"].body


def operand(text: str) -> object:
    return body(f"mov.u32 %r1, {text};")[0].operands[1]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", Imm(7)),
        ("-7", Imm(-7)),
        ("0x1F", Imm(31)),
        ("0X1fU", Imm(31)),
        ("0b101", Imm(5)),
        ("017", Imm(15)),
        ("0", Imm(0)),
        ("4000000000U", Imm(4_000_000_000)),
        ("-0x80000000", Imm(-(1 << 31))),
        ("1.5", Imm(1.5)),
        ("-2.5e3", Imm(-2500.0)),
        ("0f3F800000", Imm(0x3F800000, 32)),
        ("0d3FF0000000000000", Imm(0x3FF0000000000000, 64)),
        ("WARP_SZ", Imm(32)),
        ("%r3", Reg("%r3")),
        ("%one", Reg("%one")),
        ("%tid.x", Special("%tid.x")),
        ("%laneid", Special("%laneid")),
        ("table", Sym("table")),
        ("table+16", Sym("table", 16)),
        ("table-4", Sym("table", -4)),
        ("!%p1", Not(Reg("%p1"))),
        ("_", None),
        ("{%r1, _, 5}", Vec((Reg("%r1"), None, Imm(5)))),
        ("%p1|%p2", Pair(Reg("%p1"), Reg("%p2"))),
        ("_|%p2", Pair(None, Reg("%p2"))),
        ("[%rd1]", Addr(Reg("%rd1"))),
        ("[%rd1+16]", Addr(Reg("%rd1"), 16)),
        ("[%rd1+-16]", Addr(Reg("%rd1"), -16)),
        ("[%rd1 - 8]", Addr(Reg("%rd1"), -8)),
        ("[table+8]", Addr(Sym("table"), 8)),
        ("[%rd1, {%r1, 4}]", Addr(Reg("%rd1"), 0, (Reg("%r1"), Imm(4)))),
        ("[128]", Addr(Imm(128))),
    ],
)
def test_operands(text: str, value: object) -> None:
    assert operand(text) == value


def test_instructions_keep_their_line_text_and_guard() -> None:
    first, label, second = body(
        "@!%p1 add.rn.ftz.f32 %r1, %r2, %r3;\nL: /* a\ncomment */ bra.uni L; // more"
    )
    assert isinstance(first, Instr)
    assert (first.opcode, first.parts, first.root, first.type) == (
        "add.rn.ftz.f32",
        ("add", "rn", "ftz", "f32"),
        "add",
        "f32",
    )
    assert first.guard == Not(Reg("%p1"))
    assert (first.line, first.text) == (5, "@!%p1 add.rn.ftz.f32 %r1, %r2, %r3;")
    assert label == "L"
    assert second.line == 7


def test_opcodes_with_colons() -> None:
    text = "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 0;"
    assert body(text)[0].parts == ("mbarrier", "try_wait", "parity", "shared::cta", "b64")


def test_scopes_rename_registers_variables_and_labels() -> None:
    statements = body(
        "{ .reg .b64 %r1; L: mov.b64 %r1, 1; bra L; { .reg .b32 %t; mov.b32 %t, 2; }\n"
        ".reg .b64 %t; mov.b64 %t, 3; }\n"
        "{ .reg .b16 %r1; L: mov.b16 %r1, 4; bra L; }\nmov.b32 %r1, 5;"
    )
    written = [i.operands[0].name for i in statements if isinstance(i, Instr) and i.root == "mov"]
    assert len(set(written)) == 5
    assert written[-1] == "%r1"
    labels = [item for item in statements if isinstance(item, str)]
    jumps = [i.operands[0].name for i in statements if isinstance(i, Instr) and i.root == "bra"]
    assert labels == jumps
    assert len(set(labels)) == 2


def test_a_branch_may_leave_its_scope_or_go_forward_in_it() -> None:
    statements = body("OUT:\n{ bra IN; bra OUT; IN: mov.u32 %r1, 1; }")
    names = [i.operands[0].name for i in statements if isinstance(i, Instr) and i.root == "bra"]
    assert names[0] == next(item for item in statements if isinstance(item, str) and item != "OUT")
    assert names[1] == "OUT"


def test_declarations() -> None:
    tree = parse(""".version 8.7
.target sm_100a, debug
.address_size 64
.file 1 "a.py"
.extern .shared .align 1024 .b8 dynamic[];
.global .align 4 .u32 table[2][3] = {{1, 2, 3}, {4, 5, 6}};
.const .f32 scale = 0f3F800000;
.global .align 8 .b8 text[5] = {104, 101, 0x6c, 108, 111};
.section .debug { .b8 1 }
.extern .func (.param .b32 r) vprintf (.param .b64 a);
.visible .entry k(
    .param .u64 .ptr .global .align 16 a,
    .param .align 64 .b8 map[128],
    .param .f32 x
)
.reqntid 128, 1, 1
.minnctapersm 1
{
    .loc 1 5 0
    .pragma "nounroll";
    .local .align 16 .b8 stack[32];
    ret;
}
""")
    entry: Entry = tree.entries["k"]
    assert [(p.name, p.nbytes, p.align) for p in entry.params] == [
        ("a", 8, 16),
        ("map", 128, 64),
        ("x", 4, 4),
    ]
    assert entry.directives == {"reqntid": (128, 1, 1), "minnctapersm": (1,)}
    assert {v.name: v.nbytes for v in tree.variables} == {
        "dynamic": 0,
        "table": 24,
        "scale": 4,
        "text": 5,
    }
    assert tree.functions == {"vprintf"}
    assert tree.files == {1: "a.py"}
    assert [item.opcode for item in entry.body] == ["ret"]
    assert entry.variables[0].nbytes == 32


def test_line_numbers_survive_comments_and_strings() -> None:
    with pytest.raises(PtxSyntaxError) as caught:
        parse('// one\n/* two\nthree */\n.file 1 "x//y"\n  .wonder')
    assert caught.value.line == 5


def test_an_unused_call_sequence_does_not_hinder() -> None:
    text = kernel(
        "bra OVER;\n{ .param .b32 p0; st.param.b32 [p0], %r1; call.uni vprintf, (p0); }\nOVER:",
        before=".extern .func vprintf(.param .b32 a);\n",
    )
    launch(text)
