"""The same cases on a GPU of compute capability 9.0 or 10.x, and what only a GPU can show.

Run with --hw: results, plans, streams, and graphs that are captured once and replayed at other
lengths.
"""

from __future__ import annotations

import pytest
import torch

from gqa_lowlatency import decode, decode_plan
from kernelkit.launch import ARCH_OF_CAPABILITY, written_for
from tests.gqa_lowlatency import cases
from tests.gqa_lowlatency.cases import Case
from tests.gqa_lowlatency.space import BORDERS, EDGES, GROUPS, MATRIX, SECOND

pytestmark = pytest.mark.hw

STEP = Case((900, 130, 0), (16, 2), 2, sinks=True, window=300, sink_tokens=4)


def on_gpu(tensors):
    """Views keep their strides, and the NaN around them."""
    if isinstance(tensors, dict):
        return {name: moved(value) for name, value in tensors.items()}
    return tuple(map(moved, tensors))


def moved(value):
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim < 3:
        return value.cuda()
    wide = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
    return wide.copy_(value)


def arch_here() -> str:
    native = ARCH_OF_CAPABILITY[torch.cuda.get_device_capability()]
    return written_for(native)


def check(case: Case, results) -> None:
    for report in cases.judge(case, arch_here(), [result.cpu() for result in results]):
        assert report.ok, f"{case}: {report}"


def options_of(case: Case) -> dict:
    return on_gpu(case.options()) | case.launch_options(arch=None)


@pytest.mark.parametrize("case", [*GROUPS, *BORDERS, *EDGES, *MATRIX, *SECOND], ids=str)
def test_results(case):
    inputs, options = on_gpu(case.inputs()), options_of(case)
    results = decode(*inputs, return_lse=True, **options)
    check(case, results)
    assert cases.same_bits(results, decode(*inputs, return_lse=True, **options))


def test_a_plan_gives_the_same_bits():
    inputs, options = on_gpu(STEP.inputs()), options_of(STEP)
    expected = decode(*inputs, return_lse=True, **options)
    plan, lens = decode_plan(*inputs, **options), options["kv_lens"]
    others = tuple(moved(tensor) for tensor in STEP.inputs())
    for step in (inputs, others, inputs):
        assert cases.same_bits(plan(*step, kv_lens=lens.clone()), expected)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        o, lse = plan(*inputs, kv_lens=lens)
        assert not side.query(), "the launch went to another stream, or waited"
    side.synchronize()
    assert cases.same_bits((o, lse), expected)


def test_a_kept_step_follows_streams_and_tensors():
    inputs, options = on_gpu(STEP.inputs()), options_of(STEP)
    expected = decode(*inputs, return_lse=True, **options)
    others = tuple(moved(tensor) for tensor in STEP.inputs())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for wait in (False, True):  # the second call finds the step of the first
        with torch.cuda.stream(side):
            if wait:
                torch.cuda._sleep(50_000_000)
            o, lse = decode(*others, return_lse=True, **options)
            assert not wait or not side.query(), "the launch went to another stream, or waited"
        side.synchronize()
        assert cases.same_bits((o, lse), expected)


@pytest.mark.parametrize("planned", [False, True])
def test_a_graph_replays_at_any_length(planned):
    inputs, options = on_gpu(STEP.inputs()), options_of(STEP)
    lens = options.pop("kv_lens").clone()
    launch = decode_plan(*inputs, kv_lens=lens, **options)
    if not planned:

        def launch(*tensors, kv_lens):
            return decode(*tensors, kv_lens=kv_lens, return_lse=True, **options)

    launch(*inputs, kv_lens=lens)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = launch(*inputs, kv_lens=lens)
    k, v = (torch.nan_to_num(tensor.float()).to(tensor.dtype) for tensor in inputs[1:])
    inputs[1].copy_(k)
    inputs[2].copy_(v)
    for lengths in ((900, 130, 0), (3, 937, 400), (0, 0, 1)):
        lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        expected = decode(*inputs, kv_lens=lens, return_lse=True, **options)
        assert cases.same_bits(results, expected), lengths
