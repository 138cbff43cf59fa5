"""Swizzles against the bit-by-bit definition of Swizzle<B, M, S>."""

from __future__ import annotations

import numpy as np
import pytest

from ptxemu.numerics.swizzle import BY_NAME

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
    offsets = np.arange(8192)
    expected = [bit_by_bit(bits, base, shift, offset) for offset in range(8192)]
    np.testing.assert_array_equal(swizzle.apply(offsets), expected)
    assert swizzle.apply(8191) == expected[8191]
