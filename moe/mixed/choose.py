"""Choice of the tiles of the mixed product, from what the host knows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import product

from kernelkit.compile.arch import written_for
from kernelkit.plan import hw
from kernelkit.tune.choices import Choice, Tuned
from moe.mixed.config import (
    DEPTH,
    KERNELS,
    ROWS,
    ROWS_OF,
    SPLIT_ARCH,
    SPLIT_ROWS,
    SPLITS,
    MixedConfig,
    fits,
)

# (warpgroups, times 64 rows of weights of each) -> relative speed if reading weights is the bound.
# Measured on an H200 with gpt-oss-120b; modelled approximately for Blackwell.
READS_OF = {
    "sm_90a": {(2, 1): 0.80, (3, 1): 0.90, (4, 1): 0.95, (3, 2): 0.97, (4, 2): 1.0},
    "sm_100a": {(2, 2): 1.0, (2, 1): 0.88},
}
MANY = 128  # rows of a tile from which products are the bottleneck
MANY_TEAMS = {
    "sm_90a": {128: (3, 1), 160: (3, 1), 192: (2, 1), 256: (2, 1)},
    "sm_100a": {128: (2, 2), 256: (2, 1)},
}
# (architecture, dtype of x) -> limit of the average rows per expert: rows of tiles. With two sizes,
# experts that fit in the first one use it, other experts the second: the cost of a tile depends on
# its rows even if an expert has fewer, and a second tile reads the weights again.
TWO_SIZES = {
    16: (16, 32), 32: (32, 64), 64: (64, 96), 96: (96, 128), 128: (128, 160), 160: (160, 192),
    192: (192, 256),
}  # fmt: skip
BY_AVERAGE: dict[tuple[str, str], dict[float, tuple[int, ...]]] = {
    ("sm_90a", "bf16"): {1: (8,), 8: (8, 16), **TWO_SIZES, math.inf: (128,)},
    ("sm_90a", "e4m3"): {1: (8,), 4: (8, 16), **TWO_SIZES, math.inf: (256,)},
    ("sm_100a", "bf16"): {8: (16,), 16: (32,), 32: (64,), math.inf: (128,)},
}
LEAST_UNITS = 4  # least units of K per sharing CTA: two cost as much as the exchange (modelled)


def choose_tile_rows(rows: int, experts: int, arch: str, x: str = "bf16") -> tuple[int, ...]:
    """Choose tile_rows for `rows` rows of x sorted by expert, by the average number per expert."""
    by_average = BY_AVERAGE.get((arch, x), BY_AVERAGE[arch, "bf16"])  # unsupported pairs have none
    return next(tiles for most, tiles in by_average.items() if rows <= most * experts)


def choose_teams(
    rows: int, experts: int, columns: int, tile_rows: int, arch: str, x: str = "bf16"
) -> tuple[int, int]:
    """Choose (warpgroups, times 64 rows of weights of each) for `columns` rows of weights and rows
    of x."""
    if tile_rows >= MANY:
        return MANY_TEAMS[arch][tile_rows]
    reads = READS_OF[arch]
    possible = _possible_teams(tile_rows, arch, x)

    def cost(teams: tuple[int, int]) -> float:
        tall = teams[0] * teams[1]
        waves = -(-tiles_of(rows, experts, columns, tile_rows, tall) // hw.SMS_OF[arch])
        return waves * tall / reads[teams]

    return min(possible, key=cost)


@cache
def _possible_teams(tile_rows: int, arch: str, x: str) -> tuple[tuple[int, int], ...]:
    """Return (teams, parts) that fit. If none fits, return all: the config then raises with a
    reason."""
    reads = READS_OF[arch]
    return tuple(teams for teams in reads if fits(arch, tile_rows, *teams, x)) or tuple(reads)


def choose_split(tiles: int, tile_rows: int, units: int, arch: str) -> int:
    """Choose the number of CTAs that share each of `tiles` tiles along its `units` of K: the
    largest with an SM for each CTA, and enough of K for each; else 1."""
    if tile_rows > SPLIT_ROWS or arch != SPLIT_ARCH:
        return 1
    sms = hw.SMS_OF[arch]
    return max(n for n in SPLITS if n == 1 or (tiles * n <= sms and units >= n * LEAST_UNITS))


def tiles_of(rows: int, experts: int, columns: int, tile_rows: int, tall: int) -> int:
    """Estimate the number of tiles, each of `tall` times 64 rows of weights, from sizes alone."""
    of_rows = min(rows, experts) * max(1, rows // (experts * tile_rows))
    return of_rows * -(-columns // (ROWS * tall))


# ---- what may be measured

OPTIONS = ("tile_rows", "teams", "parts", "split")
TUNED = Tuned("mixed_gemm", {arch: (kernel,) for arch, kernel in KERNELS.items()}, OPTIONS)


@dataclass(frozen=True)
class Problem:
    """Properties of a product that tiles are chosen by."""

    config: MixedConfig  # follows from the arguments
    rows: int  # upper bound of rows of x
    experts: int
    columns: int  # rows of the weights, of K elements
    k: int
    most_rows: int = 0  # largest number of rows of an expert; 0: unknown


def choices(problem: Problem, arch: str) -> list[Choice]:
    """List the candidates for a problem, of one launch: every tile that fits, and every split with
    an SM for each CTA. Tiles are left out if an expert would have many of them, or fill a small
    part of one."""
    arch = written_for(arch)
    mean = problem.rows / problem.experts
    found: list[Choice] = []
    for tile_rows, teams in product(ROWS_OF[arch], READS_OF[arch]):
        if not tile_rows / 8 <= max(mean, 8) <= 8 * tile_rows:
            continue
        if not fits(arch, tile_rows, *teams, problem.config.x):
            continue
        tile = {"tile_rows": tile_rows, "teams": teams[0], "parts": teams[1]}
        sizes = problem.rows, problem.experts, problem.columns, tile_rows
        tiles = tiles_of(*sizes, teams[0] * teams[1])
        most = choose_split(tiles // 2, tile_rows, problem.k // DEPTH, arch)
        found += [tile | {"split": split} for split in SPLITS if split <= most]
    return found
