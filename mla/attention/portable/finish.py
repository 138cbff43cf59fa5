"""O and LSE of a CTA's rows, alone or as one of several parts (device code).

With parts each CTA stores its sums in the workspace and increments a counter. The CTA that arrives
last adds the sums in the order of parts, whichever came last, and resets the counter to 0.

    partial [unit][part]: O as it lies in registers, [register][thread], then (maximum, sum) by row
    unit = entry tiles + tile of rows
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from kernelkit.device.barriers import meet
from kernelkit.device.online_softmax import finite, in_log2_units
from kernelkit.device.shared_words import load, store
from kernelkit.device.warp_mma import pack
from kernelkit.plan.log2 import LN_2
from mla.attention.formats import LATENT
from mla.attention.kernel_arguments import KernelArguments, Tables
from mla.attention.portable.attend import Scratch, State
from mla.attention.portable.plan import BLOCK, PortablePlan


@dataclass(frozen=True)
class Place:
    """Position of a CTA.

    entry: query entry.
    first_row: first of its query rows.
    unit: number of its rows among those of all entries.
    part, parts: which part of the keys it has, and how many parts have any keys.
    """

    entry: Int32
    first_row: Int32
    unit: Int32
    part: Int32
    parts: Int32


@cute.jit
def leave_statistics(
    plan: PortablePlan, scratch: Scratch, state: State, scale_log2: Float32
) -> None:
    """Store (maximum in log2 units, sum) of this warp's rows in shared memory."""
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    for index in cutlass.range_constexpr(plan.rows_of_warp):
        total = state.row_sum[index]
        for distance in cutlass.range_constexpr(5):
            total += cute.arch.shuffle_sync_bfly(total, offset=1 << distance)
        if lane == 0:
            place = scratch.statistics + (warp * plan.rows_of_warp + index) * 8
            store(place, Float32, (state.row_max[index] * scale_log2, total))


@cute.jit
def finish(
    plan: PortablePlan,
    scratch: Scratch,
    arrived: Int32,
    place: Place,
    state: State,
    given: KernelArguments,
) -> None:
    """Write the rows of this CTA, or leave them to the part that arrives last."""
    if cutlass.const_expr(not plan.config.parts):
        write(plan, scratch, place, state, given)
    elif place.parts <= 1:
        write(plan, scratch, place, state, given)
    else:
        leave(plan, scratch, place, state, given.tables)
        if is_last(plan, arrived, place, given.tables):
            add_parts(plan, scratch, place, state, given.tables)
            cute.arch.sync_threads()
            write(plan, scratch, place, state, given)


@cute.jit
def leave(plan: PortablePlan, scratch: Scratch, place: Place, state: State, tables: Tables) -> None:
    """Store this part's sums in the workspace."""
    thread, _, _ = cute.arch.thread_idx()
    line, o = tables.partial[place.unit, place.part, None], state.o
    for block in cutlass.range_constexpr(plan.row_blocks):
        for tile in cutlass.range_constexpr(o.shape[1]):
            for k in cutlass.range_constexpr(o.shape[0]):
                register = cute.crd2idx((k, tile, block), o.layout)
                line[register * plan.threads + thread] = o[k, tile, block]
    if thread < plan.rows:
        found = load(scratch.statistics + thread * 8, Float32, 2)
        behind = plan.rows * LATENT
        line[behind + thread] = found[0]
        line[behind + plan.rows + thread] = found[1]


@cute.jit
def is_last(plan: PortablePlan, arrived: Int32, place: Place, tables: Tables) -> Boolean:
    """Return whether all other parts have stored their sums; the counter is then reset to 0."""
    thread, _, _ = cute.arch.thread_idx()
    meet(plan.barriers, "finish")
    if thread == 0:
        count = tables.counts.iterator + place.unit
        before = cute.arch.atomic_add(count, Int32(1), sem="acq_rel", scope="gpu")
        if before == place.parts - 1:
            tables.counts[place.unit] = Int32(0)
        store(arrived, Int32, (before,))
    meet(plan.barriers, "finish")
    return load(arrived, Int32) == place.parts - 1


@cute.jit
def add_parts(
    plan: PortablePlan, scratch: Scratch, place: Place, state: State, tables: Tables
) -> None:
    """Replace this thread's sums, and the statistics, by those of all parts."""
    thread, _, _ = cute.arch.thread_idx()
    lane, o, behind = cute.arch.lane_idx(), state.o, plan.rows * LATENT
    tops = cute.make_rmem_tensor((2, plan.row_blocks), Float32)
    tops.fill(-Float32.inf)
    for part in cutlass.range(place.parts, unroll=1):
        line = tables.partial[place.unit, part, None]
        for block in cutlass.range_constexpr(plan.row_blocks):
            for half in cutlass.range_constexpr(2):
                row = block * BLOCK + lane // 4 + 8 * half
                tops[half, block] = cute.arch.fmax(tops[half, block], line[behind + row])
    o.fill(0.0)
    for part in cutlass.range(place.parts, unroll=1):
        line = tables.partial[place.unit, part, None]
        for block in cutlass.range_constexpr(plan.row_blocks):
            for half in cutlass.range_constexpr(2):
                row = block * BLOCK + lane // 4 + 8 * half
                base = finite(tops[half, block])
                weight = cute.math.exp2(line[behind + row] - base, fastmath=True)
                for tile in cutlass.range_constexpr(o.shape[1]):
                    for column in cutlass.range_constexpr(2):
                        spot = (2 * half + column, tile, block)
                        register = cute.crd2idx(spot, o.layout)
                        o[spot] += weight * line[register * plan.threads + thread]
    if thread < plan.rows:
        _add_statistics(plan, scratch, place, tables)


@cute.jit
def _add_statistics(plan: PortablePlan, scratch: Scratch, place: Place, tables: Tables) -> None:
    """Store the statistics of row `thread` over all parts in shared memory."""
    thread, _, _ = cute.arch.thread_idx()
    behind, top, total = plan.rows * LATENT + thread, -Float32.inf, Float32(0.0)
    for part in cutlass.range(place.parts, unroll=1):
        top = cute.arch.fmax(top, tables.partial[place.unit, part, behind])
    base = finite(top)
    for part in cutlass.range(place.parts, unroll=1):
        line = tables.partial[place.unit, part, None]
        weight = cute.math.exp2(line[behind] - base, fastmath=True)
        total += line[behind + plan.rows] * weight
    store(scratch.statistics + thread * 8, Float32, (top, total))


@cute.jit
def write(
    plan: PortablePlan, scratch: Scratch, place: Place, state: State, given: KernelArguments
) -> None:
    """Write O and the LSE of the rows that exist, from registers and the statistics."""
    config, lane, o = plan.config, cute.arch.lane_idx(), state.o
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    for block in cutlass.range_constexpr(plan.row_blocks):
        for half in cutlass.range_constexpr(2):
            local = block * BLOCK + lane // 4 + 8 * half
            row = place.first_row + local
            if row < given.q.shape[1] * config.heads:
                token, head = row // config.heads, row % config.heads
                found = load(scratch.statistics + local * 8, Float32, 2)
                norm = norm_of(given, head, found[0], found[1])
                line = cute.recast_tensor(given.o[place.entry, token, head, None], Uint32)
                for tile in cutlass.range_constexpr(o.shape[1]):
                    x, y = o[2 * half, tile, block] * norm, o[2 * half + 1, tile, block] * norm
                    pair = warp * (plan.columns_of_warp // 2) + tile * 4 + lane % 4
                    if cutlass.const_expr(config.rope > 0):
                        x, y = rotated_back(plan, given.tables, place.entry, pair, x, y)
                    line[pair] = pack(x, y, "bf16")
                if warp == 0 and lane % 4 == 0:
                    top, total = found
                    log_total = (cute.math.log2(total, fastmath=True) + top) * LN_2
                    lse = -Float32.inf if total == 0.0 else log_total
                    given.lse[place.entry, token, head] = lse


@cute.jit
def norm_of(given: KernelArguments, head: Int32, top: Float32, total: Float32) -> Float32:
    """Return the factor of a row's sums: one over all weights, the sink's included."""
    whole = total
    scale = Float32(1.0)
    if cutlass.const_expr(given.tables.sinks is not None):
        sink = in_log2_units(given.tables.sinks[head])
        higher = finite(cute.arch.fmax(top, sink))
        scale = cute.math.exp2(top - higher, fastmath=True)
        whole = total * scale + cute.math.exp2(sink - higher, fastmath=True)
    norm = Float32(0.0) if total == 0.0 else scale * cute.arch.rcp_approx(whole)
    if cutlass.const_expr(given.tables.key_scale is not None):
        norm *= given.tables.key_scale[0]
    return norm


@cute.jit
def rotated_back(
    plan: PortablePlan, tables: Tables, entry: Int32, pair: Int32, x: Float32, y: Float32
) -> tuple[Float32, Float32]:
    """Rotate neighbours (x, y), columns 2 pair and 2 pair + 1, if they are rotary ones."""
    first = (LATENT - plan.config.rope) // 2
    if pair >= first:
        rows = tables.cos.shape[0]
        position = tables.positions[entry]
        row = Int32(cutlass.min(cutlass.max(position, 0), rows - 1))
        cos, sin = tables.cos[row, pair - first], tables.sin[row, pair - first]
        x, y = x * cos + y * sin, y * cos - x * sin
    return x, y
