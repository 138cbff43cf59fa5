"""The torch operator: what tracers see of it, and what the host does between tensor and launch.

FakeTensor and torch.compile run on the CPU. A CUDA graph cannot be captured without the GPU; what
would break it, a host that waits for the device, shows on fake CUDA tensors all the same.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import gqa_lowlatency.forward
from gqa_lowlatency import decode, ops
from gqa_lowlatency.arguments import Arguments
from kernelkit.launch import Target
from tests.fmha.test_ops import Watched, metadata

BF16, INT, E4M3 = torch.bfloat16, torch.int32, torch.float8_e4m3fn
KINDS = ("dense", "lens", "pages", "flat")
ARCH = {"arch": "sm_90a"}


def problem(kind, device="cpu", kv_dtype=BF16):
    """(q, k, v), tables: 4 query heads on 2 KV heads, 2 entries, 40 keys at most."""
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape, dtype=BF16):
        if device == "cpu":
            return torch.randn(shape, generator=generator).to(dtype)
        return torch.empty(shape, dtype=dtype, device=device)

    def table(values):
        if device == "cpu":
            return torch.tensor(values, dtype=INT)
        return torch.empty(torch.tensor(values).shape, dtype=INT, device=device)

    tables = {} if kind == "dense" else {"seq_lens": table([40, 17])}
    keys = (2, 40, 2, 64)
    if kind == "pages":
        tables["page_table"] = table([[3, 1, 0], [2, 4, 0]])
        keys = (5, 16, 2, 64)
    q = tensor(2, 4, 64) if kind == "flat" else tensor(2, 3, 4, 64)
    return (q, tensor(*keys, dtype=kv_dtype), tensor(*keys, dtype=kv_dtype)), tables


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
    inputs, _ = problem("dense")
    o, lse = decode(*(tensor.to("meta") for tensor in inputs), return_lse=True)
    assert (o.shape, lse.shape) == ((2, 3, 4, 64), (2, 4, 3))
    assert o.device.type == lse.device.type == "meta"


def test_compiled_code_calls_the_kernel():
    inputs, tables = problem("pages")

    def step(q, k, v, tables):
        return decode(q * 2, k, v, window=20, sink_tokens=1, **tables, **ARCH) + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs, tables), step(*inputs, tables))


def test_lengths_stay_symbols_in_compiled_code():
    seen = []

    def watch(graph, _examples):
        seen.append(graph)
        return graph

    @torch.compile(fullgraph=True, dynamic=True, backend=watch)
    def step(q, k, v):
        return decode(q, k, v, **ARCH)

    for batch, keys in ((5, 40), (6, 33)):  # equal sizes would share a symbol
        q = torch.randn(batch, 3, 4, 64).to(BF16)
        k, v = torch.randn(2, batch, keys, 2, 64).to(BF16)
        assert torch.equal(step(q, k, v), decode(q, k, v, **ARCH))
    assert len(seen) == 1, "compiled again for other lengths"


@pytest.mark.parametrize("kind", ["lens", "pages"])
def test_opcheck(kind):
    inputs, tables = problem(kind)
    opcheck(ops.decode, inputs, tables | ARCH | {"window": 9})


def test_there_is_no_backward():
    (q, k, v), _ = problem("dense")
    q.requires_grad_()
    opcheck(ops.decode, (q, k, v), ARCH, test_utils="test_autograd_registration")
    with pytest.raises(NotImplementedError, match="q requires grad"):
        decode(q, k, v)
    o, _ = ops.decode(q, k, v, **ARCH)
    with pytest.raises(NotImplementedError, match="no backward"):
        o.sum().backward()


@pytest.fixture
def launches(monkeypatch):
    """Arguments of what would have been launched on a GPU of compute capability 9.0."""
    seen = []
    module = gqa_lowlatency.forward
    monkeypatch.setattr(module, "compile_for", lambda config, arch: config)
    monkeypatch.setattr(module, "choose_target", lambda *_: Target("cuda", "sm_90a"))
    monkeypatch.setattr(module, "launch", lambda *launched: seen.append(launched))
    monkeypatch.setattr(module, "clusters_at_once", lambda device, width: 120 // width)
    # A fake tensor has no address.
    monkeypatch.setattr(module, "require_tma", lambda name, tensor: None)
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_the_host_never_waits_for_the_gpu(kind, kv_dtype, launches):
    with FakeTensorMode():
        inputs, tables = problem(kind, "cuda", kv_dtype)
        given = {"sinks": torch.empty(4, device="cuda")}
        if kv_dtype == E4M3:
            given["k_scale"] = torch.empty((), device="cuda")
        with Watched() as watched:
            gqa_lowlatency.forward.forward(
                Arguments(*inputs, **tables, **given, window=5, softcap=3.0)
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
    made = []

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "aten" and not function.is_view:
                made.append(str(function))
            return function(*args, **(kwargs or {}))

    with FakeTensorMode():
        inputs, tables = problem("pages", "cuda", E4M3)
        scales = {name: torch.empty(2, device="cuda") for name in ("k_scale", "v_scale")}
        with Allocations():
            gqa_lowlatency.forward.forward(Arguments(*inputs, **tables, **scales))
        assert made == ["aten.new_empty.default"] * 2
        made.clear()
        with Allocations():
            one = {"v_scale": torch.empty((), device="cuda")}
            made.clear()
            gqa_lowlatency.forward.forward(Arguments(*inputs, **tables, **one))
        assert len(made) > 2
