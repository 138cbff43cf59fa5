"""`merge`: partial attention results over disjoint keys become one, in one pass on the GPU.

Split-KV decoding, attention over a prefix and a block, over a window and a compressed past, or over
the shards of a sequence all end here. It is the torch operator `blackwell_kernels::merge`, which
tracers see whole: here are its arguments and shapes, `launch.py` does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, overload

import torch

from kernelkit.attention import WithLse
from kernelkit.call.front import defaults_of, given_options, spelled
from kernelkit.call.tensors import require_type, require_types
from kernelkit.merge.launch import MERGE, NAMES, Part

if TYPE_CHECKING:
    from typing_extensions import Unpack


class MergeOptions(TypedDict, total=False):
    """Options of `merge` that its overloads have in common."""

    sinks: Annotated[torch.Tensor | None, None]
    out_dtype: Annotated[torch.dtype | None, None]
    backend: Annotated[str, "auto"]
    arch: Annotated[str | None, None]


@overload
def merge(
    parts: Part | Sequence[Part], *,
    return_lse: Literal[True] = True, **options: Unpack[MergeOptions],
) -> WithLse: ...  # fmt: skip


@overload
def merge(
    parts: Part | Sequence[Part], *, return_lse: Literal[False], **options: Unpack[MergeOptions]
) -> torch.Tensor: ...


@overload
def merge(
    parts: Part | Sequence[Part], *, return_lse: bool = True, **options: Unpack[MergeOptions]
) -> torch.Tensor | WithLse: ...


@spelled(MergeOptions)
def merge(
    parts: Part | Sequence[Part], *, return_lse: bool = True, **options: Unpack[MergeOptions]
) -> torch.Tensor | WithLse:
    """Attention over the union of disjoint key sets, from the attention over each of them.

    Let M = max of all LSE and the sink, and total = sum exp(LSE_i - M) + exp(sink - M).
    Then O = sum w_i O_i / total, and LSE = M + ln(total).
    The weight w_i is exp(LSE_i - M), or exp(row_max_i - M) for raw parts.

    Args:
        parts: a list of up to 256 parts, or a stack of them. A part is (O, LSE), normalised, or
            (O_raw, LSE, row_max) with O = O_raw / exp(LSE - row_max); a list may mix both. O is
            [B, S, H, D], bfloat16, float16 or float32, each part its own, D a multiple of 8 up to
            512; LSE and row_max are [B, H, S] fp32 in natural log; packed sequences have O
            [T, H, D] and LSE [H, T]. The last dimension of O is contiguous and its other strides
            are multiples of 16 bytes, LSE and row_max have any strides. A stack is one tuple of
            tensors with one more dimension in front, O [N, B, S, H, D], LSE [N, B, H, S], any N.
            A row with LSE = -inf (or +inf, as some kernels mark it) has no keys, and its O may
            hold anything, NaN too. A raw part has its sum of weights only as exp(LSE - row_max),
            which fp32 rounds by up to |LSE| 2^-23: give normalised parts where scores are huge.
        sinks: fp32 [H], a logit per head whose value is zero. It is applied here, once: the LSE of
            the parts must not include it.
        out_dtype: of O; by default that of the first normalised part, else that of the first part.
        return_lse: whether the LSE is returned, too.
        backend, arch: see `kernelkit.call.launch.choose_target`.

    Returns:
        (O, LSE), contiguous, or O without return_lse. LSE includes the sink. A row without keys in
        any part has O = 0 and LSE = -inf, or the sink.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the value and the limit, before anything
            is compiled.

    Forward only. torch.compile sees one operator, `blackwell_kernels::merge`; safe in a CUDA graph:
    one launch, no copy, no wait.
    """
    require_type("return_lse", return_lse, bool)
    given = given_options(merge, options, _DEFAULTS)
    o, lse, row_max = _columns(parts)
    if "out_dtype" not in given:
        normalised = [each for each, raw in zip(o, row_max, strict=True) if raw is None]
        given["out_dtype"] = (normalised or o)[0].dtype
    stacked = _is_stack(parts)
    results = MERGE({"o": o, "lse": lse, "row_max": row_max, "stacked": stacked, **given})
    return results if return_lse else results[0]


_DEFAULTS = defaults_of(merge)


def _is_stack(parts: Part | Sequence[Part]) -> bool:
    return len(parts) > 0 and isinstance(parts[0], torch.Tensor)


def _columns(parts: Part | Sequence[Part]) -> tuple[list[Any], ...]:
    """(O, LSE, row_max or None) of every part, a list of each."""
    if not isinstance(parts, tuple | list):
        raise TypeError(f"parts is {type(parts).__name__}, expected a list of tuples of tensors")
    listed: list[Any] = [parts] if _is_stack(parts) else list(parts)
    if not listed:
        raise ValueError("0 parts: at least 1, which determines the shape of the result")
    for index, part in enumerate(listed):
        if not isinstance(part, tuple | list):
            raise TypeError(f"parts[{index}] is {type(part).__name__}, expected a tuple of tensors")
        if len(part) not in (2, 3):
            raise ValueError(
                f"parts[{index}] has {len(part)} tensors, not (O, LSE) or (O_raw, LSE, row_max)"
            )
        for name, tensor in zip(NAMES, part, strict=False):
            if not isinstance(tensor, torch.Tensor):  # names are made for an error alone
                require_types(**{f"parts[{index}] {name}": tensor})
    return tuple(map(list, zip(*((*part, None)[:3] for part in listed), strict=True)))
