"""moe.quantiser in the emulator, under its checker: bits of the reference, on both
architectures.
"""

from __future__ import annotations

import math
from dataclasses import replace

import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass import Float32, Uint32

from kernelkit.compile.compiler import compile_once
from kernelkit.device.narrow import packed_elements
from kernelkit.device.words import float_of
from lab.problems.grouped_gemm import CHECKED, PATIENCE, checked
from moe import reference
from moe.formats import FORMATS, BlockFormat, format_of
from moe.quantiser.api import quantise
from moe.quantiser.config import AmaxConfig, QuantiseConfig, with_whole_rows
from moe.quantiser.launch import ARCHS, Tokens
from moe.quantiser.launch import quantise as run_quantise
from moe.shared.quantise import quantise_block
from ptxemu import Options
from ptxemu.numerics import formats
from tests.kernelkit.row_kernel import apply_to_rows
from tests.moe.quantise_cases import (
    Quantisation,
    Scattered,
    assert_equal,
    check,
    check_scattered,
    cut,
    random_case,
    used_bytes,
)

ADVERSARIAL = Options(policy="adversarial", seed=1, limit=PATIENCE)

CASES = [
    Quantisation("nvfp4", 1, 16, scaling="tensor"),
    Quantisation("nvfp4", 0, 64, scaling="tensor"),
    Quantisation("nvfp4", 129, 64, "fp16", scaling="tensor", calm=True),
    Quantisation("nvfp4", 2, 1440, scaling="token"),
    Quantisation("nvfp4", 5, 256, scaling="token", counts=(1, 0, 129, 3), gathered=True),
    Quantisation("nvfp4", 130, 80, "fp16", scaling="rows", counts=(0, 2, 128, 0)),
    Quantisation(
        "nvfp4", 5, 32, scaling="rows", counts=(*(0,) * 32, 130, 1, 129, 0, 3), gathered=True
    ),
    Quantisation("mxfp4", 127, 32),
    Quantisation("mxfp4", 3, 288, "fp16", counts=(0, 127, 0, 1, 0), gathered=True),
    Quantisation("mxfp8", 131, 224, "fp16", counts=(130, 1)),
]
MATRIX = [
    *(Quantisation(fmt, tokens, k, scaling="token" if fmt == "nvfp4" else "")
      for fmt in FORMATS for tokens, k in ((1, 1440), (127, 64), (128, 256), (129, 32))),
    Quantisation("nvfp4", 128, 144, scaling="given"),
    *(random_case(seed, most=1 << 17) for seed in range(24)),
]  # fmt: skip

each_arch = pytest.mark.parametrize("arch", ARCHS)


pytestmark = pytest.mark.usefixtures("poisoned_outputs")


def check_emulated(case: Quantisation, arch: str, options: Options = CHECKED) -> None:
    with checked(options):
        check(case, arch=arch)


@each_arch
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits(case, arch):
    check_emulated(case, arch)


@each_arch
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_matrix(arch, case):
    check_emulated(case, arch)


@each_arch
def test_adversarial_schedule(arch):
    """CTAs combine their results in one word, warps of the amax in shared memory: any order gives
    the same."""
    check_emulated(Quantisation("nvfp4", 40, 1040, scaling="tensor", calm=True), arch, ADVERSARIAL)


WHOLE = [
    Quantisation("nvfp4", 200, 528, scaling="token"),
    Quantisation("nvfp4", 9, 48, "fp16", scaling="token", counts=(0, 150, 1, 0, 20), gathered=True),
]


@each_arch
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_two_rows_of_a_cta(case, arch):
    """There are more rows than SMs; the last pairs have one row, or none."""
    assert with_whole_rows(QuantiseConfig("nvfp4", "bf16"), case.rows, case.k).whole == 2
    check_emulated(case, arch, ADVERSARIAL)


@each_arch
@pytest.mark.parametrize("tokens", [3, 160])
def test_long_rows_are_read_again(tokens, arch, monkeypatch):
    """The part of a row that does not fit in registers is read again."""
    for name in ("MAX_KEPT", "MAX_WARPS", "MAX_WARPS_OF_ONE"):
        monkeypatch.setattr(f"moe.quantiser.config.{name}", 2 if name == "MAX_KEPT" else 1)
    k = 2640 if tokens == 3 else 1296
    config = with_whole_rows(QuantiseConfig("nvfp4", "bf16"), tokens, k)
    assert config.tiles(k) > config.kept * config.warps
    check_emulated(Quantisation("nvfp4", tokens, k, scaling="token"), arch)
    x = torch.randn(tokens, k).bfloat16()
    x[:, -1] = torch.linspace(8, 50, tokens)  # the largest is in the part that is read again
    got = quantise(x, "nvfp4", global_scale="token", arch=arch)
    expected = reference.quantise(x, "nvfp4", global_scale="token")
    assert torch.equal(got.encode_scale, expected.encode_scale)
    assert torch.equal(got.data.view(torch.uint8), expected.data.view(torch.uint8))


@each_arch
def test_an_amax_of_many_ctas(arch):
    """There are more parts than threads that read them, and parts of two rows."""
    check_emulated(Quantisation("nvfp4", 700, 16, scaling="tensor", calm=True), arch)


def test_behind_the_last_expert_nothing_is_written():
    case = Quantisation("nvfp4", 3, 64, scaling="token", counts=(2, 0, 1))
    x, options = case.build()
    scales = quantise(x, "nvfp4", **options).scales.view(torch.int32)
    used = case.used // 4
    assert len(scales) > used
    assert (scales[used:] == -1).all()
    assert (scales[:used] != -1).all()


def test_slots_of_a_token_are_its_rows():
    x = torch.randn(4, 64).bfloat16()
    slots, offsets = torch.tensor([1, 6, 7, 0, 11]).int(), torch.tensor([0, 2, 5]).int()
    mine = quantise(x, "nvfp4", global_scale="token", rows=slots, choices=3, offsets=offsets)
    other = quantise(x, "nvfp4", global_scale="token", rows=slots // 3, offsets=offsets)
    assert_equal(mine, other, used_bytes("nvfp4", 64, (2, 3)))


SCATTERED = [
    Scattered("nvfp4", 3, 2, 64, 4, "tensor"),
    Scattered("nvfp4", 1, 3, 48, 5, "token"),
    Scattered("mxfp4", 130, 2, 96, 3),
]
MORE_SCATTERED = [
    Scattered("nvfp4", 20, 8, 272, 9, "token"),
    Scattered("nvfp4", 5, 2, 1440, 40, "given"),
    Scattered("nvfp4", 7, 2, 64, 3, "rows"),
    Scattered("mxfp8", 2, 2, 1056, 3),
]
OF_A_RANK = [
    Scattered("nvfp4", 9, 3, 64, 8, "token", expert_range=(2, 5)),
    Scattered("mxfp8", 20, 2, 96, 6, expert_range=(5, 6)),
    Scattered("nvfp4", 7, 2, 64, 3, "rows", expert_range=(0, 2)),
]


@pytest.mark.parametrize(
    ("arch", "case"),
    [(arch, case) for case in (*SCATTERED, *MORE_SCATTERED) for arch in ARCHS],
    ids=str,
)
def test_every_token_is_read_once(arch, case):
    """The inverse of the rows changes no bit."""
    with checked():
        check_scattered(case, arch=arch)


@pytest.mark.parametrize("case", OF_A_RANK, ids=str)
def test_slots_without_rows_are_not_written(case):
    with checked():
        check_scattered(case)


@pytest.mark.parametrize("inverse", [True, False])
def test_rows_of_nobody_are_neither_read_nor_written(inverse):
    """There is no row at all: every slot is foreign."""
    x = torch.randn(3, 64).bfloat16()
    nothing, foreign = torch.zeros(3, dtype=torch.int32), torch.full((6,), -1, dtype=torch.int32)
    given = {"row_of_slot": foreign, "partial": True} if inverse else {}
    tokens = Tokens(x, "nvfp4", "token", foreign, nothing, choices=2, **given)
    with checked():
        got = run_quantise(tokens)
    assert (got.data.view(torch.uint8) == 255).all()
    assert (got.scales.view(torch.uint8) == 255).all()


@pytest.mark.parametrize("scaling", ["tensor", "token"])
def test_an_amax_is_that_of_rows_that_somebody_has(scaling):
    x, offsets = torch.randn(300, 64).bfloat16(), torch.tensor([0, 2, 2, 7]).int()
    x[7:] = math.nan
    with checked():
        got = quantise(x, "nvfp4", global_scale=scaling, offsets=offsets)
    expected = reference.quantise(x[:7], "nvfp4", global_scale=scaling, offsets=offsets)
    used = used_bytes("nvfp4", 64, (2, 0, 5))
    assert_equal(*(replace(each, scales=each.scales[:used]) for each in (cut(got, 7), expected)))


@pytest.mark.usefixtures("no_compile")
def test_an_inverse_needs_what_it_inverts():
    x = torch.randn(4, 64).bfloat16()
    slots = torch.arange(8, dtype=torch.int32)
    offsets = torch.tensor([0, 8], dtype=torch.int32)
    places = {"rows": slots, "choices": 2, "offsets": offsets, "row_of_slot": slots}
    for change in ({"offsets": None}, {"rows": slots[:6], "offsets": offsets - 2}, {"choices": 3}):
        change |= {"offsets": (offsets - 2).clamp(0)} if "rows" in change else {}
        with pytest.raises(ValueError, match="row_of_slot needs offsets, and rows of all"):
            run_quantise(Tokens(x, "mxfp4", **places | change))
    with pytest.raises(ValueError, match=r"row_of_slot is torch\.int64"):
        run_quantise(Tokens(x, "mxfp4", **places | {"row_of_slot": slots.long()}))
    with pytest.raises(ValueError, match="row_of_slot has values from 1 to 8"):
        run_quantise(Tokens(x, "mxfp4", **places | {"row_of_slot": slots + 1}))
    with pytest.raises(ValueError, match="row_of_slot has values from -1 to 6"):
        run_quantise(Tokens(x, "mxfp4", **places | {"row_of_slot": slots - 1}))
    with pytest.raises(ValueError, match="row_of_slot has values from -2 to 5, but rows are 0 to"):
        run_quantise(Tokens(x, "mxfp4", **places | {"row_of_slot": slots - 2}, partial=True))


@pytest.mark.usefixtures("no_compile")
@pytest.mark.parametrize("scaling", ["token", "given", "rows"])
def test_no_rows(scaling):
    """No kernel is launched; a given global scale is returned, with its inverse."""
    for case in (
        Quantisation("nvfp4", 0, 64, scaling=scaling),
        Quantisation("nvfp4", 0, 64, "fp16", scaling),
    ):
        check(case)
    x, empty = torch.ones(3, 64, dtype=torch.bfloat16), torch.zeros(5, dtype=torch.int32)
    got = quantise(x, "mxfp8", rows=empty[:0], offsets=empty)
    assert got.data.shape == (0, 64)


def run_blocks(
    blocks: torch.Tensor, scales: torch.Tensor, fmt: str, arch: str, *, only_convert: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (bytes of the elements uint8 [N, bytes], codes uint8 [N]) of blocks fp32 [N, block],
    one per thread.

    scales: global scales, fp32 [N]; with `only_convert` the factors of elements.
    """
    form = format_of(fmt)

    def apply(values: cute.Tensor, _: cute.Tensor, scale: cute.Tensor) -> tuple[Float32, ...]:
        code = Uint32(0)
        if only_convert:
            words = packed_elements(values, scale[0], form.element, arch)
        else:
            g = scale[0] if form.has_global else None
            words, code = quantise_block(values, g, form, arch)
        for index in range(cute.size(words)):
            values[index] = float_of(words[index])
        return (float_of(code),)

    nothing = torch.zeros(len(blocks), 1, dtype=torch.int32)
    words, codes = apply_to_rows(apply, blocks, nothing, scales[:, None], arch)
    size = form.block // form.per_byte
    return words.view(torch.uint8)[:, :size], codes.view(torch.int32)[:, 0].to(torch.uint8)


def patterns() -> torch.Tensor:
    """fp32 with all signs, exponents and upper mantissas, and lower bits around ties."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0xFFFF], dtype=np.uint32)
    return torch.from_numpy((upper[:, None] | lower).reshape(-1).view(np.float32))


@each_arch
@pytest.mark.parametrize(
    ("fmt", "convert"), [("nvfp4", formats.f32_to_e2m1), ("mxfp8", formats.f32_to_e4m3)]
)
def test_every_conversion(arch, fmt, convert):
    """Hopper's arithmetic gives the bits of Blackwell's conversion instructions."""
    values = patterns()
    blocks = values.reshape(-1, format_of(fmt).block)
    got = run_blocks(blocks, torch.ones(len(blocks)), fmt, arch, only_convert=True)[0].flatten()
    if fmt == "nvfp4":
        got = torch.stack((got & 0xF, got >> 4), dim=-1).flatten()
    with np.errstate(invalid="ignore"):
        assert np.array_equal(got.numpy(), convert(values.numpy()))


def amaxes(form: BlockFormat) -> torch.Tensor:
    """amax values of blocks: all magnitudes and some NaN, and neighbours of every change of the
    scale factor."""
    exponents = torch.arange(-150, 130)
    scales = torch.ldexp(torch.full(exponents.shape, form.largest), exponents)
    edges = [torch.nextafter(scales, torch.full_like(scales, to)) for to in (0.0, math.inf)]
    return torch.cat((patterns()[::37], scales, *edges))


@each_arch
@pytest.mark.parametrize("fmt", FORMATS)
def test_blocks_of_fp32(arch, fmt):
    """Scale factors of every magnitude, with elements around all ties; many global scales."""
    form, generator = format_of(fmt), torch.Generator().manual_seed(0)
    tops = amaxes(form)
    blocks = torch.randn(len(tops), form.block, generator=generator)
    blocks = blocks / blocks.abs().amax(-1, keepdim=True) * tops[:, None]
    blocks[:, 0], blocks[::2, 1] = tops, 0.0
    encode = torch.exp2(torch.randint(-40, 40, (len(tops),), generator=generator).float())
    encode *= 1.0 + torch.rand(len(tops), generator=generator)
    encode[::3] = 2.0**127  # the inverse of a scale factor below 1 would be infinite
    data, codes = reference.quantise_blocks(blocks, form, encode if form.has_global else None)
    got_data, got_codes = run_blocks(blocks, encode, fmt, arch)
    assert torch.equal(got_codes, codes.view(torch.uint8).flatten())
    assert torch.equal(got_data, data.view(torch.uint8))


@each_arch
def test_global_scale_of_extremes(arch):
    """Zeros, subnormals, infinities and NaN give the reference's encode and decode scales."""
    x = torch.zeros(6, 528, dtype=torch.bfloat16)
    x[1, 7], x[2, 527], x[3, 512], x[4, 511], x[5, 1] = 1e-39, -3e38, math.inf, math.nan, -5.0
    for global_scale in ("tensor", "token"):
        for rows in ([0], [1, 0], [0, 2], [5, 3, 2], [5, 4]):
            part = x[rows]
            got = quantise(part, "nvfp4", global_scale=global_scale, arch=arch)
            expected = reference.quantise(part, "nvfp4", global_scale=global_scale)
            for name in ("encode_scale", "decode_scale"):
                torch.testing.assert_close(
                    getattr(got, name), getattr(expected, name), rtol=0, atol=0, equal_nan=True
                )


def test_sizes_share_a_kernel(monkeypatch):
    for k in (48, 64):  # rows of whole and of half pieces
        check(Quantisation("nvfp4", 130, k, scaling="tensor", calm=True))
    monkeypatch.setattr("kernelkit.compile.compiler._make", lambda *_: pytest.fail("compiled"))
    for tokens, k in ((1, 16), (140, 288), (17, 1040)):
        check(Quantisation("nvfp4", tokens, k, scaling="tensor", calm=True))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_what_is_compiled(arch):
    """16-byte loads, no local memory; e2m1 by a conversion instruction if the arch has one."""
    config = QuantiseConfig("nvfp4", "bf16", scaling="tensor")
    ptx = compile_once(config, arch, "moe.quantiser.kernel").ptx
    loads = {line.split()[0] for line in ptx.splitlines() if line.strip().startswith("ld.global")}
    assert f".target {arch}" in ptx
    assert loads == {"ld.global.v4.b32", "ld.global.b32"}
    assert ("e2m1x2" in ptx) == (arch != "sm_90a")
    assert ".local" not in ptx


@pytest.mark.parametrize("fmt", FORMATS)
def test_threads_of_a_tile(fmt):
    """A warp has two rows of each quarter; CTAs share a tile evenly, a thread has 64 bytes."""
    config = QuantiseConfig(fmt, "bf16")
    assert config.threads * config.parts == 128 * 4
    assert config.unrolled * config.format.block * 2 == 64
    assert config.words * 4 * config.format.per_byte == config.format.block
    assert AmaxConfig("bf16").threads % 32 == 0
