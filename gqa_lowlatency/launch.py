"""The operator `blackwell_kernels::decode`: choose the config, decide empty problems, compile once,
describe the launch."""

from __future__ import annotations

from functools import cache

import torch

from gqa_lowlatency.arguments import Arguments
from gqa_lowlatency.choose import (
    LEFT_OPEN,
    TUNED,
    Options,
    choose_config,
    clusters_per_head,
    problem_of,
    with_options,
)
from gqa_lowlatency.config import KERNELS, DecodeConfig
from kernelkit.attention import bounded, fill_without_keys, plain_table
from kernelkit.call.launch import Target, choose_target, launch
from kernelkit.call.operator import Operator
from kernelkit.call.tape import zeros_that_stay
from kernelkit.call.tensors import require_tma, with_plain_strides
from kernelkit.compile.arch import written_for
from kernelkit.compile.compiler import compile_once
from kernelkit.compile.kernel import CompiledKernel
from kernelkit.plan import hw

ARCHS = tuple(KERNELS)

Results = tuple[torch.Tensor, torch.Tensor]


def forward(arguments: Arguments) -> Results:
    """(O, LSE); one launch or none.

    Nothing here reads a tensor on a GPU, so a CUDA graph can capture it.
    """
    return launched(*prepare(arguments))


def launched(arguments: Arguments, target: Target, config: DecodeConfig) -> Results:
    """The same for arguments that are checked."""
    results = empty_results(arguments)
    if has_keys(arguments):
        given = kernel_arguments(arguments, results, config, target)
        launch(compile_for(config, target.arch), given, target, arguments.q.device)
    else:
        fill_without_keys(*results, arguments.sinks, heads_last=arguments.q.ndim == 3)
    return results


def prepare(arguments: Arguments) -> tuple[Arguments, Target, DecodeConfig]:
    """Every check; the arguments with what was measured for them, where to run, what to compile."""
    arguments.check()
    target = choose_target(arguments.q.device, arguments.backend, arguments.arch, ARCHS)

    def fitting(options: Options) -> tuple[Arguments, Target, DecodeConfig]:
        settled = with_options(arguments, options)
        return settled, target, checked_config(settled, target, options.cluster)

    def asked(_: Options) -> object:
        return problem_of(arguments)

    return fitting(TUNED.applied(LEFT_OPEN, arguments.q.device, asked, fitting))


def checked_config(arguments: Arguments, target: Target, cluster: int = 0) -> DecodeConfig:
    """What to compile for arguments that are checked; every check that needs it. cluster: as of
    `choose_config`."""
    config = choose_config(arguments, target, cluster)
    check_config(config, target.arch)
    tiles = arguments.kv_heads * config.row_tiles
    if tiles > hw.MAX_GRID_YZ:
        raise ValueError(f"{tiles} KV heads x row tiles, limit {hw.MAX_GRID_YZ} (grid dimension)")
    for name in ("q", "k", "v"):
        require_tma(name, getattr(arguments, name))
    return config


@cache
def check_config(config: DecodeConfig, arch: str) -> None:
    """Raise ValueError or NotImplementedError for what the kernel of `arch` does not do."""
    config.check_values()
    if written_for(arch) == "sm_100a":
        from gqa_lowlatency.sm100.plan import ROLES, make_plan

        if config.warps:
            fixed = f"a CTA of this kernel has {ROLES.threads // 32} warps"
            raise NotImplementedError(f"warps {config.warps} on {arch}: {fixed}, 0 leaves them")
        if config.step:
            raise NotImplementedError(f"step {config.step} on {arch}: it is a tile, 0 leaves it")
        make_plan(config)
        return
    from gqa_lowlatency.portable.plan import Plan90

    Plan90(config, arch).check()


def compile_for(config: DecodeConfig, arch: str) -> CompiledKernel | None:
    """The kernel, found or compiled, once per process."""
    return compile_once(config, arch, KERNELS[written_for(arch)])


def empty_results(arguments: Arguments) -> Results:
    """O and LSE, allocated and not yet written."""
    q, o = arguments.q, arguments.out
    if o is None:
        o = q.new_empty(q.shape, dtype=arguments.o_dtype)
    batch, *tokens, heads, _ = q.shape
    return o, q.new_empty((batch, heads, *tokens), dtype=torch.float32)


def has_keys(arguments: Arguments) -> bool:
    """Whether there is anything to launch for."""
    return arguments.batch > 0 and arguments.k.numel() > 0 and arguments.capacity > 0


def kernel_arguments(
    arguments: Arguments, results: Results, config: DecodeConfig, target: Target
) -> tuple:
    """(tensors, tables, numbers, num_splits) as the kernels of all architectures take them; tables
    is None where all are: a tuple of nothing but None is no argument for the DSL."""
    q, (o, lse) = arguments.q, results
    if q.ndim == 3:
        q, o, lse = q.unsqueeze(1), o.unsqueeze(1), lse.unsqueeze(-1)
    tensors = (q, arguments.k, arguments.v, o, lse)
    num_splits = 1
    workspace: tuple[torch.Tensor | None, ...] = (None, None)
    if config.parts:
        num_splits = clusters_per_head(target.arch, arguments, config)
        workspace = make_workspace(arguments, config, num_splits)
    tables = (
        plain_table(arguments.kv_lens),
        plain_table(arguments.page_table),
        arguments.kernel_sinks(),
        *arguments.kernel_scales(),
        *workspace,
        plain_table(arguments.first_keys),
    )
    given = None if all(table is None for table in tables) else tables
    window = bounded(arguments.window_left)
    numbers = (*arguments.factors(), window, bounded(arguments.sink_tokens))
    return tuple(map(with_plain_strides, tensors)), given, numbers, num_splits


def make_workspace(
    arguments: Arguments, config: DecodeConfig, num_splits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What clusters that share a KV head leave for the last of them: fp32 [units, num_splits,
    words], int32 [units] of zeros, which every launch leaves behind as zeros; see
    `device/finish.py`."""
    units = arguments.batch * arguments.kv_heads * config.row_tiles * config.owner_ctas
    words = config.owned_columns * (config.head_dim + 2)
    partial = arguments.q.new_empty((units, num_splits, words), dtype=torch.float32)
    return partial, zeros_that_stay(units, arguments.q)


def _fake_results(arguments: Arguments) -> Results:
    """Shapes, dtypes and strides alone: sizes may be symbols, on which no check could decide."""
    arguments.check_devices()
    return empty_results(arguments)


DECODE = Operator("decode", Arguments, forward, _fake_results, results=2)
