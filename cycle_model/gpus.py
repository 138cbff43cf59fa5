"""The GPUs that have parameters, by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cycle_model.parameters.parameter import GUESSED, MEASURED, PUBLISHED, Gpu, Parameter, read

# B200, GB200, GB300. Nobody here has one: published numbers, and guesses that say so.
#
# Sources: SA is github SemiAnalysisAI/microbench-blackwell @9a068d8 (B200), QRC github
# ademeure/QuickRunCUDA (B300, audited), FA4 arXiv 2603.05451, HB github hbarclay/gemm-model.

CYCLES, PER_WARP = "cycles", "cycles of a scheduler per warp instruction"
_QRC = "QRC pipe catalogue, B300"


def published(value: float, low: float, high: float, unit: str, source: str) -> Parameter:
    return Parameter(value, low, high, unit, PUBLISHED, source)


def guessed(value: float, low: float, high: float, unit: str, why: str) -> Parameter:
    return Parameter(value, low, high, unit, GUESSED, why)


PARAMETERS = {
    # issue of one warp instruction: how long its pipe is busy
    "issue_fma": published(1, 1, 1, PER_WARP, _QRC),
    "issue_fma2": published(2, 2, 2, PER_WARP, _QRC),
    "issue_imad": published(2, 2, 2, PER_WARP, _QRC),
    "issue_alu": published(2, 2, 2, PER_WARP, _QRC),
    "issue_pack": published(2, 2, 4, PER_WARP, f"{_QRC}: F2FP between 1 and 2 an SM and clock"),
    "issue_special": published(8, 8, 8, PER_WARP, "FA4: 16 ex2 per clock and SM"),
    "issue_convert": guessed(8, 8, 16, PER_WARP, "as MUFU: the same pipe"),
    "issue_uniform": guessed(2, 1, 2, PER_WARP, "a uniform datapath of half rate"),
    "issue_tensor": guessed(16, 8, 32, PER_WARP, "mma.sync, which no kernel for sm_100 uses"),
    "issue_access": published(1, 1, 1, "cycles of the SM per warp instruction", _QRC),
    "issue_shuffle": published(1, 1, 2, "cycles of the SM per warp instruction", _QRC),
    "issue_reduce": published(2, 2, 4, "cycles of the SM per warp instruction", _QRC),
    # results that a scoreboard tells of
    "latency_plain": guessed(20, 10, 30, CYCLES, "of what has a scoreboard and no other entry"),
    "latency_fma": published(4, 4, 5, CYCLES, _QRC),
    "latency_alu": published(5, 4, 6, CYCLES, _QRC),
    "latency_special": published(18, 14, 24, CYCLES, f"{_QRC}: 14 for ex2"),
    "latency_uniform": guessed(8, 6, 12, CYCLES, "as on Hopper"),
    "latency_tensor": guessed(33, 24, 40, CYCLES, "as on Hopper"),
    "latency_shuffle": published(24, 22, 26, CYCLES, _QRC),
    "latency_constant": guessed(30, 20, 60, CYCLES, "LDC and LDCU that hit"),
    "latency_special_register": guessed(20, 12, 40, CYCLES, "S2R, S2UR"),
    "latency_vote": published(12, 8, 16, CYCLES, _QRC),
    "latency_tensor_allocation": guessed(100, 50, 300, CYCLES, "UTCATOMSWS"),
    "latency_membar": guessed(9, 8, 20, CYCLES, "a fence of a CTA, as on Hopper"),
    "latency_membar_gpu": published(267, 250, 670, CYCLES, "QRC: fence.gpu"),
    "latency_atomic_shared": guessed(60, 40, 100, CYCLES, "ATOMS"),
    "latency_atomic_global": guessed(700, 400, 1000, CYCLES, "as a load from L2, and back"),
    # the rest of the settings
    "branch": guessed(8, 4, 12, "cycles beyond the stall of a jump", "as on Hopper"),
    "branch_cold": guessed(12, 0, 45, "cycles more to code that no warp has had", "as on Hopper"),
    "parameter_sector": guessed(38, 20, 45, "cycles of the SM's first read of 32 bytes",
                                "as on Hopper"),
    "special_queue": guessed(16, 0, 48, "cycles of work that MUFU takes ahead", "in order on H200"),
    "operands_read": guessed(10, 6, 14, CYCLES, "until a scoreboard of operands is free"),
    "mbarrier_arrive": published(27, 8, 40, CYCLES, "QRC: arrive with default semantics"),
    "mbarrier_arrive_remote": guessed(180, 120, 260, "cycles beyond a local one", "DSMEM of QRC"),
    "mbarrier_wake": guessed(60, 20, 96, CYCLES, "QRC: 123 from arrive to test_wait and back"),
    "mbarrier_ready": guessed(60, 20, 96, "cycles of a wait that is satisfied", "the same"),
    "named_barrier": published(22, 12, 24, CYCLES, "QRC: 22 + 2 W for __syncthreads"),
    "named_barrier_warp": published(2, 2, 2, "cycles per warp", "QRC: 22 + 2 W"),
    "cluster_barrier": published(170, 120, 336, CYCLES, "QRC: 336 for both ways"),
    "tma_issue": published(86, 48, 90, "cycles of the SM per instruction",
                           "SA: main loops of 64 x 16; QRC 48 on a B300"),
    "tma_gather": guessed(12, 6, 18, "cycles of the SM per gather4",
                          "H200: 6 for each of 16 boxes of 8 rows behind each other; FlashMLA's "
                          "published prefill leaves 14, or 18 if it shares keys and values"),
    "tma_row": published(1.53, 1.5, 1.6, "cycles per row of up to 128 bytes", "fit of 592 SA runs"),
    "tma_write": published(1, 0, 1.2, "cycles per 128 bytes of a box, behind its last row",
                           "SA: main loops with two stages"),
    "tma_latency_l2": published(580, 540, 640, CYCLES,
                                "SA: FP8 main loops with two stages of 32 bytes, 660 to the end of "
                                "a wait, less the wake-up and instructions"),
    "tma_latency_hbm": published(810, 780, 1250, CYCLES,
                                 "SA: tma2d_tput, one stage, 900 to the end of a wait; of rows "
                                 "256 KB apart, in main loops, 1205"),
    "tma_remote": guessed(100, 0, 300, "cycles more to another CTA", "no source"),
    "tma_store_row": guessed(1.53, 1, 2, "cycles per row of up to 128 bytes", "as loads"),
    "tma_store_read": guessed(200, 100, 400, CYCLES, "until the source has been read"),
    "tma_store_latency": guessed(500, 300, 900, CYCLES, "until it is written"),
    "mma_issue": guessed(8, 4, 16, "cycles from issue to the queue", "no source"),
    "mma_switch": guessed(0, 0, 32, "cycles between A in shared and in tensor memory", "no source"),
    "mma_overhead": published(0.03, 0, 0.6, "cycles per instruction beyond its law", "SA: a (II)"),
    "mma_smem_rate": published(128, 120, 128, "bytes of shared memory per clock", "SA"),
    "commit_latency_smem_1": published(136, 120, 150, CYCLES, "SA, issue to end of wait, 128 rows"),
    "commit_latency_tmem_1": published(104, 90, 120, CYCLES, "SA, issue to end of wait"),
    "commit_latency_smem_2": published(170, 150, 190, CYCLES, "the same of pairs"),
    "commit_latency_tmem_2": published(138, 120, 160, CYCLES, "the same of pairs"),
    "fill_rate": guessed(128, 64, 512, "bytes per clock of tcgen05.cp", "no source"),
    "tmem_load_latency": guessed(40, 30, 200, CYCLES, "no source"),
    "tmem_load_rate": guessed(1, 1, 4, "registers of a warp per clock and scheduler", "structure"),
    "tmem_store_latency": guessed(30, 20, 100, CYCLES, "no source"),
    "tmem_store_rate": guessed(1, 1, 4, "registers of a warp per clock and scheduler", "structure"),
    "dsmem_latency": published(207, 180, 330, CYCLES, "QRC: ld.shared::cluster"),
    "dsmem_rate": published(16, 8, 32, "bytes per clock and SM", "QRC: 2.4 TB/s of all SMs"),
    "dsmem_load": published(207, 180, 330, CYCLES, "QRC: ld.shared::cluster"),
    "wgmma_latency_smem": guessed(73, 60, 90, "cycles behind its turn", "as on Hopper"),
    "wgmma_latency_registers": guessed(63, 50, 80, "cycles behind its turn", "as on Hopper"),
    "global_latency_l1": guessed(39, 32, 45, CYCLES, "as on Hopper, 32, and a little more"),
    "global_latency_l2": published(301, 250, 600, CYCLES, _QRC),
    "global_latency_hbm": published(789, 700, 1000, CYCLES, _QRC),
    "hbm_tail": guessed(40, 0, 60, "cycles per e-fold of accesses", "as on Hopper"),
    "l2_bytes_per_cycle": published(84, 71, 128, "bytes per clock of one SM",
                                    "SA: rows of 128 bytes; QRC 71 of each of all"),
    "l2_bytes_in_all": published(9500, 7400, 10500, "bytes per clock of all SMs", "QRC: 20.5 TB/s"),
    "l2_bytes_delivered": guessed(12400, 9500, 18900, "bytes per clock of SMs that read the same",
                                  "84 of each"),
    "sms_that_share": guessed(18.5, 8, 20, "SMs for which L2 answers a line once", "as on Hopper"),
    "hbm_bytes_per_cycle": published(4100, 3700, 4200, "bytes per clock of all SMs", "SA: 7.2 TB"),
    "copy_latency": guessed(20, 0, 60, "cycles of cp.async beyond a load", "no source"),
    "cancel_latency": guessed(400, 200, 800, CYCLES, "try_cancel"),
    "shared_latency": published(29, 26, 33, CYCLES, f"{_QRC}: LDS"),
    "smem_bytes_per_cycle": published(128, 112, 128, "bytes per clock and SM", "QRC, FA4"),
    "l2_bytes_written_in_all": guessed(4000, 2000, 8000, "bytes per clock of all SMs",
                                       "as on Hopper beside its reads"),
    "hbm_bytes_written_per_cycle": guessed(2700, 2400, 4100, "bytes per clock of all SMs",
                                           "two thirds of reads, as on an H100"),
    # of a launch
    "clock": published(1.755, 1.755, 1.965, "GHz", "flash-attention issues 2570, 2488: locked"),
    "launch": published(3.0, 2.0, 5.0, "microseconds", "HB, QRC: 2.05 pipelined"),
    "cta_start": guessed(800, 400, 1500, "cycles between two CTAs in one place", "no source"),
    "cluster_start": guessed(1440, 400, 1600, "the same of clusters", "as on Hopper"),
    "launch_least": guessed(0, 0, 2.0, "microseconds from a launch to the next", "no source"),
    "dependent_least": guessed(
        0.53, 0.4, 1.0, "microseconds from a dependent launch to the next", "H100"
    ),
    "dependent_start": guessed(
        0.3, 0.25, 0.6, "microseconds from the last launch_dependents to the first CTA", "H100"
    ),
    "dependent_release": guessed(
        0.6, 0.5, 1.0, "microseconds from the end of a grid to who waits for it", "H100"
    ),
    "sm_interval": guessed(28, 20, 40, "cycles, times the square root of the SMs before it",
                           "as on Hopper"),
    "cta_interval": guessed(0.45, 0.3, 1.2, "cycles between CTAs, of the next of an SM",
                            "as on Hopper"),
    "cta_interval_later": guessed(1.2, 1, 2.4, "cycles between CTAs, of later ones",
                                  "as on Hopper"),
    "beside_wgmma": guessed(0, 0, 0, "cycles that the FMA pipe or the ALU loses with an "
                            "instruction while wgmma runs", "there is no wgmma"),
    "special_beside_wgmma": guessed(0, 0, 0, "cycles that the MUFU loses with one",
                                    "there is no wgmma"),
}  # fmt: skip

B200 = Gpu(
    name="B200",
    arch="sm_100a",
    sms=148,
    l2_bytes=126 << 20,
    parameters=PARAMETERS,
)
GB200 = replace(
    B200,
    name="GB200",
    sms=152,
    parameters={**PARAMETERS, "clock": guessed(1.9, 1.755, 2.0, "GHz", "no source")},
)
GB300 = replace(
    B200,
    name="GB300",
    arch="sm_103a",
    sms=152,
    parameters={
        **PARAMETERS,
        "clock": published(1.957, 1.92, 2.032, "GHz", "flash-attention PR 2605: locked"),
        "issue_special": published(4, 4, 4, PER_WARP, "QRC: 32 ex2 per clock and SM"),
    },
)


# H100 and H200, measured by `scripts/bench.py units`: `h100.json` and `h200.json` are what `python
# -m lab.bringup.rates results/units_h200.json --json cycle_model/parameters/h200.json` writes, so
# that a newer run takes its place as one file. What rows do not give stands below, and what they
# gave in graphs of another kind than those by which kernels are timed: there an empty launch takes
# 0.18 us more (notes/device_runs.md, notes/launch_states.py). What an H200's rows do not give it
# has from an H100.


_MEASURED = Path(__file__).with_name("parameters")


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
H100 = _in_graphs_of_torch(read(_MEASURED / "h100.json").over(_BARE))
H200 = _in_graphs_of_torch(read(_MEASURED / "h200.json").over(replace(H100, name="H200")))


GPUS = {gpu.name: gpu for gpu in (B200, GB200, GB300, H100, H200)}


def named(name: str) -> Gpu:
    """Return the GPU of that name; raise ValueError if there is none."""
    if name not in GPUS:
        raise ValueError(f"no parameters of {name!r}; there are {', '.join(GPUS)}")
    return GPUS[name]


def for_arch(arch: str) -> Gpu:
    """Return the first GPU of an architecture; raise ValueError if there is none."""
    found = next((gpu for gpu in GPUS.values() if gpu.arch == arch), None)
    if found is None:
        raise ValueError(f"no parameters of a GPU for {arch}; there are {', '.join(GPUS)}")
    return found
