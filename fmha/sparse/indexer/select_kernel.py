"""The k best keys of every row (device code); `fmha.sparse.indexer.select_config` says how.

Whoever is larger than the k-th largest is chosen, and of its equals as many as are left, the first
ones. So before any candidate there are G larger ones and E equal ones in its row, of which
min(E, left) are chosen, and its place is the sum: results stand in the order of candidates, and
nothing depends on the order in which threads run. Counts are sums of integers.
"""


import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from fmha.sparse.indexer.select_config import GROUP, VECTOR_BYTES, SelectConfig
from fmha.sparse.indexer.select_counts import Counts, count_one, load_peer
from fmha.sparse.indexer.select_keys import AT_ONCE, HALF, LOW, Keys, Share, Shared
from kernelkit.device_table import DeviceTable
from kernelkit.hw import WARP_THREADS
from kernelkit.lanes import sum_below
from kernelkit.param_table import ParamTable, table_of
from kvcache.movement.device import load_bytes, numbers_of, store_word, zeros

NUMBERS = 13


class Select:
    """Host function and kernel of one SelectConfig."""

    def __init__(self, config: SelectConfig) -> None:
        self.config = config
        self.keys, self.counts = Keys(config), Counts(config)

    @cute.jit
    def __call__(self, table: ParamTable, ctas: Int32, stream: CUstream) -> None:
        """table: address of the scores, bytes between rows, columns; address of the counts; k;
        addresses of the entries and of how many are chosen; addresses of owners and of block
        tables, bytes between these, how many and how many blocks of each, entries of a block.
        """
        cluster = self.config.cluster
        self.kernel(table).launch(
            grid=(ctas, 1, 1),
            block=(self.config.threads, 1, 1),
            cluster=(cluster, 1, 1) if cluster > 1 else None,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """A cluster for every row; see `__call__`."""
        config, numbers = self.config, numbers_of(table, NUMBERS)
        cta, _, _ = cute.arch.block_idx()
        row, rank = cta // config.cluster, cta % config.cluster
        wanted, columns = Int32(numbers[4]), Int32(numbers[2])
        count = zeros(1, Int32)
        load_bytes(numbers[3] + Int64(row) * 4, count)
        candidates = cutlass.max(cutlass.min(count[0], columns), Int32(0))
        chosen = cutlass.min(candidates, wanted)
        shared = self.allocate()
        entries = self.entries_of(numbers, row)
        if candidates > wanted:
            share = self.share_of(numbers, row, candidates, rank)
            self.choose(share, shared, (wanted, rank), entries)
        else:
            self.take_all(candidates, rank, entries)
        thread, _, _ = cute.arch.thread_idx()
        mine, threads = rank * config.threads + thread, config.cluster * config.threads
        for place in cutlass.range(chosen + mine, wanted, threads, unroll=1):
            store_word(Int64(-1), entries[0] + Int64(place) * 8)
        if mine == 0:
            store_word(chosen, numbers[6] + Int64(row) * 4)

    def allocate(self) -> Shared:
        """The same places in every CTA."""
        config, smem = self.config, SmemAllocator()
        pairs = config.warps, 1, len(config.digits) + 1
        sizes = config.bins, config.bins // GROUP, *(2 * count for count in pairs)
        tables = [smem.allocate_tensor(Int32, cute.make_layout(size), 16) for size in sizes]
        words = max(config.key_words, 4), 2 * config.warps * config.listed
        keys = [smem.allocate_tensor(Uint32, cute.make_layout(n), VECTOR_BYTES) for n in words]
        return Shared(*tables, *keys)

    @cute.jit
    def entries_of(self, numbers: tuple, row: Int32) -> tuple:
        """(address of the row's entries, of its block table, blocks, entries of a block)."""
        table = Int64(0)
        if cutlass.const_expr(self.config.paged):
            owner = zeros(1, Int32)
            load_bytes(numbers[7] + Int64(row) * 4, owner)
            owner = cutlass.max(cutlass.min(Int64(owner[0]), numbers[10] - 1), Int64(0))
            table = numbers[8] + owner * numbers[9]
        place = numbers[5] + Int64(row) * numbers[4] * 8
        return place, table, Int32(numbers[11]), Uint32(numbers[12])

    @cute.jit
    def share_of(self, numbers: tuple, row: Int32, candidates: Int32, rank: Int32) -> Share:
        """Of this CTA and of this thread's warp."""
        config = self.config
        vectors = (candidates + config.vector - 1) // config.vector
        each = (vectors + config.cluster - 1) // config.cluster * config.vector
        begin = cutlass.min(rank * each, candidates)
        size = cutlass.min(each, candidates - begin)
        place = numbers[0] + Int64(row) * numbers[1] + Int64(begin) * (config.key_bits // 8)
        thread, _, _ = cute.arch.thread_idx()
        steps = (size + config.step - 1) // config.step
        of_warp = (steps + config.warps - 1) // config.warps
        first = cutlass.min(thread // WARP_THREADS * of_warp, steps)
        return Share(place, begin, size, first, cutlass.min(first + of_warp, steps))

    @cute.jit
    def take_all(self, candidates: Int32, rank: Int32, entries: tuple) -> None:
        """No more candidates than wanted: scores are not looked at."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        mine, threads = rank * config.threads + thread, config.cluster * config.threads
        for index in cutlass.range(mine, candidates, threads, unroll=1):
            self.write(entries, index, index)

    @cute.jit
    def write(self, entries: tuple, place: Int32, index: Int32) -> None:
        """The entry of a candidate, -1 where the block table ends before it."""
        entry = Int64(index)
        if cutlass.const_expr(self.config.paged):
            page = Uint32(index) // entries[3]
            block = zeros(1, Int32)
            block[0] = Int32(-1)
            if Int32(page) < entries[2]:
                load_bytes(entries[1] + Int64(page) * 4, block)
            inside = Uint32(index) - page * entries[3]
            entry = Int64(block[0]) * Int64(entries[3]) + Int64(inside)
            entry = Int64(-1) if block[0] < 0 else entry
        store_word(entry, entries[0] + Int64(place) * 8)

    # -- digits -----------------------------------------------------------------------------------

    @cute.jit
    def choose(self, share: Share, shared: Shared, given: tuple, entries: tuple) -> None:
        """More candidates than wanted; given: (wanted, rank)."""
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        for word in cutlass.range(thread, config.bins, config.threads, unroll=1):
            shared.bins[word] = Int32(0)
        cute.arch.sync_threads()
        known, left, listed = Uint32(0), given[0], Int32(-1)
        if cutlass.const_expr(config.sampled > 0):
            listed = self.count_and_list(share, shared, left)
        else:
            self.count_all(share, shared)
        for index in cutlass.range_constexpr(len(config.digits)):
            digit = config.digits[index]
            if cutlass.const_expr(index > 0):
                if listed >= 0:
                    self.count(share, shared, (digit, True), (known, listed))
                else:
                    self.count(share, shared, (digit, False), (known, listed))
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
        self.place_all(share, shared, (known, left, given[1], listed), entries)

    @cute.jit
    def count_all(self, share: Share, shared: Shared) -> None:
        """First digits of all candidates, whose keys are kept."""
        whole = self.keys.whole(share)
        for begin in cutlass.range(share.first, whole, AT_ONCE, unroll=1):
            loaded = self.keys.fetch_whole(share, begin)
            for index in cutlass.range_constexpr(AT_ONCE):
                self.count_first(shared, begin + index, loaded[index], Uint32(0))
        for step in cutlass.range(whole, share.end, unroll=1):
            self.count_first(shared, step, self.keys.fetch(share, step), Uint32(0))

    @cute.jit
    def count_first(self, shared: Shared, step: Int32, keys: cute.Tensor, least: Uint32) -> None:
        """A lane's keys of a step, from the digit `least` on. What is no candidate, 0, is below
        all: it may be counted."""
        config = self.config
        if cutlass.const_expr(config.capacity > 0):
            self.keys.keep(shared, step, keys)
        for number in cutlass.range_constexpr(config.vector):
            value = keys[number] >> config.digits[0].shift
            count_one(shared.bins, Int32(value), value, (least, "ge"))

    @cute.jit
    def count_and_list(self, share: Share, shared: Shared, wanted: Int32) -> Int32:
        """First digits of all candidates that may be chosen, and the warp's list of them, as
        `list_some` returns it. A sample of the CTA's candidates says who may: it alone has as many
        as are wanted whose digits are not smaller."""
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
                count += self.list_step(shared, loaded[index], (begin + index, count), bound)
        for begin in cutlass.range(sampled, whole, AT_ONCE, unroll=1):
            loaded = self.keys.fetch_whole(share, begin)
            for index in cutlass.range_constexpr(AT_ONCE):
                self.count_first(shared, begin + index, loaded[index], least)
                count += self.list_step(shared, loaded[index], (begin + index, count), bound)
        for step in cutlass.range(whole, share.end, unroll=1):
            keys = self.keys.fetch(share, step)
            self.count_first(shared, step, keys, least)
            count += self.list_step(shared, keys, (step, count), bound)
        cute.arch.sync_warp()
        return count if count <= config.listed else Int32(-1)

    @cute.jit
    def count(
        self, share: Share, shared: Shared, kind: cutlass.Constexpr[tuple], known: tuple
    ) -> None:
        """Digits of keys whose higher bits are the known ones. kind: (digit, whether they are
        listed); known: (higher bits, how many are listed)."""
        (digit, is_list), range_ = kind, self.keys.steps_of(share, known[1], kind[1])
        for step in cutlass.range(range_[0], range_[1], unroll=1):
            keys = self.keys.read(share, shared, (step, known[1]), is_list)
            for number in cutlass.range_constexpr(cute.size(keys)):
                key = keys[number]
                value = digit.first + Int32((key >> digit.shift) & Uint32(digit.bins - 1))
                count_one(shared.bins, value, key >> (digit.shift + digit.bits), (known[0], "eq"))

    @cute.jit
    def list_some(self, share: Share, shared: Shared, bound: Uint32) -> Int32:
        """Lists the warp's keys from `bound` on: how many, -1 of too many."""
        count, first = Int32(0), share.first
        if cutlass.const_expr(self.config.capacity == 0):
            first = self.keys.whole(share)
            for begin in cutlass.range(share.first, first, AT_ONCE, unroll=1):
                loaded = self.keys.fetch_whole(share, begin)
                for index in cutlass.range_constexpr(AT_ONCE):
                    count += self.list_step(shared, loaded[index], (begin + index, count), bound)
        for step in cutlass.range(first, share.end, unroll=AT_ONCE):
            keys = self.keys.read(share, shared, (step, Int32(0)), False)
            count += self.list_step(shared, keys, (step, count), bound)
        cute.arch.sync_warp()
        return count if count <= self.config.listed else Int32(-1)

    @cute.jit
    def list_step(self, shared: Shared, keys: cute.Tensor, place: tuple, bound: Uint32) -> Int32:
        """How many of a step there are; place: (step, how many are listed before)."""
        config, total = self.config, Int32(0)
        some = keys[0] >= bound
        for number in cutlass.range_constexpr(1, config.vector):
            some = some | (keys[number] >= bound)
        if cute.arch.vote_any_sync(some):
            before = place[1]
            below = (Uint32(1) << Uint32(cute.arch.lane_idx())) - 1
            for number in cutlass.range_constexpr(config.vector):
                holders = cute.arch.vote_ballot_sync(keys[number] >= bound)
                before += cute.arch.popc(Uint32(holders) & below)
                total += cute.arch.popc(holders)
            first = self.keys.vector_of(place[0]) * config.vector
            for number in cutlass.range_constexpr(config.vector):
                if keys[number] >= bound:
                    self.list_one(shared, before, (keys[number], first + number))
                    before += 1
        return total

    @cute.jit
    def list_one(self, shared: Shared, place: Int32, item: tuple) -> None:
        """item: (key, its number in the CTA's share)."""
        if place < self.config.listed:
            thread, _, _ = cute.arch.thread_idx()
            at = thread // WARP_THREADS * self.config.listed + place
            shared.items[2 * at], shared.items[2 * at + 1] = item[0], Uint32(item[1])

    # -- places -----------------------------------------------------------------------------------

    @cute.jit
    def place_all(self, share: Share, shared: Shared, found: tuple, entries: tuple) -> None:
        """Writes who is chosen; found: (the k-th largest, how many of its equals, rank, how many
        keys are listed)."""
        config, sWarps = self.config, shared.warps
        bound, left, rank, listed = found
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread // WARP_THREADS, thread % WARP_THREADS
        larger, equal = Int32(0), Int32(0)
        if listed >= 0:
            larger, equal = self.count_chosen(share, shared, (bound, listed), True)
        else:
            larger, equal = self.count_chosen(share, shared, (bound, listed), False)
        if lane == 0:
            sWarps[2 * warp], sWarps[2 * warp + 1] = larger, equal
        cute.arch.sync_threads()
        if warp == 0:
            # Counts of warps become those of all lower ones.
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
            cute.arch.cluster_arrive_relaxed()  # nobody's memory is read any more
        if larger + equal > 0:
            if listed >= 0:
                self.place_warp(share, shared, (bound, left, *before, listed, True), entries)
            else:
                self.place_warp(share, shared, (bound, left, *before, listed, False), entries)
        if cutlass.const_expr(config.cluster > 1):
            cute.arch.cluster_wait()

    @cute.jit
    def count_chosen(
        self, share: Share, shared: Shared, found: tuple, is_list: cutlass.Constexpr[bool]
    ) -> tuple:
        """(keys above the bound, keys equal to it) of a warp; found: (bound, how many are
        listed)."""
        larger, equal = Int32(0), Int32(0)
        begin, end = self.keys.steps_of(share, found[1], is_list)
        for step in cutlass.range(begin, end, unroll=1):
            keys = self.keys.read(share, shared, (step, found[1]), is_list)
            for number in cutlass.range_constexpr(cute.size(keys)):
                larger += Int32(keys[number] > found[0])
                equal += Int32(keys[number] == found[0])
        return cute.arch.warp_redux_sync(larger, "add"), cute.arch.warp_redux_sync(equal, "add")

    @cute.jit
    def place_warp(self, share: Share, shared: Shared, found: tuple, entries: tuple) -> None:
        """found: (bound, equals to take, larger ones and equal ones before the warp, how many are
        listed, whether they are)."""
        bound, is_list = found[0], found[5]
        larger, equal = found[2], found[3]
        begin, end = self.keys.steps_of(share, found[4], is_list)
        for step in cutlass.range(begin, end, unroll=1):
            keys = self.keys.read(share, shared, (step, found[4]), is_list)
            both = Int32(0)  # larger ones, and 2^HALF times the equal ones
            for number in cutlass.range_constexpr(cute.size(keys)):
                both += Int32(keys[number] > bound) + (Int32(keys[number] == bound) << HALF)
            if cute.arch.vote_any_sync(both != 0):
                first = share.begin + self.keys.number_of(shared, (step, found[4]), is_list)
                self.place_step(keys, (bound, found[1], larger, equal), (first, both), entries)
                both = cute.arch.warp_redux_sync(both, "add")
                larger += both & LOW
                equal += both >> HALF

    @cute.jit
    def place_step(self, keys: cute.Tensor, found: tuple, given: tuple, entries: tuple) -> None:
        """A lane's keys of a step; found as above, given: (number of the first key, counts as
        above)."""
        bound, left, larger, equal = found
        first, both = given
        below = sum_below(both, cute.arch.lane_idx())
        larger += below & LOW
        equal += below >> HALF
        for number in cutlass.range_constexpr(cute.size(keys)):
            key = keys[number]
            if key > bound or (key == bound and equal < left):
                self.write(entries, larger + cutlass.min(equal, left), first + number)
            larger += Int32(key > bound)
            equal += Int32(key == bound)


def host_function(config: SelectConfig, _arch: str) -> tuple:
    """What is compiled for `config`, and example arguments."""
    return Select(config), table_of([0] * NUMBERS), Int32(0), CUstream(0)
