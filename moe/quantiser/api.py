"""`quantise`, and the torch operator `blackwell_kernels::moe_quantise` behind it, which tracers see
whole."""

from __future__ import annotations

from typing import Any

import torch

from kernelkit.schema import register_operator
from kernelkit.tensors import require_no_grad, require_scalars, require_types
from moe.formats import FORMATS, format_of, scale_bytes
from moe.quantiser import forward
from moe.quantized import Quantized, of_bytes

QUANTISE = (
    "(Tensor x, Tensor? global_scale, Tensor? rows, Tensor? offsets, *, str fmt, "
    "str? scale_of=None, int choices=1, str backend='auto', str? arch=None) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def quantise(
    x: torch.Tensor,
    fmt: str,
    *,
    global_scale: str | torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    choices: int = 1,
    offsets: torch.Tensor | None = None,
    backend: str = "auto",
    arch: str | None = None,
) -> Quantized:
    """x in the format `fmt`, bit for bit as `moe.reference.quantise` defines it.

    The arguments and what they are refused for are those of `moe.quantiser.forward.quantise`.
    """
    tensors = {"global_scale": global_scale, "rows": rows, "offsets": offsets}
    scale_of = tensors.pop("global_scale") if isinstance(global_scale, str) else None
    given = {"x": x} | {name: tensor for name, tensor in tensors.items() if tensor is not None}
    require_types(**given)
    require_no_grad(**given)
    require_scalars({"fmt": "str", "choices": "int"}, {"fmt": fmt, "choices": choices})
    format_of(fmt)
    data, scales, encode, decode = quantise_op(
        x, given.get("global_scale"), rows, offsets,
        fmt=fmt, scale_of=scale_of, choices=choices, backend=backend, arch=arch,
    )  # fmt: skip
    both = (encode, decode) if FORMATS[fmt].has_global else (None, None)
    return of_bytes(data, scales, *both, fmt)


def _quantise(
    x: torch.Tensor,
    global_scale: torch.Tensor | None,
    rows: torch.Tensor | None,
    offsets: torch.Tensor | None,
    *,
    scale_of: str | None = None,
    **options: Any,
) -> Results:
    """Bytes of elements and of scale factors, the global scales or nothing."""
    options |= {"rows": rows, "offsets": offsets}
    found = forward.quantise(x, global_scale=scale_of or global_scale, **options)
    data, scales = (tensor.view(torch.uint8) for tensor in (found.data, found.scales))
    if found.encode_scale is None:
        return data, scales, *(x.new_empty(0, dtype=torch.float32) for _ in range(2))
    return data, scales, found.encode_scale, found.decode_scale


def _fake_quantise(
    x: torch.Tensor,
    global_scale: torch.Tensor | None,
    rows: torch.Tensor | None,
    offsets: torch.Tensor | None,
    *,
    fmt: str,
    scale_of: str | None = None,
    **options: Any,
) -> Results:
    form, count = FORMATS[fmt], (x if rows is None else rows).shape[0]
    blocks = forward.blocks_for(count, offsets)
    data = x.new_empty((count, x.shape[1] // form.per_byte), dtype=torch.uint8)
    scales = x.new_empty(scale_bytes(blocks, form.columns(x.shape[1])), dtype=torch.uint8)
    of_rows = scale_of == "token" or (global_scale is not None and global_scale.shape[0] > 1)
    size = (count if of_rows else 1) if form.has_global else 0
    return data, scales, *(x.new_empty(size, dtype=torch.float32) for _ in range(2))


quantise_op = register_operator("moe_quantise", QUANTISE, _quantise, _fake_quantise)
