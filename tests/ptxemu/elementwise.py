"""One elementwise instruction -> a program that executes it in every way that differs inside.

The emulator keeps a register as one Python scalar while its lanes agree and as an array otherwise,
groups equal operations on several registers, and merges what a part of the warp computes. So an
instruction runs here on per-lane operands (four at once, alone), on operands loaded from one
address (four, alone), on mixtures of both, and under a divergent branch into a register that holds
something.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from workbench.conformance.ptx_program import DTYPES, Buffer, Program, generate

LANES = 32
SETS = 4  # equal operations on distinct registers: the least that is grouped
COUNT = LANES * SETS
UNIFORM = (3, 40, 77, 126)  # elements that serve as uniform operands
SENTINEL = 0x5A5A5A5A5A5A5A5A
ACTIVE = np.arange(LANES) & 5 == 0  # lanes that take the divergent branch
TYPE = {"e4m3x2": "u16", "e5m2x2": "u16", "f16x2": "u32", "bf16x2": "u32", "f32x2": "u64"}
LETTERS = "abc"


@dataclass(frozen=True)
class Row:
    """`code` with {d}, {a}, {b}, {c}; `types`: destination, then sources; `reference`: on arrays of
    those types -> the destination (anything that casts to it). `data`: generator of each source."""

    code: str
    types: str
    reference: Callable[..., np.ndarray]
    data: str = "special"
    tolerance: float = 0.0

    @property
    def name(self) -> str:
        found = re.findall(r"[a-z][\w.:]*\.[\w.:]+", self.code.replace(".reg .", "reg"))
        return next((word for word in found if not word.startswith("reg")), self.code)


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
    alone = [
        tuple(f"{x}{3 - j}" for j, x in enumerate(letters)),
        tuple(f"u{x}{3 - j}" for j, x in enumerate(letters)),
    ]
    return varying + uniform + mixed + alone + [varying[2], uniform[2]]


def _index(register: str) -> np.ndarray:
    """Which element of its source each lane of a register holds."""
    which = int(register[-1])
    if register[0] == "u":
        return np.full(LANES, UNIFORM[which])
    return which * LANES + np.arange(LANES)


def _load(letter: str, bits: int) -> list[str]:
    size = bits // 8
    lines = [
        f"ld.param.u64 %p{letter}, [p{letter}];",
        f"mad.wide.u32 %v{letter}, %lane, {size}, %p{letter};",
    ]
    for k in range(SETS):
        lines.append(f"ld.global.b{bits} %{letter}{k}, [%v{letter}+{k * LANES * size}];")
        lines.append(f"ld.global.b{bits} %u{letter}{k}, [%p{letter}+{UNIFORM[k] * size}];")
    return lines


def _text(row: Row, bits: list[int]) -> str:
    sections = _sections(len(bits) - 1)
    letters = LETTERS[: len(bits) - 1]
    last = len(sections) - 2
    lines = [
        ".reg .b32 %lane, %t;",
        ".reg .pred %skip;",
        ".reg .b64 %pd, %vd;",
        f".reg .b{bits[0]} %d<{len(sections)}>;",
    ]
    lines += [
        f".reg .b64 %p{x}, %v{x}; .reg .b{w} %{x}<{SETS}>, %u{x}<{SETS}>;"
        for x, w in zip(letters, bits[1:], strict=True)
    ]
    lines.append("mov.u32 %lane, %tid.x;")
    for letter, width in zip(letters, bits[1:], strict=True):
        lines += _load(letter, width)
    lines += [
        f"mov.b{bits[0]} %d{k}, {SENTINEL & (1 << bits[0]) - 1:#x};" for k in (last, last + 1)
    ]
    for k, operands in enumerate(sections):
        if k == last:
            lines += ["and.b32 %t, %lane, 5;", "setp.ne.u32 %skip, %t, 0;", "@%skip bra DONE;"]
        named = {x: f"%{register}" for x, register in zip(letters, operands, strict=True)}
        code = row.code.replace("{{", "\1").replace("}}", "\2")
        lines.append(code.format(d=f"%d{k}", **named).replace("\1", "{").replace("\2", "}"))
    size = bits[0] // 8
    lines += ["DONE:", "ld.param.u64 %pd, [pd];", f"mad.wide.u32 %vd, %lane, {size}, %pd;"]
    lines += [
        f"st.global.b{bits[0]} [%vd+{k * LANES * size}], %d{k};" for k in range(len(sections))
    ]
    params = ", ".join(f".param .u64 p{x}" for x in (*letters, "d"))
    body = "\n    ".join([*lines, "ret;"])
    return (
        f".version 8.8\n.target sm_100a\n.address_size 64\n.visible .entry test({params})\n"
        f"{{\n    {body}\n}}\n"
    )


def program(row: Row) -> Program:
    """The program of `row`, with its inputs and the expected result of every section."""
    types = row.types.split()
    kinds = [np.dtype(DTYPES[TYPE.get(t, t)]) for t in types]
    generators = (row.data.split() * 3)[: len(types) - 1]
    sources = [
        generate(how, letter, TYPE.get(t, t), COUNT)
        for how, letter, t in zip(generators, LETTERS, types[1:], strict=False)
    ]
    sections = _sections(len(sources))
    gathered = [
        np.concatenate([data[_index(registers[j])] for registers in sections])
        for j, data in enumerate(sources)
    ]
    with np.errstate(all="ignore"):
        expected = np.broadcast_to(np.asarray(row.reference(*gathered)), gathered[0].shape).astype(
            kinds[0]
        )
    held = np.full(
        LANES, SENTINEL & (1 << 8 * kinds[0].itemsize) - 1, f"u{kinds[0].itemsize}"
    ).view(kinds[0])
    for section in (len(sections) - 2, len(sections) - 1):
        part = expected[section * LANES : (section + 1) * LANES]
        part[~ACTIVE] = held[~ACTIVE]
    params = [Buffer(x, data) for x, data in zip(LETTERS, sources, strict=False)]
    params.append(Buffer("d", np.zeros_like(expected), expected, row.tolerance))
    return Program(row.name, _text(row, [8 * kind.itemsize for kind in kinds]), params=params)
