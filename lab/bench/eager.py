"""Host time of an eager call after the first one, in microseconds, on CUDA tensors.

The launch itself is left out: in place of a kernel's host function stands one that does nothing, so
that operators whose kernels another GPU needs are measured here as well.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch

from lab.measure.timing import calls, setting
from lab.tools.common import refuse, write_json
from lab.tools.tables import show

BLACKWELL = (10, 0)
ROUNDS = 8  # over all operators, far apart: others use the host as well
REPEATS = 3


def problems() -> Iterator[tuple[str, Callable[[], object], bool]]:
    """(name, call, whether its kernel is for Blackwell alone)."""
    import moe
    from fmha import attention, attention_plan
    from gqa_lowlatency import decode, decode_plan
    from kernelkit.merge.api import merge
    from kvcache import Record, Rows, append_rows

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    q, kv = numbers(2, 1024, 16, 128), numbers(2, 1024, 4, 128)
    yield "attention", lambda: attention(q, kv, kv, causal=True), False
    lens = torch.full((2,), 1000, dtype=torch.int32, device="cuda")
    options = {"causal": True, "window": (128, None), "kv_lens": lens, "return_lse": True}
    yield "attention, window and lengths", lambda: attention(q, kv, kv, **options), False
    with nothing_launched(blackwell=False):
        attend = attention_plan(q, kv, kv, causal=True)
    yield "attention, prepared", lambda: attend(q, kv, kv), False
    one, cache = numbers(8, 64, 128), numbers(8, 4096, 8, 128)
    yield "decode", lambda: decode(one, cache, cache), False
    with nothing_launched(blackwell=False):
        step = decode_plan(one, cache, cache)
        out, lse = step(one, cache, cache)
    yield "decode, prepared", lambda: step(one, cache, cache), False
    yield "decode, prepared, out=", lambda: step(one, cache, cache, out=out, lse=lse), False
    parts = [(numbers(2, 64, 16, 128), torch.zeros(2, 16, 64, device="cuda")) for _ in range(2)]
    yield "merge", lambda: merge(parts), False
    pool = torch.zeros(64, 4096, dtype=torch.uint8, device="cuda")
    rows = Rows(pool, 0, 0, 16, Record("row", 256))
    slots = torch.arange(32, device="cuda")
    x = numbers(32, 128)
    yield "append_rows", lambda: append_rows((rows, x), None, slots), False
    experts = moe.pack(numbers(8, 1024, 512), numbers(8, 512, 512), "mxfp8")
    tokens, logits = numbers(16, 512), torch.randn(16, 8, device="cuda")
    router = moe.Router(2)
    yield "fused_moe", lambda: moe.fused_moe(tokens, experts, logits, router), True


@contextmanager
def nothing_launched(*, blackwell: bool) -> Iterator[None]:
    """Host functions do nothing; blackwell: the GPU says that it is one."""
    nothing = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    entry = "kernelkit.compile.kernel.CompiledKernel.entry"
    capability = "torch.cuda.get_device_capability"
    told = mock.patch(capability, return_value=BLACKWELL) if blackwell else nullcontext()
    with mock.patch(entry, return_value=nothing), told:
        yield


def microseconds(call: Callable[[], object]) -> float:
    """Time of one call, behind some others: the least of the means of several rounds."""
    for _ in range(20):
        call()
    return min(calls(call)() for _ in range(REPEATS))


def perform(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        return refuse("what a call costs beside a GPU is measured on one; there is none here")
    found: dict[str, float] = {}
    for name, call, blackwell in [*problems()] * ROUNDS:
        with nothing_launched(blackwell=blackwell), torch.no_grad():
            cost = round(microseconds(call), 2)
        found[name] = min(found.get(name, cost), cost)
    show("", ("operator", "us"), [(name, f"{cost:.1f}") for name, cost in found.items()])
    if options.json:
        write_json(options.json, {"setting": setting(), "microseconds": found})
    return 0
