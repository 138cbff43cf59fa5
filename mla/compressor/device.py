"""Device code that compressors share: places of rows in a step and in a tail, and the steps after a
window is pooled: RMSNorm, RoPE, the record. `mla.compressor.reference` defines them.

Clusters of CTAs process windows or requests; each CTA of a cluster has a slice of the channels. For
a sum over the CTAs each sends its part to all others by st.async, so that a CTA waits only for the
parts; a cluster barrier would wait for every store. Boxes alternate: a CTA that sends to a box
again has received parts from all CTAs that read it.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from kernelkit.compile.arch import written_for
from kernelkit.device.device_table import DeviceTable
from kernelkit.device.param_table import ParamTable
from kernelkit.device.table_kernel import TableKernel
from kernelkit.device.words import float_of, fused
from kernelkit.plan.log2 import LOG2_E
from kvcache.layouts.latent import LATENTS, ROPE
from kvcache.movement.config import Entries
from kvcache.movement.device import (
    SlotRow,
    entry_address,
    entry_of,
    int32_at,
    load_bytes,
    slot_row,
    store_bytes,
    zeros,
)
from kvcache.movement.entry import Pieces, load_angles, rotated, rounded, store_piece
from mla.compressor.config import BOXES, VECTOR, EntryConfig, WalkConfig, WindowConfig
from mla.compressor.params import CompressParams, StepRows, StepTables, TailSlots, Weights
from mla.indexer.entry import store_index_row
from mla.indexer.formats import FORMATS, LANES, PIECE, IndexFormat


class Clusters(TableKernel):
    """Host function and kernel of one config; a class that inherits it has `run_cta`."""

    def __init__(self, config: WindowConfig | WalkConfig, arch: str) -> None:
        super().__init__(config)
        self.arch = written_for(arch)

    @cute.jit
    def __call__(self, table: ParamTable, clusters: Int32, stream: CUstream) -> None:
        """Launch `clusters` clusters of CTAs. table: `CompressParams`."""
        self.kernel(table).launch(
            grid=(clusters * self.config.slices, 1, 1),
            block=(self.config.threads, 1, 1),
            cluster=(self.config.slices, 1, 1),
            min_blocks_per_mp=self.config.ctas_per_sm,  # bounds the registers of a thread
            preferred_smem_carveout=100,  # percent of what an SM has
            stream=stream,
        )

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """Each CTA has a slice of the channels of what its cluster processes."""
        cta, _, _ = cute.arch.block_idx()
        self.run_cta(table.unpack(CompressParams), cta)

    def run_cta(self, params: CompressParams, cta: Int32) -> None:
        """Do the work of one CTA. cta: its number among those of the compressor."""
        raise NotImplementedError


@dataclass(frozen=True)
class Exchange:
    """Buffers of a sum over the CTAs of a cluster.

    parts: fp32 [BOXES, CTAs].
    arrived: one mbarrier per box.
    """

    parts: cute.Tensor
    arrived: cute.Tensor


@cute.jit
def open_exchange(ctas: cutlass.Constexpr[int]) -> Exchange:
    """Allocate and initialise an Exchange; all threads of all CTAs call this.

    The caller must wait for the cluster's barrier before anything is sent.
    """
    smem, (thread, _, _) = SmemAllocator(), cute.arch.thread_idx()
    arrived = smem.allocate_tensor(Int64, cute.make_layout(BOXES), byte_alignment=8)
    layout = cute.make_ordered_layout((BOXES, ctas), order=(1, 0))
    parts = smem.allocate_tensor(Float32, layout, byte_alignment=8)
    if thread == 0:
        for box in cutlass.range_constexpr(BOXES):
            cute.arch.mbarrier_init(arrived.iterator + box, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive_relaxed()
    return Exchange(parts, arrived)


@cute.jit
def exchanged(exchange: Exchange, mine: Float32, part: Int32, turn: Int32) -> Float32:
    """Return the sum in the order of CTAs, of which this is number `part`. All threads call this
    with the same `mine`. turn: number of earlier sums."""
    ctas, box = cute.size(exchange.parts, mode=[1]), turn % BOXES
    thread, _, _ = cute.arch.thread_idx()
    arrived = exchange.arrived.iterator.toint() + box * 8
    if thread == 0:
        cute.arch.inline_ptx(
            "mbarrier.arrive.expect_tx.relaxed.cta.shared.b64 _, [{$r0}], {$r1};",
            read_only_args=[arrived, Int32(4 * ctas)],
        )
    if thread < ctas:
        cute.arch.inline_ptx(
            "{ .reg .b32 to, box; "
            "mapa.shared::cluster.u32 to, {$r0}, {$r3}; mapa.shared::cluster.u32 box, {$r1}, {$r3};"
            " st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [to], {$r2}, [box]; }",
            read_only_args=[
                exchange.parts.iterator.toint() + (box * ctas + part) * 4, arrived, mine, thread
            ],
        )  # fmt: skip
    cute.arch.inline_ptx(
        "{ .reg .pred done; "
        "WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], {$r1}; "
        "@done bra DONE; bra WAIT; DONE: }",
        read_only_args=[arrived, turn // BOXES % 2],
    )
    total = Float32(0.0)
    for rank in cutlass.range_constexpr(ctas):
        total = total + exchange.parts[box, rank]
    return total


@dataclass(frozen=True)
class Cell:
    """Addresses of VECTOR values and VECTOR scores of a row, neighbouring columns of each."""

    values: Int64
    scores: Int64


@dataclass(frozen=True)
class Request:
    """Tokens of a request in a step: the first token, their number, the position of the first."""

    first: Int32
    tokens: Int32
    start: Int64


@dataclass(frozen=True)
class Norm:
    """Data a lane needs to turn its pooled channels into elements of an entry."""

    weight: cute.Tensor  # of the RMSNorm, fp32 (VECTOR)
    angles: cute.Tensor  # cosines, then sines, fp32


@cute.jit
def share_of(score: Float32, base: Float32) -> Float32:
    """Return the share exp(score - base) of a token in a window."""
    return cute.math.exp2((score - base) * LOG2_E, fastmath=True)


@cute.jit
def request_of(tables: StepTables, index: Int32) -> Request:
    """Return a request of the step by its number."""
    first = int32_at(tables.cu_tokens, index)
    count = int32_at(tables.cu_tokens, index + 1) - first
    return Request(first, count, Int64(int32_at(tables.starts, index)))


@cute.jit
def tail_cell(
    config: cutlass.Constexpr[EntryConfig], tail: TailSlots, place: SlotRow, column: Int32
) -> Cell:
    """Return the cell of a tail row from `column` on; in a slot values come before scores."""
    row_bytes = config.columns * 4
    values = tail.address + place.slot * tail.slot_stride + place.row * row_bytes
    values += Int64(column) * 4
    return Cell(values, values + tail.rows * row_bytes)


@cute.jit
def step_cell(step: StepRows, token: Int32, column: Int32) -> Cell:
    """Return the cell of a token of the step from `column` on."""
    here = Int64(column) * 4
    values = step.values + Int64(token) * step.values_stride + here
    return Cell(values, step.scores + Int64(token) * step.scores_stride + here)


@cute.jit
def ape_at(
    config: cutlass.Constexpr[EntryConfig], weights: Weights, position: Int64, column: Int32
) -> cute.Tensor:
    """Return the `ape` terms added to VECTOR scores of a token at `position`."""
    phase, ape = Int64(Uint32(position) % Uint32(config.ratio)), zeros(VECTOR, Float32)
    load_bytes(weights.ape + phase * weights.ape_stride + Int64(column) * 4, ape)
    return ape


@cute.jit
def store_cell(
    config: cutlass.Constexpr[EntryConfig],
    tail: TailSlots,
    row: Int32,
    column: Int32,
    values: cute.Tensor,
    scores: cute.Tensor,
    ape: cute.Tensor,
) -> None:
    """Add ape to VECTOR scores of a token, and store them and its values to a row of the tail."""
    for index in cutlass.range_constexpr(VECTOR):
        scores[index] = scores[index] + ape[index]
    cell = tail_cell(config, tail, slot_row(row, tail.rows), column)
    store_bytes(values, cell.values)
    store_bytes(scores, cell.scores)


@cute.jit
def save_cell(
    config: cutlass.Constexpr[EntryConfig],
    params: CompressParams,
    token: Int32,
    position: Int64,
    column: Int32,
) -> None:
    """Store VECTOR values and scores of a token to its row of the tail, if it has one."""
    tail, known = params.tail, token >= 0 and token < Int32(params.step.tokens)
    row = Int32(-1)
    if known:
        row = entry_of(params.tables.tail_rows, token, tail.rows * tail.slots)
    if row >= 0:
        values, scores = zeros(VECTOR, Float32), zeros(VECTOR, Float32)
        cell = step_cell(params.step, token, column)
        load_bytes(cell.values, values)
        load_bytes(cell.scores, scores)
        ape = ape_at(config, params.weights, position, column)
        store_cell(config, tail, row, column, values, scores, ape)


@cute.jit
def save_row(
    config: cutlass.Constexpr[EntryConfig],
    params: CompressParams,
    item: Int32,
    thread: Int32,
    threads: cutlass.Constexpr[int],
) -> None:
    """Store one of the last tokens of a request to its tail, except cells whose old contents a
    window of this step reads: the threads that read them also replace them.

    A row of a tail held position `before`. Block b of its columns belongs to the window that is
    overlap - 1 - b windows after its own.

    Args:
        item: number of the row, in all requests.
        thread, threads: number of this thread, and of all threads, among those that share a row.
    """
    saved = params.counts.saved
    index = Int32(Uint32(item) // Uint32(saved))
    if index < Int32(params.counts.requests):
        request = request_of(params.tables, index)
        start, count = request.start, request.tokens
        inside = count - 1 - (item - index * Int32(saved))
        if inside >= 0:
            ratio, rows, position = Uint32(config.ratio), Int32(params.tail.rows), start + inside
            before = start - 1 - Int64(Uint32(rows - 1 - inside % rows))
            vectors = config.columns // VECTOR
            for vector in cutlass.range(thread, vectors, threads, unroll=1):
                column, read = vector * VECTOR, Boolean(False)
                if before >= 0:
                    behind = config.overlap - 1 - Int32(Uint32(column) // Uint32(config.width))
                    window = Int32(Uint32(before) // ratio) + behind
                    end = Int64(window) * config.ratio + (config.ratio - 1)
                    read = end >= start and end < start + count
                if not read:
                    save_cell(config, params, request.first + inside, position, column)


@cute.jit
def sum_of_squares(values: cute.Tensor, lanes: cutlass.Constexpr[int]) -> Float32:
    """Sum over `lanes` neighbouring lanes, a power of two; all of them get the result."""
    total = Float32(0.0)
    for index in cutlass.range_constexpr(cute.size(values)):
        total = fused(values[index], values[index], total)
    for step in (1, 2, 4, 8, 16):
        if cutlass.const_expr(step < lanes):
            total = total + cute.arch.shuffle_sync_bfly(total, step)
    return total


@cute.jit
def load_norm(
    config: cutlass.Constexpr[EntryConfig], params: CompressParams, column: Int32, position: Int64
) -> Norm:
    """Load the Norm of a lane with VECTOR channels from `column` on, for an entry at `position`.
    The angles of an index key are those of the lane's elements in `_store_key`."""
    weight = zeros(VECTOR, Float32)
    load_bytes(params.weights.norm + Int64(column) * 4, weight)
    if cutlass.const_expr(config.indexed):
        pairs, inside, first = PIECE // 2, cute.arch.lane_idx() % LANES, LANES - ROPE // PIECE
        pair = (inside - first) * pairs
        return Norm(weight, load_angles(params.angles, position, pair, pairs, inside >= first))
    nope = LATENTS[config.record].nope
    pair, wanted = (column - nope) // 2, column >= nope
    return Norm(weight, load_angles(params.angles, position, pair, VECTOR // 2, wanted))


@cute.jit
def store_entry(
    config: cutlass.Constexpr[EntryConfig],
    arch: cutlass.Constexpr[str],
    params: CompressParams,
    values: cute.Tensor,
    norm: Norm,
    column: Int32,
    entry: Int32,
    squares: Float32,
) -> None:
    """Normalise, rotate, quantise and store VECTOR pooled channels of every lane of a warp.

    column: the first channel of a lane.
    entry: -1 for none.
    squares: the sum of the squares of all channels.
    """
    mean = squares * Float32(1.0 / config.width) + float_of(Uint32(params.weights.eps_bits))
    factor = cute.math.rsqrt(mean, fastmath=True)
    for index in cutlass.range_constexpr(VECTOR):
        values[index] = values[index] * factor * norm.weight[index]
    if cutlass.const_expr(config.indexed):
        _store_key(FORMATS[config.record], arch, params.entries, values, norm.angles, entry)
    else:
        latent = LATENTS[config.record]
        address = entry_address(latent.record, params.entries, entry)
        words, turned = rounded(values), rotated(values, norm.angles)
        store_piece(Pieces(latent, VECTOR), words, turned, address, column, entry >= 0)


@cute.jit
def _store_key(
    form: cutlass.Constexpr[IndexFormat],
    arch: cutlass.Constexpr[str],
    entries: Entries,
    values: cute.Tensor,
    angles: cute.Tensor,
    entry: Int32,
) -> None:
    """Store one key of a warp from 4 elements per lane; each lane of the lower half stores 8."""
    lane = cute.arch.lane_idx()
    piece = cute.make_rmem_tensor(PIECE, Float32)
    for index in cutlass.range_constexpr(PIECE):
        source = lane % LANES * 2 + index // VECTOR
        piece[index] = cute.arch.shuffle_sync(values[index % VECTOR], source)
    address = entry_address(form.record, entries, entry)
    exists = Boolean(entry >= 0 and lane < LANES)
    store_index_row(piece, [angles], form, arch, address, exists)
