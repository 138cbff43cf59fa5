"""mov with its packing forms: PTX ISA "mov"."""

from __future__ import annotations

from typing import Any

from ptxemu.codegen.lower import NATURAL, Lower
from ptxemu.codegen.registry import Match, op
from ptxemu.codegen.values import Value
from ptxemu.errors import UnsupportedPtx
from ptxemu.syntax.tree import TYPE_BITS, Instr, Reg, Vec


@op(
    "mov",
    types="pred b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64 b128 f16 bf16 f16x2 bf16x2",
    section="mov",
)
def mov(c: Lower, i: Instr, f: Match) -> None:
    target, source = i.operands
    width = TYPE_BITS[f.type]
    if isinstance(source, Vec):
        pack(c, target, source.items, width)
    elif isinstance(target, Vec):
        unpack(c, target.items, source, width)
    elif width == 128:
        c.dst(target, c.halves(source))
    elif isinstance(source, Reg):
        c.copy(target, source, width)
    else:
        kind = f.type if f.type in ("f32", "f64", "pred") else NATURAL[width]
        c.dst(target, c.src(source, kind))


def pack(c: Lower, target: object, items: tuple[Any, ...], width: int) -> None:
    """mov.bW d, {a, b, ...}: the first item is least significant."""
    part = width // len(items)
    if part in (32, 64) and len(items) == 2:
        c.dst(target, (c.raw(items[0], part), c.raw(items[1], part)))
        return
    if width == 128:
        halves = [
            join(c, [c.src(x, NATURAL[part]) for x in half], part, 64)
            for half in (items[: len(items) // 2], items[len(items) // 2 :])
        ]
        c.dst(target, (halves[0], halves[1]))
        return
    values = [_byte_source(c, item, part) for item in items]
    c.dst(target, join(c, values, part, width))


def _byte_source(c: Lower, item: object, part: int) -> Value:
    value = c.src(item, NATURAL[part])
    return c.pure("u16", "({0} & 0xff)", "{0} & 0xff", value) if part == 8 else value


def join(c: Lower, values: list[Value], part: int, width: int) -> Value:
    """Equal parts -> one value, first least significant."""
    wide = [c.convert(value, NATURAL[width]) for value in values]
    out = wide[0]
    for k, value in enumerate(wide[1:], 1):
        out = c.pure(
            NATURAL[width],
            f"({{0}} | {{1}} << {k * part})",
            f"{{0}} | {{t1}} << {k * part}",
            out,
            value,
        )
    return out


def unpack(c: Lower, targets: tuple[Any, ...], source: object, width: int) -> None:
    """mov.bW {a, b, ...}, s."""
    part = width // len(targets)
    if part in (32, 64) and len(targets) == 2:
        for target, value in zip(targets, c.halves(source), strict=True):
            c.dst(target, value)
        return
    if width == 128:
        raise UnsupportedPtx("mov.b128 to more than two parts")
    value = c.src(source, NATURAL[width])
    for k, target in enumerate(targets):
        if target is not None:
            mask = (1 << part) - 1
            piece = c.pure(
                NATURAL[width],
                f"({{0}} >> {k * part} & {mask:#x})",
                f"{{0}} >> {k * part} & {mask:#x}",
                value,
            )
            c.dst(target, c.convert(piece, NATURAL[part]))
