"""The operator `blackwell_kernels::kv_compress`: its launch, and the parameters that it takes.

One launch makes entries and saves rows. What a tail holds has one reader in a step, and where that
reads it, it writes what follows there, too. Nothing here waits for a GPU.
"""

from __future__ import annotations

import struct

from fmha.sparse.compressor.arguments import Compress, Job, check
from fmha.sparse.compressor.config import STAGED, WalkConfig, WindowConfig
from fmha.sparse.compressor.params import (
    CompressParams,
    Counts,
    StepRows,
    StepTables,
    TailSlots,
    Weights,
)
from kernelkit.compile import compile_once
from kernelkit.kernel import CompiledKernel
from kernelkit.launch import Target, choose_target, launch
from kernelkit.operator import Operator
from kernelkit.param_table import ParamTable
from kvcache.layouts.layout import FP32_BYTES
from kvcache.movement.params import Angles, Entries

ARCHS = ("sm_100a", "sm_90a")
WALKED = 8  # tokens of each request that one cluster walks


def run_compress(given: Compress) -> tuple[()]:
    """Write entries, and rows of the tail."""
    job = given.job
    check(job)
    target = choose_target(job.values.device, given.backend, given.arch, ARCHS)
    if job.tokens and len(job.tables.starts):
        longest = job.tokens if job.longest is None else min(job.longest, job.tokens)
        run = _run_online if job.tail.tail.online else _run_raw
        run(job, longest, target)
    return ()


def _run_raw(job: Job, longest: int, target: Target) -> None:
    """Windows of raw rows; longest: the most tokens of a request."""
    saved = min(job.tail.rows, longest)
    config = WindowConfig(**vars(job.entry), chunk=longest >= job.entry.ratio)
    windows, clusters = config.clusters(len(job.tables.ends), len(job.tables.starts) * saved)
    if clusters:
        compiled = compile_windows(config, target.arch)
        _launch(compiled, params_of(job, saved, windows), clusters, target, job)


def _run_online(job: Job, longest: int, target: Target) -> None:
    """Windows of which the tail keeps a running state; longest: the most tokens of a request."""
    clusters, chunk = len(job.tables.starts), longest > WALKED
    if chunk:
        clusters += len(job.tables.ends)
    staged = min(job.entry.ratio, STAGED if chunk else WALKED)
    config = WalkConfig(**vars(job.entry), staged=staged, chunk=chunk)
    compiled = compile_walk(config, target.arch)
    _launch(compiled, params_of(job), clusters, target, job)


def params_of(job: Job, saved: int = 0, windows: int = 0) -> CompressParams:
    """The parameters of a launch; saved: rows of each request; windows: clusters that have some."""
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
            eps_bits=_bits(weights.eps),
        ),
        angles=Angles.of(job.cos, job.sin),
        entries=Entries.of(job.out),
    )


def _bits(number: float) -> int:
    """The bits of a number in fp32."""
    return struct.unpack("<I", struct.pack("<f", number))[0]


def _launch(
    compiled: CompiledKernel, params: CompressParams, clusters: int, target: Target, job: Job
) -> None:
    launch(compiled, (ParamTable.of(params), clusters), target, job.values.device)


def compile_windows(config: WindowConfig, arch: str) -> CompiledKernel:
    """`Windows.__call__`: a compressor of whole windows."""
    return compile_once(config, arch, "fmha.sparse.compressor.window_kernel")


def compile_walk(config: WalkConfig, arch: str) -> CompiledKernel:
    """`Walk.__call__`: a compressor with a running softmax."""
    return compile_once(config, arch, "fmha.sparse.compressor.online_kernel")


COMPRESS = Operator(
    "kv_compress", Compress, run_compress, lambda _: (), results=0, writes=("tail_pool", "out_pool")
)
