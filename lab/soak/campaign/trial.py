"""One problem on its device: run, judged, and run again in other ways, whose bits have to be the
same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from kernelkit.call.launch import emulation
from kernelkit.numerics import tolerance
from lab.problems.attention import POLICIES, same_bits
from lab.tools.place import Place
from lab.tools.poison import poisoned_outputs
from ptxemu import Options

ROUNDS = 3  # of launches on several streams
HEAD_START = 20_000_000  # cycles in which the host hands these launches over

Results = tuple[torch.Tensor, ...]


class Trial(ABC):
    """A problem, its tensors, and the results of the first call. differs: what is said where
    `repeats` is false."""

    differs: ClassVar[str] = "bits differ from run to run"

    def __init__(self, case: Any, place: Place) -> None:
        self.case, self.place = case, place
        self.inputs = self.prepare()
        self.first = self.results()

    @property
    def is_native(self) -> bool:
        """Whether a GPU computes."""
        return self.place.backend == "cuda"

    @abstractmethod
    def prepare(self) -> Results:
        """The tensors that `step` takes, on the device."""

    @abstractmethod
    def step(self, *inputs: torch.Tensor) -> Results:
        """A call."""

    @abstractmethod
    def reports(self) -> Sequence[tolerance.Report]:
        """The first results beside the definition."""

    @abstractmethod
    def change(self) -> None:
        """Other contents of the same tensors."""

    def results(self, policy: str = POLICIES[0]) -> Results:
        """A call, whose outputs hold NaN before. policy: of the emulator."""
        with emulation(Options(policy=policy, limit=None)), poisoned_outputs():
            return self.step(*self.inputs)

    def repeats(self) -> bool:
        """Whether another call gives the same bits, in the emulator under another schedule."""
        return same_bits(self.first, self.results(POLICIES[-1]))


def change_q_and_v(inputs: Results) -> None:
    """Other contents of the same tensors, of q, k and v."""
    q, _, v = inputs
    for tensor, factor in ((q, -1.0), (v, 0.5)):
        tensor.copy_(tensor.float() * factor)  # torch does not multiply in e4m3


def compiles(trial: Trial) -> bool:
    """Whether torch.compile gives the same bits."""
    torch._dynamo.reset()

    def step(*inputs: torch.Tensor) -> Results:
        return trial.step(*inputs)

    backend = "inductor" if trial.is_native else "aot_eager"
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    with poisoned_outputs():
        return same_bits(trial.first, compiled(*trial.inputs))


def replays(trial: Trial) -> bool:
    """Whether a CUDA graph gives the same bits, also with other contents of the same tensors: these
    and their results the trial has from here on."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = trial.results()
    graph.replay()
    same = same_bits(trial.first, results)
    trial.change()
    trial.first = trial.results()
    graph.replay()
    return same and same_bits(trial.first, results)


# Ways to run a trial once more, by flag; the last one changes its tensors.
WAYS: dict[str, tuple[Callable[[Trial], bool], str]] = {
    "compile": (compiles, "bits differ through torch.compile"),
    "graphs": (replays, "bits differ in a CUDA graph"),
}


def run_together(trials: Sequence[Trial]) -> list[bool]:
    """Which of the trials give the same bits beside each other, each on a stream of its own."""
    streams = [torch.cuda.Stream() for _ in trials]
    same, start = [True] * len(trials), torch.cuda.Event()
    for _ in range(ROUNDS):
        torch.cuda._sleep(HEAD_START)
        start.record()
        results = []
        for stream, trial in zip(streams, trials, strict=True):
            stream.wait_event(start)
            with torch.cuda.stream(stream):
                results.append(trial.results())
        torch.cuda.synchronize()
        for number, trial in enumerate(trials):
            same[number] &= same_bits(trial.first, results[number])
    return same
