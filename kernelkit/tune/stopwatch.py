"""Times of an operator with options that are forced, on a GPU: cold, without the host.

A time is that of a call in a captured CUDA graph, between CUDA events, behind work that keeps the
GPU busy until the host has handed the graph over. Calls rotate over sets of tensors of more than
twice the L2 cache, so that a call finds nothing of its data there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kernelkit.call.operator import Operator
from kernelkit.call.prepared import Plan
from kernelkit.tune.choices import Choice, forcing
from kernelkit.tune.halving import Sampler

LEAST_SECONDS = 2e-3  # of a graph: shorter ones would measure the resolution of the events
MOST_LAUNCHES = 200
MOST_SETS = 32  # of tensors: what is smaller stays warm
MEMORY_SHARE = 0.4  # of what is free, for these
HEAD_START = 1_500_000  # cycles for which the GPU is busy while the host hands over a graph
# Largest difference of two results, in parts of the largest value, by dtype: two roundings and what
# another order of sums makes of them.
AGREEING = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-9}
Call = Callable[[torch.device], tuple[Operator, Mapping[str, Any]]]


class Bench:
    """Samplers of one call, by the options that are forced on it.

    name: name of the tuned operator
    call: makes tensors on a device, and returns the operator for them
    """

    def __init__(self, name: str, call: Call, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"device {device}: times are measured on a CUDA GPU, not emulated")
        self._name, self._device = name, device
        operator, fields = call(device)
        nbytes = sum(
            value.nbytes
            for value in operator.schema.flat(fields).values()
            if isinstance(value, torch.Tensor)
        )
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        room = int(MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]) // max(nbytes, 1)
        count = max(1, min(2 * cache // max(nbytes, 1) + 2, MOST_SETS, room))
        self._calls = [(operator, fields), *(call(device) for _ in range(count - 1))]
        self._expected = [tensor.clone() for tensor in self._run(self._plans({})[0])]

    def __call__(self, choice: Choice) -> Sampler:
        """ValueError where the results are not those of the rules' choice; whatever a call with
        these options raises."""
        with torch.cuda.device(self._device):
            plans = self._plans(choice)
            require_agreement(self._run(plans[0]), self._expected)
            return replay(plans)

    def _plans(self, choice: Choice) -> list[Plan]:
        with forcing(self._name, choice):
            return [Plan(operator, fields) for operator, fields in self._calls]

    def _run(self, plan: Plan) -> Sequence[torch.Tensor]:
        plan()
        torch.cuda.synchronize(self._device)
        return plan.made


def require_agreement(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """ValueError for results that differ by more than another order of sums explains."""
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one.dtype not in AGREEING:
            if not torch.equal(one, other):
                raise ValueError(f"result {place} differs from that of the default options")
            continue
        a, b = one.float(), other.float()
        odd = ~b.isfinite()
        same = torch.equal(a[odd].nan_to_num(), b[odd].nan_to_num())
        worst = (a[~odd] - b[~odd]).abs().amax().item() if bool((~odd).any()) else 0.0
        largest = b[~odd].abs().amax().item() if bool((~odd).any()) else 0.0
        limit = AGREEING[one.dtype] * largest
        if not same or not worst <= limit or math.isnan(worst):
            raise ValueError(f"result {place} differs by {worst:.3g} from that of the default "
                             f"options, limit {limit:.3g}")  # fmt: skip


def replay(launches: Sequence[Callable[[], object]]) -> Sampler:
    """Return a sampler of a graph in which the launches alternate, each equally often."""
    turn = itertools.cycle(launches)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(len(launches)):
            next(turn)()
        once = _capture(turn, len(launches))
        _seconds(once)
        rounds = max(1, min(round(LEAST_SECONDS / _seconds(once)), MOST_LAUNCHES // len(launches)))
        count = rounds * len(launches)
        many = once if rounds == 1 else _capture(turn, count)
        _seconds(many)
    stream.synchronize()

    def sample(_held: Sequence[object] = launches) -> float:  # what they write and read lives on
        return _seconds(many) / count * 1e6

    return sample


def _capture(turn: itertools.cycle, times: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(times):
            next(turn)()
    return graph


def _seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Time a replay on the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(HEAD_START)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3
