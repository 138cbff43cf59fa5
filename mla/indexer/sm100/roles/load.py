"""Load role: one warp fetches the queries, and then keys, a tile at a time, by TMA."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8

from kernelkit.device.boxes import BoxPosition, copy_in
from kernelkit.device.pipelines import producer_state
from mla.indexer.scores_device import run_from
from mla.indexer.sm100.args import Scope, key_box, query_box
from mla.indexer.sm100.plan import ROLES, STAGES, ScoresPlan
from mla.indexer.sm100.roles.places import BoxPlace, look_up, tiles_of, visits, visits_left


class Load:
    """Fills the ring. Tokens behind the last one, and boxes of no slot, arrive as zeros."""

    def __init__(self, plan: ScoresPlan) -> None:
        self.plan = plan
        self.role = ROLES["load"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        plan, share = self.plan, scope.share
        self.fetch_queries(scope)
        state = producer_state(STAGES)
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
        """Of all tokens of the CTA."""
        box, q = query_box(self.plan), scope.pipes.q
        buffer = cute.recast_ptr(scope.buffers.q, dtype=Uint8)
        q.signal(0)
        for token in cutlass.range_constexpr(self.plan.config.tokens):
            place = BoxPosition(0, 0, 0, scope.share.first + token)
            copy_in(scope.operands.q, box, place, box.at(buffer, token), q.barrier(0))

    @cute.jit
    def fetch(self, scope: Scope, place: BoxPlace, visit: Int32, stage: Int32) -> None:
        """The tile of a visit. place: of the lane's box."""
        box, boxes = key_box(self.plan), self.plan.config.boxes
        buffer = cute.recast_ptr(scope.buffers.keys, dtype=Uint8)
        barrier = scope.pipes.keys.barrier(stage)
        for index in cutlass.range_constexpr(boxes):
            slot = cute.arch.shuffle_sync(place.slot, visit * boxes + index)
            row = cute.arch.shuffle_sync(place.row, visit * boxes + index)
            target = box.at(buffer, stage * boxes + index)
            position = BoxPosition(row, 0, 0, slot)
            copy_in(scope.operands.keys, box, position, target, barrier)
