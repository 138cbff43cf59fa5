"""Rows sorted by expert, stable: counts, a scan, a scatter by ranks (device code).

Slots are cut into chunks, one per CTA, and a chunk into runs of neighbouring slots, one per warp.
A warp counts the experts of its run in a row of shared memory; the sum over the rows of lower warps
and over lower chunks is where its first slot of an expert goes. Within 32 slots match.any says how
many slots of the same expert stand before one. There are no atomic operations, so nothing depends
on the order in which warps run.

One CTA does all in one launch. With several, `Count` writes the counts of every chunk first, and
each CTA of `Scatter` adds up those it needs.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Uint32
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from kernelkit.compile import compile_once
from kernelkit.hw import WARP_THREADS
from moe.device.warp import sum_below
from moe.routing.config import PermutationConfig
from moe.routing.warp import is_first, lanes_alike, lanes_below

LOADS_IN_FLIGHT = 8


@cute.jit
def expert_of(config: PermutationConfig, ids: cute.Tensor, slot: Int32) -> Int32:
    """Of a slot; one that does not exist has expert E. What is no expert counts as the last, so
    that nothing outside of shared memory is touched."""
    (rows,) = ids.shape
    expert = Int32(config.experts)
    if slot < rows:
        expert = Int32(cutlass.min(Uint32(ids[slot]), Uint32(config.experts - 1)))
    return expert


@cute.jit
def first_slot(config: PermutationConfig, turns: Int32) -> Int32:
    """The first slot of this warp, plus the lane."""
    chunk, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    warp = chunk * config.warps + thread // WARP_THREADS
    return warp * turns * WARP_THREADS + thread % WARP_THREADS


@cute.jit
def count_run(config: PermutationConfig, ids: cute.Tensor, turns: Int32, sRow: cute.Tensor) -> None:
    """Experts of the run of this warp, added to its own row."""
    thread, _, _ = cute.arch.thread_idx()
    first = first_slot(config, turns)
    for turn in cutlass.range(turns, unroll=1):
        expert = expert_of(config, ids, first + turn * WARP_THREADS)
        alike = lanes_alike(expert)
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
        self, ids: cute.Tensor, counts: cute.Tensor, turns: Int32, stream: CUstream
    ) -> None:
        """ids (R,) int32; counts (chunks, E) int32; turns: of a warp, 32 slots each."""
        chunks, _ = counts.shape
        self.kernel(ids, counts, turns).launch(
            grid=(chunks, 1, 1), block=(self.config.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, ids: cute.Tensor, counts: cute.Tensor, turns: Int32) -> None:
        """Grid (chunks,); see `__call__`."""
        config = self.config
        chunk, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        sRuns = SmemAllocator().allocate_tensor(
            Int32, cute.make_ordered_layout((config.warps, config.experts), order=(1, 0))
        )
        clear(config, sRuns)
        cute.arch.sync_threads()
        count_run(config, ids, turns, sRuns[thread // WARP_THREADS, None])
        cute.arch.sync_threads()
        for expert in cutlass.range(thread, config.experts, config.threads, unroll=1):
            total = Int32(0)
            for warp in cutlass.range_constexpr(config.warps):
                total += sRuns[warp, expert]
            counts[chunk, expert] = total


class Scatter:
    """The only launch, or the second: offsets and both directions of the permutation."""

    def __init__(self, config: PermutationConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        ids: cute.Tensor,
        counts: cute.Tensor | None,
        outputs: tuple,
        turns: Int32,
        chunks: Int32,
        stream: CUstream,
    ) -> None:
        """counts: of `Count`, None for one chunk; outputs: offsets (E + 1,), slot_of_row (R,),
        row_of_slot (R,), all int32."""
        self.kernel(ids, counts, outputs, turns).launch(
            grid=(chunks, 1, 1), block=(self.config.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, ids: cute.Tensor, counts: cute.Tensor | None, outputs: tuple, turns: Int32
    ) -> None:
        """Grid (chunks,); see `__call__`."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // WARP_THREADS, thread % WARP_THREADS
        gOffsets, gSlotOfRow, gRowOfSlot = outputs
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
            shape = (2, config.parts, config.experts)
            sParts = smem.allocate_tensor(Int32, cute.make_ordered_layout(shape, order=(2, 1, 0)))
            self.add_chunks(counts, sParts)
        clear(config, sRuns)
        cute.arch.sync_threads()
        count_run(config, ids, turns, sRuns[warp, None])
        cute.arch.sync_threads()
        self.sum_lower_warps(sRuns, sParts, sSums)
        cute.arch.sync_threads()
        if warp == 0:
            self.sum_lower_experts(ids, gOffsets, sSums)
        cute.arch.sync_threads()

        (rows,) = ids.shape
        first = first_slot(config, turns)
        for turn in cutlass.range(turns, unroll=1):
            slot = first + turn * WARP_THREADS
            expert = expert_of(config, ids, slot)
            alike = lanes_alike(expert)
            before = Int32(0)
            if slot < rows:
                before = sRuns[warp, expert]
                row = sSums[1, expert] + before + cute.arch.popc(alike & lanes_below(lane))
                gRowOfSlot[slot] = row
                gSlotOfRow[row] = slot
            cute.arch.sync_warp()
            if slot < rows and is_first(alike, lane):
                sRuns[warp, expert] = before + cute.arch.popc(alike)
            cute.arch.sync_warp()

    @cute.jit
    def add_chunks(self, counts: cute.Tensor, sParts: cute.Tensor) -> None:
        """Sums over a part of the chunks, and over those of it that lie in front of this one."""
        config = self.config
        own, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        chunks, _ = counts.shape
        part, expert = thread // config.experts, thread % config.experts
        if part < config.parts:
            total, before = Int32(0), Int32(0)
            for chunk in cutlass.range(part, chunks, config.parts, unroll=LOADS_IN_FLIGHT):
                count = counts[chunk, expert]
                total += count
                before += count if chunk < own else Int32(0)
            sParts[0, part, expert] = total
            sParts[1, part, expert] = before

    @cute.jit
    def sum_lower_warps(
        self, sRuns: cute.Tensor, sParts: cute.Tensor | None, sSums: cute.Tensor
    ) -> None:
        """Counts of a warp become counts of all lower warps; then what sSums holds is known."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        for expert in cutlass.range(thread, config.experts, config.threads, unroll=1):
            counts = []  # all loads before the first store: they do not wait for each other
            for warp in cutlass.range_constexpr(config.warps):
                counts.append(sRuns[warp, expert])
            total, before = Int32(0), Int32(0)
            for warp in cutlass.range_constexpr(config.warps):
                sRuns[warp, expert] = total
                total += counts[warp]
            if cutlass.const_expr(config.chunked):
                total = Int32(0)
                for part in cutlass.range_constexpr(config.parts):
                    total += sParts[0, part, expert]
                    before += sParts[1, part, expert]
            sSums[0, expert] = total
            sSums[1, expert] = before

    @cute.jit
    def sum_lower_experts(self, ids: cute.Tensor, offsets: cute.Tensor, sSums: cute.Tensor) -> None:
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
        if chunk == 0 and lane == 0:
            (rows,) = ids.shape
            offsets[config.experts] = rows


def compile_count(config: PermutationConfig, arch: str) -> Any:
    """The compiled `Count.__call__`; compiled once per process."""

    def describe() -> tuple:
        return Count(config), _ids(), _counts(config), Int32(0), CUstream(0)

    return compile_once(("count", config), arch, describe)


def compile_scatter(config: PermutationConfig, arch: str) -> Any:
    """The compiled `Scatter.__call__`; compiled once per process."""

    def describe() -> tuple:
        ids = _ids()
        rows = ids.shape
        outputs = (
            make_fake_tensor(Int32, (config.experts + 1,), (1,)),
            make_fake_tensor(Int32, rows, (1,)),
            make_fake_tensor(Int32, rows, (1,)),
        )
        counts = _counts(config) if config.chunked else None
        return Scatter(config), ids, counts, outputs, Int32(0), Int32(0), CUstream(0)

    return compile_once(("scatter", config), arch, describe)


def _ids() -> Any:
    return make_fake_tensor(Int32, (cute.sym_int32(),), (1,))


def _counts(config: PermutationConfig) -> Any:
    return make_fake_tensor(Int32, (cute.sym_int32(), config.experts), (cute.sym_int64(), 1))
