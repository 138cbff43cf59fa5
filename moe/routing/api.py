"""The functions of routing: `route`, `route_tokens`, `permutation` and `combine`.

All checks come before compilation; values of indices are checked on the CPU only. Every run gives
the same bits. Nothing waits for a GPU, so that a CUDA graph captures every call. For `backend` and
`arch` see `kernelkit.call.launch.choose_target`. Forward only.
"""

from __future__ import annotations

from typing import Any

import torch

from kernelkit.call.tensors import require_rank, require_strided, require_types
from moe.arguments import Router, RouterLinear, range_fields
from moe.reference_routing import Permutation
from moe.routing.launch import COMBINE, PERMUTATION, ROUTE
from moe.routing.linear_launch import ROUTE_TOKENS


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    n_group: int = 1,
    topk_group: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    logit_bias: torch.Tensor | None = None,
    shared: int = 0,
    shared_weight: float = 1.0,
    backend: str = "auto",
    arch: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token and their weights, in one launch.

    `moe.reference_routing.route` defines the result. Scores are accurate to a few units in the last
    place of fp32: exp2 to 2 ** -22 with a rounded argument, so softmax loses 2 ** -24 per unit of
    distance from the top. Experts with closer scores may be ordered differently than in another
    implementation.

    Args:
        logits: [T, E] bfloat16, float16 or float32, E up to 512, contiguous rows with any stride.
            NaN counts as -inf, +inf as the largest number; a token with only -inf has scores of 0.
        top_k: up to 16.
        scoring: 'softmax', 'sigmoid' or 'sqrtsoftplus', sqrt(ln(1 + exp(x))), in fp32.
        bias: fp32 [E], added to the scores that experts are chosen by, not to the weights.
        n_group: E experts are n_group (up to 32) groups of neighbours.
        topk_group: experts come only from the topk_group best groups; a group is ranked by the sum
            of its two best experts.
        renormalize: weights are divided by their sum (0 stays 0). Softmax over the chosen experts
            alone (gpt-oss, Mixtral) is 'softmax' with this, up to rounding.
        scale: multiplies the weights afterwards, above 0 and finite.
        logit_bias: fp32 [E], the bias of the router's linear layer, added to the logits before they
            become scores.
        shared: number of experts E .. E + shared - 1 that every token has after its choices; up to
            16 experts of a token and 512 in all.
        shared_weight: weight of shared experts, above 0 and finite.

    Returns:
        (ids int32, weights fp32), [T, k + shared]. The best expert comes first; ties, also of
            groups, go to the lower index.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the value and the limit.
    """
    given = {
        "logits": logits, "bias": bias, "top_k": top_k, "scoring": scoring, "n_group": n_group,
        "topk_group": topk_group, "renormalize": renormalize, "scale": scale,
        "logit_bias": logit_bias, "shared": shared, "shared_weight": shared_weight,
        "backend": backend, "arch": arch,
    }  # fmt: skip
    return ROUTE(given)


def route_tokens(
    x: torch.Tensor,
    linear: RouterLinear,
    router: Router,
    *,
    backend: str = "auto",
    arch: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token and their weights, computed from the tokens.

    This is `route` of torch.nn.functional.linear(x, linear.weight, linear.bias). Up to 64 tokens,
    or 16 if the weight is 1 MiB or larger, are one launch. More tokens use torch's linear layer and
    a second launch.

    In the single launch, logits are fp32 sums, plus the bias, rounded once to the dtype of x. The
    order of a sum depends on E and H alone. If torch adds up in another order, a logit may be
    rounded differently, and experts of nearly equal rank may be exchanged.

    Args:
        x: [T, H] bfloat16 or float16, H a multiple of 8; contiguous rows, 16-byte aligned with a
            stride of a multiple of 16 bytes.
        linear: weight [E, H], laid out like x, and bias [E], in the dtype of x. E up to 512. See
            `moe.RouterLinear` for `ready`.
        router: how experts are chosen, see `route`.

    Returns:
        (ids int32, weights fp32), [T, k + shared], as of `route`.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the value and the limit.
    """
    given = {"x": x, "linear": linear, "router": router, "backend": backend, "arch": arch}
    return ROUTE_TOKENS(given)


def permutation(
    ids: torch.Tensor,
    num_experts: int,
    *,
    expert_range: tuple[int, int] | None = None,
    backend: str = "auto",
    arch: str | None = None,
) -> Permutation:
    """Sort slots by expert; slots of an expert keep their order. One launch up to 2048 slots, else
    two.

    Args:
        ids: int32 [T, k], experts of each token, 0 to num_experts - 1, or -1 for none, as in padded
            batches; copied if not contiguous. Other ids raise on the CPU, and count as -1 on a GPU.
        num_experts: up to 512.
        expert_range: (first, end): only experts first .. end - 1 have rows, those of a rank; all by
            default.

    Returns:
        offsets [E + 1], slot_of_row [T k] and row_of_slot [T k], int32, see `Permutation`. For a
            range, E is end - first. offsets[E] is the number of rows. Slots without an expert, or
            of one outside of the range, have row -1. Entries of slot_of_row past the last row are
            not written.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the value and the limit.
    """
    given = {"ids": ids, "num_experts": num_experts, "backend": backend, "arch": arch}
    return Permutation(*PERMUTATION(given | range_fields(expert_range)))


def combine(
    y: torch.Tensor,
    weights: torch.Tensor | None,
    row_of_slot: torch.Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    partial: bool = True,
    backend: str = "auto",
    arch: str | None = None,
) -> torch.Tensor:
    """Sum weights[t, j] * y[row_of_slot[t, j]] over j = 0, 1, ..., in fp32 and in this order.

    `moe.reference_routing.combine` defines the result. One launch.

    Args:
        y: [R, H] bfloat16, float16 or float32, H a multiple of 8 (of 4 if all is float32),
            contiguous rows, 16-byte aligned with strides of multiples of 16 bytes. R may exceed T *
            k.
        weights: fp32 [T, k]; None adds the rows unweighted.
        row_of_slot: int32 [T * k] or [T, k], k up to 16; [T, k] if weights is None.
        out_dtype: dtype of the result, by default that of y.
        partial: slots may have no row, -1, which add nothing: those without an expert, or of one
            outside of `expert_range`. A token without any row gives zeros. False promises that
            every slot has a row, which is then not checked: a -1 reads out of bounds on a GPU.

    Returns:
        [T, H].

    Raises:
        TypeError, ValueError, NotImplementedError: naming the value and the limit.
    """
    given: dict[str, Any] = {"y": y, "row_of_slot": row_of_slot}
    if weights is not None:
        given["weights"] = weights
    require_types(**given)
    require_strided(**given)
    if weights is not None:
        require_rank("weights", weights, "[T, k]")
        if row_of_slot.numel() != weights.numel():
            raise ValueError(
                f"row_of_slot has {row_of_slot.numel()} slots, weights {tuple(weights.shape)}"
            )
        if row_of_slot.ndim == 1:
            row_of_slot = row_of_slot.reshape(weights.shape)
    require_rank("row_of_slot", row_of_slot, "[T, k]")
    given |= {"row_of_slot": row_of_slot, "partial": partial, "backend": backend, "arch": arch}
    return COMBINE(given | {"out_dtype": y.dtype if out_dtype is None else out_dtype})
