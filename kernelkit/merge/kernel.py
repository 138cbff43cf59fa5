"""The merge kernel: one pass over the parts of every row, in registers (device code).

A row is (sum of weight * O) / total under one reference maximum `top`, which moves as parts arrive:
what was summed under an older one shrinks. Nothing is shared between threads but, with several
lanes, their partial sums at the end. No tensor cores: it compiles for any architecture.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from kernelkit.device.device_table import DeviceTable
from kernelkit.device.fake import fake_tensor
from kernelkit.device.online_softmax import finite
from kernelkit.device.param_table import ParamTable
from kernelkit.device.words import vector_at
from kernelkit.merge.plan import (
    FIELDS_OF_PART,
    FIELDS_OF_STACK,
    UNROLLED,
    VECTOR_BYTES,
    MergeConfig,
)
from kernelkit.plan.log2 import LN_2, LOG2_E

TYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": Float32}


@dataclass(frozen=True)
class Row:
    """A thread's row of the result; one that does not exist is clamped to one that does."""

    position: Int32
    head: Int32
    batch: Int32
    exists: Boolean


@dataclass(frozen=True)
class Source:
    """Source of a thread's reads from every part: a row, in vectors from `column` on."""

    table: cute.Tensor
    row: Row
    column: Int32


@dataclass(frozen=True)
class Part:
    """Row of one part: vectors of O as 32-bit words, its LSE, and the reference of O."""

    words: list
    lse: Float32
    reference: Float32


@cute.jit
def weight(exponent: Float32, base: Float32) -> Float32:
    """exp(exponent - base); 0 where the exponent is -inf and the base is finite."""
    return cute.math.exp2((exponent - base) * LOG2_E, fastmath=True)


class Merge:
    """Host function and kernel of one MergeConfig."""

    def __init__(self, config: MergeConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        table: ParamTable,
        counts: tuple[Int32, ...],
        outputs: tuple[cute.Tensor, ...],
        sinks: cute.Tensor | None,
        tile_shift: Int32,
        stream: CUstream,
    ) -> None:
        """Launch the kernel.

        Args:
            table: see `read_part`
            counts: number of parts of each dtype, in the order of the table
            outputs: O (B, S, H, D) and LSE (B, H, S)
            sinks: (H,) or None
            tile_shift: a tile is 2 ** tile_shift query positions of rows / 2 ** tile_shift heads
            stream: CUDA stream
        """
        batch, positions, heads, _ = outputs[0].shape
        head_tiles, position_tiles = self.tiles(positions, heads, tile_shift)
        self.kernel(table, counts, *outputs, sinks, tile_shift).launch(
            grid=(head_tiles * position_tiles, batch, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        table: DeviceTable,
        counts: tuple[Int32, ...],
        mO: cute.Tensor,
        mLSE: cute.Tensor,
        sinks: cute.Tensor | None,
        tile_shift: Int32,
    ) -> None:
        """Grid (tiles of heads within tiles of positions, batch); see `__call__`."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        column = thread % config.columns
        lane = Int32(0)
        if cutlass.const_expr(config.lanes > 1):
            lane = thread // (config.columns * config.rows)
        row = self.row_of(thread, mO, tile_shift)
        source = Source(table.read(), row, column)
        acc = cute.make_rmem_tensor((config.vector, config.vectors), Float32)
        acc.fill(0.0)
        top, total = -Float32.inf, Float32(0.0)
        if cutlass.const_expr(sinks is not None):
            if lane == 0:
                top = sinks[row.head]
            total = weight(top, finite(top))

        first = Int32(0)
        for index in cutlass.range_constexpr(len(config.dtypes)):
            dtype = TYPES[config.dtypes[index]]
            # Parts first + lane, first + lane + lanes, ...: by fours, then two, then one.
            left = (counts[index] - lane + config.lanes - 1) // config.lanes
            part = first + lane
            for _ in cutlass.range(left // UNROLLED, unroll=1):
                top, total = self.absorb(UNROLLED, dtype, source, part, acc, top, total)
                part = part + UNROLLED * config.lanes
            if left & 2:
                top, total = self.absorb(2, dtype, source, part, acc, top, total)
                part = part + 2 * config.lanes
            if left & 1:
                top, total = self.absorb(1, dtype, source, part, acc, top, total)
            first = first + counts[index]

        if cutlass.const_expr(config.lanes > 1):
            top, total = self.add_lanes(thread, acc, top, total)
        if row.exists and lane == 0:
            norm = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total)
            for vector in cutlass.range_constexpr(config.vectors):
                place = (column + vector * config.columns,)
                gO = cute.local_tile(
                    mO[row.batch, row.position, row.head, None], (config.vector,), place
                )
                gO.store((acc[None, vector].load() * norm).to(TYPES[config.out_dtype]))
            if column == 0:
                log_total = cute.math.log2(total, fastmath=True) * LN_2
                mLSE[row.batch, row.head, row.position] = top + log_total

    @cute.jit
    def tiles(self, positions: Int32, heads: Int32, tile_shift: Int32) -> tuple[Int32, Int32]:
        """(tiles side by side over the heads, over the positions)."""
        head_shift = (self.config.rows.bit_length() - 1) - tile_shift
        heads, positions = heads - 1, positions - 1
        return (heads >> head_shift) + 1, (positions >> tile_shift) + 1

    @cute.jit
    def row_of(self, thread: Int32, mO: cute.Tensor, tile_shift: Int32) -> Row:
        """Return a thread's row in this CTA's tile."""
        _, positions, heads, _ = mO.shape
        tile, batch, _ = cute.arch.block_idx()
        head_tiles, _ = self.tiles(positions, heads, tile_shift)
        position_tile = Int32(Uint32(tile) // Uint32(head_tiles))
        head_tile = tile - position_tile * head_tiles
        row = thread // self.config.columns % self.config.rows
        head_shift = (self.config.rows.bit_length() - 1) - tile_shift
        position = (position_tile << tile_shift) + (row & ((Int32(1) << tile_shift) - 1))
        head = (head_tile << head_shift) + (row >> tile_shift)
        exists = position < positions and head < heads
        return Row(
            cutlass.min(position, positions - 1), cutlass.min(head, heads - 1), batch, exists
        )

    @cute.jit
    def absorb(
        self,
        count: cutlass.Constexpr[int],
        dtype: cutlass.Constexpr,
        source: Source,
        part: Int32,
        acc: cute.Tensor,
        top: Float32,
        total: Float32,
    ) -> tuple[Float32, Float32]:
        """Add `count` parts, `part`, part + lanes, ..., to acc and to (top, total), which come back
        anew. All are loaded before the first one is used."""
        loaded = []
        for index in cutlass.range_constexpr(count):
            loaded.append(self.read_part(dtype, source, part + index * self.config.lanes))
        new_top = top
        for index in cutlass.range_constexpr(count):
            new_top = cutlass.max(new_top, loaded[index].lse)
        base = finite(new_top)
        acc_scale = weight(top, base)
        total = total * acc_scale
        for element in cutlass.range_constexpr(cute.size(acc)):
            acc[element] = acc[element] * acc_scale
        for index in cutlass.range_constexpr(count):
            words, lse = loaded[index].words, loaded[index].lse
            total = total + weight(lse, base)
            share = weight(loaded[index].reference, base)
            # What a part without keys holds may be anything, NaN too: its bits become zeros.
            kept = cute.full(words[0].shape, Int32(0) if lse == -Float32.inf else Int32(-1), Int32)
            for vector in cutlass.range_constexpr(self.config.vectors):
                o = (words[vector] & kept).bitcast(dtype).to(Float32)
                acc[None, vector].store(acc[None, vector].load() + o * share)
        return new_top, total

    @cute.jit
    def read_part(self, dtype: cutlass.Constexpr, source: Source, part: Int32) -> Part:
        """Read a row of one part.

        A row of the table has the addresses of O, LSE and row_max, then the strides of each of the
        three. Strides are over (position, head, batch) and, in a stack, over its parts. They are
        counted in vectors for O and in elements for the others.
        """
        config, table = self.config, source.table
        row = (source.row.position, source.row.head, source.row.batch)
        entry = 0 if cutlass.const_expr(config.stacked) else part
        index = (*row, part) if cutlass.const_expr(config.stacked) else row
        offsets = []
        for tensor in cutlass.range_constexpr(3 if config.raw else 2):
            offset = Int64(0)
            for axis in cutlass.range_constexpr(len(index)):
                stride = Int32(table[entry, 3 + tensor * len(index) + axis])
                offset += Int64(index[axis]) * Int64(stride)
            offsets.append(offset)
        vector_bytes = config.vector * dtype.width // 8
        words = []
        for vector in cutlass.range_constexpr(config.vectors):
            place = offsets[0] + source.column + vector * config.columns
            address = table[entry, 0] + place * vector_bytes
            words.append(vector_at(address, Int32, vector_bytes // 4).load())
        lse = vector_at(table[entry, 1] + offsets[1] * 4, Float32, 1)[0]
        # FlashAttention marks a row without keys with +inf in some of its kernels.
        lse = -Float32.inf if lse == Float32.inf else lse
        reference = lse
        if cutlass.const_expr(config.raw):
            row_max = vector_at(table[entry, 2] + offsets[2] * 4, Float32, 1)[0]
            reference = lse if lse == -Float32.inf else row_max
        return Part(words, lse, reference)

    @cute.jit
    def add_lanes(
        self, thread: Int32, acc: cute.Tensor, top: Float32, total: Float32
    ) -> tuple[Float32, Float32]:
        """(top, total) over all lanes, and acc with them, in the threads of lane 0."""
        config = self.config
        per_lane = config.rows * config.columns
        slot = thread % per_lane
        smem = SmemAllocator()
        # Threads side by side, so that their words lie in different banks.
        shape = (config.lanes, cute.size(acc) + 2, per_lane)
        sState = smem.allocate_tensor(Float32, cute.make_ordered_layout(shape, order=(2, 1, 0)))
        mine = sState[thread // per_lane, None, slot]
        mine[0], mine[1] = top, total
        for element in cutlass.range_constexpr(cute.size(acc)):
            mine[2 + element] = acc[element]
        cute.arch.sync_threads()
        new_top = top
        for lane in cutlass.range_constexpr(config.lanes):
            new_top = cutlass.max(new_top, sState[lane, 0, slot])
        base = finite(new_top)
        total = Float32(0.0)
        acc.fill(0.0)
        for lane in cutlass.range_constexpr(config.lanes):
            acc_scale = weight(sState[lane, 0, slot], base)
            total += sState[lane, 1, slot] * acc_scale
            for element in cutlass.range_constexpr(cute.size(acc)):
                acc[element] += sState[lane, 2 + element, slot] * acc_scale
        return new_top, total


def host_function(config: MergeConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return Merge(config), *_arguments(config)


def _arguments(config: MergeConfig) -> tuple:
    batch, positions, heads = (cute.sym_int32() for _ in range(3))
    out, shape = TYPES[config.out_dtype], (batch, positions, heads, config.head_dim)
    o = fake_tensor(out, *shape, align=VECTOR_BYTES)
    lse = fake_tensor(Float32, batch, heads, positions)
    sinks = fake_tensor(Float32, heads) if config.sinks else None
    width = FIELDS_OF_STACK if config.stacked else FIELDS_OF_PART
    table = ParamTable([(0,) * width], config.capacity)
    counts = tuple(Int32(0) for _ in config.dtypes)
    return table, counts, (o, lse), sinks, Int32(0), CUstream(0)
