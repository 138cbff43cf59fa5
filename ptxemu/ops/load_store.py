"""ld, st, ldu, prefetch: PTX ISA "Data Movement and Conversion Instructions: ld, st, prefetch"."""

from __future__ import annotations

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import Value
from ptxemu.machine import access
from ptxemu.syntax.tree import TYPE_BITS, Addr, Instr, Sym

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
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}


for _function in (access.load_scalar, access.load_vector, access.store_scalar, access.store_vector):
    runtime(_function)


def space_of(f: Match) -> str:
    """The machine's name of the state space that the flags name."""
    return next((_SPACES[flag] for flag in f.flags if flag in _SPACES), "generic")


def address_value(c: Lower, operand: Addr, space: str) -> Value:
    """An address in the width of its space: u32 for shared, u64 elsewhere."""
    return c.address(operand, 32 if space in ("shared", "cluster") else 64)


def _element(ptx_type: str) -> tuple[int, str]:
    """(bytes, value type) of one element; b128 moves as two u64."""
    width = TYPE_BITS[ptx_type]
    if width == 8:
        return 1, "s16" if ptx_type == "s8" else "u16"
    if width == 128:
        return 8, "u64"
    return width // 8, f"{'s' if ptx_type[0] == 's' else 'u'}{width}"


@op("ld ldu", types=_TYPES, flags=f"{_SPACE_FLAGS} {_ORDER} v2 v4 v8", section="ld")
def load(c: Lower, i: Instr, f: Match) -> None:
    space = space_of(f)
    targets = c.each(i.operands[0])
    size, type_ = _element(f.type)
    wide = f.type == "b128"
    count = len(targets) * (2 if wide else 1)
    address = address_value(c, i.operands[1], space)
    strong = f.pick("volatile", "acquire", "relaxed", "mmio")
    if strong:
        c.effect(f"w.polled, w.how = True, '{strong} {f.pick('cta')}'")
    if address.uniform and not _differs_by_lane(c, space):
        text = f"load_scalar(w, '{space}', {{0}}, {size}, {count})"
        values = c.effect(text, address, results=[(type_.replace("s", "u"), True)] * count)
        values = [_sign8(c, v) if f.type == "s8" else c.convert(v, type_) for v in values]
    else:
        where = "full({0}, U64)" if address.uniform else "{0}"
        text = f"load_vector(w, '{space}', {where}, {size}, {count}, <m>)"
        values = _vector_results(c, text, address, f.type, type_, count)
    if strong:
        c.effect("w.how = ''")
    results: list[Value | tuple[Value, Value]] = list(values)
    if wide:
        results = list(zip(values[::2], values[1::2], strict=True))
    for target, value in zip(targets, results, strict=True):
        c.dst(target, value)


def _differs_by_lane(c: Lower, space: str) -> bool:
    """Local memory holds a value per lane, and a generic address may point there."""
    return space == "local" or (
        space == "generic" and any(s == "local" for s, _ in c.symbols.values())
    )


def _vector_results(
    c: Lower, text: str, address: Value, ptx_type: str, type_: str, count: int
) -> list[Value]:
    size = TYPE_BITS[ptx_type] // 8
    raw = "u16" if size == 1 else f"u{8 * min(size, 8)}"
    if size == 1:
        text += ".astype(U16)"
    rows = c.effect(text, address, results=[(raw, False)] * count, matrix=True)
    if ptx_type == "s8":
        return [_sign8(c, value) for value in rows]
    return [c.convert(value, type_) for value in rows]


def _sign8(c: Lower, value: Value) -> Value:
    return c.pure("s16", "(({0} & 0xff ^ 0x80) - 0x80)", "{0}.astype(np.int8).astype(I16)", value)


@op("st", types=_TYPES, flags=f"{_SPACE_FLAGS} {_ORDER} v2 v4 v8", section="st")
def store(c: Lower, i: Instr, f: Match) -> None:
    space = space_of(f)
    if space == "param":  # an argument of the call that follows
        c.arguments[i.operands[0].base.name] = c.src(i.operands[1], f"u{TYPE_BITS[f.type]}")
        return
    size, type_ = _element(f.type)
    type_ = type_.replace("s", "u")
    address = address_value(c, i.operands[0], space)
    values: list[Value] = []
    for item in c.each(i.operands[1]):
        if f.type == "b128":
            values += c.halves(item)
        else:
            values.append(_narrow(c, c.convert(c.raw(item, max(8 * size, 16)), type_), size))
    strong = f.pick("volatile", "release", "relaxed", "mmio")
    if strong:
        c.effect(f"w.how = '{strong} {f.pick('cta')}'")
    if address.uniform and not _differs_by_lane(c, space):
        fields = ", ".join(f"{{{k + 1}}}" for k in range(len(values)))
        c.effect(f"store_scalar(w, '{space}', {{0}}, {size}, ({fields},))", address, *values)
    else:
        text = "{0}" if not address.uniform else "full({0}, U64)"
        c.effect(
            f"store_vector(w, '{space}', {text}, {size}, {{rows}}, <m>)",
            address,
            rows=tuple(values),
        )
    if strong:
        c.effect("w.how = ''")


def _narrow(c: Lower, value: Value, size: int) -> Value:
    return c.pure("u16", "({0} & 0xff)", "{0} & 0xff", value) if size == 1 else value


@op(
    "prefetch prefetchu applypriority discard",
    flags="global local L1 L2 L2::evict_last L2::evict_normal tensormap L2::128B const param",
    section="prefetch, prefetchu",
)
def prefetch(c: Lower, i: Instr, f: Match) -> None:
    """A hint: the address is not even required to be valid."""


@op("cvta cvta.to", types="u32 u64", flags=_SPACE_FLAGS, section="cvta")
def convert_address(c: Lower, i: Instr, f: Match) -> None:
    space = space_of(f)
    base = {"shared": 1 << 56, "cluster": 1 << 56, "local": 1 << 57}.get(space, 0)
    value = c.src(i.operands[1], "u64")
    if space == "param":
        sign = "-" if f.form.name == "cvta.to" else "+"
        out = c.effect(
            f"{{0}} {sign} w.machine.param_base", value, results=[("u64", value.uniform)]
        )[0]
    elif base == 0:
        out = value
    elif f.form.name == "cvta.to":
        out = c.pure("u64", f"({{0}} & {base - 1:#x})", f"{{0}} & {base - 1:#x}", value)
    else:
        out = c.pure("u64", f"({{0}} | {base:#x})", f"{{0}} | {base:#x}", value)
    c.dst(i.operands[0], out)


@op("isspacep", flags=_SPACE_FLAGS, section="isspacep")
def is_space(c: Lower, i: Instr, f: Match) -> None:
    """A peer's shared memory is .shared::cluster only. Constants lie in global memory here, so
    .const and .global say the same."""
    value = c.src(i.operands[1], "u64")
    if space_of(f) == "shared":
        text = "({0} >> 24) == (1 << 32 | w.cta.rank)"
        c.dst(i.operands[0], c.effect(text, value, results=[("pred", value.uniform)])[0])
        return
    window = {"cluster": 1, "local": 2}.get(space_of(f), 0)
    c.dst(
        i.operands[0],
        c.pure("pred", f"({{0}} >> 56) == {window}", f"({{0}} >> 56) == {window}", value),
    )


@op("mapa", types="u32 u64", flags="shared::cluster", section="mapa")
def map_shared(c: Lower, i: Instr, f: Match) -> None:
    """The same shared offset in another CTA of the cluster; generic without .shared::cluster."""
    operand = i.operands[1]
    source = (
        c.src(operand, f.type)
        if not isinstance(operand, Sym)
        else c.convert(c.symbol(operand), f.type)
    )
    rank = c.src(i.operands[2], "u32")
    keep = 0xFFFFFF if "shared::cluster" in f.flags else (1 << 56) | 0xFFFFFF
    rank = c.convert(rank, f.type)
    out = c.pure(
        f.type,
        f"({{0}} & {keep:#x} | {{1}} << 24)",
        f"{{0}} & {keep:#x} | {{t1}} << 24",
        source,
        rank,
    )
    c.dst(i.operands[0], out)


@op("getctarank", types="u32 u64", flags="shared::cluster", section="getctarank")
def cta_rank(c: Lower, i: Instr, f: Match) -> None:
    value = c.src(i.operands[1], f.type)
    out = c.pure(f.type, "({0} >> 24 & 0xff)", "{0} >> 24 & 0xff", value)
    c.dst(i.operands[0], c.convert(out, "u32"))
