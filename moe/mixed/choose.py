"""Tiles of Hopper's grouped GEMM: chosen by what the host knows."""

from __future__ import annotations

from kernelkit import hw
from moe.mixed.config import ROWS, SPLIT_ROWS, SPLITS, TILE_ROWS, fits

# (warpgroups, times 64 rows of weights of each) -> how fast weights are read, where that is what
# takes the time, measured on an H200 with gpt-oss-120b
READS = {(2, 1): 0.80, (3, 1): 0.93, (3, 2): 0.97, (4, 2): 1.0}
MANY = 128  # rows of a tile from which products take the time
LARGEST = 128  # rows of a tile: more are read from shared memory no less often
LEAST_UNITS = 4  # of K, of a CTA that shares a tile: two cost what the exchange does, as modelled


def choose_tile_rows(rows: int, experts: int) -> int:
    """For `rows` rows sorted by expert: twice as many as an expert has on average, since a second
    tile reads the weights again, and a tile with fewer rows costs what these do."""
    twice = min(-(-2 * rows // experts), LARGEST)
    return next(n for n in TILE_ROWS if n >= twice)


def choose_teams(rows: int, experts: int, columns: int, tile_rows: int) -> tuple[int, int]:
    """(warpgroups, times 64 rows of weights): of `columns` rows of weights."""
    if tile_rows >= MANY:
        return 3, 1

    def cost(teams: tuple[int, int]) -> float:
        tall = teams[0] * teams[1]
        waves = -(-tiles_of(rows, experts, columns, tile_rows, tall) // hw.SMS_OF["sm_90a"])
        return waves * tall / READS[teams]

    return min((teams for teams in READS if fits(tile_rows, *teams)), key=cost)


def choose_split(tiles: int, tile_rows: int, units: int) -> int:
    """CTAs that share each of so many tiles along its `units` of K: the most that find an SM each
    beside the others, and have enough of K."""
    if tile_rows > SPLIT_ROWS:
        return 1
    sms = hw.SMS_OF["sm_90a"]
    return max(n for n in SPLITS if n == 1 or (tiles * n <= sms and units >= n * LEAST_UNITS))


def tiles_of(rows: int, experts: int, columns: int, tile_rows: int, tall: int) -> int:
    """As far as sizes say: of `tall` times 64 rows of weights."""
    of_rows = min(rows, experts) * max(1, rows // (experts * tile_rows))
    return of_rows * -(-columns // (ROWS * tall))
