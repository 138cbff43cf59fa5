"""Problems of the emulator's tests on a GPU of compute capability 9.0 or 10.x, and properties that
only a GPU shows.

Run with --hw: results, plans, streams, equal bits, and graphs that are captured once and replayed
at other lengths. `scripts/soak.py gqa` runs thousands of random problems.
"""

from __future__ import annotations

import pytest
import torch

from gqa_lowlatency import decode, decode_plan
from kernelkit.call.launch import ARCH_OF_CAPABILITY, written_for
from lab.problems.decode import Case, verdicts
from lab.problems.fmha import moved
from tests.gqa_lowlatency import cases
from tests.gqa_lowlatency.space import BORDERS, EDGES, GROUPS, MATRIX, SECOND

pytestmark = pytest.mark.hw

STEP = Case((900, 130, 0), (16, 2), 2, sinks=True, window=300, sink_tokens=4)


def arch_here() -> str:
    native = ARCH_OF_CAPABILITY[torch.cuda.get_device_capability()]
    return written_for(native)


def check(case: Case, results) -> None:
    cases.expect(cases.judge(case, arch_here(), [result.cpu() for result in results]))


def check_here(inputs, options, results) -> None:
    """Judge results of the GPU with the reference's `options`; fp32 has its own tolerance."""
    options = {"arch": arch_here(), **options}
    cases.expect(verdicts(inputs, options, results, results[0].dtype))


def options_of(case: Case) -> dict:
    return moved(case.options(), "cuda") | case.launch_options(None)


@pytest.mark.parametrize("case", [*GROUPS, *BORDERS, *EDGES, *MATRIX, *SECOND], ids=str)
def test_results(case):
    inputs, options = case.inputs("cuda"), options_of(case)
    results = decode(*inputs, return_lse=True, **options)
    check(case, results)
    assert cases.same_bits(results, decode(*inputs, return_lse=True, **options))


def test_a_plan_gives_the_same_bits():
    inputs, options = STEP.inputs("cuda"), options_of(STEP)
    expected = decode(*inputs, return_lse=True, **options)
    plan, lens = decode_plan(*inputs, **options), options["kv_lens"]
    others = STEP.inputs("cuda")
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
    inputs, options = STEP.inputs("cuda"), options_of(STEP)
    expected = decode(*inputs, return_lse=True, **options)
    others = STEP.inputs("cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for wait in (False, True):  # the second call finds the first one's recorded step
        with torch.cuda.stream(side):
            if wait:
                torch.cuda._sleep(50_000_000)
            o, lse = decode(*others, return_lse=True, **options)
            assert not wait or not side.query(), "the launch went to another stream, or waited"
        side.synchronize()
        assert cases.same_bits((o, lse), expected)


@pytest.mark.parametrize("keys", ["lens", 64])
def test_a_captured_graph_is_right_at_any_length(keys):
    case = Case((9000, 9000), (16, 2), keys=keys)
    inputs, options = case.inputs("cuda"), moved(case.options(), "cuda")
    lens = options["kv_lens"].fill_(500)
    tables = {name: options[name] for name in ("kv_lens", "page_table") if name in options}
    plan = decode_plan(*inputs, **options)
    plan(*inputs, **tables)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = plan(*inputs, **tables)
        again = decode(*inputs, return_lse=True, **options)
    for length in (0, 1, 127, 128, 8192, 9000, 300):
        lens.copy_(torch.tensor([length, length // 2]))
        graph.replay()
        torch.cuda.synchronize()
        check_here(inputs, options, results)
        assert torch.equal(results[0], again[0])


def test_bits_do_not_change():
    """Bits depend neither on the run nor on other entries of the batch."""
    case = Case((5000, 1, 4999, 0, 129, 2500, 700), (64, 8), batch_invariant=True)
    (q, k, v), options = case.inputs("cuda"), options_of(case)
    lens = options.pop("kv_lens")
    first = decode(q, k, v, kv_lens=lens, return_lse=True, **options)
    for _ in range(50):
        again = decode(q, k, v, kv_lens=lens, return_lse=True, **options)
        assert cases.same_bits(again, first)
    for entry in range(7):
        one = slice(entry, entry + 1)
        alone = decode(q[one], k[one], v[one], kv_lens=lens[one], **options)
        assert torch.equal(alone, first[0][one])
