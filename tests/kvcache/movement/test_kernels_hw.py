"""The data movement on the GPU itself: bytes of the reference, offsets beyond 32 bits, graphs that
are captured once and replayed with other mappings, pinned memory of the host.

`python -m pytest --hw -m hw tests/kvcache/movement/test_kernels_hw.py`
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcache.layouts.records import BF16_512, FP8_584, Record
from kvcache.layouts.rows import Rows
from kvcache.movement import api, reference
from tests.kvcache.movement.rows_cases import (
    ANGLES,
    LATENT_RECORDS,
    Append,
    Gather,
    Movement,
    Plain,
    Slots,
    Sums,
    assert_equal,
    latents,
)

pytestmark = [pytest.mark.hw, pytest.mark.xdist_group("kvcache-hw")]

each_record = pytest.mark.parametrize("record", LATENT_RECORDS, ids=lambda r: r.name)
GIB = 1 << 30
SLOT_BYTES = 644_032
PARTS = ((16, 32, 400_000), (500_000, 400_032, 64), (0, 0, 0), (600_000, 600_000, 1600))
CASES = [
    *(
        kind(record, tokens, 90, 61, dtype=dtype, seed=tokens)
        for kind, dtype in ((Append, "bf16"), (Append, "fp32"), (Gather, "bf16"))
        for record in LATENT_RECORDS
        for tokens in (0, 1, 5, 31, 128, 1000, 5000)
    ),
    *(
        Plain(tokens, k, v, apart=apart, gap=gap)
        for k in ((8, 128), (1, 576), (3, 7), (128,))
        for v, apart, gap in ((k, 24, 80), ((), 24, 80), ((1,), 1, 82), ((), 1, 82))
        for tokens in (1, 34)
    ),
    Slots(SLOT_BYTES),
    Slots(SLOT_BYTES, SLOT_BYTES),
    Slots(SLOT_BYTES, segments=PARTS),
    Slots(SLOT_BYTES, SLOT_BYTES + 160, segments=PARTS),
    Sums(1_000_000, 32, 999_936),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes(case):
    case.check("cuda")


@each_record
def test_rows_behind_four_gib(record):
    """Entries that 32 bits do not address are written and read back."""
    rows, slot_bytes = 128, 1 << 20
    slots = 9 * GIB // 2 // slot_bytes
    pool = torch.zeros(slots, slot_bytes, dtype=torch.uint8, device="cuda")
    where = Rows(pool, 64, 512 << 10 if record.scale_bytes else 0, rows, record)
    tokens = 256
    numbers = torch.arange(tokens, device="cuda") * (where.entries // tokens)
    numbers[-rows:] = torch.arange(rows, device="cuda") + where.entries - rows
    case = Movement(record, tokens)
    kv, (positions, cos, sin) = case.latents("cuda"), case.rope("cuda")
    api.append_swa(where, kv, positions, numbers, cos, sin)
    expected = reference.rotated(*(x.cpu() for x in (kv, cos[positions], sin[positions])))
    out = torch.empty(kv.shape, dtype=torch.bfloat16, device="cuda")
    api.gather(where, numbers, out)
    if record != BF16_512:
        expected = reference.dequantised(*reference.quantised(expected, record), record)
    assert_equal(out, expected)
    written = pool.view(torch.int64).count_nonzero(1).nonzero().flatten().tolist()
    assert written == sorted(set((numbers // rows).tolist()))


def test_slots_behind_four_gib():
    slot_bytes, slots = 20 << 20, 240
    pool = torch.zeros(slots, slot_bytes, dtype=torch.uint8, device="cuda")
    pool[1] = torch.randint(0, 256, (slot_bytes,), device="cuda")
    pairs = torch.tensor([[1, slots - 1], [-1, 5], [1, slots - 7]], device="cuda")
    api.copy_slots(pool, pool, pairs)
    for slot in (slots - 1, slots - 7):
        assert torch.equal(pool[slot], pool[1])
    assert [s for s in range(slots) if pool[s].any()] == [1, slots - 7, slots - 1]
    sums = api.checksum(pool, torch.tensor([1, slots - 1, 0], device="cuda"), 0, slot_bytes)
    assert sums[0] == sums[1] != sums[2]


def test_out_of_range_writes_nothing():
    """On a GPU nothing checks the numbers before: the kernel skips such rows."""
    case = Movement(FP8_584, 6)
    rows, kv, (positions, cos, sin) = case.build_rows("cuda"), *_of(case)
    wrong = torch.tensor([rows.entries, -2, 1 << 40, -(1 << 62), rows.entries + 1, -1])
    before = rows.pool.clone()
    api.append_swa(rows, kv, positions, wrong.cuda(), cos, sin)
    api.append_swa(rows, kv, positions + ANGLES, wrong.cuda(), cos, sin)
    pairs = torch.tensor([[0, 5], [5, 0], [-2, 1], [1 << 40, 2]]).cuda()
    api.copy_slots(rows.pool, rows.pool, pairs)
    segments = torch.tensor([[0, rows.pool.shape[1] - 16, 32], [-16, 0, 16]]).cuda()
    api.copy_slots(rows.pool, rows.pool, torch.tensor([[0, 1]]).cuda(), segments)
    assert torch.equal(rows.pool, before)
    out = torch.ones(6, 512, dtype=torch.bfloat16, device="cuda")
    api.gather(rows, wrong.cuda(), out)
    assert not out.any()
    assert not api.checksum(rows.pool, torch.tensor([-2, 5, 1 << 40]).cuda(), 0, 64).any()


def _of(case):
    return case.latents("cuda"), case.rope("cuda")


@each_record
def test_is_captured_in_a_graph(record):
    """Replays have other values, positions and mappings, including padding."""
    first, later = (Movement(record, 300, 90, 61, seed=seed) for seed in (1, 2))
    rows, kv, (positions, cos, sin) = first.build_rows("cuda"), *_of(first)
    slots = first.mapping("cuda")
    out = torch.empty(kv.shape, dtype=torch.bfloat16, device="cuda")
    pairs = torch.tensor([[3, 4], [-1, -1]], device="cuda")

    def step() -> torch.Tensor:
        api.append_swa(rows, kv, positions, slots, cos, sin)
        api.gather(rows, slots, out)
        api.copy_slots(rows.pool, rows.pool, pairs)
        return api.checksum(rows.pool, pairs[:, 1].contiguous(), 0, 4096)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums = step()
    values = later.latents("cuda"), later.rope("cuda")[0], later.mapping("cuda")
    pairs.copy_(torch.tensor([[-1, 2], [5, 6]]))
    expected = rows.pool.clone()
    for tensor, new in zip((kv, positions, slots), values, strict=True):
        tensor.copy_(new)
    graph.replay()
    moved = replace(rows, pool=expected.cpu())
    reference.append_swa(moved, *(x.cpu() for x in (kv, positions, slots, cos, sin)))
    found = torch.empty(kv.shape, dtype=torch.bfloat16)
    reference.gather(moved, slots.cpu(), found)
    reference.copy_slots(moved.pool, moved.pool, pairs.cpu())
    assert_equal(rows.pool, moved.pool)
    assert_equal(out, found)
    assert sums.tolist() == reference.checksum(moved.pool, pairs[:, 1].cpu(), 0, 4096).tolist()


@pytest.mark.parametrize("segmented", [True, False], ids=["segments", "slots"])
def test_pinned_memory(segmented):
    """The kernel itself offloads to slots of the host and fetches to others."""
    size, slots = SLOT_BYTES, 6
    pool = torch.randint(0, 256, (slots, size), dtype=torch.uint8, device="cuda")
    host = torch.zeros(slots, size, dtype=torch.uint8, pin_memory=True)
    segments = api.cut_segments([(0, 0, size - 64), (size - 64, size - 64, 64)]).cuda()
    segments = segments if segmented else None
    before = pool.clone()
    api.copy_slots(pool, host, torch.tensor([[0, 5], [3, 1]]).cuda(), segments)
    torch.cuda.synchronize()
    assert torch.equal(host[5], before[0].cpu())
    assert torch.equal(host[1], before[3].cpu())
    assert not host[[0, 2, 3, 4]].any()
    api.copy_slots(host, pool, torch.tensor([[5, 4], [1, 2]]).cuda(), segments)
    assert torch.equal(pool, before[[0, 1, 3, 3, 0, 5]])


def test_equal_bytes_every_time():
    case = Movement(FP8_584, 5000, 90, 61)
    kv, (positions, cos, sin), slots = *_of(case), case.mapping("cuda")
    pools = []
    for _ in range(10):
        rows = case.build_rows("cuda")
        api.append_swa(rows, kv, positions, slots, cos, sin)
        pools.append(rows.pool)
    assert all(torch.equal(pool, pools[0]) for pool in pools)


def test_every_bf16_as_the_largest_of_its_group():
    """All finite magnitudes, next to smaller ones: scales and elements are the reference's."""
    tops = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    tokens = -(-len(tops) // 7)
    kv = latents(tokens, 5, torch.bfloat16).nan_to_num(0.0, 0.0, 0.0)
    share = torch.rand(tokens * 7, 64) * 2 - 1
    values = torch.zeros(tokens * 7, 64)
    values[: len(tops)] = tops.float()[:, None] * share[: len(tops)]
    values[: len(tops), 9] = tops.float()
    kv[:, :448] = values.view(tokens, 448).bfloat16()
    rows = Rows(torch.zeros(1, tokens * 584 + 400, dtype=torch.uint8, device="cuda"),
                0, tokens * 576, tokens, FP8_584)  # fmt: skip
    numbers = torch.arange(tokens, device="cuda")
    cos = torch.ones(1, 32, device="cuda")
    api.append_swa(rows, kv.cuda(), numbers * 0, numbers, cos, cos * 0)
    data, scales = reference.quantised(kv)
    assert_equal(rows.scales()[0], scales)
    assert_equal(rows.data()[0, :, :448], data[:, :448])


def test_plain_gather_of_rows_that_are_no_vectors():
    pool = torch.randint(0, 256, (40, 999), dtype=torch.uint8, device="cuda")
    rows = Rows(pool, 3, 0, 7, Record("odd", 131))
    indices = torch.randint(-1, rows.entries, (500,), device="cuda")
    out = torch.ones(500, 131, dtype=torch.uint8, device="cuda")
    api.gather(rows, indices, out)
    expected = torch.empty(500, 131, dtype=torch.uint8)
    reference.gather(replace(rows, pool=pool.cpu()), indices.cpu(), expected)
    assert_equal(out, expected)
