"""What a thread of the Blackwell kernel that owns a row works with."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Boolean, Int32

from fmha.shared.args import Buffers, Pipes, Row, Scalars


@dataclass(frozen=True)
class OwnRow(Row):
    """What a softmax or correction thread owns: a query row, or half of one in a CTA pair."""

    lane: Int32  # of TMEM; the thread among the 128 of its query tile
    row: Int32  # in this CTA's part of the tile
    half: Int32  # 0; in a pair 1 for the second half of the columns
    q_tile: Int32  # which of the CTA's query tiles the row is in


@dataclass(frozen=True)
class Lane:
    """What a thread that owns a row works with, the same for all tiles."""

    row: OwnRow
    scores: cute.Tensor | None  # fp32 registers: S, then its weights; correction has none
    scalars: Scalars
    buffers: Buffers
    pipes: Pipes
    negative: Boolean | None = None  # whether scores are negated: their factor is below 0
