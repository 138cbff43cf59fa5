"""The grammar: literals, operands, declarations, scopes, lines."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

import ptxemu
from ptxemu.errors import PtxSyntaxError
from ptxemu.module import Module
from ptxemu.syntax.lexer import MOST_BYTES, MOST_NESTED, MOST_REGISTERS
from ptxemu.syntax.parser import parse
from ptxemu.syntax.tree import Addr, Entry, Imm, Instr, Not, Pair, Reg, Special, Sym, Vec
from tests.ptxemu.kernels import HEAD, kernel, launch

REGS = ".reg .pred %p<4>; .reg .b32 %r<9>, %one; .reg .b64 %rd<4>; .reg .b128 %q;"


def body(text: str, before: str = "") -> list:
    """Return the statements of a kernel."""
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


SHARED = ".shared .align 8 .b8 fixed[64];\n"


@pytest.mark.parametrize(
    "line",
    [
        "mov.u32 %r1, !%p1;",
        "mov.b64 %rd1, !%p1;",
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [fixed], {!%p1};",
        "add.u32 %r1, !%r2, %r3;",
        "@%r1 mov.u32 %r1, %r2;",
        "@!%p99 mov.u32 %r1, %r2;",
        "st.shared.b32 [fixed], {};",
        "match.any.sync.b32 %r1, %r2;",
        "shfl.sync.idx.b32 %r3, 0, 31, -1;",
        "st.shared.b32 fixed, %r1;",
        "ld.shared.b32 %r1, %r2;",
        "cp.async.wait_group %r1;",
    ],
)
def test_the_line_is_named(line: str) -> None:
    text = kernel(line, before=SHARED)
    with pytest.raises(ptxemu.PtxSyntaxError) as caught:
        launch(text)
    number = text.splitlines().index(line) + 1
    assert caught.value.line == number
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("st.shared.v2.b32 [fixed], {%r1};", "2 elements; its operand has 1"),
        ("st.shared.v2.b32 [fixed], {%r1, %r2, %r3};", "2 elements; its operand has 3"),
        ("st.shared.b32 [fixed], {%r1, %r2};", "1 element; its operand has 2"),
        ("ld.shared.v4.b32 {%r1, %r2}, [fixed];", "4 elements; its operand has 2"),
        ("ld.global.nc.v2.b32 %r1, [%rd1];", "2 elements; its operand has 1"),
        ("ldu.global.b32 {%r1, %r2}, [%rd1];", "1 element; its operand has 2"),
        ("red.global.add.v4.f32 [%rd1], {%f1, %f2};", "4 elements; its operand has 2"),
        ("atom.global.add.v2.f32 {%f1}, [%rd1], {%f1, %f2};", "2 elements; its operand has 1"),
        (
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [fixed], {%r1}, [fixed];",
            "2 elements; its operand has 1",
        ),
    ],
)
def test_vectors_have_as_many_items_as_the_opcode_says(line: str, counts: str) -> None:
    with pytest.raises(ptxemu.PtxSyntaxError) as caught:
        launch(kernel(line, before=SHARED))
    assert f"{line.split()[0]} moves {counts}" in str(caught.value)


OPCODES = """mov.u32 mov.b64 mov.pred add.s32 add.f32 mad.lo.s32 fma.rn.f32 setp.lt.u32 selp.b32
ld.shared.b32 st.shared.v2.b32 ld.global.b64 st.global.b16 atom.shared.add.u32 red.global.add.f32
cvt.u32.u64 cvt.rn.f32.s32 shl.b32 prmt.b32 bfe.u32 lop3.b32 vote.sync.ballot.b32 shfl.sync.idx.b32
redux.sync.add.s32 bar.sync mbarrier.init.shared.b64 mbarrier.try_wait.parity.shared.b64
cp.async.ca.shared.global cp.async.bulk.commit_group elect.sync cvta.to.global.u64 mapa.u64
ldmatrix.sync.aligned.m8n8.x1.shared.b16 tcgen05.alloc.cta_group::1.sync.aligned.b32""".split()
OPERANDS = """%r1 %r2 %p1 !%p1 %rd1 %f1 %fd1 %h1 5 -1 1.5 0f3F800000 0d3FF0000000000000 [%rd1] [%r1]
[fixed] {%r1,%r2} {%p1,%r1} {} _ %tid.x fixed nobody %r1|%p1 [%rd1,{%r1,%r2}] 99999999999999999999
""".split()


def attempt(seed: int) -> None:
    chance = random.Random(seed)
    operands = ", ".join(chance.choices(OPERANDS, k=chance.randrange(5)))
    text = kernel(f"{chance.choice(OPCODES)} {operands};", before=SHARED)
    with suppress(ptxemu.PtxEmuError):
        launch(text, memory=[], check=chance.random() < 0.5)


@pytest.mark.parametrize("block", range(20))
def test_only_errors_with_a_name(block: int) -> None:
    for seed in range(100 * block, 100 * block + 100):
        attempt(seed)


def hostile(statement: str, before: str = "") -> str:
    return f"{HEAD}{before}\n.visible .entry kernel() {{\n{statement}\nret;\n}}\n"


@pytest.mark.parametrize(("text", "words"), [
    (hostile(f".reg .b32 %r<{MOST_REGISTERS + 1}>;"), "at most 1048576 in a kernel"),
    (hostile(".reg .b32 %r<-1>;"), "-1 registers"),
    (hostile(f".reg .b32 %r<{MOST_REGISTERS - 1}>; .reg .b32 %q<9>;"), "9 registers besides"),
    (hostile(".reg .b6255 %r1;"), "unknown type .b6255"),
    (hostile("", f".global .b8 x[{MOST_BYTES + 1}];"), "a variable of 1073741825 bytes"),
    (hostile("", ".global .b8 x[99999999999][99999999999];"), "a variable of"),
    (hostile("", ".global .b32 x[2] = {1, 2, 3};"), "an initialiser of 12 bytes"),
    (hostile("", ".global .align 3 .b32 x;"), "expected a power of two"),
    (hostile(".reg .b32 %r1; mov.b32 %r1, 09;"), "09"),
    (hostile(f".reg .b32 %r1; mov.b32 %r1, {'1' * 5_000};"), "an integer of 5000 digits"),
    (hostile(f".reg .b32 %r1; mov.b32 %r1, {'{' * 5_000};"), "nest more than 100 deep"),
    (hostile("{" * MOST_NESTED + "}" * MOST_NESTED), "nest more than 100 deep"),
])  # fmt: skip
def test_it_is_a_syntax_error(text, words):
    with pytest.raises(ptxemu.PtxSyntaxError, match=words) as raised:
        Module(text)
    assert "line" in str(raised.value)


def test_the_limits_themselves_are_read():
    """An entry uses one register for the carry."""
    Module(hostile(f".reg .b32 %r<{MOST_REGISTERS - 1}>;", f".global .b8 x[{MOST_BYTES}];"))
    scopes = MOST_NESTED - 1  # the kernel's own braces count
    Module(hostile("{" * scopes + "}" * scopes))


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
        "folder/helpers.py:8",  # lines of inline assembly are not lines of the file
        "folder/helpers.py:8",  # neither is a statement in column 0
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
