"""Records of latent entries, and the reference of attention to them."""

from __future__ import annotations

import math

import pytest
import torch

from kernelkit.numerics import e2m1
from kvcache.layouts.records import FP8_584, Record, plain
from mla.attention import codec, reference
from mla.attention.codec import RECORDS
from mla.attention.formats import FORMS
from mla.attention.portable.plan import raw_bytes


@pytest.mark.parametrize("name", RECORDS)
def test_forms_agree_with_the_records_of_kvcache(name):
    form, record = FORMS[name], RECORDS[name]
    inside = form.scale_at >= 0
    assert form.data_bytes == record.data_bytes
    assert form.scale_bytes == record.scale_bytes
    assert form.coded + form.wide == form.columns
    assert raw_bytes(form) % 16 == 0
    if form.group:
        width = {"fp32": 4, "ue8m0": 1, "e4m3": 1}[form.scale]
        there = form.wide_at - form.scale_at if inside else form.scale_bytes
        assert there >= form.groups * width


@pytest.mark.parametrize("name", RECORDS)
def test_what_is_encoded_comes_back(name):
    """Numbers that the record has come back as they are; others within half a step of a group."""
    form = FORMS[name]
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(40, form.columns, generator=generator).bfloat16()
    values[1] = 0
    data, scales = codec.encode(values, name)
    assert data.shape == (40, RECORDS[name].data_bytes)
    found = codec.decode(data, scales, name)
    again = codec.decode(*codec.encode(found, name), name)
    if form.code != "e2m1":  # whose scales round
        assert torch.equal(again, found)
    assert not found[1].any()
    error = (found.float() - values.float()).abs()
    assert not error[:, form.coded :].any()
    if form.coded:
        top = values[:, : form.coded].float().view(40, form.groups, form.group).abs().amax(-1)
        step = {"e4m3": 2.0**-4, "e2m1": 0.25}[form.code]
        groups = error[:, : form.coded].view(40, form.groups, form.group)
        assert (groups <= top[..., None] * step).all()


@pytest.mark.parametrize("name", [name for name in RECORDS if FORMS[name].group])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_group_with_a_nan_is_lost(name, value):
    form = FORMS[name]
    values = torch.full((1, form.columns), 3.0).bfloat16()
    values[0, form.group + 1] = value
    found = codec.decode(*codec.encode(values, name), name)[0]
    lost = found.isnan()
    assert lost[form.group : 2 * form.group].all()
    assert lost.sum() == form.group
    assert (found[~lost] == 3).all()


def test_bytes_of_the_records_of_deepseek_v41():
    """Written out: FP8 has exponent bytes of groups of 32, FP4 e4m3 scales of groups of 16."""
    values = torch.zeros(1, 512).bfloat16()
    values[0, :2] = torch.tensor([448.0, -2.0])
    values[0, 33] = 0.5
    data, scales = codec.encode(values, "fp8_528")
    assert data[0, :2].tolist() == [0x7E, 0xC0]
    assert data[0, 33] == 0x78  # 0.5 / 2^-9 = 256
    assert scales[0, :3].tolist() == [127, 127 - 9, 127 - 13]
    values[0, :3] = torch.tensor([6.0, -3.0, 0.5])
    values[0, 33] = 0.0
    data, scales = codec.encode(values, "fp4_288")
    assert data[0, :2].tolist() == [7 | (5 | e2m1.SIGN) << 4, 1]
    assert scales[0, :2].tolist() == [0x38, 0x01]  # 1.0, and the smallest e4m3


def test_pages_hold_data_before_scales():
    values = torch.randn(3, 4, 512).bfloat16()
    rows = codec.pack(values, "fp8_528", spare_bytes=16)
    rows.check()
    data, scales = codec.encode(values[1], "fp8_528")
    page = rows.pool[1]
    assert torch.equal(page[16 : 16 + 4 * 512].view(4, 512), data)
    assert torch.equal(page[16 + 4 * 512 : 16 + 4 * 528].view(4, 16), scales)
    assert torch.equal(
        codec.unpack(rows, torch.tensor([[5, 0]])), codec.unpack(rows)[[1, 0], [1, 0]][None]
    )


def test_other_records_are_refused():
    with pytest.raises(NotImplementedError, match="indexer of 132 bytes"):
        codec.form_of(Record("indexer", 128, 4))
    with pytest.raises(NotImplementedError, match="fp8_584 of 584"):
        codec.form_of(Record("fp8_584", 576, 8, page_align=32))
    with pytest.raises(NotImplementedError, match="k of 1152"):
        codec.form_of(plain("k", 1, 576))
    with pytest.raises(ValueError, match=r"\(n, 512\) for fp8_584"):
        codec.encode(torch.zeros(2, 576).bfloat16(), FP8_584.name)


# ---- the reference, by sums over single numbers


def by_hand(q, keys, sink, scale):
    """(O [512], LSE) of one query row, with Python's floats."""
    logits = [scale * sum(a * b for a, b in zip(q, key, strict=True)) for key in keys]
    if not logits:
        return [0.0] * 512, -math.inf
    weights = [math.exp(logit) for logit in logits]
    total = sum(weights)
    whole = total + (math.exp(sink) if sink is not None else 0.0)
    o = [sum(w * key[c] for w, key in zip(weights, keys, strict=True)) / whole for c in range(512)]
    return o, math.log(total)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_reference_is_a_softmax(with_sinks):
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, 3, 2, 512, generator=generator).bfloat16()
    first, second = (torch.randn(9, 512, generator=generator).bfloat16() for _ in range(2))
    places = torch.tensor([[3, 3, -1, 8, 9, 2], [0, 1, 2, 3, 4, 5]])
    more = torch.tensor([[1 << 40, 5], [7, 7]])
    counts, sinks = torch.tensor([6, 2]), torch.tensor([0.3, -2.0])
    sources = [reference.Source(first, places, counts), reference.Source(second, more)]
    options = {"scale": 0.05, "causal": True, "sinks": sinks if with_sinks else None}
    found = [f(q, sources, **options) for f in (reference.definition, reference.rounded)]
    for entry, token, head in ((0, 0, 1), (0, 2, 0), (1, 0, 0), (1, 2, 1)):
        end = int(counts[entry]) - (2 - token)
        keys = [first[n].tolist() for n in places[entry, : max(end, 0)] if 0 <= n < 9]
        keys += [second[n].tolist() for n in more[entry] if 0 <= n < 9]
        sink = float(sinks[head]) if with_sinks else None
        o, lse = by_hand(q[entry, token, head].tolist(), keys, sink, 0.05)
        row = torch.tensor(o, dtype=torch.float64)
        for each, limit in zip(found, (1e-9, 2e-2), strict=True):
            assert (each.o[entry, token, head].double() - row).abs().max() < limit
            assert abs(each.lse[entry, head, token].item() - lse) < limit


def test_rows_without_keys_and_rotated_columns():
    q = torch.ones(1, 1, 1, 512).bfloat16()
    keys = torch.arange(512.0).bfloat16()[None]
    angle = torch.linspace(0.0, 3.0, 32)
    rope = (angle.cos()[None], angle.sin()[None])
    options = {"rope": rope, "positions": torch.tensor([0]), "sinks": torch.tensor([1.0])}
    none = reference.definition(q, [reference.Source(keys, torch.tensor([[-1]]))], **options)
    assert not none.o.any()
    assert none.lse.item() == -math.inf
    one = reference.definition(q, [reference.Source(keys, torch.tensor([[0]]))], rope=rope,
                               positions=torch.tensor([5]))  # fmt: skip
    x, y = keys[0, 448::2].double(), keys[0, 449::2].double()
    assert torch.allclose(one.o[0, 0, 0, 448::2], x * rope[0][0] + y * rope[1][0], atol=1e-4)
    assert torch.allclose(one.o[0, 0, 0, 449::2], y * rope[0][0] - x * rope[1][0], atol=1e-4)
    assert torch.equal(one.o[0, 0, 0, :448], keys[0, :448].double())


def test_pages_of_a_table():
    keys = torch.arange(6.0).view(3, 2, 1).expand(3, 2, 512)
    table = torch.tensor([[2, 0], [7, 1]], dtype=torch.int32)
    source = reference.of_pages(keys, table, torch.tensor([3, 4]))
    assert source.places.tolist() == [[4, 5, 0, 1], [-1, -1, 2, 3]]
