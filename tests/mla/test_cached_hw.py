"""Cached attention on a GPU, captured in a graph and replayed for other steps: decoding, and the
steps before attention of a chunk (index tensors, written entries and gathered keys).

`python -m pytest --hw -m hw tests/mla/test_cached_hw.py`
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kernelkit.numerics.tolerance import compare_output
from kvcache.layouts.records import BF16_512, FP8_584, Record
from kvcache.layouts.rows import Rows
from kvcache.movement import reference as movement
from mla.api import Every, Selected, cached_attention
from mla.keys import all_entries, write_chunk
from mla.reference import Token, definition, rounded
from mla.window import EntryPages, see_entries, see_window
from tests.kvcache.movement.rows_cases import assert_equal
from tests.mla.window_cases import BLOCK, Batch

pytestmark = [pytest.mark.hw, pytest.mark.xdist_group("fmha-cached-hw")]

STATES, BLOCKS, RATIO, HEADS, CHOSEN = 40, 100, 2, 64, 70
SIZE = BLOCK // RATIO  # entries of a block
DECODING = {
    "tokens": (
        Batch(((3, 1), (11, 1), (128, 1), (400, 1)), window=128, padding=2),
        Batch(((700, 1), (5, 1)), window=128, padding=4, seed=1),
    ),
    "drafts": (
        Batch(((3, 3), (500, 2)), window=128, draft=3, padding=2),
        Batch(((127, 1), (500, 3), (0, 2)), window=128, draft=3, padding=1, seed=1),
    ),
}
CHUNKS = (
    Batch(((3, 300), (500, 2), (0, 1)), window=128),
    Batch(((127, 299), (0, 3), (77, 1)), window=128, seed=1),
)
PASTS = ("none", "selected", "every")
RECORDS = [BF16_512, FP8_584]
Given = dict[str, torch.Tensor]


def prepared(batch: Batch, record: Record) -> Given:
    """Return all inputs of a step, on the CPU; the pools hold entries without NaN."""
    generator = torch.Generator().manual_seed(batch.seed)
    arrays = replace(batch, blocks=BLOCKS).arrays()
    arrays["block_tables"] %= BLOCKS
    angles = torch.rand(800, 32, generator=generator) * 2 * math.pi
    tokens = len(arrays["positions"])
    for name, slots, rows in (("ring", STATES, batch.rows), ("stream", BLOCKS, SIZE)):
        pool = torch.zeros(slots, record.page_bytes(rows), dtype=torch.uint8)
        numbers, kv = (
            torch.arange(slots * rows),
            torch.randn(slots * rows, 512, generator=generator),
        )
        still = torch.ones(1, 32), torch.zeros(1, 32)
        movement.append_swa(placed(pool, record, rows), kv, numbers * 0, numbers, *still)
        arrays[name] = pool
    return arrays | {
        "kv": torch.randn(tokens, 512, generator=generator).bfloat16(),
        "q": torch.randn(tokens, HEADS, 512, generator=generator).bfloat16(),
        "cos": angles.cos(), "sin": angles.sin(),
        "sinks": torch.randn(HEADS, generator=generator),
        "entries": torch.randint(-1, BLOCKS * SIZE, (tokens, CHOSEN), generator=generator),
        "chosen": torch.randint(CHOSEN + 1, (tokens,), generator=generator).int(),
    }  # fmt: skip


def placed(pool: torch.Tensor, record: Record, rows: int) -> Rows:
    return Rows(pool, 0, rows * record.data_bytes, rows, record)


def pools_of(batch: Batch, record: Record, given: Given) -> tuple[Rows, Rows]:
    """Return the ring and the stream."""
    return placed(given["ring"], record, batch.rows), placed(given["stream"], record, SIZE)


def seen_window(batch: Batch, given: Given):
    return see_window(
        given, given["slots"], window=batch.window, rows=batch.rows, longest=batch.longest,
        context=BLOCKS * BLOCK,
    )  # fmt: skip


def seen_entries(given: Given, in_place: bool) -> EntryPages:
    return see_entries(given, ratio=RATIO, block_entries=SIZE, in_place=in_place)


# -- decoding -------------------------------------------------------------------------------------


def decoded(batch: Batch, record: Record, past: str, given: Given) -> torch.Tensor:
    """Return O of the step's tokens; the ring is written."""
    ring, stream = (
        placed(given[n], record, r) for n, r in (("ring", batch.rows), ("stream", SIZE))
    )
    far: Selected | Every | None = None
    if past == "selected":
        far = Selected(stream, given["entries"], given["chosen"])
    elif past == "every":
        far = Every(stream, seen_entries(given, True))
    return cached_attention(
        given["q"], given["kv"], ring, seen_window(batch, given),
        rope=(given["cos"], given["sin"]), sinks=given["sinks"], past=far,
    )  # fmt: skip


def read(rows: Rows, entries: torch.Tensor) -> torch.Tensor:
    """Return bf16 [n, 512] of the entries that there are."""
    entries = entries[entries >= 0]
    out = torch.zeros(len(entries), 512, dtype=torch.bfloat16)
    movement.gather(rows, entries, out)
    return out


def expected(batch: Batch, record: Record, past: str, host: Given) -> list[torch.Tensor]:
    """Return O of the step's tokens by definition, exact and rounded; the ring is written."""
    ring, stream = pools_of(batch, record, host)
    rope, window = (host["cos"], host["sin"]), seen_window(batch, host)
    movement.append_swa(ring, host["kv"], window.positions, window.slots, *rope)
    pages, tokens = seen_entries(host, True), []
    for token, q in enumerate(host["q"]):
        far = None
        if past == "selected":
            far = read(stream, host["entries"][token, : host["chosen"][token]])
        elif past == "every":
            number = torch.arange(int(pages.counts[token]))
            far = read(stream, pages.table[token, number // SIZE].long() * SIZE + number % SIZE)
        near = read(ring, window.entries[token, : window.lengths[token]])
        position = int(window.positions[token])
        tokens.append(Token(q, position, near, far, rope, sinks=host["sinks"]))
    return [torch.stack([make(token) for token in tokens]) for make in (definition, rounded)]


@pytest.mark.parametrize("past", PASTS)
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
@pytest.mark.parametrize("name", DECODING)
def test_a_graph_of_decoding_serves_other_steps(name, record, past):
    batches = DECODING[name]
    hosts = [prepared(batch, record) for batch in batches]
    device = {key: value.cuda() for key, value in hosts[0].items()}
    decoded(batches[0], record, past, copied(device))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = decoded(batches[0], record, past, device)
    for batch, host in zip((*batches, batches[0]), (*hosts, hosts[0]), strict=True):
        for key, value in host.items():
            device[key].copy_(value)
        graph.replay()
        mine = copied(host)
        exact, like = expected(batch, record, past, mine)
        report = compare_output(found.cpu().double(), exact, like, torch.bfloat16)
        assert report.ok, str(report)
        assert_equal(device["ring"], mine["ring"])


# -- chunks ---------------------------------------------------------------------------------------


def keys_of(batch: Batch, record: Record, given: Given) -> list[torch.Tensor]:
    """Return the keys of the window and of all entries of a stream, and the ring after the step."""
    ring, stream = (
        placed(given[n], record, r) for n, r in (("ring", batch.rows), ("stream", SIZE))
    )
    view, place = seen_window(batch, given), {}
    near = write_chunk(ring, given["kv"], view, (given["cos"], given["sin"]), place)
    far = all_entries(stream, seen_entries(given, False), view.offsets, place)
    return [near.pages, view.table, far.pages, far.table, far.lengths, given["ring"]]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_graph_of_a_chunk_serves_other_steps(record):
    hosts = [prepared(batch, record) for batch in CHUNKS]
    device = {key: value.cuda() for key, value in hosts[0].items()}
    keys_of(CHUNKS[0], record, copied(device))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = keys_of(CHUNKS[0], record, device)
    for batch, host in zip((*CHUNKS, CHUNKS[0]), (*hosts, hosts[0]), strict=True):
        for key, value in host.items():
            device[key].copy_(value)
        graph.replay()
        for mine, theirs in zip(found, keys_of(batch, record, copied(host)), strict=True):
            assert_equal(mine, theirs)


def copied(given: Given) -> Given:
    return {key: value.clone() for key, value in given.items()}
