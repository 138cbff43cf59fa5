"""Grids of the data movement: fewer CTAs than there is work take turns, and do all of it; pieces
of slots, rows of threads, widths of accesses."""

from __future__ import annotations

import pytest

from kvcache.layouts.records import BF16_512, FP8_584
from kvcache.movement import api, config
from kvcache.movement.config import ctas_for, lanes_of, vector_of
from tests.kvcache.movement.rows_cases import Append, Gather, Plain, Slots, Sums


@pytest.fixture
def two_ctas(monkeypatch):
    monkeypatch.setattr(config, "CTAS", 2)


PIECES = 9 * config.SMALLEST_PIECE


@pytest.mark.usefixtures("two_ctas")
@pytest.mark.parametrize(
    "case",
    [Append(FP8_584, 19), Gather(FP8_584, 19), Gather(BF16_512, 19),
     Plain(19, (2, 64), (1, 64)), Slots(PIECES), Sums(PIECES, 0, PIECES)],
    ids=str,
)  # fmt: skip
def test_ctas_take_turns(case):
    case.check()


@pytest.mark.parametrize(
    ("items", "at_once", "expected"),
    [(1, 4, 1), (4, 4, 1), (5, 4, 2), (1 << 30, 4, config.CTAS)],
)
def test_sized_by_the_work_up_to_a_limit(items, at_once, expected):
    assert ctas_for(items, at_once) == expected


def test_a_row_is_shared_by_as_many_threads_as_it_has_work_for():
    found = [lanes_of(row_bytes, 16) for row_bytes in (16, 64, 128, 256, 1024, 2048, 1 << 16)]
    assert found == [1, 1, 2, 4, 16, 32, 32]
    assert lanes_of(2048, 1) == 32


def test_accesses_are_as_wide_as_everything_allows():
    assert [vector_of(*numbers) for numbers in ((32, 48), (32, 8), (6,), (7,), (0, 64))] == [
        16, 8, 2, 1, 16,
    ]  # fmt: skip


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
        piece = config.piece_bytes(total)
        assert piece & (piece - 1) == 0
        assert config.SMALLEST_PIECE <= piece <= config.LARGEST_PIECE
