"""The torch operators: what tracers see of them, and what the host does between tensor and launch.

FakeTensor and torch.compile run on the CPU. A CUDA graph cannot be captured without the GPU; what
would break it, a host that waits for the device, shows on fake CUDA tensors all the same.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.library import opcheck

import fmha.launch
from fmha import attention, merge
from fmha.arguments import Arguments
from fmha.launch import ATTENTION
from kernelkit.merge_launch import MERGE
from tests.attentions import (
    BF16,
    INT,
    Watched,
    check_compiled,
    check_meta,
    check_symbols,
    metadata,
    problem,
    record_launches,
)

KINDS = ("dense", "packed", "pages")
OPTIONS = (
    {"causal": True, "return_lse": True},
    {"normalize": False, "window": (5, None), "sink_tokens": 2},
    {"return_lse": True, "out_dtype": torch.float32, "q_offset": 7},
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=("causal", "raw", "fp32"))
def test_fake_tensors_know_what_the_kernel_will_return(kind, options):
    with FakeTensorMode():
        inputs, tables = problem(kind, "cuda", head_dims=(192, 128))
        fakes = attention(*inputs, **tables, **options)
    rows = (2, 3) if kind != "packed" else (8,)
    raw = not options.get("normalize", True)
    dtype = options.get("out_dtype", torch.float32 if raw else BF16)
    o = torch.empty(*rows, 4, 128, dtype=dtype)
    statistics = [torch.empty(*rows[:-1], 4, rows[-1])] * (2 if raw else 1)
    expected = [(t.shape, t.dtype, t.stride(), "cuda") for t in (o, *statistics)]
    assert metadata(fakes) == expected


def test_meta_tensors_are_shapes_without_a_launch():
    check_meta(attention)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_code_calls_the_kernel(kind):
    options = {"window": (20, 0), "sink_tokens": 1, "q_offset": 25}
    check_compiled(attention, problem(kind), **options)


def test_lengths_stay_symbols_in_compiled_code():
    check_symbols(lambda q, k, v: attention(q, k, v, return_lse=True))


CHECKED = {
    "dense": ("dense", {"causal": True}),
    "packed raw": ("packed", {"normalize": False, "window_left": 4}),
    "pages fp32": ("pages", {"out_dtype": torch.float32, "pack_heads": False}),
}


@pytest.mark.parametrize("name", CHECKED)
def test_opcheck_of_attention(name):
    kind, options = CHECKED[name]
    inputs, tables = problem(kind)
    opcheck(ATTENTION.default, inputs, tables | options)


def parts():
    """The halves of the keys of one problem, the second one raw."""
    (q, k, v), _ = problem("dense")
    return [
        attention(q, k[:, :20], v[:, :20], return_lse=True),
        attention(q, k[:, 20:], v[:, 20:], normalize=False),
    ]


def test_compiled_code_merges():
    def step(parts, sinks):
        return merge(parts, sinks=sinks, out_dtype=torch.float32)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    eager = step(parts(), sinks)
    assert all(torch.equal(a, b) for a, b in zip(compiled(parts(), sinks), eager, strict=True))
    o, lse = attention(*problem("dense")[0], sinks=sinks, return_lse=True)
    torch.testing.assert_close(eager[0], o.float(), rtol=0, atol=0.02)
    torch.testing.assert_close(eager[1], lse, rtol=0, atol=2e-3)


def test_fake_tensors_know_what_merge_will_return():
    with FakeTensorMode():
        o, lse = torch.empty(2, 3, 4, 64, dtype=BF16), torch.empty(2, 4, 3)
        assert metadata(merge([(o.float(), lse, lse), (o, lse)])) == metadata((o, lse))
        assert metadata(merge([(o.float(), lse, lse)])) == metadata((o.float(), lse))
        stack = (torch.empty(5, 8, 4, 64, dtype=BF16), torch.empty(5, 4, 8))
        assert [t.shape for t in merge(stack)] == [(8, 4, 64), (4, 8)]
        assert merge(stack, return_lse=False, out_dtype=torch.float16).dtype == torch.float16


def test_opcheck_of_merge():
    (o, lse), (raw, raw_lse, row_max) = parts()
    given = ([o, raw], [lse, raw_lse], [None, row_max], None)
    opcheck(MERGE.default, given, {"stacked": False, "out_dtype": BF16})


def test_merge_has_no_backward():
    o, lse = torch.zeros(1, 3, 4, 64, requires_grad=True), torch.zeros(1, 4, 3)
    with pytest.raises(NotImplementedError, match=r"o\[0\] requires grad"):
        merge([(o, lse)])


@pytest.fixture
def launches(monkeypatch):
    return record_launches(monkeypatch, fmha.launch, "sm_100a")


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_never_waits_for_the_gpu(kind, launches):
    with FakeTensorMode():
        inputs, tables = problem(kind, "cuda")
        sinks = torch.empty(4, device="cuda")
        rope = dict.fromkeys(("cos", "sin"), torch.empty(100, 8, device="cuda"))
        offsets = torch.empty(2, dtype=INT, device="cuda")
        with Watched() as watched:
            fmha.launch.forward(
                Arguments(*inputs, **tables, **rope, sinks=sinks, q_offset=offsets, softcap=3.0)
            )
    assert not watched.waits
    ((config, (tensors, arrays, numbers), _target, device),) = launches
    assert device.type == "cuda"
    assert all(t.ndim == 4 for t in tensors)
    assert [t is not None for t in arrays] == [
        True, False, config.kv_lens, True, config.varlen_q, config.varlen_k, config.page_size > 0,
        True, True, True,
    ]  # fmt: skip
    assert all(t.device.type == "cuda" for t in (*tensors, *arrays) if t is not None)
    assert numbers[-1] == (8 if kind == "packed" else 3), "the bound that needs no reading"


def test_a_number_as_offset_is_filled_in_on_the_gpu(launches):
    with FakeTensorMode(), Watched() as watched:
        inputs, _ = problem("dense", "cuda")
        attention(*inputs, q_offset=5)
    assert not watched.waits


def test_the_watch_sees_what_would_wait():
    with FakeTensorMode(), Watched() as watched:
        lengths = torch.empty(3, dtype=INT, device="cuda")
        lengths.cpu()
        torch.ops.aten._to_copy(torch.empty(3), device="cuda")
        with pytest.raises(DataDependentOutputException):
            torch.empty((), device="cuda").item()
    assert len(watched.waits) == 3
