"""Takes the pictures: counts who comes to a line, looks at the condition, copies what is asked."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxemu.codegen.program import Program
from ptxemu.condition import Condition
from ptxemu.inspect import snapshot
from ptxemu.inspect.places import Probe, Probes
from ptxemu.inspect.snapshot import Register, Snapshot, Tile
from ptxemu.inspect.tiles import Tiles
from ptxemu.machine.listener import Listener
from ptxemu.request import CtaName, Stop

if TYPE_CHECKING:
    from ptxemu.machine.state import Cta, Warp


class Stops(Listener):
    """Of one launch. taken(snapshot) is called with each picture; histories() gives what watches
    know at that moment."""

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
        """What the user should know besides the pictures."""
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
    """Of a CTA in its grid, x fastest."""
    (x, y, z), (gx, gy, _) = cta.ctaid, cta.machine.shape.grid
    return x + gx * (y + gy * z)


def is_cta(cta: Cta, name: CtaName) -> bool:
    """Whether it is the one that the user named."""
    return name is None or name in (cta_index(cta), cta.ctaid)
