"""The warps of a CTA add up what they found, and send it to the owners (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from gqa_lowlatency.portable.plan import PAD, PortablePlan
from gqa_lowlatency.portable.products import dims_of
from gqa_lowlatency.portable.stream import Found
from gqa_lowlatency.shared import mailbox
from kernelkit.device.online_softmax import finite
from kernelkit.device.shared_words import load, store


@cute.jit
def leave_partial(plan: PortablePlan, ring: Int32, found: Found) -> None:
    """Over the warp's own ring: its slice of O [column][dims + PAD], then (maximum, sum) of each
    column.
    """
    config = plan.config
    lane = cute.arch.lane_idx()
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_warp()
    line = (plan.dims + PAD) * 4
    statistics = ring + config.columns * line
    for tile in cutlass.range_constexpr(config.columns // 8):
        for column in cutlass.range_constexpr(2):
            place = tile * 8 + (lane % 4) * 2 + column
            total = found.row_sum[column, tile]
            for distance in cutlass.range_constexpr(3):
                total += cute.arch.shuffle_sync_bfly(total, offset=4 << distance)
            if lane < 4:
                store(statistics + place * 8, Float32, (found.row_max[column, tile],))
                store(statistics + place * 8 + 4, Float32, (total,))
            for step in cutlass.range_constexpr(plan.dims // 16):
                values = (found.o[column, tile, step], found.o[column + 2, tile, step])
                address = ring + place * line + dims_of(config, step, 0) * 4
                if cutlass.const_expr(config.keys_dtype == "e4m3"):  # neighbours
                    store(address, Float32, values)
                else:
                    store(address, Float32, values[:1])
                    store(ring + place * line + dims_of(config, step, 1) * 4, Float32, values[1:])


@cute.jit
def send_sum(plan: PortablePlan, smem: Int32, box: mailbox.Mailbox, rank: Int32) -> None:
    """Add the partial results in the order of teams; four elements of O a thread and turn."""
    config = plan.config
    thread, _, _ = cute.arch.thread_idx()
    line = (plan.dims + PAD) * 4
    vectors = config.head_dim // mailbox.VECTOR
    for turn in cutlass.range_constexpr(-(-config.columns * vectors // plan.threads)):
        item = thread + turn * plan.threads
        if item < config.columns * vectors:
            column, dim = item // vectors, (item % vectors) * mailbox.VECTOR
            if cutlass.const_expr(plan.slices > 1):  # the ring of the slice that holds `dim`
                first, dim_there = smem + dim // plan.dims * plan.ring_bytes, dim % plan.dims
            else:
                first, dim_there = smem, dim
            team_bytes = plan.slices * plan.ring_bytes
            tops = [
                load(first + team * team_bytes + config.columns * line + column * 8, Float32)
                for team in range(plan.teams)
            ]
            top = tops[0]
            for team in cutlass.range_constexpr(1, plan.teams):
                top = cute.arch.fmax(top, tops[team])
            base = finite(top)
            total = Float32(0.0)
            acc = cute.make_rmem_tensor(mailbox.VECTOR, Float32)
            acc.fill(0.0)
            for team in cutlass.range_constexpr(plan.teams):
                ring = first + team * team_bytes
                weight = cute.math.exp2(tops[team] - base, fastmath=True)
                total += weight * load(ring + config.columns * line + column * 8 + 4, Float32)
                values = load(ring + column * line + dim_there * 4, Float32, mailbox.VECTOR)
                for k in cutlass.range_constexpr(mailbox.VECTOR):
                    acc[k] += weight * values[k]
            values = tuple(acc[k] for k in range(mailbox.VECTOR))
            mailbox.send_o(config, box, rank, column, dim, values)
            if item % vectors == 0:
                found = mailbox.Statistics(top, total)
                mailbox.send_statistics(config, box, rank, column, found)
