"""The torch operator `blackwell_kernels::decode`, which tracers see whole.

torch.compile and FakeTensor get shapes from the fake implementation and never look inside; a CUDA
graph captures the launch. Results are new tensors, nothing is written in place.
"""

from __future__ import annotations

from typing import Any

import torch

from gqa_lowlatency import recent
from gqa_lowlatency.arguments import Arguments
from gqa_lowlatency.forward import Results, empty_results
from kernelkit.schema import operator_schema, register_operator


def _decode(*tensors: torch.Tensor | None, **options: Any) -> Results:
    """(O, LSE) as `gqa_lowlatency.decode` describes them."""
    return recent.decode(tensors, options)


def _fake_decode(*tensors: torch.Tensor | None, **options: Any) -> Results:
    """Shapes, dtypes and strides alone: sizes may be symbols, on which no check could decide."""
    arguments = Arguments(*tensors, **options)
    arguments.check_devices()
    return empty_results(arguments)


decode = register_operator("decode", operator_schema(Arguments, 2), _decode, _fake_decode)
