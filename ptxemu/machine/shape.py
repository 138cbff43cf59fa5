"""The geometry of a launch: what a GPU holds, what the driver refuses, the order of clusters.

Sources: PTX ISA, "Performance-Tuning Directives" and "Cluster Dimension Directives"; CUDA C++
Programming Guide, "Thread Block Clusters". A directive of the kernel and a wish of the launch have
to agree; where the launch names no cluster, the directive does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod

from ptxemu.codegen.program import SMEM_RESERVED, Program
from ptxemu.errors import HardwareRefusal
from ptxemu.options import Options
from ptxemu.syntax.tree import Entry

# What a GPU of a module's `.target` holds: shared memory, warps, CTAs, and if there are clusters.
#
# Source: CUDA C++ Programming Guide 13, "Technical Specifications per Compute Capability", and
# "Thread Block Clusters" (compute capability 9.0 and later). A module without a `.target`, or with
# one that is not in the table, is taken for one of compute capability 10.0.

PORTABLE_CLUSTER = 8  # CTAs; of so many every GPU with clusters has some
MAX_CLUSTER = 16
RESERVED = 1 << 10  # bytes of shared memory, the system's share of each CTA


@dataclass(frozen=True)
class GpuLimits:
    """Limits of an SM.

    smem_of_sm: bytes, with the system's share of each CTA.
    warps_of_sm: resident warps.
    ctas_of_sm: resident CTAs.
    clusters: whether clusters of more than one CTA exist.
    """

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
    """Return the limits of a `.target` such as 'sm_89'."""
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


# Which clusters of a grid are executed, in which order, and how many are there at first.
#
# Of a kernel whose clusters take over the work of others (clusterlaunchcontrol), those that are
# there first decide what each of them does. A run that is recorded for a model of time has as many
# as the GPU has places, and each is given as much of the rest as the others: nobody knows here who
# would ask first. Where some are executed, they are given what they would have had among all.

TRY_CANCEL = "clusterlaunchcontrol.try_cancel"
_RESIDENT = 2


def ctas_of_sm(smem_bytes: int, warps: int, target: str = "") -> int:
    """Return the number of CTAs that fit on an SM at a time, at least 1.

    Args:
        smem_bytes: shared memory of a CTA without the system's share.
        warps: warps of a CTA.
        target: the `.target`.
    """
    limits = limits_of(target)
    room = limits.smem_of_sm // (smem_bytes + RESERVED)
    return max(min(room, limits.warps_of_sm // warps, limits.ctas_of_sm), 1)


@dataclass(frozen=True)
class LaunchQueue:
    """Clusters to launch, in order.

    order: numbers of clusters.
    resident: number of clusters that are resident at first.
    places: clusters of the whole grid that are launched and take over the work of others in
        equal shares; 0 if none takes over.
    shares: clusters that each resident one takes over.
    """

    order: Sequence[int]
    resident: int
    places: int = 0
    shares: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Options, total: int, places: int | None) -> LaunchQueue:
        """Return the queue of a grid of `total` clusters, of which `places` fit on the GPU.

        With `places` None, clusters take over no work, or it does not matter which cluster does.
        """
        if places is None:
            return cls(options.clusters_of(total), options.resident or _RESIDENT)
        places = min(options.resident or places, total)
        numbered = isinstance(options.clusters, Sequence)
        chosen = options.clusters_of(total if numbered or options.clusters is None else places)
        first = chosen[:places]
        more = (total - places) * len(first) // places
        rest = [places + number * (total - places) // more for number in range(more)]
        rest = [number for number in rest if number not in {*first}]
        shares = {cluster: rest[at :: len(first)] for at, cluster in enumerate(first)}
        return cls([*first, *rest], len(first), places, shares)


Dim3 = tuple[int, int, int]
MAX_THREADS = 1024


@dataclass(frozen=True)
class Shape:
    """Launch geometry.

    smem_bytes: dynamic shared memory.
    non_portable: whether the kernel may have clusters of more than 8 CTAs.
    explicit: whether the launch or a directive of the kernel names the cluster. (1, 1, 1) counts
        as named, as on an H200.
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


def register_count_known(directives: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the text fixes the registers of a thread at entry. Else ptxas 12.9 and 13.0 drop each
    setmaxnreg (C7508), with an info line that a JIT does not show."""
    threads = {"maxntid", "reqntid"} & directives.keys()
    return "maxnreg" in directives or bool(threads and "minnctapersm" in directives)


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
