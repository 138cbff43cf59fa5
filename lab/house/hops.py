"""Files of ours that a repeated call passes through, from the public function to the launch.

`hops`: a call that repeats what an earlier one was checked for, on a GPU. `trips`: a call that is
checked, as each is in the emulator: what an engineer steps through with a debugger.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType
from typing import Any
from unittest import mock

from lab.house.source import PACKAGES, ROOT

_HOST = {*PACKAGES} - {"ptxemu", "cycle_model"}
LIMITS = {"attention": 3, "decode": 3, "fused_moe": 4, "append_rows": 4}
# files and moves of a checked call: what design asks for
GOALS = {"attention": (12, 70), "decode": (11, 50), "fused_moe": (14, 180), "append_rows": (11, 40)}


@dataclass(frozen=True)
class Trip:
    """Files that a call enters, how often it moves from one to another, functions that it calls."""

    files: tuple[str, ...]
    moves: int
    calls: int


def problems(device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, a small call)."""
    import torch

    import moe
    from fmha import attention
    from gqa_lowlatency import decode
    from kvcache import Record, Rows, append_rows

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape).bfloat16().to(device)

    q, kv, one = numbers(1, 130, 2, 64), numbers(1, 64, 1, 64), numbers(1, 2, 64)
    yield "attention", lambda: attention(q, kv, kv)
    yield "decode", lambda: decode(one, kv, kv)
    experts = moe.pack(numbers(2, 256, 128), numbers(2, 128, 128), "mxfp8")
    x, logits, router = numbers(4, 128), numbers(4, 2).float(), moe.Router(1)
    yield "fused_moe", lambda: moe.fused_moe(x, experts, logits, router)
    pool = torch.zeros(4, 4096, dtype=torch.uint8, device=device)
    rows, slots = Rows(pool, 0, 0, 16, Record("row", 256)), torch.arange(4, device=device)
    tokens = numbers(4, 128)
    yield "append_rows", lambda: append_rows((rows, tokens), None, slots)


def touched(call: Callable[[], Any]) -> Trip:
    """The second call, through files of our packages; the launch is left out."""
    call()
    path: list[str] = []  # the file of each function that is called

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            file = os.path.relpath(frame.f_code.co_filename, ROOT)
            if file.split(os.sep)[0] in _HOST and not _emulated(frame):
                path.append(file)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    moves = sum(one != other for one, other in pairwise(path))
    return Trip(tuple(dict.fromkeys(path)), moves, len(path))


def _emulated(frame: FrameType | None) -> bool:
    """Whether this runs in place of a GPU's launch."""
    while frame:
        if frame.f_code.co_name == "_emulate":
            return True
        frame = frame.f_back
    return False


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Calls take the way of CUDA tensors, though these are emulated: nothing is read back, and what
    one call has described the next one repeats."""
    from kernelkit.call.tape import Tape

    never = property(lambda tape: False, lambda tape, value: None)
    with (
        mock.patch("kernelkit.call.operator._on_gpu", return_value=True),
        mock.patch.object(Tape, "reads", never, create=True),
    ):
        yield


def hops() -> dict[str, list[str]]:
    """Files of a call that repeats an earlier one."""
    import torch

    if torch.cuda.is_available():
        return {name: [*touched(call).files] for name, call in problems("cuda")}
    with as_on_a_gpu():
        return {name: [*touched(call).files] for name, call in problems("cpu")}


def trips() -> dict[str, Trip]:
    """The way of a checked call: in the emulator, whose kernel is compiled."""
    return {name: touched(call) for name, call in problems("cpu")}
