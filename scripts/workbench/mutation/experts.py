"""The kernels of moe whose mutants are judged, each with a problem that uses all its edges: more
steps than a ring has stages, more tiles than accumulators, experts without rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch

from kernelkit.launch import emulation
from moe.api import grouped_gemm
from moe.quantized import Quantized
from moe.routing import permutation
from ptxemu import Options
from workbench.mutation.attention import Outcome, Subject, poisoned_outputs
from workbench.problems.grouped_gemm import Case

CTAS = 2  # of the grouped GEMM, or a pair


@dataclass(frozen=True)
class Launch(Subject):
    """What launches one kernel; `case` is what it launches."""

    case: Callable[[], tuple[torch.Tensor, ...]]

    def run(self, options: Options) -> Outcome:
        """Results and reports; outputs are poisoned before."""
        with poisoned_outputs(), emulation(options) as active:
            results = self.case()
        return results, [launch for report in active.reports for launch in report.launches]


def product(case: Case, only: str = "") -> Launch:
    """A grouped GEMM, all of its results as bytes or numbers."""
    inputs = functools.cache(case.inputs)  # not yet

    def launched() -> tuple[torch.Tensor, ...]:
        (x, w), given = inputs(), case.options()
        with mock.patch("moe.launch.sms_of", return_value=CTAS):
            result = grouped_gemm(x, w, case.offsets, **given)
        tensors = (result,)
        if isinstance(result, Quantized):
            tensors = result.data.view(torch.uint8), result.scales.view(torch.uint8)
        return tensors if given["amax"] is None else (*tensors, given["amax"])

    return Launch(launched, only=only)


def _permutation() -> tuple[torch.Tensor, ...]:
    """More slots than there are threads: warps take turns."""
    ids = torch.randint(0, 40, (700, 4), generator=torch.Generator().manual_seed(0))
    found = permutation(ids.int(), 40, arch="sm_100a")
    return found.offsets, found.slot_of_row, found.row_of_slot


QUANTISED = {"out": "nvfp4", "amax": True}
SUBJECTS: dict[str, Subject] = {
    "moe 128": product(Case((130, 0, 129, 5), 320, 192, tile_rows=128)),
    "moe 128 quantised": product(Case((130, 0, 129, 5), 320, 192, tile_rows=128, **QUANTISED)),
    "moe 128 x 256": product(Case((130, 0, 129, 5), 320, 384, tile_rows=128, tile_n=256)),
    "moe pair": product(Case((260, 0, 129, 5), 320, 256, tile_rows=256, **QUANTISED)),
    "moe pair x 256": product(Case((260, 0, 129, 5), 320, 512, tile_rows=256, tile_n=256)),
    "moe swapped": product(Case((65, 0, 64, 5), 320, 192, tile_rows=64, **QUANTISED)),
    "moe dependent launch": product(Case((9, 0, 5), 320, 64, pdl=True), only="depend"),
    "moe permutation": Launch(_permutation),
}
