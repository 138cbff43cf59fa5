"""Attention by its definition in place of the kernels, with every check of their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fmha.reference
import gqa_lowlatency.reference
from fmha.api import fields_of as fields_of_attention
from fmha.launch import ATTENTION
from gqa_lowlatency.api import fields_of as fields_of_decode
from gqa_lowlatency.launch import DECODE

pytest.importorskip("transformers", reason="transformers is not installed")


def _defined(definition: Callable, operator: Any, fields_of: Callable, calls: list) -> Callable:
    """Replace a public function by its definition in fp64, which checks the arguments and records
    the call.
    """

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        fields = fields_of(*(tensor.bfloat16() for tensor in (q, k, v)), dict(options))
        operator.arguments(fields).check()
        options = {name: value for name, value in options.items() if value is not None}
        calls.append((operator.name, options.pop("max_seqlen_q", q.shape[-3])))
        return definition(q, k, v, **options).o.to(q.dtype)

    return call


@pytest.fixture
def by_definition(monkeypatch: pytest.MonkeyPatch) -> list:
    """Replace attention by its definition: models in float32 are then exact to six digits. Returns
    the calls: (name, queries of an entry).
    """
    from blackwell_engines.transformers import attention, register

    register()
    calls: list = []
    sides = (
        ("attention", fmha.reference, ATTENTION, fields_of_attention),
        ("decode", gqa_lowlatency.reference, DECODE, fields_of_decode),
    )
    for name, reference, operator, fields_of in sides:
        made = _defined(reference.definition, operator, fields_of, calls)
        monkeypatch.setattr(attention, name, made)
    return calls
