"""What the operator `moe_fused` does: the steps of a layer, each a kernel or two.

Nothing here waits for the device or reads from it, so that a CUDA graph can capture it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernelkit.tensors import DTYPE_NAMES, require_rank, require_tensors
from moe.arguments import Activation, Arguments, Router, Scales, SwiGLU, check_form
from moe.config import GroupedConfig
from moe.forward import forward
from moe.packing import PackedExperts
from moe.quantiser.forward import quantise
from moe.quantized import Quantized, of_bytes
from moe.routing.forward import run_combine, run_permutation, run_route
from moe.tiles import check_tile_rows


@dataclass(frozen=True, eq=False)
class Layer:
    """What `moe.layer.fused_moe` takes besides tokens."""

    experts: PackedExperts
    router: Router
    activation: SwiGLU
    scales: Scales
    tile_rows: int | None = None
    backend: str = "auto"
    arch: str | None = None

    @property
    def where(self) -> dict[str, str | None]:
        """Keywords of every step."""
        return {"backend": self.backend, "arch": self.arch}


def run_layer(x: torch.Tensor, router_logits: torch.Tensor, layer: Layer) -> torch.Tensor:
    """[T, H] in the dtype of x."""
    check(x, router_logits, layer)
    experts, router, where = layer.experts, layer.router, layer.where
    chosen = {name: value for name, value in vars(router).items() if name != "bias"}
    ids, weights = run_route(router_logits, router.bias, **chosen, **where)
    offsets, slot_of_row, row_of_slot = run_permutation(ids, experts.experts, **where)
    gather = {"rows": slot_of_row, "choices": router.top_k, "offsets": offsets}
    gather["row_of_slot"] = row_of_slot
    operand = quantise(x, experts.fmt, global_scale=layer.scales.x, **gather, **where)
    # A token chooses an expert once.
    tiles = {"tile_rows": layer.tile_rows, "most_rows": len(x)}
    hidden = first_product(operand, offsets, layer, (x.dtype, tiles))
    second = Arguments(hidden, experts.w2, offsets, out=DTYPE_NAMES[x.dtype], **tiles)
    y, _ = forward(second, **where)
    slots = row_of_slot.view(weights.shape)
    return run_combine(y, weights, slots, out_dtype=x.dtype, **where)


def first_product(operand: Quantized, offsets: torch.Tensor, layer: Layer, how: tuple) -> Quantized:
    """swiglu(x w13) in the format of w2: in one kernel, unless the global scale is to be found.

    how: dtype of an h that is quantised afterwards, keywords about tiles.
    """
    (dtype, tiles), experts, scales = how, layer.experts, layer.scales
    form = Activation(experts.granularity, **vars(layer.activation))
    given = {"activation": form, "amax": scales.h_amax, **tiles}
    if isinstance(scales.h, torch.Tensor) or not experts.w2.format.has_global:
        given |= {"out": experts.fmt, "encode_scale": scales.h}
        results = forward(Arguments(operand, experts.w13, offsets, **given), **layer.where)
        decode = None if scales.h is None else scales.h.reciprocal()
        return of_bytes(*results, scales.h, decode, experts.fmt)
    first = Arguments(operand, experts.w13, offsets, out=DTYPE_NAMES[dtype], **given)
    h, _ = forward(first, **layer.where)
    return quantise(h, experts.fmt, global_scale=scales.h, offsets=offsets, **layer.where)


def check(x: torch.Tensor, router_logits: torch.Tensor, layer: Layer) -> None:
    """Raise TypeError, ValueError or NotImplementedError for tokens that are not the experts'."""
    experts = layer.experts
    require_tensors(x=x, router_logits=router_logits, w13=experts.w13.data)
    require_rank("x", x, "[T, H]")
    require_rank("router_logits", router_logits, "[T, E]")
    if x.dtype not in DTYPE_NAMES or x.dtype == torch.float32:
        raise NotImplementedError(f"x is {x.dtype}: bfloat16 or float16")
    check_form(layer.activation)
    if layer.tile_rows is not None:
        GroupedConfig(tile_rows=layer.tile_rows).check_values()
        check_tile_rows(layer.tile_rows, len(x))
    wanted = (x.shape[0], experts.experts)
    if tuple(router_logits.shape) != wanted or x.shape[1] != experts.hidden:
        raise ValueError(
            f"x {tuple(x.shape)} and router_logits {tuple(router_logits.shape)}: [T, "
            f"{experts.hidden}] and [T, {experts.experts}] for these experts"
        )
