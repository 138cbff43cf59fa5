"""Page lists of FlashInfer become tables, and positions become slots, compared with naive loops."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from kvcache import page_slots, page_table

INT = torch.int32


def ints(*values):
    return torch.tensor(values, dtype=INT)


def naive(indptr, indices, last, page_size, width):
    """Build the table and the lengths entry by entry."""
    table, lengths = [], []
    for entry, rows in enumerate(last):
        pages = indices[indptr[entry] : indptr[entry + 1]]
        table.append([*pages, *[-1] * (width - len(pages))])
        lengths.append((len(pages) - 1) * page_size + rows if pages else 0)
    return table, lengths


def drawn(seed):
    """Draw page lists of a few entries, some without pages, and more indices than are used."""
    draw = random.Random(seed)
    page_size, batch = draw.choice((1, 3, 16)), draw.randint(1, 6)
    counts = [draw.choice((0, 1, 2, 5)) for _ in range(batch)]
    indptr = [sum(counts[:entry]) for entry in range(batch + 1)]
    indices = draw.sample(range(100), sum(counts) + draw.choice((0, 3)))
    last = [draw.randint(1, page_size) if count else draw.choice((0, 1)) for count in counts]
    return indptr, indices, last, page_size


@pytest.mark.parametrize("seed", range(40))
def test_tables_of_a_naive_loop(seed):
    indptr, indices, last, page_size = drawn(seed)
    given = ints(*indptr), ints(*indices), ints(*last), page_size
    longest = max(end - begin for begin, end in pairwise(indptr))
    for most in (None, longest, longest + 2):
        table, lengths = page_table(*given, max_pages=most)
        width = longest if most is None else most
        assert (table.tolist(), lengths.tolist()) == naive(indptr, indices, last, page_size, width)
        assert table.dtype == lengths.dtype == INT
        assert table.is_contiguous()


def test_no_entries_and_no_pages():
    for batch in (0, 2):
        table, lengths = page_table(
            torch.zeros(batch + 1, dtype=INT), ints(), ints(*[0] * batch), 4
        )
        assert table.shape == (batch, 0)
        assert lengths.tolist() == [0] * batch


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"indptr": ints(1, 2, 3)}, ValueError, r"indptr \[1, 2, 3\]: not ascending from 0"),
        ({"indptr": ints(0, 3, 2)}, ValueError, "not ascending from 0 to at most 3 indices"),
        ({"indptr": ints(0, 1, 4)}, ValueError, "to at most 3 indices"),
        ({"indptr": ints(0, 3)}, ValueError, r"indptr has 2 numbers, last_page_len 2: B \+ 1"),
        ({"indptr": ints(0, 1, 3).long()}, ValueError, r"Give indptr.int\(\)"),
        ({"indices": ints(0, -1, 2)}, ValueError, "indices has numbers from -1 to 2"),
        ({"indices": ints(0, 1, 2).to("meta")}, ValueError, "indptr is on cpu, indices on meta"),
        ({"last_page_len": ints(4, 5)}, ValueError, "last_page_len 5 of entry 1: from 1 to 4"),
        ({"last_page_len": ints(0, 1)}, ValueError, "last_page_len 0 of entry 0: from 1 to 4"),
        ({"last_page_len": [1, 1]}, TypeError, "last_page_len is list"),
        ({"page_size": 0}, ValueError, "page_size 0: at least 1"),
        ({"max_pages": 1}, ValueError, "max_pages 1, but an entry has 2 pages"),
        ({"max_pages": 1 << 40}, ValueError, "at most 536870911 keys"),
    ],
)
def test_lists_that_are_refused(changes, error, words):
    given = {"indptr": ints(0, 1, 3), "indices": ints(5, 0, 2), "last_page_len": ints(4, 1)}
    given |= {"page_size": 4, "max_pages": None}
    page_table(**given)
    with pytest.raises(error, match=words):
        page_table(**given | changes)


@pytest.mark.parametrize("seed", range(20))
def test_slots_of_a_naive_loop(seed):
    draw = random.Random(seed)
    indptr, indices, last, page_size = drawn(seed)
    table, lengths = page_table(ints(*indptr), ints(*indices), ints(*last), page_size)
    known = [(entry, p) for entry, size in enumerate(lengths.tolist()) for p in range(size)]
    tokens = [*draw.sample(known, min(len(known), 7)), (-1, 0), (0, -1)]
    expected = [
        -1 if min(token) < 0 else indices[indptr[token[0]] + token[1] // page_size] * page_size
        + token[1] % page_size
        for token in tokens
    ]  # fmt: skip
    for kind in (INT, torch.int64):
        entries, positions = torch.tensor(tokens, dtype=kind).T.contiguous()
        slots = page_slots(table, positions, page_size, entries=entries)
        assert slots.dtype == torch.int64
        assert slots.tolist() == expected


def test_slots_of_some_tokens_of_every_entry():
    """A cache without pages is treated as one page for each entry."""
    table, positions = ints(3, 0)[:, None], torch.tensor([[4, 5], [0, -1]])
    assert page_slots(table, positions, 10).tolist() == [34, 35, 0, -1]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"positions": torch.tensor([3, 8])}, ValueError, "positions has numbers from 3 to 8: the"),
        ({"positions": torch.tensor([3, 4])}, ValueError, "pages of tokens has numbers from -1"),
        ({"positions": torch.ones(2)}, ValueError, "positions is torch.float32"),
        ({"positions": torch.ones(2, 1).long()}, ValueError, "positions is torch.int64"),
        ({"entries": torch.tensor([0, 2])}, ValueError, "entries has numbers from 0 to 2: the"),
        ({"entries": torch.tensor([0])}, ValueError, r"entries is torch.int64 \(1,\), expected"),
        ({"entries": None}, ValueError, "positions is torch.int64"),
        ({"table": torch.tensor([[5, 1], [2, -1]])}, ValueError, r"Give table.int\(\)"),
        ({"page_size": -4}, ValueError, "page_size -4"),
    ],
)
def test_slots_that_are_refused(changes, error, words):
    given = {"table": ints(5, 1, 2, -1).view(2, 2), "positions": torch.tensor([7, 3])}
    given |= {"page_size": 4, "entries": torch.tensor([0, 1])}
    assert page_slots(**given).tolist() == [7, 11]
    with pytest.raises(error, match=words):
        page_slots(**given | changes)


def moved(device, indptr, indices, last, page_size):
    """Return page lists on a device."""
    return *(ints(*each).to(device) for each in (indptr, indices, last)), page_size


def test_the_host_reads_nothing_that_is_not_on_the_cpu():
    """Tensors on 'meta' have no values that could be read."""
    indptr, indices, last, page_size = drawn(3)
    table, lengths = page_table(*moved("meta", indptr, indices, last, page_size), max_pages=5)
    assert (table.shape, lengths.shape) == ((len(last), 5), (len(last),))
    assert table.dtype == lengths.dtype == INT
    entries = torch.zeros(7, dtype=INT, device="meta")
    slots = page_slots(table, entries, page_size, entries=entries)
    assert (slots.shape, slots.dtype) == ((7,), torch.int64)


@pytest.mark.hw
def test_on_a_gpu_nothing_waits_and_a_graph_captures_it():
    indptr, indices, last, page_size = drawn(3)
    expected = naive(indptr, indices, last, page_size, 5)
    given = moved("cuda", indptr, indices, last, page_size)
    host = ints(*indptr), given[1], ints(*last), page_size
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [page_table(*lists, max_pages=5) for lists in (given, host)]
        slots = page_slots(found[0][0], found[0][1][:, None] - 1, page_size)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.append(page_table(*given, max_pages=5))
    graph.replay()
    for table, lengths in found:
        assert (table.tolist(), lengths.tolist()) == expected
    table, lengths = (torch.tensor(each, dtype=INT) for each in expected)
    assert slots.tolist() == page_slots(table, lengths[:, None] - 1, page_size).tolist()


@pytest.mark.hw
def test_on_a_gpu_an_entry_ends_with_the_table():
    lists = moved("cuda", [0, 3, 4], [5, 2, 0, 1], [1, 4], 4)
    table, lengths = page_table(*lists, max_pages=2)
    assert (table.tolist(), lengths.tolist()) == ([[5, 2], [1, -1]], [8, 4])
    far = torch.tensor([[8], [3]], device="cuda")
    assert page_slots(table, far, 4).tolist() == [-1, 7]
