"""Q in bf16 as two tiles of e4m3, in its own place in shared memory: two lanes a row (device code).

Each lane has every other unit of the row, eight elements, and writes eight bytes of a unit of each
term.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from fmha.shared.lanes import Lane
from fmha.shared.split import anew, largest_of, place_of, power_of, two_terms
from fmha.sm90.plan import Plan90
from kernelkit.device.barriers import meet
from kernelkit.device.shared_words import load, store
from kernelkit.plan import hw

LANES = 2  # that share a row
UNIT = hw.SMEM_UNIT_BYTES
WORDS = UNIT // 4


@cute.jit
def split_q(plan: Plan90, lane: Lane, buffer: cute.Pointer) -> tuple[Float32, Float32]:
    """The warpgroup's query tile in `buffer` as two terms, the larger one first; returns what
    scores of this thread's two rows are to be multiplied by."""
    layout, head_dim, rows = plan.layout, plan.config.head_dim, plan.layout.rows
    start, own = buffer.toint() + lane.tile * layout.q_bytes, anew(cute.arch.lane_idx())
    row, half = lane.warp * 16 + own // LANES, own % LANES
    units = head_dim * plan.config.q_item_bytes // UNIT // LANES
    words = cute.make_rmem_tensor(units * WORDS, Uint32)
    line = layout.panel(head_dim, plan.config.q_item_bytes) * plan.config.q_item_bytes
    for unit in cutlass.range_constexpr(units):
        place = place_of(line, rows, row, LANES * unit) ^ half * UNIT
        found = load(start + place, Uint32, WORDS)
        for word in cutlass.range_constexpr(WORDS):
            words[unit * WORDS + word] = found[word]
    if cutlass.const_expr(layout.q_rows < rows):
        if row >= layout.q_rows:  # they hold anything
            words.fill(0)
    largest = largest_of(words)
    largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, offset=1))
    factor, power = power_of(largest)
    meet(plan.barriers, "warpgroup", lane.team)  # all of Q is in registers
    for unit in cutlass.range_constexpr(units):
        terms = two_terms(tuple(words[unit * WORDS + word] for word in range(WORDS)), factor)
        place = start + place_of(layout.panel(head_dim), rows, row, unit) + half * (UNIT // LANES)
        store(place, Uint32, terms[:2])
        store(place + rows * head_dim, Uint32, terms[2:])
    cute.arch.fence_proxy("async.shared", space="cta")
    meet(plan.barriers, "warpgroup", lane.team)
    source = own // 4 * LANES  # a lane that read the row
    return (
        cute.arch.shuffle_sync(power, source),
        cute.arch.shuffle_sync(power, source + 8 * LANES),
    )
