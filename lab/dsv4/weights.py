"""A layer of DeepSeek-V4 at reduced width: random weights, projections, RoPE tables.

What stands here is the model's, not the cache's: dense products, which an engine has anyway. They
are computed in fp64 and rounded where an engine's would be, so that a token's numbers do not depend
on which tokens it is computed with. Source of the formulas: DeepSeek's inference code for V4
(model.py: Attention, Compressor, Indexer, Gate, Expert) and arXiv 2606.19348, sections 2 and 4.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch

from kvcache.movement.reference import rotated_rope
from lab.flags.dsv4 import HEAD_DIM, INDEX_DIM, ROPE, Shape
from moe import Router, SwiGLU

EPS = 1e-6
# Layers of the window alone have plain RoPE, the others YaRN (config.json of V4-Pro and V4-Flash).
PLAIN_BASE, BASE = 10_000.0, 160_000.0
YARN_FACTOR, YARN_ORIGINAL, YARN_FAST, YARN_SLOW = 16.0, 65_536, 32.0, 1.0
LIMIT = 10.0  # of SwiGLU


@dataclass(frozen=True, eq=False)
class Squeeze:
    """Weights of a compressor: of values and scores [overlap * d, hidden], ape [ratio, overlap * d]
    and norm [d] in fp32."""

    values: torch.Tensor
    scores: torch.Tensor
    ape: torch.Tensor
    norm: torch.Tensor


@dataclass(frozen=True, eq=False)
class Projected:
    """Projections of tokens that a layer's kernels read.

    q: bf16 [T, H, 512], rotated.
    kv: bf16 [T, 512], not rotated.
    main, index: values and scores of the two compressors, fp32.
    index_q: bf16 [T, HI, 128], queries of the indexer, not rotated.
    index_weights: fp32 [T, HI].
    """

    q: torch.Tensor
    kv: torch.Tensor
    main: tuple[torch.Tensor, torch.Tensor] | None = None
    index: tuple[torch.Tensor, torch.Tensor] | None = None
    index_q: torch.Tensor | None = None
    index_weights: torch.Tensor | None = None

    def to(self, device: torch.device) -> Projected:
        """Return the projections on another device."""
        return Projected(*(_moved(getattr(self, field.name), device) for field in fields(self)))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple):
        return tuple(tensor.to(device) for tensor in value)
    return None if value is None else value.to(device)


class Weights:
    """Weights of one layer, drawn from `seed`; matrices are bf16 as in a checkpoint."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self._generator = shape, torch.Generator().manual_seed(seed)
        hidden, heads, width = shape.hidden, shape.heads, shape.heads * HEAD_DIM
        self.attention_norm, self.ffn_norm = self._norm(hidden), self._norm(hidden)
        self.q_a, self.q_norm = self._matrix(shape.q_rank, hidden), self._norm(shape.q_rank)
        self.q_b = self._matrix(width, shape.q_rank)
        self.kv, self.kv_norm = self._matrix(HEAD_DIM, hidden), self._norm(HEAD_DIM)
        self.sinks = self._normal(heads) + 2.0  # the weight of some keys
        self.o_a = self._matrix(shape.o_groups, shape.o_rank, width // shape.o_groups)
        self.o_b = self._matrix(hidden, shape.o_groups * shape.o_rank)
        self.main = self._squeeze(HEAD_DIM) if shape.ratio else None
        self.index = self._squeeze(INDEX_DIM) if shape.kind == "csa" else None
        self.index_q = self._matrix(shape.index_heads * INDEX_DIM, shape.q_rank)
        self.index_weights = self._matrix(shape.index_heads, hidden)
        self.gate, self.bias = self._matrix(shape.experts, hidden), self._normal(shape.experts) / 4
        self.w13 = self._matrix(shape.experts, 2 * shape.intermediate, hidden)
        self.w2 = self._matrix(shape.experts, hidden, shape.intermediate)
        self.shared13 = self._matrix(2 * shape.intermediate, hidden)
        self.shared2 = self._matrix(hidden, shape.intermediate)

    @property
    def router(self) -> Router:
        """The router of V4-Pro: the bias chooses, and weighs nothing."""
        return Router(self.shape.choices, "sqrtsoftplus", bias=self.bias, scale=2.5)

    @property
    def activation(self) -> SwiGLU:
        """Activation of experts."""
        return SwiGLU(limit=LIMIT)

    def _normal(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=self._generator)

    def _norm(self, size: int) -> torch.Tensor:
        return 1.0 + 0.1 * self._normal(size)

    def _matrix(self, *sizes: int) -> torch.Tensor:
        return (self._normal(*sizes) * sizes[-1] ** -0.5).bfloat16()

    def _squeeze(self, width: int) -> Squeeze:
        columns = self.shape.overlap * width
        values, scores = (self._matrix(columns, self.shape.hidden) for _ in range(2))
        return Squeeze(values, scores, self._normal(self.shape.ratio, columns), self._norm(width))

    # -- of tokens ---------------------------------------------------------------------------

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> Projected:
        """x [T, hidden] bf16, the residual stream at `positions` [T]."""
        shape = self.shape
        h = rms_norm(x, self.attention_norm).bfloat16()
        latent = rms_norm(linear(h, self.q_a).bfloat16(), self.q_norm).bfloat16()
        q = linear(latent, self.q_b).unflatten(-1, (shape.heads, HEAD_DIM))
        q = rotate(rms_norm(q), *angles(shape.kind, positions)).bfloat16()
        kv = rms_norm(linear(h, self.kv).bfloat16(), self.kv_norm).bfloat16()
        squeezed = [
            None if s is None else (linear(h, s.values).float(), linear(h, s.scores).float())
            for s in (self.main, self.index)
        ]
        if self.index is None:
            return Projected(q, kv, *squeezed)
        index_q = linear(latent, self.index_q).unflatten(-1, (shape.index_heads, INDEX_DIM))
        weights = linear(h, self.index_weights) * (INDEX_DIM * shape.index_heads) ** -0.5
        return Projected(q, kv, *squeezed, index_q.bfloat16(), weights.float())

    def attended(self, x: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        """The residual stream behind attention: x + W (o), o [T, H, 512] in groups of heads."""
        grouped = o.double().flatten(1).unflatten(-1, (self.shape.o_groups, -1))
        low = torch.einsum("tgd,grd->tgr", grouped, self.o_a.double()).bfloat16()
        return (x.double() + linear(low.flatten(1), self.o_b)).bfloat16()

    def routed(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(what experts take, bf16; logits of the router, fp32) of the residual stream x."""
        h = rms_norm(x, self.ffn_norm).bfloat16()
        return h, linear(h, self.gate).float()

    def shared(self, h: torch.Tensor) -> torch.Tensor:
        """The expert of all tokens, fp64."""
        gate, up = linear(h, self.shared13).chunk(2, dim=-1)
        inner = up.clamp(-LIMIT, LIMIT) * torch.nn.functional.silu(gate.clamp(max=LIMIT))
        return linear(inner, self.shared2)

    def joined(self, x: torch.Tensor, h: torch.Tensor, moe: torch.Tensor) -> torch.Tensor:
        """The residual stream behind the layer, bf16."""
        return (x.double() + moe.double() + self.shared(h)).bfloat16()


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x w^T in fp64."""
    return x.double() @ w.double().T


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """fp64, over the last dimension."""
    x = x.double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return x if weight is None else x * weight.double()


def angles(kind: str, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) fp32 [T, 32] of a layer."""
    turns = positions.double()[:, None] * frequencies(kind)
    return turns.cos().float(), turns.sin().float()


def frequencies(kind: str) -> torch.Tensor:
    """fp64 [32]: radians of a position; YaRN slows the low ones down where there is compression."""
    exponents = torch.arange(0, ROPE, 2, dtype=torch.float64) / ROPE
    if kind == "swa":
        return PLAIN_BASE**-exponents
    plain = BASE**-exponents
    fast, slow = (
        ROPE * math.log(YARN_ORIGINAL / (turns * 2 * math.pi)) / (2 * math.log(BASE))
        for turns in (YARN_FAST, YARN_SLOW)
    )
    low, high = max(math.floor(fast), 0), min(math.ceil(slow), ROPE - 1)
    ramp = ((torch.arange(ROPE // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return plain / YARN_FACTOR * ramp + plain * (1 - ramp)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """fp64: the last 64 of x [T, ..., D] turned by the angles [T, 32], neighbours as pairs."""
    x = x.double()
    shape = (len(x), *(1,) * (x.ndim - 2), ROPE // 2)
    cos, sin = cos.double().view(shape), sin.double().view(shape)
    return torch.cat((x[..., :-ROPE], rotated_rope(x[..., -ROPE:], cos, sin)), -1)
