"""`fused_moe`: a whole layer, from router logits to the combined output, all on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kernelkit.tensors import DTYPE_NAMES, require_rank, require_tensors
from moe.grouped import Activation, grouped_gemm
from moe.packing import PackedExperts
from moe.quantiser.forward import quantise
from moe.routing import combine, permutation, route


@dataclass(frozen=True)
class Router:
    """How experts are chosen, as `moe.routing.route` takes it."""

    top_k: int
    scoring: str = "softmax"
    bias: torch.Tensor | None = None
    n_group: int = 1
    topk_group: int = 1
    renormalize: bool = True
    scale: float = 1.0


@dataclass(frozen=True)
class SwiGLU:
    """(up + beta) gate sigmoid(alpha gate) of clamped gate and up; see `moe.grouped.Activation`."""

    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None


@dataclass(frozen=True)
class Scales:
    """Global scales of the activations in nvfp4, fp32 [1]: what a calibration run found. None: of
    the tensor, or of each token, found at every call. h: of the output of SwiGLU; with one the
    first product quantises its output itself.

    h_amax: fp32 [1], becomes max(h_amax, the largest magnitude of h) where it is given with h.
    """

    x: torch.Tensor | str | None = None
    h: torch.Tensor | str | None = None
    h_amax: torch.Tensor | None = field(default=None)


def fused_moe(
    x: torch.Tensor,
    experts: PackedExperts,
    router_logits: torch.Tensor,
    router: Router,
    *,
    activation: SwiGLU | None = None,
    scales: Scales | None = None,
    backend: str = "auto",
    arch: str | None = None,
) -> torch.Tensor:
    """[T, H] in the dtype of x: the sum of a token's experts, weighted by the router.

    x: [T, H] bfloat16 or float16. experts: packed by `moe.packing.pack`, at load.
    router_logits: [T, E]. Every step is a kernel: top-k, permutation, quantising with the gather of
    rows, the first product with SwiGLU (and quantising, where its scale is known), the second one,
    and the combination in the order of a token's choices. Nothing is read back on the host.
    """
    where = {"backend": backend, "arch": arch}
    _check(x, experts, router_logits)
    activation, scales = activation or SwiGLU(), scales or Scales()
    chosen = {name: value for name, value in vars(router).items() if name != "top_k"}
    ids, weights = route(router_logits, router.top_k, **chosen, **where)
    rows = permutation(ids, experts.experts, **where)
    gather = {"rows": rows.slot_of_row, "choices": router.top_k, "offsets": rows.offsets}
    operand = quantise(x, experts.fmt, global_scale=scales.x, **gather, **where)
    hidden = _first(operand, experts, rows.offsets, (activation, scales, x.dtype), where)
    y = grouped_gemm(hidden, experts.w2, rows.offsets, out=x.dtype, **where)
    return combine(y, weights, rows.row_of_slot, **where)


def _first(
    operand: Any, experts: PackedExperts, offsets: torch.Tensor, how: tuple, where: dict[str, Any]
) -> Any:
    """swiglu(x w13) in the format of w2: in one kernel, unless the global scale is to be found."""
    activation, scales, dtype = how
    form = Activation(experts.granularity, **vars(activation))
    known = isinstance(scales.h, torch.Tensor) or not experts.w2.format.has_global
    given = {"activation": form, **where}
    if known:
        return grouped_gemm(
            operand,
            experts.w13,
            offsets,
            out=experts.fmt,
            encode_scale=scales.h,
            amax=scales.h_amax,
            **given,
        )
    h = grouped_gemm(operand, experts.w13, offsets, out=dtype, amax=scales.h_amax, **given)
    return quantise(h, experts.fmt, global_scale=scales.h, offsets=offsets, **where)


def _check(x: torch.Tensor, experts: PackedExperts, router_logits: torch.Tensor) -> None:
    require_tensors(x=x, router_logits=router_logits, w13=experts.w13.data)
    require_rank("x", x, "[T, H]")
    require_rank("router_logits", router_logits, "[T, E]")
    if x.dtype not in DTYPE_NAMES or x.dtype == torch.float32:
        raise NotImplementedError(f"x is {x.dtype}: bfloat16 or float16")
    wanted = (x.shape[0], experts.experts)
    if tuple(router_logits.shape) != wanted or x.shape[1] != experts.hidden:
        raise ValueError(
            f"x {tuple(x.shape)} and router_logits {tuple(router_logits.shape)}: [T, "
            f"{experts.hidden}] and [T, {experts.experts}] for these experts"
        )
