"""Swizzles against the bit-by-bit definition of Swizzle<B, M, S>."""

from __future__ import annotations

import numpy as np
import pytest

from ptxemu.machine.swizzle import BY_NAME

# name: (B, M, S, span, period), spelled out
TEXTBOOK = {
    "none": (0, 4, 3, 16, 1),
    "32B": (1, 4, 3, 32, 256),
    "64B": (2, 4, 3, 64, 512),
    "128B": (3, 4, 3, 128, 1024),
    "128B_ATOM_32B": (2, 5, 2, 128, 512),
}


def bit_by_bit(bits: int, base: int, shift: int, offset: int) -> int:
    for bit in range(base, base + bits):
        offset ^= (offset >> (bit + shift) & 1) << bit
    return offset


@pytest.mark.parametrize("name", TEXTBOOK)
def test_apply_is_the_textbook_definition(name):
    bits, base, shift, span, period = TEXTBOOK[name]
    swizzle = BY_NAME[name]
    assert (swizzle.span, swizzle.period) == (span, period)
    offsets = np.arange(4096)
    expected = [bit_by_bit(bits, base, shift, offset) for offset in range(4096)]
    np.testing.assert_array_equal(swizzle.apply(offsets), expected)
    assert swizzle.apply(4095) == expected[4095]


@pytest.mark.parametrize("name", TEXTBOOK)
def test_apply_is_its_own_inverse_and_periodic(name):
    swizzle = BY_NAME[name]
    offsets = np.arange(8192)
    np.testing.assert_array_equal(swizzle.apply(swizzle.apply(offsets)), offsets)
    moved = swizzle.apply(offsets + swizzle.period) - swizzle.period
    np.testing.assert_array_equal(moved, swizzle.apply(offsets))


def test_128b_permutes_the_atoms_of_row_3():
    row = 3 * 128 + 16 * np.arange(8)
    assert list((BY_NAME["128B"].apply(row) - 3 * 128) // 16) == [3, 2, 1, 0, 7, 6, 5, 4]
