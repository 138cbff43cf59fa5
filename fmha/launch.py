"""Operator `blackwell_kernels::attention`: choose the config, handle empty problems, compile once,
describe the launch.
"""

from __future__ import annotations

import math

import torch

from fmha.arguments import Arguments
from fmha.choose import TUNED, Decision, Problem, decide, measured_problem, problem_of
from fmha.config import AttentionConfig
from fmha.kernel_arguments import KernelArguments, Scalars, Tables
from fmha.mods import kernel_table
from fmha.plan import kernel_of
from fmha.sections import heads_of_section
from kernelkit.attention import bounded, fill_without_keys, per_head
from kernelkit.call.launch import choose_target, clusters_at_once, launch, sms_of
from kernelkit.call.operator import Operator
from kernelkit.call.tensors import plain_table, require_tma, with_plain_strides
from kernelkit.compile.arch import PORTABLE
from kernelkit.compile.compiler import compile_once
from kernelkit.compile.kernel import CompiledKernel
from kernelkit.plan.log2 import LOG2_E

ARCHS = ("sm_100a", "sm_90a", PORTABLE)
MAX_BLOCKS = (1 << 31) - (1 << 16)  # the count runs one round of CTAs past the last block

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def forward(arguments: Arguments) -> Results:
    """Return (O, LSE, row_max), with one launch or none; row_max is empty if O is normalised.

    No code here reads a tensor on a GPU, so a CUDA graph can capture it.
    """
    arguments.check()
    device = arguments.q.device
    target = choose_target(device, arguments.backend, arguments.arch, ARCHS)
    arguments = settled(arguments, target.arch)
    problem = problem_of(arguments)
    decision = decide(problem, target.arch)
    check_blocks(problem, decision)
    for name in ("q", "k", "v"):
        require_tma(name, getattr(arguments, name))
    results = empty_results(arguments)
    if problem.batch > 0 and problem.queries > 0 and problem.keys > 0 and arguments.k.numel() > 0:
        given = kernel_arguments(arguments, problem, decision, results, target.arch)
        kernel = compile_once(decision.config, target.arch, decision.kernel)
        launch(kernel, (given,), target, device)
    else:
        o, lse, row_max = results
        fill_without_keys(o, lse, arguments.sinks)
        row_max.fill_(-math.inf)
    return results


def settled(arguments: Arguments, arch: str) -> Arguments:
    """Return the arguments with open options set to those measured best for these sizes."""

    def check(others: Arguments) -> None:
        decide(problem_of(others), arch)

    return TUNED.applied(arguments, arguments.q.device, measured_problem, check)


def check_blocks(problem: Problem, decision: Decision) -> None:
    """Raise ValueError for more query blocks than a launch counts in 31 bits.

    The grid has one dimension and no more CTAs than run at once, so there is no other limit on the
    number of entries and heads.
    """
    if decision.blocks >= MAX_BLOCKS:
        heads = problem.q_heads // decision.config.group
        of_head = decision.blocks // (problem.batch * heads)
        raise ValueError(
            f"{decision.blocks} query blocks: {problem.batch} entries x {heads} heads x {of_head} "
            f"blocks for {problem.queries} queries, limit {MAX_BLOCKS - 1}. Give max_seqlen_q, the "
            "queries of the longest packed entry, or fewer entries"
        )


def compile_attention(config: AttentionConfig, arch: str = "sm_100a") -> CompiledKernel | None:
    """Return the kernel, looked up or compiled, once per process."""
    return compile_once(config, arch, kernel_of(config, arch))


def empty_results(arguments: Arguments) -> Results:
    """Allocate O, LSE and row_max without writing them."""
    q, o = arguments.q, arguments.out
    *batch, queries, heads, _ = q.shape
    if o is None:
        o = q.new_empty((*q.shape[:-1], arguments.v.shape[-1]), dtype=arguments.o_dtype)
    lse = q.new_empty((*batch, heads, queries), dtype=torch.float32)
    row_max = q.new_empty(0 if arguments.normalize else lse.shape, dtype=torch.float32)
    return o, lse, row_max


def kernel_arguments(
    arguments: Arguments, problem: Problem, decision: Decision, results: Results, arch: str
) -> KernelArguments:
    """Return the launch arguments of the kernel of the decision."""
    device, config = arguments.q.device, decision.config
    places = sms_of(device) * decision.residents
    if decision.ctas > 1:
        places = clusters_at_once(device, decision.ctas)
    section, near = heads_of_section(problem, config, arch, places)
    scale_log2, softcap_log2 = arguments.factors()
    if config.score_mod:
        scale_log2, softcap_log2 = LOG2_E, arguments.softmax_scale
    scalars = Scalars(
        scale_log2=scale_log2,
        softcap_log2=softcap_log2,
        window_left=bounded(arguments.window_left),
        window_right=bounded(None if problem.right < 0 else problem.right),
        sink_tokens=bounded(arguments.sink_tokens),
    )
    tables = _tables(arguments, problem)
    (q, o), (k, v) = (arguments.q, results[0]), (arguments.k, arguments.v)
    lse, row_max = results[1], None if arguments.normalize else results[2]
    if arguments.cu_seqlens_q is not None:
        q, o, lse = map(_of_one_entry, (q, o, lse))
        row_max = None if row_max is None else _of_one_entry(row_max)
    if arguments.cu_seqlens_k is not None:
        k, v = _of_one_entry(k), _of_one_entry(v)
    q, k, v, o = map(with_plain_strides, (q, k, v, o))
    return KernelArguments(
        q=q,
        k=k,
        v=v,
        o=o,
        lse=lse,
        row_max=row_max,
        tables=tables,
        scalars=scalars,
        longest=problem.queries,
        section=section,
        near=near,
        places=places,
    )


def _tables(arguments: Arguments, problem: Problem) -> Tables:
    """Return the tables as the kernels read them: int32, fp32, one scale for each head."""
    return Tables(
        kv_lens=plain_table(arguments.kv_lens),
        q_offset=plain_table(arguments.q_offset),
        cu_seqlens_q=plain_table(arguments.cu_seqlens_q),
        cu_seqlens_k=plain_table(arguments.cu_seqlens_k),
        page_table=plain_table(arguments.page_table),
        tree=arguments.kernel_tree(),
        sinks=arguments.kernel_sinks(),
        cos=plain_table(arguments.cos),
        sin=plain_table(arguments.sin),
        q_scale=per_head(arguments.q_scale, problem.q_heads),
        k_scale=per_head(arguments.k_scale, problem.kv_heads),
        v_scale=per_head(arguments.v_scale, problem.kv_heads),
        out_scale=arguments.kernel_out_scale(),
        block_counts=plain_table(arguments.block_counts),
        block_indices=plain_table(arguments.block_indices),
        full_counts=plain_table(arguments.full_counts),
        full_indices=plain_table(arguments.full_indices),
        block_order=plain_table(arguments.block_order),
        mask_mod=tuple(map(kernel_table, arguments.mask_tables)),
        score_mod=tuple(map(kernel_table, arguments.score_tables)),
    )


def _of_one_entry(packed: torch.Tensor) -> torch.Tensor:
    """Return [1, ...] for [...], with the stride that `with_plain_strides` would give it."""
    return packed.as_strided((1, *packed.shape), (packed.shape[-1], *packed.stride()))


def _fake_results(arguments: Arguments) -> Results:
    """Return shapes, dtypes and strides only: sizes may be symbols, which checks cannot compare."""
    arguments.check_devices()
    return empty_results(arguments)


ATTENTION = Operator("attention", Arguments, forward, _fake_results, results=3)
