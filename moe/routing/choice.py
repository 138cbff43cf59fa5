"""Scores, the k best experts and their weights, by one warp for one token (device code).

A lane has neighbouring experts of one group, so that the order of lanes is that of experts. Keys
are integers that compare like the floats that experts are chosen by (`warp.key_of`), so that
redux.sync finds the largest key of a warp.

Every lane finds its best expert. The k-th largest of these is no larger than the k-th best expert.
Experts that reach it are candidates: hardly more than k. Candidates go to shared memory, one for
each lane. Every lane counts the candidates that are better than its candidate: the count is its
rank among the chosen. If equal keys make more than 32 candidates, the best one is found k times
instead.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.memory import SmemAllocator

from kernelkit.device.fake import fake_tensor
from kernelkit.plan.hw import WARP_THREADS
from kernelkit.plan.log2 import LOG2_E
from moe.routing.config import VECTOR_BYTES, RouteConfig
from moe.routing.warp import LOWEST, flip, key_of, lanes_below, lanes_equal, number, value_of

TYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": Float32}
LARGEST = 3.4028234663852886e38  # largest fp32
SMALLEST = 1.1754943508222875e-38  # smallest normal fp32
NOBODY = (1 << 31) - 1  # above the key of any number
ATANH_TERMS = 8  # z is 1/3 at most: the next one adds less than 2 ** -29
BATCH = 4  # keys that a lane reads at a time


@dataclass(frozen=True)
class Candidates:
    """Candidates in shared memory, one for each lane of the warp."""

    keys: cute.Tensor
    experts: cute.Tensor
    scores: cute.Tensor


@dataclass(frozen=True)
class Order:
    """Outputs that describe the slots of one token sorted by expert, as `permutation_kernel` writes
    them."""

    offsets: cute.Tensor  # (E + 1,)
    slot_of_row: cute.Tensor  # (slots,)
    row_of_slot: cute.Tensor  # (slots,)
    first: Int32 | None  # first of the E experts that have rows; None: all have rows


@dataclass(frozen=True)
class Outputs:
    """Output tensors of a choice, (T * slots,), and numbers that are used to write them."""

    ids: cute.Tensor
    weights: cute.Tensor
    scale: Float32
    shared_weight: Float32 | None  # None: no shared experts
    order: Order | None  # for a single token only, else None
    cleared: cute.Tensor | None  # int32, which become zeros, or None


@cute.jit
def candidates_of(warp: Int32, warps: cutlass.Constexpr[int]) -> Candidates:
    """Return the memory for one of the `warps` of a CTA that choose."""
    smem = SmemAllocator()
    layout = cute.make_ordered_layout((warps, WARP_THREADS), order=(1, 0))
    kinds = (Int32, Int32, Float32)
    tables = [smem.allocate_tensor(kind, layout, VECTOR_BYTES) for kind in kinds]
    return Candidates(*(table[warp, None] for table in tables))


def order_of(fields: tuple[cute.Tensor | Int32 | None, ...] | None) -> Order | None:
    """Build an `Order` from its fields; None for None."""
    return None if fields is None else Order(*fields)


def fake_outputs(config: RouteConfig) -> tuple:
    """Return example arguments of a host function: (ids, weights), numbers, `Order` fields, the
    words that become zeros."""
    slots, rows = cute.sym_int32(), cute.sym_int32()
    outputs = fake_tensor(Int32, slots), fake_tensor(Float32, slots)
    order = None
    if config.ordered:
        tables = (fake_tensor(Int32, size) for size in (cute.sym_int32(), rows, rows))
        order = (*tables, Int32(0) if config.partial else None)
    cleared = fake_tensor(Int32, cute.sym_int32()) if config.clears else None
    scales = Float32(0.0), Float32(0.0) if config.shared else None
    return outputs, scales, order, cleared


class Choice:
    """Choice of experts for one RouteConfig, by a warp."""

    def __init__(self, config: RouteConfig) -> None:
        self.config = config

    @cute.jit
    def choose_experts(
        self,
        scores: cute.Tensor,
        biases: cute.Tensor | None,
        token: Int32,
        lane: Int32,
        found: Candidates,
        outputs: Outputs,
    ) -> None:
        """Write ids and weights of a token and, if requested, the order of its slots, and zeros.

        Args:
            scores: a lane's logits, which are replaced by scores.
            biases: biases of the choice, as `read` returns them.
        """
        config = self.config
        if cutlass.const_expr(config.scoring == "softmax"):
            self.softmax(scores)
        elif cutlass.const_expr(config.scoring == "sigmoid"):
            self.sigmoid(scores)
        else:
            self.sqrtsoftplus(scores)
        keys = self.make_keys(scores, biases, lane)
        best, second = top_two(keys)
        if cutlass.const_expr(config.groups > 1):
            if not self.is_open(best, second, lane):
                best = Int32(LOWEST)
        expert, weight = self.choose(scores, keys, best, lane, found)
        total = Float32(0.0)
        if cutlass.const_expr(config.renormalize):
            total = weight
            for step in config.choice_steps:
                total += cute.arch.shuffle_sync_bfly(total, step)
        if lane < config.top_k:
            if cutlass.const_expr(config.renormalize):
                weight = Float32(0.0) if total == 0.0 else weight / total
            place = token * config.slots + lane
            outputs.ids[place] = expert
            outputs.weights[place] = weight * outputs.scale
        if cutlass.const_expr(config.shared > 0):
            if lane >= config.top_k and lane < config.slots:
                place = token * config.slots + lane
                expert = config.experts - config.top_k + lane
                outputs.ids[place] = expert
                outputs.weights[place] = outputs.shared_weight
        if cutlass.const_expr(outputs.order is not None):
            self.sort(expert, lane, outputs.order)
        if cutlass.const_expr(outputs.cleared is not None):
            if token == 0:
                every = cute.size(outputs.cleared)
                for place in cutlass.range(lane, every, WARP_THREADS, unroll=1):
                    outputs.cleared[place] = Int32(0)

    @cute.jit
    def sort(self, expert: Int32, lane: Int32, order: Order) -> None:
        """Sort the slots of the only token by expert. Lane `lane` has the expert of slot `lane`."""
        slots, experts = self.config.slots, cute.size(order.offsets) - 1
        if cutlass.const_expr(order.first is not None):
            expert -= order.first
        # Slots without a row go last; experts before the first one wrap to huge numbers.
        key = Int32(cutlass.min(Uint32(expert), Uint32(experts)))
        keys, row = cute.make_rmem_tensor(slots, Int32), Int32(0)
        for slot in cutlass.range_constexpr(slots):
            keys[slot] = cute.arch.shuffle_sync(key, slot)
            row += Int32(1) if keys[slot] < key else Int32(0)
        if lane < slots:
            order.row_of_slot[lane] = row if key < experts else Int32(-1)
            if key < experts:
                order.slot_of_row[row] = lane
        for place in cutlass.range(lane, experts + 1, WARP_THREADS, unroll=1):
            begin = Int32(0)
            for slot in cutlass.range_constexpr(slots):
                begin += Int32(1) if keys[slot] < place else Int32(0)
            order.offsets[place] = begin

    @cute.jit
    def first_expert(self, lane: Int32) -> Int32:
        """Return the first expert of a lane; the following ones belong to the lane as well."""
        config = self.config
        inside = lane % config.lanes * config.per_lane
        return lane // config.lanes * config.group_size + inside

    @cute.jit
    def has(self, lane: Int32, index: cutlass.Constexpr) -> Boolean:
        """Return whether a lane has an expert `index`."""
        config = self.config
        has = lane < config.groups * config.lanes
        if cutlass.const_expr(not config.is_even):
            has = has and lane % config.lanes * config.per_lane + index < config.group_size
        return has

    @cute.jit
    def read_if_any(self, row: cute.Tensor | None, lane: Int32) -> cute.Tensor | None:
        """Return `read(row, lane)`, or None if there is no row."""
        if cutlass.const_expr(row is None):
            return None
        return self.read(row, lane)

    @cute.jit
    def read(self, row: cute.Tensor, lane: Int32) -> cute.Tensor:
        """Read a lane's part of a row as fp32; -inf past its experts."""
        config, dtype = self.config, row.element_type
        values = cute.make_rmem_tensor(config.per_lane, dtype)
        values.fill(-dtype.inf)
        if cutlass.const_expr(config.vectors):
            if self.has(lane, 0):
                source = cute.local_tile(row, (config.per_lane,), (lane,))
                cute.autovec_copy(source, values)
        else:
            first = self.first_expert(lane)
            for index in cutlass.range_constexpr(config.per_lane):
                if self.has(lane, index):
                    values[index] = row[first + index]
        numbers = cute.make_rmem_tensor(config.per_lane, Float32)
        numbers.store(values.load().to(Float32))
        return numbers

    @cute.jit
    def softmax(self, scores: cute.Tensor) -> None:
        """Softmax in place, over the warp. +inf becomes finite. Without a logit above -inf, all
        scores are 0."""
        for index in cutlass.range_constexpr(self.config.per_lane):
            scores[index] = cute.arch.fmin(number(scores[index]), Float32(LARGEST))
        top = scores[0]
        for index in cutlass.range_constexpr(1, self.config.per_lane):
            top = cute.arch.fmax(top, scores[index])
        top = cute.arch.warp_redux_sync(flip(top.bitcast(Int32)), "max")
        # If all are -inf, all powers are 0.
        base = cute.arch.fmax(value_of(top), Float32(-LARGEST))
        for index in cutlass.range_constexpr(self.config.per_lane):
            scores[index] = cute.math.exp2((scores[index] - base) * LOG2_E, fastmath=True)
        total = scores[0]
        for index in cutlass.range_constexpr(1, self.config.per_lane):
            total += scores[index]
        total = cute.arch.warp_reduction_sum(total)
        norm = cute.arch.rcp_approx(cute.arch.fmax(total, Float32(SMALLEST)))
        for index in cutlass.range_constexpr(self.config.per_lane):
            scores[index] = scores[index] * norm

    @cute.jit
    def sigmoid(self, scores: cute.Tensor) -> None:
        """Sigmoid in place."""
        for index in cutlass.range_constexpr(self.config.per_lane):
            power = cute.math.exp2(number(scores[index]) * -LOG2_E, fastmath=True)
            scores[index] = cute.arch.rcp_approx(1.0 + power)

    @cute.jit
    def sqrtsoftplus(self, scores: cute.Tensor) -> None:
        """Compute sqrt(ln(1 + exp(x))) in place. +inf becomes finite."""
        for index in cutlass.range_constexpr(self.config.per_lane):
            x = cute.arch.fmin(number(scores[index]), Float32(LARGEST))
            power = cute.math.exp2(cute.arch.fmax(x, -x) * -LOG2_E, fastmath=True)
            soft = cute.arch.fmax(x, Float32(0.0)) + log_1_plus(power)
            scores[index] = cute.math.sqrt(soft, fastmath=True)

    @cute.jit
    def make_keys(
        self, scores: cute.Tensor, biases: cute.Tensor | None, lane: Int32
    ) -> cute.Tensor:
        """Return the keys that experts are chosen by: of score + bias. LOWEST means no expert."""
        config = self.config
        keys = cute.make_rmem_tensor(config.per_lane, Int32)
        for index in cutlass.range_constexpr(config.per_lane):
            key = scores[index].bitcast(Int32)  # not negative
            if cutlass.const_expr(biases is not None):
                key = key_of(scores[index] + biases[index])
            keys[index] = key if self.has(lane, index) else Int32(LOWEST)
        return keys

    @cute.jit
    def is_open(self, best: Int32, second: Int32, lane: Int32) -> Boolean:
        """Return whether the group of a lane is one of the topk_group best.

        best, second: keys of the lane. A group is ranked by the sum of its two best experts, or by
        its only one.
        """
        config = self.config
        for step in config.steps:
            other, next_one = (cute.arch.shuffle_sync_bfly(key, step) for key in (best, second))
            second = cutlass.max(cutlass.min(best, other), cutlass.max(second, next_one))
            best = cutlass.max(best, other)
        mine = best
        if cutlass.const_expr(config.group_size > 1):
            mine = key_of(value_of(best) + value_of(second))
        mine = mine if self.has(lane, 0) else Int32(LOWEST)
        group = Int32((1 << config.lanes) - 1) << (lane // config.lanes * config.lanes)
        chosen = Int32(0)
        for _ in cutlass.range_constexpr(config.topk_group):
            holders = cute.arch.vote_ballot_sync(mine == cute.arch.warp_redux_sync(mine, "max"))
            chosen = chosen | (holders & -holders)
            mine = Int32(LOWEST) if chosen & group != 0 else mine
        return chosen & group != 0

    @cute.jit
    def choose(
        self, scores: cute.Tensor, keys: cute.Tensor, best: Int32, lane: Int32, found: Candidates
    ) -> tuple[Int32, Float32]:
        """Return (expert, its score) of choice `lane`, the best one first. Lanes past the last
        choice get score 0.

        Args:
            best: largest of the lane's keys; LOWEST if its group is excluded.
            found: scratch in shared memory.
        """
        config = self.config
        limit, rest = Int32(LOWEST), best
        for _ in cutlass.range_constexpr(config.top_k):
            limit = cute.arch.warp_redux_sync(rest, "max")
            rest = Int32(LOWEST) if rest == limit else rest
        limit = cutlass.max(limit, Int32(LOWEST + 1))
        limit = Int32(NOBODY) if best == LOWEST else limit
        place, total = Int32(0), Int32(0)
        for index in cutlass.range_constexpr(config.per_lane):
            holders = cute.arch.vote_ballot_sync(keys[index] >= limit)
            place += cute.arch.popc(holders & lanes_below(lane))
            total += cute.arch.popc(holders)
        expert, score = Int32(0), Float32(0.0)
        if total <= WARP_THREADS:
            self.collect(scores, keys, limit, place, lane, found)
            expert, score = self.rank(total, lane, found)
        else:
            expert, score = self.find_one_by_one(scores, keys, best, lane)
        return expert, score

    @cute.jit
    def collect(
        self,
        scores: cute.Tensor,
        keys: cute.Tensor,
        limit: Int32,
        place: Int32,
        lane: Int32,
        found: Candidates,
    ) -> None:
        """Write candidates to shared memory in the order of experts, followed by keys of LOWEST.

        Args:
            limit: smallest key of a candidate.
            place: index of this lane's first candidate.
        """
        sKeys, sExperts, sScores = found.keys, found.experts, found.scores
        sKeys[lane] = Int32(LOWEST)
        cute.arch.sync_warp()
        first = self.first_expert(lane)
        for index in cutlass.range_constexpr(self.config.per_lane):
            if keys[index] >= limit:
                sKeys[place] = keys[index]
                sExperts[place] = first + index
                sScores[place] = scores[index]
                place += 1
        cute.arch.sync_warp()

    @cute.jit
    def rank(self, total: Int32, lane: Int32, found: Candidates) -> tuple[Int32, Float32]:
        """Return (expert, score) of choice `lane` among the candidates."""
        sKeys, sExperts, sScores = found.keys, found.experts, found.scores
        mine, expert, score = sKeys[lane], sExperts[lane], sScores[lane]
        better = Int32(0)
        batch = cute.make_rmem_tensor(BATCH, Int32)
        for first in cutlass.range(0, total, BATCH, unroll=1):
            cute.autovec_copy(cute.local_tile(sKeys, (BATCH,), (first // BATCH,)), batch)
            for index in cutlass.range_constexpr(BATCH):
                better += Int32(1) if batch[index] > mine else Int32(0)
        # Ties go to lower lanes.
        better += cute.arch.popc(lanes_equal(mine) & lanes_below(lane))
        cute.arch.sync_warp()
        if lane < total and better < self.config.top_k:
            sExperts[better], sScores[better] = expert, score
        cute.arch.sync_warp()
        is_chosen = lane < self.config.top_k
        return sExperts[lane], sScores[lane] if is_chosen else Float32(0.0)

    @cute.jit
    def find_one_by_one(
        self, scores: cute.Tensor, keys: cute.Tensor, best: Int32, lane: Int32
    ) -> tuple[Int32, Float32]:
        """Return (expert, score) of choice `lane`, however many keys are equal."""
        config = self.config
        my_expert, my_score = Int32(0), Float32(0.0)
        first = self.first_expert(lane)
        for choice in cutlass.range(config.top_k, unroll=1):
            top = cute.arch.warp_redux_sync(best, "max")
            holders = cute.arch.vote_ballot_sync(best == top)
            where, score, best_left = Int32(-1), Float32(0.0), Int32(LOWEST)
            takes = best == top and (holders & lanes_below(lane)) == 0
            for index in cutlass.range_constexpr(config.per_lane):
                if takes and where < 0 and keys[index] == top:
                    where, score, keys[index] = Int32(index), scores[index], Int32(LOWEST)
                best_left = cutlass.max(best_left, keys[index])
            if takes:
                best = best_left
            source = cute.arch.popc((holders & -holders) - 1)
            winner = cute.arch.shuffle_sync(first + where, source)
            score = cute.arch.shuffle_sync(score, source)
            my_expert = winner if lane == choice else my_expert
            my_score = score if lane == choice else my_score
        return my_expert, my_score


@cute.jit
def log_1_plus(p: Float32) -> Float32:
    """Return ln(1 + p) for p from 0 to 1, to a few units in the last place: 2 atanh(z), z = p / (2
    + p).

    The hardware logarithm has a bounded absolute error, so it is inaccurate for a small p.
    """
    z = p * cute.arch.rcp_approx(2.0 + p)
    square, series = z * z, Float32(0.0)
    for power in cutlass.range_constexpr(ATANH_TERMS - 1, -1, -1):
        series = series * square + 1.0 / (2 * power + 1)
    return 2.0 * z * series


@cute.jit
def top_two(keys: cute.Tensor) -> tuple[Int32, Int32]:
    """Return the two largest keys of a lane."""
    best, second = keys[0], Int32(LOWEST)
    for index in cutlass.range_constexpr(1, cute.size(keys)):
        second = cutlass.max(second, cutlass.min(best, keys[index]))
        best = cutlass.max(best, keys[index])
    return best, second
