"""Device code for the keys of candidates, and for the counts of their digits over a cluster.

`mla.indexer.select_config` says what a key is. Keys are made from scores. They lie in shared
memory, and those that are still candidates also in lists. If nothing is kept, keys are made from
scores whenever they are read. Warps step over vectors of their candidates, 32 at a time, or over
the items of their lists. The counts give the next digit of the k-th largest key.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint16, Uint32

from kernelkit.device.lanes import sum_below
from kernelkit.plan.hw import WARP_THREADS
from kvcache.movement.device import load_bytes, zeros
from mla.indexer.select_config import GROUP, NO_NUMBER, VECTOR_BYTES, Digit, SelectConfig

WORDS = VECTOR_BYTES // 4
HALF, LOW = 16, 0xFFFF
AT_ONCE = 4  # loads that a thread has in flight


@dataclass(frozen=True)
class Share:
    """Share of a row that belongs to a CTA, and the steps of one of its warps.

    scores: address of the CTA's first score.
    begin: number of that candidate in the row.
    size: number of candidates.
    first, end: first step of the warp, and its last step plus 1.
    """

    scores: Int64
    begin: Int32
    size: Int32
    first: Int32
    end: Int32


@dataclass(frozen=True)
class Shared:
    """Shared memory of a CTA.

    bins, groups: counts of all digits, by bin and by group of bins.
    warps, totals: numbers of larger and of equal keys, of each warp and of the CTA.
    found: results about the k-th largest key.
    keys: the keys that are kept.
    items: (key, number) pairs of the lists of all warps.
    """

    bins: cute.Tensor
    groups: cute.Tensor
    warps: cute.Tensor
    totals: cute.Tensor
    found: cute.Tensor
    keys: cute.Tensor
    items: cute.Tensor


class Keys:
    """Device code for the keys of one SelectConfig."""

    def __init__(self, config: SelectConfig) -> None:
        self.config = config

    @cute.jit
    def vector_of(self, step: Int32) -> Int32:
        """Return the lane's vector of a step."""
        return step * WARP_THREADS + cute.arch.lane_idx()

    @cute.jit
    def steps_of(
        self, share: Share, listed: Int32, is_list: cutlass.Constexpr[bool]
    ) -> tuple[Int32, Int32]:
        """Return (first step, last step plus 1) of the warp, in its list or its candidates."""
        if cutlass.const_expr(is_list):
            return Int32(0), (listed + WARP_THREADS - 1) // WARP_THREADS
        return share.first, share.end

    @cute.jit
    def read(
        self,
        share: Share,
        shared: Shared,
        step: Int32,
        listed: Int32,
        is_list: cutlass.Constexpr[bool],
    ) -> cute.Tensor:
        """Read a lane's keys of a step; one key if they come from a list of `listed` keys."""
        config = self.config
        if cutlass.const_expr(is_list):
            found = zeros(1)
            if self.vector_of(step) < listed:
                found[0] = shared.items[2 * self.listed_at(step)]
            return found
        if cutlass.const_expr(not config.capacity):
            return self.fetch(share, step)
        return self.kept(shared, step)

    @cute.jit
    def kept(self, shared: Shared, step: Int32) -> cute.Tensor:
        """Read a lane's keys of a step from shared memory."""
        words, vector = zeros(WORDS), self.vector_of(step)
        cute.autovec_copy(cute.local_tile(shared.keys, (WORDS,), (vector,)), words)
        return self.unpacked(words)

    @cute.jit
    def keep(self, shared: Shared, step: Int32, keys: cute.Tensor) -> None:
        """Write a lane's keys of a step to shared memory."""
        words, vector = self.packed(keys), self.vector_of(step)
        cute.autovec_copy(words, cute.local_tile(shared.keys, (WORDS,), (vector,)))

    @cute.jit
    def whole(self, share: Share) -> Int32:
        """Return the end of the warp's steps that are full of candidates, in groups of AT_ONCE."""
        steps = cutlass.min(share.end, share.size // self.config.step) - share.first
        return share.first + cutlass.max(steps, 0) // AT_ONCE * AT_ONCE

    @cute.jit
    def fetch_whole(self, share: Share, begin: Int32) -> list:
        """Load the keys of AT_ONCE steps that are full of candidates."""
        loaded = []
        for index in cutlass.range_constexpr(AT_ONCE):
            loaded.append(self.load(share, self.vector_of(begin + index)))
        return [self.keys_of(words) for words in loaded]

    @cute.jit
    def listed_at(self, step: Int32) -> Int32:
        """Return the list index of the lane's item in a step."""
        thread, _, _ = cute.arch.thread_idx()
        return thread // WARP_THREADS * self.config.listed + self.vector_of(step)

    @cute.jit
    def number_of(
        self, shared: Shared, step: Int32, listed: Int32, is_list: cutlass.Constexpr[bool]
    ) -> Int32:
        """Return the number, in the CTA's share, of a lane's first key; see `read`."""
        number = self.vector_of(step) * self.config.vector
        if cutlass.const_expr(is_list):
            number = Int32(0)
            if self.vector_of(step) < listed:
                number = Int32(shared.items[2 * self.listed_at(step) + 1])
        return number

    @cute.jit
    def fetch(self, share: Share, step: Int32) -> cute.Tensor:
        """Load a lane's scores of a step and return their keys, 0 where there is no candidate.

        Scores after the last candidate are not read: that memory may not belong to the tensor.
        """
        config, words, vector = self.config, zeros(WORDS), self.vector_of(step)
        behind = share.size - vector * config.vector
        place = share.scores + Int64(vector) * VECTOR_BYTES
        if behind >= config.vector:
            cute.autovec_copy(self.load(share, vector), words)
        elif behind > 0:
            for number in cutlass.range_constexpr(config.vector - 1):
                if number < behind:
                    self.load_one(place, words, number)
        keys = self.keys_of(words)
        for number in cutlass.range_constexpr(config.vector):
            keys[number] = keys[number] if number < behind else Uint32(0)
        return keys

    @cute.jit
    def load(self, share: Share, vector: Int32) -> cute.Tensor:
        """Load the scores of a whole vector."""
        words, place = zeros(WORDS), share.scores + Int64(vector) * VECTOR_BYTES
        if cutlass.const_expr(self.config.aligned):
            load_bytes(place, words)
        else:
            for number in cutlass.range_constexpr(self.config.vector):
                self.load_one(place, words, number)
        return words

    @cute.jit
    def load_one(self, place: Int64, words: cute.Tensor, number: cutlass.Constexpr[int]) -> None:
        """Load one score of a vector."""
        if cutlass.const_expr(self.config.key_bits == 32):
            load_bytes(place + number * 4, cute.local_tile(words, (1,), (number,)))
        else:
            half = zeros(1, Uint16)
            load_bytes(place + number * 2, half)
            words[number // 2] = words[number // 2] | Uint32(half[0]) << number % 2 * HALF

    @cute.jit
    def keys_of(self, words: cute.Tensor) -> cute.Tensor:
        """Return the keys of a vector of scores, one word each."""
        config, keys = self.config, zeros(self.config.vector)
        for number in cutlass.range_constexpr(config.vector):
            if cutlass.const_expr(config.key_bits == 32):
                keys[number] = key_of_score(words[number])
            else:
                word = words[number // 2]
                bits = word << HALF if number % 2 == 0 else word & Uint32(LOW << HALF)
                keys[number] = cutlass.max(key_of_score(bits) >> HALF, Uint32(NO_NUMBER))
        return keys

    @cute.jit
    def packed(self, keys: cute.Tensor) -> cute.Tensor:
        """Return keys packed in the format in which they are kept."""
        if cutlass.const_expr(self.config.key_bits == 32):
            return keys
        words = zeros(WORDS)
        for word in cutlass.range_constexpr(WORDS):
            words[word] = keys[2 * word] | keys[2 * word + 1] << HALF
        return words

    @cute.jit
    def unpacked(self, words: cute.Tensor) -> cute.Tensor:
        """Return unpacked keys, one word each."""
        if cutlass.const_expr(self.config.key_bits == 32):
            return words
        keys = zeros(self.config.vector)
        for word in cutlass.range_constexpr(WORDS):
            keys[2 * word] = words[word] & Uint32(LOW)
            keys[2 * word + 1] = words[word] >> HALF
        return keys


@cute.jit
def key_of_score(bits: Uint32) -> Uint32:
    """Return an integer key with the order of the fp32 numbers; both zeros get one key."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 x; .reg .b32 y, sign; .reg .pred nan; mov.b32 x, {$r0}; "
        "add.rn.f32 x, x, 0f00000000; mov.b32 y, x; shr.s32 sign, y, 31; "
        "or.b32 sign, sign, 0x80000000; xor.b32 y, y, sign; setp.nan.f32 nan, x, x; "
        f"selp.b32 {{$w0}}, {NO_NUMBER}, y, nan; }}",
        write_only_types=[Uint32],
        read_only_args=[bits],
    )


class Counts:
    """Device code for the counts of one SelectConfig."""

    def __init__(self, config: SelectConfig) -> None:
        self.config = config

    @cute.jit
    def meet(self) -> None:
        """Wait for all threads of the cluster, and publish what they wrote to shared memory."""
        cute.arch.sync_threads()
        if cutlass.const_expr(self.config.cluster > 1):
            thread, _, _ = cute.arch.thread_idx()
            if thread < WARP_THREADS:
                # One fence serves the whole CTA. A releasing arrival would be a barrier of the
                # whole device, executed by each of its warps.
                cute.arch.fence_acq_rel_cluster()
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    @cute.jit
    def count_groups(
        self, sBins: cute.Tensor, sGroups: cute.Tensor, digit: cutlass.Constexpr[Digit]
    ) -> None:
        """Sum GROUP neighbouring bins, one group in each warp at a time."""
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
        """Return the first digit of the wanted-th largest key that this CTA has counted.

        The result is 0 if it has counted fewer keys. All threads call this together.
        """
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
        """Find the digit of the left-th largest key, from the counts of the cluster or of the CTA
        alone.

        One warp calls this.

        Returns:
            The digit, and how many of the keys with this digit are left to be chosen.
        """
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
        """Find the count, among those from `first` on, that contains the left-th largest key.

        A lane has 1 or 2 counts; lane 0 has the last ones.

        Returns:
            The index of the count, and how many keys in it are left to be chosen.
        """
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
        holder = cute.arch.popc(cute.arch.vote_ballot_sync(has_it) - 1)  # exactly one lane has it
        for index in cutlass.range_constexpr(per_lane - 1):
            if left > above + counts[index]:
                above += counts[index]
                last -= 1
        return cute.arch.shuffle_sync(last, holder), cute.arch.shuffle_sync(left - above, holder)

    @cute.jit
    def total_of(self, sCounts: cute.Tensor, index: Int32, ctas: cutlass.Constexpr[int]) -> Int32:
        """Return the sum of a count over all CTAs of the cluster, or the count of this one."""
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
    """Atomically increment a count if `value` is equal ('eq') or not below ('ge') `wanted`."""
    cute.arch.inline_ptx(
        f"{{ .reg .pred is_it; setp.{comparison}.u32 is_it, {{$r1}}, {{$r2}}; "
        "@is_it red.relaxed.cta.shared.add.u32 [{$r0}], 1; }",
        read_only_args=[sCounts.iterator.toint() + index * 4, value, wanted],
    )


@cute.jit
def load_peer(sCounts: cute.Tensor, index: Int32, rank: Int32) -> Int32:
    """Load the element at `index` from the shared memory of CTA `rank` of the cluster."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 place; mapa.shared::cluster.u32 place, {$r0}, {$r1}; "
        "ld.shared::cluster.b32 {$w0}, [place]; }",
        write_only_types=[Int32],
        read_only_args=[sCounts.iterator.toint() + index * 4, rank],
    )
