"""The geometry of a launch, and what the driver refuses of it.

Sources: PTX ISA, "Performance-Tuning Directives" and "Cluster Dimension Directives"; CUDA C++
Programming Guide, "Thread Block Clusters". A directive of the kernel and a wish of the launch have
to agree; where the launch names no cluster, the directive does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from ptxemu.codegen.program import SMEM_RESERVED, Program
from ptxemu.errors import HardwareRefusal
from ptxemu.machine.gpu_limits import cluster_refusal, limits_of
from ptxemu.syntax.tree import Entry

Dim3 = tuple[int, int, int]
MAX_THREADS = 1024


@dataclass(frozen=True)
class Shape:
    """Launch geometry.

    smem_bytes: dynamic shared memory. non_portable: the kernel may have clusters of more than 8
    CTAs. explicit: whether the launch or a directive of the kernel names the cluster; one of
    (1, 1, 1) counts, as on an H200.
    """

    grid: Dim3
    block: Dim3
    cluster: Dim3
    smem_bytes: int
    non_portable: bool = False
    explicit: bool = False

    def check(self, program: Program) -> None:
        """Refuse what the driver would refuse, naming value and limit."""
        for name in ("grid", "block", "cluster"):
            dims = getattr(self, name)
            if len(dims) != 3 or any(d < 1 for d in dims):
                raise HardwareRefusal(f"{name}={dims}; every dimension must be >= 1")
        _check_block(self.block, program.entry.directives)
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            raise HardwareRefusal(f"grid={self.grid} is not a multiple of cluster={self.cluster}")
        target = program.entry.target
        if refusal := cluster_refusal(prod(self.cluster), target, self.non_portable):
            raise HardwareRefusal(refusal)
        most = limits_of(target).smem_of_cta
        if (used := self.smem_used(program)) > most:
            raise HardwareRefusal(f"{used} bytes of shared memory; at most {most}")

    def smem_used(self, program: Program) -> int:
        """Bytes of shared memory of a CTA, without the system's share."""
        return program.layout.smem_static - SMEM_RESERVED + self.smem_bytes


def _check_block(block: Dim3, directives: Mapping[str, tuple[int, ...]]) -> None:
    threads = prod(block)
    if threads > MAX_THREADS:
        raise HardwareRefusal(f"block={block} has {threads} threads; at most {MAX_THREADS}")
    required = directives.get("reqntid")
    if required and padded(required) != block:
        raise HardwareRefusal(f"block={block}; the kernel requires {padded(required)} (.reqntid)")
    limit = directives.get("maxntid")
    if limit and threads > prod(limit):
        raise HardwareRefusal(f"block={block}; the kernel allows {padded(limit)} (.maxntid)")


def cluster_of(entry: Entry, given: Dim3 | None) -> tuple[Dim3, bool]:
    """Return the CTAs of a cluster in a launch that names `given`, and whether anybody named them.

    None and (0, 0, 0) name no cluster, the latter as in a launch attribute of the driver. Raises
    HardwareRefusal where the directives of the kernel do not allow that.
    """
    given = None if given == (0, 0, 0) else given
    directives = entry.directives
    required = directives.get("reqnctapercluster")
    named = given or (padded(required) if required else None)
    if required and named != padded(required):
        raise HardwareRefusal(
            f"cluster={given}; kernel {entry.name} requires {padded(required)} "
            "(.reqnctapercluster): launch it with the same, or without a cluster"
        )
    if "explicitcluster" in directives and named is None:
        raise HardwareRefusal(
            f"a launch of kernel {entry.name} without a cluster, which it requires "
            "(.explicitcluster): name one, (1, 1, 1) for a single CTA"
        )
    cluster = named or (1, 1, 1)
    most = directives.get("maxclusterrank")
    if most and prod(cluster) > most[0]:
        raise HardwareRefusal(
            f"cluster={cluster} has {prod(cluster)} CTAs; kernel {entry.name} allows "
            f"{most[0]} (.maxclusterrank)"
        )
    return cluster, named is not None


def padded(dims: tuple[int, ...]) -> Dim3:
    x, y, z = (*dims, *(1,) * (3 - len(dims)))
    return x, y, z
