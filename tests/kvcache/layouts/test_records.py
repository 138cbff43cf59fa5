"""Records as published byte counts have them, their pages, and rows of them in a pool."""

from __future__ import annotations

import pytest
import torch

from kvcache.layouts import records
from kvcache.layouts.latent import LATENTS, ROPE
from kvcache.layouts.records import FP8_584, Record, plain
from kvcache.layouts.rows import Rows
from tests.kvcache.movement.rows_cases import Case

BYTES = {
    "fp8_584": 584, "bf16_512": 1024, "fp8_656": 656, "fp8_528": 528, "fp4_288": 288,
    "indexer_fp8": 132, "indexer_fp4": 68, "indexer_bf16": 256,
}  # fmt: skip


def test_bytes_of_entries():
    found = [value for value in vars(records).values() if isinstance(value, Record)]
    assert {record.name: record.bytes for record in found} == BYTES
    assert plain("k", 8, 128).bytes == 2048
    assert plain("k", 8, 128, 1).bytes == 1024


@pytest.mark.parametrize(("rows", "expected"), [(1, 1152), (2, 1728), (64, 37_440), (72, 42_048)])
def test_pages_are_padded_for_their_readers(rows, expected):
    """FlashMLA's page is a multiple of 576 bytes."""
    assert FP8_584.page_bytes(rows) == expected


def test_latent_entries_fill_their_records():
    for latent in LATENTS.values():
        assert latent.rope_offset + 2 * ROPE == latent.record.data_bytes
        if latent.group:
            assert latent.groups * latent.group == latent.nope
        if latent.record.scale_bytes:
            assert latent.record.scale_bytes == latent.groups + 1


def test_views_are_the_bytes_of_the_rows():
    rows = Case(FP8_584, 0, slots=2, rows=3).build_rows()
    data, scales = rows.data(), rows.scales()
    assert data.shape == (2, 3, 576)
    assert scales.shape == (2, 3, 8)
    slot, begin = rows.pool[1], rows.data_offset + 2 * 576
    assert torch.equal(data[1, 2], slot[begin : begin + 576])
    assert torch.equal(scales[1, 2], slot[rows.scale_offset + 16 : rows.scale_offset + 24])
    assert rows.entries == 6
    rows.check()
    assert Rows(rows.pool[:1], 80, rows.scale_offset, 3, FP8_584).entries == 3
