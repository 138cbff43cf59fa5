"""`merge`: partial attention results over disjoint keys become one, in one pass on the GPU.

Split-KV decoding, attention over a prefix and a block, over a window and a compressed past, or over
the shards of a sequence all end here. It is the torch operator `blackwell_kernels::merge`, which
tracers see whole: here are its arguments and shapes, `merge_launch.py` does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernelkit.merge_launch import MERGE, NAMES, Part
from kernelkit.tensors import require_types


def merge(
    parts: Part | Sequence[Part],
    *,
    sinks: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = True,
    backend: str = "auto",
    arch: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of disjoint key sets, from the attention over each of them.

    parts: a list of parts, or a stack of them. A part is (O, LSE), normalised, or
        (O_raw, LSE, row_max) with O = O_raw / exp(LSE - row_max); a list may mix both. O is
        [B, S, H, D], bfloat16, float16 or float32, each part its own, D a multiple of 8 up to 512;
        LSE and row_max are [B, H, S] fp32 in natural log; packed sequences have O [T, H, D] and
        LSE [H, T]. The last dimension of O is contiguous and its other strides are multiples of 16
        bytes, LSE and row_max have any strides. A list holds up to 256 parts. A stack is one tuple
        of tensors with one more dimension in front, O [N, B, S, H, D], LSE [N, B, H, S], any N.
    sinks: fp32 [H], a logit per head whose value is zero. It is applied here, once: the LSE of the
        parts must not include it.
    out_dtype: of O; by default that of the first normalised part, else that of the first part.
    backend, arch: see `kernelkit.launch.choose_target`.

    Returns (O, LSE), contiguous, or O without return_lse. LSE includes the sink. With M = max of
    all LSE and the sink, O = sum w_i O_i / total where w_i = exp(LSE_i - M), for raw parts
    exp(row_max_i - M), and total = sum exp(LSE_i - M) + exp(sink - M); LSE = M + ln(total).
    A row of a part with LSE = -inf (or +inf, as some kernels mark it) has no keys, and its O may
    hold anything, NaN too. A row without keys in any part has O = 0 and LSE = -inf, or the sink.

    Raises TypeError, ValueError or NotImplementedError, naming the value and the limit, before
    anything is compiled. Forward only. torch.compile sees one operator, `blackwell_kernels::merge`;
    safe in a CUDA graph: one launch, no copy, no wait.
    """
    stacked = len(parts) > 0 and isinstance(parts[0], torch.Tensor)
    listed: list[Any] = [parts] if stacked else list(parts)
    if not listed:
        raise ValueError("0 parts: at least 1, its shape is that of the result")
    given = {} if sinks is None else {"sinks": sinks}
    o, lse, row_max = [], [], []
    for index, part in enumerate(listed):
        if len(part) not in (2, 3):
            raise ValueError(
                f"parts[{index}] has {len(part)} tensors: (O, LSE) or (O_raw, LSE, row_max)"
            )
        given |= {f"parts[{index}] {n}": t for n, t in zip(NAMES, part, strict=False)}
        o.append(part[0])
        lse.append(part[1])
        row_max.append(part[2] if len(part) == 3 else None)
    require_types(**given)
    if out_dtype is None:
        normalised = [part for part in listed if len(part) == 2]
        out_dtype = (normalised or listed)[0][0].dtype
    results = MERGE({
        "o": o, "lse": lse, "row_max": row_max, "sinks": sinks, "stacked": stacked,
        "out_dtype": out_dtype, "backend": backend, "arch": arch,
    })  # fmt: skip
    return results if return_lse else results[0]
