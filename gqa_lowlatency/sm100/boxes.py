"""The box of K and V that TMA moves at a time, and how it lies in the ring (device code).

A piece is made of panels: all its keys, 128 bytes of each. K is the K-major A operand of S, V the
MN-major A operand of O^T, and both read this one arrangement.
"""

from gqa_lowlatency.shared.signature import TYPES
from gqa_lowlatency.sm100.plan import Plan100
from kernelkit.device.boxes import Box


def kv_box(plan: Plan100) -> Box:
    """Of K and V: the keys of a tile, or those of them that one page holds."""
    return Box(plan.box_rows, plan.panel, TYPES[plan.config.keys_dtype])
