"""Fast path of the race checker, as routines: is an access ordered after all it must follow?

If it surely is, the routine notes the access at once. Otherwise it changes nothing, and Python
determines what is wrong, if anything.

`check.shadow` and `check.global_memory` define shadows, stamps and clocks. A routine gets its
arguments in a frame, whose words are named below.
"""

from __future__ import annotations

from ptxemu.native.routines import p_i32, p_i64, p_u8, routine

# Words of the frame. The memory: addresses of its stamps (last writes, then planes of reads), how
# many planes there are, the address of a byte per cell that mbarriers have, or 0; its cells.
TABLE, PLANES, BARRIERS, CELLS = range(4)
# The cells of the access: runs of RUN, which begin at COUNT numbers at STARTS, shifted right by
# SHIFT and moved by BASE.
STARTS, COUNT, RUN, SHIFT, BASE = range(4, 9)
# What it is: bits of `WRITES` and `DEFINED`; its stamp; one code of lanes, or where there are those
# of each start, which the stamp lacks.
KIND, STAMP, LANE, LANES = range(9, 13)
# Whom it is by: where the steps, int32, lie that it is ordered after, of writes and of reads, and
# how many there are; as in `check.agents`; where the masks of the codes of lanes lie.
AGENT = slice(13, 21)
AFTER_WRITES, AFTER_READS, KNOWN, OWN, SYNCED, COPIED, COPIES_MET, MASKS = range(13, 21)
STREAM, BEFORE = range(21, 23)  # of the operations before it: their component, the last step
CLUSTER = 23  # of global memory: the number of its cluster, from 1 on
OWNERS = 24  # of global memory: where those of the last writes lie, int32,
BELOW = 25  # and stamps below atomics, or 0
NEVER = 26  # the answer to a read: some cell has never been written
OUT = 27  # where stamps go that are asked for
DEEPEST = 28  # between the parts of `visit`: the last plane that will change
ACTIVE, NBYTES, ROOM = range(29, 32)  # for `visit_lanes`: lanes, bytes of each, those of the memory

OFFSET = 0xFFFFFF  # of a shared address; above it is the rank in the cluster
WRITES, DEFINED = 1, 2  # of a read: all has been written before
DONE, UNSURE, UNWRITTEN, PLANE = range(4)  # answers; PLANE: one more is needed

SITE_BITS, LANE_BITS, STEP_BITS = 18, 6, 25  # of a stamp, from the lowest on; then its component
LANE_SHIFT = SITE_BITS
STEP_SHIFT = SITE_BITS + LANE_BITS
COMPONENT_SHIFT = STEP_SHIFT + STEP_BITS
LANE_MASK = (1 << LANE_BITS) - 1
STEP_MASK = (1 << STEP_BITS) - 1

WORDS = 32  # of a frame


@routine
def ordered(frame: p_i64, old: int, seen: int, lane: int) -> int:
    """Whether an access of `lane` is surely ordered after the one of the stamp `old`, by the steps
    at the address `seen`."""
    component = old >> COMPONENT_SHIFT
    step = (old >> STEP_SHIFT) & STEP_MASK
    known = 0
    if component == frame[STREAM]:
        known = frame[BEFORE]
    elif component < frame[KNOWN]:
        known = p_i32(seen)[component]
    if step > known:
        return 0
    own = component == frame[OWN] and step >= frame[SYNCED]
    copied = frame[COPIED] != 0 and component == frame[COPIED] and step > frame[COPIES_MET]
    if not (own or copied):
        return 1
    masks = p_i64(frame[MASKS])
    before = masks[(old >> LANE_SHIFT) & LANE_MASK]
    if before != 0 and masks[lane] & ~before != 0:
        return 0
    return 1


@routine
def _whole(frame: p_i64) -> int:
    """Whether all cells of the access are there."""
    starts = p_i64(frame[STARTS])
    for i in range(frame[COUNT]):
        first = (starts[i] >> frame[SHIFT]) + frame[BASE]
        if first < 0 or first + frame[RUN] > frame[CELLS]:
            return 0
    return 1


@routine
def _fill(frame: p_i64, row: int, stamp: int) -> int:
    """Put a stamp into all cells of the access, in the row at an address."""
    starts = p_i64(frame[STARTS])
    count, run, shift, base = frame[COUNT], frame[RUN], frame[SHIFT], frame[BASE]
    for i in range(count):
        first = (starts[i] >> shift) + base
        for cell in range(first, first + run):
            p_i64(row)[cell] = stamp
    return DONE


@routine
def visit(address: int) -> int:
    """An access of shared or tensor memory."""
    frame = p_i64(address)
    answer = _looked(frame)
    if answer != DONE:
        return answer
    table, write, stamp = p_i64(frame[TABLE]), frame[KIND] & WRITES, frame[STAMP]
    starts, lanes, own = p_i64(frame[STARTS]), frame[LANES], stamp >> COMPONENT_SHIFT
    if write != 0:
        for plane in range(1, frame[DEEPEST] + 1):
            _fill(frame, table[plane], 0)
    if lanes == 0 and (write != 0 or frame[DEEPEST] == 1):
        return _fill(frame, table[1 - write], stamp)
    for k in range(frame[RUN]):  # of several lanes at one cell the last one stays
        for i in range(frame[COUNT]):
            cell = (starts[i] >> frame[SHIFT]) + frame[BASE] + k
            mark = stamp
            if lanes != 0:
                mark = stamp | p_i64(lanes)[i] << LANE_SHIFT
            plane = 0
            if write == 0:
                plane = 1
                old = p_i64(table[1])[cell]
                while old != 0 and old >> COMPONENT_SHIFT != own:
                    plane += 1
                    old = p_i64(table[plane])[cell]
            p_i64(table[plane])[cell] = mark
    return DONE


@routine
def visit_lanes(address: int) -> int:
    """Visit an access to shared memory by lanes of a warp, with their addresses as STARTS.

    The result is sure only if the addresses are aligned and in bounds.
    """
    frame = p_i64(address)
    starts, lanes, nbytes, count = p_i64(frame[STARTS]), p_i64(frame[LANES]), frame[NBYTES], 0
    for lane in range(32):
        if (frame[ACTIVE] >> lane) & 1 != 0:
            offset = starts[lane] & OFFSET
            if offset & (nbytes - 1) != 0 or offset + nbytes > frame[ROOM]:
                return UNSURE
            starts[count] = offset
            lanes[count] = lane
            count += 1
    frame[COUNT] = count
    return visit(address)


@routine
def _looked(frame: p_i64) -> int:
    """Return the result of `visit`'s checks, before it changes anything."""
    if _whole(frame) == 0:
        return UNSURE
    table, planes = p_i64(frame[TABLE]), frame[PLANES]
    last, barriers = p_i64(table[0]), frame[BARRIERS]
    starts, run, shift, base = p_i64(frame[STARTS]), frame[RUN], frame[SHIFT], frame[BASE]
    write, defined = frame[KIND] & WRITES, frame[KIND] & DEFINED
    lane, lanes, own = frame[LANE], frame[LANES], frame[STAMP] >> COMPONENT_SHIFT
    never, fine_write, fine_read = 0, 0, 0  # the last two: stamps that are in order
    deepest = 1 - write  # plane that will change
    for i in range(frame[COUNT]):
        first = (starts[i] >> shift) + base
        if lanes != 0:
            lane = p_i64(lanes)[i]
            fine_write, fine_read = 0, 0
        for cell in range(first, first + run):
            if write != 0 and barriers != 0:
                if p_u8(barriers)[cell] != 0:
                    return UNSURE
            old = last[cell]
            if old == 0:
                if defined != 0:
                    return UNWRITTEN
                never = 1
            elif old != fine_write:
                if ordered(frame, old, frame[AFTER_WRITES], lane) == 0:
                    return UNSURE
                fine_write = old
            plane = 1
            while plane <= planes:
                old = p_i64(table[plane])[cell]
                if old == 0 or (write == 0 and old >> COMPONENT_SHIFT == own):
                    break
                if write != 0 and old != fine_read:
                    if ordered(frame, old, frame[AFTER_READS], lane) == 0:
                        return UNSURE
                    fine_read = old
                plane += 1
            if write == 0 and plane > planes:
                return PLANE
            deepest = max(deepest, plane - write)
    frame[NEVER], frame[DEEPEST] = never, deepest
    return DONE


@routine
def visit_global(address: int) -> int:
    """Visit an access to global memory, of which no written byte has been read."""
    frame = p_i64(address)
    last, owners = p_i64(p_i64(frame[TABLE])[0]), p_i32(frame[OWNERS])
    starts, count, run = p_i64(frame[STARTS]), frame[COUNT], frame[RUN]
    shift, base, lanes, lane = frame[SHIFT], frame[BASE], frame[LANES], frame[LANE]
    cluster, stamp, below = frame[CLUSTER], frame[STAMP], frame[BELOW]
    if _whole(frame) == 0:
        return UNSURE
    for i in range(count):
        first = (starts[i] >> shift) + base
        if lanes != 0:
            lane = p_i64(lanes)[i]
        for cell in range(first, first + run):
            if last[cell] != 0:
                if owners[cell] != cluster:
                    return UNSURE
                if ordered(frame, last[cell], frame[AFTER_WRITES], lane) == 0:
                    return UNSURE
    if frame[KIND] & WRITES == 0:
        return DONE
    for k in range(run):
        for i in range(count):
            cell = (starts[i] >> shift) + base + k
            mark = stamp
            if lanes != 0:
                mark = stamp | p_i64(lanes)[i] << LANE_SHIFT
            last[cell] = mark
            owners[cell] = cluster
            if below != 0:
                p_i64(below)[cell] = 0
    return DONE


@routine
def unread(address: int) -> int:
    """Store the stamps of writes that have not been read; return how many there are."""
    frame = p_i64(address)
    table, starts, out = p_i64(frame[TABLE]), p_i64(frame[STARTS]), p_i64(frame[OUT])
    last, found = p_i64(table[0]), 0
    if _whole(frame) == 0:
        return -1
    for i in range(frame[COUNT]):
        first = (starts[i] >> frame[SHIFT]) + frame[BASE]
        for cell in range(first, first + frame[RUN]):
            read = 0
            if frame[PLANES] != 0:
                read = p_i64(table[1])[cell]
            if last[cell] != 0 and read == 0:
                out[found] = last[cell]
                found += 1
    return found


@routine
def writers(address: int) -> int:
    """The stamps of last writes, equal ones in a row once; how many."""
    frame = p_i64(address)
    table, starts, out = p_i64(frame[TABLE]), p_i64(frame[STARTS]), p_i64(frame[OUT])
    last, found, before = p_i64(table[0]), 0, -1
    if _whole(frame) == 0:
        return -1
    for i in range(frame[COUNT]):
        first = (starts[i] >> frame[SHIFT]) + frame[BASE]
        for cell in range(first, first + frame[RUN]):
            if last[cell] != before:
                before = last[cell]
                out[found] = before
                found += 1
    return found
