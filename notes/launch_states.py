"""What makes the launches of a process 0.18 us slower, for good, on an H100 and an H200.

    PYTHONPATH=.:scripts python notes/launch_states.py

On a GPU: the time from an empty launch to the next in a graph of the driver, before and after one
thing that a process may do, each thing in a process of its own. On an H200 none of those below made
any difference; the last one nobody has run yet (notes/device_runs.md, 2026-11-28).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import torch

from fmha import merge
from lab.measure.timing import HEAD_START, capture, elapsed
from lab.silicon.units.launch import Gpu
from lab.silicon.units.launches import KERNEL, Timed
from lab.silicon.units.ptx import head
from lab.silicon.units.worker import time_a_graph_of_torch
from lab.tools.common import environment

MAX_LAUNCHES = 200  # of a graph

REPEATS = 9
LOCAL = """\
.local .align 4 .b8 room[4096];
mov.u32 %r0, %tid.x;
mov.b64 %a1, room;
mad.wide.u32 %a2, %r0, 4, %a1;
st.local.b32 [%a2], %r0;
xor.b32 %r1, %r0, 1;
mad.wide.u32 %a2, %r1, 4, %a1;
ld.local.b32 %r2, [%a2];
ld.param.b64 %a0, [buffer];
st.global.b32 [%a0], %r2;
"""
kept: list[object] = []


def microseconds(gpu: Gpu) -> float:
    """Microseconds of a launch in a graph of the driver."""
    timed = Timed("launch", "launch_exit", {}, "graph", 1, body="", launches=MAX_LAUNCHES)
    return timed.measure(gpu, REPEATS)["value"]


def zeros() -> torch.Tensor:
    kept.append(torch.zeros(1, device="cuda"))
    return kept[-1]


def streams(count: int) -> None:
    kept.extend(torch.cuda.Stream() for _ in range(count))


def graph(*, timed: bool) -> None:
    """As our benchmarks do: captured on a side stream, replayed."""
    x = zeros()
    x.add_(1.0)  # loads the kernel
    with torch.cuda.stream(torch.cuda.Stream()):
        kept.append(capture(lambda: x.add_(1.0), 1))
        elapsed(kept[-1]) if timed else kept[-1].replay()


def module_with_a_stack(gpu: Gpu) -> None:
    text = head(gpu.arch) + KERNEL.format(body=LOCAL, more="")
    _, kernel = gpu.load(text, 0, 1)
    gpu.launch(kernel, 1, 32, [gpu.allocate(4096).to_bytes(8, "little")])
    gpu.synchronize()


def operator() -> None:
    o, lse = torch.zeros(2, 8, 4, 64, device="cuda"), torch.zeros(2, 4, 8, device="cuda")
    merge([(o, lse), (o, lse)])


def events() -> None:
    kept.extend(torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event in kept:
        event.record()


THINGS: dict[str, Callable[[Gpu], object]] = {
    "nothing": lambda gpu: None,
    "torch.cuda.init": lambda gpu: torch.cuda.init(),
    "torch.empty": lambda gpu: kept.append(torch.empty(1, device="cuda")),
    "torch.zeros": lambda gpu: zeros(),
    "torch.zeros, synchronise": lambda gpu: (zeros(), torch.cuda.synchronize()),
    "torch.cuda.Event": lambda gpu: events(),
    "a stream of torch": lambda gpu: streams(1),
    "40 streams of torch": lambda gpu: streams(40),
    "torch.cuda._sleep": lambda gpu: torch.cuda._sleep(HEAD_START),
    "a graph of torch": lambda gpu: graph(timed=False),
    "a graph of torch, timed": lambda gpu: graph(timed=True),
    "a product by cuBLAS": lambda gpu: torch.ones(64, 64, device="cuda") @ zeros().expand(64, 64),
    "a kernel with a stack": module_with_a_stack,
    "a kernel of ours": lambda gpu: operator(),
    "16 GiB": lambda gpu: kept.append(torch.empty(16 << 30, dtype=torch.uint8, device="cuda")),
    "many launches in one of torch": lambda gpu: kept.append(time_a_graph_of_torch(gpu)),
}


def one(name: str) -> None:
    """The line of a thing."""
    gpu = Gpu()
    before = microseconds(gpu)
    THINGS[name](gpu)
    torch.cuda.synchronize()
    print(f"{name:28}{before:9.3f}{microseconds(gpu):9.3f}", flush=True)


def main() -> int:
    if sys.argv[1:]:
        one(sys.argv[1])
        return 0
    print(f"{'':28}{'before':>9}{'after':>9} us", flush=True)
    wrong = [subprocess.run([sys.executable, __file__, name], env=environment(), check=False)
             for name in THINGS]  # fmt: skip
    return max(each.returncode for each in wrong)


if __name__ == "__main__":
    sys.exit(main())
