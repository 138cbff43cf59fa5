"""Named column ranges of tensor memory, with stated aliases, and their checks.

Two ranges may overlap only where one names the other in `over`: an alias is a decision about
time (the payload underneath is dead when the alias is written), so it has to be said.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelkit.plan import hw


@dataclass(frozen=True)
class TmemRange:
    """Columns [begin, begin + columns) of all 128 lanes. over: the range that it may overwrite."""

    name: str
    begin: int
    columns: int
    payload: str
    over: str | None = None

    @property
    def end(self) -> int:
        """First column behind the range."""
        return self.begin + self.columns


@dataclass(frozen=True)
class TmemPlan:
    """All ranges of the one allocation of a CTA."""

    ranges: tuple[TmemRange, ...]

    def __getitem__(self, name: str) -> TmemRange:
        """The range of that name; KeyError lists the names there are."""
        for item in self.ranges:
            if item.name == name:
                return item
        raise KeyError(f"no range {name!r}; ranges are {[item.name for item in self.ranges]}")

    @property
    def allocated(self) -> int:
        """Columns to allocate: the smallest power of two that holds all ranges."""
        columns = hw.TMEM_ALLOC_MIN_COLUMNS
        while columns < max(item.end for item in self.ranges):
            columns *= 2
        return columns

    def check(self) -> None:
        """Raise ValueError for columns that do not exist and for overlaps nobody stated."""
        if self.allocated > hw.TMEM_COLUMNS:
            raise ValueError(f"{self.allocated} TMEM columns, limit {hw.TMEM_COLUMNS}")
        for item in self.ranges:
            if item.over is not None:
                under = self[item.over]
                if item.begin < under.begin or item.end > under.end:
                    raise ValueError(
                        f"{item.name} [{item.begin}, {item.end}) is not inside {under.name} "
                        f"[{under.begin}, {under.end}), which it aliases"
                    )
        for index, first in enumerate(self.ranges):
            for second in self.ranges[index + 1 :]:
                overlap = first.begin < second.end and second.begin < first.end
                stated = second.over == first.name or first.over == second.name
                if overlap and not stated:
                    raise ValueError(
                        f"{first.name} [{first.begin}, {first.end}) and {second.name} "
                        f"[{second.begin}, {second.end}) overlap without a declared alias"
                    )
