"""Stable sort of rows by expert: ranks, a scan, a scatter (device code).

Slots are divided into chunks, one per CTA, a chunk into rounds, and a round into runs of
neighbouring slots, one per warp. Within 32 slots, votes count the earlier slots of the same expert.
A row of shared memory per warp counts those in its earlier groups of 32. The row of a slot adds the
sums over lower warps, lower experts and lower chunks. Nothing depends on the order in which warps
run.

A slot has no row if its id is not an expert with rows, such as the -1 of padding or an expert of
another rank. It is neither ranked nor scattered, and nothing outside of shared memory is accessed
for it.

One CTA needs one launch. With several, `Count` first writes the counts of every chunk. While it
runs, each CTA of `Scatter` sorts its first round in shared memory. Then it adds up the counts that
it needs, and writes runs of neighbouring rows.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Uint32
from cutlass.memory import SmemAllocator

from kernelkit.device.dependent import follow
from kernelkit.device.fake import fake_tensor
from kernelkit.device.lanes import sum_below
from kernelkit.plan.hw import WARP_THREADS
from moe.routing.config import VECTOR_BYTES, WORDS_IN_FLIGHT, PermutationConfig
from moe.routing.warp import is_first, lanes_alike, lanes_below

VECTOR = VECTOR_BYTES // 4
HALF = 16  # bits of a packed count, and bits below the expert in a word of sSorted


@dataclass(frozen=True)
class Choices:
    """Experts of slots: ids (R,) int32. first: first expert of a range; None for all."""

    ids: cute.Tensor
    first: Int32 | None = None


@dataclass(frozen=True)
class Run:
    """Slots of a warp in a round."""

    first: Int32  # slot of the warp's first lane
    inside: Int32  # `first`, relative to the first slot of the CTA's round
    experts: cute.Tensor  # experts of this lane's slots, by turn
    ranks: cute.Tensor  # earlier slots of the run with the same expert, by turn


@cute.jit
def experts_of(
    config: PermutationConfig, chosen: Choices, first: Int32, step: cutlass.Constexpr[int]
) -> cute.Tensor:
    """Return the experts of a lane's slots in a round, `step` apart, relative to the first expert
    that has rows. A slot without a row has expert E. All loads are in flight together."""
    (rows,) = chosen.ids.shape
    ids, experts = (cute.make_rmem_tensor(config.turns, Int32) for _ in range(2))
    ids.fill(0)
    for turn in cutlass.range_constexpr(config.turns):
        if first + turn * step < rows:
            ids[turn] = chosen.ids[first + turn * step]
    for turn in cutlass.range_constexpr(config.turns):
        local = Uint32(ids[turn])  # huge for a negative id
        if cutlass.const_expr(config.partial):
            local = Uint32(ids[turn] - chosen.first)  # and for experts before the first one
        expert = Int32(cutlass.min(local, Uint32(config.experts)))
        experts[turn] = expert if first + turn * step < rows else Int32(config.experts)
    return experts


@cute.jit
def clear(config: PermutationConfig, sCounts: cute.Tensor) -> None:
    """Zero a contiguous tensor of whole vectors, with all threads of the CTA."""
    thread, _, _ = cute.arch.thread_idx()
    size = cute.size(sCounts)
    sWords = cute.make_tensor(sCounts.iterator, cute.make_layout(size))
    zeros = cute.make_rmem_tensor(VECTOR, Int32)
    zeros.fill(0)
    for first in cutlass.range_constexpr(0, size // VECTOR, config.threads):
        if first + thread < size // VECTOR:
            cute.autovec_copy(zeros, cute.local_tile(sWords, (VECTOR,), (first + thread,)))


class Count:
    """First of two launches: counts the experts of every chunk."""

    def __init__(self, config: PermutationConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        ids: cute.Tensor,
        first: Int32 | None,
        counts: cute.Tensor,
        rounds: Int32,
        stream: CUstream,
    ) -> None:
        """Launch the kernel.

        Args:
            ids, first: the fields of `Choices`.
            counts: int32, `words` of each chunk.
            rounds: rounds of a chunk.
        """
        chunks = cute.size(counts) // self.config.words
        self.kernel(Choices(ids, first), counts, rounds).launch(
            grid=(chunks, 1, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, chosen: Choices, counts: cute.Tensor, rounds: Int32) -> None:
        """Grid (chunks,); see `__call__`."""
        config = self.config
        chunk, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        room = config.words * config.per_word
        sCounts = SmemAllocator().allocate_tensor(Int32, cute.make_layout(room), VECTOR_BYTES)
        clear(config, sCounts)
        cute.arch.sync_threads()
        # Only now: `Scatter` reads ids without waiting, once all CTAs of this grid have arrived.
        follow()
        for turn in cutlass.range(rounds, unroll=1):
            first = (chunk * rounds + turn) * config.slots + thread
            experts = experts_of(config, chosen, first, config.threads)
            for index in cutlass.range_constexpr(config.turns):
                if experts[index] < config.experts:
                    # A sum of integers does not depend on the order.
                    place = sCounts.iterator + experts[index]
                    cute.arch.atomic_add(place, Int32(1), sem="relaxed", scope="cta")
        cute.arch.sync_threads()
        for word in cutlass.range(thread, config.words, config.threads, unroll=1):
            counts[chunk * config.words + word] = self.packed(sCounts, word)

    @cute.jit
    def packed(self, sCounts: cute.Tensor, word: Int32) -> Int32:
        """Return a word of the table of counts."""
        if cutlass.const_expr(self.config.packed):
            return sCounts[2 * word] | sCounts[2 * word + 1] << HALF
        return sCounts[word]


class Scatter:
    """Second or only launch: writes offsets and both directions of the permutation."""

    def __init__(self, config: PermutationConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        ids: cute.Tensor,
        first: Int32 | None,
        counts: cute.Tensor | None,
        outputs: tuple[cute.Tensor, ...],
        rounds: Int32,
        chunks: Int32,
        stream: CUstream,
    ) -> None:
        """Launch the kernel.

        Args:
            ids, first: the fields of `Choices`.
            counts: result of `Count`; None for one chunk of one round.
            outputs: offsets (E + 1,), slot_of_row (R,), row_of_slot (R,), all int32.
        """
        self.kernel(Choices(ids, first), counts, *outputs, rounds).launch(
            grid=(chunks, 1, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        chosen: Choices,
        counts: cute.Tensor | None,
        gOffsets: cute.Tensor,
        gSlotOfRow: cute.Tensor,
        gRowOfSlot: cute.Tensor,
        rounds: Int32,
    ) -> None:
        """Grid (chunks,); see `__call__`."""
        config = self.config
        chunk, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        smem = SmemAllocator()
        sRuns = smem.allocate_tensor(
            Int32,
            cute.make_ordered_layout((config.warps, config.experts), order=(1, 0)),
            VECTOR_BYTES,
        )
        sTotals = smem.allocate_tensor(Int32, cute.make_layout(config.warps))
        if cutlass.const_expr(not config.chunked):
            follow()
            run = self.rank(chosen, chunk, sRuns)
            self.place_runs(sRuns, sTotals, gOffsets)
            cute.arch.sync_threads()
            self.scatter(chosen, run, sRuns, None, gSlotOfRow, gRowOfSlot)
        else:
            sSorted = smem.allocate_tensor(Int32, cute.make_layout(config.slots))
            # Per expert: row minus position in the sorted round. Last word: number of used slots.
            sDeltas = smem.allocate_tensor(Int32, cute.make_layout(config.experts + 1))
            layout = cute.make_ordered_layout((config.parts, config.words), order=(1, 0))
            sParts = smem.allocate_tensor(Int32, layout, VECTOR_BYTES)
            base = Int32(0)  # of thread e: the next row of expert e for a slot of this chunk
            for turn in cutlass.range(rounds, unroll=1):
                # The previous launch waited for the writer of ids before it let this one begin.
                run = self.rank(chosen, chunk * rounds + turn, sRuns)
                begin, count = self.place_runs(sRuns, sTotals, None)
                cute.arch.sync_threads()
                self.sort(run, sRuns, sSorted)
                if turn == 0:
                    follow()
                    base = self.find_base(counts, sParts, sTotals, gOffsets)
                if thread < config.experts:
                    sDeltas[thread] = base - begin
                    if thread == config.experts - 1:
                        sDeltas[config.experts] = begin + count
                base += count
                cute.arch.sync_threads()
                self.scatter(chosen, run, sRuns, sDeltas, gSlotOfRow, gRowOfSlot)
                self.write_sorted(sSorted, sDeltas, run, gSlotOfRow)

    @cute.jit
    def rank(self, chosen: Choices, part: Int32, sRuns: cute.Tensor) -> Run:
        """Return the run of this warp in a round, and write its counts by expert to a row of sRuns.
        part: number of the round, over all chunks."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // WARP_THREADS, thread % WARP_THREADS
        inside = warp * (config.turns * WARP_THREADS)
        first = part * config.slots + inside
        experts = experts_of(config, chosen, first + lane, WARP_THREADS)
        ranks = cute.make_rmem_tensor(config.turns, Int32)
        clear(config, sRuns)
        cute.arch.sync_threads()
        for turn in cutlass.range_constexpr(config.turns):
            expert, before = experts[turn], Int32(0)
            alike = lanes_alike(expert, config.bits)
            has_row = expert < config.experts
            if has_row:
                before = sRuns[warp, expert]
            ranks[turn] = before + cute.arch.popc(alike & lanes_below(lane))
            cute.arch.sync_warp()
            if has_row and is_first(alike, lane):
                sRuns[warp, expert] = before + cute.arch.popc(alike)
            cute.arch.sync_warp()
        cute.arch.sync_threads()
        return Run(first, inside, experts, ranks)

    @cute.jit
    def place_runs(
        self, sRuns: cute.Tensor, sTotals: cute.Tensor, gOffsets: cute.Tensor | None
    ) -> tuple[Int32, Int32]:
        """Replace the counts of a warp by the positions of its first slot of each expert in the
        sorted round. gOffsets is written. Return, in thread e, (first position of expert e, number
        of its slots)."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        counts = cute.make_rmem_tensor(config.warps, Int32)
        counts.fill(0)
        if thread < config.experts:
            for warp in cutlass.range_constexpr(config.warps):
                counts[warp] = sRuns[warp, thread]
        total = Int32(0)
        for warp in cutlass.range_constexpr(config.warps):
            total += counts[warp]
        begin = self.sum_lower_experts(total, sTotals, gOffsets)
        if thread < config.experts:
            place = begin
            for warp in cutlass.range_constexpr(config.warps):
                sRuns[warp, thread] = place
                place += counts[warp]
        return begin, total

    @cute.jit
    def sum_lower_experts(
        self, count: Int32, sTotals: cute.Tensor, gOffsets: cute.Tensor | None
    ) -> Int32:
        """Return, in thread e, the sum of the counts of lower threads. The first CTA also writes it
        to gOffsets."""
        config = self.config
        chunk, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // WARP_THREADS, thread % WARP_THREADS
        begin = sum_below(count, lane)
        if lane == WARP_THREADS - 1:
            sTotals[warp] = begin + count
        cute.arch.sync_threads()
        lower = Int32(0)
        if lane < warp:
            lower = sTotals[lane]
        begin += cute.arch.warp_redux_sync(lower, "add")
        if cutlass.const_expr(gOffsets is not None):
            if chunk == 0 and thread < config.experts:
                gOffsets[thread] = begin
                if thread == config.experts - 1:
                    gOffsets[config.experts] = begin + count
        return begin

    @cute.jit
    def sort(self, run: Run, sRuns: cute.Tensor, sSorted: cute.Tensor) -> None:
        """Sort the round by expert: slots relative to its first one, and their experts."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // WARP_THREADS, thread % WARP_THREADS
        for turn in cutlass.range_constexpr(config.turns):
            expert = run.experts[turn]
            if expert < config.experts:
                run.ranks[turn] = run.ranks[turn] + sRuns[warp, expert]
                slot = run.inside + turn * WARP_THREADS + lane
                sSorted[run.ranks[turn]] = expert << HALF | slot

    @cute.jit
    def find_base(
        self, counts: cute.Tensor, sParts: cute.Tensor, sTotals: cute.Tensor, gOffsets: cute.Tensor
    ) -> Int32:
        """Return, in thread e, the row of the first slot of expert e in this chunk."""
        config = self.config
        own, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        each = config.chunks_of_part(cute.size(counts) // config.words)
        self.add_chunks(counts, sParts)
        cute.arch.sync_threads()
        total, before = Int32(0), Int32(0)
        if thread < config.experts:
            word, shift = thread // config.per_word, thread % config.per_word * HALF
            for part in cutlass.range_constexpr(config.parts):
                count = sParts[part, word]
                if cutlass.const_expr(config.packed):
                    count = (count >> shift) & ((1 << HALF) - 1)
                total += count
                before += count if part * each <= own else Int32(0)
        return self.sum_lower_experts(total, sTotals, gOffsets) + before

    @cute.jit
    def scatter(
        self,
        chosen: Choices,
        run: Run,
        sRuns: cute.Tensor,
        sDeltas: cute.Tensor | None,
        gSlotOfRow: cute.Tensor,
        gRowOfSlot: cute.Tensor,
    ) -> None:
        """Write the row of every slot of this warp: its position in the sorted round plus sDeltas.
        Without sDeltas, positions are rows, and the slots of rows are written as well."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // WARP_THREADS, thread % WARP_THREADS
        (rows,) = chosen.ids.shape
        for turn in cutlass.range_constexpr(config.turns):
            slot, expert = run.first + turn * WARP_THREADS + lane, run.experts[turn]
            if slot < rows and expert == config.experts:
                gRowOfSlot[slot] = Int32(-1)
            if expert < config.experts:
                if cutlass.const_expr(sDeltas is not None):
                    gRowOfSlot[slot] = run.ranks[turn] + sDeltas[expert]
                else:
                    row = run.ranks[turn] + sRuns[warp, expert]
                    gRowOfSlot[slot] = row
                    gSlotOfRow[row] = slot

    @cute.jit
    def write_sorted(
        self, sSorted: cute.Tensor, sDeltas: cute.Tensor, run: Run, gSlotOfRow: cute.Tensor
    ) -> None:
        """Write slots of the sorted round to their rows; rows of an expert are neighbours."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        for turn in cutlass.range_constexpr(config.turns):
            place = turn * config.threads + thread
            if place < sDeltas[config.experts]:
                word = sSorted[place]
                row = place + sDeltas[word >> HALF]
                gSlotOfRow[row] = run.first - run.inside + (word & ((1 << HALF) - 1))

    @cute.jit
    def add_chunks(self, counts: cute.Tensor, sParts: cute.Tensor) -> None:
        """Add up counts over a part of the chunks. All of them are before this chunk, or none.
        Packed counts are added as well: see `plan_permutation`."""
        config = self.config
        own, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        vectors, chunks = config.words // config.vector, cute.size(counts) // config.words
        part, vector = thread // vectors, thread % vectors
        each = config.chunks_of_part(chunks)
        first, end = part * each, cutlass.min((part + 1) * each, own)
        if first > own:
            first, end = cutlass.max(first - each, own), cutlass.min(first, chunks)
        if part >= config.parts:
            end = first
        total = cute.make_rmem_tensor(config.vector, Int32)
        total.fill(0)
        loads = WORDS_IN_FLIGHT // config.vector
        for step in cutlass.range(0, each, loads, unroll=1):
            loaded = self.read_counts(counts, first + step, end, vector)
            # Last one first: by then all loads have been issued.
            for index in cutlass.range_constexpr(loads - 1, -1, -1):
                for k in cutlass.range_constexpr(config.vector):
                    total[k] += loaded[k, index]
        if part < config.parts:
            sPart = cute.local_tile(sParts[part, None], (config.vector,), (vector,))
            cute.autovec_copy(total, sPart)

    @cute.jit
    def read_counts(
        self, counts: cute.Tensor, first: Int32, end: Int32, vector: Int32
    ) -> cute.Tensor:
        """Load counts of the chunks from `first` on; zeros from `end` on. All loads are in flight
        together."""
        config = self.config
        shape = (config.vector, WORDS_IN_FLIGHT // config.vector)
        loaded = cute.make_rmem_tensor(shape, Int32)
        loaded.fill(0)
        begin = counts.iterator + (first * config.words + vector * config.vector)
        layout = cute.make_layout(shape, stride=(1, config.words))
        gCounts = cute.make_tensor(begin.align(4 * config.vector), layout)
        for index in cutlass.range_constexpr(shape[1]):
            if first + index < end:
                cute.autovec_copy(gCounts[None, index], loaded[None, index])
        return loaded


def host_function_of_count(config: PermutationConfig, _arch: str) -> tuple:
    """Return the host function to compile for `config`, and example arguments."""
    ids = fake_tensor(Int32, cute.sym_int32())
    return Count(config), ids, _first(config), _counts(config), Int32(0), CUstream(0)


def host_function_of_scatter(config: PermutationConfig, _arch: str) -> tuple:
    """Return the host function to compile for `config`, and example arguments."""
    rows = cute.sym_int32()
    ids = fake_tensor(Int32, rows)
    outputs = tuple(fake_tensor(Int32, size) for size in (config.experts + 1, rows, rows))
    counts = _counts(config) if config.chunked else None
    sizes = Int32(0), Int32(0)
    return Scatter(config), ids, _first(config), counts, outputs, *sizes, CUstream(0)


def _first(config: PermutationConfig) -> Int32 | None:
    return Int32(0) if config.partial else None


def _counts(config: PermutationConfig) -> Any:
    return fake_tensor(Int32, cute.sym_int32(divisibility=config.words), align=VECTOR_BYTES)
