"""`Q8Linear`: a linear layer whose weights stay in Q8_0, as a module of torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from kernelkit.call.launch import NoTarget, choose_target
from kernelkit.call.tensors import DTYPE_NAMES, require_strided, require_type, require_types
from q8_0.activations import Activations
from q8_0.api import matvec, quantise
from q8_0.blocks import SOA
from q8_0.choose import many_tokens
from q8_0.config import INTEGERS, MOST_TOKENS, NUMBERS
from q8_0.files import GgufFile
from q8_0.numbers.launch import product_of_numbers
from q8_0.product.launch import ARCHS, product
from q8_0.weights import Weights, empty

ACTIVATIONS = (NUMBERS, INTEGERS)


class Q8Linear(nn.Module):
    """y = x W^T + bias, W [out_features, in_features] in Q8_0, of either layout.

    Up to 16 tokens share one read of the weights (`q8_0.matvec`): x is multiplied as it is, in
    fp32, or with activations='q8_1' rounded to int8 first. More tokens in fp16 or bf16 are
    multiplied as they are on Hopper (`q8_0.numbers`). On other GPUs, in fp32, and with
    activations='q8_1' they are rounded to int8 first (`q8_0.product`). The result has the dtype of
    x, and the bias that dtype, too. A change of dtype of the module leaves the weights as they are.
    """

    data: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self, weights: Weights, bias: torch.Tensor | None = None, *, activations: str = NUMBERS
    ) -> None:
        """Shares memory with `weights`; bias: [out_features]."""
        require_type("weights", weights, Weights)
        require_type("activations", activations, str)
        if activations not in ACTIVATIONS:
            raise ValueError(f"activations {activations!r}: one of {ACTIVATIONS}")
        if bias is not None:
            require_types(bias=bias)
            require_strided(bias=bias)
            if bias.dtype not in DTYPE_NAMES:
                raise ValueError(f"bias is {bias.dtype}: one of {tuple(DTYPE_NAMES)}")
            if tuple(bias.shape) != (weights.rows,):
                raise ValueError(f"bias has shape {tuple(bias.shape)}, expected ({weights.rows},)")
        super().__init__()
        self.in_features, self.out_features = weights.cols, weights.rows
        self.layout, self.activations = weights.layout, activations
        self.register_buffer("data", weights.data)
        self.register_buffer("bias", bias)

    @classmethod
    def empty(
        cls,
        in_features: int,
        out_features: int,
        *,
        layout: str = SOA,
        bias: torch.dtype | None = None,
        device: torch.device | str | None = None,
        activations: str = NUMBERS,
    ) -> Q8Linear:
        """Without contents, for `load_state_dict`. bias: its dtype, None for none."""
        made = None if bias is None else torch.empty(out_features, dtype=bias, device=device)
        return cls(empty(out_features, in_features, layout, device), made, activations=activations)

    @classmethod
    def from_gguf(
        cls,
        file: GgufFile,
        name: str,
        bias: str | None = None,
        *,
        layout: str = SOA,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
        **options: Any,
    ) -> Q8Linear:
        """Make a layer of tensors of a file: weights, repacked where `layout` asks for it, and a
        bias in `dtype`. options: of `__init__`."""
        weights = file.weights(name, layout=layout, device=device)
        found = None if bias is None else file.numbers(bias, device=device).to(dtype)
        return cls(weights, found, **options)

    @property
    def weights(self) -> Weights:
        """Return a handle for the functions of `q8_0`; it shares memory with the buffer."""
        return Weights(self.data, self.out_features, self.in_features, self.layout)

    def forward(
        self, x: torch.Tensor, *, backend: str = "auto", arch: str | None = None
    ) -> torch.Tensor:
        """x: [..., in_features], bfloat16, float16 or float32; the result [..., out_features]."""
        require_types(x=x)
        if not torch.compiler.is_compiling():
            require_strided(x=x)
        if not x.ndim or x.shape[-1] != self.in_features:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected (..., {self.in_features})")
        rows = x.reshape(math.prod(x.shape[:-1]), self.in_features)
        place: dict[str, Any] = {"backend": backend, "arch": arch}
        if rows.shape[0] <= MOST_TOKENS:
            given: torch.Tensor | Activations = rows
            if self.activations == INTEGERS:
                given = quantise(rows, **place)
            y = matvec(self.weights, given, self.bias, out_dtype=x.dtype, **place)
        elif arithmetic(self.activations, x.dtype, x.device, backend, arch) == NUMBERS:
            y = product_of_numbers(self.weights, rows, self.bias, **place)
        else:
            y = product(
                self.weights, quantise(rows, **place), self.bias, out_dtype=x.dtype, **place
            )
        return y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Sizes, layout and activations."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        kinds = f"layout={self.layout!r}, activations={self.activations!r}"
        return f"{sizes}, {kinds}, bias={self.bias is not None}"


def arithmetic(
    activations: str, dtype: torch.dtype, device: torch.device, backend: str, arch: str | None
) -> str:
    """Return how more than MOST_TOKENS tokens in `dtype` are multiplied on `device`: NUMBERS or
    INTEGERS. Tracers take the result as constant."""
    if activations == INTEGERS or dtype not in DTYPE_NAMES:
        return INTEGERS
    try:
        target = choose_target(device, backend, arch, ARCHS)
    except NoTarget:  # shapes are asked for, not numbers
        return INTEGERS
    return many_tokens(activations, DTYPE_NAMES[dtype], target.arch)


# The mark of `torch.compiler.assume_constant_result`, which would import torch's compiler here.
arithmetic._dynamo_marked_constant = True  # type: ignore[attr-defined]
