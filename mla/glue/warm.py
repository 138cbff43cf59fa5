"""`warmup_rows`: compile the kernel of a layer's `norm_rope_append` before the first step."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from kernelkit.call.launch import choose_target
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.warm import Progress, Warmed, warm
from mla.glue.api import fields, norm_rope_append
from mla.glue.launch import ARCHS, KERNEL, NORM_ROPE_APPEND, check_arch, config_of


def warmup_rows(
    positions: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    *,
    progress: Progress | bool | None = None,
    **options: Any,
) -> Warmed:
    """Find or compile the kernel of `norm_rope_append` for parts like these, whatever the number of
    tokens: dtypes, records and which parts there are matter; contents and sizes do not.

    Args:
        positions, rope: as for `norm_rope_append`. Tensors may be on the device 'meta' if `arch` is
            given.
        progress: see `kernelkit.compile.warm.warm`.
        options: those of `norm_rope_append`.

    Returns:
        The key of the kernel, and the seconds that it took.

    Raises:
        TypeError, ValueError, NotImplementedError: what `norm_rope_append` raises.
    """
    bound = inspect.signature(norm_rope_append).bind(positions, rope, **options)
    given = NORM_ROPE_APPEND.arguments(fields(**bound.arguments))
    given.check()
    target = choose_target(positions.device, given.backend, given.arch, ARCHS)
    check_arch(given, target)
    return warm([KernelKey(KERNEL, config_of(given), target.arch)], progress)
