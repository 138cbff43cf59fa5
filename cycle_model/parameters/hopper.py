"""H100 and H200: measured by `scripts/bench.py units` on an H200, and on an H100 where that differs
or was measured later."""

from __future__ import annotations

from dataclasses import replace

from cycle_model.parameters.blackwell import CYCLES, PARAMETERS, PER_WARP, published
from cycle_model.parameters.parameter import MEASURED, Gpu, Parameter

_H200, _H100 = "results/units_h200.json", "results/units_h100.json"
_SM = "cycles of the SM per warp instruction"


def _measured(
    value: float, low: float, high: float, unit: str, what: str, source: str = _H200
) -> Parameter:
    return Parameter(value, low, high, unit, MEASURED, f"{source}: {what}")


_CHANGED = {
    "issue_fma": _measured(1, 1, 1, PER_WARP, "issue of FFMA"),
    "issue_imad": _measured(2, 2, 2, PER_WARP, "issue of IMAD"),
    "issue_alu": _measured(2, 2, 2, PER_WARP, "issue of LOP3, FMNMX, PRMT, SHF"),
    "issue_pack": _measured(2, 2, 2, PER_WARP, "issue of F2FP"),
    "issue_special": _measured(8, 8, 8, PER_WARP, "issue of MUFU.EX2"),
    "issue_convert": _measured(8, 8, 8, PER_WARP, "issue of F2I, POPC, FLO"),
    "issue_tensor": _measured(6, 6, 8, PER_WARP, "issue of HMMA.16816"),
    "issue_access": _measured(1, 1, 1, _SM, "issue of LDS and STS of 4 bytes"),
    "issue_shuffle": _measured(1, 1, 1, _SM, "issue of SHFL"),
    "issue_reduce": _measured(2, 2, 2, _SM, "issue of REDUX"),
    "latency_fma": _measured(4, 4, 5, CYCLES, "latency of FFMA"),
    "latency_alu": _measured(4, 4, 5, CYCLES, "latency of LOP3"),
    "latency_special": _measured(17, 17, 19, CYCLES, "latency of MUFU"),
    "latency_shuffle": _measured(24, 24, 40, CYCLES, "latency of SHFL; of REDUX 40"),
    "latency_constant": _measured(28, 28, 60, CYCLES, "latency of LDC"),
    "latency_vote": _measured(13, 11, 17, CYCLES, "latency of ISETP and VOTE, 17"),
    "latency_special_register": _measured(23, 15, 42, CYCLES, "latency of CS2R, S2R"),
    "latency_membar": _measured(9, 8, 16, CYCLES, "latency_membar, of a CTA"),
    "latency_membar_gpu": _measured(
        669, 265, 673, CYCLES, "latency_membar, of the GPU; 265 on another machine", _H100
    ),
    "latency_atomic_shared": _measured(24, 24, 32, CYCLES, "atom.shared"),
    "latency_atomic_global": _measured(516, 500, 534, CYCLES, "atom.global"),
    "branch": _measured(10, 8, 12, "cycles beyond the stall of a jump", "branch, taken and not"),
    "branch_cold": _measured(
        12, 9, 45, "cycles more to code that no warp has had", "launch_body, jumps over 56 and 248"
    ),
    "parameter_sector": _measured(
        38, 33, 46, "cycles of the SM's first read of 32 bytes", "launch_parameters"
    ),
    "mbarrier_arrive": _measured(14, 8, 20, CYCLES, "mbarrier_wake, 50 with the wake-up"),
    "mbarrier_wake": _measured(36, 30, 42, CYCLES, "mbarrier_wake, 50 with the arrival"),
    "mbarrier_ready": _measured(
        32, 25, 41, "cycles of a wait that is satisfied", "41 with its use"
    ),
    "mbarrier_arrive_remote": _measured(66, 60, 120, "cycles beyond a local one", "ping-pong, 132"),
    "named_barrier": _measured(12, 10, 14, CYCLES, "named_barrier: 12 + 2 per warp"),
    "named_barrier_warp": _measured(2, 2, 2, "cycles per warp", "named_barrier: 12 + 2 per warp"),
    "cluster_barrier": _measured(64, 60, 77, CYCLES, "cluster_barrier, relaxed"),
    "tma_row": _measured(1.19, 1.0, 1.2, "cycles per row of up to 128 bytes", "tma_row"),
    "tma_write": _measured(
        0,
        0,
        0.1,
        "cycles per 128 bytes of a box, behind its last row",
        "tma_latency_l2: 1.1 a row, which are tma_row's",
    ),
    "tma_latency_l2": _measured(270, 250, 290, CYCLES, "tma_latency_l2, less rows and wake-up"),
    "tma_latency_hbm": _measured(830, 560, 860, CYCLES, "tma_latency_hbm, less rows and wake-up"),
    "tma_remote": _measured(5, 0, 15, "cycles more to another CTA", "tma_multicast_latency"),
    "tma_store_row": _measured(4, 2, 4.2, "cycles per row of up to 128 bytes", "tma_store_row"),
    "tma_store_read": _measured(72, 60, 80, CYCLES, "tma_store_read, less rows"),
    "tma_store_latency": _measured(73, 60, 600, CYCLES, "tma_store_latency, less rows"),
    "dsmem_latency": _measured(180, 170, 200, CYCLES, "dsmem_async of 4 bytes, less the wake-up"),
    "dsmem_rate": _measured(21, 20, 28, "bytes per clock and SM", "dsmem_rate"),
    "dsmem_load": _measured(217, 211, 223, CYCLES, "dsmem_latency"),
    "wgmma_latency_smem": _measured(73, 71, 75, "cycles behind its turn", "wgmma_until_wait"),
    "wgmma_latency_registers": _measured(
        63, 61, 65, "cycles behind its turn", "wgmma_until_wait, A in registers"
    ),
    "beside_wgmma": _measured(
        1,
        0.9,
        1.1,
        "cycles that the FMA pipe or the ALU loses with an instruction while wgmma runs",
        "wgmma_beside of fma, add and cvt",
        _H100,
    ),
    "special_beside_wgmma": _measured(
        2,
        1.9,
        3,
        "cycles that the MUFU loses with one",
        "wgmma_beside of ex2; 2.4 and 2.7 where others are among them",
        _H100,
    ),
    "global_latency_l1": _measured(32, 32, 34, CYCLES, "global_latency_l1"),
    "global_latency_l2": _measured(280, 270, 290, CYCLES, "global_latency_l2"),
    "global_latency_hbm": _measured(685, 620, 740, CYCLES, "global_latency_hbm", _H100),
    "hbm_tail": _measured(
        40, 30, 50, "cycles per e-fold of accesses", "touch behind other work", _H100
    ),
    "copy_latency": _measured(52, 40, 75, "cycles of cp.async beyond a load", "copy_latency"),
    "l2_bytes_per_cycle": _measured(122, 100, 128, "bytes per clock of one SM", "of one SM alone"),
    "l2_bytes_in_all": _measured(
        3930, 3850, 4813, "bytes per clock of all SMs", "of all SMs", _H100
    ),
    "l2_bytes_delivered": _measured(
        10200,
        8500,
        12900,
        "bytes per clock of SMs that read the same",
        "l2_bytes_per_cycle of TMA by 132 readers; 12,800 of cp.async, 8,900 of loads",
        _H100,
    ),
    "sms_that_share": _measured(
        16.5,
        14,
        18,
        "neighbouring SMs for which L2 answers a line once, if asked at a time",
        "l2_bytes_per_cycle of TMA by 12 and 33 readers apart: 132 / 8",
        _H100,
    ),
    "hbm_bytes_per_cycle": _measured(
        1567, 1450, 1575, "bytes per clock of all SMs", "memory_rate, 3.10 TB/s", _H100
    ),
    "shared_latency": _measured(28, 28, 30, CYCLES, "latency of LDS, 29"),
    "hbm_bytes_written_per_cycle": _measured(
        1346,
        1300,
        1615,
        "bytes per clock of all SMs",
        "memory_rate: beside reads; alone 1,615",
        _H100,
    ),
    "clock": published(1.98, 1.755, 1.98, "GHz", "clocks.max.sm of results/gqa_h100.json"),
    "launch": _measured(
        0.86,
        0.66,
        0.95,
        "microseconds",
        "launch_exit, touch; of one process 0.2 more than of another",
        _H100,
    ),
    "cta_start": _measured(470, 450, 490, "cycles between two CTAs in one place", "cta_start"),
    "cluster_start": _measured(1440, 1420, 1560, "the same of clusters", "cta_start"),
    "launch_least": _measured(
        0.967, 0.78, 0.98, "microseconds from a launch to the next", "launch_exit of one CTA", _H100
    ),
    "dependent_least": _measured(
        0.53,
        0.5,
        0.58,
        "microseconds from a dependent launch to the next",
        "launch, overlapped",
        _H100,
    ),
    "dependent_start": _measured(
        0.3,
        0.25,
        0.53,
        "microseconds from the last launch_dependents to the first CTA",
        "launch_dependent, work before, less the last CTA's start",
        _H100,
    ),
    "dependent_release": _measured(
        0.6,
        0.58,
        0.63,
        "microseconds from the end of a grid to who waits for it",
        "launch_dependent, work behind",
        _H100,
    ),
    "sm_interval": _measured(
        38,
        24,
        42,
        "cycles, times the square root of the SMs before it",
        "launch_exit and touch of 1, 32, 132 CTAs",
        _H100,
    ),
    "cta_interval": _measured(
        0.45,
        0.4,
        0.65,
        "cycles between CTAs, of the next of an SM",
        "launch_exit, 132 to 1056",
        _H100,
    ),
    "cta_interval_later": _measured(
        1.2, 1.0, 1.35, "cycles between CTAs, of later ones", "launch_exit, 2112 to 4224", _H100
    ),
    "l2_bytes_written_in_all": _measured(
        1950,
        1900,
        2440,
        "bytes per clock of all SMs",
        "memory_rate to L2; of TMA stores 2440",
        _H100,
    ),
}
PARAMETERS_HOPPER = {**PARAMETERS, **_CHANGED}
H100 = Gpu(
    name="H100",
    arch="sm_90a",
    sms=132,
    l2_bytes=50 << 20,
    parameters=PARAMETERS_HOPPER,
)
H200 = replace(
    H100,
    name="H200",
    parameters={
        **PARAMETERS_HOPPER,
        "l2_bytes_in_all": _measured(4650, 4400, 4813, "bytes per clock of all SMs", "of all SMs"),
        "latency_membar_gpu": _measured(265, 265, 593, CYCLES, "latency_membar, of the GPU"),
        "hbm_bytes_per_cycle": _measured(2240, 2100, 2345, "bytes per clock of all SMs", "all SMs"),
        "hbm_bytes_written_per_cycle": _measured(
            1680, 1600, 2215, "bytes per clock of all SMs", "memory_rate: beside reads; alone 2,215"
        ),
    },
)
