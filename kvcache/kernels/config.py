"""What the kernels that move data are compiled for, and which thread does what, as data.

Latent entries (append_swa and gather of FP8_584): a warp has a row of LATENT elements, a lane two
pieces of PIECE neighbours, 32 pieces apart, so that every access of a warp is in one stretch.
Eight lanes share a group of 64 with its scale; the last eight have the RoPE elements second.

Plain rows: `lanes` neighbouring threads share a row, each with up to VECTORS vectors in flight.
Slots are cut in pieces, of up to LARGEST_PIECE bytes where there are many, a CTA each.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from kernelkit import hw

VECTOR_BYTES = 16  # the widest access
LATENT, ROPE, GROUP = 512, 64, 64  # elements of an entry, of them rotated, and with one scale
NOPE = LATENT - ROPE
GROUPS = NOPE // GROUP
PIECE = 8  # elements of a lane at a time: 16 bytes of bf16
PIECES = LATENT // (PIECE * hw.WARP_THREADS)
GROUP_LANES = GROUP // PIECE
ROPE_LANE = hw.WARP_THREADS - ROPE // PIECE  # the first one with RoPE elements, in the last piece
VECTORS = 4  # in flight, of a thread that copies
SMALLEST_PIECE, LARGEST_PIECE = 1 << 12, 1 << 15  # of a slot, by one CTA
CTAS = hw.SMS * 32  # at most; they take turns


@dataclass(frozen=True)
class AppendConfig:
    """record: 'bf16_512' or 'fp8_584'; dtype: of kv, 'bf16' or 'fp32'. unrolled: rows that a warp
    has in flight."""

    record: str
    dtype: str
    threads: int = 128
    unrolled: int = 2

    @property
    def quantised(self) -> bool:
        """Whether NoPE elements become e4m3 with scales."""
        return self.record == "fp8_584"

    @property
    def rows(self) -> int:
        """That a CTA has at a time, one for every warp."""
        return self.threads // hw.WARP_THREADS


@dataclass(frozen=True)
class DequantiseConfig:
    """gather of FP8_584, to bf16."""

    threads: int = 128
    unrolled: int = 2

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
