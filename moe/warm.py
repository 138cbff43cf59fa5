"""`warmup`: every kernel that a layer can choose for so many tokens, compiled ahead of calls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from kernelkit.call.front import defaults_of, given_options, spelled
from kernelkit.call.launch import choose_target
from kernelkit.call.tensors import as_meta
from kernelkit.compile.compiler import collecting
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.warm import Progress, Warmed, counts, kernels_over, warm
from kernelkit.tune.choices import standing_for
from moe.arguments import Chosen, Router, RouterLinear
from moe.choose import TUNED
from moe.fused import FUSED, FusedOptions, fields_of, run_layer
from moe.launch import ARCHS
from moe.mixed.choose import MANY
from moe.mixed.choose import TUNED as TUNED_MIXED
from moe.mixed.config import ARCHS as MIXED_ARCHS
from moe.mixed.fragments import ArrangedExperts
from moe.mixed.layer import FUSED_MIXED
from moe.mixed.layer import run_layer as run_mixed
from moe.packing import PackedExperts

if TYPE_CHECKING:
    from typing_extensions import Unpack


@spelled(FusedOptions)
def warmup(
    x: torch.Tensor,
    experts: PackedExperts | ArrangedExperts,
    router_logits: torch.Tensor | RouterLinear | Chosen,
    router: Router | None = None,
    *,
    tokens: Sequence[int],
    progress: Progress | bool | None = None,
    **options: Unpack[FusedOptions],
) -> Warmed:
    """Find or compile all kernels that `fused_moe` can choose for layers like this one.

    A later `fused_moe` with so many tokens compiles nothing.

    Args:
        x, experts, router_logits, router, options: as for `moe.fused_moe`; what tensors hold does
            not count, nor how many tokens there are, and they may be on the device 'meta' where
            `arch` is given.
        tokens: how many a call may have, a sequence such as `range(1, 8193)`.
        progress: see `kernelkit.compile.warm.warm`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `fused_moe`.
    """
    sizes, given = counts("tokens", tokens), given_options(warmup, options, _DEFAULTS)
    return warm(kernels_for(x, experts, router_logits, router, sizes, **given), progress)


_DEFAULTS = defaults_of(warmup)


def kernels_for(
    x: torch.Tensor,
    experts: PackedExperts | ArrangedExperts,
    router_logits: torch.Tensor | RouterLinear | Chosen,
    router: Router | None,
    tokens: Sequence[int],
    *,
    backend: str = "auto",
    arch: str | None = None,
    **options: Any,
) -> list[KernelKey]:
    """The kernels of `warmup`, each once."""
    run: Callable[[Any], Any]
    archs: Sequence[str]
    operator, run, archs = FUSED, run_layer, ARCHS
    arranged = isinstance(experts, ArrangedExperts)
    if arranged:
        operator, run, archs = FUSED_MIXED, run_mixed, MIXED_ARCHS
    place = {"backend": backend, "arch": arch}
    fields = fields_of(x, experts, router_logits, router, options)
    given = operator.arguments(fields | place, alone=True)
    target = choose_target(x.device, backend, arch, archs)
    layer = as_meta(replace(given, arch=target.arch))

    def kernels_at(count: int) -> list[KernelKey]:
        with collecting() as keys, standing_for(x.device):
            rows: dict[str, Any] = {"x": _rows(x, count)}
            if isinstance(router_logits, torch.Tensor):
                rows["router_logits"] = _rows(router_logits, count)
            if chosen := layer.chosen:
                tables = _rows(chosen.ids, count), _rows(chosen.weights, count)
                rows["chosen"] = Chosen(*tables, chosen.experts)
            run(replace(layer, **rows))
        return keys

    wanted = sorted({count for count in tokens if count > 0})
    # Tiles of arranged experts depend on full waves of CTAs, which have no thresholds.
    most = layer.router.slots
    alone = bisect_left(wanted, MANY * experts.experts // most) if arranged else 0
    each = [key for count in wanted[:alone] for key in kernels_at(count)]
    tuned = TUNED_MIXED if arranged else TUNED
    slots = most if layer.chosen else min(most, experts.experts)
    measured = {problem["rows"] // slots for problem, _ in tuned.measured(x.device)}
    each += [key for count in measured.intersection(wanted[alone:]) for key in kernels_at(count)]
    return list(dict.fromkeys(each + kernels_over(wanted[alone:], kernels_at)))


def _rows(like: torch.Tensor, count: int) -> torch.Tensor:
    return torch.empty((count, *like.shape[1:]), dtype=like.dtype, device="meta")
