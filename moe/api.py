"""`grouped_gemm` and `fused_moe`: a user's arguments in, the operator or a plan behind them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kernelkit.operator import Plan
from kernelkit.tensors import is_broadcast
from moe.arguments import Activation, Router, Scales, SwiGLU, check_form, out_name
from moe.config import DEFAULT_GRANULARITY
from moe.fused import FUSED, Layer
from moe.launch import GROUPED_GEMM, quantised_result
from moe.packing import PackedExperts
from moe.quantized import Quantized


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
        E and most_rows (`moe.choose`). most_rows: no expert has more rows than this, R by default:
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
        "pdl": pdl, "backend": backend, "arch": arch,
    }  # fmt: skip
    fields = _fields(x, w, offsets, options)
    return quantised_result(fields["out"], encode_scale, *GROUPED_GEMM(fields))


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


class GroupedGemmPlan:
    """plan() computes the product anew, into `result`; `grouped_gemm_plan` makes it.

    Every tensor is read and written where it was when the plan was made; the plan keeps them all.
    Their contents may change, but for encode_scale; what offsets say is not looked at again.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        self._plan = Plan(GROUPED_GEMM, fields)
        self.config = GROUPED_GEMM.arguments(fields).config
        encode_scale = fields.get("encode_scale")
        self.result = quantised_result(fields["out"], encode_scale, *self._plan.made)

    def __call__(self) -> torch.Tensor | Quantized:
        """`result`, as the contents of the arguments are now."""
        self._plan()
        return self.result


def grouped_gemm_plan(
    x: Quantized, w: Quantized, offsets: torch.Tensor, **options: Any
) -> GroupedGemmPlan:
    """A plan for a product that is computed again and again in place: plan() writes plan.result.

    The options are those of `grouped_gemm`, and everything that it checks is checked here, the
    kernel is compiled and the result allocated here. A call launches, and costs the host some
    microseconds: contents of all tensors may change in between, where they lie may not.
    """
    return GroupedGemmPlan(_fields(x, w, offsets, options))


def _fields(
    x: Quantized, w: Quantized, offsets: torch.Tensor, options: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of `grouped_gemm` -> fields of `moe.arguments.Arguments`."""
    out = out_name(options.get("out", torch.bfloat16))
    if isinstance(options.get("activation"), Activation):
        check_form(options["activation"])
    return {"x": x, "w": w, "offsets": offsets, **options, "out": out}


def fused_moe(
    x: torch.Tensor,
    experts: PackedExperts,
    router_logits: torch.Tensor,
    router: Router,
    *,
    activation: SwiGLU | None = None,
    scales: Scales | None = None,
    tile_rows: int | None = None,
    backend: str = "auto",
    arch: str | None = None,
) -> torch.Tensor:
    """[T, H] in the dtype of x: the sum of a token's experts, weighted by the router.

    x: [T, H] bfloat16 or float16. experts: packed by `moe.packing.pack`, at load.
    router_logits: [T, E]. Every step is a kernel: top-k, permutation, quantising with the gather of
    rows, the first product with SwiGLU (and quantising, where its scale is known), the second one,
    and the combination in the order of a token's choices. Nothing is read back on the host.
    tile_rows: of both products, see `grouped_gemm`; None: chosen by sizes.

    Raises TypeError, ValueError or NotImplementedError, naming the value and the limit. Forward
    only. torch.compile sees one operator, `blackwell_kernels::moe_fused`; CUDA graphs capture it.
    """
    return FUSED({
        "x": x, "router_logits": router_logits, "experts": experts, "router": router,
        "activation": activation or SwiGLU(), "scales": scales or Scales(),
        "tile_rows": tile_rows, "backend": backend, "arch": arch,
    })  # fmt: skip


class FusedMoePlan:
    """plan() computes the layer anew, into `result`; `fused_moe_plan` makes it.

    Every tensor is read and written where it was when the plan was made; the plan keeps them all.
    Their contents may change, but for global scales.
    """

    def __init__(self, layer: Layer) -> None:
        layer = FUSED.arguments(vars(layer))  # of checked types
        if layer.experts.w13.format.has_global:
            for name in ("x", "h"):
                scale = getattr(layer.scales, name)
                if not isinstance(scale, torch.Tensor):
                    raise ValueError(f"scales.{name} is {scale!r}: a plan takes one that is known")
            layer = replace(layer, h_decode_scale=scale.reciprocal())  # of h, the last
        tables = {"router_logits": layer.router_logits, "bias": layer.router.bias}
        for name, table in tables.items():
            if table is not None and is_broadcast(table):
                raise ValueError(f"{name} has strides {table.stride()}: a plan copies nothing")
        # Without a GPU each step looks at what the one before it wrote.
        self._plan = Plan(FUSED, vars(layer), dry=layer.x.is_cuda)
        (self.result,) = self._plan.made

    def __call__(self) -> torch.Tensor:
        """`result`, as the contents of the arguments are now."""
        self._plan()
        return self.result


def fused_moe_plan(
    x: torch.Tensor,
    experts: PackedExperts,
    router_logits: torch.Tensor,
    router: Router,
    **options: Any,
) -> FusedMoePlan:
    """A plan for a layer that is computed again and again in place: plan() writes plan.result.

    The options are those of `fused_moe`; its checks, and those of contents on the CPU, are made
    here, and all is compiled and allocated here. A call makes the launches alone, some microseconds
    of host work each: contents of x, router_logits, bias and weights may change in between, where
    they lie may not. Global scales have to be known, as tensors, where the format has any.
    """
    given = {name: value for name, value in options.items() if value is not None}
    return FusedMoePlan(Layer(x, router_logits, experts, router, **given))
