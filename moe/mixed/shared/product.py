"""The host function of the mixed product, which is that of both architectures."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from kernelkit.device.boxes import ROWS_FIRST, describe, reorder
from moe.mixed.config import MixedConfig
from moe.mixed.plan import ProductPlan
from moe.mixed.shared.args import Sizes, Tensors
from moe.mixed.shared.load import x_box
from moe.sm100.args import Numbers


class Product:
    """Of one config; an architecture adds the kernel."""

    config: MixedConfig
    plan: ProductPlan
    kernel: Any

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        tensors: tuple[cute.Tensor | None, ...],
        numbers: tuple[Float32, ...],
        sizes: tuple[Int32, ...],
        ctas: Int32,
        stream: CUstream,
    ) -> None:
        """x: [1, rows, 1, K], or [tokens, K] where it is gathered. tensors, numbers, sizes: fields
        of `Tensors`, `Numbers`, `Sizes`. ctas: of the grid."""
        if cutlass.const_expr(not self.config.gather):
            fetch = cpasync.CopyBulkTensorTileG2SOp()
            x = describe(fetch, reorder(x, ROWS_FIRST), x_box(self.plan))
        self.kernel(x, Tensors(*tensors), Numbers(*numbers), Sizes(*sizes)).launch(
            grid=(ctas, 1, 1),
            block=(self.plan.roles.threads, 1, 1),
            stream=stream,
            use_pdl=self.config.pdl,
            cluster=(self.config.split, 1, 1) if self.config.split > 1 else None,
            min_blocks_per_mp=1,  # without it ptxas ignores setmaxnreg
        )
