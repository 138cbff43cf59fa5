"""How many heads make a section of the order in which blocks are computed (`fmha.shared.walk`).

Blocks of a section are taken longest first. The more heads it has, the more evenly the CTAs end;
the fewer, the more of K and V is still in L2 when it is read again. That is power as well as time:
on an H200, whose clock is what its power allows, causal attention of 64 heads of 4k keys took 8 %
longer with all heads in one section than with those that L2 holds (notes/log.md).
"""

from __future__ import annotations

from functools import cache, lru_cache

from fmha.choose import KEPT, Problem
from fmha.config import AttentionConfig
from fmha.plan import tiles_of
from kernelkit.plan import hw

EVEN_PAST = 4  # times as many keys before the queries: their rows are about as long
KEYS_OF_A_BLOCK = 128  # what a block costs beside its keys, in keys
MOST_CANDIDATES = 16
MOST_ROUNDS = 1000


@lru_cache(KEPT)
def heads_of_section(
    problem: Problem, config: AttentionConfig, arch: str, places: int
) -> tuple[int, int]:
    """(heads of a section, heads of it whose blocks alternate), heads of all entries counted
    together. places: CTAs, or pairs, that run at once."""
    layout, heads = tiles_of(config, arch), problem.batch * problem.q_heads // config.group
    queries, keys = problem.queries, problem.keys
    past = max(keys - queries, 0)
    if config.even_rows or past > EVEN_PAST * queries:
        return max(heads, 1), 1
    sharers = problem.q_heads // config.group // problem.kv_heads
    bytes_of_head = keys * (config.head_dim + config.v_dim) * config.io_bytes
    held = hw.L2_BYTES_OF[arch] * 3 // 4 // max(bytes_of_head, 1) * sharers
    most = max(min(held, heads), 1)
    blocks = layout.blocks(queries)
    step = max(queries // max(blocks, 1), 1)
    return most_even(heads, blocks, places, most, past, step)


@cache
def most_even(
    heads: int, blocks: int, places: int, most: int, past: int, step: int
) -> tuple[int, int]:
    """(heads of a section, heads whose blocks alternate) with which the CTAs end the most evenly,
    to a hundredth: sections of at most so many heads, the smallest of such, or head after head.

    Block b of a head takes past + (b + 1) * step keys. More heads than make MOST_ROUNDS rounds
    change the evenness no more, and are not counted.
    """
    every = heads
    heads = min(heads, max(MOST_ROUNDS * places // max(blocks, 1), 1))
    most = min(most, heads)
    whole = {round(2 * places * pairs / (blocks + 1)) for pairs in range(1, MOST_CANDIDATES)}
    sizes = sorted({size for size in whole if 1 <= size <= most} | {most})
    lengths = [past + (blocks - place) * step + KEYS_OF_A_BLOCK for place in range(blocks)]
    found = [*((size, size) for size in sizes), (heads, 1)]
    best = min(found, key=lambda order: round(unevenness(heads, places, *order, lengths), 2))
    return (every, 1) if best == (heads, 1) else best


def unevenness(heads: int, places: int, section: int, near: int, lengths: list[int]) -> float:
    """What the busiest CTA takes, over the mean. lengths: of the blocks of a head."""
    whole, rest = divmod(heads, section)
    # Sections are taken in turn from either end (see `fmha.shared.walk.position`).
    parts = [(section, 0, whole - whole // 2), (section, 1, whole // 2), (rest, whole % 2, 1)]
    busiest = max(
        sum(
            times * _load(number, places, size, min(near, size), lengths, mirrored)
            for size, mirrored, times in parts
            if size and times
        )
        for number in _telling(places, {size * len(lengths) % places for size, _, _ in parts})
    )
    return busiest * places / (heads * sum(lengths))


def _telling(places: int, edges: set[int]) -> set[int]:
    """CTAs among which the busiest one is, or nearly: those at the ends of full and partial
    rounds."""
    numbers = {0, *edges, *(edge - 1 for edge in edges if edge)}
    return numbers | {places - 1 - number for number in numbers}


def _load(
    number: int, places: int, heads: int, near: int, lengths: list[int], mirrored: int
) -> int:
    """Of one CTA in a section of so many heads."""
    blocks, total = heads * len(lengths), 0
    for turn in range(-(-blocks // places)):
        place = places - 1 - number if (turn + mirrored) % 2 else number
        index = turn * places + place
        if index < blocks:
            total += lengths[index % (near * len(lengths)) // near]
    return total
