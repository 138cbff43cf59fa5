"""cp.async.bulk.tensor in tile mode: PTX ISA "cp.async.bulk.tensor", ".prefetch.tensor".

The tensor map is read when the instruction is issued; data moves when the work runs. Bytes are
signalled whole, out-of-bounds part included. `.multicast::cluster` writes and signals in every CTA
of the mask; with `.cta_group::2` the signal goes to the CTA of each destination's pair that the
barrier operand names.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import constant
from ptxemu.errors import HardwareRefusal
from ptxemu.machine.async_ops import Work
from ptxemu.machine.cta import OFFSET_MASK, RANK_SHIFT, Cta
from ptxemu.machine.tensor_map import TensorMap, decode, transaction_bytes
from ptxemu.machine.tma_tile import (
    box_rows,
    gather_tile,
    load_tile,
    place_tile,
    store_tile,
)
from ptxemu.machine.warp import Warp
from ptxemu.numerics.lanes import PerLane
from ptxemu.ops.async_copy import targets_of
from ptxemu.ops.mbarrier import barrier_address, find
from ptxemu.syntax.tree import Addr, Instr

RANKS = "1d 2d 3d 4d 5d"
_HINT = "L2::cache_hint"
MAP_BYTES = 128
SMEM_ALIGNMENT = 128  # bytes
COORDINATE_BITS = 128


def _coordinates(c: Lower, operand: Addr) -> list[Any]:
    return [c.src(item, "s32") for item in operand.coords]


def rank_of(f: Match) -> int:
    return int(f.pick(*RANKS.split())[0])


@op(
    "cp.async.bulk.tensor",
    flags=f"{RANKS} shared::cluster shared::cta global tile mbarrier::complete_tx::bytes "
    f"bulk_group multicast::cluster cta_group::1 cta_group::2 {_HINT}",
    section="cp.async.bulk.tensor",
)
def tensor_copy(c: Lower, i: Instr, f: Match) -> None:
    """Loads name an mbarrier, stores a bulk group; that tells the direction."""
    if "bulk_group" in f.flags:
        tensor, source = i.operands[0], c.address(i.operands[1], 32)
        coords = _coordinates(c, tensor)
        fields = ", ".join(f"{{{k + 2}}}" for k in range(len(coords)))
        c.effect(
            f"tensor_store(w, {rank_of(f)}, {{1}}, ({{0}}, {fields}))",
            c.address(tensor, 64),
            source,
            *coords,
        )
        return
    tensor = i.operands[1]
    coords = _coordinates(c, tensor)
    multicast = "multicast::cluster" in f.flags
    mask = c.src(i.operands[3], "u16") if multicast else constant(0, "u16")
    fields = ", ".join(f"{{{k + 4}}}" for k in range(len(coords)))
    pair = "cta_group::2" in f.flags
    c.effect(
        f"tensor_load(w, {rank_of(f)}, {{0}}, ({{1}}, {fields}), ({{2}}, {pair}), "
        f"{'{3}' if multicast else None})",
        c.address(i.operands[0], 32),
        c.address(tensor, 64),
        barrier_address(c, i.operands[2]),
        mask,
        *coords,
    )


@op(
    "cp.async.bulk.prefetch.tensor",
    flags=f"{RANKS} L2 global tile {_HINT}",
    section="cp.async.bulk.prefetch.tensor",
)
def tensor_prefetch(c: Lower, i: Instr, f: Match) -> None:
    """A hint."""


# -- what they do ---------------------------------------------------------------------------


def read_map(w: Warp, address: int, rank: int) -> TensorMap:
    """The tensor map at a generic address, checked against the instruction's rank."""
    if address % 64:
        raise HardwareRefusal(f"tensor map at {address:#x}; must be 64-byte aligned")
    raw = w.machine.read_bytes(w, address, MAP_BYTES)
    found = decode(raw)
    if found.rank != rank:
        raise HardwareRefusal(f"a {rank}-d instruction with a tensor map of rank {found.rank}")
    return found


def signals_of(
    w: Warp, address: int, places: list[tuple[Cta, int]], multicast: bool, pair: bool
) -> list[Any]:
    """The mbarriers that a load completes on, one per destination."""
    if not multicast:
        return [find(w, address)]
    offset, named = address & OFFSET_MASK, address >> RANK_SHIFT & 1
    if not pair:
        return [cta.mbarrier(offset) for cta, _ in places]
    return [w.cluster.cta(cta.rank & ~1 | named).mbarrier(offset) for cta, _ in places]


def require_box(tm: TensorMap, position: list[Any], offset: int, *, write: bool = False) -> None:
    """What the TMA unit demands of a box: the manual's 128-byte alignment in shared memory, and, as
    an H200 answers with an illegal instruction otherwise, a first coordinate that is a multiple of
    16 bytes, and no negative coordinate where global memory is written."""
    if offset % SMEM_ALIGNMENT:
        raise HardwareRefusal(f"tensor box at shared offset {offset:#x}; must be 128-byte aligned")
    if position[0] * tm.element_bits % COORDINATE_BITS:
        raise HardwareRefusal(
            f"first coordinate {position[0]} of {tm.element_bits}-bit elements; must be a multiple"
            " of 16 bytes"
        )
    if write and min(position) < 0:
        raise HardwareRefusal(f"a tensor store at {tuple(position)}; no coordinate may be negative")


@runtime
def tensor_load(
    w: Warp,
    rank: int,
    target: PerLane,
    tensor: tuple[Any, ...],
    barrier: tuple[Any, ...],
    mask: PerLane | None,
) -> None:
    """tensor: map address and coordinates; barrier: its address and whether it is a pair's
    (.cta_group::2); mask: CTAs of a multicast, or None."""
    signal_address, pair = barrier
    operands = (target, signal_address, mask or 0, *tensor)
    for where, signal, chosen, map_address, *position in w.each_lane(*operands):
        tm = read_map(w, map_address, rank)
        places = targets_of(w, where, chosen if mask is not None else None)
        signals = signals_of(w, signal, places, mask is not None, pair)
        require_box(tm, position, where & OFFSET_MASK)
        for cta, offset in places:
            cta.check(offset, tm.box_bytes)
        _issue_load(w, tm, tuple(position), places, signals)


def _issue_load(
    w: Warp, tm: TensorMap, position: tuple[Any, ...], places: list[Any], signals: list[Any]
) -> None:
    nbytes = transaction_bytes(tm)

    def run(work: Work) -> None:
        image = load_tile(tm, position, w.machine.memory)
        for each in w.listeners:
            each.load(work, box_rows(tm, position), places, tm.box_bytes, signals)
        for cta, offset in places:
            cta.reached_by(w.cta)
            place_tile(tm, image, cta.smem, offset)
            cta.mark_async(slice(offset, offset + tm.box_bytes))
        for found in signals:
            found.complete(nbytes)

    w.machine.bytes["tma.load"] += nbytes
    w.machine.bytes["tma.multicast"] += nbytes * (len(places) - 1)
    w.machine.counts["tma.load"] += 1
    label = f"load {'x'.join(map(str, tm.box))} at {position} to {places[0][1]:#x}"
    w.machine.issue(w, Work("tma", label, run, size=nbytes))


@runtime
def tensor_store(w: Warp, rank: int, source: PerLane, tensor: tuple[Any, ...]) -> None:
    # CUTLASS stores from all lanes of a warp: equal stores are one, as they write the same bytes
    for start, map_address, *position in set(w.each_lane(source, *tensor)):
        tm = read_map(w, map_address, rank)
        require_box(tm, position, start & OFFSET_MASK, write=True)
        w.cta.check(start & OFFSET_MASK, tm.box_bytes)
        _issue_store(w, tm, tuple(position), start & OFFSET_MASK)


def _issue_store(w: Warp, tm: TensorMap, position: tuple[Any, ...], offset: int) -> None:
    held: list[np.ndarray] = []

    def read(work: Work) -> None:
        for each in w.listeners:
            each.tile_read(work, w.cta, tm, position, offset)
        held.append(gather_tile(tm, w.cta.as_seen_by_async(offset, offset + tm.box_bytes), offset))

    def write(work: Work) -> None:
        for each in w.listeners:
            each.tile_write(work, tm, position, held[0])
        store_tile(tm, position, held[0], w.machine.memory)

    w.machine.bytes["tma.store"] += tm.box_bytes
    w.machine.counts["tma.store"] += 1
    label = f"store {'x'.join(map(str, tm.box))} at {position}"
    work = Work("tma", label, read, write, size=tm.box_bytes, stream="bulk read")
    w.bulk.add(w.machine.issue(w, work))
