"""What flags of benchmarks may be: masks, steps of a layer, lengths."""

from __future__ import annotations

# of fmha -> fields of its config
MASKS = {
    "full": {},
    "causal": {"right": True},
    "window": {"right": True, "left": True},
    "window and sink tokens": {"right": True, "left": True, "sink_tokens": True},
    "causal softcap": {"right": True, "softcap": True},
}
MOE_STEPS = ("quantise", "route", "permutation", "combine")
KVCACHE_STEPS = ("append", "gather", "copy", "checksum", "host")
DSV4_STEPS = ("compress", "query", "score", "topk")
MOE_HIDDEN = 7168


def length(text: str) -> int:
    """Argument type: '8192' or '8k'."""
    kilo = text.lower().endswith("k")
    value = int(text[:-1] if kilo else text)
    return value * 1024 if kilo else value
