"""Entries of an online tail, and its rows: the tokens of a window one after another (device code).

`kvcache.compressor.reference` is the definition, `kvcache.compressor.config` who does what. The
running maximum, sum and value of a channel stay with one thread from token to token.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from kernelkit.hw import WARP_THREADS
from kernelkit.online_softmax import finite
from kernelkit.param_table import DeviceTable
from kernelkit.warp_mma import copy_chunk
from kernelkit.words import vector_at
from kvcache.compressor.clusters import Clusters
from kvcache.compressor.config import VECTOR
from kvcache.compressor.device import (
    NUMBERS,
    Numbers,
    exchanged,
    fused,
    index_at,
    load_norm,
    numbers_from,
    prefetch_rows,
    request_of,
    share_of,
    store_entry,
    sum_of_squares,
)
from kvcache.kernels.device import entry_of, numbers_of, place_of, zeros

ARRAYS = 3  # staged of a row: values, scores, ape
UNROLLED = 8


class Walk(Clusters):
    """Kernel of one WalkConfig."""

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """A cluster has an end, or a request; its CTAs have its channels. See `__call__`."""
        config, numbers = self.config, numbers_from(numbers_of(table, NUMBERS))
        cta, _, _ = cute.arch.block_idx()
        item, part = cta // config.slices, cta % config.slices
        smem = SmemAllocator()
        shape = (ARRAYS, config.staged, config.channels)
        layout = cute.make_ordered_layout(shape, order=(2, 1, 0))
        sRows = smem.allocate_tensor(Float32, layout, byte_alignment=128)
        sValues = smem.allocate_tensor(
            Float32, cute.make_layout(config.channels), byte_alignment=16
        )
        sSquares = smem.allocate_tensor(Float32, cute.make_layout(config.slices))
        shared = sRows, sValues, sSquares
        cute.arch.cluster_arrive_relaxed()
        if cutlass.const_expr(config.chunk):
            if item < Int32(numbers.counts[0]):
                prefetch_rows(config, numbers, item, part)
            self.chunk(numbers, shared, item, part)
        else:
            begin, tokens, start = self.request(numbers, item)
            kept = begin + tokens - Int32(numbers.tail[2])
            range_ = item, begin, start, tokens, kept
            self.run(True, numbers, shared, range_, Boolean(False), part)
        cute.arch.cluster_wait()

    @cute.jit
    def chunk(self, numbers: Numbers, shared: tuple, item: Int32, part: Int32) -> None:
        """The window of an end, or what is behind the last window of a request.

        Where the state before the step is what a window of it begins with, only who walks that
        window saves rows, and behind it, since they may take the place of that state.
        """
        config, ends, rows = self.config, Int32(numbers.counts[0]), Int32(numbers.tail[2])
        owner, token, ratio = item - ends, Int32(-1), Int32(self.config.ratio)
        if item < ends:
            token, owner = index_at(numbers.step[5], item), Int32(-1)
            if token >= 0 and token < Int32(numbers.source[4]):
                # Its first rows if all of the window are of this step, as nearly always.
                rows_ahead = token - (ratio - 1), Int32(0), Int32(config.staged)
                self.stage(numbers, shared[0], rows_ahead, part)
                owner = index_at(numbers.step[1], token)
        first, tokens, start = self.request(numbers, owner)
        inside = Int32(Uint32(start) % Uint32(config.ratio))
        late = inside != 0 and inside + tokens >= ratio
        last, kept, behind = start + tokens - 1, first + tokens - rows, Int64(0)
        if item < ends:
            end = start + (token - first)
            begin = cutlass.max(window_of(end, config.ratio), start)
            count = Int32(end - begin) + 1 if tokens > 0 else Int32(0)
            here = first + Int32(begin - start)
            saved = Int32(numbers.source[4]) if late else kept
            if count < ratio:
                cute.arch.cp_async_wait_group(0)  # rows of another request, or none
            range_ = owner, here, begin, count, saved
            self.run(True, numbers, shared, range_, count == ratio, part)
            owner = owner if late and count < ratio else Int32(-1)
            behind = last + 1 - cutlass.min(rows, tokens)
        else:
            owner = Int32(-1) if late else owner
            behind = last + 1
        if owner >= 0 and tokens > 0:
            begin = cutlass.max(window_of(behind, config.ratio), start)
            here, count = first + Int32(begin - start), Int32(last - begin) + 1
            range_ = owner, here, begin, count, kept
            self.run(False, numbers, shared, range_, Boolean(False), part)

    @cute.jit
    def request(self, numbers: Numbers, index: Int32) -> tuple:
        """(first token, tokens, position of the first) of a request; no tokens of one that is not
        there."""
        first, tokens, start = Int32(0), Int32(0), Int64(0)
        if index >= 0 and index < Int32(numbers.counts[1]):
            first, tokens, start = request_of(numbers, index)
            inside = first >= 0 and first + tokens <= Int32(numbers.source[4])
            tokens = tokens if inside else Int32(0)
        return first, tokens, start

    @cute.jit
    def run(
        self,
        emits: cutlass.Constexpr[bool],
        numbers: Numbers,
        shared: tuple,
        range_: tuple,
        staged: Boolean,
        part: Int32,
    ) -> None:
        """Walk tokens of a request: (request, first token, its position, how many, the first token
        whose state is kept). emits: whether windows become entries. staged: the first rows are."""
        config, (sRows, sValues, sSquares) = self.config, shared
        request, token, position, count, kept = range_
        thread, _, _ = cute.arch.thread_idx()
        state = self.begun(numbers, request, (position, count), part)
        while count > 0:
            inside = Int32(Uint32(position) % Uint32(config.ratio))
            rows = cutlass.min(cutlass.min(count, config.ratio - inside), Int32(config.staged))
            if inside == 0:
                state = -Float32.inf, Float32(0.0), Float32(0.0)
            if not staged:
                self.stage(numbers, sRows, (token, inside, rows), part)
            staged = Boolean(False)
            state = self.walk(numbers, sRows, (token, rows, kept), state, part)
            if cutlass.const_expr(emits):
                if inside + rows == config.ratio:
                    if thread < config.channels:
                        sValues[thread] = state[2] * cute.arch.rcp_approx(state[1])
                    cute.arch.sync_threads()
                    self.emit(numbers, (sValues, sSquares), (token + rows - 1, position), part)
            token, position, count = token + rows, position + rows, count - rows
            cute.arch.sync_threads()  # before rows are staged where others were

    @cute.jit
    def begun(self, numbers: Numbers, request: Int32, range_: tuple, part: Int32) -> tuple:
        """(maximum, sum, value) of a thread's channel before the first token."""
        config, (position, count) = self.config, range_
        thread, _, _ = cute.arch.thread_idx()
        top, total, acc = -Float32.inf, Float32(0.0), Float32(0.0)
        resumed = count > 0 and Uint32(position) % Uint32(config.ratio) != 0
        if resumed and thread < config.channels:
            slot = index_at(numbers.step[4], request)
            if slot >= 0 and slot < Int32(numbers.tail[3]):
                row = Int64(Uint32(position - 1) % Uint32(numbers.tail[2]))
                place = self.row_of(numbers, (Int64(slot), row), part)
                top = vector_at(place, Float32, 1)[0]
                total = vector_at(place + config.width * 4, Float32, 1)[0]
                acc = vector_at(place + config.width * 8, Float32, 1)[0]
        return top, total, acc

    @cute.jit
    def row_of(self, numbers: Numbers, place: tuple, part: Int32) -> Int64:
        """Address of the maximum of a thread's channel in a row of the tail: (slot, row)."""
        config, (slot, row) = self.config, place
        thread, _, _ = cute.arch.thread_idx()
        address = numbers.tail[0] + slot * numbers.tail[1] + row * (3 * config.width * 4)
        return address + Int64(part * config.channels + thread) * 4

    @cute.jit
    def stage(self, numbers: Numbers, sRows: cute.Tensor, rows: tuple, part: Int32) -> None:
        """Values, scores and ape of rows to shared memory, in config.batches groups of copies;
        rows: (first token, its place in the window, how many). Zeros for tokens below 0."""
        config, (token, inside, count) = self.config, rows
        thread, _, _ = cute.arch.thread_idx()
        lane, line = thread % config.row_lanes, thread // config.row_lanes
        column = Int64(part * config.channels + lane * VECTOR) * 4
        target = sRows.iterator.toint() + lane * VECTOR * 4
        for batch in cutlass.range_constexpr(config.batches):
            begin = batch * config.batch_rows
            end = cutlass.min(count, Int32(begin + config.batch_rows))
            for row in cutlass.range(begin + line, end, config.lines, unroll=4):
                here, phase = Int64(token + row), Int64(inside + row)
                values = numbers.source[0] + here * numbers.source[2] + column
                scores = numbers.source[1] + here * numbers.source[3] + column
                ape = numbers.weights[0] + phase * numbers.weights[2] + column
                place = target + row * config.channels * 4
                for index in cutlass.range_constexpr(ARRAYS):
                    size = index * config.staged * config.channels * 4
                    copy_chunk(place + size, (values, scores, ape)[index], here >= 0)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def walk(
        self, numbers: Numbers, sRows: cute.Tensor, rows: tuple, state: tuple, part: Int32
    ) -> tuple:
        """(maximum, sum, value) after these rows: (first token, how many, the first token whose
        state is kept)."""
        config, (token, count, kept) = self.config, rows
        thread, _, _ = cute.arch.thread_idx()
        for batch in cutlass.range_constexpr(config.batches):
            cute.arch.cp_async_wait_group(config.batches - 1 - batch)
            cute.arch.sync_threads()
            begin = batch * config.batch_rows
            end = cutlass.min(count, Int32(begin + config.batch_rows))
            first = cutlass.min(cutlass.max(kept - token, Int32(begin)), end)
            if thread < config.channels:
                for row in cutlass.range(begin, first, 1, unroll=UNROLLED):
                    state = one_more(state, *row_of(sRows, row, thread))
                for row in cutlass.range(first, end, 1, unroll=1):
                    state = one_more(state, *row_of(sRows, row, thread))
                    self.save(numbers, token + row, state, part)
        return state

    @cute.jit
    def save(self, numbers: Numbers, token: Int32, state: tuple, part: Int32) -> None:
        """The state after a token to its row, if it has one."""
        tail = numbers.tail
        row = entry_of(numbers.step[6], token, tail[2] * tail[3])
        if row >= 0:
            place = self.row_of(numbers, place_of(row, tail[2]), part)
            for index in cutlass.range_constexpr(3):
                gCell = vector_at(place + index * self.config.width * 4, Float32, 1)
                gCell[0] = state[index]

    @cute.jit
    def emit(self, numbers: Numbers, shared: tuple, end: tuple, part: Int32) -> None:
        """The entry of pooled channels; end: (token that completes it, position of some token)."""
        config, (sValues, sSquares), (token, position) = self.config, shared, end
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % config.row_lanes
        values = zeros(VECTOR, Float32)
        cute.autovec_copy(cute.local_tile(sValues, (VECTOR,), (lane,)), values)
        squares = exchanged(sSquares, sum_of_squares(values, config.row_lanes), part)
        cute.arch.cluster_arrive()  # ours are read, for the entry behind this one
        if thread < WARP_THREADS:
            column = part * config.channels + lane * VECTOR
            entry = entry_of(numbers.step[7], token, numbers.target[4])
            entry = entry if thread < config.row_lanes else Int32(-1)
            norm = load_norm(config, numbers, column, window_of(position, config.ratio))
            store_entry((config, self.arch), numbers, values, norm, (column, entry), squares)


@cute.jit
def row_of(sRows: cute.Tensor, row: Int32, channel: Int32) -> tuple:
    """(value, score with ape) of a staged row."""
    return sRows[0, row, channel], sRows[1, row, channel] + sRows[2, row, channel]


@cute.jit
def window_of(position: Int64, ratio: cutlass.Constexpr[int]) -> Int64:
    """Where the window of a position begins."""
    return Int64(Uint32(position) // Uint32(ratio)) * ratio


@cute.jit
def one_more(state: tuple, value: Float32, score: Float32) -> tuple:
    """(maximum, sum, value) with another token."""
    top, total, acc = state
    higher = cute.arch.fmax(top, score)
    base = finite(higher)
    old, new = share_of(top, base), share_of(score, base)
    # The same product and sum wherever it is compiled.
    return higher, fused(total, old, new), fused(value, new, acc * old)
