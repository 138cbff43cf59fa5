"""Find where two runs first differ, and what wrote there: tensors at the end, or tiles at a line.

A run is a function that launches in any way. It is called again for each configuration, with the
tensors restored. When a difference is found, both runs are repeated with a watchpoint on that
element, which a seeded schedule makes possible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ptxemu.host_tensor import HostTensor
from ptxemu.inspect.snapshot import Snapshot, Tile, Write
from ptxemu.numerics.formats import ELEMENTS, decoded
from ptxemu.report import Report
from ptxemu.request import Inspect, Stop, Watch
from ptxemu.watch import watched

Run = Callable[[], object]
Changes = Mapping[str, Any]  # fields of Options
Reference = Callable[[], Mapping[str, Any]] | Mapping[str, Any]


@dataclass(frozen=True)
class Difference:
    """The first element that differs.

    name        of the tensor or tile. index: of the element, in C order the first one.
    first, second  its values; different: so many of `size` elements differ.
    writes      to that element in either run, in order (none of a reference).
    moment      (step, CTA index, warp) of a tile; None of a tensor at the end.
    """

    name: str
    index: tuple[int, ...]
    first: Any
    second: Any
    different: int
    size: int
    writes: tuple[tuple[Write, ...], tuple[Write, ...]] = ((), ())
    moment: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        place = ""
        if self.moment:
            place = " at step {}, CTA {}, warp {}".format(*self.moment)
        lines = [
            f"{self.name}{list(self.index)} differs{place}: {self.first!s} and {self.second!s};"
            f" {self.different} of {self.size} elements differ"
        ]
        for which, writes in zip(("first", "second"), self.writes, strict=True):
            if writes:
                lines.append(f"  the {which} run wrote it last: {writes[-1]}")
                lines += [f"    before that: {write}" for write in writes[-2::-1]]
        return "\n".join(lines)


def first_difference(
    run: Run,
    tensors: Mapping[str, Any],
    *,
    first: Changes | None = None,
    second: Changes | None = None,
    other: Run | None = None,
    reference: Reference | None = None,
    tolerance: float = 0.0,
) -> Difference | None:
    """Compare the tensors after two runs, or after a run with a reference.

    Args:
        run: Function that launches once.
        tensors: Every tensor that a run reads or writes, by name, compared in this order. They are
            restored before each run and hold the first run's results in the end.
        first: Options of the first run, such as {"policy": "adversarial", "seed": 1}.
        second: Options of the second run.
        other: The second run, if it is another function (of another config).
        reference: Tensors by name, or a function that returns them, called with restored tensors.
        tolerance: Allowed difference of values. 0 requires equal bits against a run, equal values
            against a reference.

    Returns None if nothing differs. Raises what a run raises, ValueError for shapes that differ.
    """
    kept = _Kept(tensors)
    expected = _reference(reference, kept.tensors) if reference is not None else None
    runs = [(run, dict(first or {})), (other or run, dict(second or {}))]
    ours, _ = kept.after(*runs[0])
    theirs = kept.after(*runs[1])[0] if expected is None else None
    try:
        for name, tensor in kept.tensors.items():
            mine = tensor.values(ours[name])
            if theirs is not None:
                hers, wrong = tensor.values(theirs[name]), ours[name] != theirs[name]
            elif expected is not None and name in expected:
                hers, wrong = expected[name], apart(mine, expected[name], tolerance)
            else:
                continue
            if tolerance:
                wrong = wrong & apart(mine, hers, tolerance)
            if wrong.any():
                index = first_index(wrong)
                writes = kept.writes(tensor, index, *runs[0])
                others = kept.writes(tensor, index, *runs[1]) if theirs is not None else ()
                counts = int(wrong.sum()), wrong.size
                return Difference(name, index, mine[index], hers[index], *counts, (writes, others))
        return None
    finally:
        kept.restore(ours)


class _Kept:
    """Tensors as they were, so that each run begins with the same."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = {name: HostTensor(tensor) for name, tensor in tensors.items()}
        self._before = self._bits()

    def _bits(self) -> dict[str, np.ndarray]:
        return {name: tensor.bits.copy() for name, tensor in self.tensors.items()}

    def restore(self, bits: dict[str, np.ndarray] | None = None) -> None:
        for name, tensor in self.tensors.items():
            tensor.bits[...] = (bits or self._before)[name]

    def after(self, run: Run, changes: Changes) -> tuple[dict[str, np.ndarray], Report]:
        """Return the tensors after a run, and the report of its launches."""
        self.restore()
        with watched(**changes) as report:
            run()
        return self._bits(), report

    def writes(
        self, tensor: HostTensor, index: tuple[int, ...], run: Run, changes: Changes
    ) -> tuple[Write, ...]:
        """Repeat a run and return the writes to one element."""
        size = ELEMENTS[tensor.dtype][0]
        seen = Inspect(watches=(Watch("global", tensor.address_of(index), size),), quiet=True)
        return _written(self.after(run, {**changes, "inspect": seen})[1])


def first_tile_difference(
    run: Run,
    stop: Stop,
    tensors: Mapping[str, Any] | None = None,
    *,
    first: Changes | None = None,
    second: Changes | None = None,
    other: Run | None = None,
) -> Difference | None:
    """Compare two runs by the tiles and tensor memory that warps see at a line.

    stop: the line; its regions and the tiles of TMA are compared, and tensor memory as "tmem"
    ([lane, column], f32) where `stop.dump` has it. The others as of `first_difference`; `tensors`
    are only restored. Moments are compared by step, then CTA and warp; a moment that only one run
    came to is not compared. A tile that TMA has brought in one run alone is compared with what lies
    there in the other. Returns None where nothing differs; raises ValueError where the runs have no
    moment in common.
    """
    kept = _Kept(tensors or {})

    notes: dict[str, None] = {}

    def pictures(launch: Run, changes: Changes, watches: tuple[Watch, ...] = ()) -> _Pictures:
        wanted = Inspect(stops=(stop,), watches=watches, quiet=True)
        _, report = kept.after(launch, {**changes, "inspect": wanted})
        seen = (launched.inspection for launched in report.launches)
        notes.update(dict.fromkeys(note for each in seen if each for note in each.notes))
        return {
            (number, *picture.key): picture
            for number, launched in enumerate(report.launches)
            if launched.inspection
            for picture in launched.inspection.snapshots
        }

    runs = ((run, first or {}), (other or run, second or {}))
    mine, hers = (pictures(*each) for each in runs)
    if not mine.keys() & hers.keys():
        counts = f"{len(mine)} in the first run, {len(hers)} in the second"
        told = "; ".join([f"no stop at {stop.at} in both runs: {counts}", *notes])
        raise ValueError(told)
    for key in sorted(mine.keys() & hers.keys()):
        found = _unlike(mine[key], hers[key])
        if found is None:
            continue
        difference, watch = found
        seen = [pictures(*each, (watch,)).get(key) for each in runs]
        writes = [
            tuple(w for history in picture.writes.values() for w in history) if picture else ()
            for picture in seen
        ]
        return replace(difference, writes=(writes[0], writes[1]))
    return None


_Pictures = dict[tuple[int, ...], Snapshot]


def _unlike(mine: Snapshot, hers: Snapshot) -> tuple[Difference, Watch] | None:
    """The first tile of a moment that differs, and a watch on its element."""
    theirs = {tile.name: tile for tile in hers.tiles}
    ours = {tile.name for tile in mine.tiles}
    for tile in (*mine.tiles, *(tile for tile in hers.tiles if tile.name not in ours)):
        values = _seen_in(mine, tile) if tile.name not in ours else tile.values
        other = theirs.get(tile.name)
        others = other.values if other else _seen_in(hers, tile)
        if values is None or others is None or others.shape != values.shape:
            continue
        if other and other.dtype != tile.dtype:
            continue
        found = _difference(tile.name, values, others, mine)
        if found:
            return found, Watch("shared", *_element(tile, found.index), cta=mine.cta)
    if mine.tensor is not None and hers.tensor is not None:
        found = _difference("tmem", mine.tensor_memory(), hers.tensor_memory(), mine)
        if found:
            return found, Watch("tensor", found.index[1], 1, cta=mine.cta)
    return None


def _seen_in(picture: Snapshot, tile: Tile) -> np.ndarray | None:
    """Return the contents of another run's tile, which TMA has not loaded in this run yet."""
    if picture.shared is None:
        return None
    return np.asarray(decoded(picture.shared[tile.positions], tile.dtype))


def _element(tile: Tile, index: tuple[int, ...]) -> tuple[int, int]:
    return tile.byte_of(index), ELEMENTS[tile.dtype][0]


def _difference(
    name: str, mine: np.ndarray, hers: np.ndarray, moment: Snapshot
) -> Difference | None:
    kind = f"u{mine.dtype.itemsize}"
    wrong = np.ascontiguousarray(mine).view(kind) != np.ascontiguousarray(hers).view(kind)
    if not wrong.any():
        return None
    index = first_index(wrong)
    counts = int(wrong.sum()), wrong.size
    return Difference(name, index, mine[index], hers[index], *counts, moment=moment.key)


def _reference(reference: Reference, held: dict[str, HostTensor]) -> dict[str, np.ndarray]:
    """Return the reference as values, from torch tensors or arrays."""
    found = {}
    for name, tensor in (reference() if callable(reference) else reference).items():
        if name not in held:
            raise ValueError(f"the reference has {name!r}, but the tensors are {', '.join(held)}")
        kept = HostTensor(tensor)
        if kept.shape != held[name].shape:
            raise ValueError(f"{name} has shape {held[name].shape}, its reference {kept.shape}")
        found[name] = kept.values(kept.bits.copy())
    return found


def apart(a: np.ndarray, b: np.ndarray, tolerance: float | np.ndarray) -> np.ndarray:
    """Return a mask of values that differ by more than the tolerance; NaN equals NaN only."""
    if a.dtype.kind != "f" and b.dtype.kind != "f" and not np.any(tolerance):
        return np.asarray(a != b)
    wide = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(all="ignore"):
        far = ~((wide[0] == wide[1]) | (np.abs(wide[0] - wide[1]) <= tolerance))
    return np.asarray(far & ~(np.isnan(wide[0]) & np.isnan(wide[1])))


def first_index(wrong: np.ndarray) -> tuple[int, ...]:
    """Return the first index, in C order, at which the mask is true."""
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))


def _written(report: Report) -> tuple[Write, ...]:
    """The writes of all launches to the only watch."""
    return tuple(
        write
        for launch in report.launches
        if launch.inspection
        for writes in launch.inspection.histories().values()
        for write in writes
    )
