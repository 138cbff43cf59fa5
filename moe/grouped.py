"""`grouped_gemm`: rows sorted by expert times the matrix of their expert, SwiGLU behind it."""

from __future__ import annotations

from typing import Any

import torch

from kernelkit.tensors import require_no_grad, require_scalars, require_types
from moe import ops
from moe.arguments import Activation, Arguments, SwiGLU, check_form, out_name
from moe.config import DEFAULT_GRANULARITY
from moe.direct import GroupedGemmPlan, quantized_result
from moe.quantized import Quantized

__all__ = ["Activation", "grouped_gemm", "grouped_gemm_plan", "grouped_gemm_swiglu"]


def grouped_gemm(
    x: Quantized,
    w: Quantized,
    offsets: torch.Tensor,
    *,
    activation: Activation | None = None,
    out: torch.dtype | str = torch.bfloat16,
    encode_scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    tile_rows: int | None = None,
    most_rows: int | None = None,
    tile_n: int | None = None,
    carry: bool = False,
    pdl: bool = False,
    backend: str = "auto",
    arch: str | None = None,
) -> torch.Tensor | Quantized:
    """Y_e = X_e W_e^T for every expert e, in one launch, and the activation of pairs of columns.

    x: data [R, K], rows sorted by expert, scale factors of each expert from a fresh 128 rows on
        (`quantise(..., offsets=offsets)`). w: data [E, N, K], in the same format; with an
        activation N = 2 I, packed as it says (`moe.packing`).
    offsets: int32 [E + 1], ascending from 0 to R; experts may have no rows.
    out: dtype of the result [R, N] or [R, I], or the format that it is quantised to in the same
        kernel: then a `Quantized` with scale factors by expert as those of x. encode_scale: fp32
        [1], the global scale of an output in nvfp4.
    amax: fp32 [1], becomes max(amax, the largest magnitude of the output), what calibrates the next
        encode_scale.
    tile_rows: rows of an expert that a tile has, one of `moe.config.TILE_ROWS`; None: chosen by R,
        E and most_rows (`moe.tiles`). most_rows: no expert has more rows than this, R by default:
        what the host knows, since counts stand on the device. Tiles of 8, 16 and 32 rows need
        it.
    tile_n: columns of a tile, 128 or 256; None: chosen by sizes. carry: the epilogue takes 8
        columns at a time, where gate and up alternate by 8 and a tile has 128 rows or more; same
        bits.
    pdl: programmatic dependent launch: the kernel may begin before the one in front of it on the
        stream has ended, and waits for it before it reads anything.

    Raises TypeError, ValueError or NotImplementedError, naming the value and the limit, before
    anything is compiled. No wait and no read of the device, so that a CUDA graph can capture it;
    torch.compile sees one operator, `blackwell_kernels::moe_grouped_gemm`. Forward only.
    """
    options = {
        "activation": activation, "out": out, "encode_scale": encode_scale, "amax": amax,
        "tile_rows": tile_rows, "most_rows": most_rows, "tile_n": tile_n, "carry": carry,
        "pdl": pdl,
    }  # fmt: skip
    arguments = _arguments(x, w, offsets, options)
    data, scales = ops.grouped_gemm(
        *ops.tensors_of(arguments), **ops.numbers_of(arguments), backend=backend, arch=arch
    )
    return quantized_result(arguments, data, scales)


def grouped_gemm_swiglu(
    x: Quantized,
    w13: Quantized,
    offsets: torch.Tensor,
    *,
    form: SwiGLU | None = None,
    granularity: int = DEFAULT_GRANULARITY,
    **options: Any,
) -> torch.Tensor | Quantized:
    """H_e = swiglu(X_e W13_e^T), the first product of a layer: `grouped_gemm` with its options.

    w13: data [E, 2 I, K], gate and up in turn by `granularity` rows, as `moe.packing.pack` gives
        it. form: plain SwiGLU by default. Returns [R, I].
    """
    if not isinstance(form, SwiGLU | None):
        raise TypeError(f"form is {type(form).__name__}, expected SwiGLU or None")
    activation = Activation(granularity, **vars(form or SwiGLU()))
    return grouped_gemm(x, w13, offsets, activation=activation, **options)


def grouped_gemm_plan(
    x: Quantized, w: Quantized, offsets: torch.Tensor, **options: Any
) -> GroupedGemmPlan:
    """A plan for a product that is computed again and again in place: plan() writes plan.result.

    The options are those of `grouped_gemm`, and everything that it checks is checked here, the
    kernel is compiled and the result allocated here. A call launches, and costs the host some
    microseconds: contents of all tensors may change in between, where they lie may not.
    """
    place = {name: options.pop(name) for name in ("backend", "arch") if name in options}
    return GroupedGemmPlan(_arguments(x, w, offsets, options), **place)


def _arguments(
    x: Quantized, w: Quantized, offsets: torch.Tensor, options: dict[str, Any]
) -> Arguments:
    """Types checked; `out` by its name."""
    for name, operand in (("x", x), ("w", w)):
        if not isinstance(operand, Quantized):
            raise TypeError(f"{name} is {type(operand).__name__}, expected Quantized")
    given = {name: options.get(name) for name in ("encode_scale", "amax")}
    given = {name: tensor for name, tensor in given.items() if tensor is not None}
    require_types(offsets=offsets, **given)
    require_no_grad(**given)
    form = options.get("activation")
    if not isinstance(form, Activation | None):
        raise TypeError(f"activation is {type(form).__name__}, expected Activation or None")
    check_form(form)
    kinds = dict.fromkeys(("tile_rows", "most_rows", "tile_n"), "int | None")
    require_scalars(kinds, {name: options.get(name) for name in kinds})
    for name in ("carry", "pdl"):
        require_scalars({name: "bool"}, {name: options.get(name, False)})
    return Arguments(
        x, w, offsets, **options | {"out": out_name(options.get("out", torch.bfloat16))}
    )
