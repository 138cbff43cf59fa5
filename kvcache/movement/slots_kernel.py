"""Slots, or segments of them, to other slots of the same or another pool (device code)."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernelkit.device.device_table import DeviceTable
from kernelkit.device.table_kernel import TableKernel
from kvcache.movement.config import (
    VECTOR_BYTES,
    VECTORS,
    CopyConfig,
    SegmentsParams,
    SlotsParams,
    WholeSlotsParams,
)
from kvcache.movement.device import int64_at, load_bytes, store_bytes, zeros


@dataclass(frozen=True)
class Piece:
    """Bytes that one CTA copies: where they begin in a slot of the source and of the target."""

    source: Int64
    target: Int64
    nbytes: Int64


def params_of(config: CopyConfig) -> type[SlotsParams]:
    """Return the class of the launch parameters of this config."""
    return SegmentsParams if config.segmented else WholeSlotsParams


class CopySlots(TableKernel):
    """The kernel of one CopyConfig; table: see `params_of`."""

    config: CopyConfig

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """CTAs take turns at the pieces of all pairs."""
        params = table.unpack(params_of(self.config))
        source, target, pieces = params.source, params.target, Int32(params.pieces)
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        for item in cutlass.range(cta, Int32(params.count) * pieces, ctas, unroll=1):
            pair = Int32(Uint32(item) // Uint32(pieces))
            source_slot = int64_at(params.pairs, 2 * pair)
            target_slot = int64_at(params.pairs, 2 * pair + 1)
            piece = self.piece(params, item - pair * pieces)
            inside = piece.source >= 0 and piece.target >= 0 and piece.nbytes >= 0
            inside = inside and piece.source + piece.nbytes <= source.nbytes
            inside = inside and piece.target + piece.nbytes <= target.nbytes
            exists = source_slot >= 0 and source_slot < source.count
            exists = exists and target_slot >= 0 and target_slot < target.count
            if exists and inside:
                here = source.address + source_slot * source.stride + piece.source
                there = target.address + target_slot * target.stride + piece.target
                self.copy(here, there, Int32(piece.nbytes))

    @cute.jit
    def piece(self, params: SlotsParams, index: Int32) -> Piece:
        """A piece of a slot by number: a segment, or as many bytes as are left of a whole slot."""
        if cutlass.const_expr(self.config.segmented):
            return Piece(*(int64_at(params.segments, 3 * index + field) for field in range(3)))
        begin = Int64(index) * params.piece_bytes
        return Piece(begin, begin, cutlass.min(params.source.nbytes - begin, params.piece_bytes))

    @cute.jit
    def copy(self, source: Int64, target: Int64, nbytes: Int32) -> None:
        """Copy by all threads of the CTA, each with up to VECTORS vectors in flight."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        step = config.threads * VECTOR_BYTES
        for first in cutlass.range(thread * VECTOR_BYTES, nbytes, step * VECTORS, unroll=1):
            loaded = []
            for index in cutlass.range_constexpr(VECTORS):
                words = zeros(VECTOR_BYTES // 4)
                here = first + index * step
                if here < nbytes:
                    load_bytes(source + Int64(here), words)
                loaded.append(words)
            for index in cutlass.range_constexpr(VECTORS):
                here = first + index * step
                if here < nbytes:
                    store_bytes(loaded[index], target + Int64(here))


def host_function(config: CopyConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return CopySlots(config).with_table(params_of(config))
