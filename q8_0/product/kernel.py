"""The product's kernel: tiles of tokens x rows, blocks of K in their order (device code).

Reading order: config.py, tile.py, load.py, multiply.py. One barrier a stage: behind it the stage's
quants are there for all threads, and what it was before is free.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Uint32
from cutlass.memory import SmemAllocator

from kernelkit.device.device_table import DeviceTable
from kernelkit.device.param_table import ParamTable
from q8_0.blocks import SCALE_BYTES
from q8_0.product.config import BLOCKS_OF_STAGE, STAGE_K, ProductConfig
from q8_0.product.load import Scales, SoaLoader, SplittingLoader
from q8_0.product.multiply import Blocks, Store
from q8_0.product.params import ProductParams
from q8_0.product.tile import Scope, Tile

STAGE_SCALES = BLOCKS_OF_STAGE * SCALE_BYTES  # bytes of a row's


class Product:
    """Host function and kernel of one ProductConfig."""

    def __init__(self, config: ProductConfig) -> None:
        self.config = config
        self.loader = SplittingLoader(config) if config.interleaved else SoaLoader(config)
        self.blocks = Blocks(config)
        self.epilogue = Store(config, self.blocks)

    @cute.jit
    def __call__(self, table: ParamTable, tiles: Int32, groups: Int32, stream: CUstream) -> None:
        """Launch the kernel.

        Args:
            table: `ProductParams`
            tiles: number of tiles of a group
            groups: number of groups of tiles of tokens
            stream: CUDA stream
        """
        self.kernel(table).launch(
            grid=(tiles, groups, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.config.ctas_per_sm,  # bounds the registers of a thread
            preferred_smem_carveout=100,  # percent of what an SM has
        )

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """A tile."""
        config, params = self.config, table.unpack(ProductParams)
        cta, group, _ = cute.arch.block_idx()
        size = Int32(params.group)
        row_tile = cta // size
        first_token = (group * size + cta - row_tile * size) * config.tile_tokens
        if first_token < Int32(params.x.rows):  # the last group may have fewer
            scope = self.scope(params, first_token, row_tile * config.tile_rows)
            self.run(scope)

    @cute.jit
    def scope(self, params: ProductParams, first_token: Int32, first_row: Int32) -> Scope:
        """Return the context of the tile that begins at `first_token` and `first_row`."""
        config = self.config
        token, row = first_token, first_row
        if cutlass.const_expr(not config.small):
            token = cutlass.min(token, Int32(params.x.rows) - config.tile_tokens)
            row = cutlass.min(row, Int32(params.w.quants.rows) - config.tile_rows)
        smem = SmemAllocator().allocate(config.smem_bytes, byte_alignment=128).toint()
        blocks = Int32(params.blocks)
        return Scope(
            params=params,
            tile=Tile(token, row, first_token, first_row),
            smem=smem,
            steps=(blocks + BLOCKS_OF_STAGE - 1) // BLOCKS_OF_STAGE,
            blocks=blocks,
        )

    @cute.jit
    def run(self, scope: Scope) -> None:
        """All stages of K."""
        config = self.config
        ahead = config.stages - 1
        # With few warps, copies right after the barrier would delay all of them, and their reads.
        late = config.ctas_per_sm > 1
        x_scales, w_scales = self.loader.token_scales(scope), self.loader.weight_scales(scope)
        self.load_scales(scope, Int32(0), x_scales, w_scales)
        rows = self.loader.token_rows(scope), self.loader.weight_rows(scope)
        for stage in cutlass.range_constexpr(ahead):
            self.copy(scope, Int32(stage), rows)
        if cutlass.const_expr(config.interleaved):
            cute.arch.cp_async_wait_group(ahead - 1)
            cute.arch.sync_threads()
        self.finish(scope, Int32(0), Int32(0), x_scales, w_scales)
        self.load_scales(scope, Int32(1), x_scales, w_scales)
        acc, places = self.blocks.accumulator(), self.blocks.places(scope.smem)
        for step in cutlass.range(scope.steps, unroll=1):
            # Interleaved blocks are split one step before their product.
            cute.arch.cp_async_wait_group(ahead - (2 if config.interleaved else 1))
            cute.arch.sync_threads()
            if cutlass.const_expr(not late):
                self.copy(scope, step + ahead, rows)
            slot = self.slot(step)
            quants = (slot * config.x_bytes, self.loader.quants(step, slot))
            here = self.blocks.places_of(places, quants, step)
            self.blocks.multiply_block(0, here, acc)
            if cutlass.const_expr(late):
                self.copy(scope, step + ahead, rows)
            self.blocks.multiply_block(1, here, acc)
            if step + 1 < scope.steps:
                self.finish(scope, step + 1, self.slot(step + 1), x_scales, w_scales)
                self.load_scales(scope, step + 2, x_scales, w_scales)
        self.epilogue.run(scope, acc)

    def slot(self, step: Int32) -> Int32:
        """Return the stage of the rings that `step` uses."""
        return Int32(Uint32(step) % Uint32(self.config.stages))

    @cute.jit
    def copy(
        self,
        scope: Scope,
        step: Int32,
        rows: tuple[cute.Tensor, cute.Tensor | None],
    ) -> None:
        """Begin to copy a stage, if K has it. rows: of tokens and of weights, see
        `Loader.copy_rows`."""
        slot, (x_rows, w_rows) = self.slot(step), rows
        if step < scope.steps:
            self.loader.copy_tokens(scope, step, slot, x_rows)
            self.loader.move_on(x_rows, STAGE_K)
            self.loader.copy_weights(scope, step, slot, w_rows)
            if cutlass.const_expr(w_rows is not None):
                self.loader.move_on(w_rows, STAGE_K)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load_scales(
        self, scope: Scope, step: Int32, x_scales: Scales, w_scales: Scales | None
    ) -> None:
        """Load the scales of a step, if K has it, and advance their addresses."""
        if step < scope.steps:
            self.loader.load_scales(scope, step, x_scales)
            self.loader.load_weight_scales(scope, step, w_scales)
        self.loader.move_on(x_scales.addresses, STAGE_SCALES)
        if cutlass.const_expr(w_scales is not None):
            self.loader.move_on(w_scales.addresses, STAGE_SCALES)

    @cute.jit
    def finish(
        self, scope: Scope, step: Int32, slot: Int32, x_scales: Scales, w_scales: Scales | None
    ) -> None:
        """Store the scales of a step, and take interleaved blocks apart."""
        self.loader.store_token_scales(scope, step, x_scales)
        self.loader.finish_weights(scope, step, slot, w_scales)


def host_function(config: ProductConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return Product(config), ParamTable.zeros(ProductParams), Int32(1), Int32(1), CUstream(0)
