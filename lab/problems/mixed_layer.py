"""Problems of whole layers of arranged experts: inputs of `fused_moe`, and what it has to give.

Experts and weights of the router are those that the kernel `route` gives, which is held against its
definition elsewhere: a choice between two that are nearly equal is no error of the layer.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from kernelkit.numerics import tolerance
from lab.problems.mixed_gemm import sums
from moe import (
    ArrangedExperts,
    PackedExperts,
    Router,
    SwiGLU,
    arrange,
    pack,
    reference,
    route,
    unpack,
    unpack_biases,
)

ARCH = "sm_90a"  # of the router, in the emulator
FAR = 50.0  # between logits of experts that are chosen and others


@dataclass(frozen=True)
class Layer:
    """shared: experts beside those that are chosen from. rank: (first, end) of all of them, None
    for the whole layer. routing: 'any'; 'one', an expert for all tokens; 'elsewhere', none of the
    rank. form: of SwiGLU. amplitude: of x. tile_rows: as `fused_moe` takes them."""

    tokens: int
    hidden: int = 160
    intermediate: int = 96
    experts: int = 5
    top_k: int = 2
    fmt: str = "mxfp4"
    scoring: str = "softmax"
    shared: int = 0
    rank: tuple[int, int] | None = None
    routing: str = "any"
    form: tuple[float, float, float | None] = (1.702, 1.0, 7.0)
    bias: bool = True
    amplitude: float = 1.0
    tile_rows: int | None = None

    def __str__(self) -> str:
        words = (f"{each.name}={getattr(self, each.name)}" for each in fields(self))
        return "-".join(words).replace(" ", "")

    @property
    def total(self) -> int:
        """Experts, here or elsewhere."""
        return self.experts + self.shared

    @property
    def here(self) -> tuple[int, int]:
        """Which are."""
        return self.rank or (0, self.total)

    @property
    def router(self) -> Router:
        return Router(self.top_k, self.scoring, shared=self.shared)

    @property
    def activation(self) -> SwiGLU:
        return SwiGLU(*self.form)

    def options(self) -> dict[str, Any]:
        """Further arguments of `fused_moe`."""
        return {
            "router": self.router,
            "activation": self.activation,
            "expert_range": self.rank,
            "tile_rows": self.tile_rows,
        }

    def inputs(self, device: str = "cpu") -> Inputs:
        """The same numbers on every device."""
        generator = torch.Generator().manual_seed(zlib.crc32(str(self).encode()))
        first, end = self.here
        count = end - first

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        x = (normal(self.tokens, self.hidden) * self.amplitude).bfloat16()
        logits = normal(self.tokens, self.experts)
        if self.routing == "one":
            logits[:, first % self.experts] += FAR
        elif self.routing == "elsewhere":
            logits[:, first:end] -= FAR
        w13 = normal(count, 2 * self.intermediate, self.hidden) * self.hidden**-0.5
        w2 = normal(count, self.hidden, self.intermediate) * self.intermediate**-0.5
        biases = normal(count, 2 * self.intermediate), normal(count, self.hidden)
        packed = pack(
            *(w.bfloat16().to(device) for w in (w13, w2)),
            self.fmt,
            granularity=8,
            biases=tuple(bias.to(device) for bias in biases) if self.bias else None,
        )
        return Inputs(x.to(device), packed, arrange(packed), logits.to(device))


@dataclass(frozen=True)
class Inputs:
    """What `fused_moe` takes, and the experts before they were arranged."""

    x: torch.Tensor
    packed: PackedExperts
    experts: ArrangedExperts
    logits: torch.Tensor

    @property
    def tensors(self) -> dict[str, Any]:
        """Keywords of `fused_moe`."""
        return {"x": self.x, "experts": self.experts, "router_logits": self.logits}


def definition(
    case: Layer, inputs: Inputs, dtype: torch.dtype, *, aligned_sums: bool = False
) -> torch.Tensor:
    """[T, H] on the device of the inputs, in fp64, or rounded where the kernels round: sums to
    fp32, rows of both products to bf16."""
    x = inputs.x
    ids, weights = route(inputs.logits, **vars(case.router), arch=None if x.is_cuda else ARCH)
    matrices, biases = unpack(inputs.packed), unpack_biases(inputs.packed)
    alpha, beta, limit = case.form
    first, end = case.here

    def rounded(values: torch.Tensor) -> torch.Tensor:
        return values if dtype == torch.float64 else values.bfloat16().to(dtype)

    def product(values: list[torch.Tensor], which: int) -> list[torch.Tensor]:
        found = sums(values, matrices[which], dtype, aligned_sums=aligned_sums)
        bias = biases[which]
        if bias is None:
            return found
        return [own + added.to(dtype) for own, added in zip(found, bias, strict=True)]

    def activated(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return rounded(reference.swiglu(gate, up, alpha=alpha, beta=beta, limit=limit))

    y = torch.zeros(*ids.shape, case.hidden, dtype=dtype, device=x.device)
    places = [(ids == expert).nonzero(as_tuple=True) for expert in range(first, end)]
    hs = [activated(both) for both in product([x[token] for token, _ in places], 0)]
    for (token, slot), rows in zip(places, product(hs, 1), strict=True):
        y[token, slot] = rounded(rows)
    total = torch.zeros(len(x), case.hidden, dtype=dtype, device=x.device)
    for slot in range(ids.shape[1]):
        total += y[:, slot] * weights[:, slot, None].to(dtype)
    return total


def judge(
    case: Layer, result: torch.Tensor, inputs: Inputs, *, aligned_sums: bool = False
) -> Sequence[tolerance.Report]:
    """aligned_sums: as a GPU makes them."""
    exact = definition(case, inputs, torch.float64)
    rounded = definition(case, inputs, torch.float32, aligned_sums=aligned_sums)
    return (tolerance.compare_output(result, exact, rounded.to(result.dtype), result.dtype),)
