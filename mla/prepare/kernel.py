"""The kernel: each CTA runs the device code of one part.

The device code is that of the parts' own kernels, so that a part has the same bits in either
launch.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Int32

from kernelkit.compile.arch import written_for
from kernelkit.device.device_table import DeviceTable
from kernelkit.device.param_table import ParamTable
from kernelkit.device.table_kernel import TableKernel
from kvcache.movement.append_kernel import Append
from mla.compressor.config import WalkConfig, WindowConfig
from mla.compressor.device import Clusters
from mla.compressor.online_kernel import Walk
from mla.compressor.window_kernel import Windows
from mla.glue.kernel import Glue
from mla.indexer.query_kernel import Query
from mla.prepare.config import Ctas, PartConfig, PrepareConfig, PrepareParams


class Prepare(TableKernel):
    """The kernel of one PrepareConfig, launched with a table of `PrepareParams`."""

    config: PrepareConfig

    def __init__(self, config: PrepareConfig, arch: str) -> None:
        super().__init__(config)
        self.entries = compressor_of(config.entries, arch)
        self.index_keys = compressor_of(config.index_keys, arch)
        query, heads, window = config.index_queries, config.queries, config.window
        self.index_queries = None if query is None else Query(query, written_for(arch))
        self.queries = None if heads is None else Glue(heads, arch)
        self.window = None if window is None else Append(window)

    @cute.jit
    def __call__(self, table: ParamTable, ctas: Int32, stream: CUstream) -> None:
        """Launch `ctas` CTAs, whole clusters."""
        self.kernel(table).launch(
            grid=(ctas, 1, 1),
            block=(self.config.threads, 1, 1),
            cluster=(self.config.slices, 1, 1),
            min_blocks_per_mp=self.config.ctas_per_sm,  # bounds the registers of a thread
            preferred_smem_carveout=100,  # percent of what an SM has
            stream=stream,
        )

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """Find the part that has this CTA, and run its code. Parts with longer chains of loads come
        first."""
        config, params = self.config, table.unpack(PrepareParams)
        cta, _, _ = cute.arch.block_idx()
        if cutlass.const_expr(config.entries is not None):
            ctas = params.entries_ctas
            if self.is_in(ctas, cta, config.entries):
                self.entries.run_cta(params.entries, cta - Int32(ctas.begin))
        if cutlass.const_expr(config.index_keys is not None):
            ctas = params.index_keys_ctas
            if self.is_in(ctas, cta, config.index_keys):
                self.index_keys.run_cta(params.index_keys, cta - Int32(ctas.begin))
        if cutlass.const_expr(config.index_queries is not None):
            ctas = params.index_queries_ctas
            if self.is_in(ctas, cta, config.index_queries):
                number, count = cta - Int32(ctas.begin), Int32(ctas.count)
                self.index_queries.run_cta(params.index_queries, number, count)
        if cutlass.const_expr(config.queries is not None):
            ctas = params.queries_ctas
            if self.is_in(ctas, cta, config.queries):
                number, count = cta - Int32(ctas.begin), Int32(ctas.count)
                self.queries.run_cta(params.queries, number, count)
        if cutlass.const_expr(config.window is not None):
            ctas = params.window_ctas
            if self.is_in(ctas, cta, config.window):
                number, count = cta - Int32(ctas.begin), Int32(ctas.count)
                self.window.run_cta(params.window, number, count)

    @cute.jit
    def is_in(self, ctas: Ctas, cta: Int32, part: cutlass.Constexpr[PartConfig]) -> Boolean:
        """Whether this thread works for a part. The threads of a part with fewer threads than the
        launch do not wait for the others of their CTA (`PrepareConfig.refused`)."""
        begin, count = Int32(ctas.begin), Int32(ctas.count)
        found = Boolean(cta >= begin and cta < begin + count)
        if cutlass.const_expr(part.threads < self.config.threads):
            thread, _, _ = cute.arch.thread_idx()
            found = Boolean(found and thread < part.threads)
        return found


def compressor_of(config: WindowConfig | WalkConfig | None, arch: str) -> Clusters | None:
    """Return the device code of a compressor."""
    if config is None:
        return None
    return (Walk if isinstance(config, WalkConfig) else Windows)(config, arch)


def host_function(config: PrepareConfig, arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return Prepare(config, arch).with_table(PrepareParams)
