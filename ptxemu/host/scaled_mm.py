"""torch's matrix products with block scales, for scripts that compare their kernel with them.

torch has them on CUDA only. Scale factors have the 128x4 layout of cuBLAS, torch's 32_4_4: the one
of row m and block k is at (m / 128, k / 4, m % 32, m % 128 / 32, k % 4). Those of the groups of a
grouped product are concatenated, each padded separately.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCKS = {2: 16, 3: 32}  # torch.nn.functional.ScalingType of blocks along K -> elements of one
_TENSOR_WISE, _SWIZZLED = 0, 1  # its one scale for all; SwizzleType.SWIZZLE_32_4_4


def substitute(function: Any) -> Callable[..., Any] | None:
    """Return the substitute for a torch function; it returns NotImplemented to defer to torch."""
    import torch

    name = getattr(function, "__name__", "")
    instead = _SUBSTITUTES.get(name)
    return instead if instead and function is getattr(torch, name) else None


def scaled_mm(a: Any, b: Any, scale_a: Any, scale_b: Any, *more: Any, **options: Any) -> Any:
    """torch._scaled_mm: A [M, K] times B [K, N]."""
    import torch

    block = {torch.float8_e8m0fnu: 32, torch.float8_e4m3fn: 16}.get(scale_a.dtype)
    options |= dict(zip(("bias", "scale_result", "out_dtype"), more, strict=False))
    if block is None or options.get("scale_result") is not None:
        return NotImplemented
    result = block_scaled(a, b.t(), scale_a, scale_b, block)
    if options.get("bias") is not None:
        result = result + options["bias"].float()
    return result.to(options.get("out_dtype") or torch.bfloat16)


def block_scaled(a: Any, b: Any, scale_a: Any, scale_b: Any, block: int) -> Any:
    """float32 [M, N]: A [M, K] times B [N, K], whose blocks along K have a scale factor each."""
    return _product(_values(a), _values(b), _Factors(scale_a, block), _Factors(scale_b, block))


def scaled_grouped_mm(a: Any, b: Any, *more: Any, **named: Any) -> Any:
    """torch._scaled_grouped_mm_v2 as torch.nn.functional calls it: A [M, K] times B [G, K, N],
    groups of rows; or times B [K, N], groups along K with a result each."""
    import torch

    if named or len(more) < 9:
        return NotImplemented
    (scale_a, *how_a), (scale_b, *how_b), (ends, bias, out_dtype) = more[:3], more[3:6], more[6:9]
    (kind, *others), swizzles = how_a
    understood = kind in _BLOCKS and set(others) <= {_TENSOR_WISE} and swizzles[:1] == [_SWIZZLED]
    if not understood or how_a != how_b or bias is not None:
        return NotImplemented
    block = _BLOCKS[kind]
    of_rows = b.dim() == 3
    a, b = _values(a), _values(b.transpose(-1, -2))
    factors_a, factors_b = _Factors(scale_a[0], block), _Factors(scale_b[0], block)
    results, start = [], 0
    for group, end in enumerate(ends.tolist()):
        own_a = a[start:end] if of_rows else a[:, start:end]
        own_b = b[group] if of_rows else b[:, start:end]
        result = _product(own_a, own_b, factors_a, factors_b)
        for tensor in (*scale_a[1:], *scale_b[1:]):
            result = result * tensor.flatten()[group]
        results.append(result)
        start = end
    if of_rows:  # none is for the rows behind the last group
        total = torch.cat([*results, torch.zeros(len(a) - start, b.shape[1])])
    else:
        total = torch.stack(results)
    return total.to(out_dtype or torch.bfloat16)


class _Factors:
    """Scale factors in memory order, group by group."""

    def __init__(self, stored: Any, block: int) -> None:
        self.flat = stored.float().flatten()
        self.block = block
        self.used = 0

    def times(self, values: Any) -> Any:
        """float32 [rows, K], the next group, each block times its factor."""
        rows, k = values.shape
        shape = -(-rows // 128), -(-k // (4 * self.block)), 32, 4, 4
        first, self.used = self.used, self.used + math.prod(shape)
        tiles = self.flat[first : self.used].view(shape).permute(0, 3, 2, 1, 4)
        factors = tiles.reshape(128 * shape[0], 4 * shape[1])[:rows]
        return values * factors.repeat_interleave(self.block, 1)[:, :k]


def _product(a: Any, b: Any, factors_a: _Factors, factors_b: _Factors) -> Any:
    """float32 [M, N] of the values of A [M, K] and B [N, K]."""
    return factors_a.times(a) @ factors_b.times(b).t()


def _values(operand: Any) -> Any:
    """float32, K last."""
    import torch

    if operand.dtype != torch.float4_e2m1fn_x2:
        return operand.float()
    codes = operand.view(torch.uint8)
    codes = torch.stack([codes & 0xF, codes >> 4], -1).flatten(-2).long()
    return torch.tensor([*_E2M1, *(-value for value in _E2M1)])[codes]


_SUBSTITUTES = {"_scaled_mm": scaled_mm, "_scaled_grouped_mm_v2": scaled_grouped_mm}
