"""Sizes of the reduction of a cluster through distributed shared memory. Plain data.

A rank is a CTA, or a pair of CTAs with half of the columns of O each, that has a share of the keys
of a row tile. The ranks of a row tile exchange rows of O: each finishes some of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

PARTS_AHEAD = 4  # parts whose sums a merge loads at a time


@dataclass(frozen=True)
class MailPlan:
    """Mail of a row tile.

    rows: of the tile that have a head.
    cluster: ranks.
    stride: CTAs of a cluster between one rank and the next.
    columns: of O in a CTA.
    space: bytes for received rows and rows to send.
    most_rows: rows to send that there is space for.
    threads: of the role that sends and finishes rows, from thread 0 on.
    barrier: name of the named barrier of these threads.
    sums: of a row: its weights are added by so many threads, 1 or 2.
    """

    rows: int
    cluster: int
    stride: int
    columns: int
    space: int
    most_rows: int
    threads: int
    barrier: str
    sums: int = 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: O in bf16, fp32 maximum and one or two sums, padding.

        With 16 more than a multiple of 128 no two of eight rows share a bank.
        """
        return 2 * self.columns + 16

    @cached_property
    def owned_rows(self) -> int:
        """Rows of O that a rank finishes."""
        return -(-self.rows // self.cluster)

    @property
    def capacity(self) -> int:
        """Rows that can be received, beside those to send."""
        return self.space // self.row_bytes - self.most_rows

    @property
    def fits(self) -> bool:
        """Whether there is space for what all ranks send."""
        return self.owned_rows * self.cluster <= self.capacity

    @property
    def sent_at(self) -> int:
        """Byte of the space where rows to send begin."""
        return self.capacity * self.row_bytes

    @property
    def vectors(self) -> int:
        """Groups of eight columns."""
        return self.columns // 8

    @property
    def partial_words(self) -> int:
        """fp32 of a row in the workspace: O, maximum, sum, padding to 16 bytes."""
        return self.columns + 4
