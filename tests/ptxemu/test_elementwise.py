"""Every elementwise form, and some with immediate operands, in every way that differs inside (see
`elementwise`): bit for bit as the manual has it, approximations within their bounds."""

from __future__ import annotations

import pytest

from lab.silicon.conformance import hw_runner, patterns
from lab.silicon.conformance.elementwise import grouped
from lab.silicon.conformance.patterns import Variant, line
from lab.silicon.conformance.ptx_program import emulate
from ptxemu import Options, load
from tests.ptxemu.elementwise import judge, program

_NEGATIVE = "{{ .reg .pred %x, %y; setp.lt.s32 %x, {a}, 0; mov.pred %y, %x; "
IMMEDIATE = (
    ("add.T : T T", "s32 s64", "{op} {d}, {a}, -7;"),
    ("sub.u32 : u32 u32", "", "{op} {d}, 5, {a};"),
    ("mul.wide.u32 : u64 u32", "", "{op} {d}, {a}, 48;"),
    ("mad.lo.s32 : s32 s32 s32", "", "{op} {d}, {a}, -3, {b};"),
    ("and.b32 : b32 b32", "", "{op} {d}, {a}, -16;"),
    ("shl.T : T T", "b16 b32 b64", "{op} {d}, {a}, 7;"),
    ("shr.T : T T", "b16 u16 s16 b32 u32 s32 b64 u64 s64", "{op} {d}, {a}, 3;"),
    ("bfi.T : T T u32<256 u32<256", "b32 b64", "{op} {d}, {a}, 0x1fffffff, {b}, {c};"),
    ("bfi.T : T T u32<256", "b32 b64", "{op} {d}, 1234567, {a}, {b}, 9;"),
    ("prmt.b32 : u32 u32 u32", "", "{op} {d}, {a}, {b}, 0x5410;"),
    ("prmt.b32 : u32 u32", "", "{op} {d}, {a}, 0, 0xba98;"),
    ("add.f32 : f32 f32", "", "{op} {d}, {a}, 0f3F800000;"),
    ("fma.rn.f32 : f32 f32 f32", "", "{op} {d}, {a}, {b}, 0fBF000000;"),
    ("mul.f32 : f32 f32", "", "{op} {d}, {a}, 0fFF800000;"),
    ("max.f32 : f32 f32", "", "{op} {d}, {a}, 0f7FC00000;"),
    ("sub.f32 : f32 f32", "", "{op} {d}, 1.5, {a};"),
    ("mov.u32 : u32 u32", "", "{op} {d}, 4294967295;"),
    ("mov.s32 : s32 u32", "", "{op} {d}, -5;"),
    ("mov.f32 : u32 u32", "", "{op} {d}, 0f7FC00001;"),
    ("mov.b32 : u16 u32", "", "{op} {{ {d}, _}}, {a};"),
    ("mov.b32 : u16 u32", "", "{{ .reg .b16 %x; {op} {{%x, {d}}}, {a}; }}"),
    ("mov.b64 : u16 u64", "", "{{ .reg .b16 %x, %y, %z; {op} {{%x, %y, %z, {d}}}, {a}; }}"),
    ("selp.b32 : s32 s32", "", _NEGATIVE + "{op} {d}, {a}, -1, %x; }}"),
    ("selp.f32 : f32 s32", "", _NEGATIVE + "{op} {d}, 0fFF800000, 0f3F800000, %x; }}"),
    ("mov.pred : u32 u32", "", _NEGATIVE + "@!%x {op} %y, 1; selp.b32 {d}, 7, 9, %y; }}"),
)


def _groups() -> list[tuple[Variant, ...]]:
    immediate = [variant for row in IMMEDIATE for variant in line(*row)]
    return [*grouped(patterns.variants()), *((variant,) for variant in immediate)]


def _named(group: tuple[Variant, ...]) -> str:
    return f"{group[0].opcode} {group[0].detail}".rstrip()


@pytest.mark.parametrize("group", _groups(), ids=_named)
def test_instructions(group: tuple[Variant, ...]) -> None:
    built, sources = program(group)
    judge(group, sources, emulate(built, load(built.text), Options()))


@pytest.mark.hw
@pytest.mark.parametrize("group", _groups(), ids=_named)
def test_instructions_on_gpu(group: tuple[Variant, ...]) -> None:
    """One by one, as the GPU at hand may lack some of them."""
    lacking = []
    for variant in group:
        built, sources = program((variant,))
        try:
            outputs = hw_runner.run(built)
        except pytest.skip.Exception as reason:
            lacking.append(reason)
        else:
            judge((variant,), sources, outputs)
    if len(lacking) == len(group):
        raise lacking[0]
