"""Refusals of the functions of moe, naming value and limit, before anything is compiled; and the
smallest and empty inputs that they accept. The tests of single steps have more refusals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from lab.problems.grouped_gemm import Case, checked
from moe import Router, Scales, SwiGLU, combine, fused_moe, pack, permutation, quantise, route
from moe.api import grouped_gemm
from moe.arguments import Activation, Arguments
from moe.quantiser.launch import Tokens
from moe.quantiser.launch import quantise as run_quantise
from moe.quantized import Quantized

INF, NAN = math.inf, math.nan
INT = torch.int32


def no(words: str, error: type[Exception] = ValueError, **changes: Any) -> Any:
    """A refusal.

    words: a part of the message.
    changes: changed arguments, which are valid otherwise.
    """
    return pytest.param(error, words, changes, id=words[:40])


def refusals(cases: Sequence[Any]) -> Callable:
    return pytest.mark.parametrize(("error", "words", "changes"), cases)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=INT)


# --- quantise

X = torch.zeros(4, 64, dtype=torch.bfloat16)
QUANTISE = {"x": X, "fmt": "nvfp4", "rows": ints(3, 0, 1), "offsets": ints(0, 1, 1, 3)}
NOT_QUANTISED = [
    no("rows has values from -1 to 3, but x has rows 0 to 3", rows=ints(3, -1, 1)),
    no("rows has values from 0 to 4", rows=ints(4, 0, 1)),
    no("rows has values from 0 to 8, but x has slots 0 to 7", choices=2, rows=ints(8, 0, 1)),
    no(r"offsets \[0, 2, 1, 3\]: not ascending", offsets=ints(0, 2, 1, 3)),
    no(r"offsets \[0, 1, 4\]: not ascending from 0 to at most 3, the rows", offsets=ints(0, 1, 4)),
    no(r"offsets \[1, 1, 3\]", offsets=ints(1, 1, 3)),
    no(r"offsets \[0, 5\]", offsets=ints(0, 5)),
    no(r"offsets \[0, -1, 3\]", offsets=ints(0, -1, 3)),
    no("choices 0", choices=0),
    no("choices 2", choices=2, rows=None, offsets=None),
    no("choices is 2.0, expected int", TypeError, choices=2.0),
    no("choices is True", TypeError, choices=True),
    no("rows is torch.int64", rows=torch.tensor([3, 0, 1])),
    no("offsets is torch.int64", offsets=torch.tensor([0, 3])),
    no("offsets is list", TypeError, offsets=[0, 3]),
    no("x is ndarray", TypeError, x=X.float().numpy()),
    no("x has shape", x=X[None]),
    no("K = 0", x=X[:, :0]),
    no("K = 40 in nvfp4", x=X[:, :40]),
    no("x is torch.float8_e4m3fn", NotImplementedError, x=X.to(torch.float8_e4m3fn)),
    no("global_scale is torch.float64", global_scale=torch.ones(1).double()),
    no("global_scale has 2 elements", global_scale=torch.ones(2)),
    no(r"global_scale is torch.float32 \(\)", global_scale=torch.tensor(2.0)),
    no("format 'fp4'", fmt="fp4"),
    no("backend 'gpu'", backend="gpu"),
    no("backend 'cuda' needs CUDA tensors", backend="cuda"),
    no("arch 'sm_80'", NotImplementedError, arch="sm_80"),
    no("not a multiple of 16 bytes", x=X[:, 1:33]),
    no("last stride 4", x=X.T.contiguous().T),
    no("stride of 0 bytes", x=X[:1].expand(4, 64)),
    no("3 rows of x", x=X[:0]),
    no("x requires grad", NotImplementedError, x=X.clone().requires_grad_()),
    no("mxfp8, which has none", fmt="mxfp8", global_scale="tensor"),
    no("global_scale 'row'", global_scale="row"),
    no("global_scale is float", TypeError, global_scale=2.0),
    no("offsets has 1 elements, expected", offsets=torch.zeros(1, dtype=INT)),
]  # fmt: skip


@pytest.mark.usefixtures("no_compile")
@refusals(NOT_QUANTISED)
def test_quantise(error, words, changes):
    with pytest.raises(error, match=words):
        quantise(**QUANTISE | changes)


# --- grouped_gemm

COUNTS = (3, 0, 2)
PROBLEM = Case(COUNTS, 128, 64)
MX4, MX8 = (Case(COUNTS, 128, 64, fmt).inputs() for fmt in ("mxfp4", "mxfp8"))
PX, PW = PROBLEM.inputs()
PRODUCT = {"x": PX, "w": PW, "offsets": PROBLEM.offsets, "activation": PROBLEM.activation}
PLAIN_PW = Case((3, 0, 2), 128, 72, form=None).inputs()[1]
LINES = Case((3, 0, 2), 112, 64, form=None).inputs()  # of 56 bytes
SINGLE = Case((3,), 128, 64).inputs()
BIAS = torch.zeros(3, 128)


def at_odd_address(w: Quantized) -> Quantized:
    """Copy to an address 16 bytes past a multiple of 32."""
    memory = torch.zeros(w.data.nbytes + 48, dtype=torch.uint8)
    memory = memory[16 + -memory.data_ptr() % 32 :][: w.data.nbytes].view(w.data.dtype)
    return replace(w, data=memory.view(w.data.shape))


def form(**changes: Any) -> Activation:
    return replace(PROBLEM.activation, **changes)


NO_PRODUCT = [
    no("accepts .*on Hopper, pass moe.arrange.experts.", NotImplementedError, arch="sm_90a"),
    no("limit 0", activation=form(limit=0.0)),
    no("limit -7", activation=form(limit=-7.0)),
    no("limit nan", activation=form(limit=NAN)),
    no("alpha inf", activation=form(alpha=INF)),
    no("alpha nan", activation=form(alpha=NAN)),
    no("beta -inf", activation=form(beta=-INF)),
    no("alpha is '1'", TypeError, activation=form(alpha="1")),
    no("activation is str", TypeError, activation="silu"),
    no("activation is SwiGLU, expected Activation", TypeError, activation=SwiGLU()),
    no("granularity 0", NotImplementedError, activation=form(granularity=0)),
    no("granularity 24", NotImplementedError, activation=form(granularity=24)),
    no("granularity 128", NotImplementedError, activation=form(granularity=128)),
    no("N = 72: a multiple of 64", w=PLAIN_PW),
    no("36 columns of output in fp16: a multiple of 8", NotImplementedError, out=torch.float16,
       w=Case((3, 0, 2), 128, 36, form=None).inputs()[1], activation=None),
    no("48 columns of output in nvfp4: a multiple of 32", NotImplementedError, out="nvfp4",
       w=Case((3, 0, 2), 128, 48, form=None).inputs()[1], activation=None,
       encode_scale=torch.ones(1)),
    no("K = 112 in nvfp4: a multiple of 32", NotImplementedError, x=LINES[0], w=LINES[1],
       activation=None),
    no("quantise it with offsets", x=SINGLE[0], offsets=ints(0, 1, 2, 3)),
    no("offsets is", w=SINGLE[1]),
    no("tile_rows 48", NotImplementedError, tile_rows=48),
    no("tile_rows 0: supported are", NotImplementedError, tile_rows=0),
    no("tile_rows is True", TypeError, tile_rows=True),
    no("tile_n 64: supported are", NotImplementedError, tile_n=64),
    no("tile_n 256 with tile_rows 32: 128", tile_rows=32, tile_n=256),
    no("carry with granularity 32", NotImplementedError, carry=True),
    no("carry is 1", TypeError, carry=1),
    no("tile_rows is 64.0", TypeError, tile_rows=64.0),
    no("most_rows is '5'", TypeError, most_rows="5"),
    no("most_rows 1", most_rows=1),
    no("most_rows 0", most_rows=0),
    no("most_rows 2: an expert has 3 rows", most_rows=2),
    no("most_rows -1", most_rows=-1),
    no("tile_rows 8: an expert may have 9 rows", tile_rows=8, x=Case((9,), 128, 64).inputs()[0],
       w=SINGLE[1], offsets=ints(0, 9)),
    no("out torch.int8", NotImplementedError, out=torch.int8),
    no("out None", NotImplementedError, out=None),
    no("encode_scale", out="nvfp4"),
    no("no encode_scale", out="mxfp8", encode_scale=torch.ones(1)),
    no("encode_scale is torch.float16", out="nvfp4", encode_scale=torch.ones(1).half()),
    no(r"encode_scale is torch.float32 \(3,\)", out="nvfp4", encode_scale=torch.ones(3)),
    no("amax is torch.float64", amax=torch.zeros(1).double()),
    no(r"amax is torch.float32 \(\)", amax=torch.tensor(0.0)),
    no("amax requires grad", NotImplementedError, amax=torch.zeros(1, requires_grad=True)),
    no("bias is torch.float16", bias=BIAS.half()),
    no(r"bias is torch.float32 \(3, 64\), expected torch.float32 \(3, 128\)", bias=BIAS[:, :64]),
    no(r"bias is torch.float32 \(128,\)", bias=BIAS[0]),
    no(r"bias is torch.float32 \(2, 128\)", bias=BIAS[:2]),
    no("bias has last stride 3", bias=BIAS.T.contiguous().T),
    no("bias has a stride of 0 bytes", bias=BIAS[:1].expand(3, 128)),
    no("bias has a stride of 516 bytes", bias=torch.zeros(3, 129)[:, :128]),
    no("bias starts at address", bias=torch.zeros(3 * 128 + 1)[1:].view(3, 128)),
    no("different devices", bias=BIAS.to("meta")),
    no("bias requires grad", NotImplementedError, bias=BIAS.clone().requires_grad_()),
    no("bias is list", TypeError, bias=[0.0]),
    no("amax shares memory with bias", bias=BIAS, amax=BIAS[1, 3:4]),
    no("x is mxfp4 with K = 128, w is mxfp8 .* or .'mxfp8', 'mxfp4'.", x=MX4[0], w=MX8[1]),
    no("x is mxfp8 .*, w is nvfp4", x=MX8[0]),
    no("K = 64 of w in mxfp4 with x in mxfp8: a multiple of 64, at least 128", NotImplementedError,
       x=Case(COUNTS, 64, 64, "mxfp8").inputs()[0], w=Case(COUNTS, 64, 64, "mxfp4").inputs()[1]),
    no("K = 160 of w in mxfp4 with x in mxfp8: a multiple of 64", NotImplementedError,
       x=Case(COUNTS, 160, 64, "mxfp8").inputs()[0], w=Case(COUNTS, 160, 64, "mxfp4").inputs()[1]),
    no("not a multiple of 32 bytes, with x in mxfp8", x=MX8[0], w=at_odd_address(MX4[1])),
    no("x is Tensor", TypeError, x=PX.data),
    no("w is NoneType", TypeError, w=None),
    no("x .*, w", x=PW),
    no(r"offsets \[0, 3, 2, 5\]", offsets=ints(0, 3, 2, 5)),
    no(r"offsets \[0, 3, 3, 6\]", offsets=ints(0, 3, 3, 6)),
    no("x is mxfp8", x=Case((3, 0, 2), 128, 64, "mxfp8").inputs()[0]),
    no("x is nvfp4 with K = 256", x=Case((3, 0, 2), 256, 64).inputs()[0]),
    no("offsets is torch.int64", offsets=PROBLEM.offsets.long()),
    no("out 'int4'", NotImplementedError, out="int4"),
    no("arch 'sm_90a'", NotImplementedError, arch="sm_90a"),
    no("backend 'cuda'", backend="cuda"),
]  # fmt: skip


@pytest.mark.usefixtures("no_compile")
@refusals(NO_PRODUCT)
def test_grouped_gemm(error, words, changes):
    with pytest.raises(error, match=words):
        grouped_gemm(**PRODUCT | changes)


# --- a layer

torch.manual_seed(0)
W13, W2 = (torch.randn(3, *shape).bfloat16() * 0.1 for shape in ((128, 128), (128, 64)))
LAYER = {
    "x": torch.randn(5, 128).bfloat16(), "experts": pack(W13, W2, "nvfp4"),
    "router_logits": torch.randn(5, 3), "router": Router(2),
}  # fmt: skip
NO_LAYER = [
    no("x is torch.float32", NotImplementedError, x=LAYER["x"].float()),
    no(r"x \(5, 64\)", x=LAYER["x"][:, :64]),
    no(r"router_logits \(5, 4\)", router_logits=torch.randn(5, 4)),
    no(r"router_logits \(4, 3\)", router_logits=torch.randn(4, 3)),
    no("router_logits has shape", router_logits=torch.randn(5)),
    no("x has shape", x=LAYER["x"][0]),
    no("logits is torch.float64", NotImplementedError, router_logits=torch.randn(5, 3).double()),
    no("top_k 4", router=Router(4)),
    no("top_k 0", NotImplementedError, router=Router(0)),
    no("scoring 'tanh'", router=Router(2, "tanh")),
    no("n_group 2", router=Router(2, n_group=2)),
    no(r"router_logits \(5, 3\).* and \[T, 2\]", router=Router(2, shared=1)),
    no(r"logit_bias is torch.float32 \(2,\)", router=Router(2, logit_bias=torch.zeros(2))),
    no(r"expert_range \(0, 2\), but 3 are packed", expert_range=(0, 2)),
    no(r"expert_range \(1, 1\): at least one of the experts 0 to 2", expert_range=(1, 1)),
    no(r"expert_range \(1, 4\)", expert_range=(1, 4)),
    no(r"expert_range is 3", TypeError, expert_range=3),
    no(r"router_logits \(4, 8\)", expert_range=(2, 5), router_logits=torch.randn(4, 8)),
    no("limit -1", activation=SwiGLU(limit=-1.0)),
    no("limit nan", activation=SwiGLU(limit=NAN)),
    no("alpha nan", activation=SwiGLU(alpha=NAN)),
    no("activation is Activation, expected SwiGLU", TypeError, activation=form()),
    no("activation is tuple", TypeError, activation=(1.0, 0.0, 7.0)),
    no("scales is dict", TypeError, scales={"h": 1.0}),
    no("router is int", TypeError, router=2),
    no("top_k is 2.0", TypeError, router=Router(2.0)),
    no("activation.limit is '10'", TypeError, activation=SwiGLU(limit="10")),
    no("scales.x is float", TypeError, scales=Scales(x=3.0)),
    no("experts is NoneType", TypeError, experts=None),
    no("experts is Quantized", TypeError, experts=PW),
    no("scales.x 'row': one of", scales=Scales(x="row")),
    no("scales.h 'Token': one of", scales=Scales(h="Token")),
    no(r"scales.x is torch.float32 \(3,\)", scales=Scales(x=torch.ones(3))),
    no(r"scales.h is torch.float32 \(2,\)", scales=Scales(h=torch.ones(2))),
    no("amax is", scales=Scales(h_amax=torch.zeros(3))),
    no("scales.x with mxfp8", experts=pack(W13, W2, "mxfp8"), scales=Scales(x="token")),
    no("scales.h with mxfp8", experts=pack(W13, W2, "mxfp8"), scales=Scales(h=torch.ones(1))),
    no("tile_rows 12", NotImplementedError, tile_rows=12),
    no("tile_rows 8", tile_rows=8, x=torch.randn(9, 128).bfloat16(),
       router_logits=torch.randn(9, 3)),
    no("x requires grad", NotImplementedError, x=LAYER["x"].clone().requires_grad_()),
    no(r"scales\.h requires grad", NotImplementedError,
       scales=Scales(h=torch.ones(1, requires_grad=True))),
    no("x is list", TypeError, x=[[1.0]]),
    no("arch 'sm_90a'", NotImplementedError, arch="sm_90a"),
]  # fmt: skip


@refusals(NO_LAYER)
@pytest.mark.filterwarnings("ignore:activations are quantised:FutureWarning")
def test_fused_moe(error, words, changes):
    """Earlier steps have run when a later one refuses."""
    with pytest.raises(error, match=words):
        fused_moe(**LAYER | changes)


# --- tensors on several devices, or on one that does not exist: operators would move them

META = {"rows": QUANTISE["rows"].to("meta"), "offsets": QUANTISE["offsets"].to("meta")}


@pytest.mark.usefixtures("no_compile")
def test_devices():
    with pytest.raises(ValueError, match="different devices"):
        run_quantise(Tokens(**QUANTISE | META))
    with pytest.raises(NotImplementedError, match="device meta"):
        run_quantise(Tokens(**QUANTISE | META | {"x": X.to("meta")}))
    with pytest.raises(ValueError, match="different devices"):
        Arguments(PX, PW, PROBLEM.offsets.to("meta")).check()


# --- small and empty inputs


def test_no_tokens(no_compile):
    for fmt in ("nvfp4", "mxfp8"):
        packed = pack(W13, W2, fmt)
        y = fused_moe(LAYER["x"][:0], packed, torch.randn(0, 3), Router(2), activations=fmt)
        assert (y.shape, y.dtype) == ((0, 128), torch.bfloat16)
    assert permutation(torch.empty(0, 2, dtype=INT), 3).offsets.tolist() == [0, 0, 0, 0]
    assert combine(torch.ones(0, 8), torch.ones(0, 2), torch.empty(0, dtype=INT)).shape == (0, 8)
    assert quantise(X[:0], "nvfp4").data.shape == (0, 32)


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (3, 3)])
def test_one_expert_and_all_of_them(experts, top_k):
    """There is no choice: every token has every expert."""
    logits = torch.randn(4, experts)
    ids, weights = route(logits, top_k)
    assert ids.sort(1).values.tolist() == [list(range(experts))] * 4
    torch.testing.assert_close(weights.sum(1), torch.ones(4))
    rows = permutation(ids, experts)
    assert rows.offsets.tolist() == [4 * expert for expert in range(experts + 1)]
    packed = pack(W13[:experts], W2[:experts], "mxfp8")
    x = LAYER["x"][:4]
    with checked():
        y = fused_moe(x, packed, logits, Router(top_k))
        again = fused_moe(x[:1], packed, logits[:1], Router(top_k))
    assert y.isfinite().all()
    assert torch.equal(y[:1], again)
