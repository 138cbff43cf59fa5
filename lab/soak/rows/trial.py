"""One call, and the same call with other contents in one of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from kernelkit.numerics import tolerance
from lab.problems.attention import same_bits
from lab.soak.campaign import trial
from lab.soak.campaign.trial import Results
from lab.soak.rows.subject import Problem, moved


class Trial(trial.Trial):
    """Nothing is compared with a definition: other rows have to keep their bits."""

    differs: ClassVar[str] = "bits of other rows differ"
    case: Problem

    def prepare(self) -> Results:
        self.tensors = moved(self.case.given(), self.place.device)
        return ()

    def step(self, *inputs: torch.Tensor) -> Results:
        results = self.case.call(self.tensors, self.place.given)
        return tuple(self.case.others(results))

    def repeats(self) -> bool:
        """Whether the rows beside the one that is replaced keep their bits."""
        self.change()
        return same_bits(self.first, self.results())

    def reports(self) -> Sequence[tolerance.Report]:
        return ()

    def change(self) -> None:
        """The hostile contents in the row."""
        self.case.spoil(self.tensors)
