"""What an attention problem is compiled for: what its arguments say, and what suits its sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from fmha.arguments import Arguments, entry_lengths
from fmha.config import TUNABLE, AttentionConfig
from fmha.layout import TILE_M
from fmha.plan import make_plan
from kernelkit import hw
from kernelkit.tensors import DTYPE_NAMES


def choose_config(arguments: Arguments) -> AttentionConfig:
    """What to compile; not checked yet."""
    sizes = Sizes(arguments.batch, longest_queries(arguments))
    return config_for(arguments, plain_config(arguments), sizes)


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


def plain_config(arguments: Arguments) -> AttentionConfig:
    """What the arguments say, sizes aside. Defaults stay defaults: a config is a key of the
    cache."""
    head_dim, v_dim = arguments.q.shape[-1], arguments.v.shape[-1]
    default = arguments.q.dtype if arguments.normalize else torch.float32
    return AttentionConfig(
        head_dim=head_dim,
        v_head_dim=0 if v_dim == head_dim else v_dim,
        dtype=DTYPE_NAMES[arguments.q.dtype],
        out_dtype="" if arguments.o_dtype == default else DTYPE_NAMES[arguments.o_dtype],
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
        make_plan(config)
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


def _pack_heads(arguments: Arguments, rows: int) -> bool:
    """Whether one tile holds all heads of a group: as wished, else where it makes fewer tiles."""
    if arguments.pack_heads is not None:
        return arguments.pack_heads
    group = arguments.q_heads // arguments.kv_heads
    packed = arguments.kv_heads * -(-rows * group // TILE_M)
    return group > 1 and packed < arguments.q_heads * -(-rows // TILE_M)
