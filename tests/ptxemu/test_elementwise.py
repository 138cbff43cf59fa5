"""Every elementwise form, and some with immediate operands, on every internal path (see
`elementwise`): bit for bit as in the manual, approximations within their bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from lab.silicon.conformance import hw_runner, patterns
from lab.silicon.conformance.bounds import bounds_of, excess
from lab.silicon.conformance.elementwise import grouped, module, register_bits
from lab.silicon.conformance.patterns import Variant, line
from lab.silicon.conformance.ptx_program import Buffer, Program, emulate
from lab.silicon.conformance.semantics import LETTERS, alike, evaluate
from lab.silicon.conformance.values import operands
from ptxemu import Options, load

# Elementwise instructions -> a program that executes each on every internal path.
#
# The emulator keeps a register as one Python scalar while its lanes agree and as an array
# otherwise, groups equal operations on several registers, and merges results of a part of the warp.
# So an instruction runs here on per-lane operands (four at once, alone), on operands loaded from
# one address (four, alone), on mixtures of both, and under a divergent branch into a register with
# a previous value.

LANES = 32
SETS = 4  # equal operations on distinct registers: the smallest group
COUNT = LANES * SETS
UNIFORM = (3, 40, 77, 126)  # elements that serve as uniform operands
SENTINEL = 0x5A5A5A5A5A5A5A5A
ACTIVE = np.arange(LANES) & 5 == 0  # lanes that take the divergent branch


def _sections(sources: int) -> list[tuple[str, ...]]:
    """Operand registers of each result: the last two run under the divergent branch."""
    letters = LETTERS[:sources]
    varying = [tuple(f"{x}{k}" for x in letters) for k in range(SETS)]
    uniform = [tuple(f"u{x}{k}" for x in letters) for k in range(SETS)]
    mixed = []
    for fixed in range(sources if sources > 1 else 0):
        mixed += [
            tuple(f"u{x}{k}" if j == fixed else f"{x}{k}" for j, x in enumerate(letters))
            for k in (range(SETS) if fixed == 0 else (1,))
        ]
    alone = [tuple(f"{u}{x}{(3 - j) % SETS}" for j, x in enumerate(letters)) for u in ("", "u")]
    return [*varying, *uniform, *mixed, *alone, varying[2], uniform[2]]


def _index(register: str) -> np.ndarray:
    """Index of the element of its source that each lane of a register holds."""
    which = int(register[-1])
    if register[0] == "u":
        return np.full(LANES, UNIFORM[which])
    return which * LANES + np.arange(LANES)


def _load(letter: str, bits: int) -> list[str]:
    size = bits // 8
    lines = [
        f".reg .b64 %p{letter}, %v{letter};",
        f".reg .b{bits} %{letter}<{SETS}>, %u{letter}<{SETS}>;",
        f"ld.param.u64 %p{letter}, [{letter}];",
        f"mad.wide.u32 %v{letter}, %lane, {size}, %p{letter};",
    ]
    for k in range(SETS):
        lines.append(f"ld.global.b{bits} %{letter}{k}, [%v{letter}+{k * LANES * size}];")
        lines.append(f"ld.global.b{bits} %u{letter}{k}, [%p{letter}+{UNIFORM[k] * size}];")
    return lines


def _text(variants: Sequence[Variant], sections: list[tuple[str, ...]]) -> str:
    """Result s of variant v is %d{v}_{s}, and is stored to row s of buffer d{v}."""
    kinds, bits = variants[0].sources, register_bits(variants[0].target)
    held, last = SENTINEL & (1 << bits) - 1, len(sections) - 2
    lines = [".reg .b32 %lane, %t; .reg .pred %skip; .reg .b64 %pd, %vd; mov.u32 %lane, %tid.x;"]
    for letter, kind in zip(LETTERS, kinds, strict=False):
        lines += _load(letter, register_bits(kind))
    whole, divergent, stores = [], [], []
    for v, variant in enumerate(variants):
        lines.append(f".reg .b{bits} %d{v}_<{len(sections)}>;")
        whole += [f"mov.b{bits} %d{v}_{s}, {held:#x};" for s in (last, last + 1)]
        stores.append(f"ld.param.u64 %pd, [d{v}]; mad.wide.u32 %vd, %lane, {bits // 8}, %pd;")
        for s, registers in enumerate(sections):
            chosen = whole if s < last else divergent
            chosen.append(variant.text(f"%d{v}_{s}", [f"%{register}" for register in registers]))
            stores.append(f"st.global.b{bits} [%vd+{s * LANES * bits // 8}], %d{v}_{s};")
    branch = "and.b32 %t, %lane, 5; setp.ne.u32 %skip, %t, 0; @%skip bra DONE;"
    names = [*LETTERS[: len(kinds)], *(f"d{v}" for v in range(len(variants)))]
    body = [*lines, *whole, branch, *divergent, "DONE:", *stores]
    return module((f".param .u64 {name}" for name in names), body)


def program(variants: Sequence[Variant]) -> tuple[Program, list[np.ndarray]]:
    """Return the program of variants with equal operands, and the operands of each element of a
    result."""
    kinds = variants[0].sources
    sources = operands(kinds, " ".join(kinds), COUNT)
    sections = _sections(len(kinds))
    gathered = [
        np.concatenate([data[_index(registers[j])] for registers in sections])
        for j, data in enumerate(sources)
    ]
    params = [Buffer(x, data) for x, data in zip(LETTERS, sources, strict=False)]
    blank = np.zeros(LANES * len(sections), f"u{register_bits(variants[0].target) // 8}")
    params += [Buffer(f"d{v}", blank, blank) for v in range(len(variants))]
    return Program(variants[0].opcode, _text(variants, sections), params=params), gathered


def judge(
    variants: Sequence[Variant], sources: list[np.ndarray], outputs: dict[str, np.ndarray]
) -> None:
    """Raise AssertionError that names an instruction and the operands of a wrong result."""
    for v, variant in enumerate(variants):
        found = outputs[f"d{v}"]
        taken = np.append(np.ones(len(found) - 2 * LANES, bool), np.tile(ACTIVE, 2))
        held = SENTINEL & (1 << 8 * found.itemsize) - 1
        assert (found[~taken] == held).all(), f"{variant.opcode}: a lane that is not active"
        found, used = found[taken], [x[taken] for x in sources]
        for bound in bounds_of(variant.opcode):
            error = excess(variant.opcode, bound, used, found)
            assert error.max() <= 1, f"{variant.opcode}: {error.max():.3g} times {bound}"
        if not bounds_of(variant.opcode):
            expected = evaluate(variant, used)
            wrong = np.flatnonzero(~alike(variant.opcode, found, expected))
            assert not len(wrong), (
                f"{variant.opcode} {variant.detail}: {len(wrong)} of {len(found)} differ; of "
                f"{', '.join(f'{x[wrong[0]]:#x}' for x in used)} the result is "
                f"{found[wrong[0]]:#x}, expected {expected[wrong[0]]:#x}"
            )


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
    """Variants run one by one, as the local GPU may lack some of them."""
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
