"""Attention forward kernels: `attention`, and `merge` for what was computed over parts of the keys.

`AttentionConfig` is what a kernel is compiled for; its tunable fields may be chosen.
"""

from fmha.api import attention
from fmha.config import AttentionConfig
from kernelkit.merge_op import merge

__all__ = ["AttentionConfig", "attention", "merge"]
