"""Operator `blackwell_kernels::decode`: choose the config, handle empty problems, compile once,
describe the launch.
"""

from __future__ import annotations

from functools import cache

import torch

from gqa_lowlatency.arguments import Arguments
from gqa_lowlatency.choose import (
    LEFT_OPEN,
    TUNED,
    Decision,
    Options,
    decide,
    problem_of,
    with_options,
)
from gqa_lowlatency.config import KERNELS, DecodeConfig
from gqa_lowlatency.kernel_arguments import KernelArguments, Scalars, Tables, Tensors
from kernelkit.attention import bounded, fill_without_keys, per_head
from kernelkit.call.launch import Target, choose_target, launch
from kernelkit.call.operator import Operator
from kernelkit.call.tape import zeros_that_stay
from kernelkit.call.tensors import plain_table, require_tma, with_plain_strides
from kernelkit.compile.arch import written_for
from kernelkit.compile.compiler import compile_once
from kernelkit.compile.kernel import CompiledKernel
from kernelkit.plan import hw

ARCHS = tuple(KERNELS)

Results = tuple[torch.Tensor, torch.Tensor]


def forward(arguments: Arguments) -> Results:
    """Return (O, LSE), with one launch or none.

    No code here reads a tensor on a GPU, so a CUDA graph can capture it.
    """
    return launched(*prepare(arguments))


def launched(arguments: Arguments, target: Target, decision: Decision) -> Results:
    """Return (O, LSE) for checked arguments."""
    results = empty_results(arguments)
    if has_keys(arguments):
        given = kernel_arguments(arguments, results, decision)
        kernel = compile_once(decision.config, target.arch, decision.kernel)
        launch(kernel, (given,), target, arguments.q.device)
    else:
        fill_without_keys(*results, arguments.sinks, heads_last=arguments.q.ndim == 3)
    return results


def prepare(arguments: Arguments) -> tuple[Arguments, Target, Decision]:
    """Check everything; return the arguments with measured options, the target, and the
    decision.
    """
    arguments.check()
    target = choose_target(arguments.q.device, arguments.backend, arguments.arch, ARCHS)

    def fitting(options: Options) -> tuple[Arguments, Target, Decision]:
        settled = with_options(arguments, options)
        return settled, target, checked_decision(settled, target, options.cluster)

    def asked(_: Options) -> object:
        return problem_of(arguments)

    return fitting(TUNED.applied(LEFT_OPEN, arguments.q.device, asked, fitting))


def checked_decision(arguments: Arguments, target: Target, cluster: int = 0) -> Decision:
    """Choose the launch for checked arguments, and run the checks that need it.

    cluster: as in `gqa_lowlatency.choose.decide`.
    """
    decision = decide(arguments, target, cluster)
    check_config(decision.config, target.arch)
    tiles = arguments.k.shape[-2] * decision.row_tiles
    if tiles > hw.MAX_GRID_YZ:
        raise ValueError(f"{tiles} KV heads x row tiles, limit {hw.MAX_GRID_YZ} (grid dimension)")
    for name in ("q", "k", "v"):
        require_tma(name, getattr(arguments, name))
    return decision


@cache
def check_config(config: DecodeConfig, arch: str) -> None:
    """Raise ValueError or NotImplementedError for configs that the kernel of `arch` does not
    support.
    """
    config.check_values()
    if written_for(arch) == "sm_100a":
        from gqa_lowlatency.sm100.plan import ROLES, make_plan

        if config.warps:
            fixed = f"a CTA of this kernel has {ROLES.threads // 32} warps"
            raise NotImplementedError(f"warps {config.warps} on {arch}: 0, {fixed}")
        if config.step:
            raise NotImplementedError(f"step {config.step} on {arch}: 0, a step is one tile")
        make_plan(config)
        return
    from gqa_lowlatency.portable.plan import PortablePlan

    PortablePlan(config, arch).check()


def compile_for(config: DecodeConfig, arch: str) -> CompiledKernel | None:
    """Return the kernel, looked up or compiled, once per process."""
    return compile_once(config, arch, KERNELS[written_for(arch)])


def empty_results(arguments: Arguments) -> Results:
    """Allocate O and LSE without writing them."""
    q, o = arguments.q, arguments.out
    if o is None:
        o = q.new_empty(q.shape, dtype=arguments.o_dtype)
    batch, *tokens, heads, _ = q.shape
    return o, q.new_empty((batch, heads, *tokens), dtype=torch.float32)


def has_keys(arguments: Arguments) -> bool:
    """Return whether a launch is needed."""
    return arguments.q.shape[0] > 0 and arguments.k.numel() > 0 and arguments.capacity > 0


def kernel_arguments(arguments: Arguments, results: Results, decision: Decision) -> KernelArguments:
    """Return the launch arguments of the kernels of all architectures."""
    heads = arguments.k.shape[-2]
    scale_log2, softcap_log2 = arguments.factors()
    scalars = Scalars(
        scale_log2=scale_log2,
        softcap_log2=softcap_log2,
        left=bounded(arguments.window_left),
        sink_tokens=bounded(arguments.sink_tokens),
    )
    lens, pages, first = map(
        plain_table, (arguments.kv_lens, arguments.page_table, arguments.first_keys)
    )
    sinks, out_scale = arguments.kernel_sinks(), arguments.kernel_out_scale()
    tree = arguments.kernel_tree()
    k_scale, v_scale = per_head(arguments.k_scale, heads), per_head(arguments.v_scale, heads)
    partial, counts = None, None
    if decision.config.parts:
        partial, counts = make_workspace(arguments, decision.config, decision.num_splits)
    q, (o, lse) = arguments.q, results
    if q.ndim == 3:
        q, o, lse = q.unsqueeze(1), o.unsqueeze(1), lse.unsqueeze(-1)
    q, k, v, o, lse = map(with_plain_strides, (q, arguments.k, arguments.v, o, lse))
    return KernelArguments(
        tensors=Tensors(q=q, k=k, v=v, o=o, lse=lse),
        tables=Tables(
            lens=lens,
            pages=pages,
            sinks=sinks,
            k_scale=k_scale,
            v_scale=v_scale,
            out_scale=out_scale,
            partial=partial,
            counts=counts,
            first=first,
            tree=tree,
        ),
        scalars=scalars,
        parts=decision.num_splits if decision.config.parts else 1,
    )


def make_workspace(
    arguments: Arguments, config: DecodeConfig, num_splits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the workspace of clusters that share a KV head, see `shared/finish.py`.

    Return fp32 [units, num_splits, words] for their results, and int32 [units] of zeros, which
    every launch resets to zeros.
    """
    units = arguments.q.shape[0] * arguments.k.shape[-2] * config.row_tiles * config.owner_ctas
    words = config.owned_columns * (config.head_dim + 2)
    partial = arguments.q.new_empty((units, num_splits, words), dtype=torch.float32)
    return partial, zeros_that_stay(units, arguments.q)


def _fake_results(arguments: Arguments) -> Results:
    """Return shapes, dtypes and strides only: sizes may be symbols, which checks cannot compare."""
    arguments.check_devices()
    return empty_results(arguments)


DECODE = Operator("decode", Arguments, forward, _fake_results, results=2)
