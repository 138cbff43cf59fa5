"""Operand and instruction descriptors: hand-derived words, address maps, element formats."""

from __future__ import annotations

import numpy as np
import pytest

from lab.silicon.conformance.exact_arithmetic import values_of
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine.umma_desc import (
    InstrDesc,
    SmemDesc,
    byte_offsets,
    instr_desc,
    read_operand,
    require_shape,
    smem_desc,
)
from ptxemu.numerics.swizzle import BY_NAME
from tests.ptxemu.umma_operands import SWIZZLES, image_of, put_operand, random_codes, smem_desc_word


def test_smem_desc_of_hand_derived_words():
    # K-major 128B: start 0x1080, LBO 16, SBO 1024, version 1, layout 2
    assert smem_desc(0x4000_4040_0001_0108) == SmemDesc(0x1080, 16, 1024, BY_NAME["128B"])
    # MN-major 64B: start 0x38000, LBO 8192, SBO 512, layout 4
    assert smem_desc(0x8000_4020_0200_3800) == SmemDesc(0x38000, 8192, 512, BY_NAME["64B"])
    assert smem_desc(0x2000_4020_0000_0000).swizzle is BY_NAME["128B_ATOM_32B"]
    assert smem_desc(0x0000_4008_0000_0000).swizzle is BY_NAME["none"]
    assert smem_desc(0xC000_4010_0000_0000).swizzle is BY_NAME["32B"]
    # Triton's tcgen05.cp: without a swizzle the base offset, 4 here, means nothing
    assert smem_desc(0x0008_4008_0000_1060) == SmemDesc(0x10600, 0, 128, BY_NAME["none"])


@pytest.mark.parametrize(
    ("word", "error"),
    [
        (0x6000_4040_0001_0108, HardwareRefusal),  # layout 3
        (0xA000_4040_0001_0108, HardwareRefusal),  # layout 5
        (0xE000_4040_0001_0108, HardwareRefusal),  # layout 7
        (0x4000_0040_0001_0108, HardwareRefusal),  # version 0, a Hopper descriptor
        (0x4000_8040_0001_0108, HardwareRefusal),  # version 2
        (0x4020_4040_0001_0108, HardwareRefusal),  # bit 53
        (0x4000_4040_0001_4108, HardwareRefusal),  # bit 14
        (0x4000_4040_4001_0108, HardwareRefusal),  # bit 30
        (0x4002_4040_0001_0108, UnsupportedPtx),  # base offset 1
        (0x4010_4040_0001_0108, UnsupportedPtx),  # absolute LBO
    ],
)
def test_smem_desc_refusals(word, error):
    with pytest.raises(error, match=f"{word:#x}"):
        smem_desc(word)


F16_WORD = 0x08400010  # f16 x f16 to f32, M = 128, N = 256


def test_instr_desc_of_hand_derived_words():
    formats = {"a_format": "f16", "b_format": "f16", "d_format": "f32"}
    off = dict.fromkeys(("a_mn_major", "b_mn_major", "a_negate", "b_negate", "saturate"), False)
    expected = InstrDesc(kind="f16", m=128, n=256, k=16, **formats, **off)
    assert instr_desc("f16", F16_WORD) == expected
    # bf16 both, B MN-major, A negated, M = 256, N = 64
    desc = instr_desc("f16", 1 << 4 | 1 << 7 | 1 << 10 | 1 << 13 | 1 << 16 | 8 << 17 | 16 << 24)
    assert (desc.m, desc.n, desc.a_format, desc.b_mn_major) == (256, 64, "bf16", True)
    assert (desc.a_negate, desc.b_negate, desc.a_mn_major) == (True, False, False)
    # s8 x u8 to s32, saturating
    desc = instr_desc("i8", 2 << 4 | 1 << 3 | 1 << 7 | 4 << 17 | 4 << 24)
    assert (desc.a_format, desc.b_format, desc.d_format, desc.k) == ("s8", "u8", "s32", 32)
    assert (desc.m, desc.n, desc.saturate) == (64, 32, True)


def test_bit_29_means_nothing_to_f16():
    """cuDNN's attention for sm_100a with 256 columns sets it."""
    assert instr_desc("f16", F16_WORD | 1 << 29) == instr_desc("f16", F16_WORD)


def test_instr_desc_of_block_scaled_kinds():
    desc = instr_desc("mxf4nvf4", 0x08400480)  # e2m1 both, UE4M3, M = 128, N = 256
    assert instr_desc("mxf4nvf4", 0x08401480) == desc  # bit 12, for sparsity, as CUTLASS sets it
    assert (desc.m, desc.n, desc.k, desc.d_format) == (128, 256, 64, "f32")
    assert desc.a_format == desc.b_format == "packed e2m1"
    assert desc.scale_format == "ue4m3"
    word = 2 << 4 | 1 << 7 | 5 << 10 | 16 << 17 | 1 << 23 | 2 << 27 | 3 << 29
    desc = instr_desc("mxf8f6f4", word)
    assert (desc.m, desc.n, desc.k) == (256, 128, 32)
    assert (desc.a_format, desc.b_format, desc.scale_format) == ("e5m2", "e2m1", "ue8m0")
    assert (desc.a_scale_id, desc.b_scale_id) == (3, 2)


@pytest.mark.parametrize(
    ("kind", "word", "error"),
    [
        ("f16", F16_WORD | 1 << 30, UnsupportedPtx),  # .ws shift
        ("f16", F16_WORD | 1 << 6, HardwareRefusal),
        ("f16", F16_WORD | 1 << 23, HardwareRefusal),
        ("f16", F16_WORD | 2 << 7, HardwareRefusal),  # A in tf32
        ("f16", F16_WORD | 3 << 4, HardwareRefusal),  # D format 3
        ("f16", F16_WORD & ~0x30 | 1 << 7, HardwareRefusal),  # f16 D of bf16
        ("f16", F16_WORD | 1 << 3, HardwareRefusal),  # saturation
        ("tf32", F16_WORD, HardwareRefusal),
        ("f8f6f4", F16_WORD & ~0x1C80 | 1 << 29, HardwareRefusal),
        ("f8f6f4", F16_WORD | 2 << 7, HardwareRefusal),
        ("i8", F16_WORD, HardwareRefusal),  # D of f32
        ("i8", F16_WORD + 0x10 | 1 << 13, HardwareRefusal),  # negated integers
        ("mxf4", 0x08400480 | 1 << 15, HardwareRefusal),  # MN-major packed e2m1
        ("mxf4nvf4", 0x08400480 | 1 << 16, HardwareRefusal),
        ("mxf4", 0x08400480 | 2 << 10, HardwareRefusal),  # B format 3
        ("mxf4nvf4", 0x08400480 & ~(1 << 10) | 1 << 12, HardwareRefusal),  # B format 0
        ("mxf8f6f4", 0x08400000 | 6 << 10, HardwareRefusal),  # its B format has three bits
        ("mxf8f6f4", 0x08400000 | 1 << 3, HardwareRefusal),
        ("mxf8f6f4", 0x08400000 | 1 << 31, HardwareRefusal),
        ("mxf8f6f4", 0x08400000 | 1 << 6, HardwareRefusal),
    ],
)
def test_instr_desc_refusals(kind, word, error):
    with pytest.raises(error, match=f"{word:#010x}"):
        instr_desc(kind, word)


@pytest.mark.parametrize("kind", ["mxf4", "mxf4nvf4"])
@pytest.mark.parametrize("size", [1 << 31, 1 << 3, 1 << 3 | 1 << 31])
def test_sizes_of_k_that_sm_100a_does_not_have(kind, size):
    with pytest.raises(HardwareRefusal, match=f"{0x08400480 | size:#010x}: K is 64 on sm_100a"):
        instr_desc(kind, 0x08400480 | size)


def test_shapes_that_a_dense_mma_has():
    def is_legal(kind, m, n, cta_group):
        d_format, codes = {"f16": (1, 0), "i8": (2, 0)}[kind]
        word = d_format << 4 | codes | n >> 3 << 17 | m >> 4 << 24
        try:
            require_shape(instr_desc(kind, word), cta_group)
        except HardwareRefusal:
            return False
        return True

    assert is_legal("f16", 64, 8, 1)
    assert is_legal("f16", 128, 248, 1)
    assert is_legal("f16", 256, 16, 2)
    assert is_legal("i8", 128, 24, 1)
    assert not is_legal("f16", 256, 64, 1)
    assert not is_legal("f16", 64, 64, 2)
    assert not is_legal("f16", 128, 24, 2)
    assert not is_legal("f16", 128, 0, 1)
    assert not is_legal("i8", 128, 40, 1)
    assert not is_legal("i8", 256, 48, 2)


@pytest.mark.parametrize("kind", ["f8f6f4", "i8"])
@pytest.mark.parametrize(("m", "cta_group", "n"), [(128, 1, 24), (256, 2, 48)])
def test_n_of_an_mn_major_b_of_bytes(kind, m, cta_group, n):
    """N is a multiple of 16, in a pair of 32, even if a K-major B may have a smaller step."""
    d_format = {"f8f6f4": 1, "i8": 2}[kind]

    def require(n, mn_major):
        word = d_format << 4 | mn_major << 16 | n >> 3 << 17 | m >> 4 << 24
        require_shape(instr_desc(kind, word), cta_group)

    require(32, True)
    require(32 if (kind, cta_group) == ("i8", 2) else n, False)
    with pytest.raises(HardwareRefusal, match=f"N={n}, must be"):
        require(n, True)


def address(desc: SmemDesc, row: int, byte: int) -> int:
    """Address of a K-major swizzled operand by the manual's figures: 8-row groups, one span per
    row."""
    width = desc.swizzle.span
    linear = desc.start + row // 8 * desc.stride + row % 8 * width + byte
    return desc.swizzle.apply(linear)


def operand_offsets(
    desc: SmemDesc, rows: int, k: int, element_bytes: int, mn_major: bool
) -> np.ndarray:
    """Byte offset in shared memory of each element of the operand (rows, k)."""
    shape = (k, rows * element_bytes) if mn_major else (rows, k * element_bytes)
    offsets = byte_offsets(desc, shape, mn_major, element_bytes)
    return offsets.T if mn_major else offsets


@pytest.mark.parametrize("swizzle", ["32B", "64B", "128B"])
@pytest.mark.parametrize("start", [0x2000, 0x2080, 0x2420])
def test_offsets_k_major(swizzle, start):
    desc = SmemDesc(start, 16, 8 * BY_NAME[swizzle].span, BY_NAME[swizzle])
    offsets = operand_offsets(desc, 24, 16, 2, False)
    expected = [[address(desc, i, 2 * k) for k in range(16)] for i in range(24)]
    np.testing.assert_array_equal(offsets, expected)


def test_offsets_k_major_without_swizzle():
    offsets = operand_offsets(SmemDesc(512, 256, 128, BY_NAME["none"]), 16, 32, 1, False)
    assert offsets[0, 0] == 512
    assert offsets[1, 3] == 512 + 16 + 3
    assert offsets[9, 17] == 512 + 128 + 16 + 256 + 1


def test_offsets_mn_major():
    swizzle = BY_NAME["128B"]
    offsets = operand_offsets(SmemDesc(0, 0x4000, 1024, swizzle), 128, 16, 2, True)
    assert offsets[5, 0] == 10
    assert offsets[70, 9] == swizzle.apply(0x4000 + 2 * 6 + 1024 + 128)
    # tf32: groups of 4 rows of k, 32-byte atoms
    swizzle = BY_NAME["128B_ATOM_32B"]
    offsets = operand_offsets(SmemDesc(0, 0x4000, 512, swizzle), 64, 8, 4, True)
    assert offsets[33, 6] == swizzle.apply(0x4000 + 4 + 512 + 2 * 128)
    # no swizzle: SBO steps over 16-byte columns of rows, LBO over groups of 8 k
    offsets = operand_offsets(SmemDesc(0, 128, 0x800, BY_NAME["none"]), 16, 16, 2, True)
    assert offsets[9, 10] == 0x800 + 2 + 128 + 2 * 16


ALL = [(fmt, False) for fmt in ("f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8")]
ALL += [(fmt, True) for fmt in ("f16", "bf16", "e4m3", "e5m2", "s8", "u8")]


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize(("fmt", "mn_major"), ALL)
@pytest.mark.parametrize("start", [0, 0x480])
def test_read_operand_reads_what_tma_placed(swizzle, fmt, mn_major, start):
    rng = np.random.default_rng(0)
    k = {"f16": 16, "bf16": 16, "tf32": 8}.get(fmt, 32)
    codes = random_codes(rng, fmt, (72, k))
    smem = rng.integers(0, 256, 64 * 1024, dtype=np.uint8)
    desc = smem_desc(put_operand(smem, start, codes, swizzle, mn_major))
    np.testing.assert_array_equal(
        read_operand(smem, desc, 72, k, fmt, mn_major), values_of(fmt, codes).astype(np.float32)
    )


def test_read_operand_of_mn_major_tf32():
    codes = random_codes(np.random.default_rng(0), "tf32", (64, 8))
    smem = np.zeros(64 * 1024, np.uint8)
    desc = smem_desc(put_operand(smem, 0x800, codes, "128B_ATOM_32B", True))
    np.testing.assert_array_equal(
        read_operand(smem, desc, 64, 8, "tf32", True), values_of("tf32", codes)
    )
    with pytest.raises(HardwareRefusal, match="32-byte atoms"):
        read_operand(smem, desc, 64, 8, "tf32", False)
    with pytest.raises(UnsupportedPtx, match="MN-major tf32"):
        read_operand(smem, smem_desc(smem_desc_word(0, 0, 1024, "128B")), 64, 8, "tf32", True)


@pytest.mark.parametrize("swizzle", SWIZZLES)
def test_read_operand_of_packed_pairs(swizzle):
    codes = np.random.default_rng(0).integers(0, 16, (24, 64), dtype=np.uint8)
    smem = np.zeros(8192, np.uint8)
    desc = smem_desc(put_operand(smem, 0x480, image_of("mxf4", "e2m1", codes), swizzle, False))
    values = read_operand(smem, desc, 24, 64, "packed e2m1", False)
    np.testing.assert_array_equal(values, values_of("e2m1", codes).astype(np.float32))


@pytest.mark.parametrize(("fmt", "bits"), [("e2m1", 4), ("e2m3", 6), ("e3m2", 6)])
def test_read_operand_of_unpacked_chunks(fmt, bits):
    codes = np.random.default_rng(0).integers(0, 1 << bits, (16, 32), dtype=np.uint8)
    smem = np.zeros(4096, np.uint8)
    desc = smem_desc(put_operand(smem, 1024, image_of("mxf8f6f4", fmt, codes), "32B", False))
    values = read_operand(smem, desc, 16, 32, fmt, False)
    np.testing.assert_array_equal(values, values_of(fmt, codes).astype(np.float32))


def test_read_operand_past_the_end_of_smem():
    smem = np.zeros(2048, np.uint8)
    desc = smem_desc(smem_desc_word(1024, 16, 1024, "128B"))
    read_operand(smem, desc, 8, 16, "bf16", False)
    with pytest.raises(HardwareRefusal, match="limit is 0x800"):
        read_operand(smem, desc, 16, 16, "bf16", False)
