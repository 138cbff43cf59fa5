"""Operators of attention to latent keys: check, choose the config, allocate, describe the launch.

`blackwell_kernels::mla_decode` is dense, `blackwell_kernels::mla_sparse_attention` reads listed
entries. Both are one launch.
"""

from __future__ import annotations

import math
from functools import cache, partial

import torch

from kernelkit.call.launch import Target, choose_target, launch
from kernelkit.call.operator import Operator
from kernelkit.call.tape import zeros_that_stay
from kernelkit.call.tensors import in_sequence, plain_table, with_plain_strides
from kernelkit.compile.compiler import compile_once
from kernelkit.plan.log2 import LOG2_E
from mla.attention import kernel_arguments as kernel
from mla.attention.arguments import Arguments, Dense, Source, Sparse
from mla.attention.choose import ARCHS, WARP, Decision, decide, plan_of
from mla.attention.config import LatentConfig
from mla.attention.formats import LATENT
from mla.attention.measured import TUNED, problem_of
from mla.attention.portable.plan import PortablePlan

MAX_CTAS = (1 << 31) - 1

Results = tuple[torch.Tensor, torch.Tensor]


def forward(arguments: Arguments) -> Results:
    """Return (O, LSE), with one launch or none.

    No code here reads a tensor on a GPU, so a CUDA graph can capture it.
    """
    return launched(arguments, *prepare(arguments))


def prepare(arguments: Arguments) -> tuple[Target, Decision]:
    """Check everything; return the target and the decision."""
    arguments.check()
    target = choose_target(arguments.q.device, arguments.backend, arguments.arch, ARCHS)
    settled = partial(checked_decision, target=target)
    tuned = TUNED.applied(arguments, arguments.q.device, problem_of, settled)
    return target, settled(tuned)


def checked_decision(arguments: Arguments, target: Target) -> Decision:
    """Choose the launch of checked arguments, and run the checks that need it."""
    decision = decide(arguments, target)
    check_config(decision.config, target.arch, decision.kernel)
    if decision.grid > MAX_CTAS:
        raise ValueError(f"{decision.grid} CTAs, limit {MAX_CTAS} (grid dimension)")
    return decision


@cache
def check_config(config: LatentConfig, arch: str, module: str) -> None:
    """Raise ValueError or NotImplementedError for what the kernel of `arch` does not support."""
    if module == WARP:
        PortablePlan(config, arch).check()
    else:
        plan_of(module, config).check()


def launched(arguments: Arguments, target: Target, decision: Decision) -> Results:
    """Return (O, LSE) for checked arguments."""
    results = empty_results(arguments)
    if not decision.entries:
        return results
    if not arguments.longest:
        results[0].zero_()
        results[1].fill_(-math.inf)
        return results
    given = kernel_arguments(arguments, results, decision)
    compiled = compile_once(decision.config, target.arch, decision.kernel)
    launch(compiled, (given,), target, arguments.q.device)
    return results


def empty_results(arguments: Arguments) -> Results:
    """Allocate O and LSE without writing them."""
    q, o = arguments.q, arguments.out
    *lead, heads, _ = q.shape
    if o is None:
        o = q.new_empty((*lead, heads, LATENT))
    if q.ndim == 3:
        return o, q.new_empty((*lead, heads), dtype=torch.float32)
    batch, tokens = lead
    strides = (tokens * heads, 1, heads)  # kernels write [B, T, H]
    lse = q.new_empty_strided((batch, heads, tokens), strides, dtype=torch.float32)
    return o, lse


def kernel_arguments(
    arguments: Arguments, results: Results, decision: Decision
) -> kernel.KernelArguments:
    """Return the launch arguments of the kernels of all architectures."""
    q, (o, lse) = arguments.q, results
    if q.ndim == 4:
        lse = lse.transpose(1, 2)
    q, o, lse = (_by_entries(arguments, tensor) for tensor in (q, o, lse))
    sources = [_source(source) for source in arguments.sources]
    return kernel.KernelArguments(
        q=with_plain_strides(q),
        o=with_plain_strides(o),
        lse=with_plain_strides(lse),
        keys=sources[0],
        extra=sources[1] if len(sources) > 1 else None,
        tables=_tables(arguments, decision),
        scale_log2=arguments.softmax_scale * LOG2_E,
        parts=decision.parts,
    )


def _by_entries(arguments: Arguments, tensor: torch.Tensor) -> torch.Tensor:
    """Return q, O [N, T, H, columns] or LSE [N, T, H]; T is 1 for sparse attention."""
    if arguments.q.ndim == 3:
        return tensor.unsqueeze(1)
    return tensor if isinstance(arguments, Dense) else tensor.flatten(0, 1).unsqueeze(1)


def _source(source: Source) -> kernel.Source:
    return kernel.Source(
        store=with_plain_strides(source.store),
        places=plain_table(source.places),
        counts=plain_table(source.counts),
        data_offset=source.data_offset,
        scale_offset=source.scale_offset,
    )


def _tables(arguments: Arguments, decision: Decision) -> kernel.Tables:
    cos = sin = positions = None
    if isinstance(arguments, Sparse) and arguments.positions is not None:
        cos, sin = plain_table(arguments.cos), plain_table(arguments.sin)
        positions = in_sequence(arguments.positions)
    partial, counts = None, None
    if decision.config.parts:
        partial = arguments.q.new_empty(decision.workspace, dtype=torch.float32)
        counts = zeros_that_stay(decision.workspace[0], arguments.q)
    return kernel.Tables(
        sinks=plain_table(arguments.sinks),
        cos=cos,
        sin=sin,
        positions=positions,
        key_scale=plain_table(arguments.kv_scale),
        partial=partial,
        counts=counts,
    )


def _fake_results(arguments: Arguments) -> Results:
    """Return shapes, dtypes and strides only: sizes may be symbols, which checks cannot compare."""
    return empty_results(arguments)


DECODE = Operator("mla_decode", Dense, forward, _fake_results, results=2)
SPARSE = Operator("mla_sparse_attention", Sparse, forward, _fake_results, results=2)
