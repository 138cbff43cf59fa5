"""The host function of a kernel whose parameters are one table and whose grid has one dimension."""

from typing import Any

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32

from kernelkit.device.param_table import ParamTable


class TableKernel:
    """What such kernels inherit; each has a method `kernel(table)`, decorated with `cute.kernel`.

    config: what it is compiled for; config.threads: of a CTA. cluster: its shape, None without.
    fewest_ctas: of an SM, whose registers suffice; 0: ptxas decides, and may spill for more.
    """

    cluster: tuple[int, int, int] | None = None
    fewest_ctas = 0

    def __init__(self, config: Any) -> None:
        self.config = config

    @cute.jit
    def __call__(self, table: ParamTable, ctas: Int32, stream: CUstream) -> None:
        """Launch `ctas` CTAs."""
        self.kernel(table).launch(
            grid=(ctas, 1, 1),
            block=(self.config.threads, 1, 1),
            cluster=self.cluster,
            stream=stream,
            min_blocks_per_mp=self.fewest_ctas,
        )

    def with_table(self, kind: type) -> tuple:
        """What a `host_function` returns: this kernel and example arguments, for a table of the
        dataclass `kind`."""
        return self, ParamTable.zeros(kind), Int32(0), CUstream(0)
