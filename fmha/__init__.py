"""Attention forward kernels: `attention`, and `merge` for what was computed over parts of the keys.

`AttentionConfig` is what a kernel is compiled for: the arguments decide most of its fields, the
tunable ones may be chosen. `AttentionOptions` are the keyword arguments of `attention`, for type
checkers. README.md has examples, the limits, and the order in which to read.
"""

from typing import TYPE_CHECKING

from kernelkit.call.exports import exports

if TYPE_CHECKING:
    from fmha.api import AttentionOptions, attention, attention_plan
    from fmha.config import AttentionConfig
    from fmha.warm import warmup
    from kernelkit.merge.api import merge

__all__ = [
    "AttentionConfig",
    "AttentionOptions",
    "attention",
    "attention_plan",
    "merge",
    "warmup",
]

__version__: str
exports(__name__, {
    "fmha.api": "AttentionOptions attention attention_plan",
    "fmha.config": "AttentionConfig",
    "fmha.warm": "warmup",
    "kernelkit.merge.api": "merge",
})  # fmt: skip
