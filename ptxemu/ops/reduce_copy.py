"""cp.reduce.async.bulk and its tensor form, to global memory: PTX ISA "cp.reduce.async.bulk",
"cp.reduce.async.bulk.tensor".

Like a bulk store, but the bytes are combined with what is there. Reductions of different threads
happen one after the other, so a result may depend on the schedule where addition is not exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.machine.async_ops import Work
from ptxemu.machine.cta import OFFSET_MASK
from ptxemu.machine.tensor_map import TensorMap
from ptxemu.machine.tma_tile import combine, gather_tile, reduce_tile
from ptxemu.machine.warp import Warp
from ptxemu.numerics.lanes import PerLane
from ptxemu.ops.async_copy import require_bulk
from ptxemu.ops.tensor_copy import RANKS, rank_of, read_map, require_box
from ptxemu.syntax.tree import Instr

_OPS = "add min max inc dec and or xor"


@op(
    "cp.reduce.async.bulk.global.shared::cta",
    types="f16 bf16 f32 f64 u32 s32 u64 s64 b32 b64",
    flags=f"bulk_group noftz L2::cache_hint {_OPS}",
    section="cp.reduce.async.bulk",
)
def emit_bulk_reduce(c: Lower, i: Instr, f: Match) -> None:
    how = (f.pick(*_OPS.split()), f.type.replace("b", "u") if f.type in ("b32", "b64") else f.type)
    c.effect(
        f"bulk_reduce(w, {how}, {{0}}, {{1}}, {{2}})",
        c.address(i.operands[0], 64),
        c.address(i.operands[1], 32),
        c.src(i.operands[2], "u32"),
    )


@op(
    "cp.reduce.async.bulk.tensor",
    flags=f"{RANKS} global shared::cta tile bulk_group L2::cache_hint {_OPS}",
    section="cp.reduce.async.bulk.tensor",
)
def emit_tensor_reduce(c: Lower, i: Instr, f: Match) -> None:
    tensor = i.operands[0]
    coords = [c.src(item, "s32") for item in tensor.coords]
    fields = ", ".join(f"{{{k + 2}}}" for k in range(len(coords)))
    c.effect(
        f"tensor_reduce(w, '{f.pick(*_OPS.split())}', {rank_of(f)}, {{1}}, ({{0}}, {fields}))",
        c.address(tensor, 64),
        c.address(i.operands[1], 32),
        *coords,
    )


@runtime
def bulk_reduce(
    w: Warp, how: tuple[str, str], target: PerLane, source: PerLane, nbytes: PerLane
) -> None:
    """how: (operation, element type)."""
    for where, start, size in w.each_lane(target, source, nbytes):
        require_bulk(size, where, start & OFFSET_MASK)
        w.cta.check(start & OFFSET_MASK, size)
        _issue_bulk(w, how, where, start & OFFSET_MASK, size)


def _issue_bulk(w: Warp, how: tuple[str, str], where: int, low: int, size: int) -> None:
    held: list[np.ndarray] = []
    address = np.array([where], np.int64)

    def read(work: Work) -> None:
        for each in w.listeners:
            each.bulk_read(work, w.cta, low, size)
        held.append(w.cta.as_seen_by_async(low, low + size)[low : low + size].copy())

    def write(work: Work) -> None:
        for each in w.listeners:
            each.bulk_write(work, address, size, atomic=True)
        old = w.machine.memory.read_rows(address, size)[0]
        w.machine.memory.write_rows(address, combine(*how, old, held[0])[None])

    w.machine.bytes["bulk.reduce"] += size
    work = Work("tma", f"bulk reduce {size} B", read, write, size=size, stream="bulk read")
    w.bulk.add(w.machine.issue(w, work))


@runtime
def tensor_reduce(w: Warp, how: str, rank: int, source: PerLane, tensor: tuple[Any, ...]) -> None:
    for start, map_address, *position in w.each_lane(source, *tensor):
        tm = read_map(w, map_address, rank)
        require_box(tm, position, start & OFFSET_MASK, write=True)
        w.cta.check(start & OFFSET_MASK, tm.box_bytes)
        _issue_tensor(w, how, tm, tuple(position), start & OFFSET_MASK)


def _issue_tensor(w: Warp, how: str, tm: TensorMap, position: tuple[Any, ...], offset: int) -> None:
    held: list[np.ndarray] = []

    def read(work: Work) -> None:
        for each in w.listeners:
            each.tile_read(work, w.cta, tm, position, offset)
        held.append(gather_tile(tm, w.cta.as_seen_by_async(offset, offset + tm.box_bytes), offset))

    def write(work: Work) -> None:
        for each in w.listeners:
            each.tile_reduce(work, tm, position)
        reduce_tile(tm, position, held[0], w.machine.memory, how)

    w.machine.bytes["tma.reduce"] += tm.box_bytes
    w.machine.counts["tma.reduce"] += 1
    label = f"reduce {'x'.join(map(str, tm.box))} at {position}"
    work = Work("tma", label, read, write, size=tm.box_bytes, stream="bulk read")
    w.bulk.add(w.machine.issue(w, work))
