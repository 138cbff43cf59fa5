"""Conversion of sums to outputs: factor, bias, SwiGLU, rounding, rows of the output (device).

Element c + 2 h + 4 j of a thread's fragment of sums:

    row g + 8 h of its warp's sixteen rows of weights
    row 8 j + 2 t + c of x

Rows of weights are columns of the output. So the output goes through shared memory transposed, some
rows at a time.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from kernelkit.device.shared_words import load
from kernelkit.device.warp_mma import pack, store_transposed
from kernelkit.plan import hw
from moe.mixed.config import ROWS
from moe.mixed.fragments import THREADS
from moe.mixed.plan import CHUNK, STORE_BARRIER, ProductPlan
from moe.mixed.shared.args import Scope
from moe.shared.swiglu import gate_weight, weighted_up
from moe.sm100.args import Tile

UNIT = hw.SMEM_UNIT_BYTES


@cute.jit
def meet(team: Int32) -> None:
    """Synchronise all threads of the warpgroup."""
    cute.arch.barrier(barrier_id=STORE_BARRIER + team, number_of_threads=THREADS)


@dataclass(frozen=True)
class OwnRows:
    """Factors and biases of a thread's two rows of weights of each part."""

    factors: list[tuple[Float32, Float32]]  # factors of the sums
    biases: list[tuple[Float32, Float32]]  # numbers added to them
    out_scale: Float32  # factor of all outputs before they are rounded to e4m3


@cute.jit
def own_rows(
    plan: cutlass.Constexpr[ProductPlan], scope: Scope, tile: Tile, team: Int32
) -> OwnRows:
    """Read those of a tile; 0 if there is no such row."""
    config, tensors = plan.config, scope.tensors
    if cutlass.const_expr(config.x == "e4m3"):
        factors = of_rows(plan, tensors.factor, tile, team)
        if cutlass.const_expr(not config.row_scale):
            scale = tensors.x_scale[0]
            factors = [(first * scale, second * scale) for first, second in factors]
    elif cutlass.const_expr(config.pair_factor):
        factors = [(tensors.factor[tile.expert, 0], tensors.factor[tile.expert, 1])] * plan.parts
    else:
        factor = tensors.factor[tile.expert]
        factors = [(factor, factor)] * plan.parts
    biases = [(Float32(0.0), Float32(0.0))] * plan.parts
    if cutlass.const_expr(config.bias):
        biases = of_rows(plan, tensors.bias, tile, team)
    out_scale = Float32(1.0)
    if cutlass.const_expr(config.out == "e4m3"):
        out_scale = tensors.out_scale[0]
    return OwnRows(factors, biases, out_scale)


@cute.jit
def of_rows(
    plan: cutlass.Constexpr[ProductPlan], table: cute.Tensor, tile: Tile, team: Int32
) -> list[tuple[Float32, Float32]]:
    """Read a thread's rows from fp32 [E, rows of weights]; 0 past the last row."""
    thread, _, _ = cute.arch.thread_idx()
    lane_row = thread % THREADS // hw.WARP_THREADS * 16 + thread % hw.WARP_THREADS // 4
    result = []
    for part in cutlass.range_constexpr(plan.parts):
        first = tile.n * plan.config.tile_n + (team * plan.parts + part) * ROWS
        found = []
        for half in cutlass.range_constexpr(2):
            row = first + lane_row + 8 * half
            value = Float32(0.0)
            if row < cute.size(table, mode=[1]):
                value = table[tile.expert, row]
            found.append(value)
        result.append(tuple(found))
    return result


@cute.jit
def put(
    plan: cutlass.Constexpr[ProductPlan],
    scope: Scope,
    team: Int32,
    chunk: cutlass.Constexpr,
    buffer: Int32,
    sums: list[cute.Tensor],
    own: OwnRows,
    first: cutlass.Constexpr = 0,
) -> None:
    """Write this warp's columns of a chunk of output rows to shared memory. sums: of these rows,
    one fragment for each 64 rows of weights, beginning with the warpgroup's `first`."""
    config = plan.config
    blocks = min(CHUNK, config.tile_rows) // 8
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = thread % THREADS // hw.WARP_THREADS, thread % hw.WARP_THREADS
    halves = 1 if config.swiglu else 2
    for part in cutlass.range_constexpr(first, first + len(sums)):
        words = [[], []]
        for block in cutlass.range_constexpr(blocks):
            number = chunk * blocks + block
            own_sums = cute.make_tensor(
                sums[part - first].iterator + 4 * block, cute.make_layout(4)
            )
            every = outputs_of(plan, scope, team, number, own_sums, own, part)
            for half in cutlass.range_constexpr(halves):
                pair = every[2 * half], every[2 * half + 1]
                unit = (part * 4 + warp) * halves + half
                if cutlass.const_expr(config.out == "e4m3"):
                    put_e4m3(plan, buffer, block, unit, pair)
                else:
                    words[half].append(pack(*pair, config.out))
        for half in cutlass.range_constexpr(halves if config.out != "e4m3" else 0):
            unit = (part * 4 + warp) * halves + half
            place = buffer + placed(plan, lane % (8 * blocks), unit)
            store_transposed(place, tuple(words[half]))


@cute.jit
def outputs_of(
    plan: cutlass.Constexpr[ProductPlan],
    scope: Scope,
    team: Int32,
    block: cutlass.Constexpr,
    sums: cute.Tensor,
    own: OwnRows,
    part: cutlass.Constexpr,
) -> list[Float32]:
    """Return the outputs of the sums of `block`, eight rows of x, of the tile.

    They are of two rows of x and the thread's first row of weights, then its second one. With
    SwiGLU, both rows of weights are a pair with one output.
    """
    config, numbers = plan.config, scope.numbers
    scales = (Float32(1.0), Float32(1.0))
    if cutlass.const_expr(config.row_scale):
        lane = cute.arch.lane_idx()
        place = team * config.tile_rows + 8 * block + lane % 4 * 2
        scales = load(scope.buffers.scales.toint() + 4 * place, Float32, 2)
    every = []
    for half in cutlass.range_constexpr(2):
        for token in cutlass.range_constexpr(2):
            value = sums[2 * half + token] * own.factors[part][half]
            if cutlass.const_expr(config.row_scale):
                value *= scales[token]
            if cutlass.const_expr(config.bias):
                value += own.biases[part][half]
            every.append(value)
    if cutlass.const_expr(config.swiglu):
        weights = [gate_weight(config, numbers, every[k]) for k in range(2)]
        every = [weighted_up(config, numbers, every[2 + k], weights[k]) for k in range(2)]
    if cutlass.const_expr(config.out == "e4m3"):
        every = [value * own.out_scale for value in every]
    return every


@cute.jit
def put_e4m3(
    plan: cutlass.Constexpr[ProductPlan],
    buffer: Int32,
    block: cutlass.Constexpr,
    unit: Int32,
    pair: tuple[Float32, Float32],
) -> None:
    """Write outputs of two rows of x to shared memory. Lanes with neighbouring columns exchange
    values, so that each has two columns of one row. unit: index of the eight columns."""
    lane = cute.arch.lane_idx()
    column, is_odd = lane // 4, Boolean(lane // 4 % 2)
    sent = pair[0] if is_odd else pair[1]
    found = cute.arch.shuffle_sync_bfly(sent, offset=4)
    low = found if is_odd else pair[0]
    high = pair[1] if is_odd else found
    row = 8 * block + lane % 4 * 2 + column % 2
    byte = unit * 8 + column // 2 * 2
    cute.arch.inline_ptx(
        "{ .reg .b16 both; cvt.rn.satfinite.e4m3x2.f32 both, {$r2}, {$r1}; "
        "st.shared.b16 [{$r0}], both; }",
        read_only_args=[buffer + placed(plan, row, byte // UNIT) + byte % UNIT, low, high],
    )


@cute.jit
def take(
    plan: cutlass.Constexpr[ProductPlan],
    scope: Scope,
    tile: Tile,
    team: Int32,
    chunk: cutlass.Constexpr,
    buffer: Int32,
) -> None:
    """Copy a chunk of rows from shared to global memory, 16 bytes a thread."""
    config, out = plan.config, scope.tensors.out
    rows, units = min(CHUNK, config.tile_rows), plan.out_line // UNIT
    columns = plan.outputs // units  # units of a thread
    thread, _, _ = cute.arch.thread_idx()
    thread = thread % THREADS
    column = tile.n * config.tile_outputs + team * plan.outputs + thread % units * columns
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
def placed(plan: cutlass.Constexpr[ProductPlan], row: Int32, unit: Int32) -> Int32:
    """Return the byte offset of a 16-byte unit of a row, swizzled: eight lanes that move
    neighbouring rows use all banks."""
    line = plan.out_line
    turned = row * line // hw.SMEM_LINE_BYTES % min(8, line // UNIT)
    return row * line + (unit ^ turned) * UNIT
