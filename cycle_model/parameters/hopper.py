"""H100 and H200, measured by `scripts/bench.py units`: `h100.json` and `h200.json` are what
`python -m workbench.bringup.rates results/units_h100.json --json cycle_model/parameters/h100.json`
writes, so that a newer run takes its place as one file. What rows do not give stands below; what an
H200's do not give it has from an H100.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cycle_model.parameters.blackwell import PARAMETERS
from cycle_model.parameters.parameter import MEASURED, Gpu, Parameter
from cycle_model.parameters.table import read

_BESIDE = {
    "hbm_tail": Parameter(
        40, 30, 50, "cycles per e-fold of accesses", MEASURED, "touch behind other work"
    ),
    "sms_that_share": Parameter(
        16.5,
        14,
        18,
        "neighbouring SMs for which L2 answers a line once, if asked at a time",
        MEASURED,
        "l2_bytes_per_cycle of TMA by 12 and 33 readers apart: 132 / 8",
    ),
}
_BARE = Gpu(
    name="H100", arch="sm_90a", sms=132, l2_bytes=50 << 20, parameters={**PARAMETERS, **_BESIDE}
)
H100 = read(Path(__file__).with_name("h100.json")).over(_BARE)
H200 = read(Path(__file__).with_name("h200.json")).over(replace(H100, name="H200"))
