"""ld, st, ldu, prefetch, mov with its packing forms, and addresses: PTX ISA "Data Movement and
Conversion Instructions"."""

from __future__ import annotations

from typing import Any

from ptxemu.codegen.lower import NATURAL, Lower, fields
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import Value, constant
from ptxemu.errors import PtxSyntaxError, UnsupportedPtx
from ptxemu.machine import access
from ptxemu.ops.convert import SIGN_8
from ptxemu.syntax.tree import TYPE_BITS, Addr, Instr, Reg, Vec

_TYPES = "b8 u8 s8 b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64 b128"
_ORDER = (
    "relaxed acquire release weak volatile cta cluster gpu sys mmio unified nc "
    "L1::no_allocate L1::evict_first L1::evict_last L1::evict_normal L1::evict_unchanged "
    "L2::cache_hint L2::64B L2::128B L2::256B L2::evict_last L2::evict_first L2::evict_normal "
    "ca cg cs lu cv wb wt"
)
_SPACE_FLAGS = "global shared shared::cta shared::cluster local param param::entry const"
_SPACES = {
    "shared": "shared",
    "shared::cta": "shared",
    "shared::cluster": "cluster",
    "global": "global",
    "const": "global",
    "local": "local",
    "param": "param",
    "param::entry": "param",
}


for _function in (access.load_scalar, access.load_vector, access.store_scalar, access.store_vector):
    runtime(_function)


def space_of(f: Match) -> str:
    """The machine's name of the state space that the flags name."""
    return next((_SPACES[flag] for flag in f.flags if flag in _SPACES), "generic")


def address_value(c: Lower, operand: Addr, space: str) -> Value:
    """An address in the width of its space: u32 for shared, u64 elsewhere."""
    return c.address(operand, 32 if space in ("shared", "cluster") else 64)


def _element(ptx_type: str) -> tuple[int, str]:
    """Return (bytes, value type) of one element; b128 moves as two u64."""
    width = TYPE_BITS[ptx_type]
    if width == 8:
        return 1, "s16" if ptx_type == "s8" else "u16"
    if width == 128:
        return 8, "u64"
    return width // 8, f"{'s' if ptx_type[0] == 's' else 'u'}{width}"


def elements(c: Lower, i: Instr, f: Match, operand: object) -> tuple[Any, ...]:
    """The data of an access, one item for each element that the opcode moves; `.v2`: two."""
    items, count = c.each(operand), int(f.pick("v2", "v4", "v8", default="v1")[1:])
    if len(items) != count:
        plural = "s" * (count > 1)
        what = f"{i.opcode} moves {count} element{plural}; its operand has {len(items)}"
        raise PtxSyntaxError(what, line=i.line, text=i.text)
    return items


@op("ld ldu", types=_TYPES, flags=f"{_SPACE_FLAGS} {_ORDER} v2 v4 v8", section="ld")
def load(c: Lower, i: Instr, f: Match) -> list[Any]:
    space = space_of(f)
    size, type_ = _element(f.type)
    result = space == "param" and c.arguments.get(getattr(i.operands[1].base, "name", ""))
    if result:  # of a call of the system, in this block
        return [c.convert(result, type_)]
    wide = f.type == "b128"
    count = len(elements(c, i, f, i.operands[0])) * (1 + wide)
    address = address_value(c, i.operands[1], space)
    strong = f.pick("volatile", "acquire", "relaxed", "mmio")
    if strong:
        c.effect(f"w.polled, w.how = True, '{strong} {f.pick('cta')}'")
    raw = f"u{max(8 * size, 16)}"
    if address.uniform and not _differs_by_lane(c, space):
        text = f"load_scalar(w, '{space}', {{0}}, {size}, {count})"
        if space == "param" and count == 1 and isinstance(address.const, int):
            number, rest = divmod(address.const, size)
            if not rest:  # what `load_scalar` comes to
                text = f"w.machine.param_views[{size}].item({number})"
        values = c.effect(text, address, results=[(raw, True)] * count)
    else:
        where = "full({0}, U64)" if address.uniform else "{0}"
        text = f"load_vector(w, '{space}', {where}, {size}, {count}, <m>)"
        text += ".astype(U16)" if size == 1 else ""
        values = c.effect(text, address, results=[(raw, False)] * count, matrix=True)
    if f.type == "s8":
        values = [c.pure("s16", *SIGN_8, value) for value in values]
    values = [c.convert(value, type_) for value in values]
    if strong:
        c.effect("w.how = ''")
    return list(zip(values[::2], values[1::2], strict=True)) if wide else values


def _differs_by_lane(c: Lower, space: str) -> bool:
    """Local memory holds a value per lane, and a generic address may point there."""
    return space == "local" or (
        space == "generic" and any(s == "local" for s, _ in c.symbols.values())
    )


@op("st", types=_TYPES, flags=f"{_SPACE_FLAGS} {_ORDER} v2 v4 v8")
def store(c: Lower, i: Instr, f: Match) -> None:
    space = space_of(f)
    if space == "param":  # an argument of the call that follows
        c.arguments[i.operands[0].base.name] = c.src(i.operands[1], f"u{TYPE_BITS[f.type]}")
        return
    size, _ = _element(f.type)
    address = address_value(c, i.operands[0], space)
    values: list[Value] = []
    for item in elements(c, i, f, i.operands[1]):
        if f.type == "b128":
            values += c.halves(item)
        else:
            width = max(8 * size, 16)
            value = c.convert(c.raw(item, width), f"u{width}")
            values.append(c.low_byte(value) if size == 1 else value)
    strong = f.pick("volatile", "release", "relaxed", "mmio")
    if strong:
        c.effect(f"w.how = '{strong} {f.pick('cta')}'")
    if address.uniform and not _differs_by_lane(c, space):
        listed = fields(values, 1)
        c.effect(f"store_scalar(w, '{space}', {{0}}, {size}, ({listed},))", address, *values)
    else:
        where = "full({0}, U64)" if address.uniform else "{0}"
        text = f"store_vector(w, '{space}', {where}, {size}, {{rows}}, <m>)"
        c.effect(text, address, rows=tuple(values))
    if strong:
        c.effect("w.how = ''")


@op(
    "prefetch prefetchu applypriority discard",
    flags="global local L1 L2 L2::evict_last L2::evict_normal tensormap L2::128B const param",
    section="prefetch, prefetchu",
)
def prefetch(c: Lower, i: Instr, f: Match) -> None:
    """A hint: the address is not even required to be valid."""


_PRIORITIES = ("evict_first", "evict_last", "evict_normal", "evict_unchanged")
_POLICY = " ".join(f"L2::{priority}" for priority in _PRIORITIES)


@op("createpolicy.fractional", types="b64", flags=_POLICY, section="createpolicy")
@op("createpolicy.range", types="b64", flags=f"global {_POLICY}", section="createpolicy")
@op("createpolicy.cvt.L2", types="b64", section="createpolicy")
def create_policy(c: Lower, i: Instr, f: Match) -> Value:
    """An opaque word that only hints take; these are the words of whole fractions in CUTLASS
    (cute/arch/copy_sm90_desc.hpp), whatever the fraction or the range."""
    words = {"L2::evict_first": 0x12F << 52, "L2::evict_last": 0x14F << 52}
    first = next((part for part in i.parts if part.startswith("L2::")), "")
    return constant(words.get(first, 1 << 60), "u64")


@op("cvta cvta.to", types="u32 u64", flags=_SPACE_FLAGS, section="cvta")
def convert_address(c: Lower, i: Instr, f: Match) -> Value:
    space = space_of(f)
    base = {"shared": 1 << 56, "cluster": 1 << 56, "local": 1 << 57}.get(space, 0)
    value = c.src(i.operands[1], "u64")
    back = f.form.name == "cvta.to"
    if space == "param":
        text = f"{{0}} {'-' if back else '+'} w.machine.param_base"
        return c.effect(text, value, results=[("u64", value.uniform)])[0]
    if base == 0:
        return value
    text = f"{{0}} & {base - 1:#x}" if back else f"{{0}} | {base:#x}"
    return c.pure("u64", f"({text})", text, value)


@op("isspacep", flags=_SPACE_FLAGS)
def is_space(c: Lower, i: Instr, f: Match) -> Value:
    """A peer's shared memory is .shared::cluster only. Constants lie in global memory here, so
    .const and .global say the same."""
    value = c.src(i.operands[1], "u64")
    if space_of(f) == "shared":
        text = "({0} >> 24) == (1 << 32 | w.cta.rank)"
        return c.effect(text, value, results=[("pred", value.uniform)])[0]
    text = f"({{0}} >> 56) == {({'cluster': 1, 'local': 2}).get(space_of(f), 0)}"
    return c.pure("pred", text, text, value)


@op("mapa", types="u32 u64", flags="shared::cluster")
def map_shared(c: Lower, i: Instr, f: Match) -> Value:
    """Map a shared address to the same offset in another CTA of the cluster.

    The result is a generic address without .shared::cluster.
    """
    keep = 0xFFFFFF if "shared::cluster" in f.flags else (1 << 56) | 0xFFFFFF
    source, rank = c.src(i.operands[1], f.type), c.src(i.operands[2], "u32")
    scalar, vector = f"({{0}} & {keep:#x} | {{1}} << 24)", f"{{0}} & {keep:#x} | {{t1}} << 24"
    return c.pure(f.type, scalar, vector, source, c.convert(rank, f.type))


@op("getctarank", types="u32 u64", flags="shared::cluster")
def cta_rank(c: Lower, i: Instr, f: Match) -> Value:
    value = c.src(i.operands[1], f.type)
    out = c.pure(f.type, "({0} >> 24 & 0xff)", "{0} >> 24 & 0xff", value)
    return c.convert(out, "u32")


# -- mov -------------------------------------------------------------------------------------


@op("mov", types="pred b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64 b128 f16 bf16 f16x2 bf16x2")
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
            join(c, c.srcs(half, NATURAL[part]), part, 64)
            for half in (items[: len(items) // 2], items[len(items) // 2 :])
        ]
        c.dst(target, (halves[0], halves[1]))
        return
    values = c.srcs(items, NATURAL[part])
    if part == 8:
        values = [c.low_byte(value) for value in values]
    c.dst(target, join(c, values, part, width))


def join(c: Lower, values: list[Value], part: int, width: int) -> Value:
    """Equal parts -> one value, first least significant."""
    kind = NATURAL[width]
    out, *others = (c.convert(value, kind) for value in values)
    for k, value in enumerate(others, 1):
        shift = k * part
        out = c.pure(kind, f"({{0}} | {{1}} << {shift})", f"{{0}} | {{t1}} << {shift}", out, value)
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
            text = f"{{0}} >> {k * part} & {(1 << part) - 1:#x}"
            piece = c.pure(NATURAL[width], f"({text})", text, value)
            c.dst(target, c.convert(piece, NATURAL[part]))
