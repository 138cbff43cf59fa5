"""The functions of Q8_0: `repack`, `dequantise`, `quantise` and `matvec`.

Every function is one launch, which a CUDA graph captures, and reads either layout: the bits of the
results do not depend on it. A tensor on a CUDA GPU runs there, one on the CPU in the emulator;
`backend` and `arch`: see `kernelkit.call.launch.choose_target`. Forward only. TypeError, ValueError
and NotImplementedError name the value and the limit, before anything compiles.
"""

from __future__ import annotations

from typing import Any

import torch

from q8_0.activations import Activations
from q8_0.launch import DEQUANTISE, INTEGER_MATVEC, MATVEC, QUANTISE, REPACK, require_layout
from q8_0.weights import Weights


def repack(
    weights: Weights, layout: str, *, backend: str = "auto", arch: str | None = None
) -> Weights:
    """Return the same weights in `layout`, 'soa' or 'interleaved', bit for bit.

    A round trip restores the same bytes, including those of NaN scales. Weights that already have
    the layout are returned as they are.
    """
    _require(weights)
    require_layout(layout)
    if weights.layout == layout:
        return weights
    data = REPACK({"weights": weights, "layout": layout, "backend": backend, "arch": arch})
    return Weights(data, weights.rows, weights.cols, layout)


def dequantise(
    weights: Weights,
    dtype: torch.dtype = torch.bfloat16,
    *,
    backend: str = "auto",
    arch: str | None = None,
) -> torch.Tensor:
    """[rows, cols] in bfloat16, float16 or float32: d * q, exact in fp32, rounded once, bit for bit
    as `q8_0.reference.dequantise` defines it."""
    _require(weights)
    return DEQUANTISE({"weights": weights, "dtype": dtype, "backend": backend, "arch": arch})


def quantise(x: torch.Tensor, *, backend: str = "auto", arch: str | None = None) -> Activations:
    """[tokens, cols] in int8 with an fp16 scale for each 32 columns (Q8_1 without its sum), bit for
    bit as `q8_0.reference.quantise` defines it.

    Args:
        x: bfloat16, float16 or float32, cols a multiple of 32; the last dimension is contiguous,
            address and other stride are multiples of 16 bytes. A block with NaN or an infinity, or
            beyond 127 * 65504, gets a scale that is none, and products with it are NaN.
    """
    return Activations(*QUANTISE({"x": x, "backend": backend, "arch": arch}))


def matvec(
    weights: Weights,
    x: torch.Tensor | Activations,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    arch: str | None = None,
) -> torch.Tensor:
    """x W^T + bias, [tokens, rows], for 1 to 16 tokens, which share one read of the weights.

    Args:
        weights: [rows, cols].
        x: [tokens, cols]: bfloat16, float16 or float32, laid out as for `quantise`, multiplied in
            fp32; or `Activations`, whose quants are multiplied as int8, exactly, and block sums
            scaled by the product of both scales in fp32.
        bias: [rows], in the dtype of the result, added to the fp32 sum.
        out_dtype: of the result: that of x by default, float32 for `Activations`.
    """
    _require(weights)
    given: dict[str, Any] = {"weights": weights, "x": x, "bias": bias}
    given |= {"backend": backend, "arch": arch}
    if isinstance(x, Activations):
        return INTEGER_MATVEC(given | {"out_dtype": out_dtype or torch.float32})
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is {type(x).__name__}, expected torch.Tensor or Activations")
    return MATVEC(given | {"out_dtype": out_dtype or x.dtype})


def _require(weights: object) -> None:
    if not isinstance(weights, Weights):
        raise TypeError(
            f"weights is {type(weights).__name__}, expected q8_0.Weights, which holds the layout"
        )
