"""The torch operators of the attentions and of merge: what tracers see, and the host's work between
tensor and launch.

FakeTensor and torch.compile run on the CPU. A CUDA graph cannot be captured without the GPU; but a
host that waits for the device, which would break it, shows on fake CUDA tensors, too.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.library import opcheck

import fmha.launch
import gqa_lowlatency.launch
from fmha import attention, merge
from fmha.arguments import Arguments as AttentionArguments
from fmha.launch import ATTENTION
from gqa_lowlatency import decode
from gqa_lowlatency.arguments import Arguments as DecodeArguments
from gqa_lowlatency.launch import DECODE
from kernelkit.call.launch import Target
from kernelkit.compile.signature import leaves
from kernelkit.merge.launch import MERGE
from tests.support.attentions import BF16, INT, Watched, metadata, problem, same

E4M3 = torch.float8_e4m3fn
ARCH = {"arch": "sm_90a"}
KINDS_OF_DECODE = ("dense", "lens", "pages", "flat")
KINDS = ("dense", "packed", "pages")
OPTIONS = (
    {"causal": True, "return_lse": True},
    {"normalize": False, "window": (5, None), "sink_tokens": 2},
    {"return_lse": True, "out_dtype": torch.float32, "q_offset": 7},
    {"return_lse": True, "out_dtype": E4M3, "out_scale": 0.5},
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS, ids=("causal", "raw", "fp32", "e4m3"))
def test_fake_tensors_know_what_attention_will_return(kind, options):
    with FakeTensorMode():
        inputs, tables = problem(kind, "cuda", head_dims=(192, 128))
        fakes = attention(*inputs, **tables, **options)
    rows = (2, 3) if kind != "packed" else (8,)
    raw = not options.get("normalize", True)
    dtype = options.get("out_dtype", torch.float32 if raw else BF16)
    o = torch.empty(*rows, 4, 128, dtype=dtype)
    statistics = [torch.empty(*rows[:-1], 4, rows[-1])] * (2 if raw else 1)
    assert metadata(fakes) == on_gpu(o, *statistics)


@pytest.mark.parametrize("kind", KINDS_OF_DECODE)
@pytest.mark.parametrize("out_dtype", [None, torch.float32, E4M3])
def test_fake_tensors_know_what_decode_will_return(kind, out_dtype):
    with FakeTensorMode():
        inputs, tables = problem(kind, "cuda")
        fakes = decode(*inputs, **tables, out_dtype=out_dtype, return_lse=True)
    shape, rows = ((2, 4, 64), (2, 4)) if kind == "flat" else ((2, 3, 4, 64), (2, 4, 3))
    o = torch.empty(shape, dtype=out_dtype or BF16)
    assert metadata(fakes) == on_gpu(o, torch.empty(rows))


def on_gpu(*tensors: torch.Tensor) -> list[tuple]:
    """The `metadata` that these tensors would have on a GPU."""
    return [(t.shape, t.dtype, t.stride(), "cuda") for t in tensors]


def test_fake_tensors_know_what_merge_will_return():
    with FakeTensorMode():
        o, lse = torch.empty(2, 3, 4, 64, dtype=BF16), torch.empty(2, 4, 3)
        assert metadata(merge([(o.float(), lse, lse), (o, lse)])) == metadata((o, lse))
        assert metadata(merge([(o.float(), lse, lse)])) == metadata((o.float(), lse))
        stack = (torch.empty(5, 8, 4, 64, dtype=BF16), torch.empty(5, 4, 8))
        assert [t.shape for t in merge(stack)] == [(8, 4, 64), (4, 8)]
        assert merge(stack, return_lse=False, out_dtype=torch.float16).dtype == torch.float16


@pytest.mark.parametrize("attend", [attention, decode])
def test_meta_tensors_are_shapes_without_a_launch(attend):
    inputs, _ = problem("dense")
    o, lse = attend(*(tensor.to("meta") for tensor in inputs), return_lse=True)
    assert (o.shape, lse.shape) == ((2, 3, 4, 64), (2, 4, 3))
    assert o.device.type == lse.device.type == "meta"


# ---- torch.compile


COMPILED = [
    *((attention, kind, {"window": (20, 0), "sink_tokens": 1, "q_offset": 25}) for kind in KINDS),
    (decode, "pages", {"window": 20, "sink_tokens": 1, **ARCH}),
]


@pytest.mark.parametrize(("attend", "kind", "options"), COMPILED)
def test_compiled_code_calls_the_kernel(attend, kind, options):
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: dict) -> torch.Tensor:
        return attend(q * 2, k, v, **options, **tables) + 1

    inputs, tables = problem(kind)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs, tables), step(*inputs, tables))


@pytest.mark.parametrize(("attend", "options"), [(attention, {}), (decode, ARCH)])
def test_lengths_stay_symbols_in_compiled_code(attend, options):
    """The step is compiled once."""
    seen = []

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple:
        return attend(q, k, v, return_lse=True, **options)

    def watch(graph: Any, _examples: Any) -> Any:
        seen.append(graph)
        return graph

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=watch)
    for batch, queries, keys in ((5, 3, 40), (6, 7, 33)):  # equal sizes would share a symbol
        q = torch.randn(batch, queries, 4, 64).to(BF16)
        k, v = torch.randn(2, batch, keys, 2, 64).to(BF16)
        assert same(compiled(q, k, v), step(q, k, v))
    assert len(seen) == 1, "compiled again for other sizes"


def parts():
    """Results for both halves of the keys of one problem, the second one raw."""
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
    assert same(compiled(parts(), sinks), eager)
    o, lse = attention(*problem("dense")[0], sinks=sinks, return_lse=True)
    torch.testing.assert_close(eager[0], o.float(), rtol=0, atol=0.02)
    torch.testing.assert_close(eager[1], lse, rtol=0, atol=2e-3)


# ---- the operators


CHECKED = {
    "attention": (ATTENTION, "dense", {"causal": True}),
    "packed raw": (ATTENTION, "packed", {"normalize": False, "window_left": 4}),
    "pages fp32": (ATTENTION, "pages", {"out_dtype": torch.float32, "pack_heads": False}),
    "decode": (DECODE, "lens", ARCH | {"window_left": 9}),
    "decode pages": (DECODE, "pages", ARCH | {"window_left": 9}),
}


@pytest.mark.parametrize("name", CHECKED)
def test_opcheck(name):
    operator, kind, options = CHECKED[name]
    inputs, tables = problem(kind)
    opcheck(operator.default, inputs, tables | options)


def test_opcheck_of_merge():
    (o, lse), (raw, raw_lse, row_max) = parts()
    given = ([o, raw], [lse, raw_lse], [None, row_max], None)
    opcheck(MERGE.default, given, {"stacked": False, "out_dtype": BF16})


def test_merge_has_no_backward():
    o, lse = torch.zeros(1, 3, 4, 64, requires_grad=True), torch.zeros(1, 4, 3)
    with pytest.raises(NotImplementedError, match=r"o\[0\] requires grad"):
        merge([(o, lse)])


# ---- operations for which the host would wait on a GPU


def recorded(patch: pytest.MonkeyPatch, module: ModuleType, arch: str) -> list[tuple]:
    """Record the arguments of launches on a GPU of `arch`, with the config in place of a kernel."""
    seen = []
    patch.setattr(module, "compile_once", lambda config, *_: config)
    patch.setattr(module, "choose_target", lambda *_: Target("cuda", arch))
    patch.setattr(module, "launch", lambda *launched: seen.append(launched))
    # A fake tensor has no address.
    patch.setattr(module, "require_tma", lambda name, tensor: None)
    return seen


@pytest.fixture
def of_attention(monkeypatch):
    monkeypatch.setattr(fmha.launch, "sms_of", lambda device: 148)
    return recorded(monkeypatch, fmha.launch, "sm_100a")


@pytest.fixture
def of_decode(monkeypatch):
    at_once = "clusters_at_once"
    monkeypatch.setattr(gqa_lowlatency.choose, at_once, lambda device, width: 120 // width)
    return recorded(monkeypatch, gqa_lowlatency.launch, "sm_90a")


def _is_empty(table: object) -> bool:
    """Whether these are the tables of a function that reads none."""
    return isinstance(table, tuple) and not table


def launched(seen: list[tuple]) -> tuple:
    """Return (config, arguments of the kernel, names of its tables) of the only launch; all tensors
    are on a GPU."""
    ((config, (given,), _target, device),) = seen
    assert device.type == "cuda"
    tensors = [leaf for leaf in leaves(given) if isinstance(leaf, torch.Tensor)]
    assert all(tensor.device.type == "cuda" for tensor in tensors)
    tables = {
        name
        for name, table in vars(given.tables).items()
        if table is not None and not _is_empty(table)
    }
    return config, given, tables


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_of_attention_never_waits_for_the_gpu(kind, of_attention):
    with FakeTensorMode():
        inputs, tables = problem(kind, "cuda")
        sinks = torch.empty(4, device="cuda")
        rope = dict.fromkeys(("cos", "sin"), torch.empty(100, 8, device="cuda"))
        offsets = torch.empty(2, dtype=INT, device="cuda")
        given = {**tables, **rope, "sinks": sinks, "q_offset": offsets, "softcap": 3.0}
        with Watched() as watched:
            fmha.launch.forward(AttentionArguments(*inputs, **given))
    assert not watched.waits
    config, given, there = launched(of_attention)
    assert {tensor.ndim for tensor in (given.q, given.k, given.v, given.o)} == {4}
    assert (given.lse is not None, given.row_max) == (True, None)
    wanted = {
        "kv_lens": config.kv_lens, "cu_seqlens_q": config.varlen_q,
        "cu_seqlens_k": config.varlen_k, "page_table": config.page_size > 0,
    }  # fmt: skip
    named = {name for name, here in wanted.items() if here}
    assert there == {"q_offset", "sinks", "cos", "sin"} | named
    assert given.longest == (8 if kind == "packed" else 3), "the bound that needs no reading"
    assert given.places == 148


@pytest.mark.parametrize("kind", KINDS_OF_DECODE)
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_the_host_of_decode_never_waits_for_the_gpu(kind, kv_dtype, of_decode):
    scaled = kv_dtype == E4M3  # only by k_scale
    with FakeTensorMode():
        inputs, tables = problem(kind, "cuda", kv_dtype=kv_dtype)
        given = {**tables, "sinks": torch.empty(4, device="cuda"), "window_left": 5, "softcap": 3.0}
        if scaled:
            given["k_scale"] = torch.empty((), device="cuda")
        with Watched() as watched:
            gqa_lowlatency.launch.forward(DecodeArguments(*inputs, **given))
    assert not watched.waits
    config, given, there = launched(of_decode)
    assert [tensor.ndim for tensor in vars(given.tensors).values()] == [4, 4, 4, 4, 3]
    wanted = {"lens": config.lens, "pages": config.page_size > 0, "k_scale": scaled}
    assert there == {"sinks"} | {name for name, here in wanted.items() if here}
    assert (given.scalars.left, given.scalars.sink_tokens, given.parts) == (5, 0, 1)


def test_a_number_as_offset_is_filled_in_on_the_gpu(of_attention):
    with FakeTensorMode(), Watched() as watched:
        inputs, _ = problem("dense", "cuda")
        attention(*inputs, q_offset=5)
    assert not watched.waits


def test_decode_allocates_nothing_beside_the_results(of_decode):
    """Scales of [Hkv] are used as they are; a single number needs a copy."""
    with FakeTensorMode():
        inputs, tables = problem("pages", "cuda", kv_dtype=E4M3)
        scales = {name: torch.empty(2, device="cuda") for name in ("k_scale", "v_scale")}
        one = {"v_scale": torch.empty((), device="cuda")}
        with Watched() as watched:
            gqa_lowlatency.launch.forward(DecodeArguments(*inputs, **tables, **scales))
        assert watched.made == ["aten.new_empty.default"] * 2
        with Watched() as watched:
            gqa_lowlatency.launch.forward(DecodeArguments(*inputs, **tables, **one))
        assert len(watched.made) > 2


def test_the_watch_sees_what_would_wait():
    with FakeTensorMode(), Watched() as watched:
        lengths = torch.empty(3, dtype=INT, device="cuda")
        lengths.cpu()
        torch.ops.aten._to_copy(torch.empty(3), device="cuda")
        with pytest.raises(DataDependentOutputException):
            torch.empty((), device="cuda").item()
    assert len(watched.waits) == 3
