"""`forward`: choose the config, decide empty problems, compile once, launch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

from fmha.arguments import TABLES, Arguments, entry_lengths
from fmha.compile import compile_attention
from fmha.config import TUNABLE, AttentionConfig
from fmha.layout import TILE_M
from kernelkit import hw
from kernelkit.launch import Target, choose_target, launch
from kernelkit.log2 import exponent_factors
from kernelkit.tensors import DTYPE_NAMES, require_tma, with_plain_strides, without_broadcast

ARCHS = ("sm_100a",)
UNBOUNDED = (1 << 30) - 1  # as good as any larger window: positions stay below 2 ** 29

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def forward(arguments: Arguments) -> Results:
    """(O, LSE, row_max), row_max empty where O is normalised; one launch or none.

    Nothing here reads a tensor on a GPU, so a CUDA graph can capture it.
    """
    arguments.check()
    config = choose_config(arguments)
    check_config(config)
    for name in ("q", "k", "v"):
        require_tma(name, getattr(arguments, name))
    target = choose_target(arguments.q.device, arguments.backend, arguments.arch, ARCHS)
    results = empty_results(arguments)
    if not (_has_queries(arguments) and arguments.k.numel() and arguments.key_capacity):
        return _without_keys(arguments, results)
    _launch(arguments, config, target, results)
    return results


@cache
def check_config(config: AttentionConfig) -> None:
    """`config.check()`, whose arithmetic is done once per config."""
    config.check()


def empty_results(arguments: Arguments) -> Results:
    """O, LSE and row_max, allocated and not yet written."""
    q = arguments.q
    *batch, queries, heads, _ = q.shape
    o = q.new_empty((*q.shape[:-1], arguments.v.shape[-1]), dtype=arguments.o_dtype)
    lse = q.new_empty((*batch, heads, queries), dtype=torch.float32)
    row_max = q.new_empty(0 if arguments.normalize else lse.shape, dtype=torch.float32)
    return o, lse, row_max


def choose_config(arguments: Arguments) -> AttentionConfig:
    """What to compile; not checked yet."""
    sizes = Sizes(arguments.batch, longest_queries(arguments))
    return config_for(arguments, _plain_config(arguments), sizes)


@dataclass(frozen=True)
class Sizes:
    """What a config depends on besides what the arguments say. queries: of the longest entry."""

    batch: int
    queries: int


def config_for(arguments: Arguments, plain: AttentionConfig, sizes: Sizes) -> AttentionConfig:
    """What to compile for arguments of these sizes.

    Where no schedule is wished for: ping-pong, if it fits and its CTAs, half as many, fill a B200.
    """
    config = replace(plain, pack_heads=_pack_heads(arguments, sizes.queries))
    if config.schedule:
        return config
    rows, heads = sizes.queries, arguments.q_heads
    if config.pack_heads:
        rows, heads = rows * heads // arguments.kv_heads, arguments.kv_heads
    blocks = sizes.batch * heads * -(-rows // (2 * TILE_M))
    pingpong = replace(config, schedule="pingpong")
    if rows <= TILE_M or blocks < hw.SMS or not _fits(pingpong):
        return config
    return pingpong


def _plain_config(arguments: Arguments) -> AttentionConfig:
    """What the arguments say, sizes aside. Defaults stay defaults: a config is a key of the
    cache."""
    head_dim, v_dim = arguments.q.shape[-1], arguments.v.shape[-1]
    is_default = replace(arguments, out_dtype=None).o_dtype == arguments.o_dtype
    return AttentionConfig(
        head_dim=head_dim,
        v_head_dim=0 if v_dim == head_dim else v_dim,
        dtype=DTYPE_NAMES[arguments.q.dtype],
        out_dtype="" if is_default else DTYPE_NAMES[arguments.o_dtype],
        right=arguments.causal or arguments.window_right is not None,
        left=arguments.window_left is not None,
        sink_tokens=arguments.sink_tokens > 0,
        softcap=arguments.softcap > 0,
        sinks=arguments.sinks is not None,
        normalize=arguments.normalize,
        kv_lens=arguments.kv_lens is not None,
        q_offset=arguments.q_offset is not None,
        varlen_q=arguments.cu_seqlens_q is not None,
        varlen_k=arguments.cu_seqlens_k is not None,
        page_size=0 if arguments.page_table is None else arguments.k.shape[1],
        rope_dim=0 if arguments.cos is None else 2 * arguments.cos.shape[1],
        pdl=arguments.pdl,
        **{name: getattr(arguments, name) for name in TUNABLE},
    )


@cache
def _fits(config: AttentionConfig) -> bool:
    try:
        config.check()
    except (ValueError, NotImplementedError):
        return False
    return True


def longest_queries(arguments: Arguments) -> int:
    """Queries of the longest entry, or an upper bound of it where only the GPU knows."""
    if arguments.cu_seqlens_q is None:
        return arguments.queries
    if arguments.max_seqlen_q is not None:
        return min(arguments.max_seqlen_q, arguments.queries)
    if not arguments.on_host:
        return arguments.queries
    lengths = entry_lengths("cu_seqlens_q", arguments.cu_seqlens_q, arguments.queries)
    return max(lengths, default=0)


def _has_queries(arguments: Arguments) -> bool:
    return arguments.batch > 0 and longest_queries(arguments) > 0


def _pack_heads(arguments: Arguments, rows: int) -> bool:
    """Whether one tile holds all heads of a group: as wished, else where it makes fewer tiles."""
    if arguments.pack_heads is not None:
        return arguments.pack_heads
    group = arguments.q_heads // arguments.kv_heads
    packed = arguments.kv_heads * -(-rows * group // TILE_M)
    return group > 1 and packed < arguments.q_heads * -(-rows // TILE_M)


def _without_keys(arguments: Arguments, results: Results) -> Results:
    """O = 0, LSE = row_max = -inf; a sink, which needs no key, is then all of the LSE."""
    o, lse, row_max = results
    lse.fill_(-math.inf)
    if arguments.sinks is not None:
        lse.copy_(arguments.sinks[:, None].expand_as(lse))
    return o.zero_(), lse, row_max.fill_(-math.inf)


def _launch(
    arguments: Arguments, config: AttentionConfig, target: Target, results: Results
) -> None:
    o, lse, row_max = results
    q, k, v = arguments.q, arguments.k, arguments.v
    if arguments.cu_seqlens_q is not None:
        q, o, lse, row_max = (tensor.unsqueeze(0) for tensor in (q, o, lse, row_max))
    if arguments.cu_seqlens_k is not None:
        k, v = k.unsqueeze(0), v.unsqueeze(0)
    tensors = tuple(with_plain_strides(tensor) for tensor in (q, k, v, o))
    arrays = (lse, None if arguments.normalize else row_max, *_tables(arguments))
    compiled = compile_attention(config, target.arch)
    launch(compiled, (tensors, arrays, _numbers(arguments)), target, q.device)


def _tables(arguments: Arguments) -> tuple[torch.Tensor | None, ...]:
    """In the order in which the kernel takes them."""
    present = arguments.present_tables()
    return tuple(
        with_plain_strides(without_broadcast(present[name])) if name in present else None
        for name in TABLES
    )


def _numbers(arguments: Arguments) -> tuple[float, float, int, int, int, int]:
    """scale_log2, squash_log2, window_left, window_right, sink_tokens, max_q."""
    scale_log2, squash_log2 = exponent_factors(arguments.softmax_scale, arguments.softcap)
    left, right = (
        min(UNBOUNDED if size is None else size, UNBOUNDED)
        for size in (arguments.window_left, arguments.window_right)
    )
    right = 0 if arguments.causal else right
    sink_tokens = min(arguments.sink_tokens, UNBOUNDED)
    return scale_log2, squash_log2, left, right, sink_tokens, longest_queries(arguments)
