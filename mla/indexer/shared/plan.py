"""What the shared load roles read of a plan, as data.

Queries are loaded once; keys come through a ring, a tile at a time. The scales of a tile are one
word of each key, and come through a ring of their own with as many stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelkit.plan import hw
from kernelkit.plan.edges import EdgePlan
from kernelkit.plan.smem import SmemPlan
from mla.indexer.scores_config import KEYS, RECORDS, TiledConfig

SCALE_BYTES = 4  # bytes of the scales of a key
STAGE_SCALE_BYTES = KEYS * SCALE_BYTES


@dataclass(frozen=True)
class TiledPlan:
    """Base of the plans of kernels whose keys come by TMA."""

    config: TiledConfig

    @property
    def stages(self) -> int:
        """Number of stages of the rings of keys and of scales."""
        raise NotImplementedError

    @property
    def edges(self) -> EdgePlan:
        """Producer-consumer edges between the roles."""
        raise NotImplementedError

    @property
    def smem(self) -> SmemPlan:
        """Shared memory of a CTA, with a buffer `barriers`."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise ValueError if the plan exceeds the limits of a CTA."""
        self.edges.roles.check()
        self.edges.check()
        self.smem.check()
        (room,) = (buffer.bytes for buffer in self.smem.buffers if buffer.name == "barriers")
        if self.edges.barrier_bytes > room:
            raise ValueError(f"{self.edges.barrier_bytes} bytes of mbarriers, limit {room}")

    @property
    def row_bytes(self) -> int:
        """Bytes of a key, or of one head of a query."""
        return RECORDS[self.config.record].data_bytes

    @property
    def scale_steps(self) -> tuple[int, int]:
        """Bytes in shared memory from the scales of a key to those of the next one, and of the one
        32 keys later.
        """
        return SCALE_BYTES, hw.WARP_THREADS * SCALE_BYTES
