"""A compressor's launch, and the table of numbers that it takes.

One launch makes entries and saves rows. What a tail holds has one reader in a step, and where that
reads it, it writes what follows there, too. Nothing here waits for a GPU.
"""

from __future__ import annotations

import struct

import torch

from fmha.sparse.compile import compile_walk, compile_windows
from fmha.sparse.compressor.arguments import Job, check
from fmha.sparse.compressor.config import STAGED, WalkConfig, WindowConfig
from kernelkit.launch import Target, choose_target, launch
from kernelkit.param_table import table_of
from kvcache.layouts.layout import FP32_BYTES

ARCHS = ("sm_100a", "sm_90a")
WALKED = 8  # tokens of each request that one cluster walks


def run_compress(job: Job, *, backend: str = "auto", arch: str | None = None) -> None:
    """See `fmha.sparse.compressor.api.compress`."""
    check(job)
    device = job.values.device
    target = choose_target(device, backend, arch, ARCHS)
    if not job.tokens or not len(job.tables.starts):
        return
    if job.tail.tail.online:
        _run_online(job, target)
    else:
        _run_raw(job, target)


def _run_raw(job: Job, target: Target) -> None:
    longest = job.tokens if job.longest is None else min(job.longest, job.tokens)
    saved = min(job.tail.rows, longest)
    config = WindowConfig(**vars(job.entry), chunk=longest >= job.entry.ratio)
    windows, clusters = config.clusters(len(job.tables.ends), len(job.tables.starts) * saved)
    if clusters:
        compiled = compile_windows(config, target.arch)
        _launch(compiled, numbers_of(job, saved, windows), clusters, target, job)


def _run_online(job: Job, target: Target) -> None:
    longest = job.tokens if job.longest is None else min(job.longest, job.tokens)
    clusters, chunk = len(job.tables.starts), longest > WALKED
    if chunk:
        clusters += len(job.tables.ends)
    staged = min(job.entry.ratio, STAGED if chunk else WALKED)
    config = WalkConfig(**vars(job.entry), staged=staged, chunk=chunk)
    compiled = compile_walk(config, target.arch)
    _launch(compiled, numbers_of(job, 0, 0), clusters, target, job)


def numbers_of(job: Job, saved: int, windows: int) -> list[int]:
    """In the order of `fmha.sparse.compressor.device.Numbers`."""
    tail, out, tables = job.tail, job.out, job.tables
    values, scores, ape = job.values, job.scores, job.compressor.ape
    weight, rope, pool = job.compressor.weight, (job.cos, job.sin), out.pool.data_ptr()
    return [
        values.data_ptr(), scores.data_ptr(), _stride(values), _stride(scores), job.tokens,
        *(table.data_ptr() for table in tables.named.values()),
        len(tables.ends), len(tables.starts), saved, windows,
        tail.pool.data_ptr() + tail.offset, tail.pool.stride(0), tail.rows, len(tail.pool),
        ape.data_ptr(), weight.data_ptr(), _stride(ape), _bits(job.compressor.eps),
        *(table.data_ptr() for table in rope), *map(_stride, rope), len(job.cos),
        pool + out.data_offset, pool + out.scale_offset, out.pool.stride(0), out.rows, out.entries,
    ]  # fmt: skip


def _stride(tensor: torch.Tensor) -> int:
    """Bytes between rows."""
    return tensor.stride(0) * FP32_BYTES


def _bits(number: float) -> int:
    """Of a number in fp32."""
    return struct.unpack("<I", struct.pack("<f", number))[0]


def _launch(compiled: object, numbers: list[int], clusters: int, target: Target, job: Job) -> None:
    launch(compiled, (table_of(numbers), clusters), target, job.values.device)
