"""Latent entries: NoPE elements, in groups that share a scale if they are quantised, and behind
them RoPE elements in bf16. Plain data: kernels, their reference and tests read it."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.layouts.records import BF16_512, FP8_584, FP8_656, Record

ROPE = 64  # elements, the last ones, rotated in neighbouring pairs
INLINE_SCALE_BYTES = 4
# What RoPE rotates by an angle: elements 2 i and 2 i + 1 (GPT-J), or i and i + 32 (NeoX).
NEIGHBOURS, HALVES = PAIRS = ("neighbours", "halves")


@dataclass(frozen=True)
class Latent:
    """Format of the latent entries of one record.

    group: number of NoPE elements that share a scale, 0 if all are bf16.
    inline: True: scales are fp32 in the data, after the NoPE elements.
        False: scales are bytes (UE8M0), apart from the data.
    """

    record: Record
    nope: int
    group: int = 0
    inline: bool = False

    @property
    def elements(self) -> int:
        """Number of elements of an entry."""
        return self.nope + ROPE

    @property
    def groups(self) -> int:
        """Number of groups, each with one scale."""
        return self.nope // self.group if self.group else 0

    @property
    def rope_offset(self) -> int:
        """Bytes of the data in front of the RoPE elements."""
        if not self.group:
            return 2 * self.nope
        return self.nope + self.groups * INLINE_SCALE_BYTES * self.inline


# By the name of the record.
LATENTS = {
    latent.record.name: latent
    for latent in (
        Latent(BF16_512, 448),
        Latent(FP8_584, 448, 64),
        Latent(FP8_656, 512, 128, inline=True),
    )
}
