"""Finish of an owner: rows of O and their LSE from its mailbox (device code).

If several clusters share a KV head, each owner stores its sums in the workspace and increments a
counter. The owner that arrives last adds the sums in the order of parts, whichever came last, and
resets the counter to 0 for the next launch.

    partial [unit][part][owned column][head_dim + 2]: O, then maximum and sum
    unit = ((entry Hkv + KV head) row_tiles + row tile) owners + owner
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Uint32

from gqa_lowlatency.config import DecodeConfig
from gqa_lowlatency.shared import mailbox
from gqa_lowlatency.shared.args import Place, Tables, Tensors
from kernelkit.device.barriers import meet
from kernelkit.device.narrow import inverse_of, to_e4m3
from kernelkit.device.online_softmax import finite, in_log2_units
from kernelkit.device.shared_words import load, store
from kernelkit.plan.barriers import BarrierPlan
from kernelkit.plan.log2 import LN_2

OUT_TYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}
FLAG_OFFSET = 8  # after the mailbox's mbarrier: number of parts that arrived before this one


@dataclass(frozen=True)
class Finishing:
    """Options of an owner's finish.

    barriers: barriers of the plan; all finishing threads synchronise at "finish".
    in_turn: whether `mailbox.merged_in_turn` adds the results.
    ahead: number of parts that are loaded at once.
    """

    barriers: BarrierPlan
    in_turn: bool = False
    ahead: int = 1

    @property
    def threads(self) -> int:
        return self.barriers["finish"].threads


@cute.jit
def finish(
    config: DecodeConfig,
    how: Finishing,
    box: mailbox.Mailbox,
    place: Place,
    active: Int32,
    tensors: Tensors,
    tables: Tables,
) -> None:
    """Finish the columns of an owner, called by all its threads. active: CTAs that had keys."""
    thread, _, _ = cute.arch.thread_idx()
    threads = how.threads
    senders = senders_of(config, place, active)
    vectors = config.head_dim // mailbox.VECTOR
    turns = -(-config.owned_columns * vectors // threads)
    unit = unit_of(config, place, tensors)
    for turn in cutlass.range_constexpr(turns):
        slot, vector = (thread + turn * threads) // vectors, thread % vectors
        if slot < config.owned_columns:
            merge = mailbox.merged_in_turn if how.in_turn else mailbox.merged
            acc, found = merge(config, box, slot, vector, senders)
            if cutlass.const_expr(config.parts):
                leave(config, tables, unit, place.part, slot, vector, acc, found)
            else:
                write(config, tensors, tables, place, slot, vector, acc, found)
    if cutlass.const_expr(config.parts):
        all_parts = cutlass.max((active + config.cluster - 1) // config.cluster, 1)
        if is_last(how, box, tables, unit, all_parts):
            for turn in cutlass.range_constexpr(turns):
                slot, vector = (thread + turn * threads) // vectors, thread % vectors
                if slot < config.owned_columns:
                    if cutlass.const_expr(how.ahead == 1):
                        acc, found = add_parts(config, tables, unit, slot, vector, all_parts)
                    else:
                        acc, found = add_many_parts(
                            config, how, tables.partial, unit, slot, vector, all_parts
                        )
                    write(config, tensors, tables, place, slot, vector, acc, found)


@cute.jit
def senders_of(config: DecodeConfig, place: Place, active: Int32) -> Int32:
    """Return the number of CTAs of this cluster that have keys, which are the first ones."""
    return cutlass.min(cutlass.max(active - place.part * config.cluster, 0), config.cluster)


@cute.jit
def unit_of(config: DecodeConfig, place: Place, tensors: Tensors) -> Int32:
    """Return the number of the owner among those of all entries, heads and row tiles."""
    heads = tensors.k.shape[2]
    tile = (place.entry * heads + place.head) * config.row_tiles + place.row_tile
    return tile * config.owner_ctas + place.rank


@cute.jit
def write(
    config: DecodeConfig,
    tensors: Tensors,
    tables: Tables,
    place: Place,
    slot: Int32,
    vector: Int32,
    acc: cute.Tensor,
    found: mailbox.Statistics,
) -> None:
    """Store vector `vector`, four elements, of the row of O of owned column `slot`.

    The thread with the first vector stores the LSE. The sink's logit is added here.
    """
    top, total = found.row_max, found.row_sum
    row = place.row_tile * config.columns + place.rank * config.owned_columns + slot
    if row < config.rows:
        token, head = row // config.group, place.head * config.group + row % config.group
        acc_scale = Float32(1.0)
        if cutlass.const_expr(tables.sinks is not None):
            sink = in_log2_units(tables.sinks[head])
            higher = cute.arch.fmax(top, sink)
            acc_scale = cute.math.exp2(top - finite(higher), fastmath=True)
            total = total * acc_scale + cute.math.exp2(sink - finite(higher), fastmath=True)
            top = higher
        norm = Float32(0.0) if total == 0.0 else acc_scale * cute.arch.rcp_approx(total)
        if cutlass.const_expr(tables.v_scale is not None):
            norm *= tables.v_scale[place.head]
        gO = cute.local_tile(
            tensors.o[place.entry, token, head, None], (mailbox.VECTOR,), (vector,)
        )
        acc.store(acc.load() * norm)
        if cutlass.const_expr(config.o_dtype == "e4m3"):
            word = to_e4m3(acc, inverse_of(tables.out_scale))
            cute.recast_tensor(gO, Uint32).store(word.load())
        else:
            gO.store(acc.load().to(OUT_TYPES[config.o_dtype]))
        if vector == 0:
            log_total = (cute.math.log2(total, fastmath=True) + top) * LN_2
            tensors.lse[place.entry, head, token] = -Float32.inf if total == 0.0 else log_total


@cute.jit
def leave(
    config: DecodeConfig,
    tables: Tables,
    unit: Int32,
    part: Int32,
    slot: Int32,
    vector: Int32,
    acc: cute.Tensor,
    found: mailbox.Statistics,
) -> None:
    """Store one part's sums of an owned column in the workspace."""
    line = tables.partial[unit, part, None]
    begin = slot * (config.head_dim + mailbox.WORDS)
    for k in cutlass.range_constexpr(mailbox.VECTOR):
        line[begin + vector * mailbox.VECTOR + k] = acc[k]
    if vector == 0:
        line[begin + config.head_dim] = found.row_max
        line[begin + config.head_dim + 1] = found.row_sum


@cute.jit
def is_last(
    how: Finishing, box: mailbox.Mailbox, tables: Tables, unit: Int32, all_parts: Int32
) -> Boolean:
    """Return whether all other parts have stored their sums; the counter is then reset to 0."""
    thread, _, _ = cute.arch.thread_idx()
    meet(how.barriers, "finish")
    if thread == 0:
        count = tables.counts.iterator + unit
        before = cute.arch.atomic_add(count, Int32(1), sem="acq_rel", scope="gpu")
        if before == all_parts - 1:
            tables.counts[unit] = Int32(0)
        store(box.arrived + FLAG_OFFSET, Int32, (before,))
    meet(how.barriers, "finish")
    return load(box.arrived + FLAG_OFFSET, Int32) == all_parts - 1


@cute.jit
def add_parts(
    config: DecodeConfig, tables: Tables, unit: Int32, slot: Int32, vector: Int32, all_parts: Int32
) -> tuple[cute.Tensor, mailbox.Statistics]:
    """Return four elements of O, not normalised, and their column's statistics, over all parts in
    order.
    """
    words = config.head_dim + mailbox.WORDS
    acc = cute.make_rmem_tensor(mailbox.VECTOR, Float32)
    acc.fill(0.0)
    top, total = -Float32.inf, Float32(0.0)
    for part in cutlass.range(all_parts, unroll=1):
        line = tables.partial[unit, part, None]
        own_top = line[slot * words + config.head_dim]
        higher = cute.arch.fmax(top, own_top)
        old = cute.math.exp2(top - finite(higher), fastmath=True)
        new = cute.math.exp2(own_top - finite(higher), fastmath=True)
        total = total * old + line[slot * words + config.head_dim + 1] * new
        for k in cutlass.range_constexpr(mailbox.VECTOR):
            value = line[slot * words + vector * mailbox.VECTOR + k]
            acc[k] = acc[k] * old + value * new
        top = higher
    return acc, mailbox.Statistics(top, total)


@cute.jit
def add_many_parts(
    config: DecodeConfig,
    how: Finishing,
    partial: cute.Tensor,
    unit: Int32,
    slot: Int32,
    vector: Int32,
    all_parts: Int32,
) -> tuple[cute.Tensor, mailbox.Statistics]:
    """Add parts like `add_parts`, `how.ahead` at a time.

    Their loads are in flight together, and O is rescaled to a new maximum once for all of them.
    """
    words = config.head_dim + mailbox.WORDS
    acc = cute.make_rmem_tensor(mailbox.VECTOR, Float32)
    acc.fill(0.0)
    top, total = -Float32.inf, Float32(0.0)
    tops, sums = (cute.make_rmem_tensor(how.ahead, Float32) for _ in range(2))
    values = cute.make_rmem_tensor((how.ahead, mailbox.VECTOR), Float32)
    for turn in cutlass.range((all_parts + how.ahead - 1) // how.ahead, unroll=1):
        first = turn * how.ahead
        for k in cutlass.range_constexpr(how.ahead):
            # A missing part is replaced by the last one, without weight.
            line = partial[unit, cutlass.min(first + k, all_parts - 1), None]
            begin = slot * words
            tops[k], sums[k] = line[begin + config.head_dim], line[begin + config.head_dim + 1]
            for n in cutlass.range_constexpr(mailbox.VECTOR):
                values[k, n] = line[begin + vector * mailbox.VECTOR + n]
        higher = top
        for k in cutlass.range_constexpr(how.ahead):
            higher = cute.arch.fmax(higher, tops[k])
        base = finite(higher)
        old = cute.math.exp2(top - base, fastmath=True)
        total *= old
        for n in cutlass.range_constexpr(mailbox.VECTOR):
            acc[n] *= old
        for k in cutlass.range_constexpr(how.ahead):
            if first + k < all_parts:
                weight = cute.math.exp2(tops[k] - base, fastmath=True)
                total += sums[k] * weight
                for n in cutlass.range_constexpr(mailbox.VECTOR):
                    acc[n] += values[k, n] * weight
        top = higher
    return acc, mailbox.Statistics(top, total)
