"""H100 and H200."""

from __future__ import annotations

from dataclasses import replace

from cycle_model.parameters.blackwell import CYCLES, PARAMETERS, PER_WARP, guessed, published
from cycle_model.parameters.parameter import Gpu

_SHARED = "as on Blackwell"
_CHANGED = {
    "issue_tensor": guessed(16, 8, 32, PER_WARP, "m16n8k16 at half the rate of wgmma"),
    "tma_row": guessed(1.6, 1.5, 2, "cycles per row of up to 128 bytes", _SHARED),
    "tma_latency_l2": guessed(650, 500, 800, CYCLES, "no source"),
    "tma_latency_hbm": guessed(1000, 800, 1400, CYCLES, "no source"),
    "global_latency_l2": guessed(273, 250, 400, CYCLES, "published figures between 200 and 270"),
    "global_latency_hbm": guessed(650, 550, 900, CYCLES, "published figures"),
    "hbm_bytes_per_cycle": guessed(1552, 1450, 1650, "bytes per clock of all SMs", "3.07 TB/s"),
}
PARAMETERS_HOPPER = {**PARAMETERS, **_CHANGED}
H100 = Gpu(
    name="H100",
    arch="sm_90a",
    sms=132,
    l2_bytes=50 << 20,
    clock=published(1.98, 1.755, 1.98, "GHz", "clocks.max.sm of results/gqa_h100.json"),
    launch=guessed(1.0, 0.6, 2.0, "microseconds", "kernels of a CUDA graph"),
    cta_start=guessed(800, 400, 1500, CYCLES, "no source"),
    parameters=PARAMETERS_HOPPER,
)
H200 = replace(
    H100,
    name="H200",
    parameters={
        **PARAMETERS_HOPPER,
        "hbm_bytes_per_cycle": guessed(2200, 2000, 2400, "bytes per clock of all SMs", "4.3 TB/s"),
    },
)
