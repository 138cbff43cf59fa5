"""The torch operator `blackwell_kernels::attention`, which tracers see whole.

torch.compile and FakeTensor get shapes from the fake implementation and never look inside; a CUDA
graph captures the launch. Results are new tensors, nothing is written in place.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fmha.arguments import Arguments
from fmha.forward import Results, empty_results, forward

NAMESPACE = "blackwell_kernels"
SCHEMA_TYPES = {
    "torch.Tensor": "Tensor",
    "torch.Tensor | None": "Tensor?",
    "bool": "bool",
    "bool | None": "bool?",
    "int": "SymInt",
    "int | None": "SymInt?",
    "float": "float",
    "float | None": "float?",
    "str": "str",
    "str | None": "str?",
    "torch.dtype | None": "ScalarType?",
}


def _schema() -> str:
    """(q, k, v, ..., *, ...) -> (O, LSE, row_max): the fields of Arguments with their defaults."""
    parts, only_names = [], False
    for field in dataclasses.fields(Arguments):
        if not (only_names or field.type.startswith("torch.Tensor")):  # tensors have positions
            parts, only_names = [*parts, "*"], True
        part = f"{SCHEMA_TYPES[field.type]} {field.name}"
        if field.default is not dataclasses.MISSING:
            default = f'"{field.default}"' if isinstance(field.default, str) else field.default
            part += f"={default}"
        parts.append(part)
    return f"({', '.join(parts)}) -> (Tensor, Tensor, Tensor)"


def _attention(*tensors: torch.Tensor | None, **options: Any) -> Results:
    """(O, LSE, row_max) as `fmha.attention` describes them; row_max is empty for normalised O."""
    return forward(Arguments(*tensors, **options))


def _fake_attention(*tensors: torch.Tensor | None, **options: Any) -> Results:
    """Shapes, dtypes and strides alone: sizes may be symbols, on which no check could decide."""
    arguments = Arguments(*tensors, **options)
    arguments.check_devices()
    return empty_results(arguments)


def _refuse_backward(context: Any, *gradients: Any) -> None:
    raise NotImplementedError(f"{NAMESPACE}::attention has no backward; use no_grad()")


attention = torch.library.custom_op(
    f"{NAMESPACE}::attention", _attention, mutates_args=(), schema=_schema()
)
attention.register_fake(_fake_attention)
attention.register_autograd(_refuse_backward)
