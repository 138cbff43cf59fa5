"""Number of heads in a section of the order in which blocks are computed (`fmha.shared.walk`).

Blocks of a section are computed longest first. With more heads the CTAs end more evenly; with
fewer, more of K and V is still in L2 when it is read again. L2 hits save power as well as time.
The clock of an H200 is limited by its power: causal attention of 64 heads of 4k keys took 8 %
longer with all heads in one section than with those that L2 holds (notes/fmha_hopper.md).
"""

from __future__ import annotations

from functools import cache, lru_cache

from fmha.choose import KEPT, Problem
from fmha.config import AttentionConfig
from fmha.plan import tiles_of
from kernelkit.plan import hw

EVEN_PAST = 4  # with over 4 times as many keys before the queries, rows are about equally long
KEYS_OF_A_BLOCK = 128  # fixed cost of a block, in keys
MOST_CANDIDATES = 16
MOST_ROUNDS = 1000


@lru_cache(KEPT)
def heads_of_section(
    problem: Problem, config: AttentionConfig, arch: str, places: int
) -> tuple[int, int]:
    """Return (heads of a section, heads of it whose blocks alternate), over the heads of all
    entries.

    places: CTAs, or pairs, that run at once.
    """
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
    """Return (heads of a section, heads whose blocks alternate) with which the CTAs end most
    evenly.

    Sections have at most `most` heads. Evenness is compared to a hundredth, and the smallest
    section wins a tie. The alternative is head after head.

    Block b of a head has past + (b + 1) * step keys. Heads beyond MOST_ROUNDS rounds no longer
    change the evenness and are not counted.
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
    """Return the load of the busiest CTA over the mean. lengths: lengths of the blocks
    of a head.
    """
    whole, rest = divmod(heads, section)
    # Sections alternate between the two ends (see `fmha.shared.walk.position`).
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
    """Return CTAs that include the busiest one, or nearly: at the ends of full and
    partial rounds.
    """
    numbers = {0, *edges, *(edge - 1 for edge in edges if edge)}
    return numbers | {places - 1 - number for number in numbers}


def _load(
    number: int, places: int, heads: int, near: int, lengths: list[int], mirrored: int
) -> int:
    """Return the load of one CTA in a section of `heads` heads."""
    blocks, total = heads * len(lengths), 0
    for turn in range(-(-blocks // places)):
        place = places - 1 - number if (turn + mirrored) % 2 else number
        index = turn * places + place
        if index < blocks:
            total += lengths[index % (near * len(lengths)) // near]
    return total
