"""One product or layer of experts on its device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernelkit.numerics import tolerance
from lab.problems import mixed_gemm as products
from lab.problems import mixed_layer
from lab.problems.mixed_gemm import Case
from lab.problems.mixed_layer import Layer
from lab.soak.campaign import trial
from lab.soak.campaign.trial import Results
from moe import fused_moe, mixed_gemm


class Trial(trial.Trial):
    """Against fp64 on the same device."""

    case: Case | Layer

    def prepare(self) -> Results:
        is_layer = isinstance(self.case, Layer)
        self.function, self.judge = (
            (fused_moe, mixed_layer.judge) if is_layer else (mixed_gemm, products.judge)
        )
        self.given = self.case.inputs(self.place.device)
        self.keywords = self.given.tensors | self.case.options() | self.place.given
        return (self.keywords.pop("x"),)

    def step(self, *inputs: torch.Tensor) -> Results:
        return (self.function(*inputs, **self.keywords),)

    def reports(self) -> Sequence[tolerance.Report]:
        (result,) = self.first
        return self.judge(self.case, result, self.given, aligned_sums=self.is_native)

    def change(self) -> None:
        """x, and experts without rows, or other ones for each token."""
        given = self.given
        given.x.mul_(-0.5)
        if isinstance(given, mixed_layer.Inputs):
            given.logits.copy_(given.logits.flip(0))
        elif len(given.offsets) > 2:
            given.offsets[1 : len(given.offsets) // 2] = 0
