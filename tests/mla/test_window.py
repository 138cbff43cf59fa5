"""Index tensors of the cache entries that tokens see, compared with loops over positions. No kernel
runs.
"""

from __future__ import annotations

import pytest
import torch

from mla.window import (
    PAGE,
    ChunkWindow,
    TokenWindow,
    chunk_pages,
    pages_of,
    see_entries,
    see_window,
)
from tests.mla.window_cases import BLOCK, Batch

DECODING = [
    Batch(((0, 1),)),
    Batch(((3, 1), (11, 1), (12, 1), (400, 1)), padding=3),
    Batch(((0, 3), (11, 2), (300, 1)), draft=3),
    Batch(((1, 1), (700, 4), (13, 4)), draft=4, padding=1),
    Batch(((127, 1), (128, 1), (129, 1)), window=128, padding=2),
    Batch(((126, 3), (500, 1)), window=128, draft=3),
    Batch((), padding=2),
]
CHUNKS = [
    Batch(((0, 2),)),
    Batch(((0, 300), (7, 1), (127, 2), (128, 129))),
    Batch(((500, 1), (0, 5), (255, 258)), window=128),
    Batch(((1000, 3), (0, 4), (90, 40)), window=128, draft=3),
    Batch(((5, 2), (0, 3)), padding=2),
    Batch(((3, 2),), window=1),
    Batch(((255, 2),), window=128),  # its keys begin with a page
    Batch(((50, 0), (5, 2), (60, 0), (0, 3), (90, 0))),
]


@pytest.mark.parametrize("batch", DECODING, ids=str)
def test_a_token_of_a_decoding_step_sees_rows_of_its_ring(batch):
    arrays, view = batch.view()
    assert isinstance(view, TokenWindow)
    states, rows = arrays["state_slots"].tolist(), batch.rows
    for token, (position, slot) in enumerate(
        zip(arrays["positions"].tolist(), arrays["slots"].tolist(), strict=True)
    ):
        count = int(view.lengths[token])
        if slot < 0:
            assert count == int(view.positions[token]) == 0
        else:
            state = states[int(arrays["owners"][token])]
            seen = range(max(0, position - batch.window + 1), position + 1)
            expected = {state * rows + p % rows for p in seen}
            assert len(expected) == len(seen) == count
            assert set(view.entries[token, :count].tolist()) == expected
            assert int(view.positions[token]) == position
        assert (view.entries[token, count:] == -1).all()


def where(view: ChunkWindow) -> dict[int, tuple[str, int]]:
    """Map each row of the pages to its source: ('token', its number in the step), or ('ring',
    entry)."""
    found = {}
    for row, token in enumerate(view.own.flatten().tolist()):
        if token >= 0:
            found[row] = ("token", token)
    for row, entry in zip(view.older_rows.flatten().tolist(), view.older.flatten().tolist(),
                          strict=True):  # fmt: skip
        assert (row < 0) == (entry < 0)
        if row >= 0:
            assert row not in found
            found[row] = ("ring", entry)
    return found


@pytest.mark.parametrize("batch", CHUNKS, ids=str)
def test_keys_of_a_chunk_stand_in_pages_by_their_position(batch):
    arrays, view = batch.view()
    assert isinstance(view, ChunkWindow)
    assert view.table.shape[1] * PAGE >= max(arrays["lengths"].tolist())
    found = where(view)
    for b, (start, tokens) in enumerate(batch.requests):
        state, first = int(arrays["state_slots"][b]), int(arrays["cu_tokens"][b])
        for position in range(max(0, start - batch.window + 1), start + tokens):
            row = int(view.table[b, position // PAGE]) * PAGE + position % PAGE
            what = ("ring", state * batch.rows + position % batch.rows)
            if position >= start:
                what = ("token", first + position - start)
            assert found.pop(row) == what
    assert not found  # and every other row is unused, and zero
    pages = len(view.own)
    assert int(view.table.min()) >= 0
    assert int(view.table.max()) < pages
    assert pages == chunk_pages(len(arrays["positions"]), len(arrays["starts"]), batch.window)


@pytest.mark.parametrize("batch", [DECODING[1], DECODING[3], CHUNKS[1], CHUNKS[4]], ids=str)
@pytest.mark.parametrize(("ratio", "size"), [(4, 2), (8, 1), (1, 8)])
def test_entries_of_a_stream(batch, ratio, size):
    arrays = batch.arrays()
    blocks = arrays["block_tables"]
    views = [
        see_entries(arrays, ratio=ratio, block_entries=size, in_place=in_place, pages=pages)
        for in_place, pages in (
            (False, None), (False, pages_of(arrays["lengths"].numpy() // ratio)), (True, None)
        )
    ]  # fmt: skip
    count = sum(tokens for _, tokens in batch.requests)
    assert not any(view.counts[count:].any() for view in views)
    for token, position in enumerate(arrays["positions"].tolist()[:count]):
        owner = int(arrays["owners"][token])
        for view in views:
            assert int(view.counts[token]) == (position + 1) // ratio
            for entry in range((position + 1) // ratio):
                expected = int(blocks[owner, entry // size]), entry % size
                if view.entries is None:
                    assert int(view.table[token, entry // size]) == expected[0]
                    continue
                row = view.entries[int(view.table[token, entry // PAGE]), entry % PAGE]
                assert int(row) == expected[0] * size + expected[1]
    assert views[2].entries is None
    expected = sum(end // ratio for end in arrays["lengths"].tolist())
    assert all(int((view.entries >= 0).sum()) == expected for view in views[:2])
    assert len(views[1].entries) <= len(views[0].entries)


def test_what_does_not_fit_is_refused():
    batch = CHUNKS[1]
    arrays = batch.arrays()
    with pytest.raises(ValueError, match="4 pages of 128 keys, limit 3"):
        see_entries(arrays, ratio=4, block_entries=2, in_place=False, pages=3)
    with pytest.raises(ValueError, match="window of 12 tokens in rings of 11 rows"):
        see_window(arrays, arrays["slots"], window=12, rows=11, longest=1, context=8)


@pytest.mark.parametrize("batch", [DECODING[1], CHUNKS[1]], ids=str)
def test_no_value_on_a_gpu_is_waited_for(batch):
    """Tensors on meta simulate those of a GPU: reading a value raises."""
    arrays = batch.arrays()
    real = batch.view()[1]
    bare = {name: x.to("meta") for name, x in arrays.items()}
    view = see_window(
        bare, bare["slots"], window=batch.window, rows=batch.rows, longest=batch.longest,
        context=bare["block_tables"].shape[1] * BLOCK,
    )  # fmt: skip
    see_entries(bare, ratio=4, block_entries=2, in_place=False)
    for name, made in vars(view).items():
        if isinstance(made, torch.Tensor):
            expected = getattr(real, name)
            assert (made.shape, made.dtype) == (expected.shape, expected.dtype), name
            assert made.device.type == "meta"
