"""A decoding step of few tokens: products, norms, rotations and appends in fused launches.

A layer launches the product of queries, keys and values with everything around it, attention, the
product after it, a norm, and the experts. Every launch begins while the one before it ends, and
products load their weights meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn.functional import linear

from examples.gpt_oss.config import Config
from examples.gpt_oss.few.config import LANE_ELEMENTS, MOST_TOKENS, OCTET, STEP
from examples.gpt_oss.few.launch import (
    Heads,
    Norm,
    add_norm,
    attention_input,
    attention_output,
    most_likely,
)
from examples.gpt_oss.weights import Layer, Weights
from kernelkit.call.ranges import nvtx_range
from kvcache import Rows
from moe import RouterLinear

__all__ = ["Kept", "fits", "forward", "most_likely"]


class Kept(Protocol):
    """Where a step keeps keys and values, and attention over them."""

    def entries(self, number: int) -> tuple[tuple[Rows, Rows], torch.Tensor]:
        """Return the entries of keys and values of layer `number`, and int64 [T] of the tokens."""

    def attend(self, number: int, sinks: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Return O [T, Hq, D] of queries whose keys and values are kept already."""


# Most tokens for which the weight of the product after attention is requested to L2 before
# attention, which then reads little. Requesting the next layer's before the experts costs time.
LATER_MOST = OCTET


def fits(config: Config, weights: Weights, tokens: int) -> bool:
    """Whether the fused launches serve a step of so many tokens."""
    width = config.q_heads * config.head_dim
    whole = not (config.hidden % STEP or width % STEP or config.head_dim % 16)
    whole = whole and not config.vocabulary % LANE_ELEMENTS
    return whole and 1 <= tokens <= MOST_TOKENS and weights.head.dtype == torch.bfloat16


@torch.no_grad()
def forward(
    config: Config,
    weights: Weights,
    angles: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    kept: Kept,
) -> torch.Tensor:
    """Logits bf16 [T, V] of tokens of different requests; see `model.Model.__call__`."""
    norms = _norms(config, weights)
    x, more = weights.embedding[ids], None
    for number, layer in enumerate(weights.layers):
        with nvtx_range(f"layer {number}"):
            rows, mapping = kept.entries(number)
            heads = Heads(
                config.q_heads, config.kv_heads, config.head_dim, positions, angles, rows, mapping
            )
            qkv = layer.qkv, layer.qkv_bias
            later = layer.out if len(ids) <= LATER_MOST else None
            x, q = attention_input(x, more, norms[number], qkv, heads, later)
            o = kept.attend(number, layer.sinks, q).flatten(1)
            norm, out = Norm(layer.experts_norm, config.eps), (layer.out, layer.out_bias)
            x, normed = attention_output(o, x, norm, out)
            more = _experts(layer, normed)
    _, normed = add_norm(x, more, norms[-1])
    return linear(normed, weights.head)


def _norms(config: Config, weights: Weights) -> Sequence[Norm]:
    """Return the norm before each layer, and the last one."""
    tensors = [*(layer.attention_norm for layer in weights.layers), weights.norm]
    return [Norm(tensor, config.eps) for tensor in tensors]


def _experts(layer: Layer, normed: torch.Tensor) -> torch.Tensor:
    return layer.experts(normed, RouterLinear(layer.router, layer.router_bias, ready=True))
