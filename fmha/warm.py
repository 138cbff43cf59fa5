"""`warmup`: compile every kernel that attention of given sizes can choose, ahead of calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fmha.api import OTHER_NAMES, AttentionOptions, attention, fields_of
from fmha.arguments import Arguments
from fmha.choose import (
    TUNED,
    best_of,
    candidates,
    check_config,
    measured_problem,
    problem_of,
)
from fmha.config import AttentionConfig
from fmha.launch import ARCHS, ATTENTION
from fmha.plan import kernel_of
from kernelkit.call.front import require_names, spelled
from kernelkit.call.launch import choose_target
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.warm import Progress, Warmed, counts, warm
from kernelkit.plan.hw import MAX_GRID_YZ
from kernelkit.tune.choices import described

if TYPE_CHECKING:
    from typing_extensions import Unpack


@spelled(AttentionOptions)
def warmup(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    batches: Sequence[int],
    lengths: Sequence[int],
    progress: Progress | bool | None = None,
    normalize: bool = True,
    **options: Unpack[AttentionOptions],
) -> Warmed:
    """Find or compile all kernels that `attention` can choose for calls like this one: a later
    `attention` within these sizes compiles nothing.

    Args:
        q, k, v: as for `attention`; dtypes, heads, head dims and page size count, lengths and
            contents do not, and they may be on the device 'meta' where `arch` is given.
        batches: entries of a call, a sequence such as `range(1, 65)`.
        lengths: query tokens of the longest entry, or an upper bound of them; a sequence such as
            `range(1, 8193)`.
        progress: see `kernelkit.compile.warm.warm`.
        normalize, options: those of `attention`; masks and which tables there are count.

    Returns:
        The keys of the kernels, and the seconds that each took.

    Raises:
        TypeError, ValueError, NotImplementedError: what `attention` raises.
    """
    require_names(attention, options, OTHER_NAMES)
    arguments = ATTENTION.arguments(fields_of(q, k, v, {"normalize": normalize, **options}))
    arguments.check()
    sizes = counts("batches", batches, MAX_GRID_YZ), counts("lengths", lengths)
    return warm(kernels_for(arguments, *sizes), progress)


def kernels_for(
    arguments: Arguments, batches: Sequence[int], lengths: Sequence[int]
) -> list[KernelKey]:
    """Return the kernels of `warmup`, without duplicates."""
    target = choose_target(arguments.q.device, arguments.backend, arguments.arch, ARCHS)
    configs = dict.fromkeys(_configs(arguments, target.arch, batches, lengths))
    for config in configs:
        check_config(config, target.arch)
    return [KernelKey(kernel_of(config, target.arch), config, target.arch) for config in configs]


def _configs(
    arguments: Arguments, arch: str, batches: Sequence[int], lengths: Sequence[int]
) -> Iterator[AttentionConfig]:
    """Yield the configs of every length, at the smallest and the largest batch: others only fill
    more CTAs."""
    found = candidates(problem_of(arguments), arch)
    entries = [batch for batch in batches if batch > 0]
    for length in lengths:
        if length > 0 and entries:
            for batch in {min(entries), max(entries)}:
                yield best_of(found, batch, length)
    yield from _measured(arguments, arch, {*entries}, {*lengths})


def _measured(
    arguments: Arguments, arch: str, batches: set[int], lengths: set[int]
) -> Iterator[AttentionConfig]:
    """Yield the configs that were measured to be the best for calls like this one, of these
    sizes."""
    asked = measured_problem(arguments)
    if asked is None:
        return
    for problem, choice in TUNED.measured(arguments.q.device):
        batch, queries = problem["batch"], problem["queries"]
        same = problem["config"] == described(asked.config)
        if same and batch in batches and queries in lengths:
            asked = problem_of(replace(arguments, **choice))
            yield best_of(candidates(asked, arch), batch, queries)
