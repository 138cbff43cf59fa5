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

    Attributes:
        policy: 'round-robin': warps in turn, asynchronous work done at issue (fastest). 'random':
            warps and asynchronous completions in seeded random order. 'adversarial': asynchronous
            work as late as the memory model allows; TMEM reads at the last allowed moment;
            generic-proxy SMEM writes unseen by the async proxy until a proxy fence.
        seed: Seed of the random and adversarial policies. Adversarial delays TMA most with an even
            seed and the tensor core most with an odd one.
        limit: Seconds; a launch estimated above it raises LimitExceeded. None: no limit.
        trace: Record a timeline (`LaunchReport.trace`).
        record: Record the work of each warp, for a model of time (`LaunchReport.recording`).
        clusters: Numbers of the clusters to execute, in this order; or how many of the grid, spread
            evenly, of which with four or more one follows the first; None: all. The others write
            nothing, and a wait for one of them never ends. It is for recorded launches that are
            too large to execute. A function is called for each launch with the number of clusters
            and returns the numbers.
        resident: Clusters resident at first; more join when all resident ones are stuck. None: 2.
            If the launch is recorded and its clusters take over the work of others
            (clusterlaunchcontrol), None means as many as fit on a B200, with equal work.
        progress: Called as progress(done_clusters, all_clusters) now and then.
        check: Look for races (happens-before), data never written, leaks and misused barriers.
            Findings go to `LaunchReport.findings` and change no result, except that accesses out
            of bounds are not executed.
        strict: With check: also report rules of the manual's text that hardware does not need;
            these findings are notes.
        roles: Name of each warp of a CTA in reports; others are described by their instructions.
        names: Name of each barrier in reports, by its shared address (an int, as in reports) or
            by its symbol ("full", "full+8"). Others have the name in the Python code that
            initialises them, or their symbol.
        inspect: Inspection: dumps at a line, watchpoints, the last events (`ptxemu.inspect`).
        name_printf: Prefix what a kernel prints with its CTA, warp and lane.
        accumulation: Sums of floating-point products in MMAs. 'fast': in fp32, rounded to nearest,
            in the order of a BLAS. 'aligned': bit for bit as the tensor core, several times slower
            (`numerics.accumulation` documents for which GPU this is measured or claimed);
            UnsupportedPtx for an MMA with an unknown order of summation.
        processes: Number of processes for the CTAs of a launch (Linux; at least 1), for single
            large launches. Each runs a row of clusters. If no CTA touches what another process has
            written, and only the end of the launch is reported, their writes are merged. Else, and
            where processes cannot help, the launch runs in one process. Results, findings and
            errors are always those of one process. `LaunchReport.processes` is the number used,
            `LaunchReport.alone` the reason for one.
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
            raise ValueError(f"clusters={wanted}; must be a count >= 1, or numbers of clusters")
        if self.processes > 1 and self.clusters is not None:
            raise ValueError(f"processes={self.processes}; must be 1 if clusters are chosen")
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
