"""Operator `blackwell_kernels::kv_compress`: its launch and its parameters.

One launch makes entries and saves rows. Each row of a tail has one reader in a step, and this
reader also writes the row that replaces it. Nothing here waits for a GPU.
"""

from __future__ import annotations

from kernelkit.call.launch import choose_target, launch
from kernelkit.call.operator import Operator
from kernelkit.compile.compiler import compile_once
from kernelkit.compile.kernel import CompiledKernel
from kernelkit.device.param_table import ParamTable
from kernelkit.device.param_words import fp32_bits
from kernelkit.plan.dtypes import FP32_BYTES
from kvcache.movement.config import Angles, Entries
from mla.compressor.arguments import Compress, Job, check
from mla.compressor.config import STAGED, WalkConfig, WindowConfig
from mla.compressor.params import (
    CompressParams,
    Counts,
    StepRows,
    StepTables,
    TailSlots,
    Weights,
)

ARCHS = ("sm_100a", "sm_90a")
KERNELS = {
    WindowConfig: "mla.compressor.window_kernel",
    WalkConfig: "mla.compressor.online_kernel",
}
WALKED = 8  # tokens of each request that one cluster walks


def run_compress(given: Compress) -> tuple[()]:
    """Write entries, and rows of the tail."""
    job = given.job
    check(job)
    target = choose_target(job.values.device, given.backend, given.arch, ARCHS)
    config, params, clusters = plan(job)
    if clusters:
        compiled = compile_compressor(config, target.arch)
        launch(compiled, (ParamTable.of(params), clusters), target, job.values.device)
    return ()


def plan(job: Job) -> tuple[WindowConfig | WalkConfig, CompressParams, int]:
    """Return the config, the parameters and the number of clusters, 0 if there is nothing to do."""
    longest = job.tokens if job.longest is None else min(job.longest, job.tokens)
    describe = _running if job.tail.tail.online else _raw
    config, params, clusters = describe(job, longest)
    return config, params, clusters if job.tokens and len(job.tables.starts) else 0


def _raw(job: Job, longest: int) -> tuple[WindowConfig, CompressParams, int]:
    """Plan the launch for windows of raw rows.

    longest: largest number of tokens of a request.
    """
    saved = min(job.tail.rows, longest)
    config = WindowConfig(**vars(job.entry), chunk=longest >= job.entry.ratio)
    windows, clusters = config.clusters(len(job.tables.ends), len(job.tables.starts) * saved)
    return config, params_of(job, saved, windows), clusters


def _running(job: Job, longest: int) -> tuple[WalkConfig, CompressParams, int]:
    """Plan the launch for windows whose tail keeps a running state."""
    clusters, chunk = len(job.tables.starts), longest > WALKED
    if chunk:
        clusters += len(job.tables.ends)
    staged = min(job.entry.ratio, STAGED if chunk else WALKED)
    return WalkConfig(**vars(job.entry), staged=staged, chunk=chunk), params_of(job), clusters


def params_of(job: Job, saved: int = 0, windows: int = 0) -> CompressParams:
    """Return the parameters of a launch.

    Args:
        job: the arguments of the call.
        saved: rows that each request saves.
        windows: number of clusters that have windows.
    """
    values, scores, tail, weights = job.values, job.scores, job.tail, job.compressor
    return CompressParams(
        step=StepRows(
            values=values,
            scores=scores,
            values_stride=values.stride(0) * FP32_BYTES,
            scores_stride=scores.stride(0) * FP32_BYTES,
            tokens=job.tokens,
        ),
        tables=StepTables(**job.tables.named),
        counts=Counts(
            ends=len(job.tables.ends),
            requests=len(job.tables.starts),
            saved=saved,
            window_clusters=windows,
        ),
        tail=TailSlots(
            address=(tail.pool, tail.offset),
            slot_stride=tail.pool.stride(0),
            rows=tail.rows,
            slots=len(tail.pool),
        ),
        weights=Weights(
            ape=weights.ape,
            norm=weights.weight,
            ape_stride=weights.ape.stride(0) * FP32_BYTES,
            eps_bits=fp32_bits(weights.eps),
        ),
        angles=Angles.of(job.cos, job.sin),
        entries=Entries.of(job.out),
    )


def compile_compressor(config: WindowConfig | WalkConfig, arch: str) -> CompiledKernel:
    """Return the kernel of a config, found or compiled, once per process."""
    return compile_once(config, arch, KERNELS[type(config)])


COMPRESS = Operator(
    "kv_compress", Compress, run_compress, lambda _: (), results=0,
    writes=("tail_pool", "out_pool"), pools=True,
)  # fmt: skip
