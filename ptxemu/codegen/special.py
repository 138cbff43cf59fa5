"""Special registers: PTX ISA "Special Registers". name -> (type, uniform?, expression,
constant?).
"""

from __future__ import annotations

from typing import Any

_AXES = {"x": 0, "y": 1, "z": 2}


def _axes(name: str, text: str, uniform: bool = True) -> dict[str, Any]:
    return {f"%{name}.{axis}": ("u32", uniform, text.format(k), True) for axis, k in _AXES.items()}


SPECIALS: dict[str, tuple[str, bool, str, bool]] = {
    **_axes("tid", "w.tid[{}]", uniform=False),
    **_axes("ntid", "w.machine.shape.block[{}]"),
    **_axes("ctaid", "w.cta.ctaid[{}]"),
    **_axes("nctaid", "w.machine.shape.grid[{}]"),
    **_axes("cluster_ctaid", "w.cta.ctaid[{0}] % w.machine.shape.cluster[{0}]"),
    **_axes("cluster_nctaid", "w.machine.shape.cluster[{}]"),
    **_axes("clusterid", "w.cta.ctaid[{0}] // w.machine.shape.cluster[{0}]"),
    **_axes("nclusterid", "w.machine.cluster_grid[{}]"),
    "%laneid": ("u32", False, "LANES", True),
    "%warpid": ("u32", True, "w.index", True),
    "%nwarpid": ("u32", True, "len(w.cta.warps)", True),
    "%smid": ("u32", True, "w.machine.sm_of(w.cta)", True),
    "%nsmid": ("u32", True, "w.machine.sm_count", True),
    "%gridid": ("u64", True, "0", True),
    "%cluster_ctarank": ("u32", True, "w.cta.rank", True),
    "%cluster_nctarank": ("u32", True, "len(w.cluster.ctas)", True),
    "%is_explicit_cluster": ("pred", True, "w.machine.shape.explicit", True),
    "%dynamic_smem_size": ("u32", True, "w.machine.shape.smem_bytes", True),
    "%total_smem_size": ("u32", True, "w.cta.smem_size", True),
    "%clock": ("u32", True, "clock(w) & 0xffffffff", False),
    "%clock_hi": ("u32", True, "clock(w) >> 32", False),
    "%clock64": ("u64", True, "clock(w)", False),
    "%globaltimer": ("u64", True, "clock(w)", False),
    "%globaltimer_lo": ("u32", True, "clock(w) & 0xffffffff", False),
    "%globaltimer_hi": ("u32", True, "clock(w) >> 32", False),
    "%lanemask_eq": ("u32", False, "BITS", True),
    "%lanemask_lt": ("u32", False, "BITS - U32(1)", True),
    "%lanemask_le": ("u32", False, "(BITS - U32(1)) | BITS", True),
    "%lanemask_gt": ("u32", False, "~((BITS - U32(1)) | BITS)", True),
    "%lanemask_ge": ("u32", False, "~(BITS - U32(1))", True),
    "%smem_base": ("u32", True, "w.smem_base", True),  # not PTX: of this CTA's shared symbols
}
