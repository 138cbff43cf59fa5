"""`mixed_gemm`: the grouped product of bf16 activations and four-bit weights.

All checks come before compilation. Nothing waits for the device or reads from it, so that a CUDA
graph captures every call. torch.compile sees `blackwell_kernels::moe_mixed_gemm`. Forward only.
"""

from __future__ import annotations

import torch

from kernelkit.call.tensors import DTYPE_NAMES, require_type
from moe.arguments import SwiGLU
from moe.mixed.fragments import PAIR_ROWS, Fragments
from moe.mixed.launch import MIXED_GEMM

NAMES = DTYPE_NAMES | {torch.float8_e4m3fn: "e4m3"}


def mixed_gemm(
    x: torch.Tensor,
    w: Fragments,
    offsets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    activation: SwiGLU | None = None,
    rows: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    slots: int = 1,
    out: torch.dtype = torch.bfloat16,
    tile_rows: int | None = None,
    teams: int | None = None,
    parts: int | None = None,
    split: int | None = None,
    most_rows: int | None = None,
    pdl: bool = False,
    backend: str = "auto",
    arch: str | None = None,
) -> torch.Tensor:
    """Compute Y_e = X_e W_e^T + b_e for every expert e, and SwiGLU if asked, in 1 or 2 launches.

    `moe.reference` defines the result. Weights become bf16 exactly; fp32 sums are rounded once.

    Args:
        x: bfloat16 [R, K], contiguous, rows sorted by expert; or [T, K] with `rows`. float8_e4m3fn
            if w is arranged for it, on Hopper only.
        w: of `moe.arrange`: w13 with an activation, w2 without.
        offsets: int32 [E + 1], ascending from 0 to at most R; experts may have no rows.
        bias: fp32 [E, N] in the order of the rows of w, as `moe.arrange` has it.
        activation: None for the plain product.
        rows: int32 [R], row r of the product is row rows[r] // slots of x: the slots of tokens, as
            `moe.permutation` sorts them. Rows past the last offset may have any value.
        x_scale: fp32 [1] or [rows of x], which decodes x in e4m3.
        out_scale: fp32 [1], multiplies the output before it is rounded to e4m3.
        out: bfloat16, float16 or float8_e4m3fn.
        tile_rows, teams, parts: see `moe.mixed.config.MixedConfig`, the same bits for any; None: by
            sizes (`moe.mixed.choose`), in which experts of many rows may differ.
        split: CTAs that share a tile along K, 1, 2 or 4: the order of sums. None: more for few
            tiles, and 1 if teams are given.
        most_rows: upper bound of an expert's rows, R by default.
        pdl, backend, arch: as of `moe.grouped_gemm`.

    Returns:
        [R, N], with an activation [R, N / 2]; rows past the last offset are not written.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the value and the limit.
    """
    require_type("activation", activation, SwiGLU, optional=True)
    if not isinstance(out, torch.dtype) or out not in NAMES:
        raise NotImplementedError(f"out {out}: supported are {tuple(NAMES)}")
    form = None if activation is None else activation.of_rows(PAIR_ROWS)
    return MIXED_GEMM({
        "x": x, "w": w, "offsets": offsets, "bias": bias, "activation": form, "rows": rows,
        "x_scale": x_scale, "out_scale": out_scale, "slots": slots, "out": NAMES[out],
        "tile_rows": tile_rows, "teams": teams, "parts": parts, "split": split,
        "most_rows": most_rows, "pdl": pdl, "backend": backend, "arch": arch,
    })  # fmt: skip
