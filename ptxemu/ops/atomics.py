"""atom and red on global and shared memory: PTX ISA "atom", "red". Lanes act one after the
other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ptxemu.codegen.lower import Lower, fields
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import Value
from ptxemu.errors import UnsupportedPtx
from ptxemu.machine import access
from ptxemu.machine.state import Warp
from ptxemu.numerics import PerLane, arith
from ptxemu.ops.load_store import address_value, elements, space_of
from ptxemu.syntax.tree import TYPE_BITS, Instr

_TYPES = "u32 s32 u64 s64 b32 b64 f32 f64 f16x2 bf16x2 b16 f16 bf16"
_OPS = "add min max and or xor exch cas inc dec"
_FLAGS = (
    f"{_OPS} global shared shared::cta shared::cluster relaxed acquire release acq_rel cta "
    "cluster gpu sys noftz L2::cache_hint v2 v4 v8"
)


@op("atom", types=_TYPES, flags=_FLAGS)
@op("red", types=_TYPES, flags=_FLAGS)
def emit_atomic(c: Lower, i: Instr, f: Match) -> None:
    target, where, *sources = i.operands if i.root == "atom" else (None, *i.operands)
    name, width, space = f.pick(*_OPS.split()), TYPE_BITS[f.type], space_of(f)
    address = address_value(c, where, space)
    kind = f"u{max(width, 16)}"
    if name == "cas":
        _one(c, f, target, address, c.srcs(sources[:2], kind))
        return
    items = elements(c, i, f, sources[0])  # each is an atomic, at consecutive addresses
    targets = (None,) * len(items) if target is None else elements(c, i, f, target)
    for k, (item, part) in enumerate(zip(items, targets, strict=True)):
        place = address
        if k:
            step = k * width // 8
            place = c.pure(address.type, f"({{0}} + {step})", f"{{0}} + {step}", address)
        _one(c, f, part, place, [c.src(item, kind)])


def _one(c: Lower, f: Match, target: object, address: Value, values: list[Value]) -> None:
    """Emit the atomic operation for one element."""
    name = f.pick(*_OPS.split())
    order = f.pick("acquire", "release", "acq_rel", default="relaxed") + f" {f.pick('cta')}"
    text = (
        f"atomic(w, '{space_of(f)}', ('{name}', '{f.type}', '{order}'), {{0}}, {fields(values, 1)})"
    )
    out = c.effect(text, address, *values, results=[(values[0].type, False)])
    c.dst(target, out[0])


@op("atom", types="b128", flags=_FLAGS.replace(_OPS, "cas exch"))
def emit_wide_atomic(c: Lower, i: Instr, f: Match) -> tuple[Value, Value]:
    """exch and cas of 128 bits."""
    _, where, *sources = i.operands
    values = [half for source in sources for half in c.halves(source)]
    if len(sources) != (2 if "cas" in f.flags else 1):
        raise UnsupportedPtx(f"{i.opcode} with {len(sources)} operands behind the address")
    order = f.pick("acquire", "release", "acq_rel", default="relaxed") + f" {f.pick('cta')}"
    address = address_value(c, where, space_of(f))
    text = f"wide_atomic(w, '{space_of(f)}', '{order}', {{0}}, {fields(values, 1)})"
    low, high = c.effect(text, address, *values, results=[("u64", False)] * 2, matrix=True)
    return low, high


@runtime
def wide_atomic(w: Warp, space: str, order: str, address: PerLane, *values: PerLane) -> np.ndarray:
    """The old values, [half, lane]. values: halves of what is stored or, of a comparison, halves of
    what is expected before those."""
    w.how = f"atomic {order}"
    out = np.zeros((2, 32), np.uint64)
    columns = [w.lane_values(value) for value in values]
    for each in w.listeners:
        each.atomic(w, space, "cas" if len(values) > 2 else "exch", address, 16)
    for position, (lane, where) in enumerate(zip(w.lanes(), w.lane_values(address), strict=True)):
        old = access.load_scalar(w, space, where, 8, 2)
        *expected, low, high = (column[position] for column in columns)
        new = [low, high] if not expected or old == expected else old
        if new != old:
            w.machine.note_progress()
        else:
            w.polled = True
        access.store_scalar(w, space, where, 8, tuple(new))
        out[:, lane] = old
    w.how = ""
    return out


def _wrap(function: Callable[[int, int], int]) -> Callable[..., Any]:
    return lambda old, value, width: function(old, value) & ((1 << width) - 1)


def _signed(value: int, width: int) -> int:
    return (value ^ 1 << width - 1) - (1 << width - 1)


_INTEGER = {
    "add": _wrap(lambda old, value: old + value),
    "and": _wrap(lambda old, value: old & value),
    "or": _wrap(lambda old, value: old | value),
    "xor": _wrap(lambda old, value: old ^ value),
    "exch": _wrap(lambda old, value: value),
    "inc": _wrap(lambda old, value: 0 if old >= value else old + 1),
    "dec": _wrap(lambda old, value: value if old == 0 or old > value else old - 1),
}


def combine(name: str, ptx_type: str, old: int, value: int, unit: str = "shared") -> int:
    """Return the new bits of an atomic on one element.

    unit: the space whose unit executes the atomic. In global memory f32 sums flush subnormals,
        as the manual documents. An f64 sum keeps the NaN that an H100 keeps.
    """
    width = TYPE_BITS[ptx_type]
    if ptx_type[0] in "fb" and ptx_type not in ("b16", "b32", "b64"):
        return _combine_float(name, ptx_type, old, value, unit)
    if name in ("min", "max"):
        pick = min if name == "min" else max
        if ptx_type[0] == "s":
            return pick(_signed(old, width), _signed(value, width)) & ((1 << width) - 1)
        return pick(old, value)
    return _INTEGER[name](old, value, width)


def _combine_float(name: str, ptx_type: str, old: int, value: int, unit: str) -> int:
    if name == "exch":
        return value
    if name not in ("add", "min", "max") or (name != "add" and ptx_type in ("f32", "f64")):
        raise UnsupportedPtx(f"atomic {name} on {ptx_type}")
    if ptx_type in ("f32", "f64"):
        dtype, bits = (np.float32, np.uint32) if ptx_type == "f32" else (np.float64, np.uint64)
        add_f64 = arith.add_f64_in_memory if unit == "global" else arith.add_f64
        add_f32 = partial(arith.add_f32, ftz=unit == "global")
        add: Callable[..., np.ndarray] = add_f32 if ptx_type == "f32" else add_f64
        a, b = (np.array([x], bits).view(dtype) for x in (old, value))
        if unit == "cluster":
            a, b = b, a
        return int(np.asarray(add(a, b), dtype).view(bits)[0])
    function = getattr(arith, f"{name}_{ptx_type.removesuffix('x2')}")
    kind = np.uint32 if ptx_type.endswith("x2") else np.uint16
    a, b = (np.array([x], kind).view(np.uint16) for x in (old, value))
    return int(function(a, b).view(kind)[0])


@runtime
def atomic(
    w: Warp, space: str, what: tuple[Any, ...], address: PerLane, *values: PerLane
) -> np.ndarray:
    """The old values, per lane. what: (operation, type, order)."""
    name, ptx_type, order = what
    w.how = f"atomic {order}"
    size = TYPE_BITS[ptx_type] // 8
    out = np.zeros(32, f"u{max(size, 2)}")
    changed = False
    columns = [w.lane_values(value) for value in values]
    for each in w.listeners:
        each.atomic(w, space, name, address, size)
    for position, (lane, where) in enumerate(zip(w.lanes(), w.lane_values(address), strict=True)):
        old = access.load_scalar(w, space, where, size, 1)
        if name == "cas":
            new = columns[1][position] if old == columns[0][position] else old
        else:
            unit = "global" if space == "generic" and where < access.SHARED_WINDOW else space
            new = combine(name, ptx_type, old, columns[0][position], unit)
        if new != old:
            w.machine.note_progress()
            changed = True
        else:
            w.polled = True
        access.store_scalar(w, space, where, size, (new,))
        out[lane] = old
    w.how = ""
    if not changed:
        _let_others_run(w)
    return out


def _let_others_run(w: Warp) -> None:
    """After an atomic in vain, such as a lock that is taken: the lanes behind it have the next
    turn, as one of them may hold the lock."""
    if len(w.frags) > 1:
        w.steps += -(w.steps + 1) % w.fairness
