"""The torch operator `blackwell_kernels::decode`, which tracers see whole.

torch.compile and FakeTensor get shapes from the fake implementation and never look inside; a CUDA
graph captures the launch. Results are new tensors, nothing is written in place.
"""

from __future__ import annotations

from typing import Any

import torch

from gqa_lowlatency.arguments import Arguments
from gqa_lowlatency.forward import Results, empty_results, forward
from kernelkit.schema import operator_schema

NAMESPACE = "blackwell_kernels"


def _decode(*tensors: torch.Tensor | None, **options: Any) -> Results:
    """(O, LSE) as `gqa_lowlatency.decode` describes them."""
    return forward(Arguments(*tensors, **options))


def _fake_decode(*tensors: torch.Tensor | None, **options: Any) -> Results:
    """Shapes, dtypes and strides alone: sizes may be symbols, on which no check could decide."""
    arguments = Arguments(*tensors, **options)
    arguments.check_devices()
    return empty_results(arguments)


def _refuse_backward(context: Any, *gradients: Any) -> None:
    raise NotImplementedError(f"{NAMESPACE}::decode has no backward; use no_grad()")


decode = torch.library.custom_op(
    f"{NAMESPACE}::decode", _decode, mutates_args=(), schema=operator_schema(Arguments, 2)
)
decode.register_fake(_fake_decode)
decode.register_autograd(_refuse_backward)
