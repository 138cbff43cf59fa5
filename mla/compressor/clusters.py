"""Launches of the compressors' kernels: clusters of CTAs take windows or requests, and a CTA of a
cluster a slice of the channels (device code)."""

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32

from kernelkit.device.param_table import ParamTable
from kernelkit.device.table_kernel import TableKernel
from mla.compressor.config import WalkConfig, WindowConfig


class Clusters(TableKernel):
    """Host function of one config; a class that inherits it has the `kernel`."""

    def __init__(self, config: WindowConfig | WalkConfig, arch: str) -> None:
        super().__init__(config)
        self.arch = arch

    @cute.jit
    def __call__(self, table: ParamTable, clusters: Int32, stream: CUstream) -> None:
        """Launch so many clusters of CTAs. table: `CompressParams`."""
        self.kernel(table).launch(
            grid=(clusters * self.config.slices, 1, 1),
            block=(self.config.threads, 1, 1),
            cluster=(self.config.slices, 1, 1),
            min_blocks_per_mp=self.config.ctas_per_sm,  # bounds the registers of a thread
            preferred_smem_carveout=100,  # percent of what an SM has
            stream=stream,
        )
