"""Low-latency decode attention: `decode`, one KV head per cluster, and `merge` for parts of keys.

`decode_plan` checks a problem once and launches it many times. `DecodeConfig` is what a kernel is
compiled for. `DecodeOptions` are the keyword arguments of `decode`, for type checkers. README.md
has examples, the limits, and the order in which to read.
"""

from typing import TYPE_CHECKING

from kernelkit.call.exports import exports

if TYPE_CHECKING:
    from gqa_lowlatency.api import DecodeOptions, decode, decode_plan
    from gqa_lowlatency.config import DecodeConfig
    from gqa_lowlatency.warm import warmup
    from kernelkit.merge.api import merge

__all__ = ["DecodeConfig", "DecodeOptions", "decode", "decode_plan", "merge", "warmup"]

__version__: str
exports(__name__, {
    "gqa_lowlatency.api": "DecodeOptions decode decode_plan",
    "gqa_lowlatency.config": "DecodeConfig",
    "gqa_lowlatency.warm": "warmup",
    "kernelkit.merge.api": "merge",
})  # fmt: skip
