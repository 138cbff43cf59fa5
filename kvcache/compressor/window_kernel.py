"""Entries of a raw tail: the rows of a window at once, per channel (device code).

`kvcache.compressor.reference` is the definition, `kvcache.compressor.config` who does what.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from kernelkit.compile import compile_once
from kernelkit.hw import WARP_THREADS
from kernelkit.online_softmax import finite
from kernelkit.param_table import DeviceTable, ParamTable
from kvcache.compressor.config import VECTOR, WindowConfig
from kvcache.compressor.device import (
    NUMBERS,
    Numbers,
    exchanged,
    fused,
    index_at,
    load_norm,
    numbers_from,
    request_of,
    save_cell,
    save_row,
    share_of,
    store_entry,
    sum_of_squares,
    tail_cell,
)
from kvcache.kernels.device import entry_of, load_bytes, number_at, numbers_of, table_of, zeros

PARTS = 3  # of a group: maximum, sum, sum of weighted values


class Windows:
    """Host function and kernel of one WindowConfig."""

    def __init__(self, config: WindowConfig, arch: str) -> None:
        self.config, self.arch = config, arch

    @cute.jit
    def __call__(self, table: ParamTable, clusters: Int32, stream: CUstream) -> None:
        """table: see `kvcache.compressor.device.Numbers`."""
        self.kernel(table).launch(
            grid=(clusters * self.config.slices, 1, 1),
            block=(self.config.threads, 1, 1),
            cluster=(self.config.slices, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """Clusters have windows, those behind them rows of tails; see `__call__`."""
        config, numbers = self.config, numbers_from(numbers_of(table, NUMBERS))
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        item, part = cta // config.slices, cta % config.slices
        behind = cta - Int32(numbers.counts[3]) * config.slices
        if behind >= 0:
            row = behind * config.saved_rows + thread // config.row_threads
            save_row(config, numbers, row, (thread % config.row_threads, config.row_threads))
        else:
            self.compress(numbers, item, part)

    @cute.jit
    def compress(self, numbers: Numbers, item: Int32, part: Int32) -> None:
        """The windows of a CTA, of which it has a slice of the channels."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        if cutlass.const_expr(config.slices > 1):
            cute.arch.cluster_arrive_relaxed()
        inside = thread % config.window_threads
        group, lane = inside // config.lanes, inside % config.lanes
        column = part * config.channels + lane * VECTOR
        index, token = item * config.windows + thread // config.window_threads, Int32(-1)
        if index < Int32(numbers.counts[0]):
            token = index_at(numbers.step[5], index)
        exists = token >= 0 and token < Int32(numbers.source[4])
        token = token if exists else Int32(0)
        rows = self.registers(), self.registers()
        if cutlass.const_expr(config.chunk):
            self.load_new(numbers, (token, 0, group, column), rows)
            for index in cutlass.range_constexpr(config.group_rows):
                self.add_ape(numbers, (token, 0, group, column), index, rows[1][index])
        position = number_at(numbers.step[0], token)
        entry = entry_of(numbers.step[7], token, numbers.target[4])
        norm = load_norm(config, numbers, column, position - (config.ratio - 1))
        place = token, position, group, column
        request = self.request_of(numbers, index_at(numbers.step[1], token), exists)
        oldest, start, slot = position - (config.rows - 1), request[2], request[3]
        if exists and (oldest < start or not config.chunk):
            for index in cutlass.range_constexpr(config.group_rows):
                self.load_row(numbers, place, index, request, rows)
        writes = exists and (slot >= 0 or start == 0 or oldest >= start)
        if cutlass.const_expr(config.groups > 1):
            writes = writes and thread < config.lanes
        entry = entry if writes else Int32(-1)
        top, total, acc = pooled(*rows)
        if cutlass.const_expr(config.groups > 1):
            acc = self.joined((top, total, acc), (group, lane))
        else:
            for channel in cutlass.range_constexpr(VECTOR):
                acc[channel] = acc[channel] * cute.arch.rcp_approx(total[channel])
        squares = self.all_squares(acc, part)
        if cutlass.const_expr(config.groups > 1):
            if thread < WARP_THREADS:
                store_entry((config, self.arch), numbers, acc, norm, (column, entry), squares)
        else:
            store_entry((config, self.arch), numbers, acc, norm, (column, entry), squares)

    def registers(self) -> list[cute.Tensor]:
        """For the rows of a thread."""
        return [zeros(VECTOR, Float32) for _ in range(self.config.group_rows)]

    @cute.jit
    def place_of_row(self, group: Int32, index: cutlass.Constexpr[int]) -> tuple:
        """(how many rows before the last of its entry, block of columns, place in its window)."""
        config = self.config
        row = group * config.group_rows + index
        block = Int32(Uint32(row) // Uint32(config.ratio))
        return config.rows - 1 - row, block, row - block * config.ratio

    @cute.jit
    def request_of(self, numbers: Numbers, owner: Int32, exists: Boolean) -> tuple:
        """(first token, tokens, position of the first, slot or -1) of a request of the step."""
        first, count, start, slot = Int32(0), Int32(0), Int64(0), Int32(-1)
        if exists and owner >= 0 and owner < Int32(numbers.counts[1]):
            first, count, start = request_of(numbers, owner)
            slot = index_at(numbers.step[4], owner)
            slot = slot if slot < Int32(numbers.tail[3]) else Int32(-1)
        return first, count, start, slot

    @cute.jit
    def load_new(self, numbers: Numbers, place: tuple, rows: tuple) -> None:
        """The rows of a thread out of the tokens before its last one, whoever's they are: what
        belongs to another request, or is too old, `load_row` replaces."""
        for index in cutlass.range_constexpr(self.config.group_rows):
            self.load_token(numbers, place, index, rows)

    @cute.jit
    def load_token(
        self, numbers: Numbers, place: tuple, index: cutlass.Constexpr[int], rows: tuple
    ) -> None:
        """A row of the step; place: (token, position, group, column)."""
        config, (token, _, group, column) = self.config, place
        back, block, _ = self.place_of_row(group, index)
        source = Int64(cutlass.max(token - back, Int32(0)))
        here = Int64(block * config.width + column) * 4
        load_bytes(numbers.source[0] + source * numbers.source[2] + here, rows[0][index])
        load_bytes(numbers.source[1] + source * numbers.source[3] + here, rows[1][index])

    @cute.jit
    def add_ape(
        self,
        numbers: Numbers,
        place: tuple,
        index: cutlass.Constexpr[int],
        score: cute.Tensor,
    ) -> None:
        """To a score of the step: the tail has it in its own."""
        config, (_, _, group, column) = self.config, place
        _, block, phase = self.place_of_row(group, index)
        here, ape = Int64(block * config.width + column) * 4, zeros(VECTOR, Float32)
        load_bytes(numbers.weights[0] + Int64(phase) * numbers.weights[2] + here, ape)
        for channel in cutlass.range_constexpr(VECTOR):
            score[channel] = score[channel] + ape[channel]

    @cute.jit
    def load_row(
        self,
        numbers: Numbers,
        place: tuple,
        index: cutlass.Constexpr[int],
        request: tuple,
        rows: tuple,
    ) -> None:
        """A row before the step out of the tail, and into its place there what this step has for
        it; one before the request counts as nothing. Without `chunk` a row of the step, too."""
        config, (_, position, group, column) = self.config, place
        (first, count, start, slot), value, score = request, rows[0][index], rows[1][index]
        back, block, _ = self.place_of_row(group, index)
        at, here = position - back, block * config.width + column
        if at < start:
            for channel in cutlass.range_constexpr(VECTOR):
                value[channel], score[channel] = Float32(0.0), -Float32.inf
            if at >= 0 and slot >= 0:
                tail_rows = Uint32(numbers.tail[2])
                line = Int64(Uint32(at) % tail_rows)
                cells = tail_cell(config, numbers, (slot, line), here)
                load_bytes(cells[0], value)
                load_bytes(cells[1], score)
                ahead = Int64((Uint32(start + count - 1 - at) // tail_rows) * tail_rows)
                if ahead > 0:
                    source = first + Int32(at + ahead - start)
                    save_cell(config, numbers, (source, at + ahead), here)
        elif cutlass.const_expr(not config.chunk):
            self.load_token(numbers, place, index, rows)
            self.add_ape(numbers, place, index, score)

    @cute.jit
    def joined(self, mine: tuple, place: tuple) -> cute.Tensor:
        """Pooled channels over all groups, VECTOR for each lane of the first warp."""
        config, (group, lane) = self.config, place
        thread, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        shape = (PARTS, config.groups, config.channels)
        layout = cute.make_ordered_layout(shape, order=(2, 1, 0))
        sParts = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        sValues = smem.allocate_tensor(
            Float32, cute.make_layout(config.channels), byte_alignment=16
        )
        for part in cutlass.range_constexpr(PARTS):
            sMine = cute.local_tile(sParts[part, group, None], (VECTOR,), (lane,))
            cute.autovec_copy(mine[part], sMine)
        cute.arch.sync_threads()
        if thread < config.channels:
            top, total, acc = -Float32.inf, Float32(0.0), Float32(0.0)
            for other in cutlass.range_constexpr(config.groups):
                top = cute.arch.fmax(top, sParts[0, other, thread])
            base = finite(top)
            for other in cutlass.range_constexpr(config.groups):
                share = share_of(sParts[0, other, thread], base)
                total = fused(share, sParts[1, other, thread], total)
                acc = fused(share, sParts[2, other, thread], acc)
            sValues[thread] = acc * cute.arch.rcp_approx(total)
        cute.arch.sync_threads()
        found = zeros(VECTOR, Float32)
        cute.autovec_copy(cute.local_tile(sValues, (VECTOR,), (lane,)), found)
        return found

    @cute.jit
    def all_squares(self, values: cute.Tensor, part: Int32) -> Float32:
        """The sum of squares over all channels of a window, in every thread that needs it."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        squares = sum_of_squares(values, min(config.lanes, WARP_THREADS))
        if cutlass.const_expr(config.slices > 1):
            sSquares = SmemAllocator().allocate_tensor(Float32, cute.make_layout(config.slices))
            squares = exchanged(sSquares, squares, part)
        elif cutlass.const_expr(config.lanes > WARP_THREADS):
            warps = config.threads // WARP_THREADS
            sSquares = SmemAllocator().allocate_tensor(Float32, cute.make_layout(warps))
            if thread % WARP_THREADS == 0:
                sSquares[thread // WARP_THREADS] = squares
            cute.arch.sync_threads()
            squares, first = Float32(0.0), thread // config.window_threads * config.window_warps
            for index in cutlass.range_constexpr(config.window_warps):
                squares = squares + sSquares[first + index]
        return squares


@cute.jit
def pooled(values: list, scores: list) -> tuple:
    """(maxima, sums, sums of weighted values) of a thread's channels over its rows."""
    top, total, acc = (zeros(VECTOR, Float32) for _ in range(PARTS))
    for channel in cutlass.range_constexpr(VECTOR):
        highest = -Float32.inf
        for index in cutlass.range_constexpr(len(scores)):
            highest = cute.arch.fmax(highest, scores[index][channel])
        base, top[channel] = finite(highest), highest
        for index in cutlass.range_constexpr(len(scores)):
            share = share_of(scores[index][channel], base)
            total[channel] = total[channel] + share
            acc[channel] = fused(share, values[index][channel], acc[channel])
    return top, total, acc


def compile_windows(config: WindowConfig, arch: str) -> Any:
    """The compiled `Windows.__call__` of `config`; compiled once per process."""

    def describe() -> tuple:
        return Windows(config, arch), table_of([0] * NUMBERS), Int32(0), CUstream(0)

    return compile_once(config, arch, describe)
