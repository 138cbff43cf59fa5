"""Data that a launch computed or fetched and never used, which shows a wrong index.

A K loop that is one iteration short leaves columns of A unread. A stage that is always the first
leaves tiles in shared memory unread. An MMA that does not accumulate overwrites results.

Right kernels do some of this too (rows past an end, prefetches). It is therefore reported only when
a script has failed. One case is a note, as it is hardly ever intended: a tile read with another
swizzle than it was written with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ptxemu.check import footprints
from ptxemu.check.allocations import Pointers
from ptxemu.check.clocks import SITE_MASK
from ptxemu.check.findings import Findings, line_of, short
from ptxemu.check.footprints import Cells, Span
from ptxemu.check.global_memory import GlobalShadow, Piece
from ptxemu.check.shadow import Shadow
from ptxemu.check.state import States
from ptxemu.check.tensor_maps import MAP_BYTES
from ptxemu.check.text import cut
from ptxemu.findings import NOTE, Access, Launch, place_of
from ptxemu.machine.memory import GlobalMemory
from ptxemu.machine.mma import Mma
from ptxemu.machine.state import Cta, Warp
from ptxemu.machine.tensor_map import decode
from ptxemu.machine.umma_desc import SmemDesc
from ptxemu.numerics.swizzle import Swizzle

_ASYNCHRONOUS = ("cp.async.bulk", "tcgen05.cp", "tcgen05.mma")
_AT_MOST = 2  # places that are listed


class Unused:
    """Unused data of one launch; it reads the race checker's state before each access is added."""

    def __init__(self, states: States, findings: Findings) -> None:
        self._states = states
        self._findings = findings
        self._sites = findings.sites
        self._made: Counter[int] = Counter()  # cells that an instruction has written
        # of these, by what has written them and what has written over them (0: the end), unread
        self._lost: Counter[tuple[int, int]] = Counter()
        self._swizzles: dict[int, Swizzle] = {}  # by the copy whose tensor map has it
        self._maps: set[tuple[int, int]] = set()
        self._seen: set[tuple[int, SmemDesc]] = set()
        self._products: set[tuple[int, footprints.Product]] = set()  # whose operands are among them
        self._copies: Counter[int] = Counter()
        self._outside: Counter[int] = Counter()  # copies whose box is wholly outside
        self._lines: dict[str | int, int] = {}  # the first site of each line of Python
        self._boxes: set[tuple[int, Cta, bytes]] = set()  # of each line: what its copies bring
        self._again: Counter[int] = Counter()  # copies of what the same line has brought before

    # -- what happens -------------------------------------------------------------------------

    def map_used(self, w: Warp, address: int) -> None:
        if (w.at, address) not in self._maps:
            self._maps.add((w.at, address))
            found = decode(w.machine.read_bytes(w, address, MAP_BYTES))
            self._swizzles[w.at] = found.swizzle

    def copied(self, site: int, cta: Cta, rows: np.ndarray) -> None:
        """A copy from global memory by a CTA: `rows` of its box lie inside of the tensor."""
        self._copies[site] += 1
        self._outside[site] += not len(rows)
        box = (self._line(site), cta, rows.tobytes())
        self._again[site] += box in self._boxes
        self._boxes.add(box)

    def lands(self, site: int, cta: Cta, cells: Cells) -> None:
        """Cells of shared memory are about to be written."""
        self._write(site, self._states.ctas[cta].shared, cells)

    def fills(self, site: int, cta: Cta, cells: Cells) -> None:
        """Cells of tensor memory are about to be written."""
        self._write(site, self._states.ctas[cta].tensor, cells)

    def multiplies(
        self, site: int, ctas: Sequence[Cta], mma: Mma, product: footprints.Product
    ) -> None:
        """Before an MMA."""
        if mma.accumulate and (site, product) in self._products:
            return
        instr, group = mma.instr, len(ctas)
        for cta in ctas:
            if not mma.accumulate:
                self.fills(site, cta, product.d)
            if (site, product) in self._products:
                continue
            self._products.add((site, product))
            self._look(site, cta, mma.b, instr.shape_of_b(group))
            if isinstance(mma.a, SmemDesc):
                self._look(site, cta, mma.a, instr.shape_of_a(group))

    def freed(self, cta: Cta, column: int, count: int) -> None:
        self._give_up(self._states.ctas[cta].tensor, footprints.column_cells(column, count))

    def ended(self, cta: Cta) -> None:
        shadow = self._states.ctas[cta].shared
        self._give_up(shadow, Span(0, len(shadow.last)))

    def _write(self, site: int, shadow: Shadow, cells: Cells) -> None:
        self._give_up(shadow, cells, site)
        self._made[site] += len(cells)

    def _give_up(self, shadow: Shadow, cells: Cells, by: int = 0) -> None:
        """Count the unread contents of cells, which end or are overwritten by write `by`."""
        for site, count in sorted(shadow.unread(cells).items()):
            self._lost[site, by] += count

    def _look(self, site: int, cta: Cta, desc: SmemDesc, shape: tuple[int, int, str, bool]) -> None:
        """Whether an operand has the swizzle that it was copied with."""
        if (site, desc) in self._seen:
            return
        self._seen.add((site, desc))
        shadow = self._states.ctas[cta].shared
        cells = footprints.operand_cells(desc, *shape, self._states.grain)
        for copy in shadow.writers(cells):
            swizzle = self._swizzles.get(copy)
            if swizzle is not None and swizzle != desc.swizzle:
                self._other_swizzle((copy, swizzle), (site, desc.swizzle), cta)

    def _other_swizzle(self, copy: tuple[int, Swizzle], mma: tuple[int, Swizzle], cta: Cta) -> None:
        (copied_at, written), (site, read) = copy, mma
        sides = (
            Access(cta.name(), short(instr.opcode), what, **place_of(instr))
            for instr, what in ((self._sites[copied_at], "write"), (self._sites[site], "read"))
        )
        self._findings.at(
            "swizzle",
            f"an MMA reads with swizzle {read.name} what a copy has written with swizzle "
            f"{written.name}",
            site,
            severity=NOTE,
            accesses=tuple(sides),
            missing="one swizzle in the tensor map, the layout and the matrix descriptor",
            rule="tcgen05, matrix descriptor; tensor, swizzling modes",
        )

    def told(self) -> tuple[Counter[Any], ...]:
        """Return the state for `add` in another process."""
        return self._made, self._lost, self._copies, self._outside, self._again

    def add(self, told: tuple[Counter[Any], ...]) -> None:
        """Add the state of other CTAs."""
        for mine, more in zip(Unused.told(self), told, strict=True):
            for key, count in more.items():  # zeros, too
                mine[key] += count

    # -- what is left -------------------------------------------------------------------------

    def lines(
        self, memory: GlobalMemory, shadow: GlobalShadow, pointers: Pointers
    ) -> Iterator[str]:
        """Yield the report, one text for each line of Python."""
        yield from _unread(memory, shadow, pointers, self._place)
        made, outside, copies, again = (
            self._by_place(each) for each in (self._made, self._outside, self._copies, self._again)
        )
        lost: dict[str, Counter[int]] = {}
        for (site, by), count in self._lost.items():
            if self._sites[site].opcode.startswith(_ASYNCHRONOUS):
                lost.setdefault(self._place(site), Counter())[by] += count
        for place, by_whom in lost.items():
            told = self._by_place(by_whom)
            at_end = told.pop("", 0)
            rest = [f"{_part(count, made[place])} by {other}" for other, count in told.items()]
            text = [f"overwritten, {' and '.join(rest)}"] * bool(rest)
            text += [f"left at the end, {_part(at_end, made[place])}"] * bool(at_end)
            yield f"{place}: what it wrote and nothing read was {'; '.join(text)}"
        for place, count in outside.items():
            if count:
                yield f"{place}: {count} of {copies[place]} boxes lie wholly outside of the tensor"
        for place, count in again.items():
            if 2 * count >= copies[place]:
                yield (
                    f"{place}: {count} of its {copies[place]} copies fetch again what the CTA had"
                    " fetched there: is the index of the tile right?"
                )

    def _line(self, site: int) -> int:
        """Equal for the instructions of one line of Python: an unrolled loop is one."""
        return self._lines.setdefault(self._sites[site].source or site, site)

    def _by_place(self, counts: Counter[int]) -> Counter[str]:
        """Sum counts of instructions by line of Python, so that an unrolled loop is one entry."""
        found: Counter[str] = Counter()
        for site, count in counts.items():
            found[self._place(site) if site else ""] += count
        return found

    def _place(self, site: int) -> str:
        instr = self._sites[site]
        return f"{short(instr.opcode)} at {line_of(instr)}"


def _part(count: int, whole: int) -> str:
    return f"{min(100, max(1, 100 * count // max(whole, 1)))} %"


def clues(launches: Iterable[Launch]) -> str:
    """Return possible causes of a wrong result without a broken rule; "" if there are none."""
    by_entry: dict[str, dict[str, None]] = {}
    for launch in launches:
        lines = by_entry.setdefault(launch.entry, {})
        lines |= dict.fromkeys(f"written in part: {part}" for part in launch.partly)
        lines |= dict.fromkeys(launch.unused)
    blocks = [
        f"what may explain a wrong result, in kernel {cut(entry)}:\n  " + "\n  ".join(lines)
        for entry, lines in by_entry.items()
        if lines
    ]
    return "\n".join(blocks)


def _unread(
    memory: GlobalMemory, shadow: GlobalShadow, pointers: Pointers, place: Callable[[int], str]
) -> Iterator[str]:
    """Yield the unread parts of allocations that are read and not written."""
    for block in memory.blocks():
        size = block.end - block.start
        chunks = range(block.start >> 20, (block.end - 1 >> 20) + 1)
        near = {id(p): p for c in chunks for p in shadow.reads.get(c, ())}.values()
        pieces = [p for p in near if p.low < block.end and p.high > block.start]
        if not pieces or shadow.written(block.start, block.end)[0]:
            continue
        starts, ends = _gaps(pieces, block.start, size)
        count = int((ends - starts).sum())
        if 0 < count < size:
            name = pointers.of_block(block) or f"{block.start:#x}"
            some = f"{count:,} of its {size:,} bytes"
            sites = dict.fromkeys(p.mark.stamp & SITE_MASK for p in pieces)
            where = " and ".join(list(dict.fromkeys(map(place, sites)))[:_AT_MOST])
            which = _which(starts, ends, size)
            yield f"{name}: nothing reads {some}, {which} ({where} read others)"


def _gaps(pieces: list[Piece], start: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return begins and ends of the gaps between pieces, in `size` bytes from `start` on."""
    lows = np.concatenate([piece.starts.ravel() - start for piece in pieces])
    counts = [piece.starts.size for piece in pieces]
    highs = lows + np.repeat([piece.nbytes for piece in pieces], counts)
    order = np.argsort(lows, kind="stable")
    lows, highs = (np.clip(each[order], 0, size) for each in (lows, highs))
    begins = np.append(0, np.maximum.accumulate(highs))
    ends = np.append(lows, size)
    gaps = begins < ends
    return begins[gaps], ends[gaps]


def _which(starts: np.ndarray, ends: np.ndarray, size: int) -> str:
    """Return text such as "bytes 128 to 1,023 of every 1,024"."""
    first, last = int(starts[0]), int(ends[0]) - 1
    if len(starts) > 1:
        period = int(starts[1] - starts[0])
        same = (np.diff(starts) == period).all() and (ends - starts == ends[0] - starts[0]).all()
        if same and period * (len(starts) + 1) > size - period:
            return f"bytes {first % period:,} to {last % period:,} of every {period:,}"
    more = f" and {len(starts) - 1} other ranges" * (len(starts) > 1)
    return f"bytes {first:,} to {last:,}{more}"
