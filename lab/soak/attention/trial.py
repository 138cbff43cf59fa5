"""One attention problem on its device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fmha import attention
from kernelkit.numerics import tolerance
from lab.problems.attention import Case, judge
from lab.problems.fmha import moved
from lab.soak.campaign import trial
from lab.soak.campaign.trial import Results


class Trial(trial.Trial):
    """Against fp64 on the same device."""

    case: Case

    def prepare(self) -> Results:
        device = self.place.device
        self.arguments = moved(self.case.arguments(), device) | self.place.given
        return self.case.inputs(device)

    def step(self, *inputs: torch.Tensor) -> Results:
        return attention(*inputs, **self.arguments)

    def reports(self) -> Sequence[tolerance.Report]:
        return judge(self.case, self.first, self.inputs, aligned_sums=self.is_native)

    def change(self) -> None:
        trial.change_q_and_v(self.inputs)
        if self.case.kv_lens is not None:
            self.arguments["kv_lens"].floor_divide_(2)
