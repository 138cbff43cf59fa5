"""`fused_moe`: a whole layer, from router logits to the combined output, all on the device."""

from __future__ import annotations

from typing import Any

import torch

from kernelkit.tensors import require_no_grad, require_scalars, require_types
from moe import ops
from moe.arguments import Router, Scales, SwiGLU
from moe.direct import FusedMoePlan
from moe.packing import PackedExperts
from moe.steps import Layer

__all__ = ["Router", "Scales", "SwiGLU", "fused_moe", "fused_moe_plan"]


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
    tile_rows: of both products, see `moe.grouped.grouped_gemm`; None: chosen by sizes.

    Raises TypeError, ValueError or NotImplementedError, naming the value and the limit. Forward
    only. torch.compile sees one operator, `blackwell_kernels::moe_fused`; CUDA graphs capture it.
    """
    layer = Layer(
        experts, router, activation or SwiGLU(), scales or Scales(), tile_rows, backend, arch
    )
    _require_types(x, router_logits, layer)
    return ops.fused(x, router_logits, *ops.tensors_of_layer(layer), **ops.numbers_of_layer(layer))


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
    options = {name: value for name, value in options.items() if value is not None}
    layer = Layer(experts, router, **{"activation": SwiGLU(), "scales": Scales()} | options)
    _require_types(x, router_logits, layer)
    return FusedMoePlan(x, router_logits, layer)


KINDS = {
    "top_k": "int", "scoring": "str", "n_group": "int", "topk_group": "int", "renormalize": "bool",
    "scale": "float", "alpha": "float", "beta": "float", "limit": "float | None",
    "tile_rows": "int | None",
}  # fmt: skip


def _require_types(x: torch.Tensor, router_logits: torch.Tensor, layer: Layer) -> None:
    kinds = {
        "experts": PackedExperts, "router": Router, "activation": SwiGLU, "scales": Scales
    }  # fmt: skip
    for name, wanted in kinds.items():
        value = getattr(layer, name)
        if not isinstance(value, wanted):
            raise TypeError(f"{name} is {type(value).__name__}, expected {wanted.__name__}")
    scales = {f"scales.{name}": scale for name, scale in vars(layer.scales).items()}
    words = {name for name in ("scales.x", "scales.h") if isinstance(scales[name], str)}
    given = {"x": x, "router_logits": router_logits}
    others = {"bias": layer.router.bias} | scales
    tensors = given | {n: t for n, t in others.items() if t is not None and n not in words}
    require_types(**tensors)
    require_no_grad(**tensors)
    numbers = {**vars(layer.router), **vars(layer.activation), "tile_rows": layer.tile_rows}
    require_scalars(KINDS, {name: numbers[name] for name in KINDS})
