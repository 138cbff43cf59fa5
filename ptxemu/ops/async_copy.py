"""cp.async, cp.async.bulk, cp.reduce.async.bulk, st.async, red.async: PTX ISA, their sections.

Non-bulk copies of a warp form one in-order queue, with the mbarrier arrivals that track them; every
bulk copy is a queue of its own. Reductions of different threads happen one after the other, so a
result may depend on the schedule where addition is not exact. No copy needs a proxy fence before an
MMA reads it: kernels right on hardware (FlashAttention-4 with small pages) go from
cp.async.mbarrier.arrive to tcgen05.mma.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ptxemu.codegen.lower import Lower, fields
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import Value, constant
from ptxemu.errors import HardwareRefusal
from ptxemu.machine.async_ops import Work
from ptxemu.machine.fragment import ALL
from ptxemu.machine.listener import Place
from ptxemu.machine.mbarrier import MAX_COUNT, MBarrier
from ptxemu.machine.memory import as_addresses
from ptxemu.machine.state import OFFSET_MASK, RANK_SHIFT, WARP_LANES, Warp
from ptxemu.machine.tma_tile import combine
from ptxemu.numerics import PerLane
from ptxemu.ops.load_store import elements
from ptxemu.ops.mbarrier import barrier_address, find
from ptxemu.syntax.tree import TYPE_BITS, Instr, Not, Reg

_HINTS = "L2::cache_hint L2::64B L2::128B L2::256B"
REDUCTIONS = "add min max inc dec and or xor"
Reduction = tuple[str, str] | None  # operation and element type, None of a copy


# -- cp.async (non-bulk) --------------------------------------------------------------------


@op("cp.async.ca cp.async.cg", flags=f"shared shared::cta global {_HINTS}", section="cp.async")
def copy(c: Lower, i: Instr, f: Match) -> None:
    """[dst], [src], bytes{, source bytes | ignore predicate}: the rest of dst becomes zero."""
    hinted = "L2::cache_hint" in f.flags
    target, source = c.address(i.operands[0], 32), c.address(i.operands[1], 64)
    nbytes = i.operands[2].value
    rest = i.operands[3:-1] if hinted else i.operands[3:]
    used = _source_bytes(c, rest[0], nbytes) if rest else constant(nbytes, "u32")
    c.effect(f"copy_async(w, {{0}}, {{1}}, {nbytes}, {{2}}, <m>)", target, source, used)


def _source_bytes(c: Lower, operand: object, nbytes: int) -> Value:
    """Return the number of bytes to read: a count, or 0 for lanes that ignore the source."""
    register = operand.reg if isinstance(operand, Not) else operand
    if not isinstance(register, Reg) or c.registers.width(register.name) != 1:
        return c.src(operand, "u32")
    ignore = c.src(operand, "pred")
    return c.pure(
        "u32", f"(0 if {{0}} else {nbytes})", f"(~{{0}}).astype(U32) * U32({nbytes})", ignore
    )


@op("cp.async.commit_group")
@op("cp.async.bulk.commit_group")
def commit(c: Lower, i: Instr, f: Match) -> None:
    groups = "bulk" if "bulk" in i.parts else "copies"
    c.effect(f"w.{groups}.commit()")
    c.announce(f"{groups}_committed(w)")


@op("cp.async.wait_group cp.async.wait_all", section="cp.async.wait_group / wait_all")
def wait(c: Lower, i: Instr, f: Match) -> None:
    if f.form.name == "cp.async.wait_all":
        c.effect("w.copies.commit()")
        c.effect("w.copies.wait(0, False)")
        c.announce("copies_waited(w, None)")
    else:
        allowed = i.operands[0].value
        c.effect(f"w.copies.wait({allowed}, False)")
        c.announce(f"copies_waited(w, {allowed})")


@op("cp.async.mbarrier.arrive", types="b64", flags="noinc shared shared::cta")
def arrive_after(c: Lower, i: Instr, f: Match) -> None:
    """Arrive once all earlier cp.async of the thread have completed."""
    c.effect(
        f"arrive_after_copies(w, {{0}}, {'noinc' in f.flags})", barrier_address(c, i.operands[0])
    )


@runtime
def copy_async(
    w: Warp, target: PerLane, source: PerLane, nbytes: int, used: PerLane, mask: np.ndarray | None
) -> None:
    """Copy for each active lane, all lanes in one work."""
    targets, sources, sizes = (w.lane_values(v) for v in (target, source, used))
    cta, memory = w.cta, w.machine.memory
    for where in targets:
        if where & (nbytes - 1):
            raise HardwareRefusal(
                f"cp.async of {nbytes} bytes to shared address {where:#x}; misaligned"
            )
        cta.check(where & OFFSET_MASK, nbytes)
    for where, size in zip(sources, sizes, strict=True):
        if size > nbytes or (size and where & (nbytes - 1)):
            raise HardwareRefusal(
                f"cp.async of {size} in {nbytes} bytes from {where:#x}; misaligned or too many"
            )

    lanes = np.flatnonzero(w.frag.active())

    def run(work: Work) -> None:
        offsets = np.array([where & OFFSET_MASK for where in targets])
        rows = np.zeros((len(offsets), nbytes), np.uint8)
        for size in set(sizes) - {0}:
            chosen = np.flatnonzero(np.array(sizes) == size)
            starts = as_addresses(sources[lane] for lane in chosen)
            for each in w.listeners:
                each.fetch(work, starts, size)
            rows[chosen, :size] = memory.read_rows(starts, size)
        for each in w.listeners:
            each.copy(work, cta, offsets, lanes, nbytes)
        written = offsets[:, None] + np.arange(nbytes)
        cta.smem[written] = rows
        cta.mark_async(written)

    w.machine.bytes["cp.async"] += nbytes * len(targets)
    label = f"cp.async {nbytes} B x {len(targets)}"
    w.copies.add(w.machine.issue(w, Work("cp.async", label, run, stream="cp.async"), w.copy_queue))


@runtime
def arrive_after_copies(w: Warp, address: PerLane, noinc: bool) -> None:
    barriers = [find(w, where) for where in w.lane_values(address)]
    if not noinc:
        for barrier in barriers:
            barrier.pending += 1

    def run(work: Work) -> None:
        left = Counter(barriers)
        for barrier in barriers:
            for each in w.listeners:
                each.copies_arrival(work, w.cta, barrier, lanes=left[barrier])
            left[barrier] -= 1
            barrier.arrive(by="cp.async")

    work = Work("cp.async", "arrive after cp.async", run, stream="cp.async", releases=True)
    w.machine.issue(w, work, w.copy_queue)


# -- cp.async.bulk --------------------------------------------------------------------------


@op("cp.async.bulk.wait_group", flags="read")
def bulk_wait(c: Lower, i: Instr, f: Match) -> None:
    allowed, read = i.operands[0].value, "read" in f.flags
    c.effect(f"w.bulk.wait({allowed}, {read})")
    c.announce(f"bulk_waited(w, {allowed}, {read})")


@op(
    "cp.async.bulk.shared::cluster.global cp.async.bulk.shared::cta.global",
    flags=f"mbarrier::complete_tx::bytes multicast::cluster {_HINTS}",
    section="cp.async.bulk",
)
@op(
    "cp.async.bulk.shared::cluster.shared::cta",
    flags="mbarrier::complete_tx::bytes",
    section="cp.async.bulk",
)
@op(
    "cp.reduce.async.bulk.shared::cluster.shared::cta",
    types="u32 s32 u64 b32",
    flags=f"mbarrier::complete_tx::bytes {REDUCTIONS}",
    section="cp.reduce.async.bulk",
)
def emit_bulk_load(c: Lower, i: Instr, f: Match) -> None:
    """Copy from global memory, or from shared memory to the shared memory of a peer."""
    near = "global" not in i.parts
    operands = [
        c.address(i.operands[0], 32),
        c.address(i.operands[1], 32 if near else 64),
        c.src(i.operands[2], "u32"),
        barrier_address(c, i.operands[3]),
    ]
    if near:
        c.effect(f"bulk_to_peer(w, {reduction(f)}, {fields(operands)})", *operands)
        return
    mask = [c.src(i.operands[4], "u16")] if "multicast::cluster" in f.flags else []
    c.effect(f"bulk_load(w, {fields(operands)}, {'{4}' if mask else None})", *operands, *mask)


@op("cp.async.bulk.global.shared::cta", flags=f"bulk_group {_HINTS}", section="cp.async.bulk")
@op(
    "cp.reduce.async.bulk.global.shared::cta",
    types="f16 bf16 f32 f64 u32 s32 u64 s64 b32 b64",
    flags=f"bulk_group noftz L2::cache_hint {REDUCTIONS}",
    section="cp.reduce.async.bulk",
)
def emit_bulk_store(c: Lower, i: Instr, f: Match) -> None:
    c.effect(
        f"bulk_store(w, {reduction(f)}, {{0}}, {{1}}, {{2}})",
        c.address(i.operands[0], 64),
        c.address(i.operands[1], 32),
        c.src(i.operands[2], "u32"),
    )


@op("cp.async.bulk.prefetch", flags=f"L2 global {_HINTS}")
def bulk_prefetch(c: Lower, i: Instr, f: Match) -> None:
    """A hint."""


def reduction(f: Match) -> Reduction:
    """Return the reduction that the opcode requests; None for a copy."""
    if not f.types:
        return None
    return f.pick(*REDUCTIONS.split()), f.type.replace("b32", "u32").replace("b64", "u64")


def require_bulk(nbytes: int, *addresses: int) -> None:
    """PTX ISA cp.async.bulk: size and addresses are multiples of 16."""
    if nbytes % 16 or any(address % 16 for address in addresses):
        shown = ", ".join(f"{address:#x}" for address in addresses)
        raise HardwareRefusal(
            f"bulk copy of {nbytes} bytes at {shown}; all must be multiples of 16"
        )


def targets_of(w: Warp, address: int, mask: int | None) -> list[Place]:
    """Return (CTA, offset) for every destination of a load: one, or one per bit of the multicast
    mask."""
    offset = address & OFFSET_MASK
    if mask is None:
        return [(w.cluster.cta(address >> RANK_SHIFT), offset)]
    return [(w.cluster.cta(rank), offset) for rank in range(16) if mask >> rank & 1]


@runtime
def bulk_load(
    w: Warp,
    target: PerLane,
    source: PerLane,
    nbytes: PerLane,
    barrier: PerLane,
    mask: PerLane | None,
) -> None:
    for where, start, size, signal, chosen in w.each_lane(
        target, source, nbytes, barrier, 0 if mask is None else mask
    ):
        require_bulk(size, start, where & OFFSET_MASK)
        places = targets_of(w, where, None if mask is None else chosen)
        if mask is None:
            signals = [find(w, signal)]
        else:
            signals = [cta.mbarrier(signal & OFFSET_MASK) for cta, _ in places]
        for cta, offset in places:
            cta.check(offset, size)
        _issue_load(w, start, size, places, signals)


def _issue_load(
    w: Warp, start: int, size: int, places: list[Place], signals: list[MBarrier]
) -> None:
    source = as_addresses([start])

    def run(work: Work) -> None:
        for each in w.listeners:
            each.load(work, (source, size), places, size, signals)
        data = w.machine.memory.read_rows(source, size)[0]
        for cta, offset in places:
            cta.reached_by(w.cta)
            cta.smem[offset : offset + size] = data
            cta.mark_async(slice(offset, offset + size))
        for found in signals:
            found.complete(size)

    w.machine.bytes["bulk.load"] += size
    w.machine.issue(w, Work("tma", f"bulk load {size} B", run, size=size))


@runtime
def bulk_to_peer(
    w: Warp, how: Reduction, target: PerLane, source: PerLane, nbytes: PerLane, barrier: PerLane
) -> None:
    for where, start, size, signal in w.each_lane(target, source, nbytes, barrier):
        require_bulk(size, start & OFFSET_MASK, where & OFFSET_MASK)
        ((cta, offset),) = targets_of(w, where, None)
        found, low = find(w, signal), start & OFFSET_MASK
        cta.check(offset, size)
        w.cta.check(low, size)
        _issue_to_peer(w, how, low, (cta, offset), size, found)


def _issue_to_peer(
    w: Warp, how: Reduction, low: int, target: Place, size: int, signal: MBarrier
) -> None:
    cta, offset = target

    def run(work: Work) -> None:
        for each in w.listeners:
            each.send(work, (w.cta, low), target, size, signal, atomic=how is not None)
        cta.reached_by(w.cta)
        data = w.cta.as_seen_by_async(low, low + size)[low : low + size]
        if how is not None:
            data = combine(*how, cta.smem[offset : offset + size], data)
        cta.smem[offset : offset + size] = data
        cta.mark_async(slice(offset, offset + size))
        signal.complete(size)

    w.machine.bytes["bulk.peer"] += size
    w.machine.issue(w, Work("tma", f"bulk to peer {size} B", run, size=size))


@runtime
def bulk_store(w: Warp, how: Reduction, target: PerLane, source: PerLane, nbytes: PerLane) -> None:
    for where, start, size in w.each_lane(target, source, nbytes):
        low = start & OFFSET_MASK
        require_bulk(size, where, low)
        w.cta.check(low, size)
        _issue_store(w, how, as_addresses([where]), low, size)


def _issue_store(w: Warp, how: Reduction, target: np.ndarray, low: int, size: int) -> None:
    held: list[np.ndarray] = []

    def read(work: Work) -> None:
        for each in w.listeners:
            each.bulk_read(work, w.cta, low, size)
        held.append(w.cta.as_seen_by_async(low, low + size)[low : low + size].copy())

    def write(work: Work) -> None:
        for each in w.listeners:
            each.bulk_write(work, target, size, atomic=how is not None)
        data = held[0]
        if how is not None:
            data = combine(*how, w.machine.memory.read_rows(target, size)[0], data)
        w.machine.memory.write_rows(target, data[None])

    name = "store" if how is None else "reduce"
    w.machine.bytes[f"bulk.{name}"] += size
    work = Work("tma", f"bulk {name} {size} B", read, write, size=size, stream="bulk read")
    w.bulk.add(w.machine.issue(w, work))


# st.async and red.async: elements that come to the shared memory of a CTA of the cluster and
# complete on an mbarrier there. PTX ISA, the sections of these names.


@op(
    "st.async",
    types="b32 u32 s32 f32 b64 u64 s64 f64",
    flags="weak shared::cluster mbarrier::complete_tx::bytes v2 v4",
)
def emit_store(c: Lower, i: Instr, f: Match) -> None:
    _emit(c, i, f, None)


@op(
    "red.async",
    types="u32 s32 b32 u64 s64",
    flags=f"relaxed cluster shared::cluster mbarrier::complete_tx::bytes {REDUCTIONS}",
)
def emit_reduction(c: Lower, i: Instr, f: Match) -> None:
    _emit(c, i, f, reduction(f))


def _emit(c: Lower, i: Instr, f: Match, how: Reduction) -> None:
    width = TYPE_BITS[f.type]
    values = c.srcs(elements(c, i, f, i.operands[1]), f"u{width}")
    c.effect(
        f"store_async(w, {how}, {{0}}, {{1}}, {width // 8}, ({fields(values, 2)},))",
        c.address(i.operands[0], 32),
        barrier_address(c, i.operands[2]),
        *values,
    )


@runtime
def store_async(
    w: Warp,
    how: Reduction,
    target: PerLane,
    barrier: PerLane,
    size: int,
    values: tuple[Any, ...],
) -> None:
    """Store for each active lane; the barrier is in the CTA that is stored to."""
    if how is None and len(values) == 1 and barrier.__class__ is int and not w.listeners:
        if _store_row(w, target, barrier, size, values[0]):
            return
    targets, signals = w.lane_values(target), w.lane_values(barrier)
    if how is None and len(targets) > 1 and set(signals) == {signals[0]}:
        stores = _Stores(targets, size, len(values))
        if stores.at_once(w, signals[0]):
            _issue_together(w, targets, signals[0], _data(w, values, size))
            return
    _one_by_one(w, how, zip(targets, signals, w.each_lane(*values), strict=True), size)


def _store_row(w: Warp, target: PerLane, signal: int, size: int, value: PerLane) -> bool:
    """Store now what all lanes store to neighbouring places of one CTA, as `_Stores` does.

    Return False, having done nothing, if they do something else.
    """
    if not isinstance(target, np.ndarray) or w.frag.mask != ALL or not w.machine.units.eager:
        return False
    targets, nbytes = target.tolist(), size * WARP_LANES
    first = targets[0]
    if first % size or targets != list(range(first, first + nbytes, size)):
        return False
    cta, offset = w.cluster.locate(first)
    found = find(w, signal)
    if offset + nbytes > cta.smem_size or not _completes_at_end(found, nbytes, size):
        return False
    cta.views[size][offset // size : offset // size + WARP_LANES] = value
    w.machine.bytes["st.async"] += nbytes
    found.complete(size, times=WARP_LANES, of=w.label, site=w.at)
    w.machine.note_progress()
    return True


def _completes_at_end(signal: MBarrier, total: int, nbytes: int) -> bool:
    """Whether stores of `nbytes` each, `total` in all, complete no phase before the last one."""
    midway = 0 < signal.tx < total and signal.tx % nbytes == 0
    return not midway and signal.tx - total >= -MAX_COUNT


def _issue_together(w: Warp, targets: list[int], signal: int, data: np.ndarray) -> None:
    """Store `data` [active lane, value] together.

    If a listener follows each store, the first one is separate. Events of the mbarrier are then
    reported with it, before the events of the others.
    """
    parts = (slice(0, 1), slice(1, None)) if w.machine.every_access else (slice(None),)
    for part in parts:
        stores = _Stores(targets[part], data.itemsize, data.shape[1])
        stores.issue(w, signal, data[part])


def _data(w: Warp, values: tuple[Any, ...], size: int) -> np.ndarray:
    """Elements of `size` bytes, [active lane, value]."""
    lanes = w.lanes()
    data = np.empty((len(lanes), len(values)), f"u{size}")
    for column, value in enumerate(values):
        data[:, column] = value[lanes] if isinstance(value, np.ndarray) else value
    return data


class _Stores:
    """Stores of several lanes, as one operation."""

    def __init__(self, targets: list[int], size: int, count: int) -> None:
        self.first = targets[0]
        self.offsets = np.array(targets) - (self.first & ~OFFSET_MASK)
        self.size, self.count = size, count
        self.nbytes = size * count

    def at_once(self, w: Warp, signal: int) -> bool:
        """Whether one operation has the same effect as separate stores.

        This holds if all stores are aligned and in one CTA, complete no phase midway, and no
        listener follows each store.
        """
        machine, nbytes = w.machine, self.nbytes
        if not machine.units.eager or machine.every_lane or (w.follower and w.follower.masks):
            return False
        if machine.every_access and len(np.unique(self.offsets)) < len(self.offsets):
            return False
        cta, _ = w.cluster.locate(self.first)
        low, high = int(self.offsets.min()), int(self.offsets.max())
        together = int(np.bitwise_or.reduce(self.offsets))
        if low < 0 or high + nbytes > cta.smem_size or together & (nbytes - 1):
            return False
        return _completes_at_end(find(w, signal), nbytes * len(self.offsets), nbytes)

    def issue(self, w: Warp, address: int, data: np.ndarray) -> None:
        cta, signal = w.cluster.cta(self.first >> RANK_SHIFT), find(w, address)
        places = [(cta, offset) for offset in self.offsets.tolist()]
        index = self.offsets[:, None] // self.size + np.arange(self.count)

        def run(work: Work) -> None:
            for each in w.listeners:
                each.land(work, places, self.nbytes, [signal])
            cta.views[self.size][index] = data
            signal.complete(self.nbytes, times=len(places))

        _put(w, "st.async", self.nbytes, run, len(places))


def _one_by_one(w: Warp, how: Reduction, stores: Iterable[Any], size: int) -> None:
    for where, signal, row in stores:
        nbytes = size * len(row)
        cta, offset = w.cluster.locate(where)
        if offset % nbytes:
            name = "st.async" if how is None else "red.async"
            raise HardwareRefusal(f"{name} of {nbytes} bytes to {where:#x}; misaligned")
        cta.check(offset, nbytes)
        data = np.array(row, f"u{size}").view(np.uint8)
        _issue(w, how, (cta, offset), data, find(w, signal))


def _issue(w: Warp, how: Reduction, place: Place, data: np.ndarray, signal: MBarrier) -> None:
    cta, offset = place
    nbytes, name = data.size, "st.async" if how is None else "red.async"

    def run(work: Work) -> None:
        for each in w.listeners:
            each.land(work, [place], nbytes, [signal], atomic=how is not None)
        held = cta.smem[offset : offset + nbytes]
        cta.smem[offset : offset + nbytes] = data if how is None else combine(*how, held, data)
        cta.mark_generic(slice(offset, offset + nbytes))
        signal.complete(nbytes)

    _put(w, name, nbytes, run, 1)


def _put(w: Warp, name: str, nbytes: int, run: Callable[[Work], None], times: int) -> None:
    w.machine.bytes[name] += nbytes * times
    work = Work("st.async", f"{name} {nbytes} B", run, size=nbytes * times, stream="st.async")
    w.machine.issue(w, work)
