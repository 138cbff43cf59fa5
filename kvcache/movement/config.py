"""Configurations and launch parameters of the kernels that move data, and the work of a thread.

Latent entries (append_swa, and gather of quantised ones): a warp takes a row at a time, and a lane
of it two or three pieces of PIECE neighbouring elements, 32 pieces apart, so that every access of a
warp is coalesced. Neighbouring lanes share a group with its scale; the RoPE elements are in the
last pieces of eight lanes.

Pages by strides: `lanes` neighbouring threads share a token, whose heads lie apart on either side.
Plain rows: `lanes` neighbouring threads share a row, each with up to VECTORS vectors in flight.
Slots are cut into pieces of up to LARGEST_PIECE bytes, and a CTA takes a piece at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING

from kernelkit.device.param_table import Word
from kernelkit.plan import hw
from kvcache.layouts.latent import LATENTS, ROPE, Latent

if TYPE_CHECKING:
    import torch

    from kvcache.layouts.rows import DataRows, Rows

VECTOR_BYTES = 16  # the widest access
WORD_BYTES = 4
PIECE = 8  # elements of a lane at a time: 16 bytes of bf16
VECTORS = 4  # that a thread which copies has in flight
PAGES_VECTORS = 2  # the same of K and of V each, with pages by strides
SMALLEST_PIECE, LARGEST_PIECE = 1 << 12, 1 << 15  # bytes of a slot that a CTA copies at a time
# CTAs of the largest grid. It exceeds the GPU on purpose: in a smaller grid, the others would wait
# for the CTAs that have one more row.
CTAS = hw.SMS * 512


@dataclass(frozen=True)
class LatentConfig:
    """Configuration common to both kernels of latent entries.

    record: a name of `kvcache.layouts.latent.LATENTS`.
    """

    record: str
    threads: int = field(default=128, kw_only=True)

    @property
    def rows(self) -> int:
        """The rows that a CTA takes at a time, one for every warp."""
        return self.threads // hw.WARP_THREADS

    @property
    def latent(self) -> Latent:
        """The elements of the record."""
        return LATENTS[self.record]

    @property
    def pieces(self) -> int:
        """The pieces of a lane."""
        return -(-self.latent.elements // (PIECE * hw.WARP_THREADS))

    @property
    def last_lanes(self) -> int:
        """Number of lanes that have elements in their last piece."""
        return self.latent.elements // PIECE - hw.WARP_THREADS * (self.pieces - 1)

    @property
    def rope_lane(self) -> int:
        """The first lane with RoPE elements in its last piece; all behind it have some there."""
        return self.last_lanes - ROPE // PIECE

    @property
    def group_lanes(self) -> int:
        """Number of lanes that share a scale."""
        return self.latent.group // PIECE


@dataclass(frozen=True)
class AppendConfig(LatentConfig):
    """Tokens to latent entries.

    dtype: of kv, 'bf16' or 'fp32'.
    """

    dtype: str


@dataclass(frozen=True)
class DequantiseConfig(LatentConfig):
    """Quantised entries, gathered, to bf16."""


@dataclass(frozen=True)
class RowsConfig:
    """Unquantised rows, from tokens to entries or, gathered, from entries to tokens.

    vector: bytes of an access.
    lanes: threads of a row.
    pairs: number of tensors with rows of their own.
    """

    vector: int
    lanes: int
    pairs: int = 1
    gathered: bool = False
    threads: int = 128

    @property
    def rows(self) -> int:
        """The rows that a CTA takes at a time."""
        return self.threads // self.lanes


@dataclass(frozen=True)
class PagesConfig:
    """Heads of K and V, from tokens to pages by strides or, gathered, from pages to tokens.

    vector: bytes of a read access.
    lanes: threads of a token.
    quantised: the dtype of tokens that become e4m3, '' for bytes as they are.
    scaled: whether tokens are divided by a number first.
    """

    vector: int
    lanes: int
    quantised: str = ""
    scaled: bool = False
    gathered: bool = False
    threads: int = 128

    @property
    def rows(self) -> int:
        """The tokens that a CTA takes at a time."""
        return self.threads // self.lanes

    @property
    def stored(self) -> int:
        """Bytes of an access to what is written."""
        return self.vector // 2 if self.quantised else self.vector


@dataclass(frozen=True)
class CopyConfig:
    """Slots to slots; segmented: a table says which of their bytes are copied."""

    segmented: bool
    threads: int = 256


@dataclass(frozen=True)
class ChecksumConfig:
    """Two sums of 32 bits over the words of a range of a slot."""

    threads: int = 256

    @property
    def warps(self) -> int:
        """The warps of a CTA."""
        return self.threads // hw.WARP_THREADS


def vector_of(*numbers: int) -> int:
    """The bytes of the widest access that divides all of these addresses, strides and sizes."""
    return gcd(VECTOR_BYTES, *numbers)


def lanes_of(row_bytes: int, vector: int, vectors: int = VECTORS) -> int:
    """The threads of a row: a power of two, so many that each has `vectors` vectors or fewer."""
    wanted = -(-row_bytes // (vector * vectors))
    return min(hw.WARP_THREADS, 1 << (wanted - 1).bit_length())


def ctas_for(items: int, at_once: int = 1) -> int:
    """The CTAs of a grid for so many items, of which a CTA takes `at_once` at a time."""
    return min(-(-items // at_once), CTAS)


def piece_bytes(total: int) -> int:
    """The size of a piece of a slot, a power of two, where all SMs share `total` bytes."""
    wanted = min(max(total // (hw.SMS * 2), SMALLEST_PIECE), LARGEST_PIECE)
    return 1 << (wanted.bit_length() - 1)


# ---- What they are launched with, word by word: see `kernelkit.device.param_table`.
#
# Addresses, strides and sizes are in bytes. A pool has slots at equal distances; a slot has `rows`
# rows, and an entry is a row of a slot: number slot * rows + row. Tokens, positions, cosines, sines
# and tables are given by the address of the first.


def _stride(x: torch.Tensor) -> int:
    """The bytes between rows."""
    return x.stride(0) * x.itemsize


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """The rows of a tensor [T, ...], one for each token."""

    address: Word
    stride: Word  # between rows
    count: Word

    @classmethod
    def of(cls, x: torch.Tensor) -> TokenRows:
        """Return the rows of a tensor [T, ...]."""
        return cls(address=x, stride=_stride(x), count=len(x))


@dataclass(frozen=True, kw_only=True)
class Angles:
    """The tables cos and sin [P, 32], fp32."""

    cos: Word
    sin: Word
    cos_stride: Word  # between positions
    sin_stride: Word
    positions: Word  # how many

    @classmethod
    def of(cls, cos: torch.Tensor, sin: torch.Tensor) -> Angles:
        """Return the angles of two tables."""
        strides = {"cos_stride": _stride(cos), "sin_stride": _stride(sin)}
        return cls(cos=cos, sin=sin, **strides, positions=len(cos))


@dataclass(frozen=True, kw_only=True)
class Entries:
    """The entries of a pool, whose record has data and perhaps scales."""

    data: Word  # address of that of entry 0
    scales: Word  # address of those of entry 0
    slot_stride: Word
    rows: Word  # of a slot
    count: Word

    @classmethod
    def of(cls, rows: Rows) -> Entries:
        """Return the entries of all slots of a pool."""
        return cls(
            data=(rows.pool, rows.data_offset),
            scales=(rows.pool, rows.scale_offset),
            slot_stride=rows.pool.stride(0),
            rows=rows.rows,
            count=rows.entries,
        )


@dataclass(frozen=True, kw_only=True)
class Slots:
    """A range of bytes, at an equal offset in every slot of a pool."""

    address: Word  # of the range in slot 0
    stride: Word  # between slots
    count: Word
    nbytes: Word  # of the range

    @classmethod
    def of(cls, pool: torch.Tensor, begin: int = 0, end: int | None = None) -> Slots:
        """Bytes `begin` to `end` of the slots of a pool [slots, bytes]: all without `end`."""
        return cls(
            address=(pool, begin),
            stride=pool.stride(0),
            count=len(pool),
            nbytes=(pool.shape[1] if end is None else end) - begin,
        )


@dataclass(frozen=True, kw_only=True)
class AppendParams:
    """`append_kernel.Append`: latent entries of tokens, rotated."""

    kv: TokenRows
    positions: Word  # int64 [T]
    slots: Word  # int64 [T], the entry of each token
    angles: Angles
    entries: Entries


@dataclass(frozen=True, kw_only=True)
class DequantiseParams:
    """`dequantise_kernel.Dequantise`: gathered entries."""

    entries: Entries
    indices: Word  # int64 [N]
    out: TokenRows


@dataclass(frozen=True, kw_only=True)
class RowPair:
    """A tensor [T, ...] and the rows of a pool that have the same bytes."""

    tokens: Word
    token_stride: Word
    data: Word  # address of entry 0
    slot_stride: Word
    rows: Word  # of a slot
    vectors: Word  # of a row, the widest accesses

    @classmethod
    def of(cls, rows: DataRows, x: torch.Tensor, vector: int) -> RowPair:
        """Return the pair of a pool's rows and a tensor, with accesses of `vector` bytes."""
        return cls(
            tokens=x,
            token_stride=_stride(x),
            data=(rows.pool, rows.data_offset),
            slot_stride=rows.pool.stride(0),
            rows=rows.rows,
            vectors=rows.row_bytes // vector,
        )


@dataclass(frozen=True, kw_only=True)
class RowsParams:
    """`rows_kernel.CopyRows` of one tensor."""

    mapping: Word  # int64 [T], the entry of each token
    tokens: Word
    entries: Word  # of each pool
    first: RowPair


@dataclass(frozen=True, kw_only=True)
class TwoRowsParams(RowsParams):
    """`rows_kernel.CopyRows` of two tensors, keys and values say."""

    second: RowPair


@dataclass(frozen=True, kw_only=True)
class PagePair:
    """K or V: heads of tokens, and those of rows of pages."""

    tokens: Word
    token_stride: Word
    token_head_stride: Word
    pages: Word
    page_stride: Word
    row_stride: Word
    head_stride: Word
    vectors: Word  # of a head, as they are read
    scale: Word  # address of a number in fp32, 0 without

    @classmethod
    def of(
        cls, x: torch.Tensor, pages: torch.Tensor, vectors: int, scale: torch.Tensor | None
    ) -> PagePair:
        """Return the pair of x [T, heads, D] and pages [pages, page_size, heads, D]."""
        token, head, _ = (stride * x.itemsize for stride in x.stride())
        page, row, page_head, _ = (stride * pages.itemsize for stride in pages.stride())
        return cls(
            tokens=x,
            token_stride=token,
            token_head_stride=head,
            pages=pages,
            page_stride=page,
            row_stride=row,
            head_stride=page_head,
            vectors=vectors,
            scale=0 if scale is None else scale,
        )


@dataclass(frozen=True, kw_only=True)
class PagesParams:
    """`pages_kernel.MovePages`."""

    slots: Word  # int64 [T], the row of the pages that a token has
    tokens: Word
    entries: Word  # rows of all pages
    rows: Word  # of a page
    heads: Word
    k: PagePair
    v: PagePair


@dataclass(frozen=True, kw_only=True)
class SlotsParams:
    """`slots_kernel.CopySlots`; all of it in `WholeSlotsParams` or `SegmentsParams`."""

    source: Slots
    target: Slots
    pairs: Word  # int64 [n, 2]: a slot of the source, a slot of the target
    count: Word  # of pairs


@dataclass(frozen=True, kw_only=True)
class WholeSlotsParams(SlotsParams):
    """Whole slots, in pieces of equal size."""

    piece_bytes: Word
    pieces: Word  # of a slot


@dataclass(frozen=True, kw_only=True)
class SegmentsParams(SlotsParams):
    """Segments of slots, a piece each."""

    segments: Word  # int64 [s, 3]: offset in a slot of the source, of the target, bytes
    pieces: Word


@dataclass(frozen=True, kw_only=True)
class ChecksumParams:
    """`checksum_kernel.Checksum`: of a range of some slots, in pieces of equal size."""

    pool: Slots
    slots: Word  # int64 [n]
    count: Word  # of slots to take
    sums: Word  # int64 [n], zeros at first
    pieces: Word  # of a range
    piece_bytes: Word
