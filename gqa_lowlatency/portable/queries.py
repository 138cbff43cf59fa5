"""Rows of Q as fragments of Q^T, and what their products with K are multiplied by (device code).

K in e4m3 widens to fp16 by one instruction for two elements, to bf16 by four. So where it meets Q
in bf16, Q becomes fp16: each row times the power of two that takes its largest element to 2^15 or
more. fp16 holds eleven bits from 2^-14 on and bf16 has eight, so an element is exact down to 2^-32
of the row's largest. Smaller ones are off by up to 2^-40 of that one, which an fp32 sum with a
product of the largest element loses as well. The scale of the scores takes the power back.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from gqa_lowlatency.config import DecodeConfig
from gqa_lowlatency.portable.plan import PortablePlan
from gqa_lowlatency.portable.team import Memory, exchanged, slice_of, team_of
from gqa_lowlatency.shared.args import Place, Scalars, Tables, Tensors
from kernelkit.device import warp_mma
from kernelkit.device.online_softmax import bounded_factor
from kernelkit.device.shared_words import store
from kernelkit.device.words import float_of

BF16_MANTISSA, FP32_MANTISSA = 7, 23  # bits
BIAS, TOP = 127, 15  # exponent bias; exponent that a row's largest element is scaled to
LEAST = 1 + TOP  # least biased exponent to scale by: below, the inverse would be subnormal


@dataclass(frozen=True)
class Queries:
    """B fragments of Q^T of a warp."""

    words: cute.Tensor | None  # (2, dims / 16, columns / 8); None if they stay in SMEM
    address: Int32  # address of the fragments in shared memory
    factors: cute.Tensor  # (2, columns / 8): of this lane's columns, see `factors_of`


@cute.jit
def query_words(config: DecodeConfig, step: cutlass.Constexpr, lane: Int32) -> tuple[Int32, Int32]:
    """Return the pairs of dims of a query row in this lane's B fragment of a step."""
    if cutlass.const_expr(config.keys_dtype == "e4m3"):
        return step * 8 + 2 * (lane % 4), step * 8 + 2 * (lane % 4) + 1
    return step * 8 + lane % 4, step * 8 + lane % 4 + 4


@cute.jit
def query_address(
    plan: PortablePlan, base: Int32, step: cutlass.Constexpr, tile: cutlass.Constexpr
) -> Int32:
    """Return the address of this lane's two words of a fragment of Q in shared memory."""
    fragment = step * (plan.config.columns // 8) + tile
    return base + (fragment * 32 + cute.arch.lane_idx()) * 8


@cute.jit
def fragments(
    plan: PortablePlan,
    place: Place,
    tensors: Tensors,
    memory: Memory,
    rows: cute.Tensor | None,
    factor: Float32,
) -> Queries:
    """Make the `Queries`.

    Args:
        rows: from `load_rows`, if Q is converted to fp16.
        factor: from `factor_of`.
    """
    if cutlass.const_expr(plan.scaled):
        cute.arch.sync_warp()  # after all fetches are issued: this waits for Q
        words, powers = scale_rows(plan, rows, memory)
    else:
        words, powers = load_queries(plan, place, tensors, memory.queries), None
    return Queries(words, memory.queries, factors_of(plan, factor, powers))


@cute.jit
def load_queries(
    plan: PortablePlan, place: Place, tensors: Tensors, address: Int32
) -> cute.Tensor | None:
    """Load B fragments of Q^T, words (2, dims / 16, columns / 8), zeros for missing rows.

    If they stay in shared memory, the warps with this slice share the work and None is returned.
    """
    config, lane = plan.config, cute.arch.lane_idx()
    team = team_of(plan)
    words = None
    if cutlass.const_expr(not plan.queries_in_smem):
        words = cute.make_rmem_tensor((2, plan.dims // 16, config.columns // 8), Uint32)
        words.fill(0)
    for tile in cutlass.range_constexpr(config.columns // 8):
        exists, line = _row(plan, place, tensors, tile)
        for step in cutlass.range_constexpr(plan.dims // 16):
            low, high = query_words(config, step, lane)
            if cutlass.const_expr(plan.queries_in_smem):
                if team == step % plan.teams:
                    pair = (line[low], line[high]) if exists else (Uint32(0), Uint32(0))
                    store(query_address(plan, address, step, tile), Uint32, pair)
            elif exists:
                words[0, step, tile] = line[low]
                words[1, step, tile] = line[high]
    if cutlass.const_expr(plan.queries_in_smem):
        cute.arch.sync_threads()
    return words


@cute.jit
def load_rows(plan: PortablePlan, place: Place, tensors: Tensors) -> cute.Tensor:
    """Load Q in bf16 for e4m3 keys: whole rows in the registers of each warp."""
    config, lane = plan.config, cute.arch.lane_idx()
    words = cute.make_rmem_tensor((2, plan.dims // 16, config.columns // 8), Uint32)
    words.fill(0)
    for tile in cutlass.range_constexpr(config.columns // 8):
        exists, line = _row(plan, place, tensors, tile)
        if exists:
            for step in cutlass.range_constexpr(plan.dims // 16):
                pair = cute.local_tile(line, (2,), (step * 4 + lane % 4,)).load()
                words[0, step, tile], words[1, step, tile] = pair[0], pair[1]
    return words


@cute.jit
def scale_rows(
    plan: PortablePlan, words: cute.Tensor, memory: Memory
) -> tuple[cute.Tensor | None, cute.Tensor]:
    """(fragments in fp16 or None as from `load_queries`, by what this lane's columns were divided).

    words: from `load_rows`.
    """
    config, lane = plan.config, cute.arch.lane_idx()
    team, exponents = team_of(plan), exponents_of(plan, words, memory)
    powers = cute.make_rmem_tensor((2, config.columns // 8), Float32)
    for tile in cutlass.range_constexpr(config.columns // 8):
        exponent = exponents[tile]
        factor = float_of((2 * BIAS + TOP - exponent) << FP32_MANTISSA)
        inverse = float_of((exponent - TOP) << FP32_MANTISSA)
        for column in cutlass.range_constexpr(2):
            source = (lane % 4 * 2 + column) * 4
            powers[column, tile] = cute.arch.shuffle_sync(inverse, offset=source)
        for step in cutlass.range_constexpr(plan.dims // 16):
            for half in cutlass.range_constexpr(2):
                words[half, step, tile] = warp_mma.scaled_fp16(words[half, step, tile], factor)
            if cutlass.const_expr(plan.queries_in_smem):
                if team == step % plan.teams:
                    pair = (words[0, step, tile], words[1, step, tile])
                    store(query_address(plan, memory.queries, step, tile), Uint32, pair)
    if cutlass.const_expr(plan.queries_in_smem):
        cute.arch.sync_threads()
        return None, powers
    return words, powers


@cute.jit
def exponents_of(plan: PortablePlan, words: cute.Tensor, memory: Memory) -> cute.Tensor:
    """Return the exponents (columns / 8,) that this lane's rows are scaled by, over all slices."""
    tiles = plan.config.columns // 8
    exponents = cute.make_rmem_tensor(tiles, Uint32)
    for tile in cutlass.range_constexpr(tiles):
        exponents[tile] = _exponent(plan, words[None, None, tile])
    if cutlass.const_expr(plan.slices > 1):
        others = exchanged(plan, memory, exponents)
        for tile in cutlass.range_constexpr(tiles):
            exponents[tile] = cutlass.max(exponents[tile], others[tile])
    return exponents


@cute.jit
def _exponent(plan: PortablePlan, words: cute.Tensor) -> Uint32:
    """Biased, of the largest of the bf16 elements of a slice of a row, which four lanes share;
    infinite and NaN ones are the largest."""
    top = words[0] & Uint32(0x7FFF7FFF)
    for word in cutlass.range_constexpr(1, cute.size(words)):
        top = _max_of_halves(plan, top, words[word] & Uint32(0x7FFF7FFF))
    for distance in cutlass.range_constexpr(2):
        top = _max_of_halves(plan, top, cute.arch.shuffle_sync_bfly(top, offset=1 << distance))
    largest = cutlass.max(top & Uint32(0xFFFF), top >> 16)
    return cutlass.max(largest >> BF16_MANTISSA, Uint32(LEAST))


@cute.jit
def _max_of_halves(plan: PortablePlan, first: Uint32, second: Uint32) -> Uint32:
    """The larger of each two bf16 without a sign, NaN the largest: as integers, which takes compute
    capability 9.0, or as they are. Both leave the same exponent."""
    name = "max.NaN.bf16x2" if plan.portable else "max.u16x2"
    return cute.arch.inline_ptx(
        f"{name} {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Uint32],
        read_only_args=[first, second],
    )


@cute.jit
def _row(
    plan: PortablePlan, place: Place, tensors: Tensors, tile: cutlass.Constexpr
) -> tuple[Boolean, cute.Tensor]:
    """Whether there is a query row for this lane's B fragments of 8 columns, and the words of its
    slice."""
    config = plan.config
    row = place.row_tile * config.columns + tile * 8 + cute.arch.lane_idx() // 4
    exists = row < config.rows
    token, head = row // config.group, place.head * config.group + row % config.group
    token, head = (token, head) if exists else (Int32(0), Int32(0))
    line = cute.recast_tensor(tensors.q[place.entry, token, head, None], Uint32)
    if cutlass.const_expr(plan.slices > 1):
        line = cute.local_tile(line, (plan.dims // 2,), (slice_of(plan),))
    return exists, line


@cute.jit
def factor_of(config: DecodeConfig, place: Place, tables: Tables, scalars: Scalars) -> Float32:
    """Return the factor of q.k: `scale_log2`, or with softcap `softcap_log2`, times K's scale."""
    factor = scalars.softcap_log2 if config.softcap else scalars.scale_log2
    if cutlass.const_expr(tables.k_scale is not None):
        factor *= tables.k_scale[place.head]
    return factor


@cute.jit
def factors_of(plan: PortablePlan, factor: Float32, powers: cute.Tensor | None) -> cute.Tensor:
    """Return the factors of this lane's columns, (2, columns / 8).

    powers: divisors of the rows of Q from `scale_rows`, or None.
    """
    factors = cute.make_rmem_tensor((2, plan.config.columns // 8), Float32)
    for tile in cutlass.range_constexpr(plan.config.columns // 8):
        for column in cutlass.range_constexpr(2):
            factors[column, tile] = factor
            if cutlass.const_expr(powers is not None):
                factors[column, tile] = factor * powers[column, tile]
            if cutlass.const_expr(plan.config.k_scale):
                factors[column, tile] = bounded_factor(factors[column, tile])
    return factors
