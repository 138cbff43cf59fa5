"""4-bit weights as Hopper multiplies them: decoded by an independent decoder of the layout's
description, thread by thread like `sm90/dequantise.py`, in fp64.

Nothing compiles.
"""

from __future__ import annotations

import pytest
import torch

from moe import arrange, pack, pack_quantised, reference, unpack, unpack_biases
from moe.formats import FORMATS, format_of
from moe.mixed.fragments import Fragments, fragments
from moe.packing import CheckpointWeight, interleaved_rows
from moe.quantized import Quantized, of_bytes

BF16 = 16
SIGNIFICANT = 0x81C081C0  # of a pair of bf16: sign, two bits of exponent, one of mantissa
OWN = 0x60306030  # bits of the last pair that are in the first of two words
LEAST = 2.0**-133  # of bf16
LARGEST_UE8M0 = 128  # largest code of an expert; if codes exceed it, all of them are lowered


def numbers(bits: torch.Tensor) -> torch.Tensor:
    """Decode bits of bf16 to fp64."""
    wrapped = torch.where(bits >= 1 << 15, bits - (1 << 16), bits)
    return wrapped.short().view(torch.bfloat16).double()


def left(word: torch.Tensor, turn: int) -> torch.Tensor:
    """Rotate 32 bits left, int64 [..]."""
    return (word << turn | word >> 32 - turn) & 0xFFFFFFFF if turn else word


def pairs_of(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Decode two neighbouring words of a thread, fp64 [.., word, pair, element]."""
    joined = first & OWN | left(second, 30) & ~OWN
    found = []
    for word, last in ((first, 26), (second, 4)):
        turned = [left(word, turn) for turn in (0, 6, 28)] + [left(joined, last)]
        pairs = torch.stack(turned, dim=-1) & SIGNIFICANT
        found.append(torch.stack((pairs & 0xFFFF, pairs >> BF16), dim=-1))
    return numbers(torch.stack(found, dim=-3))


def factors_of(scales: torch.Tensor, fmt: str) -> torch.Tensor:
    """Decode bytes of scale factors to fp64; they become bf16 by a shift, or by a product and a
    sum."""
    codes = scales.long()
    return numbers(codes << 7 if format_of(fmt).scale == "ue8m0" else codes * 16 + (235 << 7))


def values(w: Fragments) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stored values, fp64 [E, rows, K], and the error of rounding products to bf16."""
    block = format_of(w.fmt).block
    tall, deep, blocks = -(-w.rows // 64), -(-w.k // 64), 64 // block
    units = w.data.view(w.experts, tall, deep, 2048 + 64 * blocks)
    words = units[..., :2048].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    words = words.view(w.experts, tall, deep, 4, 8, 4, 2, 2)  # .. warp, g, t, two steps, which
    elements = pairs_of(words[..., 0], words[..., 1])
    # E, unit, unit of K, warp, g, t, two steps, step, (half of K, half of rows), element
    elements = elements.unflatten(-2, (2, 2))
    scales = factors_of(units[..., 2048:].reshape(w.experts, tall, deep, 4, 8, 2, blocks), w.fmt)
    scales = scales.repeat_interleave(4 // blocks, dim=-1).unflatten(-1, (2, 2))
    # E, unit, unit of K, warp, g, half of rows, two steps, step
    exact = (
        elements * scales.permute(0, 1, 2, 3, 4, 6, 7, 5)[:, :, :, :, :, None, :, :, None, :, None]
    )
    rounded = exact.bfloat16().double()
    # Rows: unit, warp, half, g. K: unit, two steps, step, half, t, element.
    rounded, exact = (
        each.permute(0, 1, 3, 9, 4, 2, 6, 7, 8, 5, 10).reshape(w.experts, tall * 64, deep * 64)
        for each in (rounded, exact)
    )
    whole = rounded * w.factor.double()[:, None, None]
    assert not whole[:, w.rows :].any(), "rows behind the last one are zero"
    assert not whole[:, :, w.k :].any(), "and so is K behind its end"
    return whole[:, : w.rows, : w.k], (rounded - exact).abs()


def random_weight(fmt: str, codes: torch.Tensor, decode: torch.Tensor | None = None) -> Quantized:
    """A random weight with the scale factors `codes` [E, rows, blocks]."""
    generator, block = torch.Generator().manual_seed(len(codes)), format_of(fmt).block
    shape = *codes.shape[:2], codes.shape[2] * block // 2
    data = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    scales = torch.cat([reference.swizzle_scales(each.byte()).view(torch.uint8) for each in codes])
    return of_bytes(data, scales, fmt, decode_scale=decode)


@pytest.mark.parametrize("rows", [8, 64, 136])
@pytest.mark.parametrize("k", [32, 160, 192])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_every_place_of_a_matrix(fmt, k, rows):
    generator = torch.Generator().manual_seed(k)
    codes = torch.randint(1, 120, (3, rows, k // format_of(fmt).block), generator=generator)
    decode = torch.tensor([0.7, 1.0, 3e-5]) if fmt == "nvfp4" else None
    w = random_weight(fmt, codes, decode)
    arranged = fragments(w)
    found, lost = values(arranged)
    assert torch.equal(found, reference.dequantise(w))
    assert not lost.any()
    order = torch.randperm(rows, generator=generator)
    assert torch.equal(values(fragments(w, order))[0], found[:, order])
    units = -(-rows // 64) * -(-k // 64)
    assert arranged.data.shape == (3, units * (2048 + 64 * 64 // format_of(fmt).block))
    assert arranged.nbytes == arranged.data.nbytes + 12


def test_every_code_of_e4m3():
    """Subnormals are included; products with a scale factor of zero are zero."""
    codes = torch.arange(127).repeat(2, 16, 1)[..., :124]  # whole steps of K
    codes[:, 1::2] = torch.arange(126, 2, -1)
    w = random_weight("nvfp4", codes, torch.tensor([1.0, 1.5e-7]))
    found, lost = values(fragments(w))
    wanted = reference.dequantise(w)
    assert torch.equal(found, wanted)
    assert not lost.any()
    assert wanted.unflatten(-1, (-1, 16))[:, ::2, 0].eq(0).all()
    assert set(codes.flatten().tolist()) == set(range(127))


def test_every_code_of_ue8m0():
    """Up to 2, the largest scale without a factor, every code is exact."""
    codes = torch.arange(LARGEST_UE8M0 + 1)[:128].repeat(1, 4, 1)
    codes[:, 1] = LARGEST_UE8M0 - codes[:, 1]
    w = random_weight("mxfp4", codes)
    arranged = fragments(w)
    found, lost = values(arranged)
    assert arranged.factor.item() == 1.0
    assert torch.equal(found, reference.dequantise(w))
    assert not lost.any()


@pytest.mark.parametrize("largest", [129, 140, 200, 254])
def test_huge_codes_of_ue8m0(largest):
    """All codes of an expert are lowered equally, and its factor compensates: values of at least
    2^-133 times the factor are exact. Other experts are unchanged."""
    codes = torch.arange(255)[-128:].clamp(max=largest).repeat(2, 4, 1)
    codes[:, 1] = torch.arange(128).clamp(max=largest)
    codes[1] = 120
    w = random_weight("mxfp4", codes)
    arranged = fragments(w)
    factor = 2.0 ** (largest - LARGEST_UE8M0)
    assert arranged.factor.tolist() == [factor, 1.0]
    found, wanted = values(arranged)[0], reference.dequantise(w)
    assert torch.equal(found[1], wanted[1])
    exact = wanted[0] % (LEAST * factor) == 0
    assert torch.equal(found[0][exact], wanted[0][exact])
    assert (found[0] - wanted[0]).abs().max() <= LEAST * factor
    assert exact[codes[0].repeat_interleave(32, dim=-1) >= largest - LARGEST_UE8M0 - 5].all()


@pytest.mark.parametrize("granularity", [8, 16, 32, 64])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_a_layer_is_the_same_however_it_was_packed(fmt, granularity):
    generator = torch.Generator().manual_seed(1)
    w13 = torch.randn(3, 256, 96, generator=generator)
    w2 = torch.randn(3, 96, 128, generator=generator)
    biases = torch.randn(3, 256, generator=generator), torch.randn(3, 96, generator=generator)
    packed = pack(w13, w2, fmt, granularity=granularity, biases=biases)
    arranged = arrange(packed)
    turn = interleaved_rows(128, 8)
    first, second = unpack(packed)
    assert torch.equal(values(arranged.w13)[0], first[:, turn])
    assert torch.equal(values(arranged.w2)[0], second)
    assert torch.equal(arranged.bias13, unpack_biases(packed)[0][:, turn])
    assert arranged.bias2 is packed.bias2
    assert arranged.bias13.is_contiguous()
    assert (arranged.w13.swiglu, arranged.w2.swiglu) == (True, False)
    assert (arranged.experts, arranged.hidden, arranged.intermediate) == (3, 96, 128)
    other = arrange(pack(w13, w2, fmt, granularity=8))
    assert torch.equal(arranged.w13.data, other.w13.data)
    assert other.bias13 is None
    extra = 3 * (256 + 96) * 4
    assert arranged.nbytes == other.nbytes + extra


def test_a_checkpoint_is_arranged_as_it_is():
    """Codes are given, with gate and up interleaved."""
    w13 = random_codes(2, 64, 32), random_codes(2, 64, 2, low=100, high=130)
    w2 = random_codes(2, 64, 16), random_codes(2, 64, 1, low=100, high=130)
    both = (CheckpointWeight(data, scales) for data, scales in (w13, w2))
    packed = pack_quantised(*both, "mxfp4", order="alternating")
    gate_up = values(arrange(packed).w13)[0]
    assert torch.equal(gate_up, unpack(packed)[0][:, interleaved_rows(32, 8)])


def random_codes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8)


def test_what_cannot_be_arranged():
    w13, w2 = torch.randn(2, 128, 64), torch.randn(2, 64, 64)
    with pytest.raises(NotImplementedError, match="weights in mxfp8 with bf16: one of"):
        arrange(pack(w13, w2, "mxfp8"))
    with pytest.raises(TypeError, match="experts is Tensor, expected PackedExperts"):
        arrange(w13)


def test_elements_are_those_of_the_format():
    """The decoder itself maps a code's bits to 2^-126 of its value."""
    code = torch.arange(16)
    bits = (code & 7) << 6 | code >> 3 << 15
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    assert torch.equal(numbers(bits) * 2.0**126, torch.cat((table, -table)))
    assert FORMATS["nvfp4"].element == FORMATS["mxfp4"].element == "e2m1"
