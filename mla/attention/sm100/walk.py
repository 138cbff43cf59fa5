"""Work of a CTA: which query rows, and which tiles of keys (device code).

Pairs are numbered by entry, two row tiles, cluster, and rank. The tiles of keys that a pair sees
are divided in order: contiguous shares, the remainder to the low ranks.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from mla.attention.kernel_arguments import KernelArguments
from mla.attention.sm90.walk import keys_of
from mla.attention.sm100.args import Lane, Work
from mla.attention.sm100.plan import KEYS, PAIR, ROWS, Plan100


@cute.jit
def locate(plan: Plan100, given: KernelArguments) -> Work:
    """Return the work of this CTA."""
    config, tiles = plan.config, plan.tiles
    place, _, _ = cute.arch.block_idx()
    pair, half = place // PAIR, place % PAIR
    pairs = given.parts * config.cluster  # of two row tiles
    number, group = pair % pairs, pair // pairs
    groups = tiles.count // PAIR
    tile, entry = group % groups * PAIR + half, group // groups
    token = tile // tiles.head_tiles * tiles.tokens
    head = tile % tiles.head_tiles * tiles.heads
    keys, extra = keys_of(config.keys, given.keys, entry), Int32(0)
    seen = keys
    if cutlass.const_expr(config.causal and config.tokens > 1):
        last = cutlass.min(token + tiles.tokens, config.tokens) - 1
        seen = cutlass.max(keys - (config.tokens - 1 - last), 0)
    own_tiles = (seen + KEYS - 1) // KEYS
    all_tiles = own_tiles
    if cutlass.const_expr(config.extra is not None):
        extra = keys_of(config.extra, given.extra, entry)
        all_tiles += (extra + KEYS - 1) // KEYS
    base = all_tiles // pairs
    more = all_tiles - base * pairs
    return Work(
        entry=entry,
        tile=tile,
        token=token,
        head=head,
        keys=keys,
        extra=extra,
        own_tiles=own_tiles,
        begin=number * base + cutlass.min(number, more),
        count=base + Int32(number < more),
        active=cutlass.min(all_tiles, pairs),
        part=number // config.cluster,
        rank=number % config.cluster,
        half=half,
    )


@cute.jit
def lane_of(plan: Plan100, work: Work) -> Lane:
    """Return this thread's half of a query row."""
    config, tiles = plan.config, plan.tiles
    lane = cute.arch.thread_idx()[0] % (PAIR * ROWS)
    row, half = lane % ROWS, lane // ROWS
    token, head = work.token + row // tiles.heads, work.head + row % tiles.heads
    real = token < config.tokens and head < config.heads
    if cutlass.const_expr(tiles.rows < ROWS):
        real = real and row < tiles.rows
    end = work.keys
    if cutlass.const_expr(config.causal and config.tokens > 1):
        end = end - cutlass.max(config.tokens - 1 - token, 0)
    return Lane(lane, row, half, token, head, real, end)
