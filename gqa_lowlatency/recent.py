"""`decode`: what the operator does. On a GPU the steps of recent calls are kept and used again.

To check, describe and convert the arguments of a launch takes the host longer than most launches
take the GPU.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from gqa_lowlatency.arguments import Arguments
from gqa_lowlatency.direct import Step, layouts
from gqa_lowlatency.forward import Results, empty_results, forward, has_keys, prepare, without_keys

STEPS = 64  # of a thread


class _Recent(threading.local):
    """Steps by what they depend on, the latest last. Each thread has its own: a step serves one
    launch at a time."""

    def __init__(self) -> None:
        self.steps: OrderedDict[Hashable, Step] = OrderedDict()


_recent = _Recent()


def decode(tensors: Sequence[torch.Tensor | None], options: dict[str, Any]) -> Results:
    """(O, LSE). tensors and options are fields of `Arguments`, those left out have their default.

    On the CPU everything is checked at each call, also what lengths and page numbers say.
    """
    if not tensors[0].is_cuda:
        return forward(Arguments(*tensors, **options))
    return recall(tensors, options)


def recall(tensors: Sequence[torch.Tensor | None], options: dict[str, Any]) -> Results:
    """The same by the step of an earlier call of this thread, if one had these layouts and options.

    A step holds no memory of the GPU, so that any stream may use it, and a graph that is captured.
    """
    given = tuple([place for place, tensor in enumerate(tensors) if tensor is not None])
    present = [tensors[place] for place in given]
    key = given, layouts(present), tuple(options.items())
    steps = _recent.steps
    step = steps.get(key)
    if step is not None:
        steps.move_to_end(key)
    else:
        arguments = Arguments(*tensors, **options)
        target, config = prepare(arguments)
        if not has_keys(arguments):
            return without_keys(arguments, empty_results(arguments))
        step = steps[key] = Step(arguments, target, config)
        if len(steps) > STEPS:
            steps.popitem(last=False)
    results = step.results()
    step.launch([*present[:3], *results, *present[3:], *step.own()])
    return results
