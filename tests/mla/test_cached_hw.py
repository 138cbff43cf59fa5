"""The steps of cached attention before attention itself, on a GPU: index tensors, written entries
and gathered keys, captured in a graph and replayed for other steps. Attention itself needs a
Blackwell GPU.

`python -m pytest --hw -m hw tests/mla/test_cached_hw.py`
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kvcache.layouts.records import BF16_512, FP8_584, Record
from kvcache.layouts.rows import Rows
from mla.keys import all_entries, gathered, write_chunk, write_tokens
from mla.window import TokenWindow, see_entries, see_window
from tests.kvcache.movement.rows_cases import assert_equal
from tests.mla.window_cases import BLOCK, Batch

pytestmark = [pytest.mark.hw, pytest.mark.xdist_group("fmha-cached-hw")]

STATES, BLOCKS, RATIO = 40, 100, 2
PAIRS = {
    "decoding": (
        Batch(((3, 1), (11, 1), (128, 1), (400, 1)), window=128, padding=2),
        Batch(((700, 1), (5, 1)), window=128, padding=4, seed=1),
    ),
    "drafts": (
        Batch(((3, 3), (500, 2)), window=128, draft=3, padding=2),
        Batch(((127, 1), (500, 3), (0, 2)), window=128, draft=3, padding=1, seed=1),
    ),
    "chunks": (
        Batch(((3, 300), (500, 2), (0, 1)), window=128),
        Batch(((127, 299), (0, 3), (77, 1)), window=128, seed=1),
    ),
}


def prepared(batch: Batch, record: Record) -> dict[str, torch.Tensor]:
    """Return all inputs of a step, on the CPU; the pools hold entries without NaN."""
    generator = torch.Generator().manual_seed(batch.seed)
    arrays = replace(batch, blocks=BLOCKS).arrays()
    arrays["block_tables"] %= BLOCKS
    angles = torch.rand(800, 32, generator=generator) * 2 * math.pi
    for name, slots, rows in (("ring", STATES, batch.rows), ("stream", BLOCKS, BLOCK // RATIO)):
        size = slots, record.page_bytes(rows)
        # Bytes below 0x70 make no NaN anywhere in a record.
        arrays[name] = torch.randint(0, 0x70, size, dtype=torch.uint8, generator=generator)
    kv = torch.randn(len(arrays["positions"]), 512, generator=generator).bfloat16()
    return arrays | {"kv": kv, "cos": angles.cos(), "sin": angles.sin()}


def run(batch: Batch, record: Record, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the keys of the window and of all entries of a stream, and the ring after the step."""
    pools = [
        Rows(given[name], 0, rows * record.data_bytes, rows, record)
        for name, rows in (("ring", batch.rows), ("stream", BLOCK // RATIO))
    ]
    view = see_window(
        given, given["slots"], window=batch.window, rows=batch.rows, longest=batch.longest,
        context=BLOCKS * BLOCK,
    )  # fmt: skip
    rope, place = (given["cos"], given["sin"]), {}
    if isinstance(view, TokenWindow):
        write_tokens(pools[0], given["kv"], view, rope, place)
        near = [gathered(pools[0], view.entries, place), view.lengths, view.rings]
    else:
        near = [write_chunk(pools[0], given["kv"], view, rope, place).pages, view.table]
    entries = see_entries(given, ratio=RATIO, block_entries=BLOCK // RATIO, in_place=False)
    far = all_entries(pools[1], entries, view.offsets, place)
    return [*near, far.pages, far.table, far.lengths, given["ring"]]


@pytest.mark.parametrize("record", [BF16_512, FP8_584], ids=lambda record: record.name)
@pytest.mark.parametrize("name", PAIRS)
def test_a_graph_serves_other_steps(name, record):
    batches = PAIRS[name]
    hosts = [prepared(batch, record) for batch in batches]
    device = {key: value.cuda() for key, value in hosts[0].items()}
    run(batches[0], record, {key: value.clone() for key, value in device.items()})  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(batches[0], record, device)
    for batch, host in zip((*batches, batches[0]), (*hosts, hosts[0]), strict=True):
        for key, value in host.items():
            device[key].copy_(value)
        graph.replay()
        expected = run(batch, record, {key: value.clone() for key, value in host.items()})
        for mine, theirs in zip(found, expected, strict=True):
            assert_equal(mine, theirs)
