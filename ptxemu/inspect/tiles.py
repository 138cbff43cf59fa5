"""Which tiles TMA has moved: a later one that overlaps takes the place of an earlier one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ptxemu.machine.listener import Listener, Place, Position

if TYPE_CHECKING:
    from ptxemu.machine.async_ops import Work
    from ptxemu.machine.state import Cta
    from ptxemu.machine.tensor_map import TensorMap


class Brought(NamedTuple):
    """A box at a position of its tensor; `loaded`, else stored from shared memory."""

    tm: TensorMap
    position: Position
    loaded: bool


class Tiles(Listener):
    """Of every CTA of a launch, by offset in shared memory."""

    def __init__(self) -> None:
        self._of: dict[Cta, dict[int, Brought]] = {}

    def of(self, cta: Cta) -> Iterator[tuple[int, Brought]]:
        yield from sorted(self._of.get(cta, {}).items())

    def tile_loaded(
        self, work: Work, tm: TensorMap, position: Position, places: list[Place]
    ) -> None:
        for cta, offset in places:
            self._put(cta, offset, Brought(tm, position, True))

    def tile_read(self, work: Work, cta: Cta, tm: TensorMap, position: Position, low: int) -> None:
        self._put(cta, low, Brought(tm, position, False))

    def cta_ended(self, cta: Cta) -> None:
        self._of.pop(cta, None)

    def _put(self, cta: Cta, offset: int, brought: Brought) -> None:
        tiles, end = self._of.setdefault(cta, {}), offset + brought.tm.box_bytes
        hidden = [o for o, b in tiles.items() if o < end and o + b.tm.box_bytes > offset]
        for other in hidden:
            del tiles[other]
        tiles[offset] = brought
