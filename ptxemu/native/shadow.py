"""Fast path of the race checker, as routines: is an access ordered after all it must follow?

If it surely is, the routine notes the access at once. Otherwise it changes nothing, and Python
determines what is wrong, if anything.

`check.shadow` and `check.global_memory` define shadows, stamps and clocks. Memories, places and
agents are described by tables of words, which are named below. They live as long as what they
describe, so that a call passes nothing but their addresses.
"""

from __future__ import annotations

from ptxemu.native.routines import p_i32, p_i64, p_u8, p_u32, routine

# Words of a memory: where the addresses of its stamps are (last writes, then planes of reads), how
# many planes there are, the address of a byte per cell that mbarriers have, or 0; its cells. Of
# global memory also: the addresses of the clusters of the last writes, int32, and of stamps below
# atomics, or 0; the number of the cluster of the access, from 1 on.
TABLE, PLANES, BARRIERS, CELLS, OWNERS, BELOW, CLUSTER = range(7)
MEMORY_WORDS = 7
# Words of a place, which is the cells of an access: runs of RUN, which begin at COUNT numbers at
# STARTS, shifted right by SHIFT and moved by BASE.
STARTS, COUNT, RUN, SHIFT, BASE = range(5)
PLACE_WORDS = 5
# Words of an agent: where the steps, int32, are that it is ordered after, of writes and of reads,
# and how many there are; as in `check.agents`; where the masks of the codes of lanes are.
AFTER_WRITES, AFTER_READS, KNOWN, OWN, SYNCED, COPIED, COPIES_MET, MASKS = range(8)
AGENT_WORDS = 8
# Words of a warp that accesses shared memory by lanes: the bytes of the memory, the logarithm of
# those of a cell; where the addresses of all lanes are, uint32, a place for those of the active
# ones, and a list for the active ones.
ROOM, CELL_SHIFT, ADDRESSES, PLACED, LISTED = range(5)

OFFSET = 0xFFFFFF  # of a shared address; above it is the rank in the cluster
# Kinds of an access. DEFINED: a read of what has been written before. IN_TENSOR: of `visit_all`.
WRITES, DEFINED, IN_TENSOR = 1, 2, 4
# Answers. DONE_NEW: as DONE, and some cell had never been written. PLANE: one more is needed.
DONE, DONE_NEW, UNSURE, UNWRITTEN, PLANE = range(5)

SITE_BITS, LANE_BITS, STEP_BITS = 18, 6, 25  # of a stamp, from the lowest on; then its component
LANE_SHIFT = SITE_BITS
STEP_SHIFT = SITE_BITS + LANE_BITS
COMPONENT_SHIFT = STEP_SHIFT + STEP_BITS
SITE_MASK = (1 << SITE_BITS) - 1
LANE_MASK = (1 << LANE_BITS) - 1
STEP_MASK = (1 << STEP_BITS) - 1

# Cells of a run that are compared as one, if they have had the same accesses.
TOGETHER, WIDE = 8, 64


@routine
def ordered(by: p_i64, stream: int, before: int, old: int, seen: int, lane: int) -> int:
    """Whether an access of `lane` is surely ordered after the one of the stamp `old`.

    stream, before: component of the operations before this one, and the last of their steps.
    seen: address of the steps.
    """
    component = old >> COMPONENT_SHIFT
    step = (old >> STEP_SHIFT) & STEP_MASK
    known = 0
    if component == stream:
        known = before
    elif component < by[KNOWN]:
        known = p_i32(seen)[component]
    if step > known:
        return 0
    own = component == by[OWN] and step >= by[SYNCED]
    copied = by[COPIED] != 0 and component == by[COPIED] and step > by[COPIES_MET]
    if not (own or copied):
        return 1
    masks = p_i64(by[MASKS])
    was = masks[(old >> LANE_SHIFT) & LANE_MASK]
    if was != 0 and masks[lane] & ~was != 0:
        return 0
    return 1


@routine
def _whole(memory: p_i64, place: p_i64) -> int:
    """Whether all cells of the access are there."""
    starts = p_i64(place[STARTS])
    for i in range(place[COUNT]):
        first = (starts[i] >> place[SHIFT]) + place[BASE]
        if first < 0 or first + place[RUN] > memory[CELLS]:
            return 0
    return 1


@routine
def _fill(place: p_i64, row: int, stamp: int) -> int:
    """Put a stamp into all cells of the access, in the row at an address."""
    starts = p_i64(place[STARTS])
    count, run, shift, base = place[COUNT], place[RUN], place[SHIFT], place[BASE]
    for i in range(count):
        first = (starts[i] >> shift) + base
        for cell in range(first, first + run):
            p_i64(row)[cell] = stamp
    return DONE


@routine
def _alike(table: p_i64, planes: int, first: int) -> int:
    """Whether TOGETHER cells from `first` on have the same stamps."""
    for plane in range(planes + 1):
        row = p_i64(table[plane])
        stamp, others = row[first], 0
        for k in range(1, TOGETHER):
            others |= row[first + k] ^ stamp
        if others != 0:
            return 0
        if plane != 0 and stamp == 0:
            return 1
    return 1


@routine
def _alike_wide(table: p_i64, planes: int, first: int) -> int:
    """Whether WIDE cells from `first` on have the same stamps."""
    for plane in range(planes + 1):
        row = p_i64(table[plane])
        stamp, others = row[first], 0
        for k in range(1, WIDE):
            others |= row[first + k] ^ stamp
        if others != 0:
            return 0
        if plane != 0 and stamp == 0:
            return 1
    return 1


@routine
def _flagged(flags: p_u8, first: int, count: int) -> int:
    """Whether any of some bytes is not 0."""
    found = 0
    for k in range(first, first + count):
        found |= flags[k]
    return found


@routine
def visit(
    memory: p_i64, place: p_i64, by: p_i64, stream: int, before: int,
    kind: int, stamp: int, lanes: int,
) -> int:  # fmt: skip
    """An access of shared or tensor memory.

    stream, before: see `ordered`.
    kind: bits of `WRITES` and `DEFINED`.
    lanes: one code of lanes; or the address of those of each start, which `stamp` lacks.
    """
    looked = _looked(memory, place, by, stream, before, kind, stamp >> COMPONENT_SHIFT, lanes)
    if looked < 0:
        return -looked
    deepest, done = looked >> 1, DONE
    if looked & 1 != 0:
        done = DONE_NEW
    table, write = p_i64(memory[TABLE]), kind & WRITES
    starts, own = p_i64(place[STARTS]), stamp >> COMPONENT_SHIFT
    if write != 0:
        for plane in range(1, deepest + 1):
            _fill(place, table[plane], 0)
    if lanes <= LANE_MASK and (write != 0 or deepest == 1):
        _fill(place, table[1 - write], stamp)
        return done
    for k in range(place[RUN]):  # of several lanes at one cell the last one stays
        for i in range(place[COUNT]):
            cell = (starts[i] >> place[SHIFT]) + place[BASE] + k
            mark = stamp
            if lanes > LANE_MASK:
                mark = stamp | p_i64(lanes)[i] << LANE_SHIFT
            plane = 0
            if write == 0:
                plane = 1
                old = p_i64(table[1])[cell]
                while old != 0 and old >> COMPONENT_SHIFT != own:
                    plane += 1
                    old = p_i64(table[plane])[cell]
            p_i64(table[plane])[cell] = mark
    return done


@routine
def visit_all(
    accesses: p_i64, count: int, in_shared: p_i64, in_tensor: p_i64, stream: int, before: int,
    stamp: int, lane: int,
) -> int:  # fmt: skip
    """Visit the accesses of one operation, until one is not done.

    Each is the address of a memory, that of a place, a kind.

    in_shared, in_tensor: the agent in these memories.
    lane: that of reads of shared memory.

    Returns how many are done, above 1 if some cell of shared memory had never been written.
    """
    never = 0
    for k in range(count):
        memory, kind = p_i64(accesses[3 * k]), accesses[3 * k + 2]
        place, whole = p_i64(accesses[3 * k + 1]), LANE_MASK
        if kind & IN_TENSOR != 0:
            answer = visit(memory, place, in_tensor, stream, before, kind, stamp, whole)
        else:
            answer = visit(memory, place, in_shared, stream, before, kind, stamp, lane)
            if answer == DONE_NEW:
                never = 1
        if answer > DONE_NEW:
            return 2 * k + never
    return 2 * count + never


@routine
def visit_lanes(
    memory: p_i64, by: p_i64, kind: int, stamp: int, active: int, nbytes: int, warp: p_i64
) -> int:
    """Visit an access to shared memory by lanes of a warp.

    The result is sure only if the addresses are aligned and in bounds.

    active, nbytes: mask of the lanes, and the bytes of each.
    warp: its words.
    """
    addresses, place, lanes = p_u32(warp[ADDRESSES]), p_i64(warp[PLACED]), warp[LISTED]
    room, shift = warp[ROOM], warp[CELL_SHIFT]
    starts, count = p_i64(place[STARTS]), 0
    for lane in range(32):
        if (active >> lane) & 1 != 0:
            offset = addresses[lane] & OFFSET
            if offset & (nbytes - 1) != 0 or offset + nbytes > room:
                return UNSURE
            starts[count] = offset
            p_i64(lanes)[count] = lane
            count += 1
    place[COUNT], place[RUN], place[SHIFT] = count, max(nbytes >> shift, 1), shift
    return visit(memory, place, by, 0, 0, kind, stamp, lanes)


@routine
def _looked(
    memory: p_i64, place: p_i64, by: p_i64, stream: int, before: int,
    kind: int, own: int, lanes: int,
) -> int:  # fmt: skip
    """Return the result of `visit`'s checks, before it changes anything.

    It is an answer with a minus; or twice the last plane that will change, and 1 more if some cell
    had never been written.
    """
    if _whole(memory, place) == 0:
        return -UNSURE
    table, planes, barriers = p_i64(memory[TABLE]), memory[PLANES], memory[BARRIERS]
    starts, run, shift, base = p_i64(place[STARTS]), place[RUN], place[SHIFT], place[BASE]
    last, write, defined = p_i64(table[0]), kind & WRITES, kind & DEFINED
    never, fine_write, fine_read = 0, 0, 0  # the last two: stamps that are in order
    deepest, lane = 1 - write, lanes  # the plane that will change
    for i in range(place[COUNT]):
        cell = (starts[i] >> shift) + base
        end = cell + run
        if write != 0 and barriers != 0:
            if _flagged(p_u8(barriers), cell, run) != 0:
                return -UNSURE
        if lanes > LANE_MASK:
            lane = p_i64(lanes)[i]
            fine_write, fine_read = 0, 0
        while cell < end:
            old = last[cell]
            if old == 0:
                if defined != 0:
                    return -UNWRITTEN
                never = 1
            elif old != fine_write:
                if ordered(by, stream, before, old, by[AFTER_WRITES], lane) == 0:
                    return -UNSURE
                fine_write = old
            plane = 1
            while plane <= planes:
                old = p_i64(table[plane])[cell]
                if old == 0 or (write == 0 and old >> COMPONENT_SHIFT == own):
                    break
                if write != 0 and old != fine_read:
                    if ordered(by, stream, before, old, by[AFTER_READS], lane) == 0:
                        return -UNSURE
                    fine_read = old
                plane += 1
            if write == 0 and plane > planes:
                return -PLANE
            deepest = max(deepest, plane - write)
            if cell + WIDE <= end and _alike_wide(table, planes, cell) != 0:
                cell += WIDE
            elif cell + TOGETHER <= end and _alike(table, planes, cell) != 0:
                cell += TOGETHER
            else:
                cell += 1
    return 2 * deepest + never


@routine
def visit_global(
    memory: p_i64, place: p_i64, by: p_i64, stream: int, before: int,
    kind: int, stamp: int, lanes: int,
) -> int:  # fmt: skip
    """Visit an access to global memory, of which no written byte has been read.

    The parameters are those of `visit`.
    """
    last, owners = p_i64(p_i64(memory[TABLE])[0]), p_i32(memory[OWNERS])
    starts, count, run = p_i64(place[STARTS]), place[COUNT], place[RUN]
    shift, base, below = place[SHIFT], place[BASE], memory[BELOW]
    cluster, lane = memory[CLUSTER], lanes
    if _whole(memory, place) == 0:
        return UNSURE
    for i in range(count):
        first = (starts[i] >> shift) + base
        if lanes > LANE_MASK:
            lane = p_i64(lanes)[i]
        for cell in range(first, first + run):
            if last[cell] != 0:
                if owners[cell] != cluster:
                    return UNSURE
                if ordered(by, stream, before, last[cell], by[AFTER_WRITES], lane) == 0:
                    return UNSURE
    if kind & WRITES == 0:
        return DONE
    for k in range(run):
        for i in range(count):
            cell = (starts[i] >> shift) + base + k
            mark = stamp
            if lanes > LANE_MASK:
                mark = stamp | p_i64(lanes)[i] << LANE_SHIFT
            last[cell] = mark
            owners[cell] = cluster
            if below != 0:
                p_i64(below)[cell] = 0
    return DONE


@routine
def _all_unwritten(last: p_i64, first: int) -> int:
    """Whether WIDE cells from `first` on have never been written."""
    written = 0
    for k in range(WIDE):
        written |= last[first + k]
    if written == 0:
        return 1
    return 0


@routine
def _all_read(reads: p_i64, first: int) -> int:
    """Whether WIDE cells from `first` on have been read since they were written."""
    missing = 0
    for k in range(WIDE):
        if reads[first + k] == 0:
            missing = 1
    return 1 - missing


@routine
def unread(memory: p_i64, place: p_i64, out: p_i64) -> int:
    """Store the sites of writes that have not been read, each followed by its cells in a row.

    Returns how many there are.
    """
    table, starts, run = p_i64(memory[TABLE]), p_i64(place[STARTS]), place[RUN]
    last, found, site, cells = p_i64(table[0]), 0, 0, 0
    reads = 0  # address of the stamps of reads
    if memory[PLANES] != 0:
        reads = table[1]
    if _whole(memory, place) == 0:
        return -1
    for i in range(place[COUNT]):
        cell = (starts[i] >> place[SHIFT]) + place[BASE]
        end = cell + run
        while cell < end:
            wide = 0
            if cell + WIDE <= end:
                if last[cell] == 0:
                    wide = _all_unwritten(last, cell)
                elif reads != 0:
                    wide = _all_read(p_i64(reads), cell)
            if wide != 0:
                cell += WIDE
            else:
                read = 0
                if reads != 0:
                    read = p_i64(reads)[cell]
                if last[cell] != 0 and read == 0:
                    if cells == 0 or last[cell] & SITE_MASK != site:
                        site, cells = last[cell] & SITE_MASK, 0
                        out[2 * found] = site
                        found += 1
                    cells += 1
                    out[2 * found - 1] = cells
                cell += 1
    return found


@routine
def writers(memory: p_i64, place: p_i64, out: p_i64) -> int:
    """The stamps of last writes, equal ones in a row once; how many."""
    table, starts = p_i64(memory[TABLE]), p_i64(place[STARTS])
    last, found, before = p_i64(table[0]), 0, -1
    if _whole(memory, place) == 0:
        return -1
    for i in range(place[COUNT]):
        first = (starts[i] >> place[SHIFT]) + place[BASE]
        for cell in range(first, first + place[RUN]):
            if last[cell] != before:
                before = last[cell]
                out[found] = before
                found += 1
    return found
