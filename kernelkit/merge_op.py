"""`merge` as the torch operator `blackwell_kernels::merge`, which tracers see whole.

`kernelkit.merge` does the work; here are the schema, which has no list of tuples, and the fake
implementation, from which torch.compile and FakeTensor get shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernelkit import merge as eager
from kernelkit.tensors import require_no_grad, require_types

Tensors = Sequence[torch.Tensor]

SCHEMA = (
    "(Tensor[] o, Tensor[] lse, Tensor?[] row_max, Tensor? sinks, *, bool stacked, "
    "ScalarType out_dtype, str backend='auto', str? arch=None) -> (Tensor, Tensor)"
)


def merge(
    parts: eager.Part | Sequence[eager.Part],
    *,
    sinks: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = True,
    backend: str = "auto",
    arch: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """See `kernelkit.merge.merge`: the same, for torch.compile too."""
    stacked = len(parts) > 0 and isinstance(parts[0], torch.Tensor)
    listed = [parts] if stacked else list(parts)
    if not listed:
        raise ValueError("0 parts: at least 1, its shape is that of the result")
    o, lse, row_max = [], [], []
    for index, part in enumerate(listed):
        if len(part) not in (2, 3):
            raise ValueError(
                f"parts[{index}] has {len(part)} tensors: (O, LSE) or (O_raw, LSE, row_max)"
            )
        named = {f"parts[{index}] {n}": t for n, t in zip(eager.NAMES, part, strict=False)}
        require_types(**named)
        require_no_grad(**named)
        o.append(part[0])
        lse.append(part[1])
        row_max.append(part[2] if len(part) == 3 else None)
    if out_dtype is None:
        normalised = [part for part in listed if len(part) == 2]
        out_dtype = (normalised or listed)[0][0].dtype
    results = merge_op(
        o, lse, row_max, sinks, stacked=stacked, out_dtype=out_dtype, backend=backend, arch=arch
    )
    return results if return_lse else results[0]


def _merge(
    o: Tensors,
    lse: Tensors,
    row_max: Sequence[torch.Tensor | None],
    sinks: torch.Tensor | None,
    *,
    stacked: bool,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [part[:2] if part[2] is None else part for part in zip(o, lse, row_max, strict=True)]
    return eager.merge(parts[0] if stacked else parts, sinks=sinks, **options)


def _fake_merge(
    o: Tensors,
    lse: Tensors,
    row_max: Sequence[torch.Tensor | None],
    sinks: torch.Tensor | None,
    *,
    stacked: bool,
    out_dtype: torch.dtype,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    front = 1 if stacked else 0
    return (
        o[0].new_empty(o[0].shape[front:], dtype=out_dtype),
        lse[0].new_empty(lse[0].shape[front:], dtype=torch.float32),
    )


def _refuse_backward(context: Any, *gradients: Any) -> None:
    raise NotImplementedError("blackwell_kernels::merge has no backward; use no_grad()")


merge_op = torch.library.custom_op(
    "blackwell_kernels::merge", _merge, mutates_args=(), schema=SCHEMA
)
merge_op.register_fake(_fake_merge)
merge_op.register_autograd(_refuse_backward)
