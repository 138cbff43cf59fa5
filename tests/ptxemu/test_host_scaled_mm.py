"""torch's block-scaled products on the CPU, compared with float64 products of decoded operands."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.nn.functional import ScalingType, SwizzleType, scaled_grouped_mm

from lab.silicon.conformance.exact_arithmetic import values_of
from ptxemu.host.scaled_mm import scaled_mm, substitute
from ptxemu.host.torch_shim import torch_without_gpu
from ptxemu.host.triton_blas import CublasLt

# name: elements, scale factors, block
FORMATS = {
    "mxfp8": ("e4m3", "ue8m0", 32),
    "mxfp4": ("e2m1", "ue8m0", 32),
    "nvfp4": ("e2m1", "e4m3", 16),
}
RECIPES = {16: ScalingType.BlockWise1x16, 32: ScalingType.BlockWise1x32}
SWIZZLED = SwizzleType.SWIZZLE_32_4_4


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with torch_without_gpu():
        yield


def operand(name: str, rows: int, k: int, seed: int) -> tuple[torch.Tensor, np.ndarray]:
    """Return (rows, k) in torch's format, K last, and its values."""
    rng = np.random.default_rng(seed)
    if FORMATS[name][0] == "e4m3":
        codes = rng.integers(0x30, 0x48, (rows, k), dtype=np.uint8)
        return torch.from_numpy(codes).view(torch.float8_e4m3fn), values_of("e4m3", codes)
    codes = rng.integers(0, 16, (rows, k), dtype=np.uint8)
    packed = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
    return packed.view(torch.float4_e2m1fn_x2), values_of("e2m1", codes)


def factors(name: str, rows: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Scale factors: the bytes in the 128x4 layout, and the values (rows, k)."""
    _, fmt, block = FORMATS[name]
    blocks = -(-k // block)
    low, high = (0x28, 0x48) if fmt == "e4m3" else (124, 130)
    codes = np.random.default_rng(seed + 1).integers(low, high, (rows, blocks), dtype=np.uint8)
    stored = np.full((-(-rows // 128), -(-blocks // 4), 32, 4, 4), 0x7E, np.uint8)
    for m, b in np.ndindex(rows, blocks):
        stored[m // 128, b // 4, m % 32, m % 128 // 32, b % 4] = codes[m, b]
    return stored.ravel(), values_of(fmt, codes).repeat(block, 1)[:, :k]


def as_torch(name: str, *stored: np.ndarray) -> torch.Tensor:
    dtype = torch.float8_e4m3fn if FORMATS[name][1] == "e4m3" else torch.float8_e8m0fnu
    return torch.from_numpy(np.concatenate(stored)).view(dtype)


def close(found: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("m", "n", "k"), [(128, 128, 128), (40, 160, 96), (300, 16, 320)])
def test_scaled_mm(name, m, n, k):
    (a, of_a), (b, of_b) = operand(name, m, k, 0), operand(name, n, k, 5)
    (sfa, scale_a), (sfb, scale_b) = factors(name, m, k, 0), factors(name, n, k, 5)
    scales = as_torch(name, sfa), as_torch(name, sfb)
    expected = (of_a * scale_a) @ (of_b * scale_b).T
    close(torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.float32), expected)
    bias = torch.arange(n, dtype=torch.bfloat16)
    found = torch._scaled_mm(a, b.t(), *scales, bias=bias, out_dtype=torch.float32)
    close(found, expected + np.arange(n))
    assert torch._scaled_mm(a, b.t(), *scales).dtype == torch.bfloat16


def test_one_scale_for_all_is_for_torch():
    a, values = operand("mxfp8", 32, 32, 0)
    one = torch.tensor(2.0)
    assert scaled_mm(a, a.t(), one, one) is NotImplemented
    assert substitute(torch.add) is None
    found = torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.float32)
    close(found, 4 * values @ values.T)


SIZES = (48, 0, 160)


def grouped(name: str, a: torch.Tensor, b: torch.Tensor, of_a: list, of_b: list) -> torch.Tensor:
    """of_a, of_b: scale factors of the blocks, optionally followed by one for each group."""
    recipe = [RECIPES[FORMATS[name][2]], *[ScalingType.TensorWise] * (len(of_a) - 1)]
    return scaled_grouped_mm(
        a,
        b,
        scale_a=of_a,
        scale_recipe_a=recipe,
        scale_b=of_b,
        scale_recipe_b=recipe,
        swizzle_a=SWIZZLED,
        swizzle_b=SWIZZLED,
        offs=torch.tensor(np.cumsum(SIZES), dtype=torch.int32),
        output_dtype=torch.float32,
    )


@pytest.mark.parametrize("name", FORMATS)
def test_groups_of_rows(name):
    """The last rows belong to no group."""
    n, k, rows = 144, 160, sum(SIZES) + 16
    a, of_a = operand(name, rows, k, 0)
    parts = [operand(name, n, k, 10 + g) for g in range(len(SIZES))]
    bytes_of_b = torch.stack([part.view(torch.uint8) for part, _ in parts])
    b = bytes_of_b.view(parts[0][0].dtype).transpose(1, 2)
    sfa = [factors(name, size, k, 20 + g) for g, size in enumerate(SIZES)]
    sfb = [factors(name, n, k, 30 + g) for g in range(len(SIZES))]
    global_a, global_b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 1.0, 4.0])
    scales_a = [as_torch(name, *[s for s, _ in sfa]), global_a]
    scales_b = [as_torch(name, *[s for s, _ in sfb]).view(len(SIZES), -1), global_b]
    expected, start = np.zeros((rows, n)), 0
    for g, size in enumerate(SIZES):
        own = of_a[start : start + size] * sfa[g][1]
        factor = float(global_a[g] * global_b[g])
        expected[start : start + size] = factor * own @ (parts[g][1] * sfb[g][1]).T
        start += size
    close(grouped(name, a, b, scales_a, scales_b), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_groups_along_k(name):
    m, n, k = 136, 32, sum(SIZES)
    (a, of_a), (b, of_b) = operand(name, m, k, 0), operand(name, n, k, 1)
    sfa = [factors(name, m, size, 20 + g) for g, size in enumerate(SIZES)]
    sfb = [factors(name, n, size, 30 + g) for g, size in enumerate(SIZES)]
    scales = ([as_torch(name, *[s for s, _ in side])] for side in (sfa, sfb))
    expected, start = np.zeros((len(SIZES), m, n)), 0
    for g, size in enumerate(SIZES):
        own_a, own_b = of_a[:, start : start + size], of_b[:, start : start + size]
        expected[g] = (own_a * sfa[g][1]) @ (own_b * sfb[g][1]).T
        start += size
    close(grouped(name, a, b.t(), *scales), expected)


def test_the_handle_that_triton_has():
    """Triton's tutorials compare with it; e8m0 and packed elements come as bytes."""
    blas, (m, n, k) = CublasLt(None), (128, 256, 64)
    a, b, c = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
    out = torch.empty(m, n)
    blas.gemm(a, b, c, out, 2.0, 0.5)
    close(out, 2 * (a @ b.t()).double().numpy() + 0.5 * c.double().numpy())
    half = torch.empty(m, n, dtype=torch.float16)
    blas.matmul(a, b, half)
    torch.testing.assert_close(half, (a @ b.t()).half())
    for name, multiply in (
        ("mxfp8", blas.block_scaled_matmul_mxfp8),
        ("nvfp4", blas.block_scaled_matmul_nvfp4),
    ):
        (left, x), (right, y) = operand(name, m, k, 1), operand(name, n, k, 2)
        (held_a, s), (held_b, t) = factors(name, m, k, 3), factors(name, n, k, 4)
        if name == "nvfp4":
            left, right = left.view(torch.uint8), right.view(torch.uint8)
            stored = [torch.from_numpy(held).view(torch.float8_e4m3fn) for held in (held_a, held_b)]
        else:
            stored = [torch.from_numpy(held) for held in (held_a, held_b)]
        multiply(left, right, out, *stored)
        close(out, (x * s) @ (y * t).T)
