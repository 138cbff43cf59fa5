"""Take pictures: find the instructions of a line, count arrivals, copy what is requested."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.program import Program
from ptxemu.codegen.values import Node, Value
from ptxemu.errors import PtxEmuError
from ptxemu.inspect import snapshot
from ptxemu.inspect.snapshot import Register, Snapshot, Tile, Tiles
from ptxemu.machine.listener import Listener
from ptxemu.request import Condition, CtaName, Stop
from ptxemu.syntax.tree import Addr, Args, Instr, Not, Pair, Reg, Vec

if TYPE_CHECKING:
    from ptxemu.machine.state import Cta, Warp

# Instructions of a line, and where a warp enters and leaves it.
#
# A line mostly has many instructions, in several blocks. A warp arrives with the first of them
# after one of another line. An instruction of the line therefore has a probe before it unless the
# previous one is of the line too. The first instruction after the line has a probe for the
# departure.

_REACH = 10  # lines within which a line without instructions is moved
_NAME = 60  # characters of a kernel's name


def comes_from(instr: Instr, at: str) -> bool:
    """Whether an instruction belongs to "file.py:257" or "ptx:120"; a line of a function that was
    inlined belongs to the lines of its callers as well."""
    if at.startswith("ptx:"):
        return instr.line == int(at.partition(":")[2])
    frames = instr.location.frames() if instr.location else []
    return any(f"/{frame}".endswith(f"/{at}") or at.endswith(f"/{frame}") for frame in frames)


def registers_of(operand: object) -> list[str]:
    """Names of the registers that an operand speaks of, in order."""
    if isinstance(operand, Reg):
        return [operand.name]
    parts: tuple[object, ...] = ()
    if isinstance(operand, Not):
        parts = (operand.reg,)
    elif isinstance(operand, Vec | Args):
        parts = operand.items
    elif isinstance(operand, Pair):
        parts = operand.first, operand.second
    elif isinstance(operand, Addr):
        parts = operand.base, *operand.coords
    return [name for part in parts for name in registers_of(part)]


def live_before(program: Program, index: int, position: int) -> set[str]:
    """Return registers whose values are still needed at a step of a block."""
    block = program.blocks[index]
    live = set(block.live_out) | set(registers_of(block.guard))
    for step in reversed(block.steps[position:]):
        lower = Lower(block, program.registers, program.layout.symbols, analysis=True)
        lower.instr = step.instr
        try:
            step.emit(lower)
        except (PtxEmuError, AttributeError, IndexError, TypeError, ValueError):
            continue  # executing it raises
        live = live - lower.defs | lower.uses
    return live


@dataclass(frozen=True)
class Probe:
    """A place in the code.

    Attributes:
        arrives: Whether it is at a stop's line, not after it.
        operands: Registers of the instruction.
        names: The operands, live registers if requested, and registers of the condition.
    """

    stop: int
    arrives: bool
    instr: Instr
    operands: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


class Probes:
    """Probes of one program. A `Program` calls `place` before it lowers each step of a block."""

    def __init__(self, program: Program, stops: tuple[Stop, ...]) -> None:
        self.program = program
        self.name = _short(program.entry.name)
        self.probes: list[Probe] = []
        self.missing: list[str] = []  # stops whose line the program does not have, in words
        self._at: dict[tuple[int, int], list[int]] = {}
        for number, stop in enumerate(stops):
            self._find(number, stop)

    def place(self, lower: Lower, position: int) -> None:
        """Add the probes before a step."""
        for number in self._at.get((lower.block.index, position), ()):
            probe = self.probes[number]
            # Unlike a use, a probe does not wait for the pending result of a tcgen05.ld.
            text, values = _register_list(lower, probe.names)
            node = Node(
                f"for each in w.listeners: each.probed(w, {number}, {text})",
                values,
                (),
                instr=probe.instr,
            )
            lower.nodes.append(node)

    def _find(self, number: int, stop: Stop) -> None:
        at = self._moved(stop.at)
        if at is None:
            self.missing.append(self._nothing_at(stop.at))
            return
        if at != stop.at:
            self.missing.append(f"no instruction of {self.name} is from {stop.at}; taken is {at}")
        for index, position, arrives in self._borders(at):
            self._add(number, stop, index, position, arrives)

    def _moved(self, at: str) -> str | None:
        """The line, or the next one in the file that has instructions, as debuggers do: what only
        calls helpers has none of its own."""
        path, _, line = at.rpartition(":")
        for candidate in range(int(line), int(line) + _REACH):
            moved = f"{path}:{candidate}"
            if any(comes_from(instr, moved) for instr in self.program.sites):
                return moved
        return None

    def _borders(self, at: str) -> Iterator[tuple[int, int, bool]]:
        """(block, step, whether the line begins there or has ended before it)."""
        blocks = self.program.blocks
        inside = [[comes_from(step.instr, at) for step in block.steps] for block in blocks]
        before: list[list[int]] = [[] for _ in blocks]
        for block in blocks:
            for after in block.successors:
                before[after].append(block.index)
        ends = [bool(flags) and flags[-1] for flags in inside]
        empty = [block.index for block in blocks if not block.steps]
        for _ in empty:  # an empty block ends as those before it do
            for index in empty:
                ends[index] = any(ends[b] for b in before[index])
        for index, flags in enumerate(inside):
            for position, here in enumerate(flags):
                if position and here != flags[position - 1]:
                    yield index, position, here
                elif not position and (here or any(ends[b] for b in before[index])):
                    yield index, position, here

    def _add(self, number: int, stop: Stop, index: int, position: int, arrives: bool) -> None:
        instr = self.program.blocks[index].steps[position].instr
        probe = Probe(number, arrives, instr)
        if arrives:
            known = self.program.entry.registers
            operands = list(dict.fromkeys(n for o in instr.operands for n in registers_of(o)))
            operands = [name for name in operands if name in known]
            live: list[str] = []
            if "regs" in stop.dump:
                live = sorted(live_before(self.program, index, position) & known.keys(), key=_order)
            asked = [name for name in known if name.removeprefix("%") in Condition(stop.when).names]
            names = tuple(dict.fromkeys((*operands, *live, *asked)))
            probe = Probe(number, True, instr, tuple(operands), names)
        self._at.setdefault((index, position), []).append(len(self.probes))
        self.probes.append(probe)

    def _nothing_at(self, at: str) -> str:
        """Describe why there is no instruction, with the nearest lines that have one."""
        name = self.name
        path, _, line = at.rpartition(":")
        if path == "ptx":
            return f"no instruction of {name} stands in line {line} of the PTX"
        locations = [instr.location for instr in self.program.sites if instr.location]
        if not locations:
            return (
                f"{name} has no line information: compile it with CUTE_DSL_LINEINFO=1 in the"
                " environment, or with the option --generate-line-info"
            )
        frames = {frame for location in locations for frame in location.frames()}
        of_file = {f for f in frames if f"/{f.rpartition(':')[0]}".endswith(f"/{path}")}
        if not of_file:
            files = sorted({frame.rpartition(":")[0] for frame in frames})
            return f"no instruction of {name} is from {path}; its files: {', '.join(files[:8])}"
        lines = {int(frame.rpartition(":")[2]) for frame in of_file}
        nearest = sorted(lines, key=lambda number: abs(number - int(line)))[:6]
        near = ", ".join(map(str, sorted(nearest)))
        return f"no instruction of {name} is from {at}; lines near it that have some: {near}"


def _short(name: str) -> str:
    """The DSL's names of kernels have whole types in them."""
    return name if len(name) <= _NAME else f"{name[:_NAME]}..."


def _order(name: str) -> tuple[str, int, str]:
    """%r9 before %r10."""
    letters = name.rstrip("0123456789")
    digits = name[len(letters) :]
    return letters, int(digits or -1), name


def _register_list(lower: Lower, names: tuple[str, ...]) -> tuple[str, tuple[Value, ...]]:
    """Source of a tuple of (name, types, values) with the fields of its values, and those."""
    items: list[str] = []
    values: list[Value] = []
    for name in names:
        held = lower._register(name)
        parts = held if isinstance(held, tuple) else (held,)
        fields = "".join(f"{{{len(values) + k}}}, " for k in range(len(parts)))
        items.append(f"({name!r}, {tuple(part.type for part in parts)!r}, ({fields})), ")
        values += parts
    return f"({''.join(items)})", tuple(values)


class Stops(Listener):
    """Stops of one launch.

    Args:
        taken: Called as taken(snapshot) with each picture.
        histories: Called as histories() for the watches' current state.
    """

    def __init__(
        self,
        program: Program,
        stops: tuple[Stop, ...],
        probes: Probes,
        tiles: Tiles,
        histories: Callable[[], dict[str, Any]],
        taken: Callable[[Snapshot], None],
    ) -> None:
        self.program = program
        self.stops = stops
        self.probes = probes
        self.tiles = tiles
        self.histories = histories
        self.taken = taken
        self.problems: list[str] = []  # regions that this kernel does not have
        self.conditions = [Condition(stop.when) for stop in stops]
        self.pictures: Counter[int] = Counter()  # of each stop, also those beyond its limit
        self.arrivals: Counter[int] = Counter()  # of all warps
        self._inside: defaultdict[tuple[Warp, int], int] = defaultdict(int)  # lanes at the line
        self._steps: Counter[tuple[Warp, int]] = Counter()
        self._symbols = {
            name: offset
            for name, (space, offset) in program.layout.symbols.items()
            if space == "shared"
        }

    def probed(self, w: Warp, number: int, registers: tuple[Any, ...]) -> None:
        probe, mask = self.probes.probes[number], w.frag.mask
        place = w, probe.stop
        if not probe.arrives:
            self._inside[place] &= ~mask
            return
        new = mask & ~self._inside[place]
        self._inside[place] |= mask
        if not new:  # still there: a loop within the line, or a wait that is tried again
            return
        self.arrivals[probe.stop] += 1
        step = self._steps[place]
        self._steps[place] += 1
        stop = self.stops[probe.stop]
        if not (is_cta(w.cta, stop.cta) and stop.warp in (None, w.index)):
            return
        held = self._registers(registers)
        if self._holds(probe, w, step, held):
            self.pictures[probe.stop] += 1
            if self.pictures[probe.stop] <= stop.limit:
                self.taken(self._picture(stop, probe, w, step, held))

    def _registers(self, found: tuple[Any, ...]) -> dict[str, Register]:
        declared = self.program.entry.registers
        return {
            name: snapshot.register(name, declared[name], types, values)
            for name, types, values in found
        }

    def _holds(self, probe: Probe, w: Warp, step: int, held: dict[str, Register]) -> bool:
        condition = self.conditions[probe.stop]
        if not condition.text:
            return True
        lanes = snapshot.active(w.frag.mask)
        x, y, z = w.cta.ctaid
        values: dict[str, Any] = {
            name.removeprefix("%"): register.number(lanes) for name, register in held.items()
        }
        values |= {"step": step, "warp": w.index, "cta": cta_index(w.cta)}
        values |= {"lane": np.flatnonzero(lanes), "cta_x": x, "cta_y": y, "cta_z": z}
        return condition.holds(values)

    def _picture(
        self, stop: Stop, probe: Probe, w: Warp, step: int, held: dict[str, Register]
    ) -> Snapshot:
        cta = w.cta
        shared = cta.smem[: cta.smem_size].copy() if "smem" in stop.dump or stop.regions else None
        tensor = cta.tmem.cells.copy() if "tmem" in stop.dump else None
        return Snapshot(
            at=stop.at,
            entry=self.program.entry.name,
            instr=probe.instr,
            cta=cta.ctaid,
            cta_index=cta_index(cta),
            warp=w.index,
            lanes=w.frag.mask,
            step=step,
            symbols=self._symbols,
            shared=shared,
            tensor=tensor,
            allocations=dict(cta.tmem.allocations) if tensor is not None else {},
            registers=held if "regs" in stop.dump else {},
            operands=probe.operands,
            tiles=() if shared is None else self._tiles(stop, cta, shared),
            writes=self.histories(),
        )

    def _tiles(self, stop: Stop, cta: Cta, shared: np.ndarray) -> tuple[Tile, ...]:
        named = []
        for region in stop.regions:
            try:
                named.append(snapshot.named_tile(shared, region))
            except ValueError as error:
                if str(error) not in self.problems:
                    self.problems.append(str(error))
        moved = [snapshot.moved_tile(shared, *found) for found in self.tiles.of(cta)]
        return (*named, *moved)

    def summary(self) -> list[str]:
        """Return hints to the user in addition to the pictures."""
        lines = [*self.probes.missing, *self.problems]
        for number, stop in enumerate(self.stops):
            came, fitting = self.arrivals[number], self.pictures[number]
            if fitting > stop.limit:
                lines.append(
                    f"{stop.at}: {fitting} arrivals fit, pictures of the first {stop.limit} taken"
                )
            elif not fitting and came:
                lines.append(f"{stop.at}: warps came {came} times, but none that fits")
            elif not fitting and any(probe.stop == number for probe in self.probes.probes):
                lines.append(f"{stop.at}: no warp came there")
        return lines


def cta_index(cta: Cta) -> int:
    """Return the index of a CTA in its grid, x fastest."""
    (x, y, z), (gx, gy, _) = cta.ctaid, cta.machine.shape.grid
    return x + gx * (y + gy * z)


def is_cta(cta: Cta, name: CtaName) -> bool:
    """Whether it is the one that the user named."""
    return name is None or name in (cta_index(cta), cta.ctaid)
