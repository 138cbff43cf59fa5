"""Load roles: one warp fetches queries and keys, another the scales of keys (device code).

TMA brings the queries once, and then keys, one tile at a time. Scales of keys are copied word by
word: lane l copies those of rows l, l + 32, l + 64 and l + 96 of a tile. It uses cp.async, because
it would have to wait for the result of a load. A box without a slot gets zeros, which are valid
scales.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint8
from cutlass.pipeline import PipelineState

from kernelkit.device.boxes import BoxPosition, copy_in
from kernelkit.device.pipelines import producer_state
from kernelkit.plan import hw
from kernelkit.plan.warps import Role
from mla.indexer.scores_config import KEYS
from mla.indexer.scores_device import run_from
from mla.indexer.shared.args import (
    BoxPlace,
    Scope,
    key_box,
    look_up,
    query_box,
    tiles_of,
    visits,
    visits_left,
)
from mla.indexer.shared.plan import SCALE_BYTES, STAGE_SCALE_BYTES, TiledPlan

QUARTERS = KEYS // hw.WARP_THREADS
NOWHERE = 0


class Scales:
    """Device code that fills the ring of scales.

    The copies themselves complete a barrier, so the warp does not wait for them.
    """

    def __init__(self, plan: TiledPlan, role: Role) -> None:
        self.plan = plan
        self.role = role

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Run the role."""
        plan, share, pipe = self.plan, scope.share, scope.pipes.scales
        state = producer_state(plan.stages)
        begin = Int32(0)
        while begin < plan.config.tokens:
            run = run_from(scope.buffers.spans, begin)
            begin = run.end
            step = visits(plan) * share.ctas
            for first in cutlass.range(share.cta, tiles_of(run), step, unroll=1):
                words = self.words_of(scope, look_up(plan, scope, run, first))
                for visit in cutlass.range(visits_left(plan, scope, run, first), unroll=1):
                    pipe.wait_free(state)
                    self.fetch(scope, words, visit, state)
                    cute.arch.cp_async_mbarrier_arrive_noinc(pipe.barrier(state.index))
                    state.advance()

    @cute.jit
    def words_of(self, scope: Scope, place: BoxPlace) -> Int64:
        """Return the address of the first word of the lane's box, or NOWHERE if it has no slot."""
        params = scope.params
        found = params.scales + Int64(place.slot) * params.slot_stride + place.row * SCALE_BYTES
        return found if place.slot >= 0 else Int64(NOWHERE)

    @cute.jit
    def fetch(self, scope: Scope, words: Int64, visit: Int32, state: PipelineState) -> None:
        """Start to copy the words of the tile of a visit.

        words: address of the lane's box.
        """
        config, lane = self.plan.config, cute.arch.lane_idx()
        step, quarter_step = self.plan.scale_steps
        target = scope.buffers.key_scales.toint() + state.index * STAGE_SCALE_BYTES
        target += lane * step
        for quarter in cutlass.range_constexpr(QUARTERS):
            begin = quarter * hw.WARP_THREADS
            if cutlass.const_expr(config.box >= hw.WARP_THREADS):
                box, row = begin // config.box, begin % config.box + lane
            else:
                box, row = begin // config.box + lane // config.box, lane % config.box
            first = cute.arch.shuffle_sync(words, visit * config.boxes + box)
            place = first + row * SCALE_BYTES
            copy_word(target + quarter * quarter_step, place, first != NOWHERE)


@cute.jit
def copy_word(target: Int32, source: Int64, valid: Boolean) -> None:
    """Copy 4 bytes from global to shared memory with cp.async; write zeros if not valid."""
    nbytes = Int32(SCALE_BYTES) if valid else Int32(0)
    cute.arch.inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};",
        read_only_args=[target, source, nbytes],
    )


class Load:
    """Device code that fills the ring of keys.

    Tokens after the last one, and boxes without a slot, arrive as zeros.
    """

    def __init__(self, plan: TiledPlan, role: Role) -> None:
        self.plan = plan
        self.role = role

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Run the role."""
        plan, share = self.plan, scope.share
        self.fetch_queries(scope)
        state = producer_state(plan.stages)
        begin = Int32(0)
        while begin < plan.config.tokens:
            run = run_from(scope.buffers.spans, begin)
            begin = run.end
            step = visits(plan) * share.ctas
            for first in cutlass.range(share.cta, tiles_of(run), step, unroll=1):
                place = look_up(plan, scope, run, first)
                for visit in cutlass.range(visits_left(plan, scope, run, first), unroll=1):
                    scope.pipes.keys.acquire(state)
                    self.fetch(scope, place, visit, state.index)
                    state.advance()

    @cute.jit
    def fetch_queries(self, scope: Scope) -> None:
        """Fetch the queries of all tokens of the CTA."""
        box, q = query_box(self.plan), scope.pipes.q
        buffer = cute.recast_ptr(scope.buffers.q, dtype=Uint8)
        q.signal(0)
        for token in cutlass.range_constexpr(self.plan.config.tokens):
            place = BoxPosition(0, 0, 0, scope.share.first + token)
            copy_in(scope.operands.q, box, place, box.at(buffer, token), q.barrier(0))

    @cute.jit
    def fetch(self, scope: Scope, place: BoxPlace, visit: Int32, stage: Int32) -> None:
        """Fetch the tile of a visit.

        place: place of the lane's box.
        """
        box, boxes = key_box(self.plan), self.plan.config.boxes
        buffer = cute.recast_ptr(scope.buffers.keys, dtype=Uint8)
        barrier = scope.pipes.keys.barrier(stage)
        for index in cutlass.range_constexpr(boxes):
            slot = cute.arch.shuffle_sync(place.slot, visit * boxes + index)
            row = cute.arch.shuffle_sync(place.row, visit * boxes + index)
            target = box.at(buffer, stage * boxes + index)
            position = BoxPosition(row, 0, 0, slot)
            copy_in(scope.operands.keys, box, position, target, barrier)
