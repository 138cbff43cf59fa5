"""Configuration of the kernel, the lanes of a row, and the words that it is launched with.

A warp has a row of keys, of low-rank queries, or of queries that are normalised. Lane l has pieces
of PIECE neighbouring elements, from element PIECE l on, one every 32 PIECE elements. Rows of 64
RoPE elements take eight lanes each, keys of the indexer sixteen.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelkit.device.param_table import Word
from kernelkit.plan import hw
from kvcache.layouts.latent import LATENTS, ROPE, Latent
from kvcache.layouts.models import MLA_BF16
from kvcache.layouts.records import BF16_512, FP8_528, FP8_584, FP8_656, Record
from kvcache.movement.config import PIECE, Angles, Entries, TokenRows
from mla.attention.formats import FORMS, LATENT, Form
from mla.indexer.formats import LANES, Rotation
from mla.indexer.params import HeadRows

STEP = PIECE * hw.WARP_THREADS  # elements of a warp at a time
MAX_RANK = 4096  # elements of a low-rank query
INDEX_ROWS = hw.WARP_THREADS // LANES  # rows of the indexer that a warp takes at a time
ROPE_ROWS = hw.WARP_THREADS // (ROPE // PIECE)  # rows of 64 RoPE elements
# Records that a key may have. e4m3_576 has one scale for the tensor, see `formats.FORMS`.
STORED = {
    record.name: record
    for record in (BF16_512, MLA_BF16, FP8_584, FP8_656, FP8_528, Record("e4m3_576", 576))
}
# Those with RoPE elements in bf16, which `kvcache.movement.entry.store_piece` writes.
PIECED = {**LATENTS, MLA_BF16.name: Latent(MLA_BF16, LATENT)}


@dataclass(frozen=True)
class KeysConfig:
    """Latent keys.

    record: a name of STORED.
    weight: 'bf16' or 'fp32'.
    pairs: 'neighbours' or 'halves'.
    wide_slots: whether slots are int64, not int32.
    scaled: whether there is a scale for the tensor.
    """

    record: str
    weight: str
    pairs: str
    wide_slots: bool
    scaled: bool = False

    @property
    def form(self) -> Form:
        """Format of an entry."""
        return FORMS[self.record]

    @property
    def stored(self) -> Record:
        """The record."""
        return STORED[self.record]

    @property
    def pieces(self) -> int:
        """Pieces of a lane."""
        return -(-self.form.columns // STEP)

    @property
    def last_lanes(self) -> int:
        """Number of lanes with elements in their last piece, the last eight of them of RoPE."""
        return (self.form.columns - (self.pieces - 1) * STEP) // PIECE

    @property
    def rope_lane(self) -> int:
        """The first lane with RoPE elements in its last piece."""
        return self.last_lanes - ROPE // PIECE


@dataclass(frozen=True)
class IndexConfig:
    """Keys of the indexer. record: a name of `mla.indexer.formats.FORMATS`."""

    record: str
    weight: str
    rotation: Rotation
    wide_slots: bool


@dataclass(frozen=True)
class QueriesConfig:
    """Queries. normed: rows of 512 elements are normalised first; else 64 elements are rotated."""

    normed: bool
    pairs: str


@dataclass(frozen=True)
class LowRankConfig:
    """Low-rank queries of `width` elements, a multiple of PIECE."""

    width: int
    weight: str

    @property
    def pieces(self) -> int:
        """Pieces of a lane."""
        return -(-self.width // STEP)

    @property
    def last_lanes(self) -> int:
        """Number of lanes with elements in their last piece."""
        return (self.width - (self.pieces - 1) * STEP) // PIECE


@dataclass(frozen=True)
class GlueConfig:
    """The parts of a launch, at least one of them.

    wide_positions: whether positions are int64, not int32.
    pdl: programmatic dependent launch.
    """

    low_rank: LowRankConfig | None
    keys: KeysConfig | None
    index: IndexConfig | None
    queries: QueriesConfig | None
    wide_positions: bool
    pdl: bool = False
    threads: int = 128

    @property
    def warps(self) -> int:
        """Warps of a CTA, each with a row or a few of them at a time."""
        return self.threads // hw.WARP_THREADS

    def items(self, tokens: int, heads: int) -> int:
        """Number of turns of warps in a launch."""
        found = tokens * ((self.low_rank is not None) + (self.keys is not None))
        if self.index is not None:
            found += -(-tokens // INDEX_ROWS)
        if self.queries is not None:
            found += -(-tokens * heads // (1 if self.queries.normed else ROPE_ROWS))
        return found


@dataclass(frozen=True, kw_only=True)
class NormWords:
    """Weight of a norm, and its eps as bits in fp32; address 0 without weight."""

    weight: Word
    eps_bits: Word


@dataclass(frozen=True, kw_only=True)
class KeyWords:
    """Latent keys."""

    x: TokenRows
    norm: NormWords
    slots: Word  # int32 or int64 [T]
    entries: Entries
    scale: Word  # address of fp32, 0 without


@dataclass(frozen=True, kw_only=True)
class IndexWords:
    """Keys of the indexer."""

    x: TokenRows
    norm: NormWords
    bias: Word
    slots: Word
    entries: Entries


@dataclass(frozen=True, kw_only=True)
class QueryWords:
    """Queries: addresses of the first elements that are read and written."""

    x: HeadRows
    out: HeadRows
    heads: Word
    eps_bits: Word


@dataclass(frozen=True, kw_only=True)
class LowRankWords:
    """Low-rank queries."""

    x: TokenRows
    out: TokenRows
    norm: NormWords


@dataclass(frozen=True, kw_only=True)
class GlueParams:
    """Parameters of `kernel.Glue`; zeros for parts that are not there."""

    tokens: Word
    items: Word
    positions: Word  # int32 or int64 [T]
    angles: Angles
    low_rank: LowRankWords
    keys: KeyWords
    index: IndexWords
    queries: QueryWords
