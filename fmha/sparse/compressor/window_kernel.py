"""Entries of a raw tail: the rows of a window at once, per channel (device code).

`fmha.sparse.compressor.reference` is the definition, `fmha.sparse.compressor.config` who does what.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from fmha.sparse.compressor.clusters import Clusters, example_arguments
from fmha.sparse.compressor.config import VECTOR, WindowConfig
from fmha.sparse.compressor.device import (
    NUMBERS,
    Numbers,
    ape_at,
    fused,
    index_at,
    load_norm,
    numbers_from,
    save_row,
    share_of,
    step_cell,
    store_cell,
    store_entry,
    sum_of_squares,
    tail_cell,
)
from fmha.sparse.compressor.exchange import Exchange, exchanged, open_exchange
from kernelkit.device_table import DeviceTable
from kernelkit.hw import WARP_THREADS
from kernelkit.online_softmax import finite
from kernelkit.warp_mma import copy_chunk
from kvcache.movement.device import checked_entry, entry_of, number_at, numbers_of, zeros

ARRAYS = 2  # values, scores
PARTS = 3  # of a group: maximum, sum, sum of weighted values
NOTHING = -(2**31)  # follows a cell


class Windows(Clusters):
    """Kernel of one WindowConfig."""

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
        sCells, exchange = self.cells(), None
        if cutlass.const_expr(config.slices > 1):
            exchange = open_exchange(config.slices)
        inside = thread % config.window_threads
        group, lane = inside // config.lanes, inside % config.lanes
        column = part * config.channels + lane * VECTOR
        index, token = item * config.windows + thread // config.window_threads, Int32(-1)
        if index < Int32(numbers.counts[0]):
            token = index_at(numbers.step[5], index)
        # Loads stay before a sync_warp: ptxas would move them to where they are used, and wait for
        # one after another.
        if cutlass.const_expr(not config.chunk):
            apes = self.load_apes(numbers, (group, column))
            cute.arch.sync_warp()
        exists = token >= 0 and token < Int32(numbers.source[4])
        token = token if exists else Int32(0)
        position = Int32(number_at(numbers.step[0], token))
        owner = index_at(numbers.step[1], token)
        begun = token >= config.rows - 1
        begun_by = index_at(numbers.step[1], token - (config.rows - 1) if begun else Int32(0))
        entry = number_at(numbers.step[7], token)
        place = token, position, group, column
        if cutlass.const_expr(config.chunk):
            self.stage_new(numbers, sCells, (token, group, column))
        begin = Int64(position - (config.ratio - 1))
        if cutlass.const_expr(config.chunk):
            apes = self.load_apes(numbers, (group, column))
            cute.arch.sync_warp()
        if cutlass.const_expr(config.groups == 1):
            norm = load_norm(config, numbers, column, begin)
        end = exists, owner, begun and begun_by == owner
        older, request, ages = self.stage_older(numbers, sCells, place, end)
        cute.arch.cp_async_wait_group(0)
        entry = checked_entry(entry, numbers.target[4])
        writes = exists and cutlass.min(position, Int32(config.rows - 1)) <= ages[1]
        parts = self.pooled(sCells, apes, group, ages)
        if cutlass.const_expr(config.groups > 1):  # one warp's, and all have too few registers
            norm = load_norm(config, numbers, column, begin)
        values = self.joined(parts, sCells, lane)
        squares = self.all_squares(exchange, values, part)
        if cutlass.const_expr(config.groups > 1):
            entry = entry if writes and thread < config.lanes else Int32(-1)
            if thread < WARP_THREADS:
                store_entry((config, self.arch), numbers, values, norm, (column, entry), squares)
        else:
            entry = entry if writes else Int32(-1)
            store_entry((config, self.arch), numbers, values, norm, (column, entry), squares)
        if older:
            self.follow(numbers, sCells, place, (request, ages))

    @cute.jit
    def stage_older(self, numbers: Numbers, sCells: cute.Tensor, place: tuple, end: tuple) -> tuple:
        """What `stage_new` did not bring: (whether there was something, request, ages), these two
        as `owned` has them. end: (exists, its request, whether that has the first row, too)."""
        config, (token, position, _, _), (exists, owner, whole) = self.config, place, end
        if cutlass.const_expr(config.chunk):
            older, request = exists and not whole, (Int32(0), Int32(0), Int32(-1))
            ages = Int32(config.rows - 1), Int32(config.rows - 1)
            if older:
                request, ages = self.owned(numbers, owner, (exists, token, position))
                cute.arch.cp_async_wait_group(0)
                self.stage_any(numbers, sCells, place, (request, ages))
        else:
            older = exists
            request, ages = self.owned(numbers, owner, (exists, token, position))
            self.stage_any(numbers, sCells, place, (request, ages))
        return older, request, ages

    @cute.jit
    def cells(self) -> cute.Tensor:
        """Shared memory for values and scores of the rows of every thread: (element, thread, cell).

        A thread reads what it brought itself: no barrier, and rows on their way need no registers.
        """
        config = self.config
        layout = cute.make_layout((VECTOR, config.threads, ARRAYS * config.group_rows))
        return SmemAllocator().allocate_tensor(Float32, layout, byte_alignment=16)

    @cute.jit
    def stage(
        self, sCells: cute.Tensor, index: cutlass.Constexpr[int], cells: tuple, exists: Boolean
    ) -> None:
        """Start to bring a row, zeros if it is not there; cells: addresses of values and scores."""
        thread, _, _ = cute.arch.thread_idx()
        for array in cutlass.range_constexpr(ARRAYS):
            cell = (ARRAYS * index + array) * self.config.threads
            target = sCells.iterator.toint() + (cell + thread) * (VECTOR * 4)
            copy_chunk(target, cells[array], exists)

    @cute.jit
    def cell_in(
        self, sCells: cute.Tensor, index: cutlass.Constexpr[int], array: cutlass.Constexpr[int]
    ) -> cute.Tensor:
        """Values, or scores, of a row that is there."""
        thread, _, _ = cute.arch.thread_idx()
        found = zeros(VECTOR, Float32)
        cute.autovec_copy(sCells[None, thread, ARRAYS * index + array], found)
        return found

    @cute.jit
    def back_of(self, group: Int32, index: cutlass.Constexpr[int]) -> Int32:
        """How many rows before the last of its entry a row is."""
        return self.config.rows - 1 - (group * self.config.group_rows + index)

    @cute.jit
    def column_of(self, group: Int32, index: cutlass.Constexpr[int], column: Int32) -> Int32:
        """Where in its row the thread's channels are: each window of an entry has its own block."""
        config = self.config
        row = group * config.group_rows + index
        return Int32(Uint32(row) // Uint32(config.ratio)) * config.width + column

    @cute.jit
    def owned(self, numbers: Numbers, owner: Int32, end: tuple) -> tuple:
        """(request, ages) of an end: (exists, token, position).

        request: its first token, tokens, slot or -1. ages: rows before the last one that are of the
        step, rows before it that are anywhere.
        """
        exists, token, position = end
        first, count, slot = Int32(0), Int32(0), Int32(-1)
        if exists and owner >= 0 and owner < Int32(numbers.counts[1]):
            first = index_at(numbers.step[3], owner)
            count = index_at(numbers.step[3], owner + 1) - first
            slot = index_at(numbers.step[4], owner)
            slot = slot if slot < Int32(numbers.tail[3]) else Int32(-1)
        behind = token - first
        there = position if slot >= 0 else cutlass.min(behind, position)
        return (first, count, slot), (behind, there)

    @cute.jit
    def stage_new(self, numbers: Numbers, sCells: cute.Tensor, place: tuple) -> None:
        """The rows of a thread out of the tokens before its last one, whoever's they are: what
        belongs to another request, or is too old, `stage_any` replaces."""
        config, (token, group, column) = self.config, place
        for index in cutlass.range_constexpr(config.group_rows):
            source = cutlass.max(token - self.back_of(group, index), Int32(0))
            cells = step_cell(numbers, source, self.column_of(group, index, column))
            self.stage(sCells, index, cells, Boolean(True))
        cute.arch.cp_async_commit_group()

    @cute.jit
    def stage_any(self, numbers: Numbers, sCells: cute.Tensor, place: tuple, whose: tuple) -> None:
        """The rows of a thread from before the step, out of the tail; without `chunk` all rows.

        whose: (request, ages).
        """
        config, (token, position, group, column) = self.config, place
        (_, _, slot), (behind, there) = whose
        last, rows = Int32(Uint32(position) % Uint32(numbers.tail[2])), Int32(numbers.tail[2])
        for index in cutlass.range_constexpr(config.group_rows):
            back, here = self.back_of(group, index), self.column_of(group, index, column)
            line = last - back if last >= back else last - back + rows
            cells = tail_cell(config, numbers, (cutlass.max(slot, Int32(0)), Int64(line)), here)
            if cutlass.const_expr(config.chunk):
                if back > behind:
                    self.stage(sCells, index, cells, back <= there)
            else:
                source = cutlass.max(token - back, Int32(0))
                values, scores = step_cell(numbers, source, here)
                if back > behind:
                    values, scores = cells
                self.stage(sCells, index, (values, scores), back <= there)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load_apes(self, numbers: Numbers, place: tuple) -> list[cute.Tensor]:
        """What is added to the scores of a thread's rows, if they are of the step: the tail has it
        in its own. place: (group, column)."""
        (group, column), apes = place, []
        for index in cutlass.range_constexpr(self.config.group_rows):
            phase = Int64(group * self.config.group_rows + index)
            here = self.column_of(group, index, column)
            apes.append(ape_at(self.config, numbers, phase, here))
        return apes

    @cute.jit
    def pooled(
        self, sCells: cute.Tensor, apes: list, group: Int32, ages: tuple
    ) -> list[cute.Tensor]:
        """Maxima, sums and sums of weighted values of a thread's channels over its rows; scores
        take the place of what is added to them."""
        rows, scores = self.config.group_rows, apes
        for index in cutlass.range_constexpr(rows):
            back = self.back_of(group, index)
            score = self.cell_in(sCells, index, 1)
            for channel in cutlass.range_constexpr(VECTOR):
                new = score[channel] + apes[index][channel]
                found = score[channel] if back > ages[0] else new
                scores[index][channel] = found if back <= ages[1] else -Float32.inf
        top, total, acc = parts = [zeros(VECTOR, Float32) for _ in range(PARTS)]
        for channel in cutlass.range_constexpr(VECTOR):
            top[channel] = -Float32.inf
            for index in cutlass.range_constexpr(rows):
                top[channel] = cute.arch.fmax(top[channel], scores[index][channel])
        for index in cutlass.range_constexpr(rows):
            value = self.cell_in(sCells, index, 0)
            for channel in cutlass.range_constexpr(VECTOR):
                share = share_of(scores[index][channel], finite(top[channel]))
                total[channel] = total[channel] + share
                acc[channel] = fused(share, value[channel], acc[channel])
        return parts

    @cute.jit
    def joined(self, parts: list, sCells: cute.Tensor, lane: Int32) -> cute.Tensor:
        """Pooled channels over all groups, VECTOR for each lane of the first of them."""
        config, (_, total, acc) = self.config, parts
        thread, _, _ = cute.arch.thread_idx()
        if cutlass.const_expr(config.groups == 1):
            for channel in cutlass.range_constexpr(VECTOR):
                acc[channel] = acc[channel] * cute.arch.rcp_approx(total[channel])
        else:
            sValues = SmemAllocator().allocate_tensor(
                Float32, cute.make_layout(config.channels), byte_alignment=16
            )
            for part in cutlass.range_constexpr(PARTS):  # where the thread's own rows were
                cute.autovec_copy(parts[part], sCells[None, thread, part])
            cute.arch.sync_threads()
            if thread < config.channels:
                sValues[thread] = self.channel_of(sCells, thread)
            cute.arch.sync_threads()
            cute.autovec_copy(cute.local_tile(sValues, (VECTOR,), (lane,)), acc)
        return acc

    @cute.jit
    def channel_of(self, sParts: cute.Tensor, channel: Int32) -> Float32:
        """A channel over all groups."""
        config, inside, lane = self.config, channel % VECTOR, channel // VECTOR
        top, total, acc = -Float32.inf, Float32(0.0), Float32(0.0)
        for group in cutlass.range_constexpr(config.groups):
            top = cute.arch.fmax(top, sParts[inside, group * config.lanes + lane, 0])
        base = finite(top)
        for group in cutlass.range_constexpr(config.groups):
            thread = group * config.lanes + lane
            share = share_of(sParts[inside, thread, 0], base)
            total = fused(share, sParts[inside, thread, 1], total)
            acc = fused(share, sParts[inside, thread, 2], acc)
        return acc * cute.arch.rcp_approx(total)

    @cute.jit
    def follow(self, numbers: Numbers, sCells: cute.Tensor, place: tuple, whose: tuple) -> None:
        """What this step has for the cells of the tail that a thread read, into them."""
        config, (token, _, group, _), rows = self.config, place, Int32(numbers.tail[2])
        (_, count, _), (behind, there) = whose
        turns = Int32(Uint32(count - 1 - behind) // Uint32(rows))
        rest = count - 1 - behind - turns * rows
        aheads, any_wanted = cute.make_rmem_tensor(config.group_rows, Int32), Boolean(False)
        for index in cutlass.range_constexpr(config.group_rows):
            back = self.back_of(group, index)
            ahead = (turns + 1 if rest + back >= rows else turns) * rows - back
            source = token + ahead
            known = ahead > 0 and source >= 0 and source < Int32(numbers.source[4])
            wanted = back > behind and back <= there and known
            aheads[index] = ahead if wanted else NOTHING
            any_wanted = any_wanted or wanted
        if any_wanted:
            self.replace(numbers, sCells, place, aheads)

    @cute.jit
    def replace(
        self, numbers: Numbers, sCells: cute.Tensor, place: tuple, aheads: cute.Tensor
    ) -> None:
        """Cells of the tail take those of tokens so far ahead of the last row, through sCells."""
        config, (token, position, group, column), tail = self.config, place, numbers.tail
        rows, apes = cute.make_rmem_tensor(config.group_rows, Int32), []
        for index in cutlass.range_constexpr(config.group_rows):
            wanted, here = aheads[index] != NOTHING, self.column_of(group, index, column)
            ahead = aheads[index] if wanted else Int32(0)
            row = entry_of(numbers.step[6], token + ahead, tail[2] * tail[3])
            rows[index] = row if wanted else Int32(-1)
            self.stage(sCells, index, step_cell(numbers, token + ahead, here), wanted)
            apes.append(ape_at(config, numbers, Int64(position + ahead), here))
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        for index in cutlass.range_constexpr(config.group_rows):
            if rows[index] >= 0:
                cells = [self.cell_in(sCells, index, array) for array in range(ARRAYS)]
                here = self.column_of(group, index, column)
                store_cell(config, numbers, rows[index], here, (*cells, apes[index]))

    @cute.jit
    def all_squares(self, exchange: Exchange | None, values: cute.Tensor, part: Int32) -> Float32:
        """The sum of squares over all channels of a window, in every thread that needs it."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        squares = sum_of_squares(values, min(config.lanes, WARP_THREADS))
        if cutlass.const_expr(config.slices > 1):
            cute.arch.cluster_wait()  # all have opened it
            squares = exchanged(exchange, squares, part, Int32(0))
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


def host_function(config: WindowConfig, arch: str) -> tuple:
    """What is compiled for `config`, and example arguments."""
    return Windows(config, arch), *example_arguments()
