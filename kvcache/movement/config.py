"""What the kernels that move data are compiled for, and which thread does what, as data.

Latent entries (append_swa, and gather of quantised ones): a warp has a row at a time, a lane two or
three pieces of PIECE neighbours, 32 pieces apart: every access of a warp is in one stretch. Lanes
side by side share a group with its scale; RoPE elements are in the last piece of eight lanes.

Plain rows: `lanes` neighbouring threads share a row, each with up to VECTORS vectors in flight.
Slots are cut in pieces, of up to LARGEST_PIECE bytes where there are many, a CTA each.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from kernelkit import hw
from kvcache.layouts.latent import LATENTS, ROPE, Latent

VECTOR_BYTES = 16  # the widest access
PIECE = 8  # elements of a lane at a time: 16 bytes of bf16
VECTORS = 4  # in flight, of a thread that copies
SMALLEST_PIECE, LARGEST_PIECE = 1 << 12, 1 << 15  # of a slot, by one CTA
# At most; they take turns. With fewer, those that have a row more than others are waited for.
CTAS = hw.SMS * 512


@dataclass(frozen=True)
class LatentConfig:
    """record: a name of kvcache.layouts.latent.LATENTS."""

    record: str

    @property
    def latent(self) -> Latent:
        """What `record` names."""
        return LATENTS[self.record]

    @property
    def pieces(self) -> int:
        """Of a lane."""
        return -(-self.latent.elements // (PIECE * hw.WARP_THREADS))

    @property
    def last_lanes(self) -> int:
        """With elements in their last piece."""
        return self.latent.elements // PIECE - hw.WARP_THREADS * (self.pieces - 1)

    @property
    def rope_lane(self) -> int:
        """The first with RoPE elements in its last piece; all behind it have some there, too."""
        return self.last_lanes - ROPE // PIECE

    @property
    def group_lanes(self) -> int:
        """That share a scale."""
        return self.latent.group // PIECE


@dataclass(frozen=True)
class AppendConfig(LatentConfig):
    """dtype: of kv, 'bf16' or 'fp32'."""

    dtype: str
    threads: int = 128

    @property
    def rows(self) -> int:
        """That a CTA has at a time, one for every warp."""
        return self.threads // hw.WARP_THREADS


@dataclass(frozen=True)
class DequantiseConfig(LatentConfig):
    """gather of quantised entries, to bf16."""

    threads: int = 128

    @property
    def rows(self) -> int:
        """That a CTA has at a time, one for every warp."""
        return self.threads // hw.WARP_THREADS


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
        """That a CTA has at a time."""
        return self.threads // self.lanes


@dataclass(frozen=True)
class CopyConfig:
    """Slots to slots; segmented: a table says which of their bytes."""

    segmented: bool
    threads: int = 256


@dataclass(frozen=True)
class ChecksumConfig:
    """Two sums of 32 bits over the words of a range of a slot."""

    threads: int = 256

    @property
    def warps(self) -> int:
        """Of a CTA."""
        return self.threads // hw.WARP_THREADS


def vector_of(*numbers: int) -> int:
    """Bytes of the widest access with which all of these addresses, strides and sizes go."""
    return gcd(VECTOR_BYTES, *numbers)


def lanes_of(row_bytes: int, vector: int) -> int:
    """Threads of a row: a power of two, so many that each has VECTORS vectors or fewer."""
    wanted = -(-row_bytes // (vector * VECTORS))
    return min(hw.WARP_THREADS, 1 << (wanted - 1).bit_length())


def ctas_for(items: int, at_once: int = 1) -> int:
    """CTAs for so many items, of which one CTA has `at_once`."""
    return min(-(-items // at_once), CTAS)


def piece_bytes(total: int) -> int:
    """Of a slot, a power of two, where `total` bytes are to be shared by all SMs."""
    wanted = min(max(total // (hw.SMS * 2), SMALLEST_PIECE), LARGEST_PIECE)
    return 1 << (wanted.bit_length() - 1)
