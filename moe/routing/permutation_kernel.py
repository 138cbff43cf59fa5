"""Rows sorted by expert, stable: counts, a scan, a scatter by ranks (device code).

Slots are cut into chunks, one per CTA, and a chunk into runs of neighbouring slots, one per warp.
A warp counts the experts of its run in a row of shared memory; the sum over the rows of lower warps
and over lower chunks is where its first slot of an expert goes. Within 32 slots votes say how many
of the same expert stand before one. Nothing depends on the order in which warps run.

Of a range of experts, slots of others have no row: they are neither counted nor scattered.

One CTA does all in one launch. With several, `Count` writes the counts of every chunk first, and
each CTA of `Scatter` adds up those it needs.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Uint32
from cutlass.memory import SmemAllocator

from kernelkit.dependent import follow
from kernelkit.fake import fake_tensor
from kernelkit.hw import WARP_THREADS
from kernelkit.lanes import sum_below
from moe.routing.config import COUNTS, VECTOR_BYTES, PermutationConfig
from moe.routing.warp import is_first, lanes_alike, lanes_below

LOADS_IN_FLIGHT = 8


@dataclass(frozen=True)
class Chosen:
    """ids (R,) int32, experts of slots. Of a range of experts: its first one, and how many there
    are in all; None for all of them."""

    ids: cute.Tensor
    first: Int32 | None = None
    total: Int32 | None = None


@cute.jit
def expert_of(config: PermutationConfig, chosen: Chosen, slot: Int32) -> Int32:
    """Of a slot, from the first that has rows on; a slot without a row has expert E. What is no
    expert counts as the last of all, so that nothing outside of shared memory is touched."""
    (rows,) = chosen.ids.shape
    expert = Int32(config.experts)
    if slot < rows:
        if cutlass.const_expr(config.partial):
            known = Int32(cutlass.min(Uint32(chosen.ids[slot]), Uint32(chosen.total - 1)))
            local = Uint32(known - chosen.first)  # huge in front of the first one
            expert = Int32(cutlass.min(local, Uint32(config.experts)))
        else:
            expert = Int32(cutlass.min(Uint32(chosen.ids[slot]), Uint32(config.experts - 1)))
    return expert


@cute.jit
def first_slot(config: PermutationConfig, turns: Int32) -> Int32:
    """The first slot of this warp, plus the lane."""
    chunk, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    warp = chunk * config.warps + thread // WARP_THREADS
    return warp * turns * WARP_THREADS + thread % WARP_THREADS


@cute.jit
def count_run(config: PermutationConfig, chosen: Chosen, turns: Int32, sRow: cute.Tensor) -> None:
    """Experts of the run of this warp, added to its own row."""
    thread, _, _ = cute.arch.thread_idx()
    first = first_slot(config, turns)
    for turn in cutlass.range(turns, unroll=1):
        expert = expert_of(config, chosen, first + turn * WARP_THREADS)
        alike = lanes_alike(expert, config.bits)
        if expert < config.experts and is_first(alike, thread % WARP_THREADS):
            sRow[expert] = sRow[expert] + cute.arch.popc(alike)
        cute.arch.sync_warp()


@cute.jit
def clear(config: PermutationConfig, sCounts: cute.Tensor) -> None:
    """Zeros in all of a tensor in one piece, by all threads of the CTA."""
    thread, _, _ = cute.arch.thread_idx()
    size = cute.size(sCounts)
    sWords = cute.make_tensor(sCounts.iterator, cute.make_layout(size))
    for word in cutlass.range(thread, size, config.threads, unroll=1):
        sWords[word] = Int32(0)


class Count:
    """The first of two launches: experts of every chunk."""

    def __init__(self, config: PermutationConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        ids: cute.Tensor,
        span: tuple[Int32, ...] | None,
        counts: cute.Tensor,
        turns: Int32,
        stream: CUstream,
    ) -> None:
        """ids, span: the fields of `Chosen`; counts (chunks, columns) int32; turns: of a warp, 32
        slots each."""
        chunks, _ = counts.shape
        self.kernel(chosen_of(ids, span), counts, turns).launch(
            grid=(chunks, 1, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, chosen: Chosen, counts: cute.Tensor, turns: Int32) -> None:
        """Grid (chunks,); see `__call__`."""
        follow()
        config = self.config
        chunk, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        sCounts = SmemAllocator().allocate_tensor(Int32, cute.make_layout(config.columns))
        clear(config, sCounts)
        cute.arch.sync_threads()
        first = first_slot(config, turns)
        for turn in cutlass.range(turns, unroll=LOADS_IN_FLIGHT):
            expert = expert_of(config, chosen, first + turn * WARP_THREADS)
            if expert < config.experts:
                # A sum of integers does not depend on the order.
                cute.arch.atomic_add(
                    sCounts.iterator + expert, Int32(1), sem="relaxed", scope="cta"
                )
        cute.arch.sync_threads()
        for expert in cutlass.range(thread, config.columns, config.threads, unroll=1):
            counts[chunk, expert] = sCounts[expert]


class Scatter:
    """The only launch, or the second: offsets and both directions of the permutation."""

    def __init__(self, config: PermutationConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        ids: cute.Tensor,
        span: tuple[Int32, ...] | None,
        counts: cute.Tensor | None,
        outputs: tuple[cute.Tensor, ...],
        turns: Int32,
        chunks: Int32,
        stream: CUstream,
    ) -> None:
        """ids, span: the fields of `Chosen`; counts: of `Count`, None for one chunk; outputs:
        offsets (E + 1,), slot_of_row (R,), row_of_slot (R,), all int32."""
        self.kernel(chosen_of(ids, span), counts, *outputs, turns).launch(
            grid=(chunks, 1, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        chosen: Chosen,
        counts: cute.Tensor | None,
        gOffsets: cute.Tensor,
        gSlotOfRow: cute.Tensor,
        gRowOfSlot: cute.Tensor,
        turns: Int32,
    ) -> None:
        """Grid (chunks,); see `__call__`."""
        follow()
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // WARP_THREADS, thread % WARP_THREADS
        smem = SmemAllocator()
        sRuns = smem.allocate_tensor(
            Int32, cute.make_ordered_layout((config.warps, config.experts), order=(1, 0))
        )
        # Of every expert: rows in all chunks, and rows in front of this chunk's; and those of parts
        # of the chunks, which threads add up side by side.
        sSums = smem.allocate_tensor(
            Int32, cute.make_ordered_layout((2, config.experts), order=(1, 0))
        )
        sParts = None
        if cutlass.const_expr(config.chunked):
            shape = (2, config.parts, config.columns)
            layout = cute.make_ordered_layout(shape, order=(2, 1, 0))
            sParts = smem.allocate_tensor(Int32, layout, VECTOR_BYTES)
            self.add_chunks(counts, sParts)
        clear(config, sRuns)
        cute.arch.sync_threads()
        count_run(config, chosen, turns, sRuns[warp, None])
        cute.arch.sync_threads()
        self.sum_lower_warps(sRuns, sParts, sSums)
        cute.arch.sync_threads()
        if warp == 0:
            self.sum_lower_experts(gOffsets, sSums)
        cute.arch.sync_threads()

        (rows,) = chosen.ids.shape
        first = first_slot(config, turns)
        for turn in cutlass.range(turns, unroll=1):
            slot = first + turn * WARP_THREADS
            expert = expert_of(config, chosen, slot)
            alike = lanes_alike(expert, config.bits)
            before, has_row = Int32(0), slot < rows
            if cutlass.const_expr(config.partial):
                if slot < rows and expert == config.experts:
                    gRowOfSlot[slot] = Int32(-1)
                has_row = expert < config.experts
            if has_row:
                before = sRuns[warp, expert]
                row = sSums[1, expert] + before + cute.arch.popc(alike & lanes_below(lane))
                gRowOfSlot[slot] = row
                gSlotOfRow[row] = slot
            cute.arch.sync_warp()
            if has_row and is_first(alike, lane):
                sRuns[warp, expert] = before + cute.arch.popc(alike)
            cute.arch.sync_warp()

    @cute.jit
    def add_chunks(self, counts: cute.Tensor, sParts: cute.Tensor) -> None:
        """Sums over a part of the chunks, and over those of it that lie in front of this one."""
        config = self.config
        own, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        chunks, _ = counts.shape
        quads = config.columns // COUNTS
        part, quad = thread // quads, thread % quads
        if part < config.parts:
            total, before = (cute.make_rmem_tensor(COUNTS, Int32) for _ in range(2))
            total.fill(0)
            before.fill(0)
            step = config.parts * LOADS_IN_FLIGHT
            for first in cutlass.range(part, chunks, step, unroll=1):
                loaded = []
                for index in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                    loaded.append(self.read_counts(counts, first + index * config.parts, quad))
                for index in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                    is_before = first + index * config.parts < own
                    for k in cutlass.range_constexpr(COUNTS):
                        total[k] += loaded[index][k]
                        before[k] += loaded[index][k] if is_before else Int32(0)
            cute.autovec_copy(total, cute.local_tile(sParts[0, part, None], (COUNTS,), (quad,)))
            cute.autovec_copy(before, cute.local_tile(sParts[1, part, None], (COUNTS,), (quad,)))

    @cute.jit
    def read_counts(self, counts: cute.Tensor, chunk: Int32, quad: Int32) -> cute.Tensor:
        """Of COUNTS experts, zeros where there is no such chunk."""
        loaded = cute.make_rmem_tensor(COUNTS, Int32)
        loaded.fill(0)
        if chunk < counts.shape[0]:
            cute.autovec_copy(cute.local_tile(counts[chunk, None], (COUNTS,), (quad,)), loaded)
        return loaded

    @cute.jit
    def sum_lower_warps(
        self, sRuns: cute.Tensor, sParts: cute.Tensor | None, sSums: cute.Tensor
    ) -> None:
        """Counts of a warp become counts of all lower warps; then what sSums holds is known."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        if cutlass.const_expr(config.chunked):  # by two halves of the CTA, side by side
            half = config.threads // 2
            if thread < half:
                self.sum_runs(sRuns, None, thread, half)
            else:
                self.sum_parts(sParts, sSums, thread - half, half)
        else:
            self.sum_runs(sRuns, sSums, thread, config.threads)

    @cute.jit
    def sum_runs(
        self,
        sRuns: cute.Tensor,
        sSums: cute.Tensor | None,
        thread: Int32,
        threads: cutlass.Constexpr,
    ) -> None:
        """Of lower warps; of all of them into sSums."""
        config = self.config
        for expert in cutlass.range(thread, config.experts, threads, unroll=1):
            counts = []  # all loads before the first store: they do not wait for each other
            for warp in cutlass.range_constexpr(config.warps):
                counts.append(sRuns[warp, expert])
            total = Int32(0)
            for warp in cutlass.range_constexpr(config.warps):
                sRuns[warp, expert] = total
                total += counts[warp]
            if cutlass.const_expr(sSums is not None):
                sSums[0, expert], sSums[1, expert] = total, Int32(0)

    @cute.jit
    def sum_parts(
        self, sParts: cute.Tensor, sSums: cute.Tensor, thread: Int32, threads: cutlass.Constexpr
    ) -> None:
        """Of all chunks, and of those in front of this one."""
        for expert in cutlass.range(thread, self.config.experts, threads, unroll=1):
            total, before = Int32(0), Int32(0)
            for part in cutlass.range_constexpr(self.config.parts):
                total += sParts[0, part, expert]
                before += sParts[1, part, expert]
            sSums[0, expert], sSums[1, expert] = total, before

    @cute.jit
    def sum_lower_experts(self, offsets: cute.Tensor, sSums: cute.Tensor) -> None:
        """By one warp: where every expert begins, into `offsets` and in front of what stands in
        sSums[1]. A lane has neighbouring experts."""
        config = self.config
        chunk, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % WARP_THREADS
        per_lane = -(-config.experts // WARP_THREADS)
        total = Int32(0)
        for index in cutlass.range_constexpr(per_lane):
            expert = lane * per_lane + index
            if expert < config.experts:
                total += sSums[0, expert]
        begin = sum_below(total, lane)
        for index in cutlass.range_constexpr(per_lane):
            expert = lane * per_lane + index
            if expert < config.experts:
                sSums[1, expert] = sSums[1, expert] + begin
                if chunk == 0:
                    offsets[expert] = begin
                begin += sSums[0, expert]
        if chunk == 0 and lane == WARP_THREADS - 1:
            offsets[config.experts] = begin


def host_function_of_count(config: PermutationConfig, _arch: str) -> tuple:
    """What is compiled for `config`, and example arguments."""
    ids = fake_tensor(Int32, cute.sym_int32())
    return Count(config), ids, _span(config), _counts(config), Int32(0), CUstream(0)


def host_function_of_scatter(config: PermutationConfig, _arch: str) -> tuple:
    """What is compiled for `config`, and example arguments."""
    rows = cute.sym_int32()
    ids = fake_tensor(Int32, rows)
    outputs = tuple(fake_tensor(Int32, size) for size in (config.experts + 1, rows, rows))
    counts = _counts(config) if config.chunked else None
    sizes = Int32(0), Int32(0)
    return Scatter(config), ids, _span(config), counts, outputs, *sizes, CUstream(0)


def chosen_of(ids: cute.Tensor, span: tuple | None) -> Chosen:
    """Of the arguments of a host function."""
    return Chosen(ids, *(() if span is None else span))


def _span(config: PermutationConfig) -> tuple | None:
    return (Int32(0), Int32(0)) if config.partial else None


def _counts(config: PermutationConfig) -> Any:
    return fake_tensor(Int32, cute.sym_int32(), config.columns, align=VECTOR_BYTES)
