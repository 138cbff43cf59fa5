"""Triton's handle of cuBLAS, with which its tutorials compare: the same products, by torch.

B is [N, K] in all of them. The products are not launches, so nothing is counted or checked.
"""

from __future__ import annotations

from typing import Any

from ptxemu.host.scaled_mm import block_scaled


class CublasLt:
    """What `triton._C.libtriton.nvidia.cublas.CublasLt` is on a machine with a GPU."""

    def __init__(self, _workspace: Any) -> None: ...

    def matmul(self, a: Any, b: Any, c: Any) -> None:
        """Write A times B to c."""
        c.copy_(a.float() @ b.float().t())

    def gemm(self, a: Any, b: Any, c: Any, d: Any, alpha: float, beta: float) -> None:
        """Write alpha A times B plus beta C to d."""
        d.copy_(alpha * (a.float() @ b.float().t()) + beta * c.float())

    def block_scaled_matmul_mxfp8(
        self, a: Any, b: Any, output: Any, scale_a: Any, scale_b: Any
    ) -> None:
        """Write the product of e4m3 with a scale in e8m0 for each 32 elements."""
        import torch

        scales = [scale.view(torch.float8_e8m0fnu) for scale in (scale_a, scale_b)]
        output.copy_(block_scaled(a, b, scales[0], scales[1], block=32))

    def block_scaled_matmul_nvfp4(
        self, a: Any, b: Any, output: Any, scale_a: Any, scale_b: Any
    ) -> None:
        """Write the product of e2m1, two in a byte, with a scale in e4m3 for each 16 elements."""
        import torch

        packed = [codes.view(torch.float4_e2m1fn_x2) for codes in (a, b)]
        output.copy_(block_scaled(packed[0], packed[1], scale_a, scale_b, block=16))
