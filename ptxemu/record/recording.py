"""Recorded launch: the blocks that each warp executed, and the effects of its instructions.

The path of a warp and the text of the kernel determine which instructions it executed. Events hold
what only the launch knows: which mbarrier, how many bytes, which accumulator. Instructions whose
effect is in their text (setmaxnreg, commit_group, a fence, tcgen05.ld) are in the path only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ptxemu.native.accesses import MEMORIES, SIZE_BITS
from ptxemu.syntax.tree import Instr

Barrier = tuple[int, int]  # rank of a CTA in its cluster, offset in its shared memory

Signalled = tuple[tuple[Barrier, int], ...]  # what an event does to mbarriers

# What an event is, and what stands in it.
INIT = "init"  # signals: mbarriers and the arrivals that they expect
ARRIVE = "arrive"  # signals: arrivals
EXPECT = "expect"  # signals: bytes
COMPLETE = "complete"  # mbarrier.complete_tx. signals: bytes
WAIT = "wait"  # successful, or test_wait. signals: parities
LOAD = "load"  # TMA or bulk copy from global memory. signals: bytes; shape: rows, bytes of
# each, bytes from one to the next
SEND = "send"  # to the shared memory of a CTA: bulk copy, st.async. signals: bytes; shape: targets
STORE = "store"  # TMA or bulk copy to global memory. shape: rows, bytes of each
MMA = "mma"  # tcgen05 or wgmma. shape: m, n, CTAs that take part
FILL = "fill"  # tcgen05.cp. shape: bytes of a CTA
COMMIT = "commit"  # signals: an arrival each
ARRIVE_AFTER = "arrive after copies"  # cp.async.mbarrier.arrive. signals: arrivals
BARRIER = "barrier"  # bar.sync or bar.arrive. shape: number, threads
ATOMIC = "atomic"  # shape: lanes


class Event(NamedTuple):
    """Effect of one instruction.

    Attributes:
        block: Execution of a block, an index of `WarpRecord.path`.
        site: Instruction, an index of `Recording.sites`.
    """

    block: int
    site: int
    what: str
    signals: Signalled = ()
    shape: tuple[int, ...] = ()
    address: int = 0  # where it begins in global memory, if it does


class Access(NamedTuple):
    """A load or store by the lanes of a warp.

    Attributes:
        nbytes: Bytes per lane.
        passes: Passes of shared memory, or sectors of 32 bytes in global memory.
        first: Lowest address.
    """

    memory: str
    store: bool
    nbytes: int
    passes: int
    first: int


@dataclass
class WarpRecord:
    """Record of a warp. path: the blocks that all or some of its lanes executed."""

    cluster: int
    rank: int
    index: int
    path: np.ndarray
    events: list[Event]
    words: np.ndarray  # two of each access, see `native.accesses`

    def accesses(self) -> Iterator[Access]:
        """Yield accesses in the order of execution."""
        for head, first in self.words.reshape(-1, 2).tolist():
            kind, passes = head & 0xFFFF, head >> 16
            memory, store = MEMORIES[kind >> SIZE_BITS + 1], bool(kind >> SIZE_BITS & 1)
            yield Access(memory, store, kind & (1 << SIZE_BITS) - 1, passes, first)


@dataclass
class Recording:
    """Recording of a launch.

    Attributes:
        smem_bytes: Shared memory per CTA, without the system's share.
        sites: Instructions of the kernel.
        blocks: Numbers of each block's instructions.
        arch: Target of the PTX.
        cubin: Machine code of the kernel.
        memory: Allocations at the launch, (begin, end), as far as the launcher knows them.
        dependent: Whether it may begin before the previous launch has ended (programmatic
            dependent launch).
        places: Clusters of the grid that are launched if they take over the work of the others
            (clusterlaunchcontrol), else 0.
    """

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    sites: list[Instr]
    blocks: list[range]
    arch: str
    warps: list[WarpRecord] = field(default_factory=list)
    cubin: bytes = b""
    memory: list[tuple[int, int]] = field(default_factory=list)
    dependent: bool = False
    places: int = 0
