"""kernelkit.merge.api in the emulator, and natively with `--hw`: numbers, layouts, empty,
refusals."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ptxemu
from kernelkit.call.launch import emulation
from kernelkit.compile import compiler as kernel_compile
from kernelkit.device.param_table import ParamTable
from kernelkit.merge import plan as merge_plan
from kernelkit.merge.api import merge
from kernelkit.merge.launch import KERNEL
from tests.kernelkit.merge_cases import DTYPES, Case, as_argument, build, check

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

CASES = [
    Case(("bf16",), (2, 3, 5, 64)),
    Case(("bf16",) * 2, (2, 3, 5, 64)),
    Case(("bf16",) * 2, (1, 11, 1, 64), level=3e4, spread=300.0),
    Case(("bf16",) * 5, (1, 1, 3, 64)),
    Case(("bf16",) * 40, (1, 3, 2, 64)),
    Case(("fp32*", "bf16", "fp32*", "fp16*", "bf16", "fp32"), (2, 2, 3, 64), sinks=True),
    Case(("fp32*",) * 3, (1, 2, 2, 512), "fp32"),
    Case(("fp16", "fp16*"), (1, 19, 3, 96), "fp16", sinks=True, packed=True),
    Case(("bf16",) * 3, (2, 9, 2, 72), stacked=True),
    Case(("bf16*",) * 19, (1, 2, 3, 128), stacked=True, packed=True, sinks=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_emulated(case):
    check(case)


def test_adversarial_schedule():
    """The lanes of a CTA exchange data in shared memory: any order of its warps gives the same
    result."""
    with emulation(ptxemu.Options(policy="adversarial")):
        check(CASES[4])


def test_stacks_of_any_size_share_a_kernel(monkeypatch):
    shape = (1, 2, 1, 64)
    check(Case(("bf16",) * 6, shape, stacked=True))
    monkeypatch.setattr(kernel_compile, "_make", lambda *_: pytest.fail("compiled again"))
    for count in (5, 9, 301):
        check(Case(("bf16",) * count, shape, stacked=True))


def part(shape=(1, 2, 3, 64), lse=0.0, fill=1.0, dtype=torch.bfloat16):
    batch, positions, heads, _ = shape
    return torch.full(shape, fill, dtype=dtype), torch.full((batch, heads, positions), lse)


def assert_constant(result, o, lse):
    """Compare bit for bit; `lse` broadcasts over [B, H, S]."""
    assert torch.equal(result[0], torch.full_like(result[0], o))
    assert torch.equal(result[1], torch.as_tensor(lse).expand_as(result[1]))


def test_rows_without_keys():
    """Results are exactly 0 and -inf, or the sink; +inf counts as -inf."""
    parts = [part(lse=-math.inf, fill=math.nan), part(lse=math.inf, fill=math.nan)]
    assert_constant(merge(parts), 0.0, -math.inf)
    sinks = torch.tensor([2.5, -1e30, -math.inf])
    assert_constant(merge(parts, sinks=sinks), 0.0, sinks[None, :, None])


def test_far_apart():
    """Weights underflow, at large and at small LSE; the larger part is returned bit for bit."""
    for high, low in ((3e38, -3e38), (1e5, 9e4), (-9e4, -1e5)):
        parts = [part(lse=low, fill=7.0), part(lse=high, fill=3.0)]
        for order in (parts, parts[::-1]):
            assert_constant(merge(order), 3.0, high)


def test_a_sink_takes_its_share():
    o, lse = merge([part(lse=1.0, fill=2.0)], sinks=torch.full((3,), 1.0), out_dtype=torch.float32)
    torch.testing.assert_close(o, torch.full_like(o, 1.0))
    torch.testing.assert_close(lse, torch.full_like(lse, 1.0 + math.log(2.0)))


def test_nothing_to_merge_launches_nothing(no_compile):
    sinks = torch.tensor([1.0, 2.0, 3.0])
    for shape in ((0, 2, 3, 64), (2, 0, 3, 64)):
        o, lse = merge([part(shape), part(shape)])
        assert o.shape == shape
        assert lse.shape == (shape[0], 3, shape[1])
    empty = (torch.empty(0, 4, 3, 64), torch.empty(0, 3, 4))
    assert_constant(merge(empty, sinks=sinks), 0.0, sinks[:, None])
    assert_constant(merge(empty), 0.0, -math.inf)


def test_dtype_of_the_result():
    """The default is the dtype of the first normalised part, else of the first part."""
    raw = (*part(dtype=torch.float32), torch.zeros(1, 3, 2))
    assert merge([raw, part()], return_lse=False).dtype == torch.bfloat16
    assert merge([raw], return_lse=False).dtype == torch.float32


REFUSED = [
    ([], {}, ValueError, "0 parts"),
    ([part()[:1]], {}, ValueError, r"parts\[0\] has 1 tensors"),
    ([(part()[0], None)], {}, TypeError, r"parts\[0\] LSE is NoneType"),
    ([part((1, 2, 3, 520))], {}, NotImplementedError, "head_dim 520"),
    ([part((1, 2, 3, 60))], {}, NotImplementedError, "head_dim 60"),
    ([part(), part((1, 2, 4, 64))], {}, ValueError, r"parts\[1\] O has shape"),
    ([(part()[0], part()[1].mT)], {}, ValueError, r"parts\[0\] LSE has shape \(1, 2, 3\)"),
    ([part(dtype=torch.float64)], {}, NotImplementedError, "O is torch.float64"),
    ([(part()[0], part()[1].double())], {}, NotImplementedError, "LSE is torch.float64"),
    ([(part()[0][:, :1].expand(1, 2, 3, 64), part()[1])], {}, ValueError, "stride of 0 bytes"),
    ([(part()[0].mT.contiguous().mT, part()[1])], {}, ValueError, "last stride 3"),
    ([part()] * 257, {}, ValueError, "257 parts, limit 256"),
    ([part()], {"sinks": 1.0}, TypeError, "sinks is float"),
    ([part()], {"sinks": torch.zeros(4)}, ValueError, r"sinks is torch.float32 \(4,\)"),
    ([part()], {"out_dtype": torch.float64}, NotImplementedError, "out_dtype torch.float64"),
    ([part()], {"backend": "cuda"}, ValueError, "needs CUDA tensors"),
    ([part()], {"arch": "sm_75"}, NotImplementedError, "arch 'sm_75'"),
    ([(part()[0][0, 0, 0], part()[1])], {}, ValueError, "rank 1; expected"),
    ([(part()[0].requires_grad_(), part()[1])], {}, NotImplementedError, "requires grad"),
]


@pytest.mark.parametrize(("parts", "options", "error", "words"), REFUSED)
def test_refusals(no_compile, parts, options, error, words):
    with pytest.raises(error, match=words):
        merge(parts, **options)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a", "sm_89"])
def test_compiles_for_other_gpus(arch):
    """Apart from statistics, all loads and stores have 16 bytes; the table stays in the
    parameters."""
    config = merge_plan.MergeConfig(128, ("bf16",), "bf16", False, False, False, 4, 1)
    ptx = kernel_compile.compile_once(config, arch, KERNEL).ptx
    widths = {line.split()[0] for line in ptx.splitlines() if ".global" in line}
    assert f".target {arch}" in ptx
    assert widths == {"ld.global.v4.b32", "ld.global.b32", "st.global.v4.b32", "st.global.b32"}
    assert ".local" not in ptx


def test_parameters_have_a_limit():
    ParamTable([range(12)] * 256, 256)
    with pytest.raises(ValueError, match="32768 bytes, limit 32764"):
        ParamTable([range(16)], 256)


SIZES = st.integers(1, 100)


@given(st.integers(0, 8), SIZES, SIZES)
def test_tiles_cover_rows(shift, positions, heads):
    """A tile has its number of rows, and no more heads or idle positions than necessary."""
    rows = 1 << shift
    tile = merge_plan.tile_positions(rows, positions, heads)
    assert rows % tile == 0
    assert rows // tile <= merge_plan.ceil_power_of_two(heads)
    if heads >= rows:
        assert tile < 2 * positions


@given(
    st.integers(1, 64).map(lambda step: 8 * step),
    st.lists(st.sampled_from(sorted(DTYPES)), min_size=1, unique=True),
    st.sampled_from((1, merge_plan.LANES)),
)
def test_threads_share_a_row(head_dim, dtypes, lanes):
    config = merge_plan.MergeConfig(head_dim, tuple(dtypes), "bf16", True, True, False, 4, lanes)
    assert config.columns * config.vectors * config.vector == head_dim
    assert config.rows == merge_plan.floor_power_of_two(config.rows)
    assert config.threads <= 1024


def random_case(seed: int) -> Case:
    """A random problem that `merge` accepts, with many rows."""
    draw = random.Random(seed)
    stacked = draw.random() < 0.4
    count = draw.choice((1, 2, 3, 4, 7, 33, 150))
    names = [name + star for name in DTYPES for star in ("", "*")]
    kinds = draw.choices(draw.sample(names, 1 if stacked or draw.random() < 0.5 else 3), k=count)
    batch, positions = draw.choice(((1, 1), (3, 1), (1, 517), (2, 130), (1, 4000 // count)))
    shape = (batch, positions, draw.randint(1, 20), draw.choice((8, 64, 72, 96, 128, 256, 512)))
    packed, sinks = batch == 1 and draw.random() < 0.5, draw.random() < 0.5
    level = draw.choice((0.0, 1e4))
    out_dtype = draw.choice(sorted(DTYPES))
    return Case(tuple(kinds), shape, out_dtype, sinks, packed, stacked, level, seed=seed)


@pytest.mark.hw
@pytest.mark.parametrize("seed", range(40))
def test_native(seed):
    check(random_case(seed), "cuda")


@pytest.mark.hw
def test_native_is_captured_in_a_graph():
    """The graph is replayed with new contents: nothing was copied from the host."""
    case = Case(("bf16",) * 33, (2, 40, 8, 128))
    parts, _ = build(case, "cuda")
    argument = as_argument(parts, case)
    merge(argument)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = merge(argument)
    fresh = as_argument(build(replace(case, seed=1), "cuda")[0], case)
    for old, new in zip(argument, fresh, strict=True):
        for tensor, contents in zip(old, new, strict=True):
            tensor.copy_(contents)
    graph.replay()
    for got, expected in zip(captured, merge(fresh), strict=True):
        assert torch.equal(got, expected)
