"""What a launch computed or fetched and never used: where a wrong index shows when no rule is
broken. A K loop that is one short leaves columns of A unread, a stage that is always the first
leaves tiles in shared memory unread, an MMA that does not accumulate overwrites results.

Right kernels do some of it, too (rows behind an end, prefetches). So this is told only when a
script has failed; what can hardly be meant, a tile read by another swizzle than it was written
with, is a note.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from ptxemu.check import footprints
from ptxemu.check.clocks import SITE_MASK
from ptxemu.check.findings import Findings, line_of, short
from ptxemu.check.global_memory import GlobalShadow, Piece
from ptxemu.check.pointers import Pointers
from ptxemu.check.shadow import Shadow, Where
from ptxemu.check.state import States
from ptxemu.check.tensor_maps import MAP_BYTES
from ptxemu.check.text import cut
from ptxemu.machine.cta import Cta
from ptxemu.machine.memory import GlobalMemory
from ptxemu.machine.mma import Mma
from ptxemu.machine.swizzle import Swizzle
from ptxemu.machine.tensor_map import decode
from ptxemu.machine.umma_desc import SmemDesc
from ptxemu.machine.warp import Warp
from ptxemu.report import NOTE, Access, LaunchReport, place_of

_ASYNCHRONOUS = ("cp.async.bulk", "tcgen05.cp", "tcgen05.mma")
_ALL = slice(None)
_AT_MOST = 2  # places that are listed
_FEW = 4  # rows that are quicker one by one


class Unused:
    """Of one launch; it looks at what the race checker knows before that learns of an access."""

    def __init__(self, states: States, findings: Findings) -> None:
        self._states = states
        self._findings = findings
        self._sites = findings.sites
        self._is_asynchronous = np.array(
            [instr.opcode.startswith(_ASYNCHRONOUS) for instr in self._sites]
        )
        self._made: Counter[int] = Counter()  # cells that an instruction has written
        # of these, by what has written them and what has written over them (0: the end), unread
        self._lost: Counter[tuple[int, int]] = Counter()
        self._swizzles: dict[int, Swizzle] = {}  # by the copy whose tensor map has it
        self._maps: set[tuple[int, int]] = set()
        self._seen: set[tuple[int, SmemDesc]] = set()
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

    def lands(self, site: int, cta: Cta, where: Where) -> None:
        """Cells of shared memory are about to be written."""
        self._write(site, self._states.ctas[cta].shared, where)

    def fills(self, site: int, cta: Cta, where: Where) -> None:
        """Cells of tensor memory are about to be written."""
        self._write(site, self._states.ctas[cta].tensor, where)

    def multiplies(self, site: int, ctas: Sequence[Cta], mma: Mma) -> None:
        """Before an MMA."""
        instr, group = mma.instr, len(ctas)
        for cta in ctas:
            if not mma.accumulate:
                self.fills(site, cta, footprints.accumulator_cells(mma.d, instr, group))
            self._look(site, cta, mma.b, instr.shape_of_b(group))
            if isinstance(mma.a, SmemDesc):
                self._look(site, cta, mma.a, instr.shape_of_a(group))

    def freed(self, cta: Cta, column: int, count: int) -> None:
        self._give_up(self._states.ctas[cta].tensor, footprints.column_cells(column, count))

    def ended(self, cta: Cta) -> None:
        self._give_up(self._states.ctas[cta].shared, _ALL)

    def _write(self, site: int, shadow: Shadow, where: Where) -> None:
        self._give_up(shadow, where, site)
        self._made[site] += shadow.last[where].size

    def _give_up(self, shadow: Shadow, where: Where, by: int = 0) -> None:
        """What the cells hold is gone, `by` another write: count what nobody has read."""
        last = shadow.last[where]
        fresh = last != 0
        for row in shadow.readers.values():
            fresh &= row[where] == 0
        if fresh.any():
            sites, counts = np.unique(last[fresh] & SITE_MASK, return_counts=True)
            for site, count in zip(sites.tolist(), counts.tolist(), strict=True):
                self._lost[site, by] += count

    def _look(self, site: int, cta: Cta, desc: SmemDesc, shape: tuple[int, int, str, bool]) -> None:
        """Whether an operand has the swizzle that it was copied with."""
        if (site, desc) in self._seen:
            return
        self._seen.add((site, desc))
        shadow = self._states.ctas[cta].shared
        cells = footprints.operand_cells(desc, *shape, self._states.grain)
        for copy in np.unique(shadow.last[cells] & SITE_MASK).tolist():
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

    # -- what is left -------------------------------------------------------------------------

    def lines(
        self, memory: GlobalMemory, shadow: GlobalShadow, pointers: Pointers
    ) -> Iterator[str]:
        """In words, one for each line of Python."""
        yield from _unread(memory, shadow, pointers, self._place)
        made, outside, copies, again = (
            self._by_place(each) for each in (self._made, self._outside, self._copies, self._again)
        )
        lost: dict[str, Counter[int]] = {}
        for (site, by), count in self._lost.items():
            if self._is_asynchronous[site]:
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
                    f"{place}: {count} of its {copies[place]} copies bring what the CTA had fetched"
                    " there before: is the index of the tile right?"
                )

    def _line(self, site: int) -> int:
        """Equal for the instructions of one line of Python: an unrolled loop is one."""
        return self._lines.setdefault(self._sites[site].source or site, site)

    def _by_place(self, counts: Counter[int]) -> Counter[str]:
        """Of instructions, by the line of Python: an unrolled loop is one."""
        found: Counter[str] = Counter()
        for site, count in counts.items():
            found[self._place(site) if site else ""] += count
        return found

    def _place(self, site: int) -> str:
        instr = self._sites[site]
        return f"{short(instr.opcode)} at {line_of(instr)}"


def _part(count: int, whole: int) -> str:
    return f"{min(100, max(1, 100 * count // max(whole, 1)))} %"


def clues(launches: Iterable[LaunchReport]) -> str:
    """What a wrong result may come from, though no rule is broken; "" where there is nothing."""
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
    """Of allocations that are read and not written: what of them nobody has read."""
    for block in memory.blocks():
        size = block.end - block.start
        chunks = range(block.start >> 20, (block.end - 1 >> 20) + 1)
        near = {id(p): p for c in chunks for p in shadow.reads.get(c, ())}.values()
        pieces = [p for p in near if p.low < block.end and p.high > block.start]
        if not pieces or any((last != 0).any() for last in shadow.stamps(block.start, block.end)):
            continue
        unread = np.ones(size, np.bool_)
        for piece in pieces:
            _cross_out(unread, piece, block.start)
        if unread.any() and not unread.all():
            name = pointers.of_block(block) or f"{block.start:#x}"
            some = f"{int(unread.sum()):,} of its {size:,} bytes"
            sites = dict.fromkeys(place(p.mark.first & SITE_MASK) for p in pieces)
            where = " and ".join(list(sites)[:_AT_MOST])
            yield f"{name}: nothing reads {some}, {_which(unread)} ({where} read others)"


def _cross_out(unread: np.ndarray, piece: Piece, start: int) -> None:
    first = piece.starts.ravel() - start
    first = first[(first > -piece.nbytes) & (first < len(unread))]
    if len(first) > _FEW:
        cells = (first[:, None] + np.arange(piece.nbytes)).ravel()
        unread[cells[(cells >= 0) & (cells < len(unread))]] = False
        return
    for low in first.tolist():
        unread[max(low, 0) : low + piece.nbytes] = False


def _which(unread: np.ndarray) -> str:
    """Such as "bytes 128 to 1,023 of every 1,024"."""
    edges = np.flatnonzero(np.diff(unread.astype(np.int8), prepend=0, append=0))
    starts, ends = edges[::2], edges[1::2]
    first, last = int(starts[0]), int(ends[0]) - 1
    if len(starts) > 1:
        period = int(starts[1] - starts[0])
        same = (np.diff(starts) == period).all() and (ends - starts == ends[0] - starts[0]).all()
        if same and period * (len(starts) + 1) > len(unread) - period:
            return f"bytes {first % period:,} to {last % period:,} of every {period:,}"
    more = f" and {len(starts) - 1} other ranges" * (len(starts) > 1)
    return f"bytes {first:,} to {last:,}{more}"
