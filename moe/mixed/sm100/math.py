"""Math role: warpgroups turn weights to bf16 in registers, and store them to tensor memory.

They wait for weights that have arrived and for room, and for nobody else: the tensor core follows
some stages behind.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from kernelkit.device import tmem
from kernelkit.device.pipelines import consumer_state, producer_state
from kernelkit.device.tmem import fragment_at, store_a
from kernelkit.plan import hw
from moe.mixed.config import HALVES, unit_columns
from moe.mixed.fragments import DEPTH, ELEMENT_BYTES, THREADS, WORDS
from moe.mixed.plan import TILE_STAGES
from moe.mixed.shared import dequantise
from moe.mixed.shared.args import Scope
from moe.mixed.sm100.plan import MixedPlan
from moe.sm100.roles.scheduler import read_tile

WORD_BYTES = 4 * WORDS


class Math:
    """Fills the stages of weights in tensor memory."""

    def __init__(self, plan: MixedPlan) -> None:
        self.plan = plan
        self.role = plan.roles["math"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        plan, pipes, units = self.plan, scope.pipes, scope.sizes.units
        team = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // hw.WARPGROUP_WARPS
        own_turn, team = team // plan.config.teams, team % plan.config.teams
        turn = Int32(0)
        tiles, state = consumer_state(TILE_STAGES), consumer_state(plan.stages)
        room = producer_state(plan.a_stages)
        steps = (units + plan.units - 1) // plan.units
        going = Int32(1)
        while going > 0:
            pipes.tile_math.wait(tiles)
            tile = read_tile(scope, tiles.index)
            pipes.tile_math.release(tiles.index)
            tiles.advance()
            going = tile.valid
            if going > 0:
                for step in cutlass.range(steps, unroll=1):
                    if turn == own_turn:
                        pipes.w.wait(state)
                        words = self.make_words(scope, team, state.index, 0)
                        pipes.a.wait_free(room)
                        tmem.order_after_wait()
                        self.store(scope, team, room.index, 0, words)
                        for unit in cutlass.range_constexpr(1, plan.units):
                            if step * plan.units + unit < units:
                                words = self.make_words(scope, team, state.index, unit)
                                self.store(scope, team, room.index, unit, words)
                        pipes.w.release(state.index)
                        tmem.wait_stores()
                        tmem.order_before_signal()
                        pipes.a.signal(room.index)
                    turn = (turn + 1) % plan.turns
                    state.advance()
                    room.advance()

    @cute.jit
    def make_words(
        self, scope: Scope, team: Int32, stage: Int32, unit: cutlass.Constexpr[int]
    ) -> list[cute.Tensor]:
        """A unit of K of the warpgroup's rows, as it goes to tensor memory: a fragment for each 64
        rows."""
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % THREADS
        first = scope.buffers.w.toint() + stage * plan.w_bytes
        pair_bytes = 2 * DEPTH // plan.config.format.block  # scale factors of two rows
        result = []
        for part in cutlass.range_constexpr(plan.config.parts):
            tall = team * plan.config.parts + part
            start = first + (tall * plan.units + unit) * plan.unit_bytes
            scales = start + ELEMENT_BYTES + thread // 4 * pair_bytes
            words = cute.make_rmem_tensor(4 * WORDS, Uint32)
            dequantise.make_words(plan.config, start + thread * WORD_BYTES, scales, words)
            result.append(words)
        return result

    @cute.jit
    def store(
        self,
        scope: Scope,
        team: Int32,
        stage: Int32,
        unit: cutlass.Constexpr[int],
        words: list[cute.Tensor],
    ) -> None:
        """Start to store a unit of K of the warpgroup's rows to a stage of tensor memory."""
        plan = self.plan
        for part in cutlass.range_constexpr(plan.config.parts):
            tall = team * plan.config.parts + part
            column = a_column(plan, stage, unit, tall // HALVES)
            store_a(words[part], fragment_at(scope.buffers.tmem, column, tall % HALVES))


def a_column(plan: MixedPlan, stage: Int32, unit: int, block: Int32) -> Int32:
    """Where a stage has a unit of K of 128 rows of weights."""
    inside = (unit * plan.blocks + block) * unit_columns(plan.config)
    return plan.tmem["a"].begin + stage * plan.a_columns + inside
