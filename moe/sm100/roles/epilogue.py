"""Epilogue role: four warps, a row of the tile per thread: global scale, bias, SwiGLU, output.

One way: tensor memory to registers to global memory. A subtile holds whole pairs of gate and up and
whole blocks of a quantised output, so that nothing is carried from one to the next (unless few
columns are taken at a `turn`). Of a swapped tile a lane of tensor memory is a column of the
product: it goes through shared memory, and a thread then takes subtiles of rows, as otherwise.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernelkit.device import tmem
from kernelkit.device.dependent import follow
from kernelkit.device.pipelines import consumer_state
from kernelkit.plan import hw
from moe.config import CARRIED, PART
from moe.shared.quantise import largest_magnitude
from moe.shared.swiglu import gate_weight, swiglu, weighted_up
from moe.sm100.args import Scope, Tile
from moe.sm100.plan import LANES, PIECE_BYTES, ROLES, TILE_STAGES, GroupedPlan
from moe.sm100.roles.affine import Affine, OfColumn, affine_at, apply
from moe.sm100.roles.outputs import (
    Encoded,
    Place,
    first_byte,
    hand_over,
    quantised,
    reduce_amax,
    rounded,
    store_codes,
    store_row,
)
from moe.sm100.roles.scheduler import rank_in_tile, read_tile

TRANSPOSED_BARRIER = 1
BIASED = 16  # columns of gate, then of up, at most, where biases are in registers as well
AT_ONCE = 32  # outputs that a thread stores then: a block of any format
READ_COLUMNS = 32  # of a swapped accumulator, that a thread has in registers at a time


class Epilogue:
    """Empties the accumulators."""

    def __init__(self, plan: GroupedPlan) -> None:
        self.plan = plan
        self.role = ROLES["epilogue"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        pipes, plan = scope.pipes, self.plan
        if cutlass.const_expr(plan.config.w_ready):
            follow()  # who writes over what the kernel in front has read waits as well
        tiles, acc = consumer_state(TILE_STAGES), consumer_state(plan.acc_stages)
        half, top = Int32(0), Float32(0.0)  # of the accumulators; largest magnitude
        going = Int32(1)
        while going > 0:
            pipes.tile_epilogue.wait(tiles)
            tile = read_tile(scope, tiles.index)
            pipes.tile_epilogue.release(tiles.index)
            tiles.advance()
            going = tile.valid
            if going > 0:
                of_column = self.of_column(scope, tile)  # meanwhile, what comes from far
                pipes.acc.wait(acc)
                tmem.order_after_wait()
                if cutlass.const_expr(plan.config.swapped):
                    found = self.do_swapped(scope, tile, half, acc.index, of_column)
                else:
                    found = self.do_tile(scope, tile, half, acc.index)
                top = cute.arch.fmax(top, found, nan=True)
                acc.advance()
                half = 1 - half
        if cutlass.const_expr(plan.config.amax):
            reduce_amax(scope.tensors.amax, top)

    @cute.jit
    def do_tile(self, scope: Scope, tile: Tile, half: Int32, stage: Int32) -> Float32:
        """A row a thread, all columns; the largest magnitude, where somebody asks."""
        plan, config = self.plan, self.plan.config
        thread, _, _ = cute.arch.thread_idx()
        rank = rank_in_tile(plan)
        place = Place(
            tile.first + rank * LANES + thread,
            tile.first + tile.rows,
            tile.block + rank,
            thread,
            tile.n * config.tile_outputs,
        )
        affine = self.affine(scope, tile, place)
        top = Float32(0.0)
        for index in cutlass.range_constexpr(plan.parts):
            # Columns that both accumulators have come first.
            part = index if half == 1 else plan.parts - 1 - index
            column, frees = half * plan.second + part * PART, index == self.frees
            outputs = place.moved(part * (PART // config.inputs_of_output))
            found = self.do_part(scope, outputs, column, stage, frees, affine.moved(part * PART))
            top = cute.arch.fmax(top, found, nan=True)
        return top

    @property
    def frees(self) -> int:
        """The part of an accumulator behind which it is free."""
        return 0 if self.plan.shares_columns else self.plan.parts - 1

    @cute.jit
    def do_part(
        self,
        scope: Scope,
        place: Place,
        column: Int32,
        stage: Int32,
        frees: cutlass.Constexpr[bool],
        affine: Affine,
    ) -> Float32:
        """Columns of a thread's row, from `column` of the accumulator on. frees: whether `stage`
        of the accumulator is free behind them."""
        config = self.plan.config
        row, count = self.room(PART), PART // config.inputs_of_output // self.outputs
        top = Float32(0.0)
        for subtile in cutlass.range_constexpr(count):
            if cutlass.const_expr(self.turn > 0):
                values = self.carried(scope, column, subtile * self.outputs, affine)
            else:
                first = subtile * config.subtile
                values = self.decoded(scope, column, first, config.subtile, affine)
                values = self.activated(scope, values)
            if cutlass.const_expr(frees and subtile == count - 1):
                tmem.order_before_signal()
                scope.pipes.acc.release(stage)
            top = cute.arch.fmax(top, self.magnitude(place, values), nan=True)
            self.encode(scope, values, row.share(subtile, count))
            for piece in row.completed(subtile, count):
                self.hand_over(scope, place, row, piece)
        if cutlass.const_expr(config.out_format is not None):
            store_codes(config, scope.tensors, place, row.codes)
        return top

    @cute.jit
    def do_swapped(
        self, scope: Scope, tile: Tile, half: Int32, stage: Int32, of_column: OfColumn
    ) -> Float32:
        """A subtile of a row a thread, or several."""
        plan, config = self.plan, self.plan.config
        self.transpose(scope, half * plan.second, stage, of_column)
        thread, _, _ = cute.arch.thread_idx()
        parts = config.tile_n // config.subtile
        top = Float32(0.0)
        for turn in cutlass.range_constexpr(-(-plan.n * parts // LANES)):
            item = turn * LANES + thread
            row, part = item % plan.n, cutlass.min(item // plan.n, parts - 1)
            place = Place(
                tile.first + row,
                tile.first + tile.rows if item < plan.n * parts else Int32(0),
                tile.block,
                tile.quarter * hw.WARP_THREADS + row,
                tile.n * config.tile_outputs + part * config.subtile_outputs,
            )
            values = cute.make_rmem_tensor(config.subtile, Float32)
            source = scope.buffers.transposed[row, None].iterator + part * config.subtile
            cute.autovec_copy(cute.make_tensor(source.align(16), values.layout), values)
            if cutlass.const_expr(not self.by_column):
                apply(config, self.affine(scope, tile, place), values, 0)
            values = self.activated(scope, values)
            top = cute.arch.fmax(top, self.magnitude(place, values), nan=True)
            room = self.room(config.subtile)
            self.encode(scope, values, room)
            store_row(scope.tensors, place, first_byte(config, place), room.words)
            if cutlass.const_expr(config.out_format is not None):
                store_codes(config, scope.tensors, place, room.codes)
        return top

    @cute.jit
    def transpose(self, scope: Scope, column: Int32, stage: Int32, of_column: OfColumn) -> None:
        """The accumulator to shared memory, whose reader of the tile before is done."""
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.barrier(barrier_id=TRANSPOSED_BARRIER, number_of_threads=self.role.threads)
        count = min(plan.n, READ_COLUMNS)
        for first in cutlass.range_constexpr(0, plan.n, count):
            values = self.columns(scope, column + first, count)
            for index in cutlass.range_constexpr(count):
                value = values[index]
                if cutlass.const_expr(self.by_column):
                    value = value * of_column.factor + of_column.bias
                scope.buffers.transposed[first + index, thread] = value
        tmem.order_before_signal()
        scope.pipes.acc.release(stage)
        cute.arch.barrier(barrier_id=TRANSPOSED_BARRIER, number_of_threads=self.role.threads)

    @cute.jit
    def columns(self, scope: Scope, first: Int32, count: cutlass.Constexpr) -> cute.Tensor:
        """Of the thread's lane of tensor memory, fp32 (count,)."""
        thread, _, _ = cute.arch.thread_idx()
        values = cute.make_rmem_tensor(count, Float32)
        tmem.load_row(tmem.tile_at(scope.buffers.tmem, first, count), values, thread)
        tmem.wait_loads()
        return values

    @cute.jit
    def decoded(
        self,
        scope: Scope,
        column: Int32,
        first: cutlass.Constexpr,
        count: cutlass.Constexpr,
        affine: Affine,
    ) -> cute.Tensor:
        """The same with the global scale and the bias. first: beyond `column` and `affine`."""
        values = self.columns(scope, column + first, count)
        apply(self.plan.config, affine, values, first)
        return values

    @cute.jit
    def activated(self, scope: Scope, values: cute.Tensor) -> cute.Tensor:
        """The output that they become."""
        if cutlass.const_expr(self.plan.config.swiglu):
            values = swiglu(self.plan.config, scope.numbers, values)
        return values

    @property
    def turn(self) -> int:
        """Columns of gate, then of up, that `carried` takes at a time; 0: a whole subtile."""
        config = self.plan.config
        if config.carry:
            return CARRIED
        return BIASED if config.bias and config.granularity > BIASED else 0

    @property
    def outputs(self) -> int:
        """Of a thread, that it stores at a time: whole blocks."""
        outputs = self.plan.config.subtile_outputs
        return min(outputs, AT_ONCE) if self.turn else outputs

    @cute.jit
    def carried(
        self, scope: Scope, column: Int32, first: cutlass.Constexpr, affine: Affine
    ) -> cute.Tensor:
        """Outputs from the `first` one on, few at a time: up finds what gate left behind."""
        config, numbers, turn = self.plan.config, scope.numbers, self.turn
        weights = cute.make_rmem_tensor(turn, Float32)
        result = cute.make_rmem_tensor(self.outputs, Float32)
        for begin in cutlass.range_constexpr(0, self.outputs, turn):
            at = (first + begin) // config.granularity * config.granularity + first + begin
            gate = self.decoded(scope, column, at, turn, affine)
            for index in cutlass.range_constexpr(turn):
                weights[index] = gate_weight(config, numbers, gate[index])
            up = self.decoded(scope, column, at + config.granularity, turn, affine)
            for index in cutlass.range_constexpr(turn):
                value = weighted_up(config, numbers, up[index], weights[index])
                result[begin + index] = value
        return result

    def room(self, columns: int) -> Encoded:
        """For the output that so many columns of the product become."""
        config, form = self.plan.config, self.plan.config.out_format
        outputs = columns // config.inputs_of_output
        words = cute.make_rmem_tensor(outputs * config.output_bits // 32, Uint32)
        codes = cute.make_rmem_tensor(outputs // form.block, Uint32) if form else None
        return Encoded(words, codes)

    @cute.jit
    def encode(self, scope: Scope, values: cute.Tensor, room: Encoded) -> None:
        """Outputs as they are stored."""
        config = self.plan.config
        if cutlass.const_expr(config.out_format is None):
            room.words.store(rounded(config, values).load())
        else:
            room.words.store(quantised(config, scope.tensors, values, room.codes).load())

    @cute.jit
    def hand_over(self, scope: Scope, place: Place, row: Encoded, piece: cutlass.Constexpr) -> None:
        """A piece of the thread's row, by its warp."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        buffer = scope.buffers.pieces + warp * (hw.WARP_THREADS * PIECE_BYTES)
        first = first_byte(self.plan.config, place) + piece * PIECE_BYTES
        hand_over(scope.tensors, place, first, row.piece(piece), buffer)

    @cute.jit
    def magnitude(self, place: Place, values: cute.Tensor) -> Float32:
        """The largest of a row that exists, where somebody asks."""
        top = Float32(0.0)
        if cutlass.const_expr(self.plan.config.amax):
            top = largest_magnitude(values) if place.exists else top
        return top

    @property
    def by_column(self) -> bool:
        """Whether a thread has the factor and the bias of its column of a swapped tile."""
        return self.plan.config.swapped and not self.plan.config.row_scale

    @cute.jit
    def of_column(self, scope: Scope, tile: Tile) -> OfColumn:
        """Of the thread's column of a swapped tile."""
        tensors, config = scope.tensors, self.plan.config
        factor, bias = Float32(1.0), Float32(0.0)
        thread, _, _ = cute.arch.thread_idx()
        if cutlass.const_expr(self.by_column and config.format.has_global):
            factor = tensors.x_scale[0] * self.w_scale(scope, tile, thread)
        if cutlass.const_expr(self.by_column and config.bias):
            column = tile.n * config.tile_n + thread
            if column < cute.size(tensors.bias, mode=[1]):
                bias = tensors.bias[tile.expert, column]
        return OfColumn(factor, bias)

    @cute.jit
    def affine(self, scope: Scope, tile: Tile, place: Place) -> Affine:
        """What becomes of products of the row, before anything that is not linear."""
        tensors, config = scope.tensors, self.plan.config
        affine = Affine(Float32(1.0))
        if cutlass.const_expr(config.format.has_global):
            index = Int32(0)
            if cutlass.const_expr(config.row_scale):
                index = place.row if place.exists else Int32(0)
            x_scale, up = tensors.x_scale[index], None
            if cutlass.const_expr(config.pair_scale):
                up = x_scale * self.w_scale(scope, tile, Int32(config.granularity))
            affine = Affine(x_scale * self.w_scale(scope, tile, Int32(0)), up)
        if cutlass.const_expr(not config.bias):
            return affine
        column = place.column * config.inputs_of_output
        return affine_at(affine, tensors.bias[tile.expert, None], column)

    @cute.jit
    def w_scale(self, scope: Scope, tile: Tile, column: Int32) -> Float32:
        """Of the expert, of a column of the tile."""
        config, scale = self.plan.config, scope.tensors.w_scale
        if cutlass.const_expr(config.pair_scale):
            return scale[tile.expert, column // config.granularity % 2]
        return scale[tile.expert]
