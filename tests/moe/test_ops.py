"""The torch operators: what tracers see, and the host's work between tensor and launch.

FakeTensor and torch.compile run on the CPU. A CUDA graph cannot be captured without the GPU; but a
host that waits for the device, which would break it, shows on fake CUDA tensors, too.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import moe.launch
from kernelkit.call.operator import Operator
from lab.problems.grouped_gemm import Case
from moe.api import fused_moe, grouped_gemm
from moe.arguments import Activation, Arguments, Chosen, Router, RouterLinear, Scales, SwiGLU
from moe.fused import FUSED, PLAIN, Layer, run_layer
from moe.launch import GROUPED_GEMM
from moe.packing import PackedExperts, pack
from moe.quantiser.api import quantise
from moe.quantiser.launch import QUANTISE, Tokens
from tests.support.attentions import Watched, metadata

COUNTS = (1, 3, 0)
K, COLUMNS = 128, 64
FORMATS = ("nvfp4", "mxfp4", "mxfp8")
ROUTER = Router(2, "sigmoid", renormalize=False, scale=2.5)


pytestmark = pytest.mark.usefixtures("three_ctas")


def weights(fmt: str) -> PackedExperts:
    """Packed weights of three experts."""
    generator = torch.Generator().manual_seed(1)
    w13 = torch.randn(3, 2 * COLUMNS, K, generator=generator) * K**-0.5
    w2 = torch.randn(3, K, COLUMNS, generator=generator) * COLUMNS**-0.5
    return pack(w13.bfloat16(), w2.bfloat16(), fmt)


MXFP8 = weights("mxfp8")


def problem(fmt: str, out: str, *, amax: bool = False, x_fmt: str = "") -> Arguments:
    given = {"amax": amax, "bias": amax, "x_fmt": x_fmt}
    case = Case(COUNTS, K, COLUMNS, fmt, form=(1.0, 0.0, 10.0), out=out, **given)
    options = case.options() | {"out": out, "most_rows": 3}
    return Arguments(*case.inputs(), case.offsets, **options)


def check(operator: Operator, arguments: Any, *tests: str) -> None:
    """Run torch's own tests of an operator, except one that would compare 8-bit inputs."""
    always = ("test_autograd_registration", "test_faketensor")
    flat = operator.schema.flat(vars(arguments))
    opcheck(operator.default, (), flat, test_utils=(*always, *tests))


# Not for results in a format: some bytes of scale factors belong to no row, and are not written.
VALUES = "test_aot_dispatch_dynamic"


@pytest.mark.parametrize(("fmt", "out", "x_fmt", "tests"), [
    ("nvfp4", "nvfp4", "", ()), ("mxfp8", "bf16", "", (VALUES,)),
    ("mxfp4", "fp16", "mxfp8", (VALUES,)),
])  # fmt: skip
def test_opcheck_of_a_product(fmt, out, x_fmt, tests):
    check(GROUPED_GEMM, problem(fmt, out, amax=True, x_fmt=x_fmt), *tests)


@pytest.mark.parametrize("out", ["bf16", "fp32", *FORMATS])
def test_fake_tensors_know_what_the_product_will_return(out, monkeypatch):
    """Compared with a call that does everything except compiling and launching."""
    monkeypatch.setattr(moe.launch, "compile_for", lambda config, arch: config)
    monkeypatch.setattr(moe.launch, "launch", lambda *launched: None)
    flat = GROUPED_GEMM.schema.flat(vars(problem("mxfp4", out)))
    real = GROUPED_GEMM.default(**flat)
    with FakeTensorMode() as mode:
        fakes = tree_map_only(torch.Tensor, mode.from_tensor, flat)
        assert metadata(GROUPED_GEMM.default(**fakes)) == metadata(real)


def test_fake_tensors_know_what_the_layer_will_return():
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(5, 2 * K, dtype=torch.float16)[:, :K]
        y = fused_moe(x, MXFP8, torch.empty(5, 3), Router(2))
    assert metadata([y]) == metadata([torch.empty(5, K, dtype=torch.float16)])


@pytest.mark.parametrize("given", [
    {"fmt": "nvfp4"}, {"fmt": "nvfp4", "global_scale": "token"}, {"fmt": "mxfp8"},
    {"fmt": "mxfp4", "choices": 2},
], ids=str)  # fmt: skip
def test_opcheck_of_the_quantiser(given):
    if "choices" in given:
        rows = torch.tensor([4, 1, 0, 5]).int()
        given = given | {"rows": rows, "offsets": torch.tensor([0, 1, 4]).int()}
    check(QUANTISE, Tokens(torch.randn(3, 64).bfloat16(), **given), "test_schema")


def layer(fmt: str, amax: torch.Tensor | None = None, tokens: int = 4):
    """Return (a step from tokens and logits, its arguments)."""
    experts, h = weights(fmt), torch.tensor([300.0])
    scales = Scales(h=h, h_amax=amax) if fmt == "nvfp4" else Scales(h_amax=amax)

    def step(x, logits):
        return fused_moe(x * 2, experts, logits, ROUTER, scales=scales) + 1

    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, K, generator=generator).bfloat16()
    return step, (x, torch.randn(tokens, 3, generator=generator))


def test_compiled_code_runs_the_layer():
    amax = torch.zeros(1)
    step, given = layer("nvfp4", amax)
    wanted, top = step(*given), amax.clone()
    assert top.item() > 0
    amax.zero_()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given), wanted)
    assert torch.equal(amax, top)


def test_compiled_code_runs_every_step():
    """Quantised tensors are passed from one operator to the next."""
    experts, encode, amax = weights("nvfp4"), torch.tensor([300.0]), torch.zeros(1)
    offsets = torch.tensor([0, *COUNTS]).cumsum(0).int()
    first, second = torch.randn(3, 2 * COLUMNS), torch.randn(3, K)

    def step(x):
        operand = quantise(x + 1, "nvfp4", offsets=offsets)
        form = Activation(32)
        given = {"activation": form, "out": "nvfp4", "encode_scale": encode, "amax": amax}
        h = grouped_gemm(operand, experts.w13, offsets, bias=first * 2, **given)
        return grouped_gemm(h, experts.w2, offsets, bias=second, most_rows=len(x)) * 2

    x = torch.randn(sum(COUNTS), K).bfloat16()
    wanted, top = step(x), amax.clone()
    amax.zero_()
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(x), wanted)
    assert torch.equal(amax, top)


def test_tokens_stay_symbols_in_compiled_code():
    seen = []

    def watch(graph, _examples):
        seen.append(graph)
        return graph

    for index, tokens in enumerate((5, 7)):  # other dimensions have sizes 3 and 4
        step, given = layer("mxfp8", tokens=tokens)
        if index == 0:
            compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=watch)
        assert torch.equal(compiled(*given), step(*given))
    assert len(seen) == 1, "compiled again for other numbers of tokens"


def test_the_schema_says_what_is_written():
    for operator, name in ((GROUPED_GEMM, "amax"), (FUSED, "scales_h_amax")):
        written = {
            argument.name
            for argument in operator.default._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        assert written == {name}


def test_opcheck_of_the_layer():
    x, scales = torch.randn(4, K).bfloat16(), Scales(h_amax=torch.zeros(1))
    check(FUSED, Layer(x, torch.randn(4, 3), MXFP8, ROUTER, scales=scales), VALUES)


@pytest.mark.parametrize("scales", [
    Scales("token", "tensor", torch.zeros(1)), Scales(torch.ones(1)), Scales(h=torch.ones(1)),
], ids=["words", "x", "h"])  # fmt: skip
def test_the_operator_gets_the_whole_layer(scales):
    bias, linear = torch.ones(3), torch.zeros(3)
    router = Router(1, "sigmoid", bias, 3, 2, False, 0.5, linear, shared=2, shared_weight=0.25)
    tensors = torch.zeros(4, K).bfloat16(), torch.zeros(4, 3), weights("nvfp4")
    rest = SwiGLU(1.5, 0.5, 3.0), scales, torch.ones(1), 16, "emulate", "sm_100a", 1, 4
    layer = RouterLinear(torch.zeros(3, K).bfloat16(), torch.zeros(3).bfloat16(), ready=True)
    chosen = Chosen(torch.zeros(4, 3).int(), torch.zeros(4, 3), 8)
    given = Layer(*tensors, router, *rest, linear=layer, chosen=chosen)
    schema = FUSED.schema
    found = schema.build(schema.flat(vars(given)))
    for leaf in (*schema.tensors, *schema.others):
        get = attrgetter(leaf.path)
        assert get(found) is get(given) or get(found) == get(given), leaf.path


def on_gpu(layer: Layer) -> Layer:
    """Return the layer on a fake GPU, within FakeTensorMode."""
    given = FUSED.schema.flat(vars(layer))
    there = partial(torch.empty_like, device="cuda")
    return FUSED.schema.build(tree_map_only(torch.Tensor, there, given))


SCALES = {
    "tensor": ("tensor", 10), "default": (None, 8), "token": ("token", 8), "1": (torch.ones(1), 7),
}  # fmt: skip


@pytest.mark.parametrize(("scale", "count"), SCALES.values(), ids=SCALES)
def test_the_host_never_waits_for_the_gpu(scale, count, launches):
    """Launches: top-k, permutation, quantiser and its scale factors, two products, combination.
    Finding the scale of a tensor takes another, and quantising h after the first product one more.
    """
    x, scales = torch.empty(700, K).bfloat16(), Scales(scale, scale, torch.zeros(1))
    real = Layer(x, torch.empty(700, 3), weights("nvfp4"), Router(1), scales=scales)
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = on_gpu(real)
        with Watched() as watched:
            (y,) = run_layer(given)
    assert not watched.waits
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert len(launches) == count
    assert all(device.type == "cuda" for *_, device in launches)


def test_the_host_never_waits_for_the_experts_of_a_rank(launches):
    """Their number of rows is known only on the GPU; the slots are counted first."""
    x, router = torch.empty(700, K).bfloat16(), Router(2, shared=1)
    real = Layer(x, torch.empty(700, 6), weights("nvfp4"), router, first_expert=2, end_expert=5)
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = on_gpu(real)
        with Watched() as watched:
            (y,) = run_layer(given)
    assert not watched.waits
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert len(launches) == 9


@pytest.mark.parametrize("tokens", [64, 65])
def test_the_host_never_waits_for_the_linear_layer_of_a_router(tokens, launches):
    """The linear layer is no separate launch of ours: it is part of the first, or torch's."""
    x, linear = torch.empty(tokens, K).bfloat16(), RouterLinear(torch.empty(3, K).bfloat16())
    tensors = weights("mxfp8"), Router(1)
    counts = []
    for real in (
        Layer(x, None, *tensors, linear=linear), Layer(x, torch.empty(tokens, 3), *tensors),
    ):  # fmt: skip
        with FakeTensorMode(allow_non_fake_inputs=True):
            given = on_gpu(real)
            with Watched() as watched:
                (y,) = run_layer(given)
        assert not watched.waits
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        counts.append(len(launches))
    assert counts[1] == 2 * counts[0]


@pytest.mark.parametrize(("fmt", "top_k"), [("nvfp4", 2), ("mxfp8", 1)])
def test_nothing_is_computed_between_the_launches(fmt, top_k, launches):
    """A plan only launches kernels, given known scales and the inverse of the scale of h."""
    seen = set()

    class Computed(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            makes = function.namespace == "aten" and not function.is_view
            if makes and "empty" not in str(function):
                seen.add(str(function))
            return function(*args, **(kwargs or {}))

    x, known = torch.empty(3000, K).bfloat16(), torch.ones(1) if fmt == "nvfp4" else None
    tensors = x, torch.empty(3000, 3), weights(fmt)
    real = Layer(*tensors, Router(top_k), PLAIN, Scales(known, known), h_decode_scale=known)
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = on_gpu(real)
        with Computed():
            run_layer(given)
    assert not seen
    assert len(launches) >= 6
