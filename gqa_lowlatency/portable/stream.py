"""Walk of one warp over its keys: S^T = K Q^T, the online softmax, O^T += V^T P (device code).

Columns are query rows. An accumulator of S^T in lane 4 g + i holds keys g and g + 8 of columns 2 i
and 2 i + 1 of each 8 columns. So a lane keeps the statistics of its two columns of each 8. Two
warps of a team have the same keys and statistics, each with its slice of the head.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from gqa_lowlatency.portable.plan import PortablePlan
from gqa_lowlatency.portable.products import (
    accumulate,
    chunk_offset,
    score,
)
from gqa_lowlatency.portable.queries import (
    factor_of,
    fragments,
    load_rows,
)
from gqa_lowlatency.portable.team import Memory, add_slices, slice_of, team_of
from gqa_lowlatency.shared.args import Place, Scalars, Tables, Tensors
from gqa_lowlatency.shared.split import Share, any_row_sees, branch_bits, row_sees, tile_start
from kernelkit.device import warp_mma
from kernelkit.device.online_softmax import finite, softcap_score


@dataclass(frozen=True)
class Stream:
    """Inputs of a warp, and its buffers in shared memory."""

    memory: Memory
    place: Place
    tensors: Tensors
    tables: Tables
    scalars: Scalars


@dataclass(frozen=True)
class Found:
    """Results of the keys of a warp: per lane, tensors in registers."""

    o: cute.Tensor  # (4, columns / 8, dims / 16): accumulators of the warp's slice of O^T
    row_max: cute.Tensor  # (2, columns / 8): maxima, in log2 units
    row_sum: cute.Tensor  # (2, columns / 8): sums of weights of this lane's keys only


@cute.jit
def stream_keys(plan: PortablePlan, work: Stream, share: Share) -> Found:
    """Process all keys of this warp."""
    config, slots = plan.config, plan.slots
    tiles = config.columns // 8
    found = Found(
        cute.make_rmem_tensor((4, tiles, plan.dims // 16), Float32),
        cute.make_rmem_tensor((2, tiles), Float32),
        cute.make_rmem_tensor((2, tiles), Float32),
    )
    found.o.fill(0.0)
    found.row_max.fill(-Float32.inf)
    found.row_sum.fill(0.0)
    ready, rows = not (config.pdl and config.kv_ready), None
    if cutlass.const_expr(plan.scaled and ready):
        rows = load_rows(plan, work.place, work.tensors)
        factor = factor_of(config, work.place, work.tables, work.scalars)
        cute.arch.sync_warp()  # load here, not at the first use
    ahead = ((slots - 1) // 2, slots // 2)  # steps to the fetches of the loop: before and after S
    for unit in cutlass.range_constexpr(slots - 1):
        page = page_of(plan, work, share, Int32(unit // 2))
        fetch(plan, work, share, Int32(unit // 2), unit % 2, Int32(unit), page)
    page_before = page_of(plan, work, share, Int32(ahead[0]))
    page_behind = page_of(plan, work, share, Int32(ahead[1]))
    if cutlass.const_expr(not ready):
        cute.arch.griddepcontrol_wait()
    if cutlass.const_expr(not (plan.scaled and ready)):
        factor = factor_of(config, work.place, work.tables, work.scalars)
    if cutlass.const_expr(plan.scaled and not ready):
        rows = load_rows(plan, work.place, work.tensors)
    queries = fragments(plan, work.place, work.tensors, work.memory, rows, factor)
    slot = Int32(0)
    for step in cutlass.range(share.count, unroll=1):
        # K of this step has landed; the slot of the last V is free.
        cute.arch.cp_async_wait_group(slots - 2)
        cute.arch.sync_warp()
        index, free = (slots - 1) % 2, previous(plan, slot)
        fetch(plan, work, share, step + ahead[0], index, free, page_before)
        page_before = page_of(plan, work, share, step + ahead[0] + 1)
        scores = cute.make_rmem_tensor((4, tiles, plan.blocks), Float32)
        for block in cutlass.range_constexpr(plan.blocks):
            place = work.memory.ring + slot * plan.slot_bytes + block * plan.block_bytes
            score(plan, place, queries, scores[None, None, block])
        if cutlass.const_expr(plan.slices > 1):
            add_slices(plan, work.memory, step, scores)
        cute.arch.sync_warp()  # its slot is free
        fetch(plan, work, share, step + ahead[1], slots % 2, slot, page_behind)
        page_behind = page_of(plan, work, share, step + ahead[1] + 1)
        exponentiate(
            plan, work, share, first_key(plan, share, step), scores, queries.factors, found
        )
        cute.arch.cp_async_wait_group(slots - 1)
        cute.arch.sync_warp()
        slot = following(plan, slot)
        for block in cutlass.range_constexpr(plan.blocks):
            place = work.memory.ring + slot * plan.slot_bytes + block * plan.block_bytes
            accumulate(plan, place, scores[None, None, block], found.o)
        slot = following(plan, slot)
    return found


@cute.jit
def first_key(plan: PortablePlan, share: Share, step: Int32) -> Int32:
    """Return the first of this team's keys in its step-th tile."""
    team = team_of(plan)
    return tile_start(share, share.begin + step, plan.tile) + team * plan.keys


@cute.jit
def following(plan: PortablePlan, slot: Int32) -> Int32:
    return Int32(0) if slot == plan.slots - 1 else slot + 1


@cute.jit
def previous(plan: PortablePlan, slot: Int32) -> Int32:
    return Int32(plan.slots - 1) if slot == 0 else slot - 1


@cute.jit
def fetch(
    plan: PortablePlan,
    work: Stream,
    share: Share,
    step: Int32,
    index: cutlass.Constexpr,
    slot: Int32,
    page: Int32,
) -> None:
    """Begin to copy K or V of a step, as one group; zeros for keys that no row sees or past the
    end.

    Args:
        index: 0 for K, 1 for V.
        page: page of the first key, if a page holds all keys of a step.
    """
    if step < share.count:
        base = work.memory.ring + slot * plan.slot_bytes
        key = first_key(plan, share, step)
        chunks = plan.row_bytes // warp_mma.CHUNK_BYTES
        rows = 32 // chunks  # rows that a warp copies at a time
        lane = cute.arch.lane_idx()
        chunk, own_row = lane % chunks, lane // chunks
        small = not plan.page_holds_step  # a page for each row, not one for all
        line, stride = line_of(plan, work, index, key, page)
        source = line + Int64(own_row) * stride + Int64(chunk * warp_mma.CHUNK_BYTES)
        for part in cutlass.range_constexpr(plan.keys // rows):
            row = part * rows + own_row
            valid = any_row_sees(plan.config, share, key + row)
            if cutlass.const_expr(small):
                seen = key + row if valid else Int32(0)
                own_page = work.tables.pages[work.place.entry, seen // plan.config.page_size]
                source, _ = line_of(plan, work, index, seen, own_page)
                source += Int64(chunk * warp_mma.CHUNK_BYTES)
            warp_mma.copy_chunk(base + chunk_offset(plan, row, chunk), source, valid)
            source += rows * stride
    cute.arch.cp_async_commit_group()


@cute.jit
def page_of(plan: PortablePlan, work: Stream, share: Share, step: Int32) -> Int32:
    """Return the page that holds a step's keys, looked up a step before it is needed."""
    page, pages = Int32(0), work.tables.pages
    if cutlass.const_expr(pages is not None and plan.page_holds_step):
        if step < share.count:
            key = first_key(plan, share, step)
            if key < share.n_keys:
                page = pages[work.place.entry, key // plan.config.page_size]
    return page


@cute.jit
def line_of(
    plan: PortablePlan, work: Stream, index: cutlass.Constexpr, key: Int32, page: Int32
) -> tuple[Int64, Int64]:
    """Return (address of this slice of a key, bytes to the next key). index: 0 for K, 1 for V.

    page: page of the key. It may lie past the cache: keys that no row sees are not read.
    """
    memory = work.tensors.v if index else work.tensors.k
    entry, row = work.place.entry, key
    if cutlass.const_expr(plan.config.page_size > 0):
        entry, row = page, key % plan.config.page_size
    line = memory[entry, row, work.place.head, None].iterator.toint()
    if cutlass.const_expr(plan.slices > 1):
        line += Int64(slice_of(plan) * plan.row_bytes)
    return line, Int64(memory.stride[1]) * (memory.element_type.width // 8)


@cute.jit
def exponentiate(
    plan: PortablePlan,
    work: Stream,
    share: Share,
    key: Int32,
    scores: cute.Tensor,
    factors: cute.Tensor,
    found: Found,
) -> None:
    """Turn scores into weights, and rescale the statistics and O to the new maxima.

    key: first key of the step.
    """
    config, scalars = plan.config, work.scalars
    row_max, row_sum, o = found.row_max, found.row_sum, found.o
    lane = cute.arch.lane_idx()
    for tile in cutlass.range_constexpr(config.columns // 8):
        for column in cutlass.range_constexpr(2):
            row = work.place.row_tile * config.columns + tile * 8 + (lane % 4) * 2 + column
            token, factor = row // config.group, factors[column, tile]
            if cutlass.const_expr(config.tree):
                bits = branch_bits(config, share, token, key + lane // 4)
            for half in cutlass.range_constexpr(2 * plan.blocks):
                place = (column + 2 * (half % 2), tile, half // 2)
                sees = row_sees(config, share, key + lane // 4 + 8 * half, token, scalars.left)
                if cutlass.const_expr(config.tree):
                    sees = sees & Boolean(bits & Uint32(1 << 8 * half))
                value = scores[place]
                if cutlass.const_expr(config.softcap):
                    value = softcap_score(value, scalars.scale_log2, factor)
                else:
                    value = value * factor
                scores[place] = value if sees else -Float32.inf
            highest = row_max[column, tile]
            for block in cutlass.range_constexpr(plan.blocks):
                own = scores[column, tile, block], scores[column + 2, tile, block]
                highest = cute.arch.fmax(highest, cute.arch.fmax(own[0], own[1]))
            for distance in cutlass.range_constexpr(3):
                other = cute.arch.shuffle_sync_bfly(highest, offset=4 << distance)
                highest = cute.arch.fmax(highest, other)
            base = finite(highest)
            acc_scale = cute.math.exp2(row_max[column, tile] - base, fastmath=True)
            row_max[column, tile] = highest
            sums = row_sum[column, tile] * acc_scale
            for half in cutlass.range_constexpr(2 * plan.blocks):
                place = (column + 2 * (half % 2), tile, half // 2)
                weight = cute.math.exp2(scores[place] - base, fastmath=True)
                scores[place] = weight
                sums += weight
            row_sum[column, tile] = sums
            for step in cutlass.range_constexpr(plan.dims // 16):
                o[column, tile, step] *= acc_scale
                o[column + 2, tile, step] *= acc_scale
