"""Many tokens in fp16 or bf16 times the weights on Hopper, in the emulator, under its checker."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernelkit.call.launch import emulation
from kernelkit.numerics.tolerance import compare_output
from lab.problems.grouped_gemm import checked
from ptxemu import Options
from q8_0 import Q8Linear, reference
from q8_0.blocks import INTERLEAVED, LAYOUTS, SOA
from q8_0.choose import many_tokens
from q8_0.config import INTEGERS, MOST_TOKENS, NUMBERS
from q8_0.numbers.choose import Sizes, cycles_of, fastest, group_of, items_of, shapes
from q8_0.numbers.config import NumbersConfig
from q8_0.numbers.launch import NUMBER_PRODUCT, product_of_numbers
from q8_0.numbers.plan import make_plan
from q8_0.product.launch import product
from q8_0.weights import empty
from tests.q8_0.cases import DTYPES, Matrix, same
from tests.support.hostile.calls import freed, hostile, refused

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
ARCH = "sm_90a"
HOPPER = {"arch": ARCH}


def tile(tokens: int, pair: bool = False, split: int = 1) -> dict:
    return {"tile_tokens": tokens, "pair": pair, "split": split}


def check(case: Matrix, tokens: int, dtype="fp16", out=None, bias=None, **options) -> torch.Tensor:
    """Compare both layouts with each other, bit for bit, and with fp64 within the tolerance."""
    both, x = case.both(), case.numbers(tokens, dtype)
    out_dtype = DTYPES[out or dtype]
    with checked():
        found = {
            layout: product_of_numbers(weights, x, bias, out_dtype=out_dtype, arch=ARCH, **options)
            for layout, weights in both.items()
        }
    assert same(found[SOA], found[INTERLEAVED])
    exact = reference.matvec(both[SOA], x, bias)
    wanted = reference.product_of_numbers(both[SOA], x, out_dtype, bias)
    report = compare_output(found[SOA], exact, wanted, out_dtype)
    assert report.ok, str(report)
    return found[SOA]


# (matrix, tokens, dtype of x, of the result, tile): ends of K, rows and tokens within a tile;
# blocks that begin anywhere, and aligned ones; several tiles of a CTA; sums over clusters.
CASES = [
    (Matrix(1, 32), 1, "fp16", "fp16", tile(32)),
    (Matrix(136, 96), 40, "bf16", "fp32", tile(32)),
    (Matrix(130, 288), 33, "bf16", "bf16", tile(32, pair=True)),
    (Matrix(136, 512, place="dense"), 70, "fp16", "fp16", tile(64)),
    (Matrix(264, 1024, place="dense"), 40, "bf16", "fp16", tile(32, pair=True)),
    (Matrix(264, 1056), 70, "fp16", "bf16", tile(64, split=2)),
    (Matrix(200, 1024, place="dense"), 33, "bf16", "bf16", tile(64, pair=True, split=2)),
    (Matrix(128, 2048, place="dense"), 100, "fp16", "fp32", tile(128, split=8)),
    (Matrix(128, 1664, place="dense"), 125, "bf16", "bf16", tile(128, split=6)),
    (Matrix(256, 768, place="dense"), 60, "fp16", "fp16", tile(64, pair=True, split=3)),
    (Matrix(264, 256, place="dense"), 200, "fp16", "fp16", tile(192, pair=True)),
    (Matrix(392, 320, place="dense"), 600, "fp16", "fp16", tile(256, pair=True)),
    (Matrix(129, 256), 257, "bf16", "bf16", tile(256)),
]


@pytest.mark.parametrize(("case", "tokens", "dtype", "out", "options"), CASES)
def test_results(case, tokens, dtype, out, options):
    check(case, tokens, dtype, out, **options)


def test_chosen_tiles():
    """Without a wish the sizes decide."""
    check(Matrix(40, 160, place="dense"), 17, "fp16")


@pytest.mark.parametrize("out", ["bf16", "fp32"])
def test_a_bias(out):
    case = Matrix(24, 64)
    check(case, 20, "bf16", out, bias=torch.randn(24).to(DTYPES[out]), **tile(32))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_each_weight_is_rounded_once(dtype):
    """Rows of a unit matrix as tokens: results are the weights, rounded as `dequantise` rounds
    them, of every quant and of scales with few bits."""
    quants = torch.arange(-128, 128, dtype=torch.int8).repeat(32, 1)
    bits = torch.randint(1, 0x7800, (32, 8), generator=torch.Generator().manual_seed(1))
    bits[:4] = torch.tensor([0x0001, 0x03FF, 0x0400, 0x3C00])[:, None]
    scales = bits.short().view(torch.float16)
    if dtype == "fp16":
        scales = scales.clamp(max=500.0)
    scales[1::2] = -scales[1::2]
    x = torch.eye(256).to(DTYPES[dtype])
    for layout in LAYOUTS:
        weights = reference.packed(quants, scales, layout)
        y = product_of_numbers(weights, x, arch=ARCH, **tile(64))
        assert torch.equal(y, reference.dequantise(weights, DTYPES[dtype]).T)


def test_a_weight_beyond_fp16_is_an_infinity():
    """A weight above 65504 is one in fp16 alone, and the other rows have none."""
    quants = torch.full((2, 32), 127, dtype=torch.int8)
    weights = reference.packed(quants, torch.tensor([[600.0], [500.0]]).half(), SOA)
    x = torch.ones(17, 32)
    y = product_of_numbers(weights, x.half(), out_dtype=torch.float32, arch=ARCH)
    assert y[:, 0].isinf().all()
    assert (y[:, 1] == 32 * 63500 + 32 * (63488 - 63500)).all()
    y = product_of_numbers(weights, x.bfloat16(), out_dtype=torch.float32, arch=ARCH)
    assert y.isfinite().all()


def test_scales_that_are_none():
    """Rows with infinite or NaN scales have results that are none; the others are right."""
    case = Matrix(9, 64, calm=False)
    x = case.numbers(17, "fp16")
    for weights in case.both().values():
        y = product_of_numbers(weights, x, arch=ARCH, out_dtype=torch.float32)
        _, scales = reference.unpacked(weights)
        held = scales.isfinite().all(1) & (scales.abs() < 500).all(1)
        assert y[:, held].isfinite().all()
        assert not y[:, ~scales.isfinite().all(1)].isfinite().any()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_error_is_below_that_of_int8(dtype):
    """Over normal weights and activations, compared with fp64."""
    generator = torch.Generator().manual_seed(3)
    weights = reference.rounded(torch.randn(64, 512, generator=generator) * 0.02, SOA)
    x = torch.randn(24, 512, generator=generator).to(DTYPES[dtype])
    exact = reference.matvec(weights, x)
    ours = product_of_numbers(weights, x, out_dtype=torch.float32, arch=ARCH).double() - exact
    integers = product(weights, reference.quantise(x), arch=ARCH).double() - exact
    assert ours.norm() < integers.norm() / 3
    assert ours.abs().max() < integers.abs().max() / 2


@pytest.mark.parametrize("options", [tile(32, pair=True), tile(64, pair=True, split=2)])
def test_adversarial_schedule(options):
    """Any order of the warps and CTAs gives the same result."""
    case = Matrix(264, 1024, place="dense")
    weights, x = case.both()[SOA], case.numbers(70, "fp16")
    with checked():
        y = product_of_numbers(weights, x, arch=ARCH, **options)
    with checked(Options("adversarial", 1, check=True, limit=600.0)):
        assert same(product_of_numbers(weights, x, arch=ARCH, **options), y)


@pytest.mark.parametrize("columns", [27, 32])
def test_out(columns):
    """Results are written in place; memory around them stays unchanged."""
    case = Matrix(24, 64)
    x = case.numbers(20, "bf16")
    wide = torch.full((20, columns), 7.0, dtype=torch.bfloat16)
    out = wide[:, 1:25] if columns == 27 else wide[:, :24]
    for weights in case.both().values():
        with checked():
            assert product_of_numbers(weights, x, out=out, arch=ARCH) is out
        assert same(out.contiguous(), product_of_numbers(weights, x, arch=ARCH))
        beside = [0, 25, 26] if columns == 27 else [*range(24, 32)]
        assert (wide[:, beside] == 7.0).all()


def test_no_tokens(no_compile):
    for weights in Matrix(3, 64).both().values():
        x = torch.empty(0, 64, dtype=torch.bfloat16)
        assert product_of_numbers(weights, x, arch=ARCH).shape == (0, 3)


# ---- the layer


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_multiplies_numbers_on_hopper(layout, monkeypatch):
    """More tokens than share a read go to this product, unless Q8_1 is asked for."""
    case = Matrix(40, 96, place="dense")
    weights, x = case.both()[layout], case.numbers(MOST_TOKENS + 1, "fp16")
    bias = torch.arange(40).half()
    y = Q8Linear(weights, bias)(x, arch=ARCH)
    assert same(y, product_of_numbers(weights, x, bias, arch=ARCH))
    integers = Q8Linear(weights, bias, activations=INTEGERS)(x, arch=ARCH)
    wanted = reference.product(weights, reference.quantise(x), torch.float16, bias)
    assert same(integers, wanted)
    assert same(Q8Linear(weights, bias)(x, arch="sm_89"), wanted)


def test_who_multiplies_many_tokens():
    for dtype in ("bf16", "fp16"):
        assert many_tokens(NUMBERS, dtype, "sm_90a") == NUMBERS
    for given in ((INTEGERS, "bf16", "sm_90a"), (NUMBERS, "fp32", "sm_90a"),
                  (NUMBERS, "bf16", "sm_100a"), (NUMBERS, "fp16", "sm_89")):  # fmt: skip
        assert many_tokens(*given) == INTEGERS


# ---- configs


def test_every_shape_has_a_plan():
    """All shapes that are chosen from fit, in both layouts, for results of 16 and 32 bits."""
    found = {shape for tokens in (17, 33, 100, 300, 5000) for rows, cols in ((64, 64), (8192, 8192))
             for shape in shapes(Sizes(tokens, rows, cols))}  # fmt: skip
    assert len(found) > 8
    for tokens, pair, split in found:
        for layout in LAYOUTS:
            for out in ("fp16", "fp32"):
                plan = make_plan(NumbersConfig(layout, "fp16", out, tokens, pair, split))
                assert plan.stages[0] >= 4


def h200(ctas: int) -> int:
    """Clusters that an H200 runs at the same time."""
    return {1: 132, 2: 66, 3: 43, 4: 30, 6: 21, 8: 15}[ctas]


def test_what_is_chosen():
    """Pairs with the widest tiles where these fill the GPU; sums over clusters where few tiles
    do not, of clusters that run at the same time."""
    assert fastest(Sizes(2048, 8192, 2048), h200) == (256, True, 1)
    assert fastest(Sizes(2048, 2048, 8192), h200) == (256, True, 1)
    assert fastest(Sizes(2048, 2880, 2880), h200) == (192, True, 1)
    assert fastest(Sizes(300, 4096, 4096), h200) == (96, True, 1)
    assert fastest(Sizes(128, 8192, 2048), h200) == (128, False, 2)
    assert fastest(Sizes(128, 2048, 8192), h200) == (128, False, 6)
    assert fastest(Sizes(17, 64, 64), h200) == (32, False, 1)


def test_the_model_counts_waves():
    sizes = Sizes(2048, 8192, 2048)
    assert items_of(sizes, (256, True, 1)) == 256
    twice = cycles_of(sizes, (256, True, 1), lambda ctas: 264 // ctas)
    assert twice < cycles_of(sizes, (256, True, 1), h200)
    assert group_of(2048, 256) == 8
    assert group_of(9 * 256, 256) == 5


def test_configs_that_do_not_fit():
    plain = NumbersConfig(SOA, "fp16", "fp16")
    for wrong, words in (
        ({"dtype": "fp32"}, "dtype 'fp32'"),
        ({"tile_tokens": 80}, "tile_tokens 80"),
        ({"split": 5}, "split 5"),
        ({"split": 2}, "from 16 to 128 tokens"),
        ({"split": 6, "tile_tokens": 32, "pair": False}, "from 48 to 128 tokens"),
        ({"split": 8, "tile_tokens": 128}, "8 CTAs at most"),
    ):
        refused(lambda wrong=wrong: make_plan(replace(plain, **wrong)), words)


# ---- refusals

PLACE = Matrix(8, 64, place="dense").both()
ARRAYS = PLACE[SOA]
X = torch.ones(17, 64).half()
OUT = torch.empty(17, 8).half()


def times(weights=ARRAYS, x=X, **options):
    return lambda: product_of_numbers(weights, x, **{"arch": ARCH, **options})


CALLS = [
    hostile(times(ARRAYS.data), "weights is"),
    hostile(times(x=reference.quantise(X)), "x is Activations"),
    hostile(times(x=X.float()), "x is torch.float32"),
    hostile(times(x=X[0]), "x has shape"),
    hostile(times(x=X[:, :32]), "x has 32 columns, the weights are 8 x 64"),
    hostile(times(x=torch.ones(17, 65).half()[:, 1:]), "x starts at address"),
    hostile(times(x=freed(X)), "x reaches to byte"),
    hostile(times(x=X.to("meta")), "different devices"),
    hostile(times(out_dtype=torch.float64), "out_dtype is torch.float64"),
    hostile(times(out=OUT.float(), out_dtype=torch.float16), "out is torch.float32"),
    hostile(times(out=OUT[:2]), "out is torch.float16"),
    hostile(times(bias=torch.ones(8)), "bias is torch.float32"),
    hostile(times(bias=torch.ones(7).half()), r"bias is torch.float16 \(7,\)"),
    hostile(times(tile_tokens=80), "tile_tokens 80"),
    hostile(times(split=16), "split 16"),
    hostile(times(arch="sm_100a"), "arch 'sm_100a': this kernel accepts sm_90a; on other GPUs"),
    hostile(times(backend="cuda"), "backend 'cuda' needs CUDA tensors"),
]


@pytest.mark.parametrize(("call", "words"), CALLS)
def test_refused(call, words, no_compile):
    refused(call, words)


def test_too_many_columns(no_compile):
    cols = (1 << 22) + 32
    refused(times(empty(1, cols, SOA), torch.empty(1, cols).half()), "4194336 columns, limit")


def test_the_operator_is_what_torch_thinks():
    """Schema and fake registration, with a nested handle, a bias and `out`."""
    weights, x = PLACE[SOA], X
    options = {"weights_rows": 8, "weights_cols": 64, "weights_layout": SOA}
    options |= {"out_dtype": torch.float16, "arch": ARCH}
    utilities = ("test_schema", "test_faketensor")
    torch.library.opcheck(NUMBER_PRODUCT.default, (weights.data, x), options, test_utils=utilities)


def test_options_of_a_context():
    """The context sets the emulated architecture, and `Q8Linear` follows it."""
    with emulation(arch=ARCH) as active:
        Q8Linear(ARRAYS)(X)
    assert len(active.reports) == 1
