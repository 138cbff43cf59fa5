"""`warmup`: compile every kernel that decode steps of given sizes can choose, before the first
step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from gqa_lowlatency.api import OTHER_NAMES, DecodeOptions, decode, fields_of
from gqa_lowlatency.arguments import MAX_PARTS, Arguments
from gqa_lowlatency.choose import (
    MIN_KEYS_OF_PART,
    TILE,
    TUNED,
    CoScheduled,
    Load,
    Options,
    choose,
    co_scheduled_on,
    config_for,
    load_of,
    machine_of,
    problem_of,
    wished_config,
    with_options,
)
from gqa_lowlatency.config import CLUSTERS, DecodeConfig
from gqa_lowlatency.launch import ARCHS, DECODE, KERNELS, check_config
from kernelkit.call.front import require_names, spelled
from kernelkit.call.launch import Target, choose_target
from kernelkit.compile.arch import written_for
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.warm import Progress, Warmed, counts, warm
from kernelkit.plan.hw import MAX_GRID_YZ
from kernelkit.tune.choices import described

if TYPE_CHECKING:
    from typing_extensions import Unpack

MANY = 1 << 30  # clusters at once


@spelled(DecodeOptions)
def warmup(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    batches: Sequence[int],
    lengths: Sequence[int],
    progress: Progress | bool | None = None,
    **options: Unpack[DecodeOptions],
) -> Warmed:
    """Find or compile all kernels that `decode` can choose for steps like this one: a later
    `decode` within these sizes compiles nothing.

    Args:
        q, k, v: as for `decode`. Dtypes, heads, head_dim, query tokens and page size matter;
            lengths and contents do not. They may be on the device 'meta' if `arch` is given.
        batches: entries of a step, a sequence such as `range(1, 65)`.
        lengths: values of `max_kv_len`, or capacities without it; a sequence.
        progress: see `kernelkit.compile.warm.warm`.
        options: those of `decode`; masks and the presence of tables matter.

    Returns:
        The keys of the kernels, and the seconds that each took.

    Raises:
        TypeError, ValueError, NotImplementedError: what `decode` raises.
    """
    require_names(decode, options, OTHER_NAMES)
    arguments = DECODE.arguments(fields_of(q, k, v, options))
    arguments.check()
    sizes = counts("batches", batches, MAX_GRID_YZ), counts("lengths", lengths)
    return warm(kernels_for(arguments, *sizes), progress)


def kernels_for(
    arguments: Arguments, batches: Sequence[int], lengths: Sequence[int]
) -> list[KernelKey]:
    """Return the kernels of `warmup`, without duplicates."""
    target = choose_target(arguments.q.device, arguments.backend, arguments.arch, ARCHS)
    every = _configs(arguments, target, batches, lengths), _measured(arguments, target, batches)
    configs = dict.fromkeys(itertools.chain(*every))
    for config in configs:
        check_config(config, target.arch)
    source = KERNELS[written_for(target.arch)]
    return [KernelKey(source, config, target.arch) for config in configs]


def _configs(
    arguments: Arguments, target: Target, batches: Sequence[int], lengths: Sequence[int]
) -> Iterator[DecodeConfig]:
    wished, arch = wished_config(arguments, target.arch), target.arch
    every_limit = _limits(arguments, target, replace(wished, cluster=1))
    # With at least one cluster per SM their number no longer matters.
    every_size = _sms(arguments, target)
    most = max(machine_of(arch, sms).sms for sms in every_size) + 1
    heads = {min(batch * arguments.kv_heads, most) for batch in batches if batch}
    seen = {replace(arguments, max_kv_len=n).most_seen for n in _representative(lengths)}
    if machine_of(arch).widest == 1:  # only the number of parts depends on the keys
        seen = set({min(keys // MIN_KEYS_OF_PART, MAX_PARTS): keys for keys in seen}.values())
    known = set()
    for keys, count, limit, sms in itertools.product(seen, heads, every_limit, every_size):
        load = Load(keys, count, arguments.batch_invariant, arguments.parts, sms)
        choice = choose(wished, arch, load, limit)
        if choice not in known:
            known.add(choice)
            yield config_for(wished, arch, load, limit)


def _measured(
    arguments: Arguments, target: Target, batches: Sequence[int]
) -> Iterator[DecodeConfig]:
    """Yield the configs measured to be the best for calls like this one with these batch sizes."""
    asked, heads = problem_of(arguments), {batch * arguments.kv_heads for batch in batches}
    sms = load_of(arguments, target.arch).sms
    if asked is None:
        return
    for problem, choice in TUNED.measured(arguments.q.device):
        if problem["config"] != described(asked.config) or problem["heads"] not in heads:
            continue
        options = Options(**choice)
        wished = wished_config(with_options(arguments, options), target.arch)
        load = Load(problem["keys"], problem["heads"], False, options.parts, sms, options.cluster)
        yield config_for(wished, target.arch, load)


def _limits(arguments: Arguments, target: Target, config: DecodeConfig) -> list[CoScheduled | None]:
    """Return how many clusters run at once: from the device, or all possibilities without one."""
    if target.backend != "none":
        return [co_scheduled_on(target, config, arguments.q.device)]
    return [_up_to(most) for most in CLUSTERS]


def _sms(arguments: Arguments, target: Target) -> list[int]:
    """Return the SMs of the GPU, or possible numbers without one.

    Without a GPU, and for architectures without clusters, the numbers are powers of two: GPUs of
    one architecture range from few SMs to many.
    """
    most = machine_of(target.arch).sms
    if target.backend != "none" or machine_of(target.arch).widest > 1:
        return [load_of(arguments, target.arch).sms]
    return [*(1 << n for n in range(most.bit_length())), most]


def _up_to(most: int) -> CoScheduled:
    return lambda width: MANY if width <= most else 0


def _representative(lengths: Sequence[int]) -> Iterator[int]:
    """Yield a length of each range within which no choice changes.

    Choices depend on whole tiles of keys, begun or complete.
    """
    known = set()
    for length in lengths:
        place = -(-length // TILE), length // TILE
        if length > 0 and place not in known:
            known.add(place)
            yield length
