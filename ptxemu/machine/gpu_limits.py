"""What a GPU of a module's `.target` holds: shared memory, warps, CTAs, and if there are clusters.

Source: CUDA C++ Programming Guide 13, "Technical Specifications per Compute Capability", and
"Thread Block Clusters" (compute capability 9.0 and later). A module without a `.target`, or with
one that is not in the table, is taken for one of compute capability 10.0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

PORTABLE_CLUSTER = 8  # CTAs; of so many every GPU with clusters has some
MAX_CLUSTER = 16
RESERVED = 1 << 10  # bytes of shared memory, the system's share of each CTA


@dataclass(frozen=True)
class GpuLimits:
    """smem_of_sm: bytes, with the system's share of each CTA. clusters: of more than one CTA."""

    smem_of_sm: int
    warps_of_sm: int
    ctas_of_sm: int
    clusters: bool = True

    @property
    def smem_of_cta(self) -> int:
        """Bytes that a CTA may have, static and dynamic."""
        return self.smem_of_sm - RESERVED


_USUAL = GpuLimits(228 << 10, 64, 32)
_LIMITS = {
    80: GpuLimits(164 << 10, 64, 32, clusters=False),
    86: GpuLimits(100 << 10, 48, 16, clusters=False),
    87: GpuLimits(164 << 10, 48, 16, clusters=False),
    89: GpuLimits(100 << 10, 48, 24, clusters=False),
    120: GpuLimits(100 << 10, 48, 24),
    121: GpuLimits(100 << 10, 48, 24),
}
_NUMBER = re.compile(r"sm_(\d+)")
_TARGET = re.compile(r"^\s*\.target\s+(sm_\w+)", re.MULTILINE)


@cache
def limits_of(target: str) -> GpuLimits:
    """Of a `.target` such as 'sm_89'."""
    found = _NUMBER.match(target)
    return _LIMITS.get(int(found[1]), _USUAL) if found else _USUAL


def target_of(ptx: str) -> str:
    """The `.target` of a module's text, "" for none."""
    found = _TARGET.search(ptx)
    return found[1] if found else ""


def cluster_refusal(ctas: int, target: str, non_portable: bool) -> str:
    """Return why a launch with clusters of so many CTAs is refused; "" where it is not.

    Args:
        ctas: of a cluster.
        target: of the module.
        non_portable: whether the kernel may have more than is portable.
    """
    if ctas > 1 and not limits_of(target).clusters:
        return (
            f"a launch with clusters of {ctas} CTAs, and the module is of .target {target}; "
            "clusters need compute capability 9.0"
        )
    if ctas > MAX_CLUSTER:
        return f"a launch with clusters of {ctas} CTAs; at most {MAX_CLUSTER}"
    if ctas > PORTABLE_CLUSTER and not non_portable:
        return (
            f"a launch with clusters of {ctas} CTAs, of which {PORTABLE_CLUSTER} are portable; the "
            "host has to set cudaFuncAttributeNonPortableClusterSizeAllowed (in ptxemu.load: "
            "launch with non_portable=True)"
        )
    return ""
