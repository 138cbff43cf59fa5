"""The forward of gpt-oss: everything but where keys and values are kept, which an `Attend` knows.

Dense products are torch's, but for the router's, which `moe` has. A step does nothing that a CUDA
graph cannot capture: no value is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import linear, rms_norm

from examples.gpt_oss.config import Config
from examples.gpt_oss.fused import Elementwise
from examples.gpt_oss.ranks import Ranks
from examples.gpt_oss.rope import angle_table
from examples.gpt_oss.weights import Layer, Weights
from kernelkit.call.ranges import nvtx_range
from moe import RouterLinear

# (number of the layer, its sinks, q [T, Hq, D], k and v [T, Hkv, D]) -> O [T, Hq, D]: keeps k and v
# and attends to them and to what was kept before.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Model:
    """A gpt-oss with `weights`, for positions 0 to `positions` - 1. compiled: whether torch.compile
    fuses what is between products and kernels; the kernels themselves are not in it. ranks: those
    that share it; config is then that of a rank."""

    def __init__(
        self,
        config: Config,
        weights: Weights,
        positions: int,
        *,
        compiled: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        if positions > config.positions:
            raise ValueError(f"{positions} positions: {config.name} has {config.positions}")
        self.config, self.weights = config, weights
        self.device, self.dtype = weights.head.device, weights.head.dtype
        self.angles = angle_table(config, positions, self.device)
        self.ranks = ranks
        self.fused = Elementwise.compiled() if compiled else Elementwise()

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
            wanted: int64 [N], the tokens whose logits are asked for; None is all. Behind the
                attention of the last layer nothing else is computed.

        Returns:
            [N, V] in the dtype of the weights.
        """
        weights, eps, add_norm = self.weights, self.config.eps, self.fused.add_norm
        x, angles = weights.embedding[ids], self.angles[positions]
        # A layer's sum and the norm behind it, the next layer's first one, are one pass.
        first, *others = (*(layer.attention_norm for layer in weights.layers), weights.norm)
        normed = rms_norm(x, first.shape, first, eps)
        for number, (layer, norm) in enumerate(zip(weights.layers, others, strict=True)):
            with nvtx_range(f"layer {number}"):
                only = wanted if layer is weights.layers[-1] else None
                found = self._attention(number, layer, normed, angles, attend, only)
                x, normed = add_norm(_rows(x, only), found, layer.experts_norm, eps)
                router = RouterLinear(layer.router, layer.router_bias, ready=True)
                found = layer.experts(normed, router)
                if self.ranks is not None:
                    found = self.ranks.summed(found, self.ranks.experts)
                x, normed = add_norm(x, found, norm, eps)
        return linear(normed, weights.head)

    def chosen(self, logits: torch.Tensor) -> torch.Tensor:
        """int64 [N]: the most likely tokens, the same on all ranks."""
        ids = logits.argmax(-1)
        return ids if self.ranks is None else self.ranks.agreed(ids)

    def _attention(
        self,
        number: int,
        layer: Layer,
        normed: torch.Tensor,
        angles: torch.Tensor,
        attend: Attend,
        only: torch.Tensor | None,
    ) -> torch.Tensor:
        """What the attention of a layer adds to the residual stream, of all tokens or of some."""
        config = self.config
        heads = linear(normed, layer.qkv, layer.qkv_bias).unflatten(1, (-1, config.head_dim))
        turned = self.fused.rotated(heads[:, : -config.kv_heads], angles)
        q, k = turned.split((config.q_heads, config.kv_heads), dim=1)
        o = attend(number, layer.sinks, q, k, heads[:, -config.kv_heads :])
        found = linear(_rows(o.flatten(1), only), layer.out, layer.out_bias)
        return found if self.ranks is None else self.ranks.summed(found, self.ranks.heads)


def _rows(x: torch.Tensor, only: torch.Tensor | None) -> torch.Tensor:
    """Some rows of x, or all."""
    return x if only is None else x[only]
