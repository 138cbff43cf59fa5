"""Entries of an online tail, and its rows: the tokens of a window one after another (device code).

`fmha.sparse.compressor.reference` is the definition, `fmha.sparse.compressor.config` who does
what. The running maximum, sum and value of a channel stay with one thread from token to token.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from fmha.sparse.compressor.clusters import Clusters, example_arguments
from fmha.sparse.compressor.config import VECTOR, WalkConfig
from fmha.sparse.compressor.device import (
    NUMBERS,
    Numbers,
    fused,
    index_at,
    load_norm,
    numbers_from,
    request_of,
    share_of,
    step_cell,
    store_entry,
    sum_of_squares,
)
from fmha.sparse.compressor.exchange import exchanged, open_exchange
from kernelkit.device_table import DeviceTable
from kernelkit.hw import WARP_THREADS
from kernelkit.online_softmax import finite
from kernelkit.warp_mma import copy_chunk
from kernelkit.words import vector_at
from kvcache.movement.device import (
    checked_entry,
    load_bytes,
    number_at,
    numbers_of,
    place_of,
    zeros,
)

ARRAYS = 2  # staged of a row: values, scores
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
        shape = (ARRAYS, config.rows, config.channels)
        layout = cute.make_ordered_layout(shape, order=(2, 1, 0))
        sRows = smem.allocate_tensor(Float32, layout, byte_alignment=128)
        sValues = smem.allocate_tensor(
            Float32, cute.make_layout(config.channels), byte_alignment=16
        )
        sKept = smem.allocate_tensor(Int32, cute.make_layout(config.rows))
        # What is added to the scores that a thread brings itself.
        apes = cute.make_rmem_tensor((VECTOR, config.turns), Float32)
        shared = (sRows, sKept, apes), (sValues, open_exchange(config.slices))
        if cutlass.const_expr(config.chunk):
            self.chunk(numbers, shared, item, part)
        else:
            begin, tokens, start = self.request(numbers, item)
            kept = begin + tokens - Int32(numbers.tail[2])
            range_ = item, begin, start, tokens, kept
            cute.arch.cluster_wait()  # all have opened the exchange
            self.run(numbers, shared, range_, (Boolean(True), Boolean(False)), part)

    @cute.jit
    def chunk(self, numbers: Numbers, shared: tuple, item: Int32, part: Int32) -> None:
        """The window of an end, or what is behind the last window of a request.

        Where the state before the step is what a window of it begins with, only who walks that
        window saves rows, and behind it, since they may take the place of that state.
        """
        config, ends = self.config, Int32(numbers.counts[0])
        (staging, _), (thread, _, _) = shared, cute.arch.thread_idx()
        owner, token, ratio = item - ends, Int32(-1), Int32(self.config.ratio)
        if item < ends:
            token = index_at(numbers.step[5], item)
        exists, begun = token >= 0 and token < Int32(numbers.source[4]), token >= ratio - 1
        token = token if exists else Int32(0)
        position = number_at(numbers.step[0], token)
        begin = token - (ratio - 1) if begun else Int32(0)
        owners = index_at(numbers.step[1], begin), index_at(numbers.step[1], token)
        kept_in = Int64(-1)
        for turn in cutlass.range_constexpr(-(-config.ratio // config.threads)):
            row = cutlass.min(begin + turn * config.threads + thread, token)
            kept_in = cutlass.max(kept_in, number_at(numbers.step[6], row))
        cute.arch.sync_warp()  # loads stay before it: behind rows they would come as late as those
        # As if all rows of the window were of this step, as nearly always.
        count = Int32(config.staged) if exists and begun else Int32(0)
        self.stage(numbers, staging[0], (begin, count), part)
        self.load_apes(numbers, staging[2], Int32(0), part)
        cute.arch.sync_warp()
        if item < ends:
            owner = owners[1] if exists else Int32(-1)
        inside = Int32(Uint32(position) % Uint32(config.ratio))
        whole = exists and begun and owners[0] == owners[1] and inside == ratio - 1
        whole = whole and owner >= 0 and owner < Int32(numbers.counts[1])
        range_ = owner, begin, position - (ratio - 1), ratio, Int32(numbers.source[4])
        tail, staged, emits = range_, Boolean(True), Boolean(True)
        if any_thread(kept_in >= 0 or not whole):
            range_, tail = self.ranges(numbers, (owner, token), item < ends)
            staged = range_[3] == ratio
            if not staged:
                cute.arch.cp_async_wait_group(0)  # rows of another request, or none
        else:
            tail = owner, begin, position, Int32(0), Int32(0)
        cute.arch.cluster_wait()  # all have opened the exchange
        for _ in cutlass.range(2, unroll=1):
            self.run(numbers, shared, range_, (emits, staged), part)
            range_, emits, staged = tail, Boolean(False), Boolean(False)

    @cute.jit
    def ranges(self, numbers: Numbers, who: tuple, is_end: Boolean) -> tuple:
        """Two ranges for `run`: of a window, and of what is behind it; who: (request, end)."""
        config, rows, (owner, token) = self.config, Int32(numbers.tail[2]), who
        ratio = Int32(config.ratio)
        first, tokens, start = self.request(numbers, owner)
        inside = Int32(Uint32(start) % Uint32(config.ratio))
        late = inside != 0 and inside + tokens >= ratio
        last, kept = start + tokens - 1, first + tokens - rows
        begin, count, saved, behind = start, Int32(0), kept, last + 1
        if is_end:
            end = start + (token - first)
            begin = cutlass.max(window_of(end, config.ratio), start)
            count = Int32(end - begin) + 1 if tokens > 0 else Int32(0)
            saved = Int32(numbers.source[4]) if late else kept
            behind = last + 1 - cutlass.min(rows, tokens)
        range_ = owner, first + Int32(begin - start), begin, count, saved
        saves = late and count < ratio if is_end else not late
        begin = cutlass.max(window_of(behind, config.ratio), start)
        others = Int32(last - begin) + 1 if saves and tokens > 0 else Int32(0)
        return range_, (owner, first + Int32(begin - start), begin, others, kept)

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
    def run(self, numbers: Numbers, shared: tuple, range_: tuple, how: tuple, part: Int32) -> None:
        """Walk tokens of a request: (request, first token, its position, how many, the first token
        whose state is kept). how: (whether windows become entries, whether the first rows are
        staged)."""
        config, (staging, (sValues, exchange)) = self.config, shared
        request, token, position, count, kept = range_
        emits, staged = how
        thread, _, _ = cute.arch.thread_idx()
        state, emitted = self.begun(numbers, request, (position, count), part), Int32(0)
        norm = cute.make_rmem_tensor(VECTOR, Float32), cute.make_rmem_tensor(VECTOR, Float32)
        end = (cute.make_rmem_tensor(1, Int64), norm)
        while count > 0:
            inside = Int32(Uint32(position) % Uint32(config.ratio))
            rows = cutlass.min(cutlass.min(count, config.ratio - inside), Int32(config.staged))
            if inside == 0:
                state = -Float32.inf, Float32(0.0), Float32(0.0)
            if not staged:
                self.load_apes(numbers, staging[2], inside, part)
                self.stage(numbers, staging[0], (token, rows), part)
            staged = Boolean(False)
            place = token, rows, kept, position
            state = self.walk(numbers, (staging, end), place, state, part)
            if emits and inside + rows == config.ratio:
                if thread < config.channels:
                    sValues[thread] = state[2] * cute.arch.rcp_approx(state[1])
                cute.arch.sync_threads()
                self.emit(numbers, (sValues, exchange), end, (part, emitted))
                emitted = emitted + 1
            token, position, count = token + rows, position + rows, count - rows
            cute.arch.sync_threads()  # before rows are staged where others were

    @cute.jit
    def load_end(self, numbers: Numbers, end: tuple, place: tuple, part: Int32) -> None:
        """For the entry that a token completes: (entry as its table has it, what a lane needs of
        the norm). place: (token, a position in its window)."""
        config, (entry, norm), (token, position) = self.config, end, place
        found = load_norm(config, numbers, self.column(part), window_of(position, config.ratio))
        entry[0] = number_at(numbers.step[7], token)
        for tensor in cutlass.range_constexpr(2):
            for index in cutlass.range_constexpr(VECTOR):
                norm[tensor][index] = found[tensor][index]

    @cute.jit
    def column(self, part: Int32) -> Int32:
        """First channel of a lane."""
        thread, _, _ = cute.arch.thread_idx()
        return part * self.config.channels + thread % self.config.row_lanes * VECTOR

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
    def place_of_turn(self, turn: cutlass.Constexpr[int]) -> tuple:
        """(row, first channel) that a thread brings."""
        thread, _, _ = cute.arch.thread_idx()
        lanes = self.config.row_lanes
        return turn * self.config.lines + thread // lanes, thread % lanes * VECTOR

    @cute.jit
    def load_apes(self, numbers: Numbers, apes: cute.Tensor, inside: Int32, part: Int32) -> None:
        """What is added to the scores of rows of which the first has this place in the window."""
        config = self.config
        for turn in cutlass.range_constexpr(config.turns):
            row, channel = self.place_of_turn(turn)
            phase = Int64(cutlass.min(inside + row, Int32(config.ratio - 1)))
            column = Int64(part * config.channels + channel) * 4
            load_bytes(numbers.weights[0] + phase * numbers.weights[2] + column, apes[None, turn])

    @cute.jit
    def stage(self, numbers: Numbers, sRows: cute.Tensor, rows: tuple, part: Int32) -> None:
        """Values and scores of rows to shared memory, a group of copies for each batch; rows:
        (first token, how many). Zeros for tokens below 0, and behind the last row."""
        config, (token, count) = self.config, rows
        for turn in cutlass.range_constexpr(config.turns):
            row, channel = self.place_of_turn(turn)
            cells = step_cell(numbers, token + row, part * config.channels + channel)
            exists = token + row >= 0 and row < count
            for array in cutlass.range_constexpr(ARRAYS):
                place = (array * config.rows + row) * config.channels + channel
                copy_chunk(sRows.iterator.toint() + place * 4, cells[array], exists)
            if cutlass.const_expr((turn + 1) % config.batch_turns == 0 or turn + 1 == config.turns):
                cute.arch.cp_async_commit_group()

    @cute.jit
    def add_apes(self, staging: tuple, batch: cutlass.Constexpr[int]) -> None:
        """To the scores of a batch that a thread has brought, for all who walk them."""
        config, (sRows, _, apes) = self.config, staging
        begin = batch * config.batch_turns
        for turn in cutlass.range_constexpr(begin, min(begin + config.batch_turns, config.turns)):
            row, channel = self.place_of_turn(turn)
            sScores = cute.local_tile(sRows[1, row, None], (VECTOR,), (channel // VECTOR,))
            scores = zeros(VECTOR, Float32)
            cute.autovec_copy(sScores, scores)
            for index in cutlass.range_constexpr(VECTOR):
                scores[index] = scores[index] + apes[index, turn]
            cute.autovec_copy(scores, sScores)

    @cute.jit
    def walk(self, numbers: Numbers, where: tuple, rows: tuple, state: tuple, part: Int32) -> tuple:
        """(maximum, sum, value) after these rows: (first token, how many, the first token whose
        state is kept, position of the first). where: (staging, what `load_end` fills)."""
        config, (token, count, kept, position), (staging, end_) = self.config, rows, where
        sRows, sKept, _ = staging
        thread, _, _ = cute.arch.thread_idx()
        number, saves = Int64(-1), thread < count and token + thread >= kept
        if saves:
            number = number_at(numbers.step[6], token + thread)
        for batch in cutlass.range(config.batches, unroll=1):
            for known in cutlass.range_constexpr(config.batches):
                if batch == known:
                    cute.arch.cp_async_wait_group(config.batches - 1 - known)
                    self.add_apes(staging, known)
            if batch == config.batches - 1:  # before, ptxas would wait for these with the ape
                self.load_end(numbers, end_, (token + count - 1, position), part)
            begin = batch * config.batch_turns * config.lines
            end = cutlass.min(count, Int32(begin + config.batch_turns * config.lines))
            if saves and thread >= begin and thread < end:
                sKept[thread] = checked_entry(number, numbers.tail[2] * numbers.tail[3])
            cute.arch.sync_threads()
            first = cutlass.min(cutlass.max(kept - token, Int32(begin)), end)
            if thread < config.channels:
                for row in cutlass.range(begin, first, 1, unroll=UNROLLED):
                    state = one_more(state, sRows[0, row, thread], sRows[1, row, thread])
                for row in cutlass.range(first, end, 1, unroll=1):
                    state = one_more(state, sRows[0, row, thread], sRows[1, row, thread])
                    self.save(numbers, sKept[row], state, part)
        return state

    @cute.jit
    def save(self, numbers: Numbers, row: Int32, state: tuple, part: Int32) -> None:
        """A state to its row, if it has one."""
        if row >= 0:
            place = self.row_of(numbers, place_of(row, numbers.tail[2]), part)
            for index in cutlass.range_constexpr(3):
                gCell = vector_at(place + index * self.config.width * 4, Float32, 1)
                gCell[0] = state[index]

    @cute.jit
    def emit(self, numbers: Numbers, shared: tuple, end: tuple, who: tuple) -> None:
        """The entry of pooled channels; end: see `load_end`. who: (number of the CTA, how many
        entries came before)."""
        config, (sValues, exchange), (number, norm), (part, _) = self.config, shared, end, who
        thread, _, _ = cute.arch.thread_idx()
        values = zeros(VECTOR, Float32)
        lane = thread % config.row_lanes
        cute.autovec_copy(cute.local_tile(sValues, (VECTOR,), (lane,)), values)
        squares = exchanged(exchange, sum_of_squares(values, config.row_lanes), *who)
        entry, column = checked_entry(number[0], numbers.target[4]), self.column(part)
        entry = entry if thread < config.row_lanes else Int32(-1)
        if thread < WARP_THREADS:
            store_entry((config, self.arch), numbers, values, norm, (column, entry), squares)


@cute.jit
def any_thread(holds: Boolean) -> Boolean:
    """Whether it holds for a thread of the CTA; all threads wait for it."""
    found = cute.arch.inline_ptx(
        "{ .reg .pred mine, any; setp.ne.u32 mine, {$r0}, 0; "
        "barrier.cta.red.popc.aligned.u32 {$w0}, 0, mine; }",
        write_only_types=[Uint32],
        read_only_args=[Uint32(1) if holds else Uint32(0)],
    )
    return found != 0


@cute.jit
def window_of(position: Int64, ratio: cutlass.Constexpr[int]) -> Int64:
    """Where the window of a position begins."""
    return Int64(Uint32(position) // Uint32(ratio)) * ratio


@cute.jit
def one_more(state: tuple, value: Float32, score: Float32) -> tuple:
    """(maximum, sum, value) with another token."""
    top, total, acc = state
    rises = score > top  # one of both shares is exp(0)
    higher, lower = cute.arch.fmax(top, score), top if rises else score
    share = share_of(lower, finite(higher))
    old, new = share if rises else Float32(1.0), Float32(1.0) if rises else share
    # The same product and sum wherever it is compiled.
    return higher, fused(total, old, new), fused(value, new, acc * old)


def host_function(config: WalkConfig, arch: str) -> tuple:
    """What is compiled for `config`, and example arguments."""
    return Walk(config, arch), *example_arguments()
