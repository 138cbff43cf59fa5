"""What a launch has written of the allocations it writes to.

No checker knows which element a tile should go to. But where several CTAs store the same to one
place, and others of the same allocation are left out, an index is likely to be wrong: that is a
note. The rest, which allocations are written in part, is for whoever looks for a wrong result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ptxemu.check.clocks import SITE_MASK
from ptxemu.check.findings import Side, line_of
from ptxemu.check.global_memory import GlobalShadow
from ptxemu.check.pointers import Pointers
from ptxemu.findings import NOTE, Access, Finding
from ptxemu.machine.memory import Block, GlobalMemory
from ptxemu.syntax.tree import Instr

_SHOWN = 3  # places in the source


@dataclass
class Coverage:
    """repeated: two stores of the same values to one address by two clusters, by their sites."""

    memory: GlobalMemory
    shadow: GlobalShadow
    pointers: Pointers
    sites: list[Instr]
    repeated: dict[tuple[int, int], tuple[Side, Side]] = field(default_factory=dict)

    def repeats(self, before: Side, now: Side) -> None:
        self.repeated.setdefault((before.stamp.site, now.stamp.site), (before, now))

    def findings(self, accesses: dict[tuple[int, int], tuple[Access, Access]]) -> Iterator[Finding]:
        """accesses: of each of `repeated`."""
        for key, (before, _) in self.repeated.items():
            block = self.memory.block_at(before.first)
            if block is None:
                continue
            size, (written, _) = block.end - block.start, self._written(block)
            if written < size:
                yield Finding(
                    "index",
                    f"two CTAs store the same to one place, and {size - written:,} of the "
                    f"{size:,} bytes there are written by nobody",
                    NOTE,
                    accesses=accesses[key],
                    missing="if each CTA is to have its own part: the CTA in the index of the tile",
                )

    def partly(self) -> list[str]:
        """A line for each allocation that is written, but not whole."""
        lines = []
        for block in self.memory.blocks():
            written, sites = self._written(block)
            size = block.end - block.start
            if 0 < written < size:
                where = list(dict.fromkeys(map(self._place, sites)))
                more = f" and {len(where) - _SHOWN} more" * (len(where) > _SHOWN)
                name = self.pointers.of_block(block) or f"{block.start:#x}"
                lines.append(
                    f"{name}: {written:,} of {size:,} bytes, at {', '.join(where[:_SHOWN])}{more}"
                )
        return lines

    def _place(self, site: int) -> str:
        return line_of(self.sites[site])

    def _written(self, block: Block) -> tuple[int, list[int]]:
        """How many bytes, and the instructions that wrote there last."""
        count, sites = 0, set[int]()
        for last in self.shadow.stamps(block.start, block.end):
            some = last[last != 0]
            count += len(some) * self.shadow.grain
            sites.update((some & SITE_MASK).tolist())
        return min(count, block.end - block.start), sorted(sites)
