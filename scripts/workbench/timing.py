"""Times of GPU work without the host in them: CUDA graphs between CUDA events, cold and warm."""

from __future__ import annotations

import platform
import shutil
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import torch

WARM_UP = 3
MIN_GRAPH_SECONDS = 2e-3  # shorter graphs would measure the resolution of the events
MAX_LAUNCHES = 200
PACKAGES = ("torch", "nvidia-cutlass-dsl", "cuda-python", "triton", "flashinfer-python")
QUERY = ("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")


@dataclass(frozen=True)
class Seconds:
    """Medians of one launch. cold: L2 was overwritten before; warm: the launch before was equal.

    spread: of the warm ones, (third quartile - first quartile) / median.
    """

    cold: float
    warm: float
    spread: float


def measure(launch: Callable[[], object], repeats: int = 20) -> Seconds:
    """Time `launch`, which only enqueues work on the current stream and may be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            launch()
        once = capture(launch, 1)
        launches = min(MAX_LAUNCHES, max(1, round(MIN_GRAPH_SECONDS / elapsed(once))))
        many = capture(launch, launches)
        elapsed(many)
        warm = [elapsed(many) / launches for _ in range(repeats)]
        cold = [elapsed(once, before=flush) for _ in range(repeats)]
    stream.synchronize()
    low, middle, high = statistics.quantiles(warm, n=4)
    return Seconds(statistics.median(cold), middle, (high - low) / middle)


def capture(launch: Callable[[], object], times: int) -> torch.cuda.CUDAGraph:
    """`launch` as a graph, `times` in a row."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(times):
            launch()
    return graph


def elapsed(graph: torch.cuda.CUDAGraph, before: Callable[[], None] | None = None) -> float:
    """Seconds of one replay on the current stream, after `before`, which is not in them."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if before:
        before()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def flush() -> None:
    """Overwrite twice the L2 cache, so that nothing of the measured work's data is left in it."""
    bytes_ = 2 * torch.cuda.get_device_properties().L2_cache_size
    torch.empty(bytes_, dtype=torch.uint8, device="cuda").zero_()


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
        found["gpu"] = {"capability": f"{major}.{minor}", "cuda": torch.version.cuda, **_smi()}
    return found


def _smi() -> dict[str, str]:
    """What nvidia-smi says of the current device; only its name without the tool."""
    name = {"name": torch.cuda.get_device_name()}
    if not shutil.which("nvidia-smi"):
        return name
    index = torch.cuda.get_device_properties().uuid
    command = ["nvidia-smi", f"--id=GPU-{index}", f"--query-gpu={','.join(QUERY)}"]
    result = subprocess.run([*command, "--format=csv,noheader"], capture_output=True, text=True)
    values = [value.strip() for value in result.stdout.split(",")]
    return dict(zip(QUERY, values, strict=True)) if len(values) == len(QUERY) else name


def why_not_here() -> str | None:
    """Why kernels for compute capability 10.x cannot run on this machine; None where they can."""
    if not torch.cuda.is_available():
        return "no GPU here"
    major, minor = torch.cuda.get_device_capability()
    if major == 10:
        return None
    name = torch.cuda.get_device_name()
    return f"{name} is compute capability {major}.{minor}, the kernel needs 10.x"
