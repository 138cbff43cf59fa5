"""Launch parameters of a compressor's kernels, word by word: see `kernelkit.device.param_table`.

Addresses and strides are in bytes; a tensor or table is given by the address of its first element.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelkit.device.param_table import Word
from kvcache.movement.config import Angles, Entries


@dataclass(frozen=True, kw_only=True)
class StepRows:
    """Values and scores of the tokens of a step, fp32 [T, columns] each."""

    values: Word
    scores: Word
    values_stride: Word  # between tokens
    scores_stride: Word
    tokens: Word  # number of tokens


@dataclass(frozen=True, kw_only=True)
class StepTables:
    """The tables of a step, as `mla.compressor.arguments.Tables` has them."""

    positions: Word
    owners: Word
    starts: Word
    cu_tokens: Word
    state_slots: Word
    ends: Word
    tail_rows: Word
    entries: Word


@dataclass(frozen=True, kw_only=True)
class Counts:
    """The work of a launch."""

    ends: Word
    requests: Word
    saved: Word  # rows of each request that clusters without windows save, at most
    window_clusters: Word  # clusters that have windows; those after them save rows


@dataclass(frozen=True, kw_only=True)
class TailSlots:
    """The tail of a layer: `rows` rows in every slot of its pool."""

    address: Word
    slot_stride: Word
    rows: Word
    slots: Word


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of a compressor."""

    ape: Word
    norm: Word
    ape_stride: Word  # between places in a window
    eps_bits: Word  # eps of the RMSNorm in fp32


@dataclass(frozen=True, kw_only=True)
class CompressParams:
    """Parameters of `device.Clusters`, for both kernels."""

    step: StepRows
    tables: StepTables
    counts: Counts
    tail: TailSlots
    weights: Weights
    angles: Angles
    entries: Entries
