"""`experts_forward`: the experts of a layer of a transformers model by our kernels.

The router stays the model's own; its choices and weights arrive with the tokens. Weights are in
four bits, packed once (`packing.py`), and multiplied by activations in bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moe import ArrangedExperts, Fragments, SwiGLU, combine, mixed_gemm, permutation

PACKED = "blackwell_experts"  # the submodule of a layer's experts


class Experts(nn.Module):
    """The packed weights of a layer in buffers, which move and are saved with the model."""

    bias13: torch.Tensor | None
    bias2: torch.Tensor | None

    def __init__(self, experts: ArrangedExperts, form: SwiGLU) -> None:
        super().__init__()
        self.form, self.count = form, experts.experts
        for name in ("w13", "w2"):
            weight: Fragments = getattr(experts, name)
            self.register_buffer(f"{name}_data", weight.data)
            self.register_buffer(f"{name}_factor", weight.factor)
        for name in ("bias13", "bias2"):
            self.register_buffer(name, getattr(experts, name))
        self._rows = experts.w13.rows, experts.w2.rows
        self._k, self._fmt = (experts.hidden, experts.intermediate), experts.w13.fmt

    def weight(self, product: int) -> Fragments:
        """Return the weights of the first product, 0, or of the second, 1."""
        name = ("w13", "w2")[product]
        data, factor = getattr(self, f"{name}_data"), getattr(self, f"{name}_factor")
        sizes = self._rows[product], self._k[product]
        return Fragments(data, factor, *sizes, self._fmt, swiglu=not product)

    def _apply(self, fn: Any, recurse: bool = True) -> Experts:
        """Move tensors with the model but keep their dtypes: biases and factors stay fp32."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            other = fn(tensor)
            return other if other.dtype == tensor.dtype else tensor.to(other.device)

        return super()._apply(moved, recurse)

    def extra_repr(self) -> str:
        """Sizes and format."""
        return f"E={self.count}, H={self._k[0]}, I={self._k[1]}, {self._fmt}, {self.form}"


def experts_forward(
    module: nn.Module, hidden: torch.Tensor, choices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Implement the experts interface of transformers.

    Args:
        module: the experts of a layer, packed.
        hidden: bfloat16 [T, H].
        choices: [T, k], experts of each token.
        weights: [T, k].

    Returns:
        [T, H].

    Raises:
        ValueError: the experts are not packed.
        TypeError, ValueError, NotImplementedError: a kernel does not support the arguments.
    """
    experts = module._modules.get(PACKED)
    if not isinstance(experts, Experts):
        raise ValueError(
            f"{type(module).__name__} is not packed: call "
            "blackwell_engines.transformers.pack_experts(model)"
        )
    tokens, slots = choices.shape
    order = permutation(choices.int(), experts.count)
    h = mixed_gemm(
        hidden, experts.weight(0), order.offsets, bias=experts.bias13, activation=experts.form,
        rows=order.slot_of_row, slots=slots, most_rows=tokens,
    )  # fmt: skip
    y = mixed_gemm(h, experts.weight(1), order.offsets, bias=experts.bias2, most_rows=tokens)
    return combine(y, weights.float(), order.row_of_slot, out_dtype=hidden.dtype)
