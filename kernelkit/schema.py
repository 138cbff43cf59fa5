"""Torch operators: their registration, and the schema of one whose arguments are the fields of a
dataclass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

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


def operator_schema(arguments: type, results: int) -> str:
    """'(Tensor q, ..., *, bool causal=False, ...) -> (Tensor, ...)': the fields of the dataclass
    `arguments` with their defaults, tensors by position and the others by name."""
    parts, only_names = [], False
    for field in dataclasses.fields(arguments):
        if not (only_names or field.type.startswith("torch.Tensor")):
            parts, only_names = [*parts, "*"], True
        part = f"{SCHEMA_TYPES[field.type]} {field.name}"
        if field.default is not dataclasses.MISSING:
            default = f'"{field.default}"' if isinstance(field.default, str) else field.default
            part += f"={default}"
        parts.append(part)
    return f"({', '.join(parts)}) -> ({', '.join(['Tensor'] * results)})"


def register_operator(name: str, schema: str, run: Callable, fake: Callable) -> Any:
    """The operator `blackwell_kernels::name`, which returns new tensors and has no backward.

    fake: makes the results that `run` would return, for tracers: sizes may be symbols.
    """
    qualified = f"{NAMESPACE}::{name}"

    def refuse_backward(context: Any, *gradients: Any) -> None:
        raise NotImplementedError(f"{qualified} has no backward; use no_grad()")

    operator = register_mutating_operator(name, schema, run, fake)
    torch.library.register_autograd(qualified, refuse_backward)
    return operator


def _writes(*arguments: Any, **options: Any) -> None:
    """What tracers see of an operator that returns nothing."""


def register_mutating_operator(
    name: str, schema: str, run: Callable, fake: Callable = _writes
) -> Any:
    """As `register_operator`, for an operator that writes to one of its arguments: torch takes no
    backward for one, not even one that refuses.
    """
    qualified = f"{NAMESPACE}::{name}"
    # What `custom_op` does, without the layers that it puts around each call.
    torch.library.define(qualified, schema)
    torch.library.impl(qualified, "default", run)
    torch.library.register_fake(qualified, fake)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
