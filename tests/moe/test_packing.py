"""Packed weights: their values, their layout, import of checkpoints, and refusals."""

from __future__ import annotations

import dataclasses
import math
import sys

import pytest
import torch

from kernelkit.numerics import e2m1
from moe import checkpoint
from moe.config import GRANULARITIES
from moe.formats import FORMATS, row_blocks, scale_bytes
from moe.packing import (
    ORDERS,
    CheckpointWeight,
    interleaved_rows,
    pack,
    pack_quantised,
    unpack,
    unpack_biases,
)
from moe.quantized import Quantized
from moe.reference import dequantise, encode_scale, quantise, quantise_blocks, swizzle_scales
from tests.moe.quantise_cases import assert_equal

INF, NAN = math.inf, math.nan
EXPERTS, HIDDEN, INTERMEDIATE = 3, 96, 192  # 2I is three blocks of 128 rows, H less than one


def weights(dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator)
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator)
    size = torch.tensor([1.0, 30.0, 0.01])[:, None, None]  # experts differ, so their scales do
    return (w13 * size).to(dtype), (w2 * size).to(dtype)


W13, W2 = weights()
ONES = torch.ones(EXPERTS)


def test_rows_alternate_by_granularity():
    up_first = interleaved_rows(16, 8, "up_gate").tolist()
    assert up_first == [*range(16, 24), *range(8), *range(24, 32), *range(8, 16)]
    in_turn = interleaved_rows(16, 8, "alternating").tolist()
    assert in_turn == [*range(0, 16, 2), *range(1, 16, 2), *range(16, 32, 2), *range(17, 32, 2)]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_packed_row_by_the_formula(granularity):
    intermediate = 2 * 64
    for r, row in enumerate(interleaved_rows(intermediate, granularity).tolist()):
        pair, within = divmod(r, 2 * granularity)
        gate = within < granularity
        base = pair * granularity + within
        assert row == (base if gate else intermediate + base - granularity)


def matrix_of(w: torch.Tensor, fmt: str) -> Quantized:
    """Quantise one expert's matrix, with one global scale if the format has any."""
    return quantise(w, fmt, global_scale="tensor" if FORMATS[fmt].has_global else None)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_those_of_the_quantiser(fmt, dtype):
    """Values do not depend on the granularity; they are compared expert by expert."""
    w13, w2 = weights(dtype)
    for granularity in GRANULARITIES:
        packed = pack(w13, w2, fmt, granularity=granularity)
        ours = unpack(packed)
        for plain, values in zip((w13, w2), ours, strict=True):
            for expert in range(EXPERTS):
                assert torch.equal(values[expert], dequantise(matrix_of(plain[expert], fmt)))
    assert (packed.fmt, packed.experts) == (fmt, EXPERTS)
    assert (packed.hidden, packed.intermediate) == (HIDDEN, INTERMEDIATE)


@pytest.mark.parametrize("fmt", FORMATS)
def test_experts_lie_behind_each_other(fmt):
    """An expert's bytes are those of its matrix alone, with its rows in the packed order."""
    w13, w2 = weights()
    packed = pack(w13, w2, fmt, granularity=16)
    rows = interleaved_rows(INTERMEDIATE, 16)
    for matrix, plain in ((packed.w13, w13[:, rows]), (packed.w2, w2)):
        size = scale_bytes(row_blocks(plain.shape[1]), plain.shape[2] // FORMATS[fmt].block)
        assert matrix.scales.numel() == EXPERTS * size
        for expert in range(EXPERTS):
            alone = matrix_of(plain[expert], fmt)
            mine = matrix.scales[expert * size : (expert + 1) * size]
            globals_ = (
                None if s is None else s[expert : expert + 1]
                for s in (matrix.encode_scale, matrix.decode_scale)
            )
            assert_equal(Quantized(matrix.data[expert], mine, *globals_, fmt), alone)


def test_orders_say_where_gate_is():
    w13, w2 = weights()
    gate, up = w13.chunk(2, dim=1)
    expected = pack(w13, w2)
    swapped = pack(torch.cat((up, gate), dim=1), w2, order="up_gate")
    in_turn = pack(torch.stack((gate, up), dim=2).flatten(1, 2), w2, order="alternating")
    assert_equal(swapped.w13, expected.w13)
    assert_equal(in_turn.w13, expected.w13)


def test_weights_may_be_strided():
    w13, w2 = weights()
    strided = pack(w13.mT.contiguous().mT, w2.mT.contiguous().mT)
    assert_equal(strided.w13, pack(w13, w2).w13)
    assert_equal(strided.w2, pack(w13, w2).w2)


def test_given_global_scales():
    w13, w2 = weights()
    given = torch.tensor([1.0, 2.0, 1000.0]), torch.tensor([3.0, 4.0, 5.0])
    packed = pack(w13, w2, encode_scales=given)
    assert torch.equal(packed.w13.encode_scale, given[0])
    assert torch.equal(packed.w2.decode_scale, 1 / given[1])
    expected = dequantise(quantise(w2[1], "nvfp4", global_scale=given[1][1:2]))
    assert torch.equal(unpack(packed)[1][1], expected)


def test_an_expert_of_zeros():
    w13, w2 = (torch.zeros_like(w) for w in weights())
    packed = pack(w13, w2)
    assert packed.w13.encode_scale.tolist() == [1] * EXPERTS
    assert not any(values.any() for values in unpack(packed))


def from_checkpoint(w, fmt, as_bytes=True):
    """Quantise a weight [E, N, K] as in checkpoints."""
    form = FORMATS[fmt]
    encode = encode_scale(w.abs().amax((1, 2)), fmt) if form.has_global else None
    of_rows = None if encode is None else encode.repeat_interleave(w.shape[1])
    data, scales = quantise_blocks(w.flatten(0, 1).float(), form, of_rows)
    if as_bytes:
        data, scales = data.view(torch.uint8), scales.view(torch.uint8)
    data, scales = (tensor.unflatten(0, (len(w), -1)) for tensor in (data, scales))
    return CheckpointWeight(data, scales, encode_scale=encode)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("as_bytes", [True, False])
def test_checkpoint_in_the_format_packs_alike(fmt, as_bytes):
    w13, w2 = weights()
    imported = pack_quantised(
        *(from_checkpoint(w, fmt, as_bytes) for w in (w13, w2)), fmt, granularity=8
    )
    packed = pack(w13, w2, fmt, granularity=8)
    assert_equal(imported.w13, packed.w13)
    assert_equal(imported.w2, packed.w2)


def test_values_of_mxfp4_stay_and_bytes_of_blocks_that_use_its_largest_elements():
    """A checkpoint's weight is dequantised and quantised again: a block without an element of 4 or
    more gets a smaller scale factor, and keeps its values."""
    form, generator = FORMATS["mxfp4"], torch.Generator().manual_seed(0)
    most = torch.arange(64) % 8 + 1  # largest of a block's codes
    codes = (torch.rand(64, 32, generator=generator) * most[:, None]).to(torch.uint8)
    codes[:, 0], codes[:, 1:] = most - 1, codes[:, 1:] | 8 * (codes[:, 1:] % 2)
    scales = torch.randint(100, 140, (64, 1), generator=generator).to(torch.uint8)
    plain = e2m1.values_of(codes) * torch.exp2(scales.float() - 127)
    data, found = quantise_blocks(plain, form, None)
    again = e2m1.unpacked(data.view(torch.uint8)) * found.float()
    assert torch.equal(again, plain)
    same = found.view(torch.uint8) == scales
    assert torch.equal(same.flatten(), most - 1 >= 6)  # 4 is code 6, 6 is code 7


def test_checkpoint_order():
    w13, w2 = weights()
    gate, up = w13.chunk(2, dim=1)
    swapped = from_checkpoint(torch.cat((up, gate), dim=1), "nvfp4")
    imported = pack_quantised(swapped, from_checkpoint(w2, "nvfp4"), order="up_gate")
    assert_equal(imported.w13, pack(w13, w2).w13)


def test_decode_scales_of_a_checkpoint_are_kept():
    """1 / (1 / s) is not always s: products use the checkpoint's scale."""
    w13, w2 = (from_checkpoint(w, "nvfp4") for w in weights())
    decode = torch.tensor([0.1, 0.7, 3.0]) / 49
    assert not torch.equal(1 / (1 / decode), decode)
    w13 = dataclasses.replace(w13, encode_scale=None, decode_scale=torch.stack([decode] * 2, 1))
    imported = pack_quantised(w13, w2)
    assert torch.equal(imported.w13.decode_scale, decode)
    assert torch.equal(imported.w13.encode_scale, 1 / decode)


def changed(w, *index, value):
    """Copy w and change one element."""
    w = w.clone()
    w[index] = value
    return w


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b: (a[0], b), r"w13 has shape \(384, 96\), rank 2; expected \[E, N, K\]"),
        (lambda a, b: (a.double(), b), "w13 is torch.float64, expected bf16, fp16 or fp32"),
        (lambda a, b: (a[:2], b), r"w13 \(2, 384, 96\) with w2 \(3, 96, 192\)"),
        (lambda a, b: (a[:, :-2], b), r"w13 \(3, 382, 96\) with w2"),
        (lambda a, b: (a[..., :64], b), r"w13 \(3, 384, 64\) with w2"),
        (lambda a, b: (a[:0], b[:0]), r"w13 \(0, 384, 96\)"),
        (lambda a, b: (a[..., :24], b[:, :24]), "H = 24 in nvfp4: a positive multiple of 32"),
        (lambda a, b: (a[..., :48], b[:, :48]), "H = 48 in nvfp4: a positive multiple of 32"),
        (lambda a, b: (a[:, :96], b[..., :48]), "I = 48 in nvfp4: a positive multiple of 32"),
        (lambda a, b: (changed(a, 1, 5, 7, value=NAN), b), "w13, .* 1: .* magnitude nan, not fin"),
        (lambda a, b: (a, changed(b, 2, 0, 0, value=-INF)), "w2, .* 2: .* magnitude inf, not fin"),
    ],
)
def test_pack_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        pack(*change(*weights()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fmt": "int4"}, "format 'int4'"),
        ({"granularity": 12}, r"granularity 12: one of \(8, 16, 32, 64\)"),
        ({"order": "gate"}, "order 'gate': one of gate_up, up_gate, alternating"),
        ({"encode_scales": (ONES, torch.ones(2))}, r"encode scale of w2 is .* \(2,\)"),
        ({"encode_scales": (1 - ONES, ONES)}, "of w13, expert 0: value 0.0, not positive and fin"),
        ({"encode_scales": (ONES, ONES), "fmt": "mxfp4"}, "encode_scales with mxfp4, which has no"),
        ({"granularity": 64, "w13": W13[:, :192], "w2": W2[..., :96]},
         "I = 96: a multiple of granularity 64"),
    ],
)  # fmt: skip
def test_options_that_pack_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        pack(**{"w13": W13, "w2": W2} | options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {"encode_scale": None}, "w13 has no global scale: nvfp4 has one of"),
        (lambda w: {"decode_scale": ONES}, "w13 has encode_scale, decode_scale: nvfp4 has one of"),
        (lambda w: {"data": w.data.int()}, "w13.data is torch.int32, expected torch.uint8 or"),
        (lambda w: {"scales": w.scales.half()}, "w13.scales is torch.float16"),
        (lambda w: {"data": w.data[0]}, r"w13.data has shape \(384, 48\)"),
        (lambda w: {"scales": w.scales[..., :5]}, r"\(3, 384, 5\), expected \(3, 384, 6\)"),
        (lambda w: {"scales": changed(w.scales, 1, 3, 2, value=0x7F)},
         "w13.scales, expert 1: code 0x7f, at most 0x7e"),
        (lambda w: {"scales": changed(w.scales, 2, 3, 2, value=0x81)},
         "w13.scales, expert 2: code 0x81, at most 0x7e"),
        (lambda w: {"encode_scale": torch.ones(2)},
         r"global scale of w13 is torch.float32 \(2,\), expected torch.float32 \(3\)"),
        (lambda w: {"encode_scale": changed(torch.ones(3, 2), 1, 1, value=-2.0)},
         "global scale of w13, expert 1: value -2.0, not positive and finite"),
        (lambda w: {"encode_scale": torch.ones(3, 3)},
         r"global scale of w13 is torch.float32 \(3, 3\), expected torch.float32 \(3\)"),
        (lambda w: {"encode_scale": changed(ONES, 2, value=NAN)},
         "global scale of w13, expert 2: value nan, not positive and finite"),
    ],
)  # fmt: skip
def test_pack_quantised_refuses(change, message):
    w13, w2 = (from_checkpoint(w, "nvfp4") for w in weights())
    with pytest.raises(ValueError, match=message):
        pack_quantised(dataclasses.replace(w13, **change(w13)), w2)


def test_pack_quantised_refuses_numbers_that_are_none():
    w13, w2 = (from_checkpoint(w, "mxfp8") for w in weights())
    broken = dataclasses.replace(w2, data=changed(w2.data, 1, 0, 0, value=0xFF))
    with pytest.raises(ValueError, match=r"w2\.data, expert 1: code 0x7f, at most 0x7e"):
        pack_quantised(w13, broken, "mxfp8")
    broken = dataclasses.replace(w2, scales=changed(w2.scales, 0, 0, 0, value=0xFF))
    with pytest.raises(ValueError, match=r"w2\.scales, expert 0: code 0xff, at most 0xfe"):
        pack_quantised(w13, broken, "mxfp8")


def test_packed_experts_fit_each_other():
    w13, w2 = weights()
    packed, other = pack(w13, w2), pack(w13, w2, "mxfp4")
    with pytest.raises(ValueError, match="w13 is in nvfp4, w2 in mxfp4"):
        dataclasses.replace(packed, w2=other.w2)
    with pytest.raises(ValueError, match=r"w13 \(3, 96, 192\) with w2"):
        dataclasses.replace(packed, w13=packed.w2)
    with pytest.raises(ValueError, match="granularity 5"):
        dataclasses.replace(packed, granularity=5)
    shared = dataclasses.replace(packed.w13, encode_scale=torch.ones(1), decode_scale=torch.ones(1))
    with pytest.raises(ValueError, match="w13 has 1 global scales for 3 experts"):
        dataclasses.replace(packed, w13=shared)


def assert_same_experts(first, second):
    assert first.granularity == second.granularity
    assert_equal(first.w13, second.w13)
    assert_equal(first.w2, second.w2)


@pytest.mark.parametrize("fmt", FORMATS)
def test_state_dict_round_trip(fmt, tmp_path):
    packed = pack(*weights(), fmt, granularity=64)
    torch.save(checkpoint.state_dict(packed, "layers.3."), tmp_path / "layer.pt")
    tensors = torch.load(tmp_path / "layer.pt", weights_only=True)
    assert all(name.startswith("layers.3.") for name in tensors)
    assert_same_experts(checkpoint.from_state_dict(tensors, "layers.3."), packed)


def test_state_dict_shares_memory():
    packed = pack(*weights())
    tensors = checkpoint.state_dict(packed)
    assert tensors["w13.data"].data_ptr() == packed.w13.data.data_ptr()
    assert checkpoint.from_state_dict(tensors).w2.scales.data_ptr() == packed.w2.scales.data_ptr()


def test_state_dicts_that_are_refused():
    tensors = checkpoint.state_dict(pack(*weights()))
    with pytest.raises(ValueError, match=r"no tensor 'a\.layout'"):
        checkpoint.from_state_dict(tensors, "a.")
    with pytest.raises(ValueError, match=r"no tensor 'w2\.decode_scale'"):
        checkpoint.from_state_dict({k: t for k, t in tensors.items() if k != "w2.decode_scale"})
    text = bytes(tensors["layout"].tolist()).replace(b'"version": 1', b'"version": 9')
    with pytest.raises(ValueError, match="layout has version 9, expected 1 or 2"):
        checkpoint.from_state_dict(tensors | {"layout": torch.tensor(list(text)).byte()})


def test_safetensors_round_trip(tmp_path):
    pytest.importorskip("safetensors")
    layers = {
        "model.layers.0.mlp": pack(*weights()),
        "model.layers.1.mlp": pack(*weights(), "mxfp8", granularity=8),
    }
    checkpoint.save(tmp_path / "experts.safetensors", layers)
    loaded = checkpoint.load(tmp_path / "experts.safetensors")
    assert loaded.keys() == layers.keys()
    for name, packed in layers.items():
        assert_same_experts(loaded[name], packed)


B13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, generator=torch.Generator().manual_seed(5)).bfloat16()
B2 = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("granularity", [8, 32])
def test_a_bias_has_the_order_of_its_rows(order, granularity):
    """w13's bias is permuted like its rows."""
    packed = pack(W13, W2, "mxfp8", granularity=granularity, order=order, biases=(B13, B2))
    rows = interleaved_rows(INTERMEDIATE, granularity, order)
    assert (packed.bias13.dtype, packed.bias2.dtype) == (torch.float32, torch.float32)
    assert torch.equal(packed.bias13, B13.float()[:, rows])
    b13, b2 = unpack_biases(packed)
    gate, up = (B13[:, ::2], B13[:, 1::2]) if order == "alternating" else B13.chunk(2, dim=1)
    gate, up = (up, gate) if order == "up_gate" else (gate, up)
    assert torch.equal(b13, torch.cat((gate, up), dim=1).float())
    assert torch.equal(b2, B2)
    assert b2.data_ptr() != B2.data_ptr()


@pytest.mark.parametrize("biases", [(B13, B2), (B13, None), (None, B2)], ids=["both", "13", "2"])
def test_biases_are_saved(biases, tmp_path):
    packed = pack(W13, W2, "mxfp4", biases=biases)
    checkpoint.save(tmp_path / "experts.safetensors", {"a": packed})
    loaded = checkpoint.load(tmp_path / "experts.safetensors")["a"]
    assert_same_experts(loaded, packed)
    for mine, other, given in zip(loaded.biases, packed.biases, biases, strict=True):
        assert (mine is None) == (other is None) == (given is None)
        assert mine is None or torch.equal(mine, other)
    plain = pack(W13, W2, "mxfp4")
    assert packed.nbytes - plain.nbytes == 4 * sum(b.numel() for b in biases if b is not None)
    tensors = checkpoint.state_dict(packed)
    gone = next(name for name in ("bias13", "bias2") if name in tensors)
    with pytest.raises(ValueError, match=f"no tensor '{gone}'"):
        checkpoint.from_state_dict({k: t for k, t in tensors.items() if k != gone})


def test_layouts_without_biases_are_what_they_were():
    """Older files and readers remain compatible; biases have a new version."""
    plain, biased = (checkpoint.layout_of(pack(W13, W2, biases=b)) for b in (None, (B13, B2)))
    assert plain == {"version": 1, "fmt": "nvfp4", "granularity": 32}
    assert biased == plain | {"version": 2, "biases": ["bias13", "bias2"]}


@pytest.mark.parametrize(("biases", "error", "words"), [
    ((B13[:, 1:], B2), ValueError, r"biases\[0\] is torch.bfloat16"),
    ((B13, B2[:1]), ValueError, r"biases\[1\] is torch.float32 \(1, "),
    ((B13.int(), B2), ValueError, r"biases\[0\] is torch.int32, expected bf16"),
    ((B13, B2 / 0), ValueError, r"biases\[1\], expert 0: largest magnitude inf, not finite"),
    (B13, TypeError, "biases is Tensor, expected two tensors or None"),
    ((B13, 1.0), TypeError, r"biases\[1\] is float"),
])  # fmt: skip
def test_biases_that_are_refused(biases, error, words):
    with pytest.raises(error, match=words):
        pack(W13, W2, biases=biases)
    packed = pack(W13, W2)
    with pytest.raises(ValueError, match=r"bias13 is torch\.float32"):
        dataclasses.replace(packed, bias13=B2)
    with pytest.raises(ValueError, match=r"bias2 is torch\.bfloat16"):
        dataclasses.replace(packed, bias2=B2.bfloat16())


def test_files_without_safetensors(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        checkpoint.load(tmp_path / "experts.safetensors")


def test_bytes_of_a_packed_layer():
    """4.5 bits an element: elements, scale factors padded to 128 rows, two global scales."""
    packed = pack(*weights())
    elements = 3 * HIDDEN * INTERMEDIATE * EXPERTS // 2
    scales = EXPERTS * (scale_bytes(3, HIDDEN // 16) + scale_bytes(1, INTERMEDIATE // 16))
    assert packed.nbytes == elements + scales + 2 * 2 * EXPERTS * 4
    assert swizzle_scales(torch.zeros(1, 1).byte()).numel() == 512
