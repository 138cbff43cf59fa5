"""Launch parameters of the indexer's kernels, word by word: see `kernelkit.device.param_table`.

Strides are in bytes; a tensor or table is given by the address of its first element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernelkit.device.param_table import Word
from kvcache.movement.config import Angles

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """The rows of a tensor [T, H, ...], one for each head of a token."""

    address: Word
    token_stride: Word
    head_stride: Word

    @classmethod
    def of(cls, tensor: torch.Tensor) -> HeadRows:
        """Describe the rows of a tensor [T, H, ...], or the elements of a tensor [T, H]."""
        token, head = (step * tensor.itemsize for step in tensor.stride()[:2])
        return cls(address=tensor, token_stride=token, head_stride=head)


@dataclass(frozen=True, kw_only=True)
class QueryParams:
    """Parameters of `query_kernel.Query`."""

    q: HeadRows
    weights: HeadRows
    heads: Word
    rows: Word  # number of heads of all tokens
    positions: Word  # int64 [T]
    angles: Angles
    data: Word  # of the first row of the result
    scales: Word  # of the first row of the result
    out_weights: Word  # fp32 [T, H]
    factor_bits: Word  # fp32 bits of the factor of the weights


@dataclass(frozen=True, kw_only=True)
class ScoresParams:
    """Parameters of the score kernels: `scores_kernel`, `sm90.kernel` and `sm100.kernel`."""

    data: Word  # address of the first key of slot 0
    scales: Word
    slot_stride: Word
    rows: Word  # rows in a slot
    slots: Word
    q: HeadRows
    q_scales: HeadRows
    weights: Word  # fp32 [T, H]
    weights_stride: Word  # between tokens
    owners: Word  # int32 [T]
    counts: Word  # int32 [T]
    block_tables: Word  # int32 [requests, blocks]
    table_stride: Word  # between requests
    blocks: Word
    requests: Word
    out: Word  # [tokens, keys]
    out_stride: Word  # between tokens
    keys: Word
    tokens: Word


@dataclass(frozen=True, kw_only=True)
class SelectParams:
    """Parameters of `select_kernel.Select`.

    The fields from `owners` on are zeros if candidates are entries themselves.
    """

    scores: Word  # [T, columns]
    scores_stride: Word  # between rows
    columns: Word
    counts: Word  # int32 [T], number of candidates of each row
    k: Word
    entries: Word  # int64 [T, k]
    chosen: Word  # int32 [T], number of valid entries of each row
    owners: Word = 0  # int32 [T]
    block_tables: Word = 0  # int32 [requests, blocks]
    table_stride: Word = 0  # between requests
    requests: Word = 0
    blocks: Word = 0
    block_entries: Word = 0  # entries in a block
