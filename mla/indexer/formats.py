"""Records of index keys and queries: their elements, and the groups of elements that share a scale.

This module is plain data: kernels, their reference and tests read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.layouts.latent import HALVES, NEIGHBOURS, PAIRS
from kvcache.layouts.records import INDEXER_BF16, INDEXER_FP4, INDEXER_FP8, Record

WIDTH = 128  # elements of a key, and of a head of a query
PIECE = 8  # neighbours that a lane holds
LANES = WIDTH // PIECE  # lanes that hold a row


@dataclass(frozen=True)
class Rotation:
    """How a key or a query of the indexer is rotated before it is quantised. The default is that
    of DeepSeek-V4; q . k keeps its value if keys and queries are rotated alike.

    pairs: 'neighbours' or 'halves', what an angle rotates.
    rope_first: the first 64 elements are rotated (DeepSeek-V3.2, GLM-5), not the last 64.
    hadamard: whether the row then goes through the Hadamard transform.
    """

    pairs: str = NEIGHBOURS
    rope_first: bool = False
    hadamard: bool = True

    def check(self) -> None:
        """Raise ValueError for pairs that do not exist."""
        if self.pairs not in PAIRS:
            raise ValueError(f"pairs {self.pairs!r}: one of {PAIRS}")


PLAIN = Rotation()
# DeepSeek's inference code of V3.2, and transformers' `DeepseekV32Indexer`, `GlmMoeDsaIndexer`.
V32 = Rotation(HALVES, rope_first=True)
GLM5 = Rotation(rope_first=True)


@dataclass(frozen=True)
class IndexFormat:
    """Index format of one record.

    element: 'e2m1' (element 2j in the low bits of byte j), 'e4m3' or 'bf16'.
    group: number of elements that share a scale, 0 for bf16.
    scale_size: bytes of a scale: 1 (UE8M0) or 4 (fp32).
    """

    record: Record
    element: str
    group: int = 0
    scale_size: int = 0

    @property
    def groups(self) -> int:
        """Number of groups, each with one scale."""
        return WIDTH // self.group if self.group else 0

    @property
    def group_lanes(self) -> int:
        """Number of lanes whose elements share one scale."""
        return self.group // PIECE

    @property
    def piece_bytes(self) -> int:
        """Bytes of one lane's elements."""
        return self.record.data_bytes // LANES


# The keys are names of records.
FORMATS = {
    form.record.name: form
    for form in (
        IndexFormat(INDEXER_FP4, "e2m1", 32, 1),
        IndexFormat(INDEXER_FP8, "e4m3", 128, 4),
        IndexFormat(INDEXER_BF16, "bf16"),
    )
}


def index_format(record: str) -> IndexFormat:
    """Return the IndexFormat of a record, or raise NotImplementedError."""
    if record not in FORMATS:
        raise NotImplementedError(f"record {record}: index keys are in one of {[*FORMATS]}")
    return FORMATS[record]
