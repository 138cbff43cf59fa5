"""The operator `blackwell_kernels::moe_fused_mixed`: a layer with bf16 or e4m3 activations.

With few rows, `few/` computes all after the choice in one launch. Else there are five, each of
which begins while the previous one ends: top-k, permutation, both products, combination. A single
token needs four, since its router sorts its slots. With the smallest
tiles the first product gathers its rows. With other tiles, and in e4m3, one more launch first
writes the rows in the order of experts, so that TMA can load them. In e4m3 that launch rounds the
tokens, and the first product rounds its output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernelkit.call.launch import choose_target
from kernelkit.call.operator import Operator
from kernelkit.call.tensors import DTYPE_NAMES
from kernelkit.compile.arch import written_for
from moe.fused import Layer, Routed, chosen_of, combined, run_routing
from moe.mixed.config import ARCHS, MixedConfig
from moe.mixed.few import limits
from moe.mixed.few.launch import FewArguments, new_counts, run_few
from moe.mixed.fragments import PAIR_ROWS, ArrangedExperts
from moe.mixed.launch import MixedArguments, forward, write_rows


@dataclass(frozen=True, eq=False)
class MixedLayer(Layer):
    """The arguments of `moe.fused_moe` with arranged experts."""

    experts: ArrangedExperts

    def _check_own(self) -> None:
        """Raise ValueError or NotImplementedError for scales, which are not used here, and for
        dtypes other than bf16."""
        self.experts.w13.check()
        self.experts.w2.check()
        if self.x.dtype != torch.bfloat16:
            raise NotImplementedError(
                f"x is {self.x.dtype}: expected bfloat16 with arranged experts"
            )
        if self.activations not in (None, self.experts.x):
            raise NotImplementedError(
                f"activations {self.activations!r}, but the experts were arranged for "
                f"{self.experts.x!r}: pass that, or None"
            )
        if any(value is not None for value in vars(self.scales).values()):
            raise ValueError("scales with arranged experts: activations are not quantised")
        if self.experts.x == "e4m3":
            target = choose_target(self.x.device, self.backend, self.arch, ARCHS)
            MixedConfig(x="e4m3").check_values(written_for(target.arch))
        if self.few_rows:
            if self.tile_rows is not None:
                raise ValueError(f"few_rows True with tile_rows {self.tile_rows}: give one of both")
            limits.require(*self._sizes)

    @property
    def _sizes(self) -> tuple[int, int, int, str]:
        """What decides on one launch: tokens, slots, experts here, dtype of activations."""
        w13 = self.experts.w13
        return len(self.x), self.router.slots, w13.experts, w13.x

    @property
    def in_one_launch(self) -> bool:
        """Whether one launch computes all after the choice."""
        if self.few_rows is not None or self.tile_rows is not None:
            return bool(self.few_rows)
        return limits.pays(*self._sizes, self.total)


def run_layer(layer: MixedLayer) -> tuple[torch.Tensor]:
    """Compute the layer: [T, H] in the dtype of x."""
    layer.check()
    if layer.in_one_launch:
        return run_few_rows(layer)
    return run_experts(layer, run_routing(layer))


def run_few_rows(layer: MixedLayer) -> tuple[torch.Tensor]:
    """Compute the layer in two launches: the choice, and all after it."""
    counts = new_counts(layer.x, layer.experts)
    ids, weights = chosen_of(layer, cleared=counts)
    first = layer.first_expert if layer.is_partial else 0
    given = FewArguments(
        layer.x, layer.experts, ids, weights, counts, layer.activation, layer.total, first,
        layer.has_gaps, **layer.where,
    )  # fmt: skip
    return (run_few(given),)


def run_experts(layer: MixedLayer, routed: Routed) -> tuple[torch.Tensor]:
    """Compute the steps after routing: [T, H] in the dtype of x."""
    x, experts, where, offsets = layer.x, layer.experts, layer.where, routed.offsets
    given = {**layer.tiles, **where}
    form = layer.activation.of_rows(PAIR_ROWS)
    rows = {"rows": routed.slot_of_row.narrow(0, 0, layer.rows), "slots": layer.router.slots}
    first = MixedArguments(x, experts.w13, offsets, experts.bias13, form, **rows, **given)
    second = {"bias": experts.bias2, "out": DTYPE_NAMES[x.dtype], **given}
    if not first.gathers:
        of_tokens = routed.row_of_slot.view(routed.weights.shape)
        by_expert = {"row_of_slot": of_tokens, "rows": layer.rows}
        written, scale = write_rows(x, experts.x, **by_expert, **where)
        first = replace(first, x=written, x_scale=scale, rows=None, slots=1)
    if experts.x == "e4m3":
        first = replace(first, out="e4m3", out_scale=experts.h_scale)
        second["x_scale"] = experts.h_decode_scale
    (h,) = forward(first)
    (y,) = forward(MixedArguments(h, experts.w2, offsets, **second))
    return combined(layer, routed, y)


FUSED_MIXED = Operator(
    "moe_fused_mixed",
    MixedLayer,
    run_layer,
    lambda layer: (layer.x.new_empty(layer.x.shape),),
    results=1,
)
