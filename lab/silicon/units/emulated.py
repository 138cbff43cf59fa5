"""A measuring kernel in the emulator: that it runs and ends, and what it would leave on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import ptxemu
from lab.silicon.units.benchmark import Benchmark, unlike
from lab.silicon.units.ptx import HOPPER, NEVER, RECORD, WARP, Kernel
from ptxemu.machine.tensor_map import encode

SMS = 2
MOST = 1 << 20  # bytes of a buffer here, however many the GPU has
ROUNDS = 2
LONG = 10_000  # cycles that a warp spins: too many here
# Benchmarks -> what the checker says of them that is meant: nobody reads what they move.
MEANT = {
    **dict.fromkeys(("issue", "dsmem_rate", "tma_issue", "tma_multicast_row"), "race"),
    **{f"{form}_store_{what}": "uninitialised"
       for form in ("tma", "bulk") for what in ("read", "latency", "row")},
    "l2_store_bytes_per_cycle": "uninitialised",
}  # fmt: skip


@dataclass(frozen=True)
class Ran:
    """records: uint64 (CTA, warp, RECORD). memory: the buffer, uint64."""

    records: np.ndarray
    memory: np.ndarray
    findings: tuple[ptxemu.Finding, ...]


def run(kernel: Kernel, count: int, arch: str = HOPPER, *, check: bool = False) -> Ran:
    """A launch of so many rounds."""
    grid = kernel.grid * (SMS if kernel.per_sm else 1)
    grid = -(-grid // kernel.cluster) * kernel.cluster
    out = np.zeros((grid, kernel.block // WARP, RECORD), np.uint64)
    memory = _buffer(kernel)
    params = [_bytes(out.ctypes.data, 8), _bytes(memory.ctypes.data, 8)]
    params += [_bytes(count, 4), _bytes(NEVER, 4)]
    if kernel.map:
        shape = kernel.map
        dims = (shape.pitch, memory.nbytes // shape.pitch)
        box = (shape.width, shape.height)
        params.append(encode(
            memory.ctypes.data, dims, (shape.pitch,), box, "u8", shape.swizzle, False
        ))  # fmt: skip
    report = ptxemu.load(kernel.text(arch)).launch(
        "bench", grid=(grid, 1, 1), block=(kernel.block, 1, 1), cluster=(kernel.cluster, 1, 1),
        smem_bytes=kernel.smem, params=params, memory=[out, memory],
        options=ptxemu.Options(check=check),
    )  # fmt: skip
    return Ran(out, memory, tuple(report.findings))


def wrong(benchmark: Benchmark, arch: str) -> str | None:
    """Why a benchmark's first kernel is not what it should be, or None: it runs, ends, has looked
    at its clocks, leaves the answer that it has, and nothing to be found fault with."""
    point = benchmark.points[0]
    try:
        ran = run(point.kernel, min(point.count, ROUNDS), arch, check=True)
    except ptxemu.PtxEmuError as error:
        return f"{type(error).__name__}: {error}"
    if not ran.records[..., :2].max(axis=(1, 2)).any():
        return "no CTA has looked at its clock"
    for finding in ran.findings:
        if finding.check != MEANT.get(benchmark.name):
            return finding.message
    return unlike(point.kernel, ran.memory)


def can(benchmark: object) -> bool:
    """Whether it can be run here: launches that are timed have a GPU, and long waits take long."""
    long = isinstance(benchmark, Benchmark) and benchmark.variant.get("asleep_for", 0) > LONG
    return isinstance(benchmark, Benchmark) and not long


def _buffer(kernel: Kernel) -> np.ndarray:
    """At 256 bytes; a cycle of pointers where one is asked for."""
    nbytes = min(kernel.memory.nbytes, MOST)
    words = np.zeros(nbytes // 8 + 32, np.uint64)
    words = words[-words.ctypes.data % 256 // 8 :][: nbytes // 8]
    if kernel.memory.chase:
        apart = kernel.memory.chase // 8
        places = np.arange(0, words.size, apart)
        words[places] = words.ctypes.data + np.roll(places, 1) * 8
    return words


def _bytes(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")
