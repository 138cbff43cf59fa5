"""A process that measures benchmarks one behind the other, and writes a line of JSON for each.

`python -m lab.silicon.units.worker GROUPS FIRST REPEATS`: those of the groups (a,b,c), from number
FIRST on. A kernel that faults spoils its process: `perform` then starts another one behind it.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from dataclasses import dataclass

import numpy as np

import ptxemu
from lab.silicon.units.benchmark import TAKES, Benchmark, failed, figures, gigahertz, row, unlike
from lab.silicon.units.benchmarks import benchmarks_of
from lab.silicon.units.launch import DriverError, Gpu
from lab.silicon.units.launches import KERNEL, Timed
from lab.silicon.units.memory import CHASE
from lab.silicon.units.ptx import HOPPER, NEVER, RECORD, WARP, Kernel, Role, head
from ptxemu.machine.tensor_map import encode

WARM_UPS = 2
SPOILT = 3  # exit code: the context is lost
WARM_ROUNDS = 1 << 16  # of the kernel that brings the clock up
STICKY = ("ILLEGAL", "LAUNCH", "MISALIGNED", "HARDWARE", "INVALID_PC", "ASSERT", "UNKNOWN",
          "CLUSTER", "INVALID_ADDRESS_SPACE")  # fmt: skip


class Bench:
    """A GPU, and buffers that benchmarks share."""

    def __init__(self, repeats: int) -> None:
        self.gpu, self.repeats = Gpu(), repeats
        self.out = self.gpu.allocate(1 << 22)
        self.scratch_bytes = 4 * self.gpu.l2_bytes
        self.scratch = self.gpu.allocate(self.scratch_bytes)
        self.buffer, self.size, self.kept = 0, 0, ""
        self._warm()

    def _warm(self) -> None:
        spin = Kernel((Role("bar.warp.sync -1;\n" * 64),), grid=1, per_sm=True, block=128)
        module, kernel = self.gpu.load(spin.text(self.gpu.arch), 0, 1)
        self._launch(kernel, spin, WARM_ROUNDS, 0)
        self.gpu.synchronize()
        self.gpu.unload(module)

    def grid(self, kernel: Kernel) -> int:
        """CTAs: no part of a cluster."""
        count = kernel.grid * (self.gpu.sms if kernel.per_sm else 1)
        return count // kernel.cluster * kernel.cluster

    def memory(self, kernel: Kernel) -> int:
        """The address of a buffer with what the kernel wants there."""
        wanted = kernel.memory
        if wanted.nbytes > self.size:
            if self.buffer:
                self.gpu.free(self.buffer)
                self.buffer = self.size = 0
            self.buffer, self.size = self.gpu.allocate(wanted.nbytes), wanted.nbytes
            self.kept = ""
        content = f"{wanted.nbytes} {wanted.chase}"
        if content != self.kept:
            self.gpu.fill(self.buffer, wanted.nbytes)
            if wanted.chase:
                self._chase(wanted.nbytes, wanted.chase)
            self.kept = content
        return self.buffer

    def _chase(self, nbytes: int, apart: int) -> None:
        count = nbytes // apart
        module, kernel = self.gpu.load(head(self.gpu.arch) + CHASE, 0, 1)
        params = [_bytes(self.buffer, 8), _bytes(apart, 4), _bytes(count - 1, 4)]
        self.gpu.launch(kernel, max(count // 128, 1), min(count, 128), params)
        self.gpu.synchronize()
        self.gpu.unload(module)

    def _launch(self, kernel: object, shape: Kernel, count: int, memory: int) -> None:
        params = [_bytes(self.out, 8), _bytes(memory, 8), _bytes(count, 4), _bytes(NEVER, 4)]
        if shape.map:
            params.append(self.gpu.tensor_map(memory, shape.memory.nbytes, shape.map))
        self.gpu.launch(
            kernel, self.grid(shape), shape.block, params, smem=shape.smem, cluster=shape.cluster
        )

    def records(self, kernel: object, shape: Kernel, count: int) -> np.ndarray:
        """Records of one launch."""
        memory = self.memory(shape)
        lines = (self.grid(shape), shape.block // WARP, RECORD)
        self.gpu.fill(self.out, 8 * int(np.prod(lines)))
        if shape.memory.cold:
            self.gpu.fill(self.scratch, self.scratch_bytes)
        self._launch(kernel, shape, count, memory)
        return self.gpu.download(self.out, lines)

    def answered(self, kernel: Kernel) -> None:
        """ValueError where the last launch has left something else than it should."""
        if kernel.answer is not None:
            words = self.gpu.download(self.buffer, (kernel.grid * kernel.block // 2,))
            if fault := unlike(kernel, words):
                raise ValueError(f"a wrong result: {fault}")

    def measure(self, benchmark: Benchmark) -> dict:
        """Measure with interleaved points; return the row."""
        texts = {point.kernel.text(self.gpu.arch): point.kernel for point in benchmark.points}
        loaded = {text: self.gpu.load(text, k.smem, k.cluster) for text, k in texts.items()}
        take, times = TAKES[benchmark.take], [[] for _ in benchmark.points]
        clocks = []
        try:
            for turn in range(WARM_UPS + self.repeats):
                for point, taken in zip(benchmark.points, times, strict=True):
                    _, kernel = loaded[point.kernel.text(self.gpu.arch)]
                    found = self.records(kernel, point.kernel, point.count)
                    if turn == 0:
                        self.answered(point.kernel)
                    if turn >= WARM_UPS:
                        taken.append(take(found))
                        if not any(role.inside for role in point.kernel.roles):
                            clocks.append(gigahertz(found))
        finally:
            for module, _ in loaded.values():
                self.gpu.unload(module)
        known = [clock for clock in clocks if clock]
        values = figures(benchmark, times, self.grid(benchmark.points[-1].kernel))
        made = row(benchmark, values, float(np.median(known)) if known else None)
        made["cycles"] = [float(np.median(taken)) for taken in times]
        return made


def _bytes(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")


def measured(bench: Bench, benchmark: Benchmark | Timed) -> tuple[dict, bool]:
    """(the row, whether the context is lost)."""
    try:
        if isinstance(benchmark, Timed):
            return benchmark.measure(bench.gpu, bench.repeats), False
        return bench.measure(benchmark), False
    except DriverError as error:
        return failed(benchmark, str(error)), any(word in str(error) for word in STICKY)
    except (ValueError, OverflowError, ArithmeticError) as error:
        return failed(benchmark, f"{type(error).__name__}: {error}"), False


def time_a_graph_of_torch(gpu: Gpu) -> object:
    """A graph of launches, captured and timed by torch as those are by which kernels are timed.
    Keep it: in it, and in all of the process behind it, a launch took 0.18 us more
    (notes/device_runs.md).
    ImportError and RuntimeError where there is no torch for this GPU."""
    import torch

    from kernelkit.tune.stopwatch import MOST_LAUNCHES
    from lab.measure.timing import capture, elapsed

    _, kernel = gpu.load(head(gpu.arch) + KERNEL.format(body="", more=""), 0, 1)
    word, own = torch.zeros(1, device="cuda"), gpu.stream
    with torch.cuda.stream(torch.cuda.Stream()):
        gpu.stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        params = [_bytes(word.data_ptr(), 8)]
        try:
            graph = capture(lambda: gpu.launch(kernel, 1, 128, params), MOST_LAUNCHES)
        finally:
            gpu.stream = own
        elapsed(graph)
    return graph, word


def main(words: list[str]) -> int:
    groups, first, repeats = words[0].split(","), int(words[1]), int(words[2])
    bench = Bench(repeats)
    device = bench.gpu.describe()
    try:
        _kept = time_a_graph_of_torch(bench.gpu)
        device["behind_a_graph_of_torch"] = "yes"
    except (ImportError, RuntimeError) as error:
        device["behind_a_graph_of_torch"] = f"no: {error}"
    print(json.dumps({"gpu": device}), flush=True)
    for index, benchmark in enumerate(benchmarks_of(groups, bench.gpu.arch)):
        if index < first:
            continue
        began = time.perf_counter()
        found, spoilt = measured(bench, benchmark)
        found["seconds"] = round(time.perf_counter() - began, 3)
        print(json.dumps({"index": index, "row": found}), flush=True)
        if spoilt:
            return SPOILT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


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
    """Result of a run.

    records: uint64 (CTA, warp, RECORD).
    memory: the buffer, uint64."""

    records: np.ndarray
    memory: np.ndarray
    findings: tuple[ptxemu.Finding, ...]


def run(kernel: Kernel, count: int, arch: str = HOPPER, *, check: bool = False) -> Ran:
    """A launch of so many rounds."""
    grid = kernel.grid * (SMS if kernel.per_sm else 1)
    grid = -(-grid // kernel.cluster) * kernel.cluster
    out = np.zeros((grid, kernel.block // WARP, RECORD), np.uint64)
    memory = _buffer(kernel)
    params = [_bytes_of(out.ctypes.data, 8), _bytes_of(memory.ctypes.data, 8)]
    params += [_bytes_of(count, 4), _bytes_of(NEVER, 4)]
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


def _bytes_of(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")
