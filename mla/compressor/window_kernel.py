"""Entries of a raw tail: all rows of a window at once, per channel (device code).

`mla.compressor.reference` is the definition; `mla.compressor.config` describes the division of
work.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from kernelkit.device.online_softmax import finite
from kernelkit.device.warp_mma import copy_chunk
from kernelkit.device.words import fused
from kernelkit.plan.hw import WARP_THREADS
from kvcache.movement.device import SlotRow, checked_entry, entry_of, int32_at, int64_at, zeros
from mla.compressor.config import VECTOR, WindowConfig
from mla.compressor.device import (
    Cell,
    Clusters,
    Exchange,
    ape_at,
    exchanged,
    load_norm,
    open_exchange,
    save_row,
    share_of,
    step_cell,
    store_cell,
    store_entry,
    sum_of_squares,
    tail_cell,
)
from mla.compressor.params import CompressParams

ARRAYS = 2  # values, scores
PARTS = 3  # of a group: maximum, sum, sum of weighted values
NOTHING = -(2**31)  # no token follows a cell


@dataclass(frozen=True)
class Window:
    """A thread's part of a window: rows of a group, VECTOR channels from `column` on.

    token: the last token of the window, which completes its entry.
    position: position of `token`.
    """

    params: CompressParams
    sCells: cute.Tensor  # see `Windows.cells`
    token: Int32
    position: Int32
    group: Int32
    column: Int32


@dataclass(frozen=True)
class History:
    """Location of the rows before the last one of a window.

    tokens: tokens of the request in this step.
    slot: slot of its tail, or -1.
    in_step: number of rows before the last one that are of this step.
    known: number of such rows that exist at all, in the step or in the tail.
    """

    tokens: Int32
    slot: Int32
    in_step: Int32
    known: Int32


class Windows(Clusters):
    """Kernel of one WindowConfig."""

    @cute.jit
    def run_cta(self, params: CompressParams, cta: Int32) -> None:
        """The first clusters process windows, those after them save rows of tails."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        item, part = cta // config.slices, cta % config.slices
        behind = cta - Int32(params.counts.window_clusters) * config.slices
        if behind >= 0:
            row = behind * config.saved_rows + thread // config.row_threads
            save_row(config, params, row, thread % config.row_threads, config.row_threads)
        else:
            self.compress(params, item, part)

    @cute.jit
    def compress(self, params: CompressParams, item: Int32, part: Int32) -> None:
        """Compress the windows of a CTA, which has a slice of their channels."""
        config, tables = self.config, params.tables
        thread, _, _ = cute.arch.thread_idx()
        sCells, exchange = self.cells(), None
        if cutlass.const_expr(config.slices > 1):
            exchange = open_exchange(config.slices)
        inside = thread % config.window_threads
        group, lane = inside // config.lanes, inside % config.lanes
        column = part * config.channels + lane * VECTOR
        index, token = item * config.windows + thread // config.window_threads, Int32(-1)
        if index < Int32(params.counts.ends):
            token = int32_at(tables.ends, index)
        # Loads stay before a sync_warp: otherwise ptxas would move them to their uses, and wait for
        # them one by one.
        if cutlass.const_expr(not config.chunk):
            apes = self.load_apes(params, group, column)
            cute.arch.sync_warp()
        exists = token >= 0 and token < Int32(params.step.tokens)
        token = token if exists else Int32(0)
        position = Int32(int64_at(tables.positions, token))
        owner = int32_at(tables.owners, token)
        begun = token >= config.rows - 1
        begun_by = int32_at(tables.owners, token - (config.rows - 1) if begun else Int32(0))
        entry = int64_at(tables.entries, token)
        window = Window(params, sCells, token, position, group, column)
        if cutlass.const_expr(config.chunk):
            self.stage_new(window)
        begin = Int64(position - (config.ratio - 1))
        if cutlass.const_expr(config.chunk):
            apes = self.load_apes(params, group, column)
            cute.arch.sync_warp()
        if cutlass.const_expr(config.groups == 1):
            norm = load_norm(config, params, column, begin)
        whole = begun and begun_by == owner
        older, history = self.stage_older(window, owner, exists, whole)
        cute.arch.cp_async_wait_group(0)
        entry = checked_entry(entry, params.entries.count)
        writes = exists and cutlass.min(position, Int32(config.rows - 1)) <= history.known
        parts = self.pooled(sCells, apes, group, history)
        # Only one warp needs the norm; with several groups no warp has registers for it earlier.
        if cutlass.const_expr(config.groups > 1):
            norm = load_norm(config, params, column, begin)
        values = self.joined(parts, sCells, lane)
        squares = self.all_squares(exchange, values, part)
        if cutlass.const_expr(config.groups > 1):
            entry = entry if writes and thread < config.lanes else Int32(-1)
            if thread < WARP_THREADS:
                store_entry(config, self.arch, params, values, norm, column, entry, squares)
        else:
            entry = entry if writes else Int32(-1)
            store_entry(config, self.arch, params, values, norm, column, entry, squares)
        if older:
            self.follow(window, history)

    @cute.jit
    def stage_older(
        self, window: Window, owner: Int32, exists: Boolean, whole: Boolean
    ) -> tuple[Boolean, History]:
        """Stage the rows that `stage_new` did not; return whether there were any, and the History.

        owner: the request of the window.
        exists: whether there is a window.
        whole: whether its first row is of the same request, in this step.
        """
        config = self.config
        if cutlass.const_expr(config.chunk):
            last = Int32(config.rows - 1)
            older, history = exists and not whole, History(Int32(0), Int32(-1), last, last)
            if older:
                history = self.history_of(window, owner, exists)
                cute.arch.cp_async_wait_group(0)
                self.stage_any(window, history)
        else:
            older, history = exists, self.history_of(window, owner, exists)
            self.stage_any(window, history)
        return older, history

    @cute.jit
    def cells(self) -> cute.Tensor:
        """Allocate shared memory for values and scores of the rows of every thread.

        A thread reads what it copied itself: no barrier is needed, and rows in flight need no
        registers.
        """
        config = self.config
        # Modes: channel of a thread, thread, values or scores of a row.
        layout = cute.make_layout((VECTOR, config.threads, ARRAYS * config.group_rows))
        return SmemAllocator().allocate_tensor(Float32, layout, byte_alignment=16)

    @cute.jit
    def stage(
        self, sCells: cute.Tensor, index: cutlass.Constexpr[int], cell: Cell, exists: Boolean
    ) -> None:
        """Start to copy a row to shared memory, or zeros if it does not exist."""
        thread, _, _ = cute.arch.thread_idx()
        for array, source in enumerate((cell.values, cell.scores)):
            first = (ARRAYS * index + array) * self.config.threads
            target = sCells.iterator.toint() + (first + thread) * (VECTOR * 4)
            copy_chunk(target, source, exists)

    @cute.jit
    def cell_in(
        self, sCells: cute.Tensor, index: cutlass.Constexpr[int], array: cutlass.Constexpr[int]
    ) -> cute.Tensor:
        """Return values, or scores, of a staged row."""
        thread, _, _ = cute.arch.thread_idx()
        found = zeros(VECTOR, Float32)
        cute.autovec_copy(sCells[None, thread, ARRAYS * index + array], found)
        return found

    @cute.jit
    def back_of(self, group: Int32, index: cutlass.Constexpr[int]) -> Int32:
        """Number of rows between a row and the last row of its entry."""
        return self.config.rows - 1 - (group * self.config.group_rows + index)

    @cute.jit
    def column_of(self, group: Int32, index: cutlass.Constexpr[int], column: Int32) -> Int32:
        """Return the thread's first column of its row; each window of an entry has a block."""
        config = self.config
        row = group * config.group_rows + index
        return Int32(Uint32(row) // Uint32(config.ratio)) * config.width + column

    @cute.jit
    def history_of(self, window: Window, owner: Int32, exists: Boolean) -> History:
        """Return the history of a request's window; without a tail if either does not exist."""
        params = window.params
        first, count, slot = Int32(0), Int32(0), Int32(-1)
        if exists and owner >= 0 and owner < Int32(params.counts.requests):
            first = int32_at(params.tables.cu_tokens, owner)
            count = int32_at(params.tables.cu_tokens, owner + 1) - first
            slot = int32_at(params.tables.state_slots, owner)
            slot = slot if slot < Int32(params.tail.slots) else Int32(-1)
        in_step = window.token - first
        known = window.position if slot >= 0 else cutlass.min(in_step, window.position)
        return History(count, slot, in_step, known)

    @cute.jit
    def stage_new(self, window: Window) -> None:
        """Stage a thread's rows from the tokens before the window's last one, whatever their
        request: `stage_any` replaces rows that belong to another request, or are too old."""
        for index in cutlass.range_constexpr(self.config.group_rows):
            source = cutlass.max(window.token - self.back_of(window.group, index), Int32(0))
            column = self.column_of(window.group, index, window.column)
            cell = step_cell(window.params.step, source, column)
            self.stage(window.sCells, index, cell, Boolean(True))
        cute.arch.cp_async_commit_group()

    @cute.jit
    def stage_any(self, window: Window, history: History) -> None:
        """Stage a thread's rows from before the step, out of the tail; without `chunk` all rows."""
        config, params, sCells = self.config, window.params, window.sCells
        rows = Int32(params.tail.rows)
        last = Int32(Uint32(window.position) % Uint32(params.tail.rows))
        for index in cutlass.range_constexpr(config.group_rows):
            back = self.back_of(window.group, index)
            column = self.column_of(window.group, index, window.column)
            line = last - back if last >= back else last - back + rows
            kept_in = SlotRow(Int64(cutlass.max(history.slot, Int32(0))), Int64(line))
            kept = tail_cell(config, params.tail, kept_in, column)
            if cutlass.const_expr(config.chunk):
                if back > history.in_step:
                    self.stage(sCells, index, kept, back <= history.known)
            else:
                source = cutlass.max(window.token - back, Int32(0))
                cell = step_cell(params.step, source, column)
                if back > history.in_step:
                    cell = kept
                self.stage(sCells, index, cell, back <= history.known)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load_apes(self, params: CompressParams, group: Int32, column: Int32) -> list[cute.Tensor]:
        """Return the ape terms for a thread's rows in the step; scores in the tail include
        theirs."""
        apes = []
        for index in cutlass.range_constexpr(self.config.group_rows):
            phase = Int64(group * self.config.group_rows + index)
            here = self.column_of(group, index, column)
            apes.append(ape_at(self.config, params.weights, phase, here))
        return apes

    @cute.jit
    def pooled(
        self, sCells: cute.Tensor, apes: list[cute.Tensor], group: Int32, history: History
    ) -> list[cute.Tensor]:
        """Return maxima, sums and sums of weighted values of a thread's channels over its rows.
        `apes` is overwritten with the scores."""
        rows, scores = self.config.group_rows, apes
        for index in cutlass.range_constexpr(rows):
            back = self.back_of(group, index)
            score = self.cell_in(sCells, index, 1)
            for channel in cutlass.range_constexpr(VECTOR):
                new = score[channel] + apes[index][channel]
                found = score[channel] if back > history.in_step else new
                scores[index][channel] = found if back <= history.known else -Float32.inf
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
    def joined(self, parts: list[cute.Tensor], sCells: cute.Tensor, lane: Int32) -> cute.Tensor:
        """Return pooled channels over all groups, VECTOR for each lane of the first group."""
        config, (_, total, acc) = self.config, parts
        thread, _, _ = cute.arch.thread_idx()
        if cutlass.const_expr(config.groups == 1):
            for channel in cutlass.range_constexpr(VECTOR):
                acc[channel] = acc[channel] * cute.arch.rcp_approx(total[channel])
        else:
            sValues = SmemAllocator().allocate_tensor(
                Float32, cute.make_layout(config.channels), byte_alignment=16
            )
            for part in cutlass.range_constexpr(PARTS):  # overwrites the thread's own rows
                cute.autovec_copy(parts[part], sCells[None, thread, part])
            cute.arch.sync_threads()
            if thread < config.channels:
                sValues[thread] = self.channel_of(sCells, thread)
            cute.arch.sync_threads()
            cute.autovec_copy(cute.local_tile(sValues, (VECTOR,), (lane,)), acc)
        return acc

    @cute.jit
    def channel_of(self, sParts: cute.Tensor, channel: Int32) -> Float32:
        """Pool one channel over all groups."""
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
    def follow(self, window: Window, history: History) -> None:
        """Replace the cells of the tail that a thread read by later tokens of this step, if any."""
        config, params = self.config, window.params
        rows = Int32(params.tail.rows)
        after = history.tokens - 1 - history.in_step  # tokens of the request after the window
        turns = Int32(Uint32(after) // Uint32(rows))
        rest = after - turns * rows
        aheads, any_wanted = cute.make_rmem_tensor(config.group_rows, Int32), Boolean(False)
        for index in cutlass.range_constexpr(config.group_rows):
            back = self.back_of(window.group, index)
            ahead = (turns + 1 if rest + back >= rows else turns) * rows - back
            source = window.token + ahead
            exists = ahead > 0 and source >= 0 and source < Int32(params.step.tokens)
            wanted = back > history.in_step and back <= history.known and exists
            aheads[index] = ahead if wanted else NOTHING
            any_wanted = any_wanted or wanted
        if any_wanted:
            self.replace(window, aheads)

    @cute.jit
    def replace(self, window: Window, aheads: cute.Tensor) -> None:
        """Replace cells of the tail, through sCells, by those of tokens `aheads` after the last
        row."""
        config, params, sCells = self.config, window.params, window.sCells
        tail = params.tail
        rows, apes = cute.make_rmem_tensor(config.group_rows, Int32), []
        for index in cutlass.range_constexpr(config.group_rows):
            wanted = aheads[index] != NOTHING
            column = self.column_of(window.group, index, window.column)
            ahead = aheads[index] if wanted else Int32(0)
            token = window.token + ahead
            row = entry_of(params.tables.tail_rows, token, tail.rows * tail.slots)
            rows[index] = row if wanted else Int32(-1)
            self.stage(sCells, index, step_cell(params.step, token, column), wanted)
            position = Int64(window.position + ahead)
            apes.append(ape_at(config, params.weights, position, column))
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        for index in cutlass.range_constexpr(config.group_rows):
            if rows[index] >= 0:
                values, scores = (self.cell_in(sCells, index, array) for array in range(ARRAYS))
                column = self.column_of(window.group, index, window.column)
                store_cell(config, tail, rows[index], column, values, scores, apes[index])

    @cute.jit
    def all_squares(self, exchange: Exchange | None, values: cute.Tensor, part: Int32) -> Float32:
        """Return the sum of squares over all channels of a window to all threads that need it."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        squares = sum_of_squares(values, min(config.lanes, WARP_THREADS))
        if cutlass.const_expr(config.slices > 1):
            cute.arch.cluster_wait()  # all CTAs have opened the exchange
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
    """Return the function to compile for `config`, and example arguments."""
    return Windows(config, arch).with_table(CompressParams)
