"""H100 and H200, measured by `scripts/bench.py units`: `h200.json` is what
`python -m workbench.bringup.rates results/units_h200.json --json cycle_model/parameters/h200.json`
writes, so that a newer run takes its place as one file. Below is what that run does not give, or
where an H100 differs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cycle_model.parameters.blackwell import CYCLES, PARAMETERS, published
from cycle_model.parameters.parameter import MEASURED, Gpu, Parameter
from cycle_model.parameters.table import read

_ROWS = "results/units_h100.json"


def _measured(value: float, low: float, high: float, unit: str, what: str) -> Parameter:
    return Parameter(value, low, high, unit, MEASURED, f"{_ROWS}: {what}")


_OF_H100 = {
    "latency_membar_gpu": _measured(
        669, 265, 673, CYCLES, "latency_membar, of the GPU; 265 on another machine"
    ),
    "beside_wgmma": _measured(
        1,
        0.9,
        1.1,
        "cycles that the FMA pipe or the ALU loses with an instruction while wgmma runs",
        "wgmma_beside of fma, add and cvt",
    ),
    "special_beside_wgmma": _measured(
        2,
        1.9,
        3,
        "cycles that the MUFU loses with one",
        "wgmma_beside of ex2; 2.4 and 2.7 where others are among them",
    ),
    "global_latency_hbm": _measured(685, 620, 740, CYCLES, "global_latency_hbm"),
    "hbm_tail": _measured(40, 30, 50, "cycles per e-fold of accesses", "touch behind other work"),
    "l2_bytes_in_all": _measured(3930, 3850, 4813, "bytes per clock of all SMs", "of all SMs"),
    "l2_bytes_delivered": _measured(
        10200,
        8500,
        12900,
        "bytes per clock of SMs that read the same",
        "l2_bytes_per_cycle of TMA by 132 readers; 12,800 of cp.async, 8,900 of loads",
    ),
    "sms_that_share": _measured(
        16.5,
        14,
        18,
        "neighbouring SMs for which L2 answers a line once, if asked at a time",
        "l2_bytes_per_cycle of TMA by 12 and 33 readers apart: 132 / 8",
    ),
    "hbm_bytes_per_cycle": _measured(
        1567, 1450, 1575, "bytes per clock of all SMs", "memory_rate, 3.10 TB/s"
    ),
    "hbm_bytes_written_per_cycle": _measured(
        1346, 1300, 1615, "bytes per clock of all SMs", "memory_rate: beside reads; alone 1,615"
    ),
    "clock": published(1.98, 1.755, 1.98, "GHz", "clocks.max.sm of results/gqa_h100.json"),
    "launch": _measured(
        0.86,
        0.66,
        0.95,
        "microseconds",
        "launch_exit, touch; of one process 0.2 more than of another",
    ),
    "launch_least": _measured(
        0.967, 0.78, 0.98, "microseconds from a launch to the next", "launch_exit of one CTA"
    ),
    "dependent_least": _measured(
        0.53, 0.5, 0.58, "microseconds from a dependent launch to the next", "launch, overlapped"
    ),
    "dependent_start": _measured(
        0.3,
        0.25,
        0.53,
        "microseconds from the last launch_dependents to the first CTA",
        "launch_dependent, work before, less the last CTA's start",
    ),
    "dependent_release": _measured(
        0.6,
        0.58,
        0.63,
        "microseconds from the end of a grid to who waits for it",
        "launch_dependent, work behind",
    ),
    "sm_interval": _measured(
        38,
        24,
        42,
        "cycles, times the square root of the SMs before it",
        "launch_exit and touch of 1, 32, 132 CTAs",
    ),
    "cta_interval": _measured(
        0.45, 0.4, 0.65, "cycles between CTAs, of the next of an SM", "launch_exit, 132 to 1056"
    ),
    "cta_interval_later": _measured(
        1.2, 1.0, 1.35, "cycles between CTAs, of later ones", "launch_exit, 2112 to 4224"
    ),
    "l2_bytes_written_in_all": _measured(
        1950, 1900, 2440, "bytes per clock of all SMs", "memory_rate to L2; of TMA stores 2440"
    ),
}
MEASURED_H200 = read(Path(__file__).with_name("h200.json"))
H100 = Gpu(
    name="H100",
    arch="sm_90a",
    sms=132,
    l2_bytes=50 << 20,
    parameters={**PARAMETERS, **MEASURED_H200.parameters, **_OF_H100},
)
H200 = MEASURED_H200.over(replace(H100, name="H200"))
