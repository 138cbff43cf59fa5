"""The forward of gpt-oss: everything but where keys and values are kept, which an `Attend` knows.

Dense products are torch's. A step does nothing that a CUDA graph cannot capture: no value is read
on the host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear, rms_norm

from examples.gpt_oss.config import Config
from examples.gpt_oss.rope import angle_table, rotated
from examples.gpt_oss.weights import Layer, Weights

# (number of the layer, its sinks, q [T, Hq, D], k and v [T, Hkv, D]) -> O [T, Hq, D]: keeps k and v
# and attends to them and to what was kept before.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Model:
    """A gpt-oss with `weights`, for positions 0 to `positions` - 1."""

    def __init__(self, config: Config, weights: Weights, positions: int) -> None:
        if positions > config.positions:
            raise ValueError(f"{positions} positions: {config.name} has {config.positions}")
        self.config, self.weights = config, weights
        self.device, self.dtype = weights.head.device, weights.head.dtype
        self.angles = angle_table(config, positions, self.device)

    @torch.no_grad()
    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits of tokens that stand behind each other, of one sequence or of several.

        Args:
            ids, positions: int64 [T].
            attend: see `Attend`.
            wanted: int64 [N], the tokens whose logits are asked for; None is all.

        Returns:
            [N, V] in the dtype of the weights.
        """
        weights, eps = self.weights, self.config.eps
        x, angles = weights.embedding[ids], self.angles[positions]
        for number, layer in enumerate(weights.layers):
            x = x + self._attention(number, layer, x, angles, attend)
            normed = rms_norm(x, layer.experts_norm.shape, layer.experts_norm, eps)
            x = x + layer.experts(normed, linear(normed, layer.router, layer.router_bias))
        x = x if wanted is None else x[wanted]
        return linear(rms_norm(x, weights.norm.shape, weights.norm, eps), weights.head)

    def _attention(
        self, number: int, layer: Layer, x: torch.Tensor, angles: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """What the attention of a layer adds to x [T, H]."""
        config = self.config
        normed = rms_norm(x, layer.attention_norm.shape, layer.attention_norm, config.eps)
        heads = linear(normed, layer.qkv, layer.qkv_bias).unflatten(1, (-1, config.head_dim))
        turned = rotated(heads[:, : -config.kv_heads], angles)
        q, k = turned.split((config.q_heads, config.kv_heads), dim=1)
        o = attend(number, layer.sinks, q, k, heads[:, -config.kv_heads :])
        return linear(o.flatten(1), layer.out, layer.out_bias)
