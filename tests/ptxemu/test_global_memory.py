"""What the checker remembers of global memory."""

from __future__ import annotations

import numpy as np

from ptxemu.check.global_memory import GlobalShadow, Piece

MIB = 1 << 20


def test_a_read_of_two_allocations_is_remembered_where_they_are():
    """Lanes of one instruction may read gigabytes apart; nothing is kept for what lies between."""
    starts = np.array([3 * MIB - 8, 5 << 32, 3 * MIB - 8 + 16])
    piece, shadow = Piece(starts, 16, 0, mark=None), GlobalShadow(grain=4)
    shadow.read(piece, by=None, on_race=None)
    assert sorted(shadow.reads) == [2, 3, (5 << 32) // MIB]
    assert all(found is piece for reads in shadow.reads.values() for found in reads)
