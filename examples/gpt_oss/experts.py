"""The experts of a layer: by `moe`, weights in MXFP4, or in bf16 for comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import grouped_mm

from moe import (
    ArrangedExperts,
    PackedExperts,
    RouterLinear,
    SwiGLU,
    arrange,
    combine,
    fused_moe,
    pack,
    permutation,
    route_tokens,
    unpack,
    unpack_biases,
)
from moe.models import ModelLayer


class Experts(Protocol):
    """Experts of a layer, as the layer calls them."""

    def __call__(self, x: torch.Tensor, router: RouterLinear) -> torch.Tensor:
        """x [T, H] and the linear layer of the router to [T, H]."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""


@dataclass(frozen=True, eq=False)
class PlainExperts:
    """Weights as transformers has them: gate_up [E, H, 2 I], gate and up by turns, with
    gate_up_bias [E, 2 I]; down [E, I, H] with down_bias [E, H]. In bf16, of tests also in fp32."""

    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor
    down: torch.Tensor
    down_bias: torch.Tensor

    def part(self, own: tuple[int, int]) -> PlainExperts:
        """Experts [first, end)."""
        return PlainExperts(*(tensor[slice(*own)] for tensor in vars(self).values()))

    @property
    def nbytes(self) -> int:
        """Bytes of all four tensors."""
        return sum(tensor.nbytes for tensor in vars(self).values())


def packed_of(plain: PlainExperts) -> PackedExperts:
    """Round the weights to the nearest MXFP4 values."""
    biases = plain.gate_up_bias, plain.down_bias
    return pack(plain.gate_up.mT, plain.down.mT, "mxfp4", order="alternating", biases=biases)


def plain_of(packed: PackedExperts, dtype: torch.dtype) -> PlainExperts:
    """Dequantise MXFP4 weights exactly."""
    (w13, w2), (bias13, bias2) = unpack(packed, dtype), unpack_biases(packed)
    assert bias13 is not None
    assert bias2 is not None
    return PlainExperts(
        _by_turns(w13).mT.contiguous(),
        _by_turns(bias13).to(dtype),
        w2.mT.contiguous(),
        bias2.to(dtype),
    )


def _by_turns(rows: torch.Tensor) -> torch.Tensor:
    """Interleave the rows of [E, 2 I, ...], which has all gate rows first."""
    return torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2)


class Mxfp4Experts:
    """Activations in bf16 by weights in MXFP4: router, permutation, products and sum by `moe`. own:
    (first, end) of the experts that are here, whose sum it then is."""

    def __init__(
        self, packed: PackedExperts, form: ModelLayer, own: tuple[int, int] | None = None
    ) -> None:
        self.arranged: ArrangedExperts = arrange(packed)
        self.form, self.own = form, own

    def __call__(self, x: torch.Tensor, router: RouterLinear) -> torch.Tensor:
        """See `Experts`; x in bf16."""
        form = self.form
        given = x, self.arranged, router, form.router
        return fused_moe(*given, activation=form.activation, expert_range=self.own)

    @property
    def nbytes(self) -> int:
        """Bytes of elements, scale factors and biases."""
        return self.arranged.nbytes


class Bf16Experts:
    """Weights in 16 bits: router, permutation and sum by `moe`, products by torch.

    `moe` has no products with 16-bit weights.
    """

    def __init__(self, plain: PlainExperts, form: ModelLayer) -> None:
        self.plain, self.form = plain, form

    def __call__(self, x: torch.Tensor, router: RouterLinear) -> torch.Tensor:
        """See `Experts`."""
        plain, top_k = self.plain, self.form.router.top_k
        ids, weights = route_tokens(x, router, self.form.router)
        order = permutation(ids, self.form.experts)
        slots, ends = order.slot_of_row, order.offsets[1:]
        expert = ids.flatten()[slots]
        rows = x[slots // top_k]
        gate_up = grouped_mm(rows, plain.gate_up, offs=ends) + plain.gate_up_bias[expert]
        hidden = activated(gate_up, self.form.activation)
        y = grouped_mm(hidden, plain.down, offs=ends) + plain.down_bias[expert]
        return combine(y, weights, order.row_of_slot)

    @property
    def nbytes(self) -> int:
        """Bytes of weights and biases."""
        return self.plain.nbytes


def activated(gate_up: torch.Tensor, form: SwiGLU) -> torch.Tensor:
    """Return gpt-oss's SwiGLU of columns that alternate between gate and up."""
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    if form.limit is not None:
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    return (up + form.beta) * gate * torch.sigmoid(form.alpha * gate)
