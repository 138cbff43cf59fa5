"""Grids of the data movement: fewer CTAs than there is work take turns, and do all of it."""

from __future__ import annotations

import pytest

from kvcache.layouts.records import BF16_512, FP8_584
from kvcache.movement import config
from kvcache.movement.config import ctas_for, lanes_of, vector_of
from tests.kvcache.movement.rows_cases import (
    Case,
    Plain,
    Slots,
    check_append_rows,
    check_append_swa,
    check_checksum,
    check_copy_slots,
    check_gather,
)


@pytest.fixture
def two_ctas(monkeypatch):
    monkeypatch.setattr(config, "CTAS", 2)


@pytest.mark.usefixtures("two_ctas")
def test_ctas_take_turns():
    check_append_swa(Case(FP8_584, 19))
    check_gather(Case(FP8_584, 19))
    check_gather(Case(BF16_512, 19))
    check_append_rows(Plain(19, (2, 64), (1, 64)))
    check_copy_slots(Slots(9 * config.SMALLEST_PIECE))
    check_checksum(9 * config.SMALLEST_PIECE, 0, 9 * config.SMALLEST_PIECE)


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
