"""The operator `blackwell_kernels::attention`: choose the config, decide empty problems, compile
once, describe the launch."""

from __future__ import annotations

import math
from functools import cache

import torch

from fmha.arguments import Arguments
from fmha.choose import TUNED, choose_config, longest_queries, problem_of
from fmha.config import AttentionConfig
from fmha.plan import kernel_of, make_plan, tiles_of
from fmha.sections import heads_of_section
from kernelkit.attention import bounded, fill_without_keys, plain_table
from kernelkit.call.launch import choose_target, clusters_at_once, launch, sms_of
from kernelkit.call.operator import Operator
from kernelkit.call.tensors import require_tma, with_plain_strides
from kernelkit.compile.arch import PORTABLE
from kernelkit.compile.compiler import compile_once
from kernelkit.compile.kernel import CompiledKernel

ARCHS = ("sm_100a", "sm_90a", PORTABLE)
MAX_BLOCKS = (1 << 31) - (1 << 16)  # a round of CTAs is counted beyond the last block

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def forward(arguments: Arguments) -> Results:
    """(O, LSE, row_max), row_max empty where O is normalised; one launch or none.

    Nothing here reads a tensor on a GPU, so a CUDA graph can capture it.
    """
    arguments.check()
    target = choose_target(arguments.q.device, arguments.backend, arguments.arch, ARCHS)
    arguments = settled(arguments, target.arch)
    config = choose_config(arguments, target.arch)
    check_config(config, target.arch)
    check_blocks(arguments, config, target.arch)
    for name in ("q", "k", "v"):
        require_tma(name, getattr(arguments, name))
    results = empty_results(arguments)
    if _has_work(arguments):
        given = kernel_arguments(arguments, config, results, target.arch)
        launch(compile_attention(config, target.arch), given, target, arguments.q.device)
    else:
        o, lse, row_max = results
        fill_without_keys(o, lse, arguments.sinks)
        row_max.fill_(-math.inf)
    return results


def settled(arguments: Arguments, arch: str) -> Arguments:
    """With options that were measured to be the best for these sizes, where they are left open."""

    def check(others: Arguments) -> None:
        check_config(choose_config(others, arch), arch)

    return TUNED.applied(arguments, arguments.q.device, problem_of, check)


@cache
def check_config(config: AttentionConfig, arch: str) -> None:
    """Raise ValueError or NotImplementedError, naming the value and what is possible."""
    make_plan(config, arch)


def check_blocks(arguments: Arguments, config: AttentionConfig, arch: str) -> None:
    """ValueError for more query blocks than a launch counts in 31 bits.

    The grid has one dimension and no more CTAs than run at once, so that the number of entries and
    of heads has no other limit.
    """
    heads, longest = arguments.q_heads // config.group, longest_queries(arguments)
    of_head = tiles_of(config, arch).blocks(longest)
    total = arguments.batch * heads * of_head
    if total >= MAX_BLOCKS:
        raise ValueError(
            f"{total} query blocks: {arguments.batch} entries x {heads} heads x {of_head} blocks "
            f"for {longest} queries, limit {MAX_BLOCKS - 1}. Give max_seqlen_q, the queries of the "
            "longest packed entry, or fewer entries"
        )


def compile_attention(config: AttentionConfig, arch: str = "sm_100a") -> CompiledKernel | None:
    """The kernel, found or compiled, once per process."""
    return compile_once(config, arch, kernel_of(config, arch))


def empty_results(arguments: Arguments) -> Results:
    """O, LSE and row_max, allocated and not yet written."""
    q, o = arguments.q, arguments.out
    *batch, queries, heads, _ = q.shape
    if o is None:
        o = q.new_empty((*q.shape[:-1], arguments.v.shape[-1]), dtype=arguments.o_dtype)
    lse = q.new_empty((*batch, heads, queries), dtype=torch.float32)
    row_max = q.new_empty(0 if arguments.normalize else lse.shape, dtype=torch.float32)
    return o, lse, row_max


def _has_work(arguments: Arguments) -> bool:
    """Whether there is anything to launch for."""
    has_queries = arguments.batch > 0 and longest_queries(arguments) > 0
    return has_queries and arguments.k.numel() > 0 and arguments.capacity > 0


def kernel_arguments(
    arguments: Arguments, config: AttentionConfig, results: Results, arch: str
) -> tuple:
    """(tensors, tables, numbers) in the order in which the kernels take them."""
    device, layout = arguments.q.device, tiles_of(config, arch)
    places = sms_of(device) * layout.residents
    if layout.ctas > 1:
        places = clusters_at_once(device, layout.ctas)
    o, *per_row = results[:2] if arguments.normalize else results
    q, k, v = arguments.q, arguments.k, arguments.v
    if arguments.cu_seqlens_q is not None:
        q, o, *per_row = map(_of_one_entry, (q, o, *per_row))
    if arguments.cu_seqlens_k is not None:
        k, v = _of_one_entry(k), _of_one_entry(v)
    tables = (
        plain_table(arguments.kv_lens),
        plain_table(arguments.q_offset),
        plain_table(arguments.cu_seqlens_q),
        plain_table(arguments.cu_seqlens_k),
        plain_table(arguments.page_table),
        arguments.kernel_sinks(),
        plain_table(arguments.cos),
        plain_table(arguments.sin),
        *arguments.kernel_scales(),
    )
    numbers = (
        *arguments.factors(),
        bounded(arguments.window_left),
        0 if arguments.causal else bounded(arguments.window_right),
        bounded(arguments.sink_tokens),
        longest_queries(arguments),
        *heads_of_section(arguments, config, arch, places),
        places,
    )
    tensors = tuple(with_plain_strides(tensor) for tensor in (q, k, v, o))
    return tensors, (*per_row, *[None] * arguments.normalize, *tables), numbers


def _of_one_entry(packed: torch.Tensor) -> torch.Tensor:
    """[1, ...] of [...], with the stride that `with_plain_strides` would give it."""
    return packed.as_strided((1, *packed.shape), (packed.shape[-1], *packed.stride()))


def _fake_results(arguments: Arguments) -> Results:
    """Shapes, dtypes and strides alone: sizes may be symbols, on which no check could decide."""
    arguments.check_devices()
    return empty_results(arguments)


ATTENTION = Operator("attention", Arguments, forward, _fake_results, results=3)
