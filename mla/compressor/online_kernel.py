"""Entries of an online tail, and its rows: the tokens of a window one by one (device code).

`mla.compressor.reference` is the definition; `mla.compressor.config` describes the division of
work. The running maximum, sum and value of a channel stay in one thread from token to token.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from kernelkit.device.online_softmax import finite
from kernelkit.device.warp_mma import copy_chunk
from kernelkit.device.words import fused, vector_at
from kernelkit.plan.hw import WARP_THREADS
from kvcache.movement.device import (
    SlotRow,
    checked_entry,
    int32_at,
    int64_at,
    load_bytes,
    slot_row,
    zeros,
)
from mla.compressor.config import VECTOR, WalkConfig
from mla.compressor.device import (
    Clusters,
    Exchange,
    Norm,
    Request,
    exchanged,
    load_norm,
    open_exchange,
    request_of,
    share_of,
    step_cell,
    store_entry,
    sum_of_squares,
)
from mla.compressor.params import CompressParams

ARRAYS = 2  # staged arrays of a row: values, scores
UNROLLED = 8


@dataclass(frozen=True)
class Scope:
    """State shared by all code of a CTA.

    part: number of the CTA in its cluster, which selects a slice of channels.
    """

    params: CompressParams
    part: Int32
    sRows: cute.Tensor  # fp32 (values or scores, row, channel)
    sKept: cute.Tensor  # int32 (row), tail row for the state after a token, or -1
    sValues: cute.Tensor  # fp32 (channel), pooled
    apes: cute.Tensor  # fp32 (VECTOR, turn), terms for the scores that a thread loads
    exchange: Exchange


@dataclass(frozen=True)
class Range:
    """Tokens of a request that are walked one by one.

    token: the first token.
    position: position of the first token.
    kept: the first token whose state is kept.
    """

    request: Int32
    token: Int32
    position: Int64
    count: Int32
    kept: Int32


@dataclass(frozen=True)
class State:
    """The softmax of a channel so far: maximum, sum of shares, sum of weighted values."""

    top: Float32
    total: Float32
    acc: Float32


@dataclass(frozen=True)
class End:
    """Registers loaded for the entry that a token completes."""

    entry: cute.Tensor  # int64 (1), as in its table
    norm: Norm


class Walk(Clusters):
    """Kernel of one WalkConfig."""

    @cute.jit
    def run_cta(self, params: CompressParams, cta: Int32) -> None:
        """A cluster has an end, or a request; its CTAs divide the channels."""
        config = self.config
        item, part = cta // config.slices, cta % config.slices
        scope = self.scope(params, part)
        if cutlass.const_expr(config.chunk):
            self.chunk(scope, item)
        else:
            request = self.request(params, item)
            kept = request.first + request.tokens - Int32(params.tail.rows)
            tokens = Range(item, request.first, request.start, request.tokens, kept)
            cute.arch.cluster_wait()  # all CTAs have opened the exchange
            self.run(scope, tokens, Boolean(True), Boolean(False))

    def scope(self, params: CompressParams, part: Int32) -> Scope:
        """Allocate the tensors of `Scope`, and open the exchange."""
        config, smem = self.config, SmemAllocator()
        shape = (ARRAYS, config.rows, config.channels)
        layout = cute.make_ordered_layout(shape, order=(2, 1, 0))
        sRows = smem.allocate_tensor(Float32, layout, byte_alignment=128)
        sValues = smem.allocate_tensor(
            Float32, cute.make_layout(config.channels), byte_alignment=16
        )
        sKept = smem.allocate_tensor(Int32, cute.make_layout(config.rows))
        apes = cute.make_rmem_tensor((VECTOR, config.turns), Float32)
        return Scope(params, part, sRows, sKept, sValues, apes, open_exchange(config.slices))

    @cute.jit
    def chunk(self, scope: Scope, item: Int32) -> None:
        """Process the window of an end, or the tokens after the last window of a request.

        If a window of the step begins with the state from before the step, only the cluster that
        walks that window saves rows, after the walk, since they may overwrite that state.
        """
        config, params, tables = self.config, scope.params, scope.params.tables
        ends = Int32(params.counts.ends)
        thread, _, _ = cute.arch.thread_idx()
        owner, token, ratio = item - ends, Int32(-1), Int32(self.config.ratio)
        if item < ends:
            token = int32_at(tables.ends, item)
        exists, begun = token >= 0 and token < Int32(params.step.tokens), token >= ratio - 1
        token = token if exists else Int32(0)
        position = int64_at(tables.positions, token)
        begin = token - (ratio - 1) if begun else Int32(0)
        first_owner, last_owner = int32_at(tables.owners, begin), int32_at(tables.owners, token)
        kept_in = Int64(-1)
        for turn in cutlass.range_constexpr(-(-config.ratio // config.threads)):
            row = cutlass.min(begin + turn * config.threads + thread, token)
            kept_in = cutlass.max(kept_in, int64_at(tables.tail_rows, row))
        # It keeps the loads before it: issued after the rows, they would complete as late as these.
        cute.arch.sync_warp()
        # Assume that all rows of the window are of this step, as they nearly always are.
        count = Int32(config.staged) if exists and begun else Int32(0)
        self.stage(scope, begin, count)
        self.load_apes(scope, Int32(0))
        cute.arch.sync_warp()
        if item < ends:
            owner = last_owner if exists else Int32(-1)
        inside = Int32(Uint32(position) % Uint32(config.ratio))
        whole = exists and begun and first_owner == last_owner and inside == ratio - 1
        whole = whole and owner >= 0 and owner < Int32(params.counts.requests)
        tokens = Range(owner, begin, position - (ratio - 1), ratio, Int32(params.step.tokens))
        tail, staged, emits = tokens, Boolean(True), Boolean(True)
        if any_thread(kept_in >= 0 or not whole):
            tokens, tail = self.ranges(params, owner, token, item < ends)
            staged = tokens.count == ratio
            if not staged:
                cute.arch.cp_async_wait_group(0)  # rows of another request, or none
        else:
            tail = Range(owner, begin, position, Int32(0), Int32(0))
        cute.arch.cluster_wait()  # all CTAs have opened the exchange
        for _ in cutlass.range(2, unroll=1):
            self.run(scope, tokens, emits, staged)
            tokens, emits, staged = tail, Boolean(False), Boolean(False)

    @cute.jit
    def ranges(
        self, params: CompressParams, owner: Int32, token: Int32, is_end: Boolean
    ) -> tuple[Range, Range]:
        """Return the tokens of a window that `run` walks, and those after it.

        token: the window's end.
        """
        config, rows, ratio = self.config, Int32(params.tail.rows), Int32(self.config.ratio)
        request = self.request(params, owner)
        first, tokens, start = request.first, request.tokens, request.start
        inside = Int32(Uint32(start) % Uint32(config.ratio))
        late = inside != 0 and inside + tokens >= ratio
        last, kept = start + tokens - 1, first + tokens - rows
        begin, count, saved, behind = start, Int32(0), kept, last + 1
        if is_end:
            end = start + (token - first)
            begin = cutlass.max(window_of(end, config.ratio), start)
            count = Int32(end - begin) + 1 if tokens > 0 else Int32(0)
            saved = Int32(params.step.tokens) if late else kept
            behind = last + 1 - cutlass.min(rows, tokens)
        window = Range(owner, first + Int32(begin - start), begin, count, saved)
        saves = late and count < ratio if is_end else not late
        begin = cutlass.max(window_of(behind, config.ratio), start)
        others = Int32(last - begin) + 1 if saves and tokens > 0 else Int32(0)
        return window, Range(owner, first + Int32(begin - start), begin, others, kept)

    @cute.jit
    def request(self, params: CompressParams, index: Int32) -> Request:
        """Return a request by its number; without tokens if it does not exist."""
        first, tokens, start = Int32(0), Int32(0), Int64(0)
        if index >= 0 and index < Int32(params.counts.requests):
            found = request_of(params.tables, index)
            first, tokens, start = found.first, found.tokens, found.start
            inside = first >= 0 and first + tokens <= Int32(params.step.tokens)
            tokens = tokens if inside else Int32(0)
        return Request(first, tokens, start)

    @cute.jit
    def run(self, scope: Scope, tokens: Range, emits: Boolean, staged: Boolean) -> None:
        """Walk tokens of a request.

        emits: whether windows become entries.
        staged: whether the first rows are in shared memory, or in flight.
        """
        config = self.config
        token, position, count = tokens.token, tokens.position, tokens.count
        thread, _, _ = cute.arch.thread_idx()
        state, emitted = self.begun(scope, tokens), Int32(0)
        norm = Norm(cute.make_rmem_tensor(VECTOR, Float32), cute.make_rmem_tensor(VECTOR, Float32))
        end = End(cute.make_rmem_tensor(1, Int64), norm)
        while count > 0:
            inside = Int32(Uint32(position) % Uint32(config.ratio))
            rows = cutlass.min(cutlass.min(count, config.ratio - inside), Int32(config.staged))
            if inside == 0:
                state = State(-Float32.inf, Float32(0.0), Float32(0.0))
            if not staged:
                self.load_apes(scope, inside)
                self.stage(scope, token, rows)
            staged = Boolean(False)
            batch = Range(tokens.request, token, position, rows, tokens.kept)
            state = self.walk(scope, end, batch, state)
            if emits and inside + rows == config.ratio:
                if thread < config.channels:
                    scope.sValues[thread] = state.acc * cute.arch.rcp_approx(state.total)
                cute.arch.sync_threads()
                self.emit(scope, end, emitted)
                emitted = emitted + 1
            token, position, count = token + rows, position + rows, count - rows
            cute.arch.sync_threads()  # before rows overwrite others

    @cute.jit
    def load_end(self, scope: Scope, end: End, token: Int32, position: Int64) -> None:
        """Fill `end` for the entry that a token completes. position: any position in its window."""
        begin = window_of(position, self.config.ratio)
        found = load_norm(self.config, scope.params, self.column(scope), begin)
        end.entry[0] = int64_at(scope.params.tables.entries, token)
        for index in cutlass.range_constexpr(VECTOR):
            end.norm.weight[index] = found.weight[index]
        for index in cutlass.range_constexpr(VECTOR):
            end.norm.angles[index] = found.angles[index]

    @cute.jit
    def column(self, scope: Scope) -> Int32:
        """Return the first channel of a lane."""
        thread, _, _ = cute.arch.thread_idx()
        return scope.part * self.config.channels + thread % self.config.row_lanes * VECTOR

    @cute.jit
    def begun(self, scope: Scope, tokens: Range) -> State:
        """Return the state of a thread's channel before the first token: from the tail if that is
        inside a window."""
        config, tail, position = self.config, scope.params.tail, tokens.position
        thread, _, _ = cute.arch.thread_idx()
        top, total, acc = -Float32.inf, Float32(0.0), Float32(0.0)
        resumed = tokens.count > 0 and Uint32(position) % Uint32(config.ratio) != 0
        if resumed and thread < config.channels:
            slot = int32_at(scope.params.tables.state_slots, tokens.request)
            if slot >= 0 and slot < Int32(tail.slots):
                row = Int64(Uint32(position - 1) % Uint32(tail.rows))
                address = self.state_address(scope, SlotRow(Int64(slot), row))
                top = vector_at(address, Float32, 1)[0]
                total = vector_at(address + config.width * 4, Float32, 1)[0]
                acc = vector_at(address + config.width * 8, Float32, 1)[0]
        return State(top, total, acc)

    @cute.jit
    def state_address(self, scope: Scope, place: SlotRow) -> Int64:
        """Return the address of the maximum of a thread's channel in a row of the tail."""
        config, tail = self.config, scope.params.tail
        thread, _, _ = cute.arch.thread_idx()
        row = tail.address + place.slot * tail.slot_stride + place.row * (3 * config.width * 4)
        return row + Int64(scope.part * config.channels + thread) * 4

    @cute.jit
    def row_of_turn(self, turn: cutlass.Constexpr[int]) -> tuple[Int32, Int32]:
        """Return the row that a thread loads in a turn, and its first channel."""
        thread, _, _ = cute.arch.thread_idx()
        lanes = self.config.row_lanes
        return turn * self.config.lines + thread // lanes, thread % lanes * VECTOR

    @cute.jit
    def load_apes(self, scope: Scope, inside: Int32) -> None:
        """Load the `ape` terms of rows whose first one is at place `inside` of the window."""
        config, weights = self.config, scope.params.weights
        for turn in cutlass.range_constexpr(config.turns):
            row, channel = self.row_of_turn(turn)
            phase = Int64(cutlass.min(inside + row, Int32(config.ratio - 1)))
            column = Int64(scope.part * config.channels + channel) * 4
            address = weights.ape + phase * weights.ape_stride + column
            load_bytes(address, scope.apes[None, turn])

    @cute.jit
    def stage(self, scope: Scope, token: Int32, count: Int32) -> None:
        """Copy values and scores of `count` tokens from `token` on to shared memory, one group of
        copies per batch; zeros for tokens below 0, and after the last row."""
        config = self.config
        for turn in cutlass.range_constexpr(config.turns):
            row, channel = self.row_of_turn(turn)
            cell = step_cell(scope.params.step, token + row, scope.part * config.channels + channel)
            exists = token + row >= 0 and row < count
            for array, source in enumerate((cell.values, cell.scores)):
                place = (array * config.rows + row) * config.channels + channel
                copy_chunk(scope.sRows.iterator.toint() + place * 4, source, exists)
            if cutlass.const_expr((turn + 1) % config.batch_turns == 0 or turn + 1 == config.turns):
                cute.arch.cp_async_commit_group()

    @cute.jit
    def add_apes(self, scope: Scope, batch: cutlass.Constexpr[int]) -> None:
        """Add the ape terms to the scores of a batch that this thread loaded; other threads walk
        it."""
        config, sRows, apes = self.config, scope.sRows, scope.apes
        begin = batch * config.batch_turns
        for turn in cutlass.range_constexpr(begin, min(begin + config.batch_turns, config.turns)):
            row, channel = self.row_of_turn(turn)
            sScores = cute.local_tile(sRows[1, row, None], (VECTOR,), (channel // VECTOR,))
            scores = zeros(VECTOR, Float32)
            cute.autovec_copy(sScores, scores)
            for index in cutlass.range_constexpr(VECTOR):
                scores[index] = scores[index] + apes[index, turn]
            cute.autovec_copy(scores, sScores)

    @cute.jit
    def walk(self, scope: Scope, end: End, tokens: Range, state: State) -> State:
        """Return the state after staged tokens of one window, from the state before them.

        The walk also fills `end`.
        """
        config, sRows, tail = self.config, scope.sRows, scope.params.tail
        token, count = tokens.token, tokens.count
        thread, _, _ = cute.arch.thread_idx()
        number, saves = Int64(-1), thread < count and token + thread >= tokens.kept
        if saves:
            number = int64_at(scope.params.tables.tail_rows, token + thread)
        for batch in cutlass.range(config.batches, unroll=1):
            for known in cutlass.range_constexpr(config.batches):
                if batch == known:
                    cute.arch.cp_async_wait_group(config.batches - 1 - known)
                    self.add_apes(scope, known)
            # If these loads came earlier, ptxas would wait for them together with the ape.
            if batch == config.batches - 1:
                self.load_end(scope, end, token + count - 1, tokens.position)
            begin = batch * config.batch_turns * config.lines
            stop = cutlass.min(count, Int32(begin + config.batch_turns * config.lines))
            if saves and thread >= begin and thread < stop:
                scope.sKept[thread] = checked_entry(number, tail.rows * tail.slots)
            cute.arch.sync_threads()
            first = cutlass.min(cutlass.max(tokens.kept - token, Int32(begin)), stop)
            if thread < config.channels:
                for row in cutlass.range(begin, first, 1, unroll=UNROLLED):
                    state = one_more(state, sRows[0, row, thread], sRows[1, row, thread])
                for row in cutlass.range(first, stop, 1, unroll=1):
                    state = one_more(state, sRows[0, row, thread], sRows[1, row, thread])
                    self.save(scope, scope.sKept[row], state)
        return state

    @cute.jit
    def save(self, scope: Scope, row: Int32, state: State) -> None:
        """Store a state to its row of the tail, if it has one."""
        if row >= 0:
            address = self.state_address(scope, slot_row(row, scope.params.tail.rows))
            for index, number in enumerate((state.top, state.total, state.acc)):
                gCell = vector_at(address + index * self.config.width * 4, Float32, 1)
                gCell[0] = number

    @cute.jit
    def emit(self, scope: Scope, end: End, emitted: Int32) -> None:
        """Store the entry of pooled channels. emitted: number of earlier entries."""
        config, params = self.config, scope.params
        thread, _, _ = cute.arch.thread_idx()
        values = zeros(VECTOR, Float32)
        lane = thread % config.row_lanes
        cute.autovec_copy(cute.local_tile(scope.sValues, (VECTOR,), (lane,)), values)
        squares = sum_of_squares(values, config.row_lanes)
        squares = exchanged(scope.exchange, squares, scope.part, emitted)
        entry, column = checked_entry(end.entry[0], params.entries.count), self.column(scope)
        entry = entry if thread < config.row_lanes else Int32(-1)
        if thread < WARP_THREADS:
            store_entry(config, self.arch, params, values, end.norm, column, entry, squares)


@cute.jit
def any_thread(holds: Boolean) -> Boolean:
    """Whether `holds` is true for any thread of the CTA; all threads wait for each other."""
    found = cute.arch.inline_ptx(
        "{ .reg .pred mine, any; setp.ne.u32 mine, {$r0}, 0; "
        "barrier.cta.red.popc.aligned.u32 {$w0}, 0, mine; }",
        write_only_types=[Uint32],
        read_only_args=[Uint32(1) if holds else Uint32(0)],
    )
    return found != 0


@cute.jit
def window_of(position: Int64, ratio: cutlass.Constexpr[int]) -> Int64:
    """Return the first position of the window that contains `position`."""
    return Int64(Uint32(position) // Uint32(ratio)) * ratio


@cute.jit
def one_more(state: State, value: Float32, score: Float32) -> State:
    """Add a token to the state."""
    top = state.top
    rises = score > top  # one of the two shares is exp(0)
    higher, lower = cute.arch.fmax(top, score), top if rises else score
    share = share_of(lower, finite(higher))
    old, new = share if rises else Float32(1.0), Float32(1.0) if rises else share
    # The product and sum are the same wherever this is compiled.
    return State(higher, fused(state.total, old, new), fused(value, new, state.acc * old))


def host_function(config: WalkConfig, arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return Walk(config, arch).with_table(CompressParams)
