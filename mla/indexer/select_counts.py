"""Counts of digits over a cluster, and which digit the k-th largest key has (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from kernelkit.device.lanes import sum_below
from kernelkit.plan.hw import WARP_THREADS
from mla.indexer.select_config import GROUP, Digit, SelectConfig
from mla.indexer.select_keys import Shared


class Counts:
    """Of one SelectConfig."""

    def __init__(self, config: SelectConfig) -> None:
        self.config = config

    @cute.jit
    def meet(self) -> None:
        """All threads of the cluster, with what they wrote to shared memory."""
        cute.arch.sync_threads()
        if cutlass.const_expr(self.config.cluster > 1):
            thread, _, _ = cute.arch.thread_idx()
            if thread < WARP_THREADS:
                # For all of the CTA: an arrival that releases is a barrier of the whole device, by
                # each of its warps.
                cute.arch.fence_acq_rel_cluster()
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    @cute.jit
    def count_groups(
        self, sBins: cute.Tensor, sGroups: cute.Tensor, digit: cutlass.Constexpr[Digit]
    ) -> None:
        """Sums of GROUP neighbouring bins, by a warp each."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        lane, first = thread % WARP_THREADS, digit.first // GROUP
        for group in cutlass.range(
            first + thread // WARP_THREADS, first + digit.groups, config.warps, unroll=1
        ):
            total = cute.arch.warp_redux_sync(sBins[group * GROUP + lane], "add")
            if lane == 0:
                sGroups[group] = total

    @cute.jit
    def find_alone(self, shared: Shared, wanted: Int32) -> Uint32:
        """The first digit of the wanted-th largest key that this CTA has counted, 0 of fewer; by
        all threads."""
        digit = self.config.digits[0]
        thread, _, _ = cute.arch.thread_idx()
        self.count_groups(shared.bins, shared.groups, digit)
        cute.arch.sync_threads()
        place = 2 * len(self.config.digits)
        if thread < WARP_THREADS:
            total = Int32(0)
            for group in cutlass.range_constexpr(digit.groups // WARP_THREADS):
                total += shared.groups[group * WARP_THREADS + thread]
            value = Int32(0)
            if cute.arch.warp_redux_sync(total, "add") >= wanted:
                value, _ = self.find(shared.bins, shared.groups, digit, wanted, alone=True)
            if thread == 0:
                shared.found[place] = value
        cute.arch.sync_threads()
        return Uint32(shared.found[place])

    @cute.jit
    def find(
        self,
        sBins: cute.Tensor,
        sGroups: cute.Tensor,
        digit: cutlass.Constexpr[Digit],
        left: Int32,
        *,
        alone: cutlass.Constexpr[bool] = False,
    ) -> tuple[Int32, Int32]:
        """(the digit of the left-th largest, how many are left of those that have it); by a warp,
        from the counts of the cluster, or of the CTA alone."""
        ctas = 1 if alone else self.config.cluster
        group = Int32(0)
        if cutlass.const_expr(digit.groups > 1):
            lanes = min(digit.groups, WARP_THREADS)
            per_lane = digit.groups // lanes
            group, left = self.find_among(
                sGroups, digit.first // GROUP, left, per_lane, lanes, ctas
            )
        value, left = self.find_among(sBins, digit.first + group * GROUP, left, 1, GROUP, ctas)
        return group * GROUP + value, left

    @cute.jit
    def find_among(
        self,
        sCounts: cute.Tensor,
        first: Int32,
        left: Int32,
        per_lane: cutlass.Constexpr[int],
        lanes: cutlass.Constexpr[int],
        ctas: cutlass.Constexpr[int],
    ) -> tuple[Int32, Int32]:
        """(which of some counts from `first` on the left-th largest is among, how many are left in
        it). A lane has 1 or 2 counts, lane 0 the last ones."""
        lane = cute.arch.lane_idx()
        last = per_lane * (lanes - lane) - 1
        counts, total = [], Int32(0)
        for index in cutlass.range_constexpr(per_lane):
            here = Int32(0)
            if lane < lanes:
                here = self.total_of(sCounts, first + last - index, ctas)
            counts.append(here)
            total += here
        above = sum_below(total, lane)
        has_it = above < left and left <= above + total
        holder = cute.arch.popc(cute.arch.vote_ballot_sync(has_it) - 1)  # there is one
        for index in cutlass.range_constexpr(per_lane - 1):
            if left > above + counts[index]:
                above += counts[index]
                last -= 1
        return cute.arch.shuffle_sync(last, holder), cute.arch.shuffle_sync(left - above, holder)

    @cute.jit
    def total_of(self, sCounts: cute.Tensor, index: Int32, ctas: cutlass.Constexpr[int]) -> Int32:
        """The sum over all CTAs of the cluster, or this one's."""
        total = Int32(0)
        if cutlass.const_expr(ctas == 1):
            total = sCounts[index]
        else:
            for rank in cutlass.range_constexpr(ctas):
                total += load_peer(sCounts, index, Int32(rank))
        return total


@cute.jit
def count_one(
    sCounts: cute.Tensor,
    index: Int32,
    value: Uint32,
    comparison: cutlass.Constexpr[str],
    wanted: Uint32,
) -> None:
    """One more at an index, whoever else counts, if `value` is 'eq' or 'ge' what is wanted."""
    cute.arch.inline_ptx(
        f"{{ .reg .pred is_it; setp.{comparison}.u32 is_it, {{$r1}}, {{$r2}}; "
        "@is_it red.relaxed.cta.shared.add.u32 [{$r0}], 1; }",
        read_only_args=[sCounts.iterator.toint() + index * 4, value, wanted],
    )


@cute.jit
def load_peer(sCounts: cute.Tensor, index: Int32, rank: Int32) -> Int32:
    """What another CTA of the cluster has at the same place."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 place; mapa.shared::cluster.u32 place, {$r0}, {$r1}; "
        "ld.shared::cluster.b32 {$w0}, [place]; }",
        write_only_types=[Int32],
        read_only_args=[sCounts.iterator.toint() + index * 4, rank],
    )
