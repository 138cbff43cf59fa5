"""copy_slots in the emulator, under its checker: the reference's bytes, no other, in both pools."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.movement import api
from kvcache.movement.config import LARGEST_PIECE, SMALLEST_PIECE, piece_bytes
from kvcache.movement.launch import ARCHS
from tests.kvcache.movement.rows_cases import Slots, check_copy_slots

PARTS = ((16, 32, 4000), (4032, 4096, 64), (0, 0, 0))
QUICK = [
    Slots(4096 + 80),
    Slots(SMALLEST_PIECE * 2 + 16, SMALLEST_PIECE * 2 + 16),
    Slots(4096, 8192, segments=PARTS, cut=1024),
]
MORE = [
    Slots(70_000, pairs=((4, 0),)),
    Slots(16, 16),
    Slots(48, 64, segments=((16, 48, 16), (32, 0, 16))),
    Slots(40_000, 50_000, segments=((0, 9600, 40_000),), cut=10_000),
    Slots(16_400, segments=((0, 16, 16_384),), pairs=((0, 1), (2, 3), (-1, -1))),
]
each_arch = pytest.mark.parametrize("arch", ARCHS)


@each_arch
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_slots(case, arch):
    check_copy_slots(case, arch=arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_slots(case, arch):
    check_copy_slots(case, arch=arch)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_segments(data):
    """Segments that lie anywhere in the source, side by side in the target."""
    source, place, segments = data.draw(st.integers(1, 400)) * 16, 0, []
    for _ in range(data.draw(st.integers(0, 6))):
        size = data.draw(st.integers(0, source // 16)) * 16
        begin = data.draw(st.integers(0, (source - size) // 16)) * 16
        place += data.draw(st.integers(0, 3)) * 16
        segments.append((begin, place, size))
        place += size
    order = data.draw(st.permutations(range(5)))
    pairs = ((order[0], order[1]), (order[2], order[3]), (-1, order[4]))
    cut = data.draw(st.integers(1, 200)) * 16
    check_copy_slots(Slots(source, place + 32, pairs, tuple(segments), cut=cut))


@pytest.mark.usefixtures("no_launches")
def test_nothing_to_copy():
    check_copy_slots(Slots(4096, pairs=()))
    check_copy_slots(Slots(64, 64, segments=()))


@pytest.mark.parametrize("most", [16, 1000, 1 << 20])
def test_cut_segments_are_the_same_bytes(most):
    segments = [(0, 160, 1600), (1600, 0, 16), (4000, 4800, 0), (8000, 6400, 48_000)]
    cut = api.cut_segments(segments, most)
    assert not (cut % 16).any()
    assert cut[:, 2].max() <= -(-most // 16) * 16
    bytes_of = [
        {begin + i: place + i for begin, place, size in parts for i in range(size)}
        for parts in (segments, cut.tolist())
    ]
    assert bytes_of[0] == bytes_of[1]
    assert int(cut[:, 2].sum()) == sum(size for *_, size in segments)
    assert api.cut_segments([]).shape == (0, 3)


def test_pieces_are_powers_of_two():
    for total in (0, 16, 1 << 20, 1 << 24, 1 << 27, 1 << 40):
        piece = piece_bytes(total)
        assert piece & (piece - 1) == 0
        assert SMALLEST_PIECE <= piece <= LARGEST_PIECE


def test_pool_to_itself_shares_memory_with_nobody_else():
    """Copy on write: what is beside the two slots stays."""
    pool = torch.arange(5 * 64).to(torch.uint8).view(5, 64)
    before = pool.clone()
    api.copy_slots(pool, pool, torch.tensor([[1, 3]]))
    before[3] = before[1]
    assert torch.equal(pool, before)
