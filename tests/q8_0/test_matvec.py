"""Few tokens times the weights in the emulator, under its checker: equal bits in both layouts, and
within the tolerance of fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernelkit.numerics.tolerance import compare_output
from lab.problems.grouped_gemm import checked
from q8_0 import matvec, reference
from q8_0.activations import Activations
from q8_0.blocks import BLOCK
from q8_0.choose import batch_config, matvec_config, product_config
from q8_0.config import MOST_TOKENS, PIECE, RESIDENT_WARPS, BatchConfig
from q8_0.launch import MATVEC
from q8_0.weights import Weights
from tests.q8_0.cases import DTYPES, Matrix, same

ARCHS = ("sm_100a", "sm_90a", "sm_89", "sm_120a")
KINDS = (*DTYPES, "q8_1")
pytestmark = pytest.mark.usefixtures("poisoned_outputs")


def given(case: Matrix, kind: str, tokens: int) -> torch.Tensor | Activations:
    return case.activations(tokens) if kind == "q8_1" else case.numbers(tokens, kind)


def products(case: Matrix, x, bias=None, **options) -> list[torch.Tensor]:
    """Return the products for both layouts."""
    with checked():
        return [matvec(weights, x, bias, **options) for weights in case.both().values()]


def rounded_product(
    weights: Weights, x: torch.Tensor | Activations, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The product, fp32 [tokens, rows], rounded like the kernel's: a sum of each 16 columns, times
    the scale, and their sum, all in fp32 and in order."""
    quants, scales = reference.unpacked(weights)
    q = quants.float().reshape(weights.rows, -1, PIECE)
    d = scales.float().repeat_interleave(BLOCK // PIECE, 1)
    source = x.quants if isinstance(x, Activations) else x
    pieces = source.float().reshape(len(source), -1, PIECE)
    total = torch.zeros(len(source), weights.rows, device=source.device)
    for piece in range(q.shape[1]):
        inner = torch.zeros_like(total)
        for column in range(PIECE):
            inner = inner + pieces[:, None, piece, column] * q[None, :, piece, column]
        factor = d[None, :, piece]
        if isinstance(x, Activations):
            factor = factor * x.scales.float()[:, piece // (BLOCK // PIECE), None]
        total = total + inner * factor
    return total if bias is None else total + bias.float()


def check(case: Matrix, kind: str, tokens: int, out: str = "fp32", **options) -> None:
    x = given(case, kind, tokens)
    one, other = products(case, x, out_dtype=DTYPES[out], **options)
    assert same(one, other), f"{kind}, {tokens} tokens: the layouts differ"
    weights, bias = case.both()["soa"], options.get("bias")
    exact = reference.matvec(weights, x, bias)
    rounded = rounded_product(weights, x, bias)
    report = compare_output(one, exact, rounded.to(one.dtype), one.dtype)
    assert report.ok, str(report)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", KINDS)
def test_one_token(kind, arch):
    check(Matrix(5, 32 * 37), kind, 1, arch=arch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [2, 3, 5, 16])
def test_tokens_share_a_read(tokens, kind):
    check(Matrix(6, 32 * 19), kind, tokens, arch="sm_90a")


@pytest.mark.parametrize("case", [Matrix(1, 32), Matrix(2, 32 * 3), Matrix(9, 32 * 16)], ids=str)
def test_odd_sizes(case):
    check(case, "bf16", 1)
    check(case, "q8_1", 3)


@pytest.mark.parametrize("out", DTYPES)
def test_results_and_biases(out):
    case = Matrix(5, 96)
    bias = torch.randn(case.rows).to(DTYPES[out])
    check(case, "fp16", 2, out, bias=bias)
    check(case, "q8_1", 1, out, bias=bias)


@pytest.mark.parametrize(("rows", "splits"), [(1, 1), (1, 8), (2, 2), (4, 1), (4, 4)])
def test_every_division_of_work(rows, splits, monkeypatch):
    """The sums of rows per warp, and of warps that share columns, are in other places."""

    def config(*options, **sizes):
        found = matvec_config(*options, **sizes)
        return replace(found, rows=rows, splits=splits, warps=max(4, splits))

    monkeypatch.setattr("q8_0.launch.product_config", config)
    check(Matrix(11, 32 * 66), "bf16", 3)


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("kind", ["fp16", "q8_1"])
def test_every_division_of_work_on_tensor_cores(kind, splits, monkeypatch):
    """The last tile of 16 rows has one row; no number of warps divides the blocks."""

    def config(*options, **sizes):
        return replace(batch_config(*options, **sizes), splits=splits, warps=max(4, splits))

    monkeypatch.setattr("q8_0.launch.product_config", config)
    check(Matrix(33, 32 * 35), kind, 9)


def test_numbers_of_16_bits_are_exact():
    """Every int8 times the largest 8-bit number: bf16 and fp16 represent weights exactly."""
    quants = torch.arange(-128, 128).char().view(8, 32)
    weights = reference.packed(quants, torch.ones(8, 1).half(), "soa")
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.eye(16, 32).to(dtype) * 255
        found = [matvec(weights, part, out_dtype=torch.float32) for part in (x, x[:2], x[:1])]
        exact = (quants.float() * 255).T[:16]
        assert torch.equal(found[0], exact)
        assert torch.equal(found[1], exact[:2])
        assert torch.equal(found[2], exact[:1])


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_agree_on_odd_scales(kind):
    """Scales include zeros, infinities and NaN: the bits are the same, and NaN is where the
    definition has it."""
    case = Matrix(40, 32 * 4, calm=False)
    x = given(case, kind, 2)
    one, other = products(case, x, out_dtype=torch.float32)
    assert same(one, other)
    exact = reference.matvec(case.both()["soa"], x)
    assert not exact.isfinite().all()
    assert torch.equal(one.isfinite(), exact.isfinite())


def test_activations_that_are_no_numbers():
    """Such a number affects its token alone."""
    case = Matrix(6, 64)
    x = case.numbers(3, "bf16")
    x[1, 40] = torch.nan
    one, other = products(case, x)
    assert same(one, other)
    assert one.isnan().any(1).tolist() == [False, True, False]
    made = reference.quantise(x)
    one, other = products(case, made)
    assert same(one, other)
    assert one.isnan().any(1).tolist() == [False, True, False]


def test_inner_sums_are_exact():
    """-128 x -127 everywhere, with scales of 1, give an integer in any order."""
    quants = torch.full((2, 1024), -128, dtype=torch.int8)
    weights = reference.packed(quants, torch.ones(2, 32).half(), "soa")
    x = Activations(torch.full((1, 1024), -127, dtype=torch.int8), torch.ones(1, 32).half())
    assert matvec(weights, x).tolist() == [[128 * 127 * 1024.0] * 2]


def test_configs_fill_the_gpu():
    """Down, up and qkv of a layer have as many warps as fit all SMs at once, or half of these,
    unless the rows alone make more; every CTA has whole rows."""
    for rows, cols in ((8192, 2048), (2048, 8192), (6144, 2048), (1, 32), (128256, 4096)):
        for tokens, dtype in ((1, "bf16"), (2, "bf16"), (16, "q8_1"), (16, "fp32")):
            config = product_config(
                "soa", dtype, "bf16", sizes=(tokens, rows, cols), bias=False, sms=132
            )
            assert config.cta_rows * config.splits == config.rows * config.warps
            assert config.tokens >= tokens
            assert isinstance(config, BatchConfig) == (tokens > 1 and dtype != "fp32")
            warps = -(-rows // config.rows) * config.splits
            fit = RESIDENT_WARPS * 132
            assert warps > fit // 2 or rows == 1 or isinstance(config, BatchConfig)
            assert warps <= fit or config.splits == 1
    with pytest.raises(ValueError, match="17 tokens: from 1 to 16"):
        matvec_config("soa", "bf16", "bf16", sizes=(17, 8, 32), bias=False, sms=1)
    assert MOST_TOKENS == 16


def test_no_tokens():
    for weights in Matrix(3, 64).both().values():
        assert matvec(weights, torch.empty(0, 64)).shape == (0, 3)


def test_the_operator_is_what_torch_thinks():
    """Schema, fake and autograd registration of the operator with a nested handle."""
    weights = Matrix(3, 64, place="dense").both()["soa"]
    x = torch.randn(2, 64)
    torch.library.opcheck(
        MATVEC.default,
        (weights.data, x),
        {"weights_rows": 3, "weights_cols": 64, "weights_layout": "soa", "out_dtype": x.dtype},
        test_utils=("test_schema", "test_faketensor"),
    )
