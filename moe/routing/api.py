"""The functions of routing: `route`, `route_tokens`, `permutation` and `combine`.

Everything is checked before it compiles; what indices say is looked at on the CPU alone. Every run
gives the same bits; nothing waits for a GPU, so that a CUDA graph captures every call. `backend`
and `arch`: see `kernelkit.call.launch.choose_target`. Forward only.
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
    """The experts of each token and their weights, as `moe.reference_routing.route` defines them;
    one launch.

    Scores are good to a few units in the last place of fp32 (exp2 to 2 ** -22 and its argument
    rounded, so softmax loses 2 ** -24 per unit of distance from the top): experts whose scores are
    closer than that may change places against another implementation.

    Args:
        logits: [T, E] bfloat16, float16 or float32, E up to 512, rows in one piece with any stride.
            NaN counts as -inf, +inf as the largest number; a token of -inf alone has scores of 0.
        top_k: up to 16.
        scoring: 'softmax', 'sigmoid' or 'sqrtsoftplus', sqrt(ln(1 + exp(x))), in fp32.
        bias: fp32 [E], added to the scores by which experts are chosen and not to the weights.
        n_group, topk_group: E experts are n_group (up to 32) groups of neighbours, and only those
            of the topk_group best groups are chosen; a group is as good as the sum of its two best.
        renormalize: weights are divided by their sum (0 stays 0).
            Softmax over the chosen experts alone (gpt-oss, Mixtral) is 'softmax' with this, up to
            rounding.
        scale: multiplies them afterwards, above 0 and finite.
        logit_bias: fp32 [E], the bias of the router's linear layer, added to the logits before
            they become scores.
        shared: every token has these many experts more, E .. E + shared - 1, behind its choices;
            up to 16 experts of a token and 512 in all.
        shared_weight: of them, above 0 and finite.

    Returns:
        (ids int32, weights fp32), [T, k + shared]. The best expert comes first; of equal ones, and
        of equal groups, that with the lower index.

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
    """The experts of each token and their weights, from the tokens themselves: `route` of
    torch.nn.functional.linear(x, linear.weight, linear.bias).

    Up to 64 tokens, or 16 where the weight is 1 MiB or larger, it is one launch. Above, it is
    torch's linear layer and a launch behind it.

    Of one launch, logits are sums in fp32, plus the bias, rounded once to the dtype of x. The order
    of a sum depends on E and H alone. Where torch adds up in another order a logit may be rounded
    the other way, and experts that are nearly as good may change places.

    Args:
        x: [T, H] bfloat16 or float16, H a multiple of 8; rows in one piece, 16-byte aligned with a
            stride of a multiple of 16 bytes.
        linear: weight [E, H], laid out like x, and bias [E], in the dtype of x; whether they are
            ready, see `moe.RouterLinear`. E up to 512.
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
    """Rows sorted by expert, those of an expert in the order of their slots; one launch up to 2048
    slots, two above.

    Args:
        ids: int32 [T, k], experts of each token, 0 to num_experts - 1, or -1 for none, as engines
            pad batches; copied if not contiguous. Other ids are refused on the CPU, and on a GPU
            count as -1.
        num_experts: up to 512.
        expert_range: (first, end), experts first .. end - 1 alone have rows, those of a rank; all
            of them by default.

    Returns:
        offsets [E + 1], slot_of_row [T k] and row_of_slot [T k], int32, see `Permutation`. Of a
        range E is end - first. offsets[E] says how many rows there are. Slots without an expert, or
        of one outside of the range, have row -1; what is behind the last row of slot_of_row is not
        written.

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
    """Sum over j = 0, 1, ... of weights[t, j] * y[row_of_slot[t, j]], fp32, in this order, as
    `moe.reference_routing.combine` defines it; one launch.

    Args:
        y: [R, H] bfloat16, float16 or float32, H a multiple of 8 (of 4 if all is float32), rows in
            one piece, 16-byte aligned with strides of multiples of 16 bytes. R is not limited by
            T * k.
        weights: fp32 [T, k]; None adds the rows as they are, for those that are weighted already.
        row_of_slot: int32 [T * k] or [T, k], k up to 16; [T, k] where weights is None.
        out_dtype: of the result, by default that of y.
        partial: slots may have no row, -1, which add nothing: those without an expert, or of one
            outside of `expert_range`; a token without any row gives zeros. False promises that
            every slot has a row, which then is not looked at; on a GPU a -1 reads what is not
            there.

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
