"""The forward of gpt-oss: everything but where keys and values are kept, which an `Attend` knows.

Dense products are torch's, but for the router's, which `moe` has. A step does nothing that a CUDA
graph cannot capture: no value is read on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm

from examples.gpt_oss.config import Config
from examples.gpt_oss.few import forward as few
from examples.gpt_oss.ranks import Ranks
from examples.gpt_oss.weights import Layer, Weights
from kernelkit.call.ranges import nvtx_range
from moe import RouterLinear


def frequencies(config: Config) -> tuple[torch.Tensor, float]:
    """(radians of a position, fp32 [D / 2]; what cosines and sines are multiplied by).

    YaRN (arXiv:2309.00071): pairs that turn often within the original context keep their
    frequency, those that turn seldom get it divided by `factor`, and a ramp is in between.
    """
    rope, dim = config.rope, config.head_dim
    base, factor, context = (
        rope[name] for name in ("rope_theta", "factor", "original_max_position_embeddings")
    )

    def pair_that_turns(times: float) -> float:
        """Return the pair, counted from the fastest, that rotates `times` times within the
        context."""
        return dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_that_turns(rope["beta_fast"]), pair_that_turns(rope["beta_slow"])
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    pair = torch.arange(dim // 2, dtype=torch.float32)
    stretched = ((pair - low) / max(high - low, 1e-3)).clamp(0, 1)
    plain = base ** (-2 * pair / dim)
    return plain * (1 - stretched) + plain / factor * stretched, 0.1 * math.log(factor) + 1.0


def angle_table(config: Config, positions: int, device: torch.device | str) -> torch.Tensor:
    """fp32 [positions, 2, 2, D / 2]: (cos, cos), what a head is multiplied by, then (-sin, sin),
    what its halves are multiplied by that have changed places."""
    speed, scale = frequencies(config)
    turns = torch.arange(positions, dtype=torch.float32)[:, None] * speed
    cos, sin = turns.cos() * scale, turns.sin() * scale
    return torch.stack((cos, cos, -sin, sin), dim=1).unflatten(1, (2, 2)).to(device)


# Elementwise work between products and kernels: norms after sums, rotations.
#
# Launched separately these are eight small kernels of torch in a layer; with `compiled`, inductor
# makes three of them.


def add_norm(
    x: torch.Tensor, more: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + more [T, H], and its RMSNorm."""
    x = x + more
    return x, rms_norm(x, weight.shape, weight, eps)


def rotated(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """heads [T, H, D], turned by `angles` [T, 2, 2, D / 2] of its tokens; in fp32, rounded once.

    Element i of the first half and of the second are a pair.
    """
    halves = heads.unflatten(-1, (2, -1))
    by, across = angles[:, None, 0], angles[:, None, 1]
    return torch.addcmul(halves * by, halves.flip(-2), across).to(heads.dtype).flatten(-2)


@dataclass(frozen=True)
class Elementwise:
    """Both elementwise functions, plain or compiled."""

    add_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]] = add_norm
    rotated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = rotated

    @classmethod
    def compiled(cls) -> Elementwise:
        """Compile with torch.compile, which needs a C compiler or, on a GPU, Triton."""
        return cls(_of_any_count(add_norm), _of_any_count(rotated))


def _of_any_count(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors that begin with the tokens [T, ...], and weights of one dimension,
    compiled twice in all: for one token, and for any other number of them. Other sizes are
    constants, as kernels need them to be fast."""
    compiled = torch.compile(function)

    @wraps(function)
    def call(*args: Any) -> Any:
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.ndim > 1:
                torch._dynamo.maybe_mark_dynamic(arg, 0)
        return compiled(*args)

    return call


# (number of the layer, its sinks, q [T, Hq, D], k and v [T, Hkv, D]) -> O [T, Hq, D]: keeps k and v
# and attends to them and to what was kept before.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Model:
    """A gpt-oss with `weights`, for positions 0 to `positions` - 1.

    compiled: whether torch.compile fuses what is between products and kernels; the kernels
        themselves are not in it.
    fuses: whether `decoded` fuses products of few tokens with what is between them and kernels.
    ranks: those that share it; config is then that of a rank.
    """

    def __init__(
        self,
        config: Config,
        weights: Weights,
        positions: int,
        *,
        compiled: bool = False,
        fuses: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        if positions > config.positions:
            raise ValueError(f"{positions} positions: {config.name} has {config.positions}")
        self.config, self.weights = config, weights
        self.device, self.dtype = weights.head.device, weights.head.dtype
        self.angles = angle_table(config, positions, self.device)
        self.ranks, self.fuses = ranks, fuses
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
        # A layer's sum and the norm after it, the next layer's first one, are one pass.
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

    def decoded(
        self, ids: torch.Tensor, positions: torch.Tensor, kept: few.Kept, attend: Attend
    ) -> torch.Tensor:
        """Logits [T, V] of one token of each of T requests: `__call__`, or, of few tokens on one
        GPU, the same in fused launches."""
        config, weights = self.config, self.weights
        if self.ranks is None and self.fuses and few.fits(config, weights, len(ids)):
            return few.forward(config, weights, self.angles, ids, positions, kept)
        return self(ids, positions, attend)

    def choose(self, logits: torch.Tensor, ids: torch.Tensor) -> None:
        """Write the most likely tokens of logits [T, V] to ids, int64 [T], on all ranks."""
        if self.ranks is None and self.fuses and few.fits(self.config, self.weights, len(ids)):
            few.most_likely(logits, ids)
        else:
            ids.copy_(self.chosen(logits))

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
        """Return what attention adds to the residual stream, for all tokens or those in `only`."""
        config = self.config
        heads = linear(normed, layer.qkv, layer.qkv_bias).unflatten(1, (-1, config.head_dim))
        turned = self.fused.rotated(heads[:, : -config.kv_heads], angles)
        q, k = turned.split((config.q_heads, config.kv_heads), dim=1)
        o = attend(number, layer.sinks, q, k, heads[:, -config.kv_heads :])
        found = linear(_rows(o.flatten(1), only), layer.out, layer.out_bias)
        return found if self.ranks is None else self.ranks.summed(found, self.ranks.heads)


def _rows(x: torch.Tensor, only: torch.Tensor | None) -> torch.Tensor:
    """Return some rows of x, or all."""
    return x if only is None else x[only]
