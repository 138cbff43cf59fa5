"""cp.async.bulk.tensor in its modes, its reductions, and edits of tensor maps: PTX ISA
"cp.async.bulk.tensor", "cp.async.bulk.prefetch.tensor", "cp.reduce.async.bulk.tensor",
"tensormap.replace", "tensormap.cp_fenceproxy".

The tensor map is read when the instruction is issued; data moves when the work runs. Bytes are
signalled whole, out-of-bounds part included. tile::gather4 and tile::scatter4 move four rows of a
two-dimensional tensor, each with a coordinate of its own, to and from four neighbouring rows of
shared memory. im2col moves pixels of images (machine/im2col.py), to a place that offsets add to, or
from shared memory without them. `.multicast::cluster` writes and signals in every CTA
of the mask; with `.cta_group::2` the signal goes to the CTA of each destination's pair that the
barrier operand names. A map is edited as 128 bytes in shared or global memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxemu.codegen.lower import Lower, fields
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import Value, constant
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine.async_ops import Work
from ptxemu.machine.im2col import MIN_RANK, require_position, require_store
from ptxemu.machine.memory import as_addresses
from ptxemu.machine.state import OFFSET_MASK, RANK_SHIFT, Cta, Warp
from ptxemu.machine.tensor_map import (
    GATHERED_ROWS,
    TensorMap,
    decode,
    gathering,
    replace_field,
    transaction_bytes,
)
from ptxemu.machine.tma_tile import (
    box_rows,
    direct_load,
    gather_tile,
    load_tile,
    place_tile,
    reduce_tile,
    store_tile,
)
from ptxemu.numerics import PerLane
from ptxemu.ops.async_copy import REDUCTIONS, targets_of
from ptxemu.ops.load_store import address_value, space_of
from ptxemu.ops.mbarrier import barrier_address, find
from ptxemu.syntax.tree import Addr, Imm, Instr, Vec

_RANKS = "1d 2d 3d 4d 5d"
_LOADS = ("tile", "tile::gather4", "im2col", "im2col::w", "im2col::w::128")
_STORES = ("tile", "tile::scatter4", "im2col_no_offs")
_REDUCTIONS = ("tile", "im2col_no_offs")
_MODES = " ".join(dict.fromkeys((*_LOADS, *_STORES)))
_HINT = "L2::cache_hint"
MAP_BYTES = 128
SMEM_ALIGNMENT = 128  # bytes
COORDINATE_BITS = 128


@op(
    "cp.async.bulk.tensor",
    flags=f"{_RANKS} shared::cluster shared::cta global {_MODES} "
    f"mbarrier::complete_tx::bytes bulk_group multicast::cluster cta_group::1 cta_group::2 {_HINT}",
)
def tensor_copy(c: Lower, i: Instr, f: Match) -> None:
    """Emit a load or a store: a load names an mbarrier, a store a bulk group."""
    if "bulk_group" in f.flags:
        tensor_write(c, i, f)
        return
    tensor, mode, rest = i.operands[1], _mode(i, f, _LOADS), list(i.operands[3:])
    coords = _coordinates(c, i, f, tensor, mode)
    if mode == "im2col":
        coords += _offsets(c, i, f, rest.pop(0) if rest else None)
    multicast = "multicast::cluster" in f.flags
    mask = c.src(rest[0], "u16") if multicast else constant(0, "u16")
    pair = "cta_group::2" in f.flags
    c.effect(
        f"tensor_load(w, {_rank(f)}, {{0}}, ({{1}}, {fields(coords, 4)}), ({{2}}, {pair}), "
        f"{'{3}' if multicast else None})",
        c.address(i.operands[0], 32),
        c.address(tensor, 64),
        barrier_address(c, i.operands[2]),
        mask,
        *coords,
    )


@op(
    "cp.reduce.async.bulk.tensor",
    flags=f"{_RANKS} global shared::cta tile im2col_no_offs bulk_group {_HINT} {REDUCTIONS}",
)
def tensor_write(c: Lower, i: Instr, f: Match) -> None:
    tensor, source = i.operands[0], c.address(i.operands[1], 32)
    how = f.pick(*REDUCTIONS.split())
    mode = _mode(i, f, _REDUCTIONS if how else _STORES)
    coords = _coordinates(c, i, f, tensor, mode)
    if mode == "im2col_no_offs":
        coords += [constant(0, "u16")] * (_rank(f) - 2)
    text = f"tensor_store(w, '{how}', {_rank(f)}, {{1}}, ({{0}}, {fields(coords, 2)}))"
    c.effect(text, c.address(tensor, 64), source, *coords)


def _mode(i: Instr, f: Match, modes: tuple[str, ...]) -> str:
    """The mode among those that this direction has."""
    named = f.flags.intersection(_MODES.split()) or {"tile"}
    mode = next(iter(named))
    if len(named) > 1 or mode not in modes:
        raise _unsupported(i, "unsupported form of cp")
    if mode.startswith("im2col::w"):
        raise _unsupported(i, "tensor maps of the wide im2col modes are undocumented:")
    if mode in ("tile::gather4", "tile::scatter4") and _rank(f) != 2:
        raise _unsupported(i, "unsupported form of cp")
    if mode.startswith("im2col") and _rank(f) < MIN_RANK:
        raise _unsupported(i, "im2col has 3 to 5 dimensions: unsupported form of cp")
    return mode


def _unsupported(i: Instr, why: str) -> UnsupportedPtx:
    return UnsupportedPtx(f"{why} {i.opcode!r}", line=i.line, text=i.text)


def _coordinates(c: Lower, i: Instr, f: Match, tensor: Addr, mode: str) -> list[Value]:
    """Return the coordinates: one for each dimension, or a column and four rows that are named.

    In im2col mode offsets follow; their number then implies the mode.
    """
    wanted = 1 + GATHERED_ROWS if mode in ("tile::gather4", "tile::scatter4") else _rank(f)
    if len(tensor.coords) != wanted:
        raise UnsupportedPtx(
            f"{i.opcode} with {len(tensor.coords)} coordinates, needs {wanted}",
            line=i.line,
            text=i.text,
        )
    return c.srcs(tensor.coords, "s32")


def _offsets(c: Lower, i: Instr, f: Match, offsets: object) -> list[Value]:
    """Return the offsets W, H and D in the filter."""
    given, wanted = offsets.items if isinstance(offsets, Vec) else (), _rank(f) - 2
    if len(given) != wanted:
        raise UnsupportedPtx(
            f"{i.opcode} with {len(given)} im2col offsets, needs {wanted}",
            line=i.line,
            text=i.text,
        )
    return c.srcs(given, "u16")


def _rank(f: Match) -> int:
    return int(f.pick(*_RANKS.split())[0])


@op("cp.async.bulk.prefetch.tensor", flags=f"{_RANKS} L2 global {' '.join(_LOADS)} {_HINT}")
def tensor_prefetch(c: Lower, i: Instr, f: Match) -> None:
    """A hint."""
    if _mode(i, f, _LOADS) == "im2col":
        _offsets(c, i, f, i.operands[1] if len(i.operands) > 1 else None)


# -- what they do ---------------------------------------------------------------------------


def read_map(w: Warp, address: int, rank: int, position: list[int]) -> TensorMap:
    """The tensor map at a generic address, checked against the instruction's rank and mode; one
    that gathers where the instruction names four rows of two dimensions."""
    if address % 64:
        raise HardwareRefusal(f"tensor map at {address:#x}; must be 64-byte aligned")
    for each in w.listeners:
        each.map_used(w, address)
    raw = w.machine.read_bytes(w, address, MAP_BYTES)
    found = decode(raw)
    if found.rank != rank:
        raise HardwareRefusal(f"a {rank}-d instruction with a tensor map of rank {found.rank}")
    im2col = len(position) > rank >= MIN_RANK
    if im2col != (found.pixels is not None):
        mode, other = ("im2col", "a tile") if im2col else ("a tile", "im2col")
        raise HardwareRefusal(f"an instruction of {mode} mode with a tensor map of {other} mode")
    return found if im2col or len(position) == rank else gathering(found)


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
    """Check a box against the rules of the TMA unit.

    The manual asks for 128-byte alignment in shared memory. An H200 raises an illegal instruction
    unless the first coordinate is a multiple of 16 bytes and, for writes to global memory, no
    coordinate is negative. In im2col mode, the manual also limits the filter's position and
    offsets.
    """
    if offset % SMEM_ALIGNMENT:
        raise HardwareRefusal(f"tensor box at shared offset {offset:#x}; must be 128-byte aligned")
    if position[0] * tm.element_bits % COORDINATE_BITS:
        raise HardwareRefusal(
            f"first coordinate {position[0]} of {tm.element_bits}-bit elements; must be a multiple"
            " of 16 bytes"
        )
    if write and min(position) < 0:
        raise HardwareRefusal(f"a tensor store at {tuple(position)}; no coordinate may be negative")
    if tm.pixels is not None:
        inner = slice(1, tm.rank - 1)
        require_position(tm.pixels, tm.dims[inner], tuple(position)[inner], position[tm.rank :])
        if write:
            require_store(tm.pixels)


@runtime
def tensor_load(
    w: Warp,
    rank: int,
    target: PerLane,
    tensor: tuple[Any, ...],
    barrier: tuple[Any, ...],
    mask: PerLane | None,
) -> None:
    """Issue a load of a box for each active lane.

    Args:
        w: the warp.
        rank: of the tensor.
        target: address in shared memory.
        tensor: map address and coordinates.
        barrier: address, and whether the barrier is a pair's (.cta_group::2).
        mask: CTAs of a multicast, or None.
    """
    signal_address, pair = barrier
    operands = (target, signal_address, 0 if mask is None else mask, *tensor)
    for where, signal, chosen, map_address, *position in w.each_lane(*operands):
        tm = read_map(w, map_address, rank, position)
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
        memory, direct = w.machine.memory, None
        for cta, offset in places[:1]:  # other CTAs of a multicast have it at the same offset
            direct = direct_load(tm, position, memory, len(cta.smem), offset)
        image = None if direct is not None else load_tile(tm, position, memory)
        rows = direct.rows if direct is not None else box_rows(tm, position)
        for each in w.listeners:
            each.load(work, rows, places, tm.box_bytes, signals)
        for cta, offset in places:
            cta.reached_by(w.cta)
            if direct is not None:
                direct.run(cta.smem_at, offset)
            elif image is not None:
                place_tile(tm, image, cta.smem, offset)
            cta.mark_async(slice(offset, offset + tm.box_bytes))
        for each in w.listeners:
            each.tile_loaded(work, tm, position, places)
        for found in signals:
            found.complete(nbytes)

    machine = w.machine
    machine.bytes["tma.load"] += nbytes
    machine.bytes["tma.multicast"] += nbytes * (len(places) - 1)
    machine.counts["tma.load"] += 1
    if machine.units.eager and len(places) == 1 and places[0][0] is w.cta:
        if _load_own(w, tm, position, places, signals):
            signals[0].complete(nbytes, of=w.label, site=w.at)
            machine.note_progress()
            return
    label = f"load {'x'.join(map(str, tm.box))} at {position} to {places[0][1]:#x}"
    machine.issue(w, Work("tma", label, run, size=nbytes))


def _load_own(
    w: Warp, tm: TensorMap, position: tuple[Any, ...], places: list[Any], signals: list[Any]
) -> bool:
    """Load to the shared memory of the CTA that issues it, now, if that is all there is to it."""
    cta, memory, heard, offset = w.cta, w.machine.memory, w.immediate, places[0][1]
    if w.listeners and heard is None:
        return False
    direct = direct_load(tm, position, memory, len(cta.smem), offset)
    if direct is not None:
        if heard is not None:
            heard.loads_now(w, direct.rows, places, tm.box_bytes, signals)
        direct.run(cta.smem_at, offset)
    elif heard is None:
        place_tile(tm, load_tile(tm, position, memory), cta.smem, offset)
    else:
        return False
    cta.mark_async(slice(offset, offset + tm.box_bytes))
    return True


@runtime
def tensor_store(w: Warp, how: str, rank: int, source: PerLane, tensor: tuple[Any, ...]) -> None:
    """Store a box; how: the operation of a reduction, "" for a plain store."""
    copies = w.each_lane(source, *tensor)
    # CUTLASS stores from all lanes of a warp: equal stores are one, as they write the same bytes
    for start, map_address, *position in copies if how else set(copies):
        tm = read_map(w, map_address, rank, position)
        require_box(tm, position, start & OFFSET_MASK, write=True)
        w.cta.check(start & OFFSET_MASK, tm.box_bytes)
        _issue_store(w, how, tm, tuple(position), start & OFFSET_MASK)


def _issue_store(w: Warp, how: str, tm: TensorMap, position: tuple[Any, ...], offset: int) -> None:
    held: list[np.ndarray] = []

    def read(work: Work) -> None:
        for each in w.listeners:
            each.tile_read(work, w.cta, tm, position, offset)
        held.append(gather_tile(tm, w.cta.as_seen_by_async(offset, offset + tm.box_bytes), offset))

    def write(work: Work) -> None:
        for each in w.listeners:
            if how:
                each.tile_reduce(work, tm, position)
            else:
                each.tile_write(work, tm, position, held[0])
        if how:
            reduce_tile(tm, position, held[0], w.machine.memory, how)
        else:
            store_tile(tm, position, held[0], w.machine.memory)

    name = "reduce" if how else "store"
    w.machine.bytes[f"tma.{name}"] += tm.box_bytes
    w.machine.counts[f"tma.{name}"] += 1
    label = f"{name} {'x'.join(map(str, tm.box))} at {position}"
    work = Work("tma", label, read, write, size=tm.box_bytes, stream="bulk read")
    w.bulk.add(w.machine.issue(w, work))


# -- tensor maps -----------------------------------------------------------------------------


_FIELDS = (
    "global_address global_dim global_stride rank box_dim element_stride elemtype swizzle_mode "
    "swizzle_atomicity fill_mode interleave_layout"
)


@op(
    "tensormap.replace.tile",
    types=("b1024", "b32 b64"),
    flags=f"{_FIELDS} global shared::cta",
    section="tensormap.replace",
)
def replace(c: Lower, i: Instr, f: Match) -> None:
    """[map], {ordinal,} value."""
    field, space = f.pick(*_FIELDS.split()), space_of(f)
    ordinal = i.operands[1].value if isinstance(i.operands[1], Imm) and len(i.operands) > 2 else 0
    value = c.src(i.operands[-1], f.types[1].replace("b", "u"))
    c.effect(
        f"tensormap_replace(w, '{space}', {{0}}, ('{field}', {ordinal}), {{1}})",
        address_value(c, i.operands[0], space),
        value,
    )


@op(
    "tensormap.cp_fenceproxy.global.shared::cta",
    flags="tensormap::generic release acquire gpu cta cluster sys sync aligned",
    section="tensormap.cp_fenceproxy",
)
def copy_fence(c: Lower, i: Instr, f: Match) -> None:
    """Copy a map from shared to global memory and make it visible to TMA."""
    size = c.src(i.operands[2], "u32") if len(i.operands) > 2 else constant(MAP_BYTES, "u32")
    c.effect(
        "tensormap_copy(w, {0}, {1}, {2})",
        c.address(i.operands[0], 64),
        c.address(i.operands[1], 32),
        size,
    )


@runtime
def tensormap_replace(
    w: Warp, space: str, address: PerLane, what: tuple[str, int], value: PerLane
) -> None:
    """Edit a map; what: (field, ordinal). Every active lane edits; equal edits are repeated."""
    for where, new in dict.fromkeys(w.each_lane(address, value)):
        if space == "global":
            at = as_addresses([where])
            raw = w.machine.memory.read_rows(at, MAP_BYTES)[0]
            replace_field(raw, *what, new)
            for each in w.listeners:
                each.map_written(w, where, raw)
            w.machine.memory.write_rows(at, raw[None])
        else:
            offset = where & OFFSET_MASK
            w.cta.check(offset, MAP_BYTES)
            for each in w.listeners:
                each.map_edited(w, (w.cta, offset))
            replace_field(w.cta.smem[offset : offset + MAP_BYTES], *what, new)


@runtime
def tensormap_copy(w: Warp, target: PerLane, source: PerLane, nbytes: PerLane) -> None:
    where, start, size = (w.lane_values(value)[0] for value in (target, source, nbytes))
    offset = start & OFFSET_MASK
    w.cta.check(offset, size)
    raw = w.cta.smem[offset : offset + size]
    for each in w.listeners:
        each.map_written(w, where, raw, (w.cta, offset))
        each.map_fenced(w, None)
    w.machine.memory.write_rows(as_addresses([where]), raw[None])
