"""The host function of a kernel whose parameters are one table and whose grid has one dimension."""

from typing import Any

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32

from kernelkit.device.param_table import ParamTable


class TableKernel:
    """Base of kernels with a parameter table; each has a `cute.kernel` method `kernel(table)`.

    config: compile-time config; config.threads is the number of threads of a CTA
    cluster: shape of a cluster, None without
    pdl: programmatic dependent launch; the kernel then waits itself (`dependent.follow`)
    fewest_ctas: CTAs per SM for which registers must suffice. 0 lets ptxas decide, which may spill
        for more.
    """

    cluster: tuple[int, int, int] | None = None
    pdl = False
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
            use_pdl=self.pdl,
            min_blocks_per_mp=self.fewest_ctas,
        )

    def with_table(self, kind: type) -> tuple:
        """Return a `host_function`'s result: this kernel and example arguments, for a table of the
        dataclass `kind`."""
        return self, ParamTable.zeros(kind), Int32(0), CUstream(0)
