"""Work of a CTA: which query rows, and which tiles of keys (device code).

A unit is the work of a cluster. CTAs are numbered by entry, row tile or pair of them, cluster, and
rank. The tiles of keys that a row tile sees are divided in order: contiguous shares, the remainder
to the low ranks. If n clusters stay, each takes every n-th unit.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineState

from kernelkit.plan import hw
from mla.attention.config import Keys
from mla.attention.kernel_arguments import KernelArguments, Source
from mla.attention.sm90.args import Lane, Past, Scope, Work
from mla.attention.sm90.plan import BUFFERS, KEYS, ROWS, Plan90


@cute.jit
def locate(plan: Plan90, given: KernelArguments, step: Int32) -> Work:
    """Return the work of this CTA in its unit number `step`."""
    config, tiles = plan.config, plan.tiles
    place, _, _ = cute.arch.block_idx()
    if cutlass.const_expr(config.ways.resident > 0):
        stride, _, _ = cute.arch.grid_dim()
        place = place + step * stride
    sharers, groups = config.sharers, tiles.count // config.sharers
    each = given.parts * plan.ctas  # CTAs of a row tile, or of two that share keys
    number, group = place % each, place // each
    cta, ctas, sharer = number // sharers, each // sharers, number % sharers
    tile, entry = group % groups * sharers + sharer, group // groups
    token = tile // tiles.head_tiles * tiles.tokens
    head = tile % tiles.head_tiles * tiles.heads
    keys, extra = keys_of(config.keys, given.keys, entry), Int32(0)
    seen = keys
    if cutlass.const_expr(config.causal and config.tokens > 1):
        # All row tiles of a cluster take the tiles that any of their rows sees.
        ahead = (sharers - 1 - sharer + tile % tiles.head_tiles) // tiles.head_tiles + 1
        last = cutlass.min(token + tiles.tokens * ahead, config.tokens) - 1
        seen = cutlass.max(keys - (config.tokens - 1 - last), 0)
    own_tiles = (seen + KEYS - 1) // KEYS
    all_tiles = own_tiles
    if cutlass.const_expr(config.extra is not None):
        extra = keys_of(config.extra, given.extra, entry)
        all_tiles += (extra + KEYS - 1) // KEYS
    base = all_tiles // ctas
    more = all_tiles - base * ctas
    return Work(
        entry=entry,
        tile=tile,
        token=token,
        head=head,
        keys=keys,
        extra=extra,
        own_tiles=own_tiles,
        begin=cta * base + cutlass.min(cta, more),
        count=base + Int32(cta < more),
        active=cutlass.min(all_tiles, ctas),
        part=cta // config.cluster,
        rank=cta % config.cluster,
        sharer=sharer,
    )


@cute.jit
def steps_of(plan: Plan90, given: KernelArguments) -> Int32:
    """Return the number of units of this CTA."""
    place, _, _ = cute.arch.block_idx()
    stride, _, _ = cute.arch.grid_dim()
    every = plan.tiles.count * given.q.shape[0]  # CTAs, if each had one unit
    return (every - place + stride - 1) // stride


@cute.jit
def unit_of(plan: Plan90, scope: Scope, step: Int32, past: Past) -> Scope:
    """Return the scope of this CTA's unit number `step`."""
    return replace(scope, work=locate(plan, scope.given, step), past=past)


@cute.jit
def after(past: Past, count: Int32) -> Past:
    """Return what is past after a unit of `count` tiles, which begins with buffer 0."""
    fills = (past.fills[0] + (count + 1) // 2, past.fills[1] + count // 2)
    return Past(fills, past.units + Int32(count > 0))


@cute.jit
def filling_of(scope: Scope, number: Int32) -> Int32:
    """Return which filling of its buffer a tile of the unit is, counted from 0."""
    before = scope.past.fills[0] if number % BUFFERS == 0 else scope.past.fills[1]
    return before + number // BUFFERS


@cute.jit
def full_state(scope: Scope, number: Int32) -> PipelineState:
    """Return the state of a consumer that waits for tile `number` of the unit."""
    return PipelineState(BUFFERS, number, number % BUFFERS, filling_of(scope, number) % 2)


@cute.jit
def free_state(scope: Scope, number: Int32) -> PipelineState:
    """Return the state of a producer that fills a buffer with tile `number` of the unit."""
    return PipelineState(BUFFERS, number, number % BUFFERS, filling_of(scope, number) % 2 ^ 1)


@cute.jit
def keys_of(keys: Keys, source: Source, entry: Int32) -> Int32:
    """Return the number of keys of an entry, within those that its row of places can name."""
    most = Int32(source.places.shape[1])
    if cutlass.const_expr(not keys.listed):
        most = most * keys.rows
    if cutlass.const_expr(keys.counts):
        most = cutlass.min(cutlass.max(source.counts[entry], 0), most)
    return most


@cute.jit
def lane_of(plan: Plan90, work: Work, team: cutlass.Constexpr) -> Lane:
    """Return this thread's position in the row tile."""
    config, tiles = plan.config, plan.tiles
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % hw.WARPGROUP_WARPS
    first = warp * 16 + lane // 4
    real, ends = [], []
    for half in cutlass.range_constexpr(2):
        row = first + 8 * half
        token, head = work.token + row // tiles.heads, work.head + row % tiles.heads
        inside = token < config.tokens and head < config.heads
        if cutlass.const_expr(tiles.rows < ROWS):
            inside = inside and row < tiles.rows
        real.append(inside)
        end = work.keys
        if cutlass.const_expr(config.causal and config.tokens > 1):
            end = end - cutlass.max(config.tokens - 1 - token, 0)
        ends.append(end)
    return Lane(team, warp, first, lane % 4 * 2, tuple(real), tuple(ends))
