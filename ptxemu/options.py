"""Options of an emulated launch: one frozen dataclass, whose fields apply to any kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # numpy comes with it, and `--help` does without
    from ptxemu.request import Inspect

POLICIES = ("round-robin", "random", "adversarial")
FAST, ALIGNED = ACCUMULATIONS = ("fast", "aligned")


@dataclass(frozen=True)
class Options:
    """Schedule, visibility and limits of an emulated launch.

    policy      'round-robin': warps in turn, asynchronous work done at issue (fastest).
                'random': warps and asynchronous completions in seeded random order.
                'adversarial': asynchronous work as late as the memory model allows; TMEM reads at
                the last allowed moment; generic-proxy SMEM writes unseen by the async proxy until a
                proxy fence.
    seed        of the random and adversarial policies; adversarial delays TMA most with an even
                seed and the tensor core most with an odd one.
    limit       seconds: a launch estimated above it raises LimitExceeded; None: no limit.
    trace       record a timeline (`LaunchReport.trace`).
    record      what each warp does, for a model of time (`LaunchReport.recording`).
    clusters    numbers of those that are executed, in this order; or how many of the grid, spread
                evenly, and of four or more one beside the first; None: all. The others write
                nothing, and whoever waits for one of them waits in vain. It is for launches that
                are recorded and too large to be executed. A function is asked for the numbers, of
                each launch anew, and told how many there are.
    resident    clusters resident at first; more join when all resident ones are stuck. None: 2, or
                as many as a B200 has room for where a launch is recorded in which they take over
                the work of others (clusterlaunchcontrol), each as much as any other.
    progress    called as progress(done_clusters, all_clusters) now and then.
    check       look for races (happens-before), data never written, leaks and misused barriers;
                what is seen goes to `LaunchReport.findings` and changes no result, but
                for accesses out of bounds: they are not executed.
    strict      with check: also what the manual's text asks for and hardware does without; these
                findings are notes.
    roles       name of each warp of a CTA in reports; others are described by what they execute.
    names       name of each barrier in reports, by its shared address (an int, as reports show it)
                or by its symbol ("full", "full+8"); others are called as the Python that
                initialises them does, or by their symbol.
    inspect     what to look at: dumps at a line, watchpoints, the last events (`ptxemu.inspect`).
    name_printf what a kernel prints begins with its CTA, warp and lane.
    accumulation
                how MMAs sum floating-point products. 'fast': in fp32, rounded to nearest, in the
                order of a BLAS. 'aligned': bit for bit as the tensor core (`numerics.accumulation`
                says of which GPU that is measured, and of which it is claimed); several times
                slower, and UnsupportedPtx for an MMA of which nobody has said how it sums.
    processes   run the CTAs of a launch in so many processes (Linux; at least 1), for single large
                launches. Each takes a row of clusters; if no CTA touches what another process has
                written, and nothing is to be told of the launch but its end, what they have written
                is put together. Else, and where processes cannot help, the launch runs in one
                process as ever: results, findings and errors are always those of one process.
                `LaunchReport.processes` says how many it was, `LaunchReport.alone` why one.
    """

    policy: str = "round-robin"
    seed: int = 0
    limit: float | None = 60.0
    trace: bool = False
    record: bool = False
    clusters: int | Sequence[int] | Callable[[int], Sequence[int]] | None = None
    resident: int | None = None
    progress: Callable[[int, int], None] | None = None
    check: bool = False
    strict: bool = False
    roles: Mapping[int, str] | None = None
    names: Mapping[int | str, str] | None = None
    inspect: Inspect | None = None
    name_printf: bool = False
    accumulation: str = FAST
    processes: int = 1

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r}; must be one of {', '.join(POLICIES)}")
        if self.accumulation not in ACCUMULATIONS:
            choices = ", ".join(ACCUMULATIONS)
            raise ValueError(f"accumulation={self.accumulation!r}; must be one of {choices}")
        if self.resident is not None and self.resident < 1:
            raise ValueError(f"resident={self.resident}; must be >= 1")
        if self.processes < 1:
            raise ValueError(f"processes={self.processes}; must be >= 1")
        if self.processes > 1 and sys.platform != "linux":
            raise ValueError(f"processes={self.processes}; must be 1 on {sys.platform}, not Linux")
        wanted = self.clusters
        bad = wanted < 1 if isinstance(wanted, int) else wanted is not None and not wanted
        if bad or (isinstance(wanted, Sequence) and min(wanted) < 0):
            raise ValueError(f"clusters={wanted}; must be at least one, or numbers of them")
        if self.processes > 1 and self.clusters is not None:
            raise ValueError(f"processes={self.processes}; must be 1 where clusters are chosen")
        if self.limit is not None and self.limit <= 0:
            raise ValueError(f"limit={self.limit}; must be > 0 seconds, or None")

    def clusters_of(self, total: int) -> Sequence[int]:
        """Return the clusters to execute, of a grid with `total`; raise ValueError for one
        beyond it."""
        wanted = self.clusters(total) if callable(self.clusters) else self.clusters
        if wanted is None:
            return range(total)
        if isinstance(wanted, int):
            if wanted >= total:
                return range(total)
            beside = {1} if wanted > 3 else set()
            count = wanted - len(beside)
            last = max(count - 1, 1)
            return sorted(beside | {number * (total - 1) // last for number in range(count)})
        if max(wanted) >= total:
            raise ValueError(f"clusters={wanted}; the grid has {total}")
        return wanted
