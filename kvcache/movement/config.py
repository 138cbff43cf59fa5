"""What the kernels that move data are compiled for, and which thread does what, as data.

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

from kernelkit.plan import hw
from kvcache.layouts.latent import LATENTS, ROPE, Latent

VECTOR_BYTES = 16  # the widest access
WORD_BYTES = 4
PIECE = 8  # elements of a lane at a time: 16 bytes of bf16
VECTORS = 4  # that a thread which copies has in flight
PAGES_VECTORS = 2  # the same of K and of V each, with pages by strides
SMALLEST_PIECE, LARGEST_PIECE = 1 << 12, 1 << 15  # bytes of a slot that a CTA takes at a time
# The largest grid; its CTAs take turns. In a smaller one the CTAs that have a row more than the
# others would be waited for.
CTAS = hw.SMS * 512


@dataclass(frozen=True)
class LatentConfig:
    """What both kernels of latent entries are compiled for.

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
        """How many lanes have elements in their last piece."""
        return self.latent.elements // PIECE - hw.WARP_THREADS * (self.pieces - 1)

    @property
    def rope_lane(self) -> int:
        """The first lane with RoPE elements in its last piece; all behind it have some there."""
        return self.last_lanes - ROPE // PIECE

    @property
    def group_lanes(self) -> int:
        """How many lanes share a scale."""
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
    """Rows as they are, from tokens to entries or, gathered, from entries to tokens.

    vector: bytes of an access; lanes: threads of a row; pairs: tensors with rows of their own.
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

    vector: bytes of an access to what is read; lanes: threads of a token; quantised: the dtype of
    tokens that become e4m3, '' for bytes as they are; scaled: divided by a number first.
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
