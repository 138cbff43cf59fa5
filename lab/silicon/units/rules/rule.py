"""What a rule is, and the parameter that it makes of a file's rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lab.silicon.units.rules.arithmetic import Expression, Figure, Missing, Rows

NEAR = 0.05  # of a step: a figure so near to a rounded one is that one


@dataclass(frozen=True)
class Rule:
    """value: what the parameter is, rounded to `step`; its repetitions are in the range.

    also: what it may be as well. below, above: how much less or more it may be beyond the rows, in
    the parameter's unit, and why: for what reason. needs: benchmarks that the file must have.
    not_for: GPUs whose number stays as it is, by their architecture.
    """

    value: Expression
    also: tuple[Expression, ...] = ()
    below: float = 0.0
    above: float = 0.0
    step: float = 1.0
    why: str = ""
    needs: tuple[str, ...] = ()
    not_for: str = ""

    def figure(self, rows: Rows) -> Figure:
        """The parameter, rounded, with its range rounded outwards. Raises Missing."""
        for name in self.needs:
            if not rows.has(name):
                raise Missing(f"no row of {name}")
        found = self.value.of(rows)
        others = [each.of(rows).value for each in self.also]
        value = _rounded(round(found.value / self.step), self.step)
        low = min(value, found.low, *others, found.value - self.below)
        high = max(value, found.high, *others, found.value + self.above)
        low = _rounded(math.floor(low / self.step + NEAR), self.step)
        high = _rounded(math.ceil(high / self.step - NEAR), self.step)
        return Figure(value, min(low, value), max(high, value))

    @property
    def words(self) -> str:
        """Where it is from."""
        more = "".join(f"; also {each.words}" for each in self.also)
        return self.value.words + more + (f"; {self.why}" if self.why else "")


def _rounded(steps: int, step: float) -> float:
    """So many steps, without the dust of floats; whole numbers as such."""
    value = round(steps * step, 6)
    return int(value) if value == int(value) else value
