"""Attention forward kernels: `attention`, and `merge` for what was computed over parts of the keys.

`AttentionConfig` is what a kernel is compiled for: the arguments decide most of its fields, the
tunable ones may be chosen. `trace_mask_mod` and `trace_score_mod` trace functions of positions, and
`BlockLists` are lists of key blocks, see docs/masks.md. `AttentionOptions` are the keyword
arguments of `attention`, for type checkers. README.md has examples, the limits, and the order in
which to read.
"""

from typing import TYPE_CHECKING

from kernelkit.call.exports import exports

if TYPE_CHECKING:
    from fmha.api import AttentionOptions, attention, attention_plan
    from fmha.blocks import BlockLists, block_lists
    from fmha.config import AttentionConfig
    from fmha.mods import Mod, trace_mask_mod, trace_score_mod
    from fmha.warm import warmup
    from kernelkit.merge.api import merge

__all__ = [
    "AttentionConfig",
    "AttentionOptions",
    "BlockLists",
    "Mod",
    "attention",
    "attention_plan",
    "block_lists",
    "merge",
    "trace_mask_mod",
    "trace_score_mod",
    "warmup",
]

__version__: str
exports(__name__, {
    "fmha.api": "AttentionOptions attention attention_plan",
    "fmha.blocks": "BlockLists block_lists",
    "fmha.config": "AttentionConfig",
    "fmha.mods": "Mod trace_mask_mod trace_score_mod",
    "fmha.warm": "warmup",
    "kernelkit.merge.api": "merge",
})  # fmt: skip
