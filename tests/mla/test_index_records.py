"""Records of the indexer by their definition: transform, scales, rounding, lost groups."""

from __future__ import annotations

import math

import pytest
import torch

from kvcache.layouts.records import BF16_512, INDEXER_BF16, INDEXER_FP4, INDEXER_FP8
from mla.indexer import quantised as definition
from mla.indexer.formats import FORMATS, WIDTH, index_format
from tests.kvcache.movement.rows_cases import assert_equal
from tests.mla.index_cases import sylvester

QUANTISED = [INDEXER_FP4, INDEXER_FP8]
each_record = pytest.mark.parametrize("record", QUANTISED, ids=lambda record: record.name)


def test_the_transform_is_sylvesters():
    x = torch.randn(5, WIDTH)
    expected = x.double() @ sylvester() / math.sqrt(WIDTH)
    torch.testing.assert_close(definition.hadamard(x).double(), expected, rtol=0, atol=2e-6)
    exact = torch.eye(WIDTH)
    assert torch.equal(definition.hadamard(exact) > 0, sylvester() > 0)


def test_products_survive_preparation():
    """Both vectors are rotated by their angle and transformed."""
    q, k = torch.randn(2, 4, WIDTH)
    angles = torch.randn(4, 32)
    mine, other = (definition.prepared(x, angles.cos(), angles.sin()) for x in (q, k))
    found = (mine.double() * other.double()).sum(1)
    torch.testing.assert_close(found, (q * k).sum(1).double(), rtol=0, atol=0.5)


def test_the_last_elements_are_rotated():
    x = torch.randn(3, WIDTH)
    quarter = torch.full((3, 32), math.pi / 2)
    found = definition.prepared(x, quarter.cos(), quarter.sin())
    turned = x.clone()
    turned[:, 64::2], turned[:, 65::2] = -x[:, 65::2], x[:, 64::2]
    expected = definition.hadamard(turned)
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=1e-2)


@each_record
def test_scales_of_all_magnitudes(record):
    """Every finite bf16 is the largest of a group once; compared with the published formula in
    fp32."""
    form = index_format(record.name)
    tops = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    rows = torch.zeros(len(tops), form.groups, form.group, dtype=torch.bfloat16)
    rows[..., 5] = -tops[:, None]
    data, scales = definition.quantised(rows.flatten(1), record)
    assert data.shape == (len(tops), record.data_bytes)
    assert scales.shape == (len(tops), record.scale_bytes)
    wanted = {
        "e2m1": tops.float().clamp(min=6 * 2.0**-126) / 6,
        "e4m3": (tops.float() / 448).clamp(min=1e-4),
    }[form.element]
    found = definition.scale_values(scales, record)
    assert torch.equal(found, wanted.log2().ceil().exp2()[:, None].expand_as(found))
    back = definition.dequantised(data, scales, record).view(rows.shape)[..., 5].double()
    error = (back + tops.double()[:, None]).abs()
    largest = {"e2m1": 1.0, "e4m3": 16.0}[form.element]  # half a step of the largest binade
    fits = tops < 2.0**127  # larger ones, rounded up, may exceed fp32
    assert (error <= found.double() * largest)[fits].all()


@each_record
def test_what_is_exact_stays(record):
    """Bytes that are read back and written again stay the same, except for the sign of zeros."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(40, WIDTH, generator=generator).bfloat16()
    data, scales = definition.quantised(rows, record)
    back = definition.dequantised(data, scales, record)
    assert torch.equal(back.bfloat16().float(), back)
    again = definition.quantised(back.bfloat16(), record)
    assert torch.equal(definition.dequantised(*again, record), back)


def test_elements_of_four_bits():
    """Ties round to even, nothing saturates, the even element is in the low bits."""
    row = torch.zeros(WIDTH, dtype=torch.bfloat16)
    row[:10] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.3, -6.0])
    data, scales = definition.quantised(row, INDEXER_FP4)
    assert scales.tolist() == [127, 1, 1, 1]
    assert data[:5].tolist() == [0x07, 0x22, 0x44, 0x66, 0xF9]
    assert not data[16:].any()


@each_record
def test_a_lost_group_stays_alone(record):
    form = index_format(record.name)
    rows = torch.ones(3, WIDTH, dtype=torch.bfloat16)
    rows[0, 3], rows[1, WIDTH - 1] = math.nan, -math.inf
    data, scales = definition.quantised(rows, record)
    lost = torch.zeros(3, form.groups, dtype=torch.bool)
    lost[0, 0], lost[1, -1] = True, True
    assert torch.equal(definition.scale_values(scales, record).isnan(), lost)
    nan = {"e2m1": 0x77, "e4m3": 0x7F}[form.element]
    groups = data.view(3, form.groups, -1)
    assert (groups[lost] == nan).all()
    assert not (groups[~lost] == nan).any()
    back = definition.dequantised(data, scales, record).view(3, form.groups, -1)
    assert torch.equal(back.isnan(), lost[..., None].expand_as(back))


def test_bf16_is_as_it_is():
    rows = torch.randn(3, WIDTH).bfloat16()
    rows[1, 7] = math.nan
    data, scales = definition.quantised(rows, INDEXER_BF16)
    assert scales.shape == (3, 0)
    assert data.view(torch.int16)[1, 7] == 0x7FFF
    assert_equal(definition.dequantised(data, scales, INDEXER_BF16)[0].bfloat16(), rows[0])


def test_formats_fill_their_records():
    for name, form in FORMATS.items():
        assert form.piece_bytes * 16 == form.record.data_bytes
        assert form.groups * form.scale_size == form.record.scale_bytes
        assert index_format(name) is form
    with pytest.raises(NotImplementedError, match="bf16_512"):
        index_format(BF16_512.name)
