"""The linear layer: computation, moves, saving and loading; torch.compile; kernels of warmup."""

from __future__ import annotations

import io
import itertools

import pytest
import torch

from kernelkit.compile.compiler import collecting
from q8_0 import Q8Linear, dequantise, matvec, quantise, reference, repack, warmup
from q8_0.blocks import INTERLEAVED, LAYOUTS, SOA
from q8_0.config import MOST_TOKENS
from q8_0.launch import ARCHS
from q8_0.product.launch import product
from q8_0.weights import empty
from tests.q8_0.cases import Matrix
from tests.support.hostile.calls import refused

CASE = Matrix(6, 96, place="dense")


def layer(layout=SOA, bias=True, **options):
    made = torch.arange(CASE.rows).bfloat16() if bias else None
    return Q8Linear(CASE.both()[layout], made, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activations", ["numbers", "q8_1"])
def test_forward(layout, activations):
    made, x = layer(layout, activations=activations), CASE.numbers(6, "bf16").reshape(2, 3, -1)
    y = made(x)
    given = reference.quantise(x.flatten(0, 1)) if activations == "q8_1" else x.flatten(0, 1)
    assert (y.shape, y.dtype) == ((2, 3, CASE.rows), torch.bfloat16)
    exact = reference.matvec(made.weights, given, made.bias).view_as(y)
    assert (y.double() - exact).abs().max() <= exact.abs().max() * 2.0**-8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_tokens_go_to_the_product(layout, monkeypatch):
    """The product is in int8, whatever arithmetic few tokens use, in one launch with the bias."""
    asked = []

    def noted(*args, **options):
        asked.append((args[2] is None, options["out_dtype"]))
        return product(*args, **options)

    monkeypatch.setattr("q8_0.module.product", noted)
    x = CASE.numbers(MOST_TOKENS + 1, "bf16")
    with_bias, without = layer(layout), layer(layout, bias=False)
    exact = reference.matvec(with_bias.weights, reference.quantise(x), with_bias.bias)
    assert (with_bias(x).double() - exact).abs().max() <= exact.abs().max() * 2.0**-8
    assert without(x).dtype == torch.bfloat16
    with_bias(x[:MOST_TOKENS])
    assert asked == [(False, torch.bfloat16), (True, torch.bfloat16)]


def test_dtypes_move_the_bias_alone():
    made = layer().to(torch.float16)
    assert (made.data.dtype, made.bias.dtype) == (torch.uint8, torch.float16)
    assert made(CASE.numbers(1, "fp16")).dtype == torch.float16
    refused(lambda: made(CASE.numbers(1, "bf16")), "bias is torch.float16")


def test_saved_and_loaded():
    made, file = layer(), io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    other = Q8Linear.empty(CASE.cols, CASE.rows, bias=torch.bfloat16)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.data, made.data)
    wrong = Q8Linear.empty(CASE.cols, CASE.rows, layout=INTERLEAVED, bias=torch.bfloat16)
    with pytest.raises(RuntimeError, match="size mismatch for data"):
        wrong.load_state_dict(made.state_dict())
    assert "layout='soa', activations='numbers', bias=True" in repr(made)


@pytest.mark.parametrize("tokens", [2, MOST_TOKENS + 1])
def test_compiled_by_torch(tokens):
    """Either kernel gives one graph without breaks, and the same bits."""
    made, x = layer(), CASE.numbers(tokens, "bf16")
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), made(x))


def test_wrong_arguments():
    weights = CASE.both()[SOA]
    refused(lambda: Q8Linear(weights.data), "weights is Tensor")
    refused(lambda: Q8Linear(weights, torch.ones(5)), r"bias has shape \(5,\), expected \(6,\)")
    refused(lambda: Q8Linear(weights, activations="int4"), "activations 'int4'")


@pytest.mark.parametrize("arch", ARCHS)
def test_warmup_has_every_kernel_of_later_calls(arch, monkeypatch):
    made = []
    monkeypatch.setattr("kernelkit.compile.warm.ready", made.append)
    for layout in LAYOUTS:
        weights = empty(64, 1024, layout)  # on the device 'meta' no operator asks for a kernel
        options = {"dtypes": (torch.bfloat16, torch.float32), "arch": arch, "biases": True}
        options["tokens"] = range(1, 300)
        keys = warmup(weights, **options).keys
        assert made[-len(keys) :] == keys
        with collecting() as asked:
            repack(weights, LAYOUTS[layout == INTERLEAVED], arch=arch)
            for dtype in options["dtypes"]:
                dequantise(weights, dtype, arch=arch)
                bias = torch.empty(64, dtype=dtype)
                for tokens in (1, 2, 7, 16):
                    x = torch.empty(tokens, 1024, dtype=dtype)
                    matvec(weights, x, arch=arch)
                    matvec(weights, x, bias, arch=arch)
                    rounded = quantise(x, arch=arch)
                    matvec(weights, rounded, arch=arch)
                    matvec(weights, rounded, bias, out_dtype=dtype, arch=arch)
                for made_of, tokens in itertools.product((None, bias), (17, 64, 130, 299)):
                    x = torch.empty(tokens, 1024, dtype=dtype)
                    Q8Linear(weights, made_of)(x, arch=arch)
        assert len(set(asked)) > 20
        assert set(asked) <= set(keys)
    refused(lambda: warmup(weights, dtypes=(torch.int8,), arch=arch), "dtypes has torch.int8")
    refused(lambda: warmup(weights, tokens=(-1,), arch=arch), r"tokens\[0\] -1: from 0 to ")
    refused(lambda: warmup(weights.data, arch=arch), "weights is Tensor")
