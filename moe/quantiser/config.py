"""Configurations of the quantiser's kernels, and which thread does what, as data.

The quantising kernel works on tiles of 128 rows and as many columns as `unrolled` atoms of scale
factors have (see moe.formats). Four threads share a row, and a thread has `unrolled` neighbouring
scale factors with their elements. A warp has 8 rows, two neighbours in each quarter of the tile:
the words of an atom that it gathers are 32 consecutive bytes. `parts` CTAs share a tile.

If the scale of each token has to be found, a CTA has one or two whole rows instead, to read them
once. Two rows are of two quarters, since their words are adjacent. The lanes of a warp are divided
among the rows, and the warps alternate over the tiles. Values that they have read stay in registers
while they find the largest. A CTA has few rows, since other CTAs compute while it waits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from kernelkit.plan import hw
from moe.formats import FORMATS, SCALE_COLUMNS, SCALE_ROWS, BlockFormat

KEPT = 1024  # cached decisions
VECTOR_BYTES = 16  # bytes of a load, and alignment of rows
ELEMENTS = 32  # elements of a thread
QUARTERS = 4  # quarters of the rows of a tile
CODE_WORDS = VECTOR_BYTES // 4  # words of scale factors that a thread reads at a time
MAX_KEPT = 4  # tiles that a warp keeps, 16 registers each; others are read again
MAX_WHOLE, MAX_WARPS = 2, 4  # rows, warps of a CTA with whole rows
MAX_WARPS_OF_ONE = 16  # if rows are so few that a CTA has one


@dataclass(frozen=True)
class QuantiseConfig:
    """Static fields; sizes and strides are arguments.

    Scale factors of a scattered result are stored separately, at least CODE_WORDS words of a row;
    `SpreadConfig` copies them. Values of `scaling`, the source of the global scale:
    '': the format has none;
    'tensor', 'token': the amax of the input, or of each of its rows;
    'given', 'given rows': it is an argument, one for all rows or one for each of the result.
    """

    fmt: str  # a name of moe.formats.FORMATS
    dtype: str  # of the input: 'bf16' or 'fp16'
    gathered: bool = False  # rows come by index; see `choices`
    grouped: bool = False  # rows are sorted by expert; see `moe.formats`
    scaling: str = ""
    choices: int = 1  # neighbouring indices (slots) of one token
    scattered: bool = False  # each input row becomes `choices` rows at given places
    partial: bool = False  # some of these places are -1: none
    wide: bool = False  # a thread's part of a row always exists, and is stored at once
    whole: int = 0  # whole rows of a CTA, or 0
    kept: int = 0  # tiles of a whole row that stay in a warp's registers
    threads: int = 128

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return self.threads // hw.WARP_THREADS

    @property
    def neighbours(self) -> int:
        """Threads that share a row in a tile."""
        return hw.WARP_THREADS // self.whole if self.whole else SCALE_COLUMNS

    @property
    def unrolled(self) -> int:
        """Scale factors of a thread, and atoms of a tile: 64 bytes of a thread are in flight."""
        return ELEMENTS // self.format.block

    @property
    def format(self) -> BlockFormat:
        """Format that `fmt` names."""
        return FORMATS[self.fmt]

    @property
    def words(self) -> int:
        """32-bit words of the elements of a block."""
        return self.format.block // self.format.per_byte // 4

    @property
    def vector(self) -> int:
        """Elements of a load."""
        return VECTOR_BYTES // 2

    @property
    def parts(self) -> int:
        """CTAs that share a tile, or the rows of a block."""
        if self.whole:
            return SCALE_ROWS // self.whole
        return SCALE_ROWS * SCALE_COLUMNS // self.threads

    @property
    def columns(self) -> int:
        """Scale factors of a row in a tile."""
        return self.neighbours * self.unrolled

    def tiles(self, k: int) -> int:
        """Return the number of tiles of a row of k elements."""
        return -(-k // (self.format.block * self.columns))

    @property
    def of_rows(self) -> bool:
        """Whether every row of the result has a separate global scale."""
        return self.scaling in ("token", "given rows")


@dataclass(frozen=True)
class SpreadConfig:
    """The kernel that copies scale factors of rows to the blocks of their experts."""

    choices: int  # experts of a token
    of_rows: bool  # rows have global scales, which are copied, too
    threads: int = 128

    @property
    def parts(self) -> int:
        """CTAs that share a block."""
        return SCALE_ROWS * SCALE_COLUMNS // self.threads


@dataclass(frozen=True)
class AmaxConfig:
    """The kernel that finds the largest magnitudes of parts of a tensor, one of each CTA.

    bounded: rows are sorted by expert, and rows past the last expert's are ignored. unrolled:
    vectors that a thread has in flight. A row belongs to one CTA.
    """

    dtype: str
    bounded: bool = False
    threads: int = 256
    unrolled: int = 4

    @property
    def vector(self) -> int:
        """Elements of a load."""
        return VECTOR_BYTES // 2


AMAX_CTAS_OF_SM = 4  # most CTAs per SM; every quantising CTA reads their amaxes
CTAS_OF_AMAX = AMAX_CTAS_OF_SM * max(hw.SMS_OF.values())
CTAS = hw.SMS * 64  # least quantising CTAs; fewer search for their rows less often
CTAS_THAT_LOOK = hw.SMS * 16  # quantising CTAs if each first reads all amaxes
CTAS_THAT_SPREAD = hw.SMS * 16


@lru_cache(KEPT)
def ctas_of_block(config: QuantiseConfig, k: int, blocks: int) -> int:
    """Return the number of CTAs that share the tiles of a block with k columns."""
    if config.whole:
        return 1
    ctas = CTAS_THAT_LOOK if config.scaling == "tensor" else CTAS
    return min(config.tiles(k), -(-ctas // (blocks * config.parts)))


def with_whole_rows(config: QuantiseConfig, rows: int, k: int) -> QuantiseConfig:
    """Return `config` for CTAs that find scales of whole rows: for `rows` rows of k elements."""
    few = rows <= hw.SMS
    config = replace(config, whole=1 if few else MAX_WHOLE)
    tiles, most = config.tiles(k), MAX_WARPS_OF_ONE if few else MAX_WARPS
    warps = min(1 << (tiles - 1).bit_length(), most)
    kept = min(-(-tiles // warps), MAX_KEPT)
    return replace(config, kept=kept, threads=warps * hw.WARP_THREADS)


@lru_cache(KEPT)
def sized(config: QuantiseConfig, rows: int, k: int) -> QuantiseConfig:
    """Return the config for `rows` rows of k elements."""
    config = replace(config, wide=k % ELEMENTS == 0)
    return with_whole_rows(config, rows, k) if config.scaling == "token" else config


@lru_cache(KEPT)
def ctas_that_spread(config: SpreadConfig, atoms: int, blocks: int) -> int:
    """Return the number of CTAs that share the atoms of a block."""
    turns = -(-atoms // (CODE_WORDS * SCALE_COLUMNS))
    return min(turns, -(-CTAS_THAT_SPREAD // (blocks * config.parts)))
