"""Device code that selects the k best keys of every row; `mla.indexer.select_config` has the
method.

All keys larger than the k-th largest are chosen, and the first `left` of the keys equal to it. If G
larger and E equal keys come before a candidate in its row, then G + min(E, left) of them are
chosen: this sum is the place of the candidate. So results are in the order of candidates, and
nothing depends on the order in which threads run. Counts are sums of integers.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from kernelkit.device.device_table import DeviceTable
from kernelkit.device.lanes import sum_below
from kernelkit.device.table_kernel import TableKernel
from kernelkit.plan.hw import WARP_THREADS
from kvcache.movement.device import load_bytes, store_word, zeros
from mla.indexer.params import SelectParams
from mla.indexer.select_config import GROUP, VECTOR_BYTES, Digit, SelectConfig
from mla.indexer.select_device import (
    AT_ONCE,
    HALF,
    LOW,
    Counts,
    Keys,
    Share,
    Shared,
    count_one,
    load_peer,
)


@dataclass(frozen=True)
class Target:
    """Destination of the entries of a row, and the table that maps candidates to entries."""

    entries: Int64  # address of the first one
    table: Int64  # address of the row's block table, 0 where candidates are entries themselves
    blocks: Int32
    block_entries: Uint32  # entries in a block


@dataclass(frozen=True)
class Chosen:
    """Selection rule: keys above `bound`, and the first `left` keys equal to it."""

    bound: Uint32
    left: Int32


class Select(TableKernel):
    """Kernel of one SelectConfig.

    table: `SelectParams`.
    """

    config: SelectConfig

    def __init__(self, config: SelectConfig) -> None:
        super().__init__(config)
        self.cluster = (config.cluster, 1, 1) if config.cluster > 1 else None
        self.keys, self.counts = Keys(config), Counts(config)

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """Select the keys of a row in each cluster."""
        config, params = self.config, table.unpack(SelectParams)
        cta, _, _ = cute.arch.block_idx()
        row, rank = cta // config.cluster, cta % config.cluster
        wanted, columns = Int32(params.k), Int32(params.columns)
        count = zeros(1, Int32)
        load_bytes(params.counts + Int64(row) * 4, count)
        candidates = cutlass.max(cutlass.min(count[0], columns), Int32(0))
        chosen = cutlass.min(candidates, wanted)
        shared = self.allocate()
        target = self.target_of(params, row)
        if candidates > wanted:
            share = self.share_of(params, row, candidates, rank)
            self.choose(share, shared, wanted, rank, target)
        else:
            self.take_all(candidates, rank, target)
        thread, _, _ = cute.arch.thread_idx()
        mine, threads = rank * config.threads + thread, config.cluster * config.threads
        for place in cutlass.range(chosen + mine, wanted, threads, unroll=1):
            store_word(Int64(-1), target.entries + Int64(place) * 8)
        if mine == 0:
            store_word(chosen, params.chosen + Int64(row) * 4)

    def allocate(self) -> Shared:
        """Allocate shared memory, at the same offsets in every CTA."""
        config, smem = self.config, SmemAllocator()
        pairs = config.warps, 1, len(config.digits) + 1
        sizes = config.bins, config.bins // GROUP, *(2 * count for count in pairs)
        tables = [smem.allocate_tensor(Int32, cute.make_layout(size), 16) for size in sizes]
        words = max(config.key_words, 4), 2 * config.warps * config.listed
        keys = [smem.allocate_tensor(Uint32, cute.make_layout(n), VECTOR_BYTES) for n in words]
        return Shared(*tables, *keys)

    @cute.jit
    def target_of(self, params: SelectParams, row: Int32) -> Target:
        """Return the Target of a row."""
        table = Int64(0)
        if cutlass.const_expr(self.config.paged):
            owner = zeros(1, Int32)
            load_bytes(params.owners + Int64(row) * 4, owner)
            owner = cutlass.max(cutlass.min(Int64(owner[0]), params.requests - 1), Int64(0))
            table = params.block_tables + owner * params.table_stride
        place = params.entries + Int64(row) * params.k * 8
        return Target(place, table, Int32(params.blocks), Uint32(params.block_entries))

    @cute.jit
    def share_of(self, params: SelectParams, row: Int32, candidates: Int32, rank: Int32) -> Share:
        """Return the share of a row for this CTA and this thread's warp."""
        config = self.config
        vectors = (candidates + config.vector - 1) // config.vector
        each = (vectors + config.cluster - 1) // config.cluster * config.vector
        begin = cutlass.min(rank * each, candidates)
        size = cutlass.min(each, candidates - begin)
        place = params.scores + Int64(row) * params.scores_stride
        place += Int64(begin) * (config.key_bits // 8)
        thread, _, _ = cute.arch.thread_idx()
        steps = (size + config.step - 1) // config.step
        of_warp = (steps + config.warps - 1) // config.warps
        first = cutlass.min(thread // WARP_THREADS * of_warp, steps)
        return Share(place, begin, size, first, cutlass.min(first + of_warp, steps))

    @cute.jit
    def take_all(self, candidates: Int32, rank: Int32, target: Target) -> None:
        """Choose all candidates, without reading scores; there are at most as many as wanted."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        mine, threads = rank * config.threads + thread, config.cluster * config.threads
        for index in cutlass.range(mine, candidates, threads, unroll=1):
            self.write(target, index, index)

    @cute.jit
    def write(self, target: Target, place: Int32, index: Int32) -> None:
        """Write the entry of a candidate, or -1 if the block table ends before it."""
        entry = Int64(index)
        if cutlass.const_expr(self.config.paged):
            page = Uint32(index) // target.block_entries
            block = zeros(1, Int32)
            block[0] = Int32(-1)
            if Int32(page) < target.blocks:
                load_bytes(target.table + Int64(page) * 4, block)
            inside = Uint32(index) - page * target.block_entries
            entry = Int64(block[0]) * Int64(target.block_entries) + Int64(inside)
            entry = Int64(-1) if block[0] < 0 else entry
        store_word(entry, target.entries + Int64(place) * 8)

    # -- digits -----------------------------------------------------------------------------------

    @cute.jit
    def choose(
        self, share: Share, shared: Shared, wanted: Int32, rank: Int32, target: Target
    ) -> None:
        """Choose the best keys, if there are more candidates than wanted."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        for word in cutlass.range(thread, config.bins, config.threads, unroll=1):
            shared.bins[word] = Int32(0)
        cute.arch.sync_threads()
        known, left, listed = Uint32(0), wanted, Int32(-1)
        if cutlass.const_expr(config.sampled > 0):
            listed = self.count_and_list(share, shared, left)
        else:
            self.count_all(share, shared)
        for index in cutlass.range_constexpr(len(config.digits)):
            digit = config.digits[index]
            if cutlass.const_expr(index > 0):
                if listed >= 0:
                    self.count(share, shared, digit, True, known, listed)
                else:
                    self.count(share, shared, digit, False, known, listed)
            cute.arch.sync_threads()
            self.counts.count_groups(shared.bins, shared.groups, digit)
            self.counts.meet()
            if thread < WARP_THREADS:
                value, rest = self.counts.find(shared.bins, shared.groups, digit, left)
                if thread == 0:
                    shared.found[2 * index], shared.found[2 * index + 1] = value, rest
            cute.arch.sync_threads()
            known = known << digit.bits | Uint32(shared.found[2 * index])
            left = shared.found[2 * index + 1]
            if cutlass.const_expr(index == 0):
                if listed < 0:
                    listed = self.list_some(share, shared, known << digit.shift)
        self.place_all(share, shared, Chosen(known, left), rank, listed, target)

    @cute.jit
    def count_all(self, share: Share, shared: Shared) -> None:
        """Count the first digits of all candidates, and keep their keys if the config keeps any."""
        whole = self.keys.whole(share)
        for begin in cutlass.range(share.first, whole, AT_ONCE, unroll=1):
            loaded = self.keys.fetch_whole(share, begin)
            for index in cutlass.range_constexpr(AT_ONCE):
                self.count_first(shared, begin + index, loaded[index], Uint32(0))
        for step in cutlass.range(whole, share.end, unroll=1):
            self.count_first(shared, step, self.keys.fetch(share, step), Uint32(0))

    @cute.jit
    def count_first(self, shared: Shared, step: Int32, keys: cute.Tensor, least: Uint32) -> None:
        """Count the first digits of a lane's keys of a step, from the digit `least` on.

        A key of 0, which is no candidate, may be counted, since it is below all others.
        """
        config = self.config
        if cutlass.const_expr(config.capacity > 0):
            self.keys.keep(shared, step, keys)
        for number in cutlass.range_constexpr(config.vector):
            value = keys[number] >> config.digits[0].shift
            count_one(shared.bins, Int32(value), value, "ge", least)

    @cute.jit
    def count_and_list(self, share: Share, shared: Shared, wanted: Int32) -> Int32:
        """Count the first digits of all candidates that may be chosen, and list these in each warp.

        A sample of the CTA's candidates gives a bound: at least `wanted` keys of the sample have no
        smaller first digit.

        Returns:
            The length of the warp's list, as `list_some` returns it.
        """
        config, whole = self.config, self.keys.whole(share)
        sampled = (share.end - share.first) // (config.sampled * AT_ONCE) * AT_ONCE
        sampled = cutlass.min(share.first + sampled, whole)
        for begin in cutlass.range(share.first, sampled, AT_ONCE, unroll=1):
            loaded = self.keys.fetch_whole(share, begin)
            for index in cutlass.range_constexpr(AT_ONCE):
                self.count_first(shared, begin + index, loaded[index], Uint32(0))
        cute.arch.sync_threads()
        least = self.counts.find_alone(shared, wanted)
        bound, count = least << config.digits[0].shift, Int32(0)
        for begin in cutlass.range(share.first, sampled, AT_ONCE, unroll=1):
            loaded = self.keys.fetch_whole(share, begin)
            for index in cutlass.range_constexpr(AT_ONCE):
                count += self.list_step(shared, loaded[index], begin + index, count, bound)
        for begin in cutlass.range(sampled, whole, AT_ONCE, unroll=1):
            loaded = self.keys.fetch_whole(share, begin)
            for index in cutlass.range_constexpr(AT_ONCE):
                self.count_first(shared, begin + index, loaded[index], least)
                count += self.list_step(shared, loaded[index], begin + index, count, bound)
        for step in cutlass.range(whole, share.end, unroll=1):
            keys = self.keys.fetch(share, step)
            self.count_first(shared, step, keys, least)
            count += self.list_step(shared, keys, step, count, bound)
        cute.arch.sync_warp()
        return count if count <= config.listed else Int32(-1)

    @cute.jit
    def count(
        self,
        share: Share,
        shared: Shared,
        digit: cutlass.Constexpr[Digit],
        is_list: cutlass.Constexpr[bool],
        known: Uint32,
        listed: Int32,
    ) -> None:
        """Count a digit of the keys whose higher bits are `known`.

        listed: number of keys in the list, which is read if `is_list`.
        """
        begin, end = self.keys.steps_of(share, listed, is_list)
        for step in cutlass.range(begin, end, unroll=1):
            keys = self.keys.read(share, shared, step, listed, is_list)
            for number in cutlass.range_constexpr(cute.size(keys)):
                key = keys[number]
                value = digit.first + Int32((key >> digit.shift) & Uint32(digit.bins - 1))
                count_one(shared.bins, value, key >> (digit.shift + digit.bits), "eq", known)

    @cute.jit
    def list_some(self, share: Share, shared: Shared, bound: Uint32) -> Int32:
        """List the warp's keys that are not below `bound`.

        Returns:
            The number of keys, or -1 if they are too many for the list.
        """
        count, first = Int32(0), share.first
        if cutlass.const_expr(self.config.capacity == 0):
            first = self.keys.whole(share)
            for begin in cutlass.range(share.first, first, AT_ONCE, unroll=1):
                loaded = self.keys.fetch_whole(share, begin)
                for index in cutlass.range_constexpr(AT_ONCE):
                    count += self.list_step(shared, loaded[index], begin + index, count, bound)
        for step in cutlass.range(first, share.end, unroll=AT_ONCE):
            keys = self.keys.read(share, shared, step, Int32(0), False)
            count += self.list_step(shared, keys, step, count, bound)
        cute.arch.sync_warp()
        return count if count <= self.config.listed else Int32(-1)

    @cute.jit
    def list_step(
        self, shared: Shared, keys: cute.Tensor, step: Int32, before: Int32, bound: Uint32
    ) -> Int32:
        """List the keys of a step that are not below `bound`, and return their number.

        before: number of keys listed so far.
        """
        config, total = self.config, Int32(0)
        some = keys[0] >= bound
        for number in cutlass.range_constexpr(1, config.vector):
            some = some | (keys[number] >= bound)
        if cute.arch.vote_any_sync(some):
            place = before
            below = (Uint32(1) << Uint32(cute.arch.lane_idx())) - 1
            for number in cutlass.range_constexpr(config.vector):
                holders = cute.arch.vote_ballot_sync(keys[number] >= bound)
                place += cute.arch.popc(Uint32(holders) & below)
                total += cute.arch.popc(holders)
            first = self.keys.vector_of(step) * config.vector
            for number in cutlass.range_constexpr(config.vector):
                if keys[number] >= bound:
                    self.list_one(shared, place, keys[number], first + number)
                    place += 1
        return total

    @cute.jit
    def list_one(self, shared: Shared, place: Int32, key: Uint32, number: Int32) -> None:
        """Write a key to the warp's list if there is room.

        number: number of the key in the CTA's share.
        """
        if place < self.config.listed:
            thread, _, _ = cute.arch.thread_idx()
            at = thread // WARP_THREADS * self.config.listed + place
            shared.items[2 * at], shared.items[2 * at + 1] = key, Uint32(number)

    # -- places -----------------------------------------------------------------------------------

    @cute.jit
    def place_all(
        self,
        share: Share,
        shared: Shared,
        chosen: Chosen,
        rank: Int32,
        listed: Int32,
        target: Target,
    ) -> None:
        """Write the entries of all chosen keys.

        listed: number of keys in the warp's list, -1 without a list.
        """
        config, sWarps = self.config, shared.warps
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // WARP_THREADS, thread % WARP_THREADS
        larger, equal = Int32(0), Int32(0)
        if listed >= 0:
            larger, equal = self.count_chosen(share, shared, chosen.bound, listed, True)
        else:
            larger, equal = self.count_chosen(share, shared, chosen.bound, listed, False)
        if lane == 0:
            sWarps[2 * warp], sWarps[2 * warp + 1] = larger, equal
        cute.arch.sync_threads()
        if warp == 0:
            # Replace the counts of each warp by the sums over all lower warps.
            for kind in cutlass.range_constexpr(2):
                mine = Int32(0)
                if lane < config.warps:
                    mine = sWarps[2 * lane + kind]
                below = sum_below(mine, lane)
                if lane < config.warps:
                    sWarps[2 * lane + kind] = below
                if lane == WARP_THREADS - 1:
                    shared.totals[kind] = below + mine
        self.counts.meet()
        before = [sWarps[2 * warp], sWarps[2 * warp + 1]]
        if cutlass.const_expr(config.cluster > 1):
            for kind in cutlass.range_constexpr(2):
                peers = Int32(0)
                if lane < rank:
                    peers = load_peer(shared.totals, kind, lane)
                before[kind] += cute.arch.warp_redux_sync(peers, "add")
            cute.arch.cluster_arrive_relaxed()  # no CTA reads the memory of another any more
        if larger + equal > 0:
            if listed >= 0:
                self.place_warp(share, shared, chosen, *before, listed, True, target)
            else:
                self.place_warp(share, shared, chosen, *before, listed, False, target)
        if cutlass.const_expr(config.cluster > 1):
            cute.arch.cluster_wait()

    @cute.jit
    def count_chosen(
        self,
        share: Share,
        shared: Shared,
        bound: Uint32,
        listed: Int32,
        is_list: cutlass.Constexpr[bool],
    ) -> tuple[Int32, Int32]:
        """Return how many keys of a warp are above the bound, and how many are equal to it."""
        larger, equal = Int32(0), Int32(0)
        begin, end = self.keys.steps_of(share, listed, is_list)
        for step in cutlass.range(begin, end, unroll=1):
            keys = self.keys.read(share, shared, step, listed, is_list)
            for number in cutlass.range_constexpr(cute.size(keys)):
                larger += Int32(keys[number] > bound)
                equal += Int32(keys[number] == bound)
        return cute.arch.warp_redux_sync(larger, "add"), cute.arch.warp_redux_sync(equal, "add")

    @cute.jit
    def place_warp(
        self,
        share: Share,
        shared: Shared,
        chosen: Chosen,
        larger: Int32,
        equal: Int32,
        listed: Int32,
        is_list: cutlass.Constexpr[bool],
        target: Target,
    ) -> None:
        """Write the entries of the warp's chosen keys.

        larger, equal: number of keys of both kinds before the warp.
        """
        begin, end = self.keys.steps_of(share, listed, is_list)
        for step in cutlass.range(begin, end, unroll=1):
            keys = self.keys.read(share, shared, step, listed, is_list)
            both = Int32(0)  # number of larger keys, plus 2^HALF times that of equal keys
            for number in cutlass.range_constexpr(cute.size(keys)):
                key = keys[number]
                both += Int32(key > chosen.bound) + (Int32(key == chosen.bound) << HALF)
            if cute.arch.vote_any_sync(both != 0):
                first = share.begin + self.keys.number_of(shared, step, listed, is_list)
                self.place_step(keys, chosen, larger, equal, first, both, target)
                both = cute.arch.warp_redux_sync(both, "add")
                larger += both & LOW
                equal += both >> HALF

    @cute.jit
    def place_step(
        self,
        keys: cute.Tensor,
        chosen: Chosen,
        larger: Int32,
        equal: Int32,
        first: Int32,
        both: Int32,
        target: Target,
    ) -> None:
        """Write the chosen keys of a lane's vector.

        Args:
            larger, equal: number of both kinds before this step.
            first: number of the lane's first key.
            both: the lane's count of larger keys, plus 2^HALF times that of equal keys.
        """
        bound, left = chosen.bound, chosen.left
        below = sum_below(both, cute.arch.lane_idx())
        larger += below & LOW
        equal += below >> HALF
        for number in cutlass.range_constexpr(cute.size(keys)):
            key = keys[number]
            if key > bound or (key == bound and equal < left):
                self.write(target, larger + cutlass.min(equal, left), first + number)
            larger += Int32(key > bound)
            equal += Int32(key == bound)


def host_function(config: SelectConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return Select(config).with_table(SelectParams)
