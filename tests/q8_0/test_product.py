"""Many tokens times the weights in the emulator, under its checker: the bits of the definition, in
both layouts, for any end of tiles.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from kernelkit.call.launch import emulation
from kernelkit.compile.arch import ARCHITECTURES
from kernelkit.numerics.tolerance import compare_output
from kernelkit.plan import hw
from lab.problems.grouped_gemm import checked
from ptxemu import Options
from q8_0 import Activations, Weights, reference
from q8_0 import reference as definition
from q8_0.blocks import INTERLEAVED, LAYOUTS, SOA
from q8_0.product.choose import Sizes, choose, group_of
from q8_0.product.config import HALVES, PAIRS, ProductConfig
from q8_0.product.launch import MOST_COLS, PRODUCT, config_for, product
from q8_0.weights import empty
from tests.q8_0.cases import DTYPES, Matrix, same
from tests.support.hostile.calls import freed, hostile, refused

ARCHS = ("sm_100a", "sm_90a", "sm_89", "sm_120a")
pytestmark = pytest.mark.usefixtures("poisoned_outputs", "largest_tiles")


def activations(tokens: int, cols: int, *, calm: bool = True) -> Activations:
    """Quants over all of int8, including -128, which no quantiser here makes; scales like the
    weights'."""
    return Activations(*Matrix(tokens, cols, calm=calm).parts())


def check(case: Matrix, tokens: int, out: str = "fp32", bias=None, **options) -> torch.Tensor:
    """Compare the bits with the definition for both layouts, and with fp64 within the tolerance."""
    both, x, dtype = case.both(), activations(tokens, case.cols, calm=case.calm), DTYPES[out]
    with checked():
        found = [product(weights, x, bias, out_dtype=dtype, **options) for weights in both.values()]
    wanted = reference.product(both[SOA], x, dtype, bias)
    for layout, y in zip(both, found, strict=True):
        assert same(y, wanted), f"{layout}: {(y != wanted).sum()} of {y.numel()} differ"
    if case.calm:
        exact = definition.matvec(both[SOA], x, bias)
        report = compare_output(found[0], exact, wanted, dtype)
        assert report.ok, str(report)
    return found[0]


# (case, tokens): one block of everything; tiles that begin where others end, in rows and in tokens;
# blocks that begin at multiples of 16 bytes, eight at a time.
SIZES = [
    (Matrix(1, 32), 1),
    (Matrix(40, 32 * 5, place="dense"), 17),
    (Matrix(136, 256, place="dense"), 130),
    (Matrix(264, 32 * 16, place="dense"), 33),
    (Matrix(133, 32 * 3), 129),
    (Matrix(8, 32 * 24, place="dense"), 70),
]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("case", "tokens"), SIZES, ids=str)
def test_bits(case, tokens, arch):
    check(case, tokens, arch=arch)


@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("rows", [24, 27])
def test_results(rows, out):
    """Rows of the result are stored by 16-byte vectors, or element by element."""
    check(Matrix(rows, 64), 9, out, arch="sm_90a")


@pytest.mark.parametrize(
    ("case", "tokens", "out"),
    [
        (Matrix(24, 64), 9, "bf16"),
        (Matrix(27, 64), 9, "fp16"),
        (Matrix(136, 256, place="dense"), 130, "fp32"),
    ],
    ids=str,
)
def test_a_bias(case, tokens, out):
    """The bias is added before the sum is rounded, for any tiles, without reading beyond it, at any
    address."""
    bias = hostile_bias(case.rows, DTYPES[out])
    y = check(case, tokens, out, bias, arch="sm_90a")
    operands = case.both()[SOA], activations(tokens, case.cols)
    late = reference.product(*operands, DTYPES[out]) + bias
    assert out == "fp32" or not same(y, late)  # rounded twice


def hostile_bias(rows: int, dtype: torch.dtype) -> torch.Tensor:
    """A bias at an odd address, between NaN, as large as the sums of `activations` with few
    blocks."""
    wide = torch.full((rows + 2,), torch.nan, dtype=dtype)
    wide[1:-1] = torch.randn(rows, generator=torch.Generator().manual_seed(rows)) * 8
    return wide[1:-1]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_86"])
def test_groups_of_tiles(arch, monkeypatch):
    """Tiles of tokens are grouped; the last group has fewer."""
    monkeypatch.setattr("q8_0.product.choose.WIDE_GROUP", 2)
    monkeypatch.setattr("q8_0.product.choose.TWO_CTAS", ((16, 32, 1, 4, 3),))
    monkeypatch.setattr("q8_0.product.choose.ONE_CTA", ((16, 32, 1, 4, 1),))
    assert group_of(16 * 5, 16) == (2, 3)
    check(Matrix(130, 64, place="dense"), 16 * 5, arch=arch)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("place", ["dense", "apart"])
def test_scales_that_are_no_numbers(place, arch):
    """Scales of both include zeros, infinities and NaN: the bits are the same in both layouts, and
    finite exactly where the definition's are."""
    case = Matrix(20, 256, calm=False, place=place)
    y = check(case, 18, arch=arch)
    exact = definition.matvec(case.both()[SOA], activations(18, 256, calm=False))
    assert torch.equal(y.isfinite(), exact.isfinite())
    assert 0 < y.isfinite().sum() < y.numel()


def test_an_infinite_scale_of_a_token():
    """All results of that token are NaN, and no others."""
    case, x = Matrix(9, 64), activations(3, 64)
    x.scales[1, 0] = torch.inf
    for weights in case.both().values():
        y = product(weights, x)
        assert y.isnan().all(1).tolist() == [False, True, False]
        assert y[::2].isfinite().all()


def test_the_largest_sums():
    """-128 x -128 everywhere is 2^19 a block, and -128 x 127 the other extreme."""
    quants = torch.full((2, 96), -128, dtype=torch.int8)
    x = quants.clone()
    x[1] = 127
    ones = torch.ones(2, 3).half()
    for layout in LAYOUTS:
        y = product(definition.packed(quants, ones, layout), Activations(x, ones))
        assert y.tolist() == [[3 * 32 * 128.0 * 128] * 2, [3 * 32 * -128.0 * 127] * 2]


def test_bits_do_not_depend_on_the_tokens():
    """A token has the same bits by itself, in small tiles, and among others, in large tiles."""
    case, x = Matrix(136, 192, place="dense"), activations(140, 192)
    weights = case.both()[SOA]
    many = product(weights, x, arch="sm_90a")
    for token in (0, 77, 139):
        one = Activations(x.quants[token : token + 1].clone(), x.scales[token : token + 1].clone())
        assert same(product(weights, one, arch="sm_90a")[0], many[token])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adversarial_schedule(layout):
    """Any order of the warps gives the same result."""
    case, x = Matrix(40, 32 * 24, place="dense"), activations(40, 32 * 24)
    weights = case.both()[layout]
    with checked(Options("adversarial", 1, check=True, limit=600.0)):
        y = product(weights, x, arch="sm_90a")
    assert same(y, reference.product(weights, x, torch.float32))


@pytest.mark.parametrize("columns", [27, 32])
def test_out(columns):
    """Results are written in place; memory around them stays unchanged."""
    case, x = Matrix(24, 64), activations(5, 64)
    wide = torch.full((5, columns), 7.0, dtype=torch.bfloat16)
    out = wide[:, 1:25] if columns == 27 else wide[:, :24]
    for weights in case.both().values():
        with checked():
            assert product(weights, x, out=out) is out
        assert same(out.contiguous(), reference.product(weights, x, torch.bfloat16))
        beside = [0, 25, 26] if columns == 27 else [*range(24, 32)]
        assert (wide[:, beside] == 7.0).all()


def test_no_tokens(no_compile):
    x = Activations(torch.empty(0, 64, dtype=torch.int8), torch.empty(0, 2).half())
    for weights in Matrix(3, 64).both().values():
        assert product(weights, x, out_dtype=torch.bfloat16).shape == (0, 3)


# ---- configs


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("aligned", [True, False])
def test_what_is_chosen_fits(layout, arch, aligned):
    for tokens in (1, 16, 17, 64, 65, 128, 2048):
        sizes = Sizes(tokens, 8192, 2048)
        config = choose(layout, "bf16", sizes, arch, aligned=aligned, vector=True)
        assert config.smem_bytes <= hw.smem_bytes_per_cta(arch)
        all_of_them = (config.smem_bytes + hw.SMEM_RESERVED_BYTES) * config.ctas_per_sm
        assert all_of_them <= hw.smem_bytes_per_sm(arch)
        assert config.threads * config.ctas_per_sm <= 512
        assert config.tile_tokens < 2 * tokens or config.tile_tokens == 16
        assert config.stages > (HALVES if layout == INTERLEAVED else 1)
        assert config.small == (tokens < config.tile_tokens)


def test_blocks_are_clamped_in_small_tiles_alone():
    """No tile of 128 has few tokens or few rows: its clamped rows would be spilled."""
    for sizes in (Sizes(100, 8192, 2048), Sizes(2048, 100, 2048)):
        for layout, tokens in ((INTERLEAVED, 64), (SOA, 128)):
            config = choose(layout, "bf16", sizes, "sm_90a", aligned=True, vector=True)
            assert config.tile_tokens == tokens


# (tokens, rows) -> tokens of a tile, as measured on an H200 with 1,024 to 14,336 columns.
FASTEST = {(40, 8192): 32, (302, 14336): 64, (69, 2048): 16, (355, 1024): 32, (7446, 4096): 128,
           (4098, 1024): 128, (5171, 1024): 64}  # fmt: skip


def test_tiles_leave_no_sm_without_work(monkeypatch):
    monkeypatch.undo()
    for (tokens, rows), tile in FASTEST.items():
        sizes = Sizes(tokens, rows, 4096)
        config = choose(SOA, "bf16", sizes, "sm_90a", aligned=True, vector=True)
        assert config.tile_tokens == tile, sizes


def test_many_tokens_have_large_tiles():
    config = choose(SOA, "bf16", Sizes(2048, 8192, 2048), "sm_90a", aligned=True, vector=True)
    assert config == ProductConfig(SOA, "bf16", 64, 64, 2, 2, 4, 2)


def test_the_gpu_decides_how_sums_are_added():
    for arch in ARCHITECTURES:
        config = choose(SOA, "bf16", Sizes(2048, 8192, 2048), arch, aligned=True, vector=True)
        pairs = arch in ("sm_100a", "sm_103a")  # architectures with fma.f32x2
        assert (config.adding == PAIRS) == pairs


def test_places_decide_of_the_kernel():
    """Aligned blocks need aligned rows, address and stride."""
    out = torch.empty(4, 8)
    for place, aligned in (("dense", True), ("apart", False)):
        weights = Matrix(8, 256, place=place).both()[INTERLEAVED]
        assert config_for(weights, out, "sm_90a", bias=False).aligned == aligned
    weights = Matrix(8, 128, place="dense").both()[INTERLEAVED]
    assert not config_for(weights, out, "sm_90a", bias=False).aligned
    memory = torch.empty(4, 9)
    assert not config_for(weights, memory[:, :8], "sm_90a", bias=False).vector
    weights = Matrix(9, 256).both()[SOA]
    assert not config_for(weights, memory, "sm_90a", bias=True).vector


# ---- the definition


def test_the_definition_rounds_once():
    """Cases are sums that are half-way between two fp32 numbers in fp64 while the exact one is on
    either side; and random ones."""
    x, y = 14_245_331.0, 603.0  # as many bits as t and d_w have; the product is 2^33 + 1
    rows = [(x, y, 2.0**57), (-x, y, 2.0**57 + 2.0**35), (x, y, 1.0), (3.0, 2.0**-20, 1.0)]
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(2000, 3, generator=generator)
    numbers[:, 1] = numbers[:, 1].half()
    rows += [tuple(row) for row in numbers.tolist()]
    found = reference.fused(*torch.tensor(rows, dtype=torch.float64).T)
    for row, number in zip(rows, found.tolist(), strict=True):
        a, b, c = map(Fraction, row)
        exact = a * b + c
        near = [Fraction(n) for n in _neighbours(number)]
        assert abs(Fraction(number) - exact) <= min(abs(n - exact) for n in near), row


def _neighbours(number: float) -> list[float]:
    """Return the two neighbouring fp32 numbers."""
    one = torch.tensor(number)
    return [torch.nextafter(one, torch.tensor(end)).item() for end in (-torch.inf, torch.inf)]


# ---- refusals

PLACE = Matrix(8, 64, place="dense").both()
BLOCKS, ARRAYS = PLACE[INTERLEAVED], PLACE[SOA]
X = activations(3, 64)
OUT = torch.empty(3, 8)


def times(weights=ARRAYS, x=X, **options):
    return lambda: product(weights, x, **options)


CALLS = [
    hostile(times(ARRAYS.data), "weights is"),
    hostile(times(x=X.quants), "x is"),
    hostile(times(x=activations(3, 96)), "x has 96 columns, the weights are 8 x 64"),
    hostile(times(x=replace(X, quants=freed(X.quants))), "x.quants reaches to byte"),
    hostile(times(replace(ARRAYS, data=freed(ARRAYS.data))), "weights.data reaches to byte"),
    hostile(times(x=Activations(X.quants.to("meta"), X.scales.to("meta"))), "different devices"),
    hostile(times(out_dtype=torch.float64), "out_dtype is torch.float64"),
    hostile(times(out_dtype="bf16"), "out_dtype is 'bf16'"),
    hostile(times(out=OUT.half(), out_dtype=torch.float32), "out is torch.float16"),
    hostile(times(out=OUT[:2]), "out is torch.float32"),
    hostile(times(out=OUT.T.contiguous().T), "out has last stride 3"),
    hostile(times(out=OUT[:1].expand(3, 8)), "elements that share memory"),
    hostile(times(out=OUT.to("meta")), "different devices"),
    hostile(
        times(ARRAYS, out=ARRAYS.data[:96].view(torch.float32).view(3, 8)),
        "out shares memory with weights.data",
    ),
    hostile(times(out=3), "out is int"),
    hostile(times(bias=torch.ones(8).half()), "bias is torch.float16"),
    hostile(times(bias=torch.ones(7)), r"bias is torch.float32 \(7,\)"),
    hostile(times(bias=torch.ones(8, device="meta")), "different devices"),
    hostile(times(bias=[0.0] * 8), "bias is list"),
    hostile(times(bias=OUT[1], out=OUT), "out shares memory with bias"),
    hostile(times(arch="sm_75"), "arch 'sm_75'"),
    hostile(times(backend="cuda"), "backend 'cuda' needs CUDA tensors"),
    hostile(times(backend="gpu"), "backend 'gpu'"),
]


@pytest.mark.parametrize(("call", "words"), CALLS)
def test_refused(call, words, no_compile):
    refused(call, words)


def test_too_many_columns(no_compile):
    """The limit is the kernel's."""
    cols = MOST_COLS + 32
    x = Activations(torch.empty(1, cols, dtype=torch.int8), torch.empty(1, cols // 32).half())
    refused(times(empty(1, cols, SOA), x), "4194336 columns, limit 4194304")


# ---- the operator


def test_the_operator_is_what_torch_thinks():
    """Schema, fake and autograd registration, with a nested handle, a bias and `out`."""
    weights, x = Matrix(3, 64, place="dense").both()[SOA], activations(2, 64)
    options = {"weights_rows": 3, "weights_cols": 64, "weights_layout": SOA}
    options["out_dtype"] = torch.float32
    tensors = weights.data, x.quants, x.scales
    utilities = ("test_schema", "test_faketensor")
    torch.library.opcheck(PRODUCT.default, tensors, options, test_utils=utilities)
    tensors = *tensors, torch.ones(3), torch.empty(2, 3)
    torch.library.opcheck(PRODUCT.written, tensors, options, test_utils=utilities)


def test_compiled():
    """The operator is one node in a graph of torch.compile."""
    weights, x = Matrix(8, 64, place="dense").both()[SOA], activations(3, 64)

    def doubled(data: torch.Tensor, quants: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return product(Weights(data, 8, 64, SOA), Activations(quants, scales)) * 2

    compiled = torch.compile(doubled, backend="eager", fullgraph=True)
    y = compiled(weights.data, x.quants, x.scales)
    assert same(y, reference.product(weights, x, torch.float32) * 2)


def test_options_of_a_context():
    """The context sets the emulated architecture."""
    weights, x = Matrix(8, 64, place="dense").both()[SOA], activations(3, 64)
    with emulation(arch="sm_87") as active:
        product(weights, x)
    assert len(active.reports) == 1
