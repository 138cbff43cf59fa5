"""Invalid calls of the functions of moe: an error that names the argument, or the right result.
`test_refusals.py` has the refusals of each step.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe import (
    Activation,
    ExpertWeights,
    PackedExperts,
    Quantized,
    Router,
    Scales,
    SwiGLU,
    arrange,
    combine,
    fused_moe,
    fused_moe_plan,
    grouped_gemm,
    grouped_gemm_plan,
    grouped_gemm_swiglu,
    mixed_gemm,
    pack,
    pack_experts,
    pack_gpt_oss,
    pack_quantised,
    permutation,
    quantise,
    route,
    unpack,
    warmup,
)
from moe.checkpoint import from_state_dict, state_dict
from moe.quantized import laid_out
from moe.reference import quantise as quantised_in_torch
from tests.support.hostile.calls import freed, hostile, refused

INT, INF, NAN = torch.int32, math.inf, math.nan
X, LOGITS, IDS = torch.ones(5, 128).bfloat16(), torch.zeros(5, 3), torch.zeros(5, 2, dtype=INT)
W13, W2 = torch.ones(3, 128, 128).bfloat16(), torch.ones(3, 128, 64).bfloat16()
PACKED, MX = pack(W13, W2, "nvfp4"), pack(W13, W2, "mxfp8")
OFFSETS, OTHERS = (torch.tensor(starts, dtype=INT) for starts in ([0, 2, 2, 5], [0, 1, 4, 5]))


def rows(fmt: str = "nvfp4") -> Quantized:
    return laid_out(quantised_in_torch(X, fmt, offsets=OFFSETS), offsets=OFFSETS)


XQ = rows()
SAME = torch.ones(1)
ARRANGED = arrange(pack(W13, W2, "mxfp4"))
NOWHERE = "no such folder"
STORED = state_dict(PACKED)
FORM = Activation(PACKED.granularity)


def fp32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def routed(**options):
    return lambda: route(**{"logits": LOGITS, "top_k": 2} | options)


def scaled(scale, fmt="nvfp4"):
    return lambda: quantise(X, fmt, global_scale=scale)


def product(**options):
    return lambda: grouped_gemm(**{"x": XQ, "w": PACKED.w13, "offsets": OFFSETS} | options)


def layer(experts=PACKED, router=Router(2), **options):  # noqa: B008
    given = {"x": X, "router_logits": LOGITS} | options
    return lambda: fused_moe(experts=experts, router=router, **given)


def changed(matrix: Quantized, field: str, change) -> Quantized:
    return laid_out(replace(matrix, **{field: change(getattr(matrix, field))}), offsets=OFFSETS)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to an address one byte past a multiple of 16."""
    memory = torch.zeros(tensor.nbytes + 1, dtype=torch.uint8)[1:]
    memory.copy_(tensor.reshape(-1).view(torch.uint8))
    return memory.view(tensor.dtype).view(tensor.shape)


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to every other element."""
    return tensor.repeat_interleave(2)[::2]


def nested(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([tensor])


def packing(**options):
    return lambda: pack(**{"w13": W13, "w2": W2} | options)


def stored(**changes):
    tensors = STORED | {name.replace("__", "."): value for name, value in changes.items()}
    return lambda: from_state_dict(tensors)


def one_token(**options):
    return lambda: fused_moe(X[:1], PACKED, LOGITS[:1], **options)


def planned(**options):
    return lambda: fused_moe_plan(X, PACKED, LOGITS, Router(2), **options)


def sparse_part(field: str) -> PackedExperts:
    """Packed experts with a sparse part in w13."""
    w13 = replace(PACKED.w13, **{field: getattr(PACKED.w13, field).to_sparse()})
    return replace(PACKED, w13=w13)


def warming(**options):
    return lambda: warmup(X, PACKED, LOGITS, Router(2), **options)


CALLS = [
    *(hostile(routed(scale=scale), f"scale {re}") for scale, re in
      ((NAN, "nan"), (INF, "inf"), (-1.0, "-1.0"), (0.0, "0.0"), (1e39, "1e.39"))),
    *(hostile(layer(router=Router(2, scale=scale)), f"scale {re}", name=f"Router {re}")
      for scale, re in ((NAN, "nan"), (-INF, "-inf"), (0.0, "0.0"))),
    hostile(routed(scale="2"), "scale is '2'"),
    hostile(routed(scale=None), "scale is None"),
    hostile(routed(scale=True), "scale is True"),
    hostile(routed(top_k=True), "top_k is True"),
    hostile(routed(top_k=np.int64(17)), "top_k 17: from 1 to 16"),
    hostile(routed(top_k=np.bool_(True)), "top_k is np.True_"),
    hostile(routed(bias=fp32(0, NAN, 0)), r"bias\[1\] is nan"),
    hostile(routed(bias=fp32(0, 0, INF)), r"bias\[2\] is inf"),
    hostile(routed(logit_bias=fp32(NAN, 0, 0)), r"logit_bias\[0\] is nan"),
    hostile(layer(router=Router(2, shared=-1)), "shared -1: at least 0"),
    hostile(lambda: arrange(MX, "e4m3", h_scale=True), "h_scale is True"),
    hostile(routed(top_k=1 << 70), "top_k 1180591620717411303424"),
    hostile(routed(top_k=-1), "top_k -1"),
    hostile(routed(logits=LOGITS.numpy()), "logits is ndarray"),
    hostile(routed(logits=torch.zeros(())), r"logits has shape \(\)"),
    hostile(routed(logits=LOGITS.to(INT)), "logits is torch.int32"),
    hostile(routed(logits=LOGITS.T.contiguous().T), "logits has last stride"),
    hostile(routed(logits=LOGITS[:, :0]), "0 experts"),
    hostile(routed(bias=torch.zeros(3, device="meta")), "different devices"),
    hostile(routed(bias=torch.zeros(2)), "bias is torch.float32"),
    hostile(routed(scoring=None), "scoring is None"),
    hostile(routed(scoring=b"softmax"), "scoring is b'softmax'"),
    hostile(routed(n_group=0), "n_group 0"),
    hostile(routed(renormalize=1), "renormalize is 1"),
    hostile(lambda: permutation(IDS, 3.0), "num_experts is 3.0"),
    hostile(lambda: permutation(IDS, 0), "0 experts"),
    hostile(lambda: permutation(IDS, 513), "513 experts"),
    hostile(lambda: permutation(IDS - 2, 3), "ids has values from -2"),
    hostile(lambda: permutation(IDS[0], 3), r"ids has shape \(2,\)"),
    hostile(lambda: permutation(IDS.tolist(), 3), "ids is list"),
    hostile(lambda: combine(None, None, IDS), "y is NoneType"),
    hostile(lambda: combine(X, None, IDS + 5), "row_of_slot has values from 5"),
    hostile(lambda: combine(X, torch.ones(5), IDS), r"weights has shape \(5,\)"),
    hostile(lambda: combine(X, torch.ones(5, 3), IDS), "row_of_slot has 10 slots"),
    hostile(lambda: combine(X, None, IDS, out_dtype="bf16"), "out_dtype is 'bf16'"),
    hostile(lambda: combine(X, None, IDS.to("meta")), "different devices"),
    *(hostile(scaled(fp32(value)), rf"global_scale\[0\] is {re}") for value, re in
      ((NAN, "nan"), (INF, "inf"), (0.0, "0.0"), (-2.0, "-2.0"))),
    hostile(scaled(fp32(1, 1, -1, 1, 1)), r"global_scale\[2\] is -1.0"),
    hostile(scaled(SAME.to("meta")), "different devices", name="scale elsewhere"),
    hostile(scaled(SAME, "mxfp8"), "global_scale with mxfp8"),
    hostile(scaled(1), "global_scale is int|global_scale is 1"),
    hostile(lambda: quantise(X, None), "fmt is NoneType"),
    hostile(lambda: quantise(X, ["nvfp4"]), "fmt is list"),
    hostile(lambda: quantise(torch.ones(5, device="meta"), "nvfp4"), r"x has shape \(5,\)"),
    hostile(lambda: quantise(X, "nvfp4", choices=1 << 70), "choices 1180591620717411303424"),
    *(hostile(product(out="nvfp4", encode_scale=fp32(value)), rf"encode_scale\[0\] is {re}",
              name=f"encode_scale {re}") for value, re in ((NAN, "nan"), (0.0, "0"), (-1.0, "-1"))),
    hostile(product(out="nvfp4", encode_scale=SAME, amax=SAME), "amax shares memory with enc"),
    hostile(product(amax=XQ.decode_scale[:1]), "amax shares memory with x.decode_scale"),
    hostile(product(amax=PACKED.w13.encode_scale[1:2]), "amax shares memory with w.encode_scale"),
    hostile(product(bias=freed(torch.zeros(3, 128))), "bias reaches to byte 1536"),
    hostile(product(bias=torch.zeros(3, 128).to_sparse()), "bias is a sparse_coo tensor"),
    hostile(product(bias=1.0), "bias is 1.0|bias is float"),
    hostile(product(amax=0.0), "amax is 0.0|amax is float"),
    hostile(product(x=rows("mxfp8")), "x is mxfp8 with K = 128, w is nvfp4 .*: one format"),
    hostile(product(w=MX.w13), "x is nvfp4 .*, w is mxfp8 .*: one format"),
    hostile(product(x=rows("mxfp4")), "x is mxfp4 .*, w is nvfp4 .*: one format"),
    hostile(product(offsets=OTHERS), r"offsets \[0, 1, 4, 5\], but x was quantised with .*0, 2, 2"),
    hostile(product(offsets=OFFSETS[0]), "offsets is torch.int32"),
    hostile(product(offsets=OFFSETS.to_sparse()), "offsets is a sparse_coo tensor"),
    hostile(product(offsets=freed(OFFSETS)), "offsets reaches to byte 16"),
    hostile(product(x=changed(XQ, "data", shifted)), "x.data starts at address"),
    hostile(product(x=changed(XQ, "scales", shifted)), "x.scales starts at address"),
    hostile(product(w=changed(PACKED.w13, "scales", spread)), "w.scales has last stride 2"),
    hostile(product(w=changed(PACKED.w13, "decode_scale", spread)), "w.decode_scale has last str"),
    hostile(lambda: changed(XQ, "decode_scale", nested), "decode_scale is a nested tensor"),
    hostile(product(offsets=[0, 5]), "offsets is list"),
    hostile(product(offsets=OFFSETS.to("meta")), "different devices", name="offsets elsewhere"),
    hostile(product(activation=replace(FORM, granularity=8)), "granularity 8, but .* every 32"),
    hostile(product(activation=replace(FORM, granularity=SAME)), "granularity is Tensor"),
    hostile(product(activation=replace(FORM, granularity=True)), "granularity is True"),
    hostile(product(out=["bf16"]), r"out \['bf16'\]"),
    hostile(product(out=None), "out None"),
    hostile(product(x=None), "x is NoneType"),
    hostile(product(w=W13), "w is Tensor"),
    hostile(product(pdl="no"), "pdl is 'no'"),
    hostile(product(most_rows=1 << 70), "most_rows 1180591620717411303424"),
    hostile(lambda: grouped_gemm_swiglu(XQ, PACKED.w13, OFFSETS, granularity=16), "every 32"),
    hostile(lambda: grouped_gemm_swiglu(XQ, None, OFFSETS), "w13 is NoneType"),
    hostile(lambda: grouped_gemm_swiglu(XQ, PACKED.w13, OFFSETS, form=1.0), "form is float"),
    hostile(packing(w13=None), "w13 is NoneType"),
    hostile(packing(w2=W2[0]), r"w2 has shape \(128, 64\)"),
    hostile(packing(w2=W2.int()), "w2 is torch.int32"),
    hostile(packing(w13=W13 * NAN), "w13, expert 0: largest magnitude nan"),
    hostile(packing(fmt=4), "fmt is int"),
    hostile(packing(fmt="fp4"), "format 'fp4'"),
    hostile(packing(granularity=32.0), "granularity is 32.0"),
    hostile(packing(granularity=24), "granularity 24"),
    hostile(packing(order=None), "order None"),
    hostile(packing(encode_scales=SAME), "encode_scales is Tensor"),
    hostile(packing(encode_scales=(torch.zeros(3), torch.ones(3))), "scale of w13, expert 0"),
    hostile(lambda: pack_quantised(W13, W2), "w13 is Tensor, expected CheckpointWeight"),
    hostile(lambda: unpack(None), "packed is NoneType"),
    hostile(lambda: unpack(PACKED, "fp32"), "dtype is 'fp32'"),
    hostile(lambda: PackedExperts(None, PACKED.w2), "w13 is NoneType"),
    hostile(lambda: PackedExperts(PACKED.w13, MX.w2), "w13 is in nvfp4, w2 in mxfp8"),
    hostile(lambda: PackedExperts(PACKED.w13, PACKED.w2, 16), "granularity 16, but .* every 32"),
    hostile(lambda: replace(XQ, fmt="mxfp8", encode_scale=None, decode_scale=None),
            "data is torch.float4_e2m1fn_x2, expected torch.float8_e4m3fn for mxfp8"),
    hostile(lambda: replace(XQ, fmt=None), "fmt is NoneType", name="Quantized fmt"),
    hostile(lambda: replace(XQ, scales=XQ.scales[:7]), "scales have shape"),
    hostile(routed(scale=1e-320), "scale 1e-320: above 0, from 1.175e-38"),
    hostile(lambda: combine(X, torch.ones(5, 2), IDS.view(2, 5)), "row_of_slot is|weights is"),
    hostile(lambda: combine(X, torch.ones(5, 2), IDS[None]), "row_of_slot", name="3 dimensions"),
    hostile(lambda: quantise(X, "mxfp8", rows=IDS[0], choices=1 << 31), "at most .* slots"),
    hostile(packing(w13=W13.to_sparse()), "w13 is a sparse_coo tensor"),
    hostile(packing(encode_scales=(1.0, None)), r"encode_scales\[0\] is 1.0|is float"),
    hostile(packing(order=np.array([1, 2])), "order array"),
    hostile(lambda: unpack(PACKED, torch.int8), "dtype torch.int8"),
    hostile(lambda: state_dict(None), "packed is NoneType"),
    hostile(lambda: from_state_dict([]), "tensors is list"),
    hostile(stored(w2__data=None), "w2.data is NoneType"),
    hostile(stored(w13__scales=STORED["w13.scales"].view(torch.float8_e5m2)), "e5m2, expected"),
    hostile(stored(layout=torch.zeros(3, dtype=torch.uint8)), "layout is not JSON"),
    hostile(warming(tokens="12"), "tokens is str"),
    hostile(warming(tokens=[-1]), r"tokens\[0\] -1"),
    hostile(warming(tokens=[1], progress=1), "progress is int"),
    hostile(layer(experts=None), "experts is NoneType"),
    hostile(layer(router=2), "router is int"),
    hostile(layer(activation=0), "activation is int"),
    hostile(layer(activation=SwiGLU(alpha=NAN)), "alpha nan"),
    hostile(layer(scales=SAME), "scales is Tensor"),
    hostile(layer(scales=Scales(h=SAME, h_amax=SAME)), "scales.h_amax shares memory with scales.h"),
    hostile(layer(scales=Scales(x=SAME, h_amax=SAME)), "scales.h_amax shares memory with scales.x"),
    hostile(layer(x=X.to("meta")), "different devices", name="x elsewhere"),
    hostile(layer(router=Router(-1)), "top_k -1: at least 1"),
    hostile(one_token(router=Router(-1)), "top_k -1: at least 1", name="one token"),
    hostile(warming(tokens=[1], scales=3), "scales is int"),
    hostile(warming(tokens=[1], activation="silu"), "activation is str"),
    hostile(lambda: warmup(X, 3, LOGITS, Router(2), tokens=[1]), "experts is int"),
    hostile(lambda: warmup(X, PACKED, LOGITS.to_sparse(), Router(2), tokens=[1]),
            "router_logits is a sparse_coo tensor"),
    hostile(planned(scales=Scales(h_amax=SAME.to("meta"))), "different devices", name="amax there"),
    hostile(lambda: grouped_gemm_plan(XQ, PACKED.w13, OFFSETS, most_rows=1 << 70),
            "most_rows 1180591620717411303424: not an int64"),
    hostile(lambda: ExpertWeights(sparse_part("decode_scale")), "w13.decode_scale is a sparse"),
    hostile(lambda: replace(PACKED, bias2=nested(torch.zeros(3, 128))), "bias2 is a nested"),
    hostile(lambda: mixed_gemm(X[:, :64].contiguous(), replace(ARRANGED.w2, data=shifted(
        ARRANGED.w2.data)), OFFSETS), "w.data starts at address"),
    hostile(lambda: pack_experts([], ["e"]), "path is list"),
    hostile(lambda: pack_experts(NOWHERE, ["e"], progress=1), "progress is 1"),
    hostile(lambda: pack_gpt_oss(NOWHERE, 1.0), "prefix is 1.0"),
    hostile(layer(tile_rows=True), "tile_rows is True"),
    hostile(layer(backend=None), "backend is None"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:activations are quantised:FutureWarning")
@pytest.mark.usefixtures("no_compile")
@pytest.mark.parametrize(("attempt", "words"), CALLS)
def test_a_named_error(attempt, words):
    refused(attempt, words)


@pytest.mark.parametrize("scale", [2, np.int32(2), np.float64(2)])
def test_a_scale_may_be_any_number(scale):
    arranged = arrange(pack(W13, W2, "mxfp4"), "e4m3", h_scale=scale)
    assert torch.equal(arranged.h_scale, fp32(2.0))
    assert torch.equal(arranged.h_decode_scale, fp32(0.5))
    assert arranged.h_scale.dtype == torch.float32


def test_scales_of_a_layer_are_looked_at():
    """Scales are checked in the middle of the layer, after the kernels that need none."""
    for field in ("x", "h"):
        for value in (NAN, 0.0, -1.0, INF):
            refused(layer(scales=Scales(**{field: fp32(value)})), "scale")


def test_parameters_are_packed_without_their_gradients(no_compile):
    """Otherwise the global scales would require gradients at the first call."""
    packed = pack(torch.nn.Parameter(W13.float()), W2, "nvfp4")
    assert not packed.w13.encode_scale.requires_grad


def test_what_is_not_recorded_is_not_compared(no_compile):
    """A Quantized made elsewhere has neither; neighbours in one buffer do not share memory."""
    plain = replace(XQ)
    assert plain.offsets is plain.granularity is None
    assert XQ.offsets == (0, 2, 2, 5)
    assert PACKED.w13.granularity == PACKED.granularity
    assert PACKED.w2.granularity is None
    buffer = torch.ones(2)
    words = "tile_rows 12"  # is refused later: scales and amax in one buffer are fine
    refused(product(out="nvfp4", encode_scale=buffer[:1], amax=buffer[1:], tile_rows=12), words)
