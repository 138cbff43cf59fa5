"""The torch operator `blackwell_kernels::attention`, which tracers see whole.

torch.compile and FakeTensor get shapes from the fake implementation and never look inside; a CUDA
graph captures the launch. Results are new tensors, nothing is written in place.
"""

from __future__ import annotations

from typing import Any

import torch

from fmha.arguments import Arguments
from fmha.forward import Results, empty_results, forward
from kernelkit.schema import operator_schema, register_operator


def _attention(*tensors: torch.Tensor | None, **options: Any) -> Results:
    """(O, LSE, row_max) as `fmha.attention` describes them; row_max is empty for normalised O."""
    return forward(Arguments(*tensors, **options))


def _fake_attention(*tensors: torch.Tensor | None, **options: Any) -> Results:
    """Shapes, dtypes and strides alone: sizes may be symbols, on which no check could decide."""
    arguments = Arguments(*tensors, **options)
    arguments.check_devices()
    return empty_results(arguments)


attention = register_operator(
    "attention", operator_schema(Arguments, 3), _attention, _fake_attention
)
