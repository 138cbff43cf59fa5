"""`warmup_prepare`: compile the kernel of a layer's `prepare_attention` before the first step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from kernelkit.call.launch import choose_target
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.warm import Progress, Warmed, warm
from mla.prepare.api import fields, prepare_attention
from mla.prepare.launch import ARCHS, KERNEL, PREPARE_ATTENTION, outputs_of, plan


def warmup_prepare(
    arrays: Mapping[str, torch.Tensor],
    rope: tuple[torch.Tensor, torch.Tensor],
    *,
    progress: Progress | bool | None = None,
    **options: Any,
) -> Warmed:
    """Find or compile the kernel of `prepare_attention` for parts like these.

    Records, dtypes, the shapes of windows and `longest` matter; contents and the number of tokens
    do not.

    Args:
        arrays, rope: as for `prepare_attention`.
        progress: see `kernelkit.compile.warm.warm`.
        options: those of `prepare_attention`.

    Returns:
        The key of the kernel, and the seconds that it took.

    Raises:
        TypeError, ValueError, NotImplementedError: what `prepare_attention` raises.
    """
    bound = inspect.signature(prepare_attention).bind(arrays, rope, **options)
    given = PREPARE_ATTENTION.arguments(fields(**bound.arguments))
    given.check()
    target = choose_target(given.cos.device, given.backend, given.arch, ARCHS)
    config, _, _ = plan(given, outputs_of(given))
    return warm([KernelKey(KERNEL, config, target.arch)], progress)
