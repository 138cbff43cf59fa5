"""Records of index keys and queries: which elements they have, and which of them share a scale.

Plain data: kernels, their reference and tests read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.layouts.records import INDEXER_BF16, INDEXER_FP4, INDEXER_FP8, Record

WIDTH = 128  # elements of a key, and of a head of a query
PIECE = 8  # neighbours that a lane has
LANES = WIDTH // PIECE  # of a row


@dataclass(frozen=True)
class IndexFormat:
    """Of one record.

    element: 'e2m1' (2j in the low bits of byte j), 'e4m3' or 'bf16'. group: elements with a scale
    in common, 0 of bf16. scale_size: bytes of a scale: 1, UE8M0, or 4, fp32.
    """

    record: Record
    element: str
    group: int = 0
    scale_size: int = 0

    @property
    def groups(self) -> int:
        """With a scale each."""
        return WIDTH // self.group if self.group else 0

    @property
    def group_lanes(self) -> int:
        """That share a scale."""
        return self.group // PIECE

    @property
    def piece_bytes(self) -> int:
        """Of a lane's elements."""
        return self.record.data_bytes // LANES


# By the name of the record.
FORMATS = {
    form.record.name: form
    for form in (
        IndexFormat(INDEXER_FP4, "e2m1", 32, 1),
        IndexFormat(INDEXER_FP8, "e4m3", 128, 4),
        IndexFormat(INDEXER_BF16, "bf16"),
    )
}


def index_format(record: str) -> IndexFormat:
    """NotImplementedError for a record that no index key has."""
    if record not in FORMATS:
        raise NotImplementedError(f"record {record}: index keys are of {[*FORMATS]}")
    return FORMATS[record]
