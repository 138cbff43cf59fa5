"""The torch operators: what tracers see of them, and what the host does between tensor and launch.

FakeTensor and torch.compile run on the CPU. A CUDA graph cannot be captured without the GPU; what
would break it, a host that waits for the device, shows on fake CUDA tensors all the same.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import fmha.forward
from fmha import attention, merge, ops
from fmha.arguments import Arguments
from kernelkit.launch import Target
from kernelkit.merge import merge_op
from kernelkit.tensors import require_no_grad

BF16, INT = torch.bfloat16, torch.int32


def ints(*values, device="cpu"):
    return torch.tensor(values, dtype=INT, device=device)


def problem(kind, device="cpu", head_dims=(64, 64)):
    """(q, k, v), options: 4 query heads on 2 key heads, 2 entries, 40 keys at most."""
    generator = torch.Generator().manual_seed(0)
    dim, v_dim = head_dims

    def tensor(*shape):
        if device == "cpu":
            return torch.randn(shape, generator=generator).to(BF16)
        return torch.empty(shape, dtype=BF16, device=device)

    def table(values):
        if device == "cpu":
            return torch.tensor(values, dtype=INT)
        return torch.empty(torch.tensor(values).shape, dtype=INT, device=device)

    if kind == "dense":
        return (tensor(2, 3, 4, dim), tensor(2, 40, 2, dim), tensor(2, 40, 2, v_dim)), {}
    if kind == "packed":
        starts = {"cu_seqlens_q": table([0, 3, 8]), "cu_seqlens_k": table([0, 30, 40])}
        return (tensor(8, 4, dim), tensor(40, 2, dim), tensor(40, 2, v_dim)), starts
    pages = {"page_table": table([[3, 1, 0], [2, 4, 0]]), "kv_lens": table([40, 17])}
    return (tensor(2, 3, 4, dim), tensor(5, 16, 2, dim), tensor(5, 16, 2, v_dim)), pages


def metadata(tensors):
    return [(t.shape, t.dtype, t.stride(), t.device.type) for t in tensors]


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
        inputs, tables = problem(kind, "cuda", (192, 128))
        fakes = attention(*inputs, **tables, **options)
    rows = (2, 3) if kind != "packed" else (8,)
    raw = not options.get("normalize", True)
    dtype = options.get("out_dtype", torch.float32 if raw else BF16)
    o = torch.empty(*rows, 4, 128, dtype=dtype)
    statistics = [torch.empty(*rows[:-1], 4, rows[-1])] * (2 if raw else 1)
    expected = [(t.shape, t.dtype, t.stride(), "cuda") for t in (o, *statistics)]
    assert metadata(fakes) == expected


def test_meta_tensors_are_shapes_without_a_launch():
    inputs, _ = problem("dense")
    o, lse = attention(*(tensor.to("meta") for tensor in inputs), return_lse=True)
    assert (o.shape, lse.shape) == ((2, 3, 4, 64), (2, 4, 3))
    assert o.device.type == lse.device.type == "meta"


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_code_calls_the_kernel(kind):
    inputs, tables = problem(kind)

    def step(q, k, v, tables):
        options = {"window": (20, 0), "sink_tokens": 1, "q_offset": 25, "return_lse": True}
        return attention(q * 2, k, v, **options, **tables)[0] + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs, tables), step(*inputs, tables))


def test_lengths_stay_symbols_in_compiled_code():
    seen = []

    def watch(graph, _examples):
        seen.append(graph)
        return graph

    @torch.compile(fullgraph=True, dynamic=True, backend=watch)
    def step(q, k, v):
        return attention(q, k, v, return_lse=True)

    for queries, keys in ((5, 40), (9, 33)):
        q = torch.randn(2, queries, 4, 64).to(BF16)
        k, v = torch.randn(2, 2, keys, 2, 64).to(BF16)
        eager = attention(q, k, v, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(step(q, k, v), eager, strict=True))
    assert len(seen) == 1, "compiled again for other lengths"


CHECKED = {
    "dense": ("dense", {"causal": True}),
    "packed raw": ("packed", {"normalize": False, "window_left": 4}),
    "pages fp32": ("pages", {"out_dtype": torch.float32, "pack_heads": False}),
}


@pytest.mark.parametrize("name", CHECKED)
def test_opcheck_of_attention(name):
    kind, options = CHECKED[name]
    inputs, tables = problem(kind)
    opcheck(ops.attention, inputs, tables | options)


def test_opcheck_sees_the_registration_for_autograd():
    inputs, _ = problem("dense")
    needy = tuple(tensor.requires_grad_() for tensor in inputs)
    opcheck(ops.attention, needy, test_utils="test_autograd_registration")


def test_there_is_no_backward():
    (q, k, v), _ = problem("dense")
    q.requires_grad_()
    with pytest.raises(NotImplementedError, match="q requires grad"):
        attention(q, k, v)
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad
    o, _, _ = ops.attention(q, k, v)
    with pytest.raises(NotImplementedError, match="no backward"):
        o.sum().backward()
    with pytest.raises(NotImplementedError, match="sinks requires grad"):
        require_no_grad(sinks=torch.zeros(2, requires_grad=True))


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
    opcheck(merge_op, given, {"stacked": False, "out_dtype": BF16})


def test_merge_has_no_backward():
    o, lse = torch.zeros(1, 3, 4, 64, requires_grad=True), torch.zeros(1, 4, 3)
    with pytest.raises(NotImplementedError, match="O requires grad"):
        merge([(o, lse)])


class Watched(TorchDispatchMode):
    """Records the operators that read from a GPU, or that copy host memory to it."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        on_gpu = any(t.device.type == "cuda" for t in args if isinstance(t, torch.Tensor))
        moved = torch.device(kwargs.get("device") or "cuda").type != "cuda"
        reads = function is torch.ops.aten._local_scalar_dense.default
        if reads or (on_gpu and moved) or (not on_gpu and function is COPY_TO):
            self.waits.append(str(function))
        return function(*args, **kwargs)


COPY_TO = torch.ops.aten._to_copy.default


@pytest.fixture
def launches(monkeypatch):
    """Arguments of what would have been launched on a GPU of compute capability 10.0."""
    seen = []

    def record(compiled, arguments, target, device):
        seen.append((compiled, arguments, device))

    monkeypatch.setattr(fmha.forward, "compile_attention", lambda config, arch: config)
    monkeypatch.setattr(fmha.forward, "choose_target", lambda *_: Target("cuda", "sm_100a"))
    monkeypatch.setattr(fmha.forward, "launch", record)
    # A fake tensor has no address.
    monkeypatch.setattr(fmha.forward, "require_tma", lambda name, tensor: None)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_never_waits_for_the_gpu(kind, launches):
    with FakeTensorMode():
        inputs, tables = problem(kind, "cuda")
        sinks = torch.empty(4, device="cuda")
        rope = dict.fromkeys(("cos", "sin"), torch.empty(100, 8, device="cuda"))
        offsets = torch.empty(2, dtype=INT, device="cuda")
        with Watched() as watched:
            fmha.forward.forward(
                Arguments(*inputs, **tables, **rope, sinks=sinks, q_offset=offsets, softcap=3.0)
            )
    assert not watched.waits
    ((config, (tensors, arrays, numbers), device),) = launches
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
