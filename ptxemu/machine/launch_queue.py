"""Which clusters of a grid are executed, in which order, and how many are there at first.

Of a kernel whose clusters take over the work of others (clusterlaunchcontrol), those that are there
first decide what each of them does. A run that is recorded for a model of time has as many as the
GPU has places, and each is given as much of the rest as the others: nobody knows here who would ask
first. Where some are executed, they are given what they would have had among all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ptxemu.machine.gpu_limits import RESERVED, limits_of
from ptxemu.options import Options

TRY_CANCEL = "clusterlaunchcontrol.try_cancel"
_RESIDENT = 2


def ctas_of_sm(smem_bytes: int, warps: int, target: str = "") -> int:
    """That fit on one at a time, by their shared memory without the system's share and warps."""
    limits = limits_of(target)
    room = limits.smem_of_sm // (smem_bytes + RESERVED)
    return max(min(room, limits.warps_of_sm // warps, limits.ctas_of_sm), 1)


@dataclass(frozen=True)
class LaunchQueue:
    """order: numbers of clusters. resident: so many are there at first. places: clusters of the
    whole grid that are launched, 0 where none is to take over the work of others in equal shares.
    shares: what each of the resident ones takes over then."""

    order: Sequence[int]
    resident: int
    places: int = 0
    shares: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Options, total: int, places: int | None) -> LaunchQueue:
        """Of a grid of so many clusters, of which so many fit on the GPU; None: they take over
        nothing, or it does not matter who does."""
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
