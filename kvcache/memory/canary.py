"""Notices that memory of a cache changed which nobody had a right to change.

Every slot of every pool ends in a guard that its number determines. What does not change any more
(full blocks, checkpoints, what is in the host tier) has a checksum, too, taken on the device when
it was complete. Looking waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvcache.books.work import Pool
from kvcache.layouts.layout import GUARD_BYTES
from kvcache.memory.storage import Storage
from kvcache.movement.api import checksum

GUARD_WORDS = GUARD_BYTES // 8
MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # an odd number without a pattern
SEALED = (Pool.BLOCKS, Pool.CHECKPOINTS, Pool.HOST_BLOCKS, Pool.HOST_STATES)


class Canary:
    """Guards of all pools of a storage, and checksums of the slots that are sealed."""

    def __init__(self, storage: Storage, *, backend: str = "auto", arch: str | None = None) -> None:
        self._storage = storage
        self._place: dict[str, Any] = {"backend": backend, "arch": arch}
        self._sums = {pool: torch.zeros(len(storage.pools[pool]), dtype=torch.int64,
                                        device=storage.device) for pool in SEALED}  # fmt: skip
        self.sealed: dict[Pool, set[int]] = {pool: set() for pool in SEALED}
        # A layout without states has no bytes in their pools.
        self.guarded = [pool for pool in Pool if storage.pools[pool].shape[1]]
        for pool in self.guarded:
            self._guards(pool).copy_(self._expected(pool))

    def seal(self, pool: Pool, slots: Sequence[int]) -> None:
        """These slots are complete: remember what is in them. Nothing waits."""
        if slots:
            numbers = self._numbers(slots)
            self._sums[pool][numbers] = self._checksums(pool, numbers)
            self.sealed[pool].update(slots)

    def unseal(self, pool: Pool, slots: Sequence[int]) -> None:
        """These slots are written again."""
        self.sealed[pool].difference_update(slots)

    def broken_seals(self, pool: Pool, slots: Sequence[int]) -> list[int]:
        """Those of the sealed among `slots` that hold something else than when they were sealed."""
        slots = [slot for slot in slots if slot in self.sealed[pool]]
        if not slots:
            return []
        numbers = self._numbers(slots)
        differ = self._checksums(pool, numbers) != self._sums[pool][numbers]
        return numbers[differ].tolist()

    def broken_guards(self, pool: Pool) -> list[int]:
        """Slots of `pool` whose guard was written."""
        differ = self._guards(pool) != self._expected(pool)
        return differ.any(1).nonzero().flatten().tolist()

    def _guards(self, pool: Pool) -> torch.Tensor:
        """A view int64 [slots, GUARD_WORDS]."""
        return self._storage.pools[pool][:, -GUARD_BYTES:].view(torch.int64)

    def _expected(self, pool: Pool) -> torch.Tensor:
        guards = self._guards(pool)
        first = list(Pool).index(pool) << 40
        numbers = torch.arange(guards.numel(), device=guards.device).view(guards.shape)
        return (numbers + first + 1) * MIX  # modulo 2^64

    def _checksums(self, pool: Pool, slots: torch.Tensor) -> torch.Tensor:
        memory = self._storage.pools[pool]
        end = memory.shape[1] - GUARD_BYTES
        return checksum(memory, slots, 0, end, **self._place)

    def _numbers(self, slots: Sequence[int]) -> torch.Tensor:
        return self._storage.table(torch.tensor(slots, dtype=torch.int64))
