"""H100 and H200, measured by `scripts/bench.py units`: `h100.json` and `h200.json` are what
`python -m lab.bringup.rates results/units_h200.json --json cycle_model/parameters/h200.json`
writes, so that a newer run takes its place as one file. What rows do not give stands below, and
what they gave in graphs of another kind than those by which kernels are timed: there an empty
launch takes 0.18 us more (notes/log.md, notes/launch_states.py). What an H200's rows do not give
it has from an H100.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cycle_model.parameters.blackwell import PARAMETERS
from cycle_model.parameters.parameter import MEASURED, Gpu, Parameter
from cycle_model.parameters.table import read


def _measured(value: float, low: float, high: float, unit: str, source: str) -> Parameter:
    return Parameter(value, low, high, unit, MEASURED, source)


_BESIDE = {
    "hbm_tail": _measured(40, 30, 50, "cycles per e-fold of accesses", "touch behind other work"),
    "sms_that_share": _measured(
        16.5,
        14,
        18,
        "neighbouring SMs for which L2 answers a line once, if asked at a time",
        "l2_bytes_per_cycle of TMA by 12 and 33 readers apart: 132 / 8",
    ),
}
_FROM_LAUNCH_TO_LAUNCH = "microseconds from a launch to the next"
# Not for rows whose device says "behind_a_graph_of_torch": "yes", which have them so already.
_IN_GRAPHS_OF_TORCH = {
    "H100": {
        "launch": _measured(0.86, 0.66, 0.95, "microseconds", "launch_exit, touch"),
        "launch_least": _measured(
            0.967, 0.78, 0.98, _FROM_LAUNCH_TO_LAUNCH, "launch_exit of one CTA"
        ),
        "sm_interval": _measured(
            38,
            24,
            42,
            "cycles, times the square root of the SMs before it",
            "launch_exit and touch of 1, 32, 132 CTAs",
        ),
    },
    "H200": {
        "launch": _measured(0.79, 0.57, 0.81, "microseconds", "h200.json, and 0.18 more"),
        "launch_least": _measured(
            0.683, 0.51, 0.72, _FROM_LAUNCH_TO_LAUNCH, "launch_exit of one CTA"
        ),
    },
}


def _in_graphs_of_torch(gpu: Gpu) -> Gpu:
    return replace(gpu, parameters={**gpu.parameters, **_IN_GRAPHS_OF_TORCH[gpu.name]})


_BARE = Gpu(
    name="H100", arch="sm_90a", sms=132, l2_bytes=50 << 20, parameters={**PARAMETERS, **_BESIDE}
)
H100 = _in_graphs_of_torch(read(Path(__file__).with_name("h100.json")).over(_BARE))
H200 = _in_graphs_of_torch(
    read(Path(__file__).with_name("h200.json")).over(replace(H100, name="H200"))
)
