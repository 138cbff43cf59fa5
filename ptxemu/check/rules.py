"""How undefined data moves between registers.

A register's mask has bit l set where its value is undefined in lane l; of a 64-bit register, bit
32 + l stands for the upper half. Each rule gives the masks of the registers that an instruction
writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from operator import or_

import numpy as np

from ptxemu.codegen.flow import Flow
from ptxemu.codegen.namespace import bits_mask, mask_bits
from ptxemu.numerics import PerLane
from ptxemu.ops.warp import shuffle_lanes
from ptxemu.syntax.tree import Vec

ALL = 0xFFFFFFFF
Masks = Mapping[str | None, int]


def lanes_of(mask: int) -> int:
    """Lanes in which any part is undefined."""
    return (mask | mask >> 32) & ALL


def both_halves(lanes: int) -> int:
    return lanes | lanes << 32


def _union(masks: Masks, names: Iterable[str | None]) -> int:
    """Where some of the registers is undefined."""
    return reduce(or_, (masks.get(name, 0) for name in names), 0)


def _any(flow: Flow, masks: Masks) -> int:
    """Lanes in which some source is undefined."""
    return lanes_of(_union(masks, flow.sources))


def _to_all(flow: Flow, lanes: int) -> list[int]:
    return [both_halves(lanes) if name in flow.wide else lanes for name in flow.targets]


def _values(flow: Flow, masks: Masks, mb: int) -> list[int]:
    """Whatever is computed from undefined data is undefined."""
    return _to_all(flow, _any(flow, masks))


def _halves(flow: Flow, masks: Masks, mb: int) -> list[int]:
    """Moves and packed f32x2: each half from the same halves."""
    total = _union(masks, flow.sources)
    return [total if name in flow.wide else lanes_of(total) for name in flow.targets]


def _pack(flow: Flow, masks: Masks, mb: int) -> list[int]:
    if flow.targets[0] not in flow.wide:
        return [_any(flow, masks)]
    middle = len(flow.sources) // 2
    low, high = (_union(masks, part) for part in (flow.sources[:middle], flow.sources[middle:]))
    return [lanes_of(low) | lanes_of(high) << 32]


def _unpack(flow: Flow, masks: Masks, mb: int) -> list[int]:
    whole = masks.get(flow.sources[0], 0)
    if flow.sources[0] not in flow.wide:
        return [whole] * len(flow.targets)
    middle, low, high = len(flow.targets) // 2, whole & ALL, whole >> 32
    parts = [low if k < middle else high for k in range(len(flow.targets))]
    return [
        both_halves(part) if name in flow.wide else part
        for name, part in zip(flow.targets, parts, strict=True)
    ]


def _where(value: PerLane) -> int:
    """Lanes in which a predicate holds."""
    return (ALL if value else 0) if np.ndim(value) == 0 else mask_bits(value)


def _select(flow: Flow, masks: Masks, mb: int, predicate: PerLane) -> list[int]:
    """Undefined only if the side that was chosen is, or the choice."""
    first, second, choice = (masks.get(name, 0) for name in flow.sources)
    yes = both_halves(_where(predicate))
    mask = first & yes | second & ~yes | both_halves(choice)
    return [mask if name in flow.wide else mask & ALL for name in flow.targets]


def _mask(flow: Flow, masks: Masks, mb: int, a: PerLane, b: PerLane) -> list[int]:
    """`and` with zero is zero, `or` with all ones is all ones, whatever the other operand is."""
    first, second = (lanes_of(masks.get(name, 0)) for name in flow.sources)
    if flow.instr.root == "and":
        fixed = [_where(np.equal(value, 0)) for value in (a, b)]
    elif flow.instr.type == "pred":
        fixed = [_where(value) for value in (a, b)]
    else:
        ones = (1 << int(flow.instr.type[1:])) - 1
        fixed = [_where(np.equal(value, ones)) for value in (a, b)]
    lanes = first & (second | ~fixed[1]) | second & (first | ~fixed[0])
    return _to_all(flow, lanes & ALL)


def _shuffle(flow: Flow, masks: Masks, mb: int, lane: PerLane, clamp: PerLane) -> list[int]:
    """Each lane has what its source lane has."""
    mode = next(part for part in flow.instr.parts if part in ("up", "down", "bfly", "idx"))
    moved, _ = shuffle_lanes(
        bits_mask(masks.get(flow.sources[0], 0)).astype(np.uint32), mode, lane, clamp, mb
    )
    control = _union(masks, flow.sources[1:])
    return [mask_bits(moved != 0) | control, control][: len(flow.targets)]


def _vote(flow: Flow, masks: Masks, mb: int, predicate: PerLane, members: PerLane) -> list[int]:
    """A defined lane may decide for all: one that is true for .any, one that is false for .all."""
    unknown = masks.get(flow.sources[0], 0) & mb
    if np.ndim(members) == 0:
        unknown &= members
        known = members & mb & ~unknown
        decided = {"any": known & _where(predicate), "all": known & ~_where(predicate)}
        if any(decided.get(part) for part in flow.instr.parts):
            return [0]
    return [mb if unknown else 0]


def _group(flow: Flow, masks: Masks, mb: int, members: PerLane) -> list[int]:
    """Every lane that takes part decides the result of all."""
    named = members if np.ndim(members) == 0 else ALL
    return [mb if _any(flow, masks) & mb & named else 0] * len(flow.targets)


def _product(flow: Flow, masks: Masks, mb: int) -> list[int]:
    """mma.sync: an element of A reaches its row of D, one of B its column, one of C itself.

    Lane 4 g + i holds rows g of A and, of 16 rows in every other register, g + 8; column g of B;
    columns 2 i and 2 i + 1 of D, in one register or, of 32 bits and more each, in two. What follows
    C, metadata and scale factors, is taken to reach all of D.
    """
    counts = [len(x.items) if isinstance(x, Vec) else 1 for x in flow.instr.operands[1:4]]
    ends = np.cumsum(counts)
    eight_rows = any(part.startswith("m8n8") for part in flow.instr.parts)
    if eight_rows and flow.instr.type[0] == "f" and flow.instr.type != "f64":  # four products
        return _to_all(flow, ALL if _any(flow, masks) else 0)
    if _union(masks, flow.sources[ends[2] :]):
        return _to_all(flow, ALL)
    lanes_in = [bits_mask(lanes_of(masks.get(name, 0))) for name in flow.sources[: ends[2]]]
    a, b, c = np.split(np.array(lanes_in).reshape(-1, 8, 4), ends[:2])
    d_count, halves = len(flow.targets), 1 if eight_rows else 2
    rows = np.any(a.reshape(-1, halves, 8, 4), axis=(0, 3))  # [half, g]
    columns = b.any(axis=(0, 2)).reshape(4, 2)  # [i, which of the two]
    reached = rows[:, None, :, None] | columns.T[None, :, None, :]  # [half, which, g, i]
    if d_count == halves:
        reached = np.any(reached, axis=1)
    lanes = [mask_bits(x.ravel()) for x in reached.reshape(d_count, 8, 4) | c]
    wide = zip(flow.targets, lanes, strict=True)
    return [both_halves(mask) if name in flow.wide else mask for name, mask in wide]


def _transposed(flow: Flow, masks: Masks, mb: int) -> list[int]:
    """movmatrix: two elements a lane, eight a row."""
    elements = np.repeat(bits_mask(masks.get(flow.sources[0], 0) & ALL), 2).reshape(8, 8)
    return [mask_bits(np.any(elements.T.reshape(32, 2), axis=1))]


RULES: dict[str, Callable[..., list[int]]] = {
    "values": _values,
    "halves": _halves,
    "pack": _pack,
    "unpack": _unpack,
    "select": _select,
    "mask": _mask,
    "shuffle": _shuffle,
    "vote": _vote,
    "group": _group,
    "product": _product,
    "transposed": _transposed,
}
