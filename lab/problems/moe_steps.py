"""The steps around the grouped products of a MoE layer: quantise, route, sort, combine."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import linear

from lab.problems.steps import (
    Arguments,
    Maker,
    Outputs,
    Problem,
    expect_bits,
    expect_close,
    normal,
)
from moe import reference, reference_routing
from moe.arguments import Router, RouterLinear
from moe.formats import FORMATS, row_blocks, scale_bytes
from moe.quantiser.launch import Tokens, quantise
from moe.quantized import Quantized
from moe.routing import Permutation, combine, permutation, route, route_tokens
from moe.routing.config import LinearConfig
from moe.routing.launch import config_of

EXPERTS, TOP_K = 256, 8  # of what is gathered, permuted and combined
# name -> (format, global scale): a number is known before, a word is what to find it from
QUANTISERS = {
    "nvfp4, scale known": ("nvfp4", 300.0),
    "nvfp4, scale of the tensor": ("nvfp4", "tensor"),
    "nvfp4, scale of each token": ("nvfp4", "token"),
    "mxfp8": ("mxfp8", None),
    "mxfp4": ("mxfp4", None),
}
GATHERED = "nvfp4, 8 copies, by expert"
# name -> (experts, whether there is a bias, keyword arguments of route)
ROUTERS = {
    "256 experts in 8 groups, 8 of 4": (
        256,
        True,
        {"top_k": 8, "scoring": "sigmoid", "n_group": 8, "topk_group": 4, "scale": 2.5},
    ),
    "384 experts, 8": (384, True, {"top_k": 8, "scoring": "sigmoid", "scale": 2.5}),
    "128 experts, 4": (128, False, {"top_k": 4}),
}
# The same of a router with its linear layer: whether that has a bias comes last.
LINEAR_ROUTERS = {
    "256 experts in 8 groups, 8 of 4": (*ROUTERS["256 experts in 8 groups, 8 of 4"], False),
    "32 experts, 4": (32, False, {"top_k": 4}, True),
}
INPUTS = "standard normal, bf16 (logits fp32); experts of a token all alike"
CHECKED = 4096  # tokens, the first of more: references are slow
SAME_EXPERTS = 0.99  # of tokens; the others have experts that are all but equal
WEIGHT_ERROR = 1e-5
SUM_ERROR = 0.02


def makers(hidden: int) -> dict[str, list[Maker]]:
    """Return the makers by step."""
    return {
        "quantise": [
            *(partial(_quantiser, name, hidden) for name in QUANTISERS),
            partial(_gather, hidden),
        ],
        "route": [partial(_router, name) for name in ROUTERS],
        "route_tokens": [partial(_linear_router, name, hidden) for name in LINEAR_ROUTERS],
        "permutation": [_permutation],
        "combine": [partial(_combine, hidden)],
    }


# -- quantise -------------------------------------------------------------------------------------


def quantised_bytes(fmt: str, rows: int, blocks: int, hidden: int, scales: int) -> int:
    """Bytes of elements, scale factors, and `scales` global scales with their inverses."""
    form = FORMATS[fmt]
    elements = rows * hidden // form.per_byte
    return elements + scale_bytes(blocks, form.columns(hidden)) + scales * 8


def _quantiser(name: str, hidden: int, tokens: int) -> Problem:
    fmt, scale = QUANTISERS[name]
    known = isinstance(scale, float)

    def draw(seed: int, device: str) -> Arguments:
        given = torch.full((1,), scale, device=device) if known else scale
        return normal(seed, device, tokens, hidden), given

    def ours(x: torch.Tensor, scale: torch.Tensor | str | None) -> Outputs:
        return tensors_of(quantise(Tokens(x, fmt, scale)))

    def check(arguments: Arguments, outputs: Outputs) -> None:
        x, scale = arguments
        if scale != "tensor":  # of which every token has a part
            x = x[:CHECKED]
        expect_bits(outputs, tensors_of(reference.quantise(x, fmt, global_scale=scale)))

    scales = {"token": tokens, None: 0}.get(scale, 1)
    nbytes = 2 * tokens * hidden + 4 * known
    nbytes += quantised_bytes(fmt, tokens, row_blocks(tokens), hidden, scales)
    return Problem("quantise", name, tokens, nbytes, draw, {"moe": ours}, check)


def _gather(hidden: int, tokens: int) -> Problem:
    """Rows sorted by expert, as fused_moe takes them."""
    slots = tokens * TOP_K

    def draw(seed: int, device: str) -> Arguments:
        rows = reference_routing.permutation(chosen(seed, device, tokens), EXPERTS)
        scale = torch.full((1,), 300.0, device=device)
        return normal(seed, device, tokens, hidden), scale, rows

    def ours(x: torch.Tensor, scale: torch.Tensor, rows: Permutation) -> Outputs:
        given = {"rows": rows.slot_of_row, "choices": TOP_K, "offsets": rows.offsets}
        given["row_of_slot"] = rows.row_of_slot
        return tensors_of(quantise(Tokens(x, "nvfp4", scale, **given)))

    def check(arguments: Arguments, outputs: Outputs) -> None:
        x, scale, rows = arguments
        some = x[rows.slot_of_row[:CHECKED].long() // TOP_K]
        expect_bits(outputs, tensors_of(reference.quantise(some, "nvfp4", global_scale=scale))[:1])

    used = min(EXPERTS, slots)  # experts, of which all have as many rows
    blocks = used * row_blocks(-(-slots // used))
    nbytes = 2 * tokens * hidden + 4 * (2 * slots + EXPERTS + 2)
    nbytes += quantised_bytes("nvfp4", slots, blocks, hidden, 1)
    return Problem("quantise", GATHERED, tokens, nbytes, draw, {"moe": ours}, check)


# -- routing --------------------------------------------------------------------------------------


def _router(name: str, tokens: int) -> Problem:
    experts, biased, options = ROUTERS[name]

    def draw(seed: int, device: str) -> Arguments:
        logits = normal(seed, device, tokens, experts).float()
        return logits, normal(seed + 1, device, experts).float() / 8 if biased else None

    def ours(logits: torch.Tensor, bias: torch.Tensor | None) -> Outputs:
        return route(logits, bias=bias, **options)

    def by_torch(logits: torch.Tensor, bias: torch.Tensor | None) -> Outputs:
        return torch_route(logits, bias, **options)

    def check(arguments: Arguments, outputs: Outputs) -> None:
        logits, bias = arguments
        expect_choice(outputs, reference_routing.route(logits, bias=bias, **options))

    nbytes = 4 * (tokens * experts + biased * experts) + 8 * tokens * options["top_k"]
    peers = {"moe": ours, "torch": by_torch}
    return Problem("route", name, tokens, nbytes, draw, peers, check)


def _linear_router(name: str, hidden: int, tokens: int) -> Problem:
    experts, biased, options, linear_biased = LINEAR_ROUTERS[name]

    def draw(seed: int, device: str) -> Arguments:
        x, weight = normal(seed, device, tokens, hidden), normal(seed + 1, device, experts, hidden)
        own = normal(seed + 2, device, experts) if linear_biased else None
        bias = normal(seed + 3, device, experts).float() / 8 if biased else None
        return x, weight / hidden**0.5, own, bias

    def ours(
        x: torch.Tensor, weight: torch.Tensor, own: torch.Tensor | None, bias: torch.Tensor | None
    ) -> Outputs:
        return route_tokens(x, RouterLinear(weight, own, ready=True), Router(**options, bias=bias))

    def in_two(
        x: torch.Tensor, weight: torch.Tensor, own: torch.Tensor | None, bias: torch.Tensor | None
    ) -> Outputs:
        return route(linear(x, weight, own), bias=bias, **options)

    def by_torch(
        x: torch.Tensor, weight: torch.Tensor, own: torch.Tensor | None, bias: torch.Tensor | None
    ) -> Outputs:
        return torch_route(linear(x, weight, own).float(), bias, **options)

    def check(arguments: Arguments, outputs: Outputs) -> None:
        x, weight, own, bias = arguments
        logits = x.double() @ weight.double().T + (0.0 if own is None else own.double())
        expect_choice(outputs, reference_routing.route(logits.to(x.dtype), bias=bias, **options))

    nbytes = 2 * (tokens * hidden + experts * hidden + linear_biased * experts)
    nbytes += 4 * biased * experts + 8 * tokens * options["top_k"]
    peers = {"moe": ours, "torch, moe": in_two, "torch": by_torch}
    routed = config_of(Router(**options), experts, torch.bfloat16)
    beside = "the linear layer" * (tokens > LinearConfig(routed, hidden).most_tokens)
    return Problem("route_tokens", name, tokens, nbytes, draw, peers, check, beside)


def torch_route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    top_k: int,
    scoring: str = "softmax",
    n_group: int = 1,
    topk_group: int = 1,
    scale: float = 1.0,
) -> Outputs:
    """Route as models do; torch's ids are int64, but the kernels that follow expect int32."""
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    chosen_by = scores if bias is None else scores + bias
    if n_group > 1:
        groups = chosen_by.unflatten(-1, (n_group, -1))
        best = groups.topk(2, dim=-1)[0].sum(-1).topk(topk_group, dim=-1)[1]
        closed = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
        chosen_by = groups.masked_fill(closed[..., None], -torch.inf).flatten(1)
    ids = chosen_by.topk(top_k, dim=-1)[1]
    weights = scores.gather(1, ids)
    return ids.int(), weights / weights.sum(-1, keepdim=True) * scale


def _permutation(tokens: int) -> Problem:
    def ours(ids: torch.Tensor) -> Outputs:
        return tuple(vars(permutation(ids, EXPERTS)).values())

    def by_torch(ids: torch.Tensor) -> Outputs:
        return tuple(vars(reference_routing.permutation(ids, EXPERTS)).values())

    def check(arguments: Arguments, outputs: Outputs) -> None:
        expect_bits(outputs, by_torch(*arguments))

    def draw(seed: int, device: str) -> Arguments:
        return (chosen(seed, device, tokens),)

    name = f"{EXPERTS} experts, {TOP_K}"
    nbytes = 4 * (3 * tokens * TOP_K + EXPERTS + 1)
    peers = {"moe": ours, "torch": by_torch}
    return Problem("permutation", name, tokens, nbytes, draw, peers, check)


def _combine(hidden: int, tokens: int) -> Problem:
    def draw(seed: int, device: str) -> Arguments:
        rows = reference_routing.permutation(chosen(seed, device, tokens), EXPERTS).row_of_slot
        weights = normal(seed, device, tokens, TOP_K).float().softmax(-1)
        y = normal(seed, device, tokens * TOP_K, hidden)
        return y, weights, rows.view(tokens, TOP_K)

    def ours(y: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> Outputs:
        return (combine(y, weights, rows, partial=False),)

    def by_torch(y: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> Outputs:
        gathered = y.index_select(0, rows.flatten()).view(tokens, TOP_K, hidden)
        return (torch.bmm(weights.to(y.dtype)[:, None], gathered)[:, 0],)

    def check(arguments: Arguments, outputs: Outputs) -> None:
        y, weights, rows = arguments
        expected = reference_routing.combine(y, weights[:CHECKED], rows[:CHECKED])
        expect_close(outputs[0][:CHECKED].float(), expected, SUM_ERROR)

    nbytes = 2 * (TOP_K + 1) * tokens * hidden + 8 * tokens * TOP_K
    peers = {"moe": ours, "torch": by_torch}
    return Problem("combine", f"bf16, {TOP_K} rows", tokens, nbytes, draw, peers, check)


# -- what they share ------------------------------------------------------------------------------


def chosen(seed: int, device: str, tokens: int) -> torch.Tensor:
    """TOP_K different experts of each token."""
    return normal(seed, device, tokens, EXPERTS).topk(TOP_K, dim=-1)[1].int()


def expect_choice(outputs: Outputs, expected: Outputs) -> None:
    """ValueError for other experts, of more than a few tokens, or other weights."""
    same = (outputs[0] == expected[0]).all(1)
    if same.float().mean() < SAME_EXPERTS:
        raise ValueError("wrong: other experts than the reference's")
    expect_close(outputs[1][same], expected[1][same], WEIGHT_ERROR)


def tensors_of(found: Quantized) -> Outputs:
    """Return the bytes and global scales."""
    scales = (found.encode_scale, found.decode_scale)
    data = found.data.view(torch.uint8), found.scales.view(torch.uint8)
    return *data, *(x for x in scales if x is not None)
