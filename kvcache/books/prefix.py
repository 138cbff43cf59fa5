"""The prefix cache: full blocks by the content of all tokens up to their end, and checkpoints.

The digest of a block hashes the digest of the block before it and its own token ids; the first
one's predecessor is a seed made of the request's salt (a tenant, an adapter: whatever makes equal
tokens mean different keys). Equal digests mean equal entries, so blocks and checkpoints are found
by them. Where requests have a state, a hit ends at a checkpoint: blocks alone are not enough.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from kvcache.books.metrics import (
    BlockRemoved,
    BlockStored,
    CheckpointRemoved,
    CheckpointStored,
    Cleared,
    Counters,
    KVEvent,
)
from kvcache.books.slot_pool import SlotPool
from kvcache.layouts.layout import Layout

DIGEST_BYTES = 16
_TOKEN = np.dtype("<i8")  # how tokens are hashed, on any machine


def seed(salt: bytes) -> bytes:
    """Return the first parent digest of a request's chain."""
    return blake2b(salt, digest_size=DIGEST_BYTES, person=b"kvcache seed").digest()


def chained(parent: bytes, tokens: np.ndarray) -> bytes:
    """The digest of a block of `tokens` behind the block `parent`."""
    content = tokens.astype(_TOKEN, copy=False).tobytes()
    return blake2b(parent + content, digest_size=DIGEST_BYTES, person=b"kvcache block").digest()


@dataclass(frozen=True)
class Match:
    """Cached part of a prompt: `blocks` with `digests`, and the checkpoint after them, or -1.

    lost: number of cached blocks after the last checkpoint, which cannot be used.
    """

    blocks: list[int]
    digests: list[bytes]
    checkpoint: int
    lost: int


@dataclass
class PrefixCache:
    """The keys of `blocks` and `checkpoints`, which are digests; see the module.

    events: what happened since they were last taken, None to keep none.
    """

    layout: Layout
    blocks: SlotPool
    checkpoints: SlotPool
    counters: Counters
    events: list[KVEvent] | None = None

    def __post_init__(self) -> None:
        self.blocks.on_evict = self._block_evicted
        self.checkpoints.on_evict = self._checkpoint_evicted

    def match(self, prompt: np.ndarray, salt: bytes) -> Match:
        """The longest beginning of `prompt` that can be used; one token at least is left out."""
        digests, slots = self._resident(prompt, salt)
        usable, checkpoint = len(digests), -1
        if self.layout.has_state:
            while usable and checkpoint < 0:
                found = self.checkpoints.find(digests[usable - 1])
                if found is None:
                    usable -= 1
                else:
                    checkpoint = found
        return Match(slots[:usable], digests[:usable], checkpoint, len(digests) - usable)

    def _resident(self, prompt: np.ndarray, salt: bytes) -> tuple[list[bytes], list[int]]:
        """Digests and slots of the prompt's blocks up to the first that is not there."""
        size, parent = self.layout.block_tokens, seed(salt)
        digests, slots = [], []
        for index in range((len(prompt) - 1) // size):
            parent = chained(parent, prompt[index * size : (index + 1) * size])
            slot = self.blocks.find(parent)
            if slot is None:
                break
            digests.append(parent)
            slots.append(slot)
        return digests, slots

    def store(self, slot: int, parent: bytes, digest: bytes, tokens: np.ndarray) -> None:
        """`slot` can be found by `digest`; the first with a content stays."""
        if self.blocks.register(slot, digest) and self.events is not None:
            self.events.append(BlockStored(digest, parent, tuple(map(int, tokens))))

    def forget(self, slot: int) -> None:
        """The block in `slot` cannot be found any more, nor what is behind it."""
        self._removed(self.blocks.unregister(slot))

    def forget_blocks(self, slots: Sequence[int], digests: Sequence[bytes]) -> None:
        """Forget those of the slots that are still registered under their digests."""
        for slot, digest in zip(slots, digests, strict=False):
            if self.blocks.key(slot) == digest:
                self.forget(slot)

    def forget_checkpoints(self, slots: Sequence[int], digests: Collection[bytes]) -> None:
        """No hit ends in these slots any more, if what they are known by is one of the digests:
        they may have been handed out again."""
        for key in map(self.checkpoints.key, slots):
            if key is not None and key in digests:
                self.forget_checkpoint(key)

    def store_checkpoint(self, slot: int, digest: bytes) -> None:
        """A hit may end behind the block `digest`."""
        self.checkpoints.register(slot, digest)
        self.counters.checkpoints += 1
        self._note(CheckpointStored(digest))

    def forget_checkpoint(self, digest: bytes) -> None:
        """No hit ends behind the block `digest` any more."""
        slot = self.checkpoints.find(digest)
        if slot is not None:
            self.checkpoints.unregister(slot)
            self._note(CheckpointRemoved(digest))

    def clear(self) -> None:
        """Forget all blocks and checkpoints; requests keep what they hold."""
        for pool in (self.blocks, self.checkpoints):
            for slot in map(pool.find, pool.registered()):
                if slot is not None:
                    pool.unregister(slot)
        self._note(Cleared())

    def _block_evicted(self, slot: int, digest: bytes) -> None:
        self.counters.block_evictions += 1
        self._removed(digest)

    def _removed(self, digest: bytes) -> None:
        self._note(BlockRemoved(digest))
        self.forget_checkpoint(digest)

    def _checkpoint_evicted(self, slot: int, digest: bytes) -> None:
        self.counters.checkpoint_evictions += 1
        self._note(CheckpointRemoved(digest))

    def _note(self, event: KVEvent) -> None:
        if self.events is not None:
            self.events.append(event)
