"""Attention forward kernels. `attention` is the API, `AttentionConfig` what they are tuned by."""

from fmha.api import attention
from fmha.config import AttentionConfig

__all__ = ["AttentionConfig", "attention"]
