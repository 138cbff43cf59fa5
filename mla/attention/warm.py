"""`warmup` and `warmup_sparse`: compile every kernel that steps of given sizes can choose, before
the first step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kernelkit.call.front import require_names, spelled
from kernelkit.call.launch import Target, choose_target, clusters_at_once
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.warm import Progress, Warmed, counts, warm
from kernelkit.plan.hw import MAX_GRID_YZ
from kernelkit.tune.choices import described
from kvcache.layouts.rows import Rows
from mla.attention.api import (
    OTHER_NAMES,
    DecodeOptions,
    SparseOptions,
    decode,
    dense_fields,
    sparse_decode,
    sparse_fields,
)
from mla.attention.arguments import Arguments
from mla.attention.choose import (
    ARCHS,
    Decision,
    Places,
    decision_for,
    kernel_of,
    load_of,
    plain_config,
    tile_of,
)
from mla.attention.config import MAX_CLUSTER
from mla.attention.launch import DECODE, SPARSE, check_config
from mla.attention.measured import TUNED, problem_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

MANY = 1 << 30  # clusters at once
MAX_ENTRIES = 1 << 20  # query entries of a step


@spelled(DecodeOptions)
def warmup(
    q: torch.Tensor,
    kv: torch.Tensor,
    *,
    batches: Sequence[int],
    lengths: Sequence[int],
    progress: Progress | bool | None = None,
    **options: Unpack[DecodeOptions],
) -> Warmed:
    """Find or compile all kernels that `decode` can choose for steps like this one: a later
    `decode` within these sizes compiles nothing.

    Args:
        q, kv: as for `decode`. Heads, query tokens, page size and dtype matter; contents do not.
            They may be on the device 'meta' if `arch` is given.
        batches: entries of a step, a sequence such as `range(1, 65)`.
        lengths: values of `max_kv_len`, or what tables have room for; a sequence.
        progress: see `kernelkit.compile.warm.warm`.
        options: those of `decode`; the mask and the presence of tables matter.

    Returns:
        The keys of the kernels, and the seconds that each took.

    Raises:
        TypeError, ValueError, NotImplementedError: what `decode` raises.
    """
    require_names(decode, options, OTHER_NAMES)
    arguments = DECODE.arguments(dense_fields(q, kv, options))
    sizes = counts("batches", batches, MAX_GRID_YZ), counts("lengths", lengths)
    return warm(kernels_for(arguments, *sizes), progress)


@spelled(SparseOptions)
def warmup_sparse(
    q: torch.Tensor,
    rows: Rows | torch.Tensor,
    indices: torch.Tensor,
    *,
    tokens: Sequence[int],
    many: bool = False,
    progress: Progress | bool | None = None,
    **options: Unpack[SparseOptions],
) -> Warmed:
    """Find or compile all kernels that `sparse_decode` can choose for these numbers of tokens.

    Args:
        q, rows, indices: as for `sparse_decode`. Heads, records, page sizes and k matter.
        tokens: tokens of a step, a sequence.
        many: for `sparse_prefill` instead.
        progress: see `kernelkit.compile.warm.warm`.
        options: those of `sparse_decode`.

    Returns:
        The keys of the kernels, and the seconds that each took.

    Raises:
        TypeError, ValueError, NotImplementedError: what `sparse_decode` raises.
    """
    require_names(sparse_decode, options, OTHER_NAMES)
    fields = sparse_fields(q, rows, indices, options) | {"many": many}
    arguments = SPARSE.arguments(fields)
    sizes = counts("tokens", tokens, MAX_ENTRIES)
    arguments.check()  # before `longest`, which views the pools
    return warm(kernels_for(arguments, sizes, [arguments.longest]), progress)


def kernels_for(
    arguments: Arguments, entries: Sequence[int], lengths: Sequence[int]
) -> list[KernelKey]:
    """Return the kernels of a warm-up, without duplicates."""
    arguments.check()
    target = choose_target(arguments.q.device, arguments.backend, arguments.arch, ARCHS)
    config = plain_config(arguments)
    kernel = kernel_of(arguments.kernel, target.arch)
    load = load_of(arguments, target)
    keys = tile_of(kernel, config).keys
    limits = _limits(arguments, target)
    found = dict.fromkeys(
        decision_for(config, kernel, replace(load, entries=count, keys=length), limit).config
        for count in sorted({min(count, load.sms + 1) for count in entries if count})
        for length in _representative(lengths, keys)
        for limit in limits
    )
    kernels = {(kernel, each): None for each in found}
    for decision in _measured(arguments, target, entries, lengths):
        kernels[decision.kernel, decision.config] = None
    for module, each in kernels:
        check_config(each, target.arch, module)
    return [KernelKey(module, each, target.arch) for module, each in kernels]


def _measured(
    arguments: Arguments, target: Target, entries: Sequence[int], lengths: Sequence[int]
) -> Iterator[Decision]:
    """Yield the launches that were measured to be the best for calls like this one."""
    asked = problem_of(arguments)
    if asked is None:
        return
    for problem, choice in TUNED.measured(arguments.q.device):
        sizes = replace(asked, entries=problem["entries"], keys=problem["keys"])
        if described(sizes) == problem and sizes.entries in entries and sizes.keys in lengths:
            given = replace(arguments, **choice)
            load = replace(load_of(given, target), entries=sizes.entries, keys=sizes.keys)
            yield decision_for(asked.config, kernel_of(given.kernel, target.arch), load)


def _limits(arguments: Arguments, target: Target) -> list[Places | None]:
    """Return how many clusters run at once: of the device, or all possibilities without one."""
    if target.backend == "cuda":
        device = arguments.q.device
        return [lambda width: clusters_at_once(device, width)]
    return [None, *map(_up_to, range(1, MAX_CLUSTER))]


def _up_to(most: int) -> Places:
    return lambda width: MANY if width <= most else 0


def _representative(lengths: Sequence[int], tile: int) -> Iterator[int]:
    """Yield a length of each range within which no choice changes: the numbers of tiles."""
    known = set()
    for length in lengths:
        place = -(-length // tile), length // tile
        if length > 0 and place not in known:
            known.add(place)
            yield length
