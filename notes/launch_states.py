"""What makes an empty launch take 0.97 us in some processes and 0.79 us in others, on an H100.

    PYTHONPATH=.:scripts python notes/launch_states.py

In one process, on a GPU: the time from an empty launch to the next in a CUDA graph, after each of
the things that a process may have done before: a graph of the driver, one that torch captured, and
what nvidia-smi says of the clocks right behind them.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Iterator

import torch

from fmha import merge
from workbench.bringup.gpu import state
from workbench.timing import capture, elapsed
from workbench.units.launch import Gpu
from workbench.units.launches import KERNEL, Timed
from workbench.units.ptx import head

LAUNCHES, REPEATS = 200, 9
STACK = 0  # CU_LIMIT_STACK_SIZE


def of_the_driver(gpu: Gpu) -> float:
    """Microseconds of a launch in a graph of the driver."""
    timed = Timed("launch", "launch_exit", {}, "graph", 1, body="", launches=LAUNCHES)
    return timed.measure(gpu, REPEATS)["value"]


def of_torch(gpu: Gpu) -> float:
    """The same kernel in a graph that torch captures and replays."""
    _, kernel = gpu.load(head(gpu.arch) + KERNEL.format(body="", more=""), 0, 1)
    word = torch.zeros(128, dtype=torch.int32, device="cuda")
    params, own = [word.data_ptr().to_bytes(8, "little")], gpu.stream
    with torch.cuda.stream(torch.cuda.Stream()):
        gpu.stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        graph = capture(lambda: gpu.launch(kernel, 1, 128, params), LAUNCHES)
        gpu.stream = own
        elapsed(graph)
        return statistics.median(elapsed(graph) for _ in range(REPEATS)) / LAUNCHES * 1e6


def an_operator() -> None:
    """A kernel of this repository, compiled and launched by the DSL."""
    o, lse = torch.zeros(2, 8, 4, 64, device="cuda"), torch.zeros(2, 4, 8, device="cuda")
    merge([(o, lse), (o, lse)])


def things(gpu: Gpu) -> Iterator[tuple[str, Callable[[], object]]]:
    """What a process may have done, each kept for those behind it."""
    kept: list[torch.Tensor] = []
    yield "nothing", lambda: None
    yield "a tensor of torch", lambda: kept.append(torch.zeros(1, device="cuda"))
    yield (
        "a product by cuBLAS",
        lambda: torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda"),
    )
    yield "random numbers, a sort", lambda: torch.randn(1 << 16, device="cuda").sort()
    yield "16 GiB", lambda: kept.append(torch.empty(16 << 30, dtype=torch.uint8, device="cuda"))
    yield "a kernel of ours", an_operator
    yield "a stack of 4 KiB", lambda: gpu.call("cuCtxSetLimit", STACK, ctypes.c_size_t(4096))


def main() -> None:
    gpu = Gpu()
    print(f"{'after':28}{'a graph of the driver':>24}{'one of torch':>16}  clocks of SM, memory")
    for name, do in things(gpu):
        do()
        torch.cuda.synchronize()
        times = f"{of_the_driver(gpu):21.3f} us{of_torch(gpu):13.3f} us"
        now = state()
        print(f"{name:28}{times}  {now['clocks.sm']}, {now['clocks.mem']}", flush=True)


if __name__ == "__main__":
    main()
