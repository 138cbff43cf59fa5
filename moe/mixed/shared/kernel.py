"""Host function and scheduler role of both architectures."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import PipelineState

from kernelkit.device.boxes import ROWS_FIRST, describe, reorder
from moe.kernel_arguments import MixedKernelArguments
from moe.mixed.config import MixedConfig
from moe.mixed.plan import ProductPlan
from moe.mixed.shared.args import Scope
from moe.mixed.shared.load import x_box
from moe.sm100.args import Tile
from moe.sm100.roles.scheduler import Scheduler as Walk
from moe.sm100.roles.scheduler import write_tile


class Product:
    """Host function of one config. An architecture adds the kernel."""

    config: MixedConfig
    plan: ProductPlan
    kernel: Any

    @cute.jit
    def __call__(
        self,
        given: MixedKernelArguments,
        stream: CUstream,
    ) -> None:
        """Describe x to TMA if it is not gathered, and launch."""
        x = given.x
        if cutlass.const_expr(not self.config.gather):
            fetch = cpasync.CopyBulkTensorTileG2SOp()
            x = describe(fetch, reorder(x, ROWS_FIRST), x_box(self.plan))
        self.kernel(x, given.tensors, given.numbers, given.sizes).launch(
            grid=(given.ctas, 1, 1),
            block=(self.plan.roles.threads, 1, 1),
            stream=stream,
            use_pdl=self.config.pdl,
            cluster=(self.config.split, 1, 1) if self.config.split > 1 else None,
            min_blocks_per_mp=1,  # without it ptxas ignores setmaxnreg
        )


class Scheduler(Walk):
    """Fills the tile queue."""

    def __init__(self, plan: ProductPlan) -> None:
        self.plan = plan
        self.role = plan.roles["scheduler"]

    def tiles_of(self, rows: Int32) -> Int32:
        """Return the row tiles of an expert with `rows` rows: 0 if it is another launch's."""
        config, tiles = self.plan.config, super().tiles_of(rows)
        if config.most:
            tiles *= Int32(rows <= config.most)
        if config.least:
            tiles *= Int32(rows >= config.least)
        return tiles

    @cute.jit
    def publish(self, scope: Scope, state: PipelineState, tile: Tile) -> None:
        """Publish a tile to the roles of this CTA, once each of them has released the slot."""
        readers = [getattr(scope.pipes, name) for name in self.plan.tile_names]
        for reader in readers:
            reader.wait_free(state)
        if cute.arch.lane_idx() == 0:
            write_tile(scope, state.index, tile)
        for reader in readers:
            reader.signal(state.index)
