"""Counters of a cache, and events for listeners that follow its contents."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Since the manager was made."""

    admitted: int = 0
    freed: int = 0
    preempted: int = 0
    forked: int = 0
    offloaded: int = 0
    fetched: int = 0
    appended_tokens: int = 0
    rolled_back_tokens: int = 0
    prompt_tokens: int = 0  # of admissions that asked the prefix cache
    hit_tokens: int = 0
    lost_hit_tokens: int = 0  # in cached blocks, but behind the last checkpoint
    blocks_copied_on_write: int = 0
    block_evictions: int = 0
    checkpoints: int = 0
    checkpoint_evictions: int = 0
    checkpoints_missed: int = 0  # an append went past the place
    checkpoints_skipped: int = 0  # every slot was in use


@dataclass(frozen=True)
class Metrics:
    """Current numbers in slots, bytes and tokens; `counters` count since the beginning.

    used: slots with holders.
    kept: slots without holders, but found by their content.
    waiting: slots that wait for device work.
    stranded_bytes: bytes of used blocks and states that are no entry of a request.
    """

    requests: int
    tokens: int
    blocks_used: int
    blocks_kept: int
    blocks_waiting: int
    blocks_available: int
    states_used: int
    states_available: int
    checkpoints_kept: int
    host_blocks_used: int
    host_states_used: int
    works_in_flight: int
    stranded_bytes: int
    counters: Counters


@dataclass(frozen=True)
class BlockStored:
    """A full block can be found. parent: digest of the block before it, or its chain's seed."""

    digest: bytes
    parent: bytes
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class BlockRemoved:
    """The block can no longer be found."""

    digest: bytes


@dataclass(frozen=True)
class CheckpointStored:
    """A hit can end behind the block with this digest."""

    digest: bytes


@dataclass(frozen=True)
class CheckpointRemoved:
    """The checkpoint can no longer be found."""

    digest: bytes


@dataclass(frozen=True)
class Cleared:
    """The prefix cache was cleared; nothing can be found."""


KVEvent = BlockStored | BlockRemoved | CheckpointStored | CheckpointRemoved | Cleared
