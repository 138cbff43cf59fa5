"""Layouts of records: regions, places and checkpoints against models that go byte by byte."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.layouts import records
from kvcache.layouts.latent import LATENTS, ROPE
from kvcache.layouts.layout import GUARD_BYTES, Layout, Ring, Stream, Tail
from kvcache.layouts.presets import preset
from kvcache.layouts.records import FP8_584, TMA_ALIGN, Record, plain
from kvcache.layouts.rows import Rows
from tests.kvcache.layouts.any_layout import layouts
from tests.kvcache.movement.rows_cases import Movement

# ---- Layouts: regions, places and checkpoints of any layout, against models that go byte by byte

QUICK = settings(max_examples=60, deadline=None)


def disjoint(pieces):
    """Whether (start, bytes) pieces do not overlap."""
    ordered = sorted(pieces)
    return all(a + n <= b for (a, n), (b, _) in pairwise(ordered))


@QUICK
@given(layouts())
def test_regions_are_disjoint_inside_and_aligned(layout):
    for regions, slot_bytes, arrays in (
        (layout.block_regions, layout.block_bytes, layout.streams),
        (layout.state_regions, layout.state_bytes, (*layout.rings, *layout.tails)),
    ):
        assert disjoint([(r.offset, r.bytes) for r in regions])
        ends = [region.offset + region.bytes for region in regions]
        assert not ends or max(ends) + GUARD_BYTES <= slot_bytes
        assert slot_bytes % TMA_ALIGN == 0
        assert len({(r.name, r.copy) for r in regions}) == len(regions)
        for array in arrays:
            align = getattr(array, "record", Record("", 1)).page_align
            assert slot_bytes % align == 0
            assert all(r.offset % align == 0 for r in regions if r.name == array.name)
    assert not layout.has_state or layout.checkpoint_bytes <= layout.state_bytes + GUARD_BYTES


@QUICK
@given(layouts())
def test_every_row_has_bytes_of_its_own_in_the_page_of_its_copy(layout):
    for pool, arrays in (("block", layout.streams), ("state", layout.rings)):
        taken = []
        for array in arrays:
            packed = getattr(array, "packed", False)
            for copy in range(array.copies):
                place = layout.place(array.name, copy)
                (page,) = [
                    r
                    for r in getattr(layout, f"{pool}_regions")
                    if (r.name, r.copy) == (array.name, 0 if packed else copy)
                ]
                rows, record = place.rows, place.record
                pieces = [(place.data_offset, rows * record.data_bytes)]
                pieces += [(place.scale_offset, rows * record.scale_bytes)] * (
                    record.scale_bytes > 0
                )
                for start, size in pieces:
                    assert page.offset <= start
                    assert start + size <= page.offset + page.bytes
                taken += pieces
        assert disjoint(taken)
        slot_bytes, payload = getattr(layout, f"{pool}_bytes"), sum(size for _, size in taken)
        assert payload <= slot_bytes - GUARD_BYTES * bool(arrays)
    rows = {s.name: layout.place(s.name, 0).rows for s in layout.streams}
    assert rows == {s.name: layout.block_tokens // s.ratio for s in layout.streams}
    assert layout.payload(layout.block_tokens) == layout.block_payload


def needed(array, draft, position):
    """Bytes of a copy's page that later tokens read, derived token by token."""
    rows, needed = array.rows(draft), set()

    def add(start, size):
        needed.update(range(start, start + size))

    if isinstance(array, Ring):
        record = array.record
        for x in range(max(0, position - array.window + 1), position):
            add(x % rows * record.data_bytes, record.data_bytes)
            scales = rows * record.data_bytes
            add(scales + x % rows * record.scale_bytes, record.scale_bytes)
        return needed
    window_of_next = position // array.ratio
    for x in range(position):
        ahead = window_of_next - x // array.ratio  # number of windows until the next token's
        if array.online:
            if x == position - 1 and not ahead:
                add(x % rows * array.row_bytes, array.row_bytes)
            continue
        # Everything of the window itself: its second part now, its first part for the next one.
        parts = array.overlap if not ahead else array.overlap - ahead
        for half in (0, rows * array.row_bytes):
            if parts > 0:
                add(half + x % rows * array.row_bytes, array.row_bytes * parts // array.overlap)
    return needed


@QUICK
@given(layouts(), st.integers(0, 200))
def test_live_rows_are_those_that_later_tokens_read(layout, position):
    for array in (*layout.rings, *layout.tails):
        found = list(array.live(position, layout.draft))
        assert disjoint(found)
        covered = {byte for start, size in found for byte in range(start, start + size)}
        assert covered == needed(array, layout.draft, position)
    pages = {(r.name, r.copy): r for r in layout.state_regions}
    moved = layout.live(position)
    for array in (*layout.rings, *layout.tails):
        for copy in range(array.copies):
            page = pages[array.name, copy]
            inside = [
                (a - page.offset, n)
                for a, n in moved
                if page.offset <= a and a + n <= page.offset + page.bytes
            ]
            bytes_moved = {byte for a, n in inside for byte in range(a, a + n)}
            assert needed(array, layout.draft, position) <= bytes_moved
    assert all(a % TMA_ALIGN == 0 and n % TMA_ALIGN == 0 for a, n in moved)


@QUICK
@given(layouts(), st.integers(0, 300))
def test_a_checkpoint_has_room_for_all_segments(layout, blocks):
    segments = layout.segments(blocks * layout.block_tokens)
    assert [(a, n) for a, _, n in segments] == layout.live(blocks * layout.block_tokens)
    assert disjoint([(start, size) for _, start, size in segments])
    ends = [start + size for _, start, size in segments]
    room = layout.checkpoint_bytes - GUARD_BYTES * layout.has_state
    assert max(ends, default=0) <= room
    assert all(offset + size <= layout.state_bytes for offset, _, size in segments)


@QUICK
@given(layouts(), st.integers(0, 47))
def test_positions_alike_need_the_same_bytes(layout, inside):
    for position in range(inside % layout.block_tokens, 3000, layout.block_tokens):
        alike = layout.alike(position)
        assert 0 <= alike <= position
        assert (position - alike) % layout.block_tokens == 0
        assert layout.alike(alike) == alike
        assert alike == position or layout.live(alike) == layout.live(position)


@pytest.mark.parametrize(("draft", "tables"), [(0, 2), (3, 66)])
def test_so_many_tables_are_all_checkpoints_of_v4_pro(draft, tables):
    """Rings of 128 rows repeat at each block, those of 130 rows after 65 blocks; and position 0."""
    layout = preset("deepseek-v4-pro", draft=draft)
    assert len({layout.alike(128 * block) for block in range(1000)}) == tables


def test_checkpoints_waste_nothing_once_the_windows_are_full():
    ring = Ring("swa", records.BF16_512, 33, 2)
    layout = Layout("exact", 32, (Stream("kv", records.BF16_512, 1, 1),), (ring,), draft=4)
    sizes = {sum(n for *_, n in layout.segments(32 * k)) for k in range(2, 60)}
    assert sizes == {2 * 32 * 1024}
    assert layout.checkpoint_bytes == 2 * 32 * 1024 + GUARD_BYTES


def test_checkpoints_have_room_for_scales_that_begin_anywhere():
    """Nine rows of 8 bytes in a ring of thirteen: 80 bytes, 96 where both ends are odd."""
    ring = Ring("swa", records.FP8_584, 10, 1)
    layout = Layout("odd", 16, (Stream("kv", records.BF16_512, 1, 1),), (ring,), draft=4)
    sizes = {sum(n for *_, n in layout.segments(16 * k)) for k in range(2, 60)}
    assert sizes == {9 * 576 + 80, 9 * 576 + 96}
    assert layout.checkpoint_bytes == max(sizes) + GUARD_BYTES


@QUICK
@given(layouts(), st.integers(0, 120), st.data())
def test_a_step_can_be_taken_back(layout, position, data):
    """After a step of `draft` tokens the rows that earlier tokens need still hold the same
    positions."""
    step = data.draw(st.integers(0, layout.draft))
    for array in (*layout.rings, *layout.tails):
        rows = array.rows(layout.draft)
        holds = {x % rows: x for x in range(position)}
        after = {**holds, **{x % rows: x for x in range(position, position + step)}}
        if isinstance(array, Ring):
            wanted = range(max(0, position - array.window + 1), position)
        elif array.online:
            wanted = range(position - 1, position) if position % array.ratio else ()
        else:
            begun = position - position % array.ratio
            wanted = range(max(0, begun - (array.overlap - 1) * array.ratio), position)
        assert all(after[x % rows] == x for x in wanted)


@pytest.mark.parametrize("draft", [2, 5])
def test_rows_are_the_fewest_that_can_be_taken_back(draft):
    """A ring with one row fewer would overwrite rows that the window still needs."""
    ring, tail = Ring("r", records.BF16_512, 16, 1), Tail("t", 4, 8, 1, overlap=2)
    online = Tail("o", 16, 8, 1, online=True)
    assert [a.rows(draft) for a in (ring, tail, online)] == [15 + draft, 7 + draft, 1 + draft]
    position = 103  # the last token of a window of 4 is missing, so the tail is fullest
    for array, oldest in ((ring, position - 15), (tail, 96), (online, position - 1)):
        fewer = array.rows(draft) - 1
        assert position + draft - 1 - fewer >= oldest


@pytest.mark.parametrize(("change", "words"), [
    ({"streams": ()}, "at least one stream"),
    ({"block_tokens": 0}, "block_tokens 0 at least 1"),
    ({"draft": -1}, "draft -1 at least 0"),
    ({"block_tokens": 6}, "one entry for 4 tokens does not divide a block of 6"),
    ({"streams": (Stream("kv", records.FP8_584, 4, 0),)}, "kv: 0 copies"),
    ({"streams": (Stream("kv", records.FP8_584, 0, 1),)}, "one entry for 0 tokens"),
    ({"rings": (Ring("kv", records.FP8_584, 8, 1),)}, "not distinct"),
    ({"rings": (Ring("swa", records.FP8_584, 0, 1),)}, "a window of 0 tokens"),
    ({"rings": (Ring("swa", records.FP8_584, 8, 1, (0,)),)}, "a map of 1 layers"),
    ({"tails": (Tail("t", 4, 8, 1, of_layer=(1, None)),)}, r"copies \[1\] in its map"),
    ({"tails": (Tail("t", 4, 8, 1, overlap=3),)}, "overlap 3"),
    ({"tails": (Tail("t", 4, 8, 1, overlap=2, online=True),)}, "overlap 2, online True"),
])  # fmt: skip
def test_refusals_name_value_and_limit(change, words):
    fields = {
        "block_tokens": 8,
        "streams": (Stream("kv", records.FP8_584, 4, 1),),
        "model_layers": 2,
    }
    with pytest.raises(ValueError, match=words):
        Layout("wrong", **{**fields, **change})


@pytest.mark.parametrize(("sizes", "words"), [
    ((0,), "odd: 0 data bytes and 0 scale bytes, at least 1 and 0"),
    ((8, -1), "odd: 8 data bytes and -1 scale bytes"),
    ((8, 0, 24), "odd: pages aligned to 24 bytes, a multiple of 16"),
    ((8, 0, 0), "odd: pages aligned to 0 bytes"),
])  # fmt: skip
def test_records_refuse_sizes_that_are_none(sizes, words):
    with pytest.raises(ValueError, match=words):
        Record("odd", *sizes)


def test_unknown_names_say_what_there_is():
    layout = Layout("l", 8, (Stream("kv", records.FP8_584, 4, 1),), tails=(Tail("t", 4, 8, 1),))
    with pytest.raises(ValueError, match="a checkpoint at 9: at least 0, a multiple of 8 tokens"):
        layout.segments(9)
    with pytest.raises(KeyError, match=r"'hca': the layout l has \['kv', 't'\]"):
        layout.find("hca")
    with pytest.raises(IndexError, match="copy 1 of 'kv': it has 1"):
        layout.place("kv", 1)
    with pytest.raises(TypeError, match="'t' is a tail"):
        layout.place("t", 0)


# ---- Records with published byte counts, their pages, and rows of them in a pool

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
    rows = Movement(FP8_584, 0, slots=2, rows=3).build_rows()
    data, scales = rows.data(), rows.scales()
    assert data.shape == (2, 3, 576)
    assert scales.shape == (2, 3, 8)
    slot, begin = rows.pool[1], rows.data_offset + 2 * 576
    assert torch.equal(data[1, 2], slot[begin : begin + 576])
    assert torch.equal(scales[1, 2], slot[rows.scale_offset + 16 : rows.scale_offset + 24])
    assert rows.entries == 6
    rows.check()
    assert Rows(rows.pool[:1], 80, rows.scale_offset, 3, FP8_584).entries == 3
