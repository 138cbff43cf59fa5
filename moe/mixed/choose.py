"""Tiles of the mixed product: chosen by what the host knows."""

from __future__ import annotations

from kernelkit import hw
from moe.mixed.config import LEAST_ROWS, ROWS, SPLIT_ARCH, SPLIT_ROWS, SPLITS, TILE_ROWS, fits

# (warpgroups, times 64 rows of weights of each) -> how fast weights are read, where that is what
# takes the time: measured on an H200 with gpt-oss-120b; of Blackwell about what is modelled
READS_OF = {
    "sm_90a": {(2, 1): 0.80, (3, 1): 0.93, (3, 2): 0.97, (4, 2): 1.0},
    "sm_100a": {(2, 2): 1.0, (2, 1): 0.88},
}
MANY = 128  # rows of a tile from which products take the time
MANY_TEAMS = {"sm_90a": (3, 1), "sm_100a": (2, 2)}
LARGEST = 128  # rows of a tile: more are read from shared memory no less often
LEAST_UNITS = 4  # of K, of a CTA that shares a tile: two cost what the exchange does, as modelled


def choose_tile_rows(rows: int, experts: int, arch: str) -> int:
    """For `rows` rows sorted by expert: twice as many as an expert has on average, since a second
    tile reads the weights again, and a tile with fewer rows costs what these do."""
    twice = min(-(-2 * rows // experts), LARGEST)
    return next(n for n in TILE_ROWS if n >= max(twice, LEAST_ROWS[arch]))


def choose_teams(
    rows: int, experts: int, columns: int, tile_rows: int, arch: str
) -> tuple[int, int]:
    """(warpgroups, times 64 rows of weights): of `columns` rows of weights."""
    if tile_rows >= MANY:
        return MANY_TEAMS[arch]
    reads = READS_OF[arch]

    def cost(teams: tuple[int, int]) -> float:
        tall = teams[0] * teams[1]
        waves = -(-tiles_of(rows, experts, columns, tile_rows, tall) // hw.SMS_OF[arch])
        return waves * tall / reads[teams]

    # Where none fits, any: the config says why.
    return min([teams for teams in reads if fits(arch, tile_rows, *teams)] or reads, key=cost)


def choose_split(tiles: int, tile_rows: int, units: int, arch: str) -> int:
    """CTAs that share each of so many tiles along its `units` of K: the most that find an SM each
    beside the others, and have enough of K; 1 where none may."""
    if tile_rows > SPLIT_ROWS or arch != SPLIT_ARCH:
        return 1
    sms = hw.SMS_OF[arch]
    return max(n for n in SPLITS if n == 1 or (tiles * n <= sms and units >= n * LEAST_UNITS))


def tiles_of(rows: int, experts: int, columns: int, tile_rows: int, tall: int) -> int:
    """As far as sizes say: of `tall` times 64 rows of weights."""
    of_rows = min(rows, experts) * max(1, rows // (experts * tile_rows))
    return of_rows * -(-columns // (ROWS * tall))
