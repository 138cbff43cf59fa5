"""The torch operator: what tracers see of it, and what the host does between tensor and launch.

FakeTensor and torch.compile run on the CPU. A CUDA graph cannot be captured without the GPU; what
would break it, a host that waits for the device, shows on fake CUDA tensors all the same.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import gqa_lowlatency.launch
from gqa_lowlatency import decode
from gqa_lowlatency.arguments import Arguments
from gqa_lowlatency.launch import DECODE
from tests.attentions import (
    BF16,
    Watched,
    check_compiled,
    check_meta,
    check_symbols,
    metadata,
    problem,
    record_launches,
)

E4M3 = torch.float8_e4m3fn
KINDS = ("dense", "lens", "pages", "flat")
ARCH = {"arch": "sm_90a"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_fake_tensors_know_what_the_kernel_will_return(kind, out_dtype):
    with FakeTensorMode():
        inputs, tables = problem(kind, "cuda")
        fakes = decode(*inputs, **tables, out_dtype=out_dtype, return_lse=True)
    shape, rows = ((2, 4, 64), (2, 4)) if kind == "flat" else ((2, 3, 4, 64), (2, 4, 3))
    o = torch.empty(shape, dtype=out_dtype or BF16)
    expected = [(t.shape, t.dtype, t.stride(), "cuda") for t in (o, torch.empty(rows))]
    assert metadata(fakes) == expected


def test_meta_tensors_are_shapes_without_a_launch():
    check_meta(decode)


def test_compiled_code_calls_the_kernel():
    check_compiled(decode, problem("pages"), window=20, sink_tokens=1, **ARCH)


def test_lengths_stay_symbols_in_compiled_code():
    check_symbols(lambda q, k, v: decode(q, k, v, return_lse=True, **ARCH))


@pytest.mark.parametrize("kind", ["lens", "pages"])
def test_opcheck(kind):
    inputs, tables = problem(kind)
    opcheck(DECODE.default, inputs, tables | ARCH | {"window_left": 9})


@pytest.fixture
def launches(monkeypatch):
    at_once = "clusters_at_once"
    monkeypatch.setattr(gqa_lowlatency.choose, at_once, lambda device, width: 120 // width)
    return record_launches(monkeypatch, gqa_lowlatency.launch, "sm_90a")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_the_host_never_waits_for_the_gpu(kind, kv_dtype, launches):
    with FakeTensorMode():
        inputs, tables = problem(kind, "cuda", kv_dtype=kv_dtype)
        given = {"sinks": torch.empty(4, device="cuda")}
        if kv_dtype == E4M3:
            given["k_scale"] = torch.empty((), device="cuda")
        with Watched() as watched:
            gqa_lowlatency.launch.forward(
                Arguments(*inputs, **tables, **given, window_left=5, softcap=3.0)
            )
    assert not watched.waits
    ((config, (tensors, arrays, numbers, parts), _target, device),) = launches
    assert device.type == "cuda"
    assert [t.ndim for t in tensors] == [4, 4, 4, 4, 3]
    scaled = kv_dtype == E4M3  # by k_scale alone
    assert [t is not None for t in arrays] == [
        config.lens, config.page_size > 0, True, scaled, False, False, False,
    ]  # fmt: skip
    assert all(t.device.type == "cuda" for t in (*tensors, *arrays) if t is not None)
    assert (numbers[2:], parts) == ((5, 0), 1)


def test_nothing_is_allocated_beside_the_results(launches):
    """With scales of [Hkv]; a scale of one number takes a copy."""
    with FakeTensorMode():
        inputs, tables = problem("pages", "cuda", kv_dtype=E4M3)
        scales = {name: torch.empty(2, device="cuda") for name in ("k_scale", "v_scale")}
        one = {"v_scale": torch.empty((), device="cuda")}
        with Watched() as watched:
            gqa_lowlatency.launch.forward(Arguments(*inputs, **tables, **scales))
        assert watched.made == ["aten.new_empty.default"] * 2
        with Watched() as watched:
            gqa_lowlatency.launch.forward(Arguments(*inputs, **tables, **one))
        assert len(watched.made) > 2
