"""Weights as numbers (device code): d * q in fp32, exactly, rounded once to what is written."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernelkit.device.device_table import DeviceTable
from kernelkit.device.table_kernel import TableKernel
from kernelkit.device.words import vector_at
from q8_0.config import ITEMSIZE, DequantiseConfig
from q8_0.device import TYPES, fetch, product, quant_floats, row_of, scale_float
from q8_0.params import DequantiseParams


class Dequantise(TableKernel):
    """The kernel of one DequantiseConfig; table: `DequantiseParams`."""

    config: DequantiseConfig

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """A CTA has `config.tile` columns of a row."""
        config, params = self.config, table.unpack(DequantiseParams)
        dtype = TYPES[config.out]
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        row = Int32(Uint32(cta) // Uint32(params.tiles))
        tile = cta - row * Int32(params.tiles)
        pieces = Int32(params.weights.cols // config.piece)
        first = tile * (config.tile // config.piece) + thread
        source, loaded = row_of(params.weights, row), []
        for turn in cutlass.range_constexpr(config.unrolled):
            exists, further = first + turn * config.threads < pieces, turn * config.further
            loaded.append(fetch(config.layout, config.words, source, first, exists, further))
        cute.arch.sync_warp()  # else ptxas moves each load to its use, one after the other
        target = params.out + Int64(row) * params.out_stride
        for turn in cutlass.range_constexpr(config.unrolled):
            piece = first + turn * config.threads
            if piece < pieces:
                scale = scale_float(loaded[turn].scale)
                quants = quant_floats(loaded[turn].words)
                numbers = cute.make_rmem_tensor(config.piece, dtype)
                for index in cutlass.range_constexpr(config.piece):
                    numbers[index] = product(scale, quants[index]).to(dtype)
                place = target + Int64(piece) * (config.piece * ITEMSIZE[config.out])
                cute.autovec_copy(numbers, vector_at(place, dtype, config.piece))


def host_function(config: DequantiseConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return Dequantise(config).with_table(DequantiseParams)
