"""Choice of tile_rows and tile_n of a tile, from what the host knows.

Limits are the sizes at which the next tile is faster on a B200 in the cycle model, with rows dealt
to experts at random (results/moe_tiles_b200.json, from notes/moe_tiles.py). They are not measured.
Tiles of eight-bit elements are bound by TMA, which moves twice the lines. Tiles of four-bit
elements are bound by memory while an expert has one or two tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from kernelkit.plan import hw
from kernelkit.tune.choices import Choice, Tuned
from moe.config import KERNELS, TILE_N, TILE_ROWS, GroupedConfig
from moe.formats import FORMATS

# An expert may not have more rows than such a tile. A second tile would read scale factors from
# inside a column of tensor memory, or from an odd column, which no kernel known to run does.
FEW = (8, 16, 32)
# bits of an element of x -> tile_rows -> limit of the average rows per expert
BY_AVERAGE = {4: {64: 128, 128: 384}, 8: {64: 60, 128: 132}}
WIDE_BITS = 4  # bits of an element of wide tiles
PAIR = 256  # rows of a tile of two CTAs
LARGE = 128
WIDE, NARROW = 256, 128  # columns
KEPT = 1024  # cached decisions


def choose_tile_rows(rows: int, experts: int, most_rows: int, bits: int) -> int:
    """Choose tile_rows for `rows` rows sorted by expert.

    A tile costs the same however many of its rows exist: the smallest one that holds an expert is
    best.

    Args:
        most_rows: largest number of rows of an expert.
        bits: bits of an element of x.
    """
    for tile_rows in FEW:
        if most_rows <= tile_rows:
            return tile_rows
    for tile_rows, most in BY_AVERAGE[bits].items():
        if rows <= most * experts:
            return tile_rows
    return PAIR if rows >= PAIR else LARGE


def choose_tile_n(rows: int, columns: int, tile_rows: int, bits: int) -> int:
    """Choose tile_n for `columns` packed columns. Wide tiles read x half as often. They are used
    for elements of four bits, if there are tiles for all SMs even if all rows belong to few
    experts."""
    if tile_rows < LARGE or columns < WIDE or bits > WIDE_BITS:
        return NARROW
    ctas = tile_rows // LARGE
    tiles = -(-rows // tile_rows) * -(-columns // WIDE)
    return WIDE if tiles * ctas >= hw.SMS else NARROW


@lru_cache(KEPT)
def check_tile_rows(tile_rows: int, most_rows: int) -> None:
    """Raise ValueError for a tile that is smaller than an expert's rows may be, if that is
    unsupported."""
    if tile_rows in FEW and most_rows > tile_rows:
        raise ValueError(
            f"tile_rows {tile_rows}: an expert may have {most_rows} rows (most_rows), but gets "
            f"only one tile if tile_rows is one of {FEW}"
        )


def row_tiles(rows: int, experts: int, tile_rows: int, most_rows: int) -> int:
    """Return an upper bound of the row tiles for any counts. An expert has at least one row, so
    each adds at most one tile that is not full."""
    used = min(rows, experts)
    by_rows = (rows + used * (tile_rows - 1)) // tile_rows
    return min(by_rows, used * -(-most_rows // tile_rows))


@dataclass(frozen=True)
class Problem:
    """Properties of a product that tiles are chosen by."""

    config: GroupedConfig  # follows from the arguments
    rows: int  # rows of x
    experts: int
    columns: int  # rows of the weights, of K elements
    k: int
    most_rows: int  # largest number of rows of an expert


@lru_cache(KEPT)
def decide(problem: Problem, tile_rows: int | None, tile_n: int | None) -> GroupedConfig:
    """Return the config to compile. Tiles that are None are chosen for the problem.

    Raises:
        ValueError, NotImplementedError: naming the value and what is possible.
    """
    config, bits = problem.config, 8 // FORMATS[problem.config.x_fmt or problem.config.fmt].per_byte
    rows, experts, most = problem.rows, problem.experts, problem.most_rows
    if tile_rows is None:
        tile_rows = choose_tile_rows(rows, experts, most, bits)
    if tile_n is None:
        tile_n = choose_tile_n(rows, problem.columns, tile_rows, bits)
    config = replace(config, tile_rows=tile_rows, tile_n=tile_n)
    config.check_values()
    return config


@lru_cache(KEPT)
def work_of(problem: Problem, config: GroupedConfig) -> tuple[int, int]:
    """Return (upper bound of tiles, CTAs that share a tile)."""
    columns = math.ceil(problem.columns / config.tile_n)
    sizes = problem.rows, problem.experts, config.tile_rows, problem.most_rows
    return row_tiles(*sizes) * columns, config.ctas


# ---- what may be measured

OPTIONS = ("tile_rows", "tile_n")
TUNED = Tuned("grouped_gemm", {arch: (kernel,) for arch, kernel in KERNELS.items()}, OPTIONS)


def choices(problem: Problem, arch: str) -> list[Choice]:
    """List the candidates for a problem: every tile that fits, on any architecture that has one."""
    found: list[Choice] = []
    for tile_rows in TILE_ROWS:
        for tile_n in TILE_N:
            try:
                check_tile_rows(tile_rows, problem.most_rows)
                replace(problem.config, tile_rows=tile_rows, tile_n=tile_n).check_values()
            except (ValueError, NotImplementedError):
                continue
            found.append({"tile_rows": tile_rows, "tile_n": tile_n})
    return found
