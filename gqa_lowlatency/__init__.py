"""Low-latency decode attention: `decode`, one KV head per cluster, and `merge` for parts of keys.

`decode_plan` checks a problem once and launches it many times. `DecodeConfig` is what a kernel is
compiled for. README.md has examples, the limits, and the order in which to read.
"""

from gqa_lowlatency.api import decode, decode_plan
from gqa_lowlatency.config import DecodeConfig
from kernelkit.merge import merge

__all__ = ["DecodeConfig", "decode", "decode_plan", "merge"]
