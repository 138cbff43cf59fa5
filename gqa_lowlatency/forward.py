"""`forward`: choose the config, decide empty problems, compile once, launch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from gqa_lowlatency.arguments import KV_NAMES, Arguments
from gqa_lowlatency.config import TUNABLE, DecodeConfig
from gqa_lowlatency.plan import (
    CoScheduled,
    choose_cluster,
    choose_columns,
    choose_parts,
    choose_warps,
    most_sms,
    one_to_an_sm,
)
from kernelkit import hw
from kernelkit.arch import written_for
from kernelkit.compile import compile_once
from kernelkit.kernel import CompiledKernel
from kernelkit.launch import Target, choose_target, clusters_at_once, launch
from kernelkit.log2 import exponent_factors
from kernelkit.tensors import DTYPE_NAMES, require_tma, with_plain_strides, without_broadcast

KERNELS = {"sm_100a": "gqa_lowlatency.sm100.kernel", "sm_90a": "gqa_lowlatency.sm90.kernel"}
ARCHS = tuple(KERNELS)
UNBOUNDED = (1 << 30) - 1  # as good as any larger window: positions stay below 2 ** 29

Results = tuple[torch.Tensor, torch.Tensor]


def forward(arguments: Arguments) -> Results:
    """(O, LSE); one launch or none.

    Nothing here reads a tensor on a GPU, so a CUDA graph can capture it.
    """
    target, config = prepare(arguments)
    results = empty_results(arguments)
    if not has_keys(arguments):
        return without_keys(arguments, results)
    compiled = compile_for(config, target.arch)
    given = kernel_arguments(arguments, results, config, target)
    launch(compiled, given, target, arguments.q.device)
    return results


def prepare(arguments: Arguments) -> tuple[Target, DecodeConfig]:
    """Every check; where to run, and what to compile."""
    arguments.check()
    target = choose_target(arguments.q.device, arguments.backend, arguments.arch, ARCHS)
    return target, checked_config(arguments, target)


def checked_config(arguments: Arguments, target: Target) -> DecodeConfig:
    """What to compile for arguments that are checked; every check that needs it."""
    config = choose_config(arguments, target)
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
        from gqa_lowlatency.sm100.plan import make_plan

        make_plan(config)
        return
    from gqa_lowlatency.sm90.plan import Plan90

    Plan90(config).check()


def compile_for(config: DecodeConfig, arch: str) -> CompiledKernel:
    """The kernel, found or compiled, once per process."""
    return compile_once(config, arch, KERNELS[written_for(arch)])


def choose_config(arguments: Arguments, target: Target) -> DecodeConfig:
    """What to compile; not checked yet. Defaults stay defaults: a config is a key of the cache."""
    wished = wished_config(arguments, target.arch)
    limits = co_scheduled_on(target, replace(wished, cluster=1), arguments.q.device)
    return config_for(wished, target.arch, _load(arguments), limits)


def wished_config(arguments: Arguments, arch: str) -> DecodeConfig:
    """What the arguments say, sizes aside; cluster 0 leaves the choice to `config_for`."""
    tunable = {name: getattr(arguments, name) for name in TUNABLE}
    if not tunable["max_columns"]:
        tunable["max_columns"] = _columns(written_for(arch), arguments)
    return replace(_plain_config(arguments), **tunable)


@dataclass(frozen=True)
class Load:
    """Sizes that a config depends on. keys: that the tokens of an entry see at most. heads: KV
    heads of all entries. parts: clusters that share a KV head, 0 chooses."""

    keys: int
    heads: int
    batch_invariant: bool = False
    parts: int = 0


def config_for(
    wished: DecodeConfig, arch: str, load: Load, co_scheduled: CoScheduled | None = None
) -> DecodeConfig:
    """What to compile for `wished` under a load; co_scheduled: see `plan.choose_cluster`."""
    chosen = choose(wished, wished.row_tiles, arch, load, co_scheduled)
    return replace(wished, **vars(chosen)) if chosen else replace(wished, parts=load.parts > 1)


@dataclass(frozen=True)
class Choice:
    """Fields of a config that follow from the load."""

    cluster: int
    parts: bool
    warps: int
    alone: bool
    early: bool


def choose(
    wished: DecodeConfig,
    row_tiles: int,
    arch: str,
    load: Load,
    co_scheduled: CoScheduled | None = None,
) -> Choice | None:
    """None where a cluster is wished for, and with it the rest. row_tiles: those of `wished`."""
    if wished.cluster:
        return None
    arch, clusters = written_for(arch), load.heads * row_tiles
    cluster = choose_cluster(
        arch,
        load.keys,
        clusters,
        batch_invariant=load.batch_invariant,
        co_scheduled=co_scheduled,
    )
    parts = _parts(arch, load, clusters, cluster)
    return _for_shares(wished, arch, load, (row_tiles, cluster, parts))


def _load(arguments: Arguments) -> Load:
    heads = arguments.batch * arguments.kv_heads
    return Load(arguments.most_seen, heads, arguments.batch_invariant, arguments.parts)


def clusters_per_head(arch: str, arguments: Arguments, config: DecodeConfig) -> int:
    """Clusters that share a KV head."""
    load = _load(arguments)
    return _parts(arch, load, load.heads * config.row_tiles, config.cluster)


def _parts(arch: str, load: Load, clusters: int, cluster: int) -> int:
    """As wished, or chosen."""
    fixed = {"batch_invariant": load.batch_invariant}
    return load.parts or choose_parts(arch, load.keys, max(clusters, 1), cluster, **fixed)


def _for_shares(
    wished: DecodeConfig, arch: str, load: Load, shares: tuple[int, int, int]
) -> Choice:
    """What suits the CTAs of a grid and the keys of each: how many stand on an SM, the warps of the
    Hopper kernel, when the next grid begins. What is wished for stays.

    shares: tiles of rows, CTAs of a cluster, clusters of a KV head.
    """
    row_tiles, cluster, parts = shares
    sharing = cluster * parts
    ctas = (1 if load.batch_invariant else load.heads) * row_tiles * sharing
    keys = load.keys // sharing
    warps = wished.warps
    if not warps and not wished.pdl:
        warps = choose_warps(arch, keys, ctas, wished.columns * wished.head_dim)
    early = wished.kv_ready and arch == "sm_90a" and most_sms(arch, ctas)
    alone = one_to_an_sm(arch, keys, ctas, pdl=wished.pdl)
    return Choice(cluster, parts > 1, warps, alone, early)


def _columns(arch: str, arguments: Arguments) -> int:
    """The limit of rows of a CTA, 0 where it changes nothing."""
    try:
        columns = choose_columns(arch, arguments.q.shape[-1], arguments.warps)
    except KeyError:  # a head_dim that config.check_values() will refuse
        return 0
    return columns if arguments.group * arguments.q_tokens > columns else 0


def _plain_config(arguments: Arguments) -> DecodeConfig:
    """What the arguments say."""
    q_dtype, out_dtype = DTYPE_NAMES[arguments.q.dtype], DTYPE_NAMES[arguments.o_dtype]
    return DecodeConfig(
        head_dim=arguments.q.shape[-1],
        group=arguments.group,
        q_tokens=arguments.q_tokens,
        dtype=q_dtype,
        kv_dtype=KV_NAMES[arguments.k.dtype] if arguments.is_fp8 else "",
        k_scale=arguments.k_scale is not None,
        v_scale=arguments.v_scale is not None,
        out_dtype="" if out_dtype == q_dtype else out_dtype,
        causal=arguments.causal and arguments.q_tokens > 1,
        left=arguments.window is not None,
        sink_tokens=arguments.sink_tokens > 0,
        softcap=arguments.softcap > 0,
        sinks=arguments.sinks is not None,
        lens=arguments.seq_lens is not None,
        page_size=0 if arguments.page_table is None else arguments.k.shape[1],
        pdl=arguments.pdl,
        kv_ready=arguments.kv_ready_before_pdl,
    )


def co_scheduled_on(
    target: Target, config: DecodeConfig, device: torch.device
) -> CoScheduled | None:
    """What the device says; the emulator has no limit."""
    if target.backend != "cuda":
        return None
    return lambda width: (
        clusters_at_once(device, width) * _residents(replace(config, cluster=width), target.arch)
    )


def _residents(config: DecodeConfig, arch: str) -> int:
    """CTAs that shared memory lets stand on an SM."""
    if arch != "sm_90a":
        return 1
    from gqa_lowlatency.sm90.plan import Plan90

    needed = Plan90(config).smem_bytes + hw.SMEM_RESERVED_BYTES
    return max(1, hw.SMEM_BYTES_PER_SM // needed)


def empty_results(arguments: Arguments) -> Results:
    """O and LSE, allocated and not yet written."""
    q = arguments.q
    o = q.new_empty(q.shape, dtype=arguments.o_dtype)
    batch, *tokens, heads, _ = q.shape
    return o, q.new_empty((batch, heads, *tokens), dtype=torch.float32)


def has_keys(arguments: Arguments) -> bool:
    """Whether there is anything to launch for."""
    return arguments.batch > 0 and arguments.k.numel() > 0 and arguments.capacity > 0


def without_keys(arguments: Arguments, results: Results) -> Results:
    """O = 0, LSE = -inf; a sink, which needs no key, is then all of the LSE."""
    o, lse = results
    lse.fill_(-math.inf)
    if arguments.sinks is not None:
        lse.copy_(arguments.sinks.view(-1, *(1,) * (lse.ndim - 2)).expand_as(lse))
    return o.zero_(), lse


def kernel_arguments(
    arguments: Arguments, results: Results, config: DecodeConfig, target: Target
) -> tuple:
    """(tensors, tables, numbers, parts) as the kernels of all architectures take them; tables is
    None where all are: a tuple of nothing but None is no argument for the DSL."""
    q, (o, lse) = arguments.q, results
    if q.ndim == 3:
        q, o, lse = q.unsqueeze(1), o.unsqueeze(1), lse.unsqueeze(-1)
    tensors = (q, arguments.k, arguments.v, o, lse)
    parts, workspace = 1, (None, None)
    if config.parts:
        arch = written_for(target.arch)
        parts = clusters_per_head(arch, arguments, config)
        workspace = make_workspace(arguments, config, parts)
    tables = (
        *(getattr(arguments, name) for name in ("seq_lens", "page_table", "sinks")),
        *(_per_head(arguments, name) for name in ("k_scale", "v_scale")),
        *workspace,
    )
    plain = tuple(
        None if table is None else with_plain_strides(without_broadcast(table)) for table in tables
    )
    given = None if all(table is None for table in plain) else plain
    return tuple(map(with_plain_strides, tensors)), given, _numbers(arguments), parts


def make_workspace(
    arguments: Arguments, config: DecodeConfig, parts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What clusters that share a KV head leave for the last of them: fp32 [units, parts, words],
    int32 [units] of zeros, which every launch leaves behind as zeros; see `device/finish.py`."""
    units = arguments.batch * arguments.kv_heads * config.row_tiles * config.owner_ctas
    words = config.owned_columns * (config.head_dim + 2)
    partial = arguments.q.new_empty((units, parts, words), dtype=torch.float32)
    return partial, arguments.q.new_zeros(units, dtype=torch.int32)


def _per_head(arguments: Arguments, name: str) -> torch.Tensor | None:
    """A scale as the kernel reads it, one for each head; a copy where it is laid out otherwise."""
    scale, heads = getattr(arguments, name), arguments.kv_heads
    if scale is None:
        return None
    return scale.contiguous() if scale.shape == (heads,) else scale.reshape(1).repeat(heads)


def _numbers(arguments: Arguments) -> tuple[float, float, int, int]:
    """scale_log2, squash_log2, window, sink_tokens."""
    factors = exponent_factors(arguments.softmax_scale, arguments.softcap)
    window = UNBOUNDED if arguments.window is None else min(arguments.window, UNBOUNDED)
    return *factors, window, min(arguments.sink_tokens, UNBOUNDED)
