"""What sums become on their way out: factor, bias, SwiGLU, rounding, rows of the output (device).

In an accumulator element c + 2 h + 4 j of a thread is row g + 8 h of its warp's sixteen rows of
weights, and row 8 j + 2 t + c of x. Rows of weights are columns of the output, so that it goes
through shared memory transposed, some rows at a time.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernelkit import hw
from kernelkit.shared_words import load
from kernelkit.warp_mma import pack, store_transposed
from moe.device.swiglu import gate_weight, weighted_up
from moe.mixed.config import ROWS
from moe.mixed.fragments import THREADS
from moe.mixed.sm90.args import Scope
from moe.mixed.sm90.plan import CHUNK, STORE_BARRIER, MixedPlan
from moe.sm100.args import Tile

UNIT = hw.SMEM_UNIT_BYTES


@cute.jit
def store(
    plan: cutlass.Constexpr[MixedPlan],
    scope: Scope,
    tile: Tile,
    team: Int32,
    sums: list[cute.Tensor],
) -> None:
    """A warpgroup's columns of a tile to global memory."""
    config = plan.config
    rows = min(CHUNK, config.tile_rows)
    factor = scope.tensors.factor[tile.expert]
    biases = own_biases(plan, scope, tile, team)
    meet(team)  # the rows of the tile before have been read
    for chunk in cutlass.range_constexpr(config.tile_rows // rows):
        if chunk * rows < tile.rows:
            buffer = scope.buffers.out.toint() + (team * 2 + chunk % 2) * plan.out_bytes
            put(plan, scope, chunk, buffer, sums, factor, biases)
            meet(team)
            take(plan, scope, tile, team, chunk, buffer)


@cute.jit
def meet(team: Int32) -> None:
    """All threads of the warpgroup."""
    cute.arch.barrier(barrier_id=STORE_BARRIER + team, number_of_threads=THREADS)


@cute.jit
def own_biases(
    plan: cutlass.Constexpr[MixedPlan], scope: Scope, tile: Tile, team: Int32
) -> list[tuple[Float32, Float32]]:
    """Of a thread's two rows of weights of each part, 0 where there are none."""
    thread, _, _ = cute.arch.thread_idx()
    lane_row = thread % THREADS // hw.WARP_THREADS * 16 + thread % hw.WARP_THREADS // 4
    result = []
    for part in cutlass.range_constexpr(plan.config.parts):
        pair = (Float32(0.0), Float32(0.0))
        if cutlass.const_expr(plan.config.bias):
            bias = scope.tensors.bias
            first = tile.n * plan.config.tile_n + (team * plan.config.parts + part) * ROWS
            found = []
            for half in cutlass.range_constexpr(2):
                row = first + lane_row + 8 * half
                value = Float32(0.0)
                if row < cute.size(bias, mode=[1]):
                    value = bias[tile.expert, row]
                found.append(value)
            pair = tuple(found)
        result.append(pair)
    return result


@cute.jit
def put(
    plan: cutlass.Constexpr[MixedPlan],
    scope: Scope,
    chunk: cutlass.Constexpr,
    buffer: Int32,
    sums: list[cute.Tensor],
    factor: Float32,
    biases: list[tuple[Float32, Float32]],
) -> None:
    """A chunk of rows of the output, this warp's columns of it, to shared memory."""
    config = plan.config
    blocks = min(CHUNK, config.tile_rows) // 8
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = thread % THREADS // hw.WARP_THREADS, thread % hw.WARP_THREADS
    halves = 1 if config.swiglu else 2
    for part in cutlass.range_constexpr(config.parts):
        words = [[], []]
        for block in cutlass.range_constexpr(blocks):
            first = 4 * (chunk * blocks + block)
            every = []
            for half in cutlass.range_constexpr(2):
                for token in cutlass.range_constexpr(2):
                    value = sums[part][first + 2 * half + token] * factor
                    if cutlass.const_expr(config.bias):
                        value += biases[part][half]
                    every.append(value)
            if cutlass.const_expr(config.swiglu):
                numbers = scope.numbers
                every = [
                    weighted_up(
                        config, numbers, every[2 + k], gate_weight(config, numbers, every[k])
                    )
                    for k in range(2)
                ]
            for half in cutlass.range_constexpr(halves):
                words[half].append(pack(every[2 * half], every[2 * half + 1], config.out))
        for half in cutlass.range_constexpr(halves):
            unit = (part * 4 + warp) * halves + half
            place = buffer + placed(plan, lane % (8 * blocks), unit)
            store_transposed(place, tuple(words[half]))


@cute.jit
def take(
    plan: cutlass.Constexpr[MixedPlan],
    scope: Scope,
    tile: Tile,
    team: Int32,
    chunk: cutlass.Constexpr,
    buffer: Int32,
) -> None:
    """A chunk of rows from shared to global memory, 16 bytes a thread."""
    config, out = plan.config, scope.tensors.out
    rows, units = min(CHUNK, config.tile_rows), plan.outputs * 2 // UNIT
    thread, _, _ = cute.arch.thread_idx()
    thread = thread % THREADS
    column = tile.n * config.tile_outputs + team * plan.outputs + thread % units * 8
    for first in cutlass.range_constexpr(0, rows, THREADS // units):
        line = first + thread // units
        row = chunk * rows + line
        if (line < rows) & (row < tile.rows) & (column < cute.size(out, mode=[1])):
            moved = cute.make_rmem_tensor(4, Uint32)
            words = load(buffer + placed(plan, line, thread % units), Uint32, 4)
            for word in cutlass.range_constexpr(4):
                moved[word] = words[word]
            start = cute.recast_ptr(
                (out[tile.first + row, None].iterator + column).align(UNIT), dtype=Uint32
            )
            cute.autovec_copy(moved, cute.make_tensor(start, cute.make_layout(4)))


@cute.jit
def placed(plan: cutlass.Constexpr[MixedPlan], row: Int32, unit: Int32) -> Int32:
    """Byte of 16 of a row: eight lanes that move neighbouring rows meet all banks."""
    line = plan.outputs * 2
    turned = row * line // hw.SMEM_LINE_BYTES % min(8, line // UNIT)
    return row * line + (unit ^ turned) * UNIT
