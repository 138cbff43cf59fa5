"""Times of GPU work without the host in them, cold and warm: `kernelkit.tune.stopwatch` takes them.

A time is that of a call in a captured CUDA graph, between CUDA events, behind work that keeps the
GPU busy until the host has handed the graph over. Cold: calls rotate over
buffers of more than twice the L2 cache, so that a call finds nothing of its data there. Warm: all
calls use the same buffers. Who is compared takes turns, sample by sample.
"""

from __future__ import annotations

import datetime
import gc
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata

import torch

from kernelkit.tune.stopwatch import HEAD_START, replay

REPEATS = 21  # samples, behind one that warms up
MAX_SETS = 128  # of buffers
HOST_CALLS = 100
WHEN = ("cold", "warm")
PACKAGES = ("torch", "nvidia-cutlass-dsl", "cuda-python", "triton", "flashinfer-python",
            "flash-attn-4")  # fmt: skip
QUERY = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")

Launch = Callable[[], object]  # only enqueues work on the current stream, and may be captured
Sample = Callable[[], float]  # microseconds of one launch, measured once


@dataclass(frozen=True)
class Spread:
    """Microseconds of one launch: the median, and (third quartile - first quartile) / median."""

    median: float
    spread: float


def rotation(nbytes: int, cache_bytes: int) -> int:
    """Sets of buffers of `nbytes`, after whose turns nothing of the first is left in an L2 cache of
    so many bytes."""
    return 2 * cache_bytes // max(1, nbytes) + 2


def sets_here(nbytes: int) -> int:
    """Return the number of sets for the current GPU, at most MAX_SETS; smaller problems stay
    warm."""
    cache_bytes = torch.cuda.get_device_properties().L2_cache_size
    return min(rotation(nbytes, cache_bytes), MAX_SETS)


def cold_and_warm(launches: Sequence[Launch]) -> dict[str, Sample]:
    """Launches that rotate over all buffers, and one again and again."""
    return {"cold": replay(launches), "warm": replay(launches[:1])}


def calls(launch: Launch) -> Sample:
    """Times of eager calls that do not wait for the GPU: what they cost the host."""

    def sample() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(HOST_CALLS):
            launch()
        return (time.perf_counter() - begin) / HOST_CALLS * 1e6

    return sample


def spreads(samples: Sequence[Sample]) -> list[Spread]:
    """Spread of each. They take turns, so that what changes in time, clocks and heat, befalls
    all."""
    rounds = [[sample() for sample in samples] for _ in range(REPEATS + 1)][1:]
    found = []
    for taken in zip(*rounds, strict=True):
        low, middle, high = statistics.quantiles(taken, n=4)
        found.append(Spread(middle, (high - low) / middle))
    return found


def figures(samples: dict[str, Sample]) -> dict[str, float]:
    """`cold_us` and `cold_spread` of a sample called cold, and so on."""
    found: dict[str, float] = {}
    for name, spread in zip(samples, spreads([*samples.values()]), strict=True):
        found |= {f"{name}_us": spread.median, f"{name}_spread": spread.spread}
    return found


def reason_of(refusal: Exception) -> str:
    """Describe the refusal in one line."""
    return f"{type(refusal).__name__}: {str(refusal).strip().partition(chr(10))[0]}"


def measure(rows: Sequence[dict], samplers: Sequence[Callable[[dict], dict[str, Sample]]]) -> None:
    """Adds to each row `cold_us` and `cold_spread` of a sample called cold, `us` and `spread` of
    one called '', or why it is `refused`: what its sampler raised. All samples take turns."""
    samples = {}
    for place, (row, sampler) in enumerate(zip(rows, samplers, strict=True)):
        try:
            found = sampler(row)
        except Exception as refusal:  # noqa: BLE001  foreign libraries raise what they like
            row["refused"] = reason_of(refusal)
        else:
            samples |= {(place, f"{name}_" * bool(name)): s for name, s in found.items()}
    gc.collect()
    for (place, prefix), spread in zip(samples, spreads([*samples.values()]), strict=True):
        rows[place] |= {f"{prefix}us": spread.median, f"{prefix}spread": spread.spread}


def capture(launch: Launch, times: int) -> torch.cuda.CUDAGraph:
    """`launch` as a graph, `times` in a row."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(times):
            launch()
    return graph


def elapsed(graph: torch.cuda.CUDAGraph, replays: int = 1) -> float:
    """Seconds of one of so many replays on the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START)
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / replays


def setting() -> dict[str, object]:
    """Machine and versions, for the file beside the figures; clocks are those of this moment."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    found: dict[str, object] = {"machine": platform.machine(), "versions": versions}
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        found["gpu"] = {"capability": f"{major}.{minor}", "cuda": torch.version.cuda}
        found["gpu"] |= smi(QUERY) or {"name": torch.cuda.get_device_name()}
    return found


def heading(**more: object) -> dict[str, object]:
    """The first row of a file of figures."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {"kind": "setting", "date": today, **more, **setting()}


def smi(query: Sequence[str]) -> dict[str, str]:
    """Query nvidia-smi about the current device; return {} without the tool."""
    if not shutil.which("nvidia-smi"):
        return {}
    index = torch.cuda.get_device_properties().uuid
    command = ["nvidia-smi", f"--id=GPU-{index}", f"--query-gpu={','.join(query)}"]
    result = subprocess.run([*command, "--format=csv,noheader"], capture_output=True, text=True)
    values = [value.strip() for value in result.stdout.split(",")]
    return dict(zip(query, values, strict=True)) if len(values) == len(query) else {}
