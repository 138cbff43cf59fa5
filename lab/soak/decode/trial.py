"""One decode problem on its device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gqa_lowlatency import decode
from kernelkit.compile.arch import written_for
from kernelkit.numerics import tolerance
from lab.problems.decode import Case, grain_of, verdicts
from lab.problems.fmha import moved
from lab.soak.campaign import trial
from lab.soak.campaign.trial import Results


class Trial(trial.Trial):
    """Against fp64 on the same device."""

    case: Case

    def prepare(self) -> Results:
        self.options = moved(self.case.options(), self.place.device)
        launched = self.case.launch_options(None)
        self.arguments = self.options | launched | self.place.given
        return self.case.inputs(self.place.device)

    def step(self, *inputs: torch.Tensor) -> Results:
        return decode(*inputs, return_lse=True, **self.arguments)

    def reports(self) -> Sequence[tolerance.Report]:
        options = self.options | {"arch": written_for(self.place.arch)}
        o = self.first[0]  # of which fp32 is held to its own precision
        grain = o.dtype if o.dtype == torch.float32 else grain_of(self.case, o)
        extreme = self.case.extreme > 0
        return verdicts(self.inputs, options, self.first, grain, extreme=extreme)

    def change(self) -> None:
        trial.change_q_and_v(self.inputs)
