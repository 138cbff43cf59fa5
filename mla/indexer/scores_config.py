"""Configuration of the score kernels and the division of their work, as data.

A CTA has `tokens` neighbouring tokens with all their heads, and of their keys every n-th tile of
KEYS. Neighbouring tokens of one request are a run: they share the keys that the CTA reads.

Warp MMA: lane 4 g + i has, of a row of 128 elements, those of CHUNKS of 16 bytes, every fourth from
chunk i on. Keys and queries are read in the same way, so the order of elements along the K of an
MMA is arbitrary. All elements that a lane has of an e2m1 row share one scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import ClassVar

from kernelkit.plan import hw
from kvcache.layouts.records import INDEXER_BF16, INDEXER_FP4, INDEXER_FP8
from mla.indexer.formats import WIDTH

KEYS = 128  # keys in a tile
COLUMNS = 128  # heads x tokens of a CTA, at most; with wgmma, of a product
GROUPS = 4  # products of a CTA with wgmma, if it has more than one
HEADS = (16, 32, 64, 128)
RECORDS = {record.name: record for record in (INDEXER_FP4, INDEXER_FP8, INDEXER_BF16)}
PAGE_UNIT = 8  # the rows of a page are a multiple of it; lanes read this many together
CHUNK_BYTES = 16
LANE_ELEMENTS = WIDTH // 4  # elements of a row that a lane has
LANE_WORDS = LANE_ELEMENTS // 2  # in bf16
WARP_KEYS = 32
HEADS_OF_MMA = 8
STEPS = 4  # steps along K, two MMAs each
WAVES = 8  # numbers of waves that are tried, from the smallest on
# CTAs that share an SM: the number that fits without a spill of registers. With one token of at
# least NARROW_HEADS heads, a CTA needs fewer registers.
CTAS_PER_SM = {"indexer_fp4": 3, "indexer_fp8": 3, "indexer_bf16": 2}
NARROW = {("indexer_fp4", "sm_90a"), ("indexer_fp4", "sm_100a"), ("indexer_fp8", "sm_90a")}
NARROW_HEADS, NARROW_CTAS = 32, 4


@dataclass(frozen=True)
class ScoresConfig:
    """Configuration common to all score kernels.

    record: a name of RECORDS, the format of keys and queries.
    heads: one of HEADS.
    tokens: number of tokens of a CTA.
    out: 'fp32' or 'bf16'.
    """

    record: str
    heads: int
    tokens: int
    out: str

    @property
    def columns(self) -> int:
        """Number of columns of a product: heads of all tokens of a CTA."""
        return self.heads * self.tokens


@dataclass(frozen=True)
class WarpConfig(ScoresConfig):
    """Configuration with mma.sync in 16 bits, to which every record is dequantised exactly.

    ctas_per_sm: number of CTAs resident on an SM.
    """

    ctas_per_sm: int
    threads: int = KEYS // WARP_KEYS * hw.WARP_THREADS

    @property
    def row_bytes(self) -> int:
        """Bytes of a key, or of one head of a query."""
        return RECORDS[self.record].data_bytes

    @property
    def chunks(self) -> int:
        """Number of chunks of a row that a lane holds."""
        return self.row_bytes // (4 * CHUNK_BYTES)

    @property
    def head_tiles(self) -> int:
        """Number of MMA head tiles of a token."""
        return self.heads // HEADS_OF_MMA

    @property
    def query_bytes(self) -> int:
        """Shared memory of the queries of a CTA, in bf16."""
        return self.columns * WIDTH * 2

    @property
    def weights_offset(self) -> int:
        """Offset in shared memory of the weights: fp32, one per column."""
        return self.query_bytes

    @property
    def spans_offset(self) -> int:
        """Offset in shared memory of the spans: (owner, count) per token, and one without owner."""
        return self.weights_offset + 4 * self.columns

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        return self.spans_offset + 8 * (self.tokens + 1)


def warp_config(record: str, heads: int, tokens: int, out: str, arch: str) -> WarpConfig:
    """Return the config for an architecture that kernels are written for."""
    ctas = CTAS_PER_SM[record]
    if heads * tokens < NARROW_HEADS:  # the loop over heads is unrolled completely
        ctas = 2
    elif tokens == 1 and (record, arch) in NARROW:
        ctas = NARROW_CTAS
    return WarpConfig(record, heads, tokens, out, ctas)


@dataclass(frozen=True)
class TiledConfig(ScoresConfig):
    """Configuration of kernels whose keys come by TMA.

    box: number of rows of a page that TMA moves at a time.
    """

    label: ClassVar = ("mla_indexer_scores",)  # of the kernel's name

    box: int

    @property
    def boxes(self) -> int:
        """Number of boxes in a tile of keys."""
        return KEYS // self.box


@dataclass(frozen=True)
class BlockScaledConfig(TiledConfig):
    """Configuration with tcgen05.mma of kind mxf4."""


@dataclass(frozen=True)
class WgmmaConfig(TiledConfig):
    """Configuration with wgmma in e4m3.

    A group of tokens fits into the columns of one product. If a CTA has one group, its warpgroups
    multiply different keys; otherwise it has GROUPS of them, which its warpgroups share out.

    at_once: tiles that a warpgroup multiplies without a pause, if the CTA has several groups.
    """

    at_once: int = 2

    @property
    def group_tokens(self) -> int:
        """Number of tokens of a group."""
        return min(self.tokens, COLUMNS // self.heads)

    @property
    def groups(self) -> int:
        """Number of groups."""
        return self.tokens // self.group_tokens

    @property
    def n(self) -> int:
        """Number of columns of a product: heads of the tokens of a group."""
        return self.heads * self.group_tokens


def tokens_for(heads: int, longest: int) -> int:
    """Return the tokens of a CTA if a request has up to `longest` tokens in a step."""
    return max(1, COLUMNS // heads) if longest > 1 else 1


def wgmma_tokens_for(heads: int, longest: int) -> int:
    """Return the tokens of a CTA of the wgmma kernel, as `tokens_for` does.

    Keys come from L2 once for all tokens of a CTA. So there are many, unless a group has all the
    tokens of a request.
    """
    group = tokens_for(heads, longest)
    return group if longest <= group else group * GROUPS


def box_for(rows: int) -> int:
    """Return the largest box of rows that always lies in one page of `rows` rows and one tile."""
    return gcd(rows, KEYS)


def grid_for(config: ScoresConfig, tokens: int, keys: int, at_once: int) -> tuple[int, int]:
    """Return (CTAs that share the tiles of up to `keys` keys, groups of tokens).

    The waves are short if many CTAs share the tiles, but each CTA first loads its queries, which
    takes as long as a tile.

    at_once: CTAs that run at the same time.
    """
    groups, tiles = -(-tokens // config.tokens), -(-keys // KEYS)
    fewest = -(-groups // at_once)
    _, turns = min(
        (waves * (turns + 1), turns)
        for waves in range(fewest, fewest + WAVES)
        for turns in (-(-tiles // (waves * at_once // groups)),)
    )
    return -(-tiles // turns), groups
