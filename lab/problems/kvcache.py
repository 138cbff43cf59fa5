"""Data movement of the cache, compared with torch code that uses advanced indexing.

Bytes are those that have to be read and written, tables and the angles of every token included:
they have positions of their own. Appended tokens fill slots one behind the other, in shuffled
order; gathered entries lie anywhere.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kvcache.layouts.latent import LATENTS
from kvcache.layouts.records import BF16_512, FP8_584, FP8_656, Record
from kvcache.layouts.rows import Rows
from kvcache.movement import api, reference
from lab.problems.steps import Arguments, Maker, Problem, expect_equal, normal

LATENT_RECORDS = (FP8_584, BF16_512, FP8_656)
SLOT_ROWS = 128  # of a sliding window
BLOCK_BYTES = 644_096  # of a block of DeepSeek-V4-Pro in FP8, rounded up
# A state of it that becomes a checkpoint: 61 windows of 128 rows, the overlap of 30 compressors.
CHECKPOINT = (*((128 * 584, 61),), *((20 << 10, 30),))
GQA = (8, 128)  # heads and dims of K and of V
ANGLES = 256  # of more positions than rows
WARM_BYTES = 1024  # of a row, that copies of slots are compared with


def makers(hidden: int) -> dict[str, list[Maker]]:
    """Return the makers by step."""
    return {
        "append": [*(partial(_append, record) for record in LATENT_RECORDS), _append_rows],
        "gather": [partial(_gather, record) for record in LATENT_RECORDS],
        "copy": [_copy_blocks, _copy_segments],
        "checksum": [_checksum],
        "host": [partial(_host, fetch=False), partial(_host, fetch=True)],
    }


# -- rows -----------------------------------------------------------------------------------------


def _rows(record: Record, count: int, device: str) -> Rows:
    """A pool of twice as many entries, at least."""
    slots = -(-2 * count // SLOT_ROWS) + 1
    pool = torch.zeros(slots, record.page_bytes(SLOT_ROWS), dtype=torch.uint8, device=device)
    return Rows(pool, 0, SLOT_ROWS * record.data_bytes, SLOT_ROWS, record)


def _in_a_row(rows: Rows, count: int, seed: int) -> torch.Tensor:
    """Entries of slots, one behind the other."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(len(rows.pool), generator=generator)[: -(-count // rows.rows)]
    entries = slots[:, None] * rows.rows + torch.arange(rows.rows)
    return entries.flatten()[:count].to(rows.pool.device)


def _anywhere(rows: Rows, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(rows.entries, generator=generator)[:count].to(rows.pool.device)


def _put(view: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
    """Rows of bytes by advanced indexing, eight bytes at a time."""
    count = view.shape[1]
    view.view(torch.int64)[slots // count, slots % count] = values.view(torch.int64)


def _append(record: Record, count: int) -> Problem:
    latent = LATENTS[record.name]

    def draw(seed: int, device: str) -> Arguments:
        rows = _rows(record, count, device)
        angles = normal(seed + 1, device, count + ANGLES, 32).float()
        positions = torch.arange(count, device=device) + seed
        kv, slots = normal(seed, device, count, latent.elements), _in_a_row(rows, count, seed)
        return rows, kv, positions, slots, angles.cos(), angles.sin()

    def by_torch(
        rows: Rows, kv: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, *rope: Any
    ) -> None:
        entries = reference.rotated(kv, *(table[positions] for table in rope))
        data = entries.view(torch.uint8)
        if latent.group:
            data, scales = reference.quantised(entries, record)
        if record.scale_bytes:
            _put(rows.scales(), slots, scales)
        _put(rows.data(), slots, data)

    def check(arguments: Arguments, outputs: Any) -> None:
        rows, *others = arguments
        again = replace(rows, pool=rows.pool.clone())
        reference.append_swa(again, *others)
        expect_equal(rows.pool, again.pool)

    nbytes = count * (2 * latent.elements + record.bytes + 2 * 8 + 2 * 128)
    peers = {"kvcache": api.append_swa, "torch": by_torch}
    return Problem("append", record.name, count, nbytes, draw, peers, check)


def _append_rows(count: int) -> Problem:
    record = Record("plain", 2 * GQA[0] * GQA[1])

    def draw(seed: int, device: str) -> Arguments:
        slots = -(-2 * count // SLOT_ROWS) + 1
        page = SLOT_ROWS * record.data_bytes
        pool = torch.zeros(slots, 2 * page, dtype=torch.uint8, device=device)
        first, second = (Rows(pool, begin, 0, SLOT_ROWS, record) for begin in (0, page))
        packed = normal(seed, device, count, 2, *GQA)
        mapping = _in_a_row(first, count, seed)
        return (first, packed[:, 0]), (second, packed[:, 1]), mapping

    def by_torch(*arguments: Any) -> None:
        *pairs, slots = arguments
        for rows, x in pairs:
            view = rows.data().view(x.dtype)
            view[slots // SLOT_ROWS, slots % SLOT_ROWS] = x.flatten(1)

    def check(arguments: Arguments, outputs: Any) -> None:
        *pairs, slots = arguments
        for rows, x in pairs:
            found = rows.data()[slots // SLOT_ROWS, slots % SLOT_ROWS]
            expect_equal(found, x.contiguous().flatten(1).view(torch.uint8))

    peers = {"kvcache": api.append_rows, "torch": by_torch}
    nbytes = count * (4 * record.data_bytes + 8)
    return Problem("append", "K and V, 8 x 128 bf16", count, nbytes, draw, peers, check)


def _gather(record: Record, count: int) -> Problem:
    latent = LATENTS[record.name]

    def draw(seed: int, device: str) -> Arguments:
        rows = _rows(record, count, device)
        angles = torch.zeros(1, 32, device=device)
        everything = torch.arange(rows.entries, device=device)
        kv = normal(seed, device, rows.entries, latent.elements)
        api.append_swa(rows, kv, everything * 0, everything, angles + 1.0, angles)
        out = torch.empty(count, latent.elements, dtype=torch.bfloat16, device=device)
        return rows, _anywhere(rows, count, seed), out

    def by_torch(rows: Rows, indices: torch.Tensor, out: torch.Tensor) -> None:
        place = indices // rows.rows, indices % rows.rows
        if not latent.group:
            out.copy_(rows.data().view(torch.bfloat16)[place])
            return
        data, begin = rows.data()[place], latent.rope_offset
        factor = data[:, latent.nope : begin].contiguous().view(torch.float32)
        if not latent.inline:
            factor = torch.exp2(rows.scales()[place][:, : latent.groups].float() - 127)
        elements = data[:, : latent.nope].view(torch.float8_e4m3fn).float()
        groups = elements.unflatten(1, (latent.groups, latent.group))
        out[:, : latent.nope] = (groups * factor[..., None]).flatten(1)
        out[:, latent.nope :] = data[:, begin:].contiguous().view(torch.bfloat16)

    def check(arguments: Arguments, outputs: Any) -> None:
        rows, indices, out = arguments
        again = torch.empty_like(out).cpu()
        reference.gather(replace(rows, pool=rows.pool.cpu()), indices.cpu(), again)
        expect_equal(out.cpu(), again)

    nbytes = count * (record.bytes + 2 * latent.elements + 8)
    peers = {"kvcache": api.gather, "torch": by_torch}
    return Problem("gather", record.name, count, nbytes, draw, peers, check)


# -- slots ----------------------------------------------------------------------------------------


def _blocks(count: int, slot_bytes: int) -> int:
    """Return the number of slots with as many bytes as `count` rows of bf16."""
    return max(1, round(count * WARM_BYTES / slot_bytes))


def _pool(seed: int, device: str, slots: int, slot_bytes: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    words = torch.randint(
        -(1 << 31), 1 << 31, (slots, slot_bytes // 4), generator=generator, device=device,
        dtype=torch.int32,
    )  # fmt: skip
    return words.view(torch.uint8)


def _copy_blocks(count: int) -> Problem:
    slots = _blocks(count, BLOCK_BYTES)

    def draw(seed: int, device: str) -> Arguments:
        pool = _pool(seed, device, 2 * slots, BLOCK_BYTES)
        order = torch.randperm(2 * slots, generator=torch.Generator().manual_seed(seed))
        return pool, pool, order.view(slots, 2).to(device)

    def by_torch(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
        target.view(torch.int64)[pairs[:, 1]] = source.view(torch.int64)[pairs[:, 0]]

    def check(arguments: Arguments, outputs: Any) -> None:
        source, target, pairs = arguments
        expect_equal(target[pairs[:, 1]], source[pairs[:, 0]])

    nbytes = slots * 2 * BLOCK_BYTES
    peers = {"kvcache": api.copy_slots, "torch": by_torch}
    name = f"blocks of {BLOCK_BYTES} bytes, as many as rows of bf16"
    return Problem("copy", name, count, nbytes, draw, peers, check)


def _copy_segments(count: int) -> Problem:
    payload = sum(size * times for size, times in CHECKPOINT)
    slots, segments, begin, place = _blocks(count, payload), [], 0, 0
    for size, times in CHECKPOINT:
        for _ in range(times):
            segments.append((begin, place, size))
            begin, place = begin + 2 * size, place + size
    state_bytes = begin

    def draw(seed: int, device: str) -> Arguments:
        states = _pool(seed, device, slots, state_bytes)
        saved = torch.zeros(slots, payload, dtype=torch.uint8, device=device)
        pairs = torch.arange(slots, device=device)[:, None].expand(-1, 2).contiguous()
        return states, saved, pairs, api.cut_segments(segments).to(device)

    def by_torch(source: torch.Tensor, target: torch.Tensor, *tables: torch.Tensor) -> None:
        for first, other, size in segments:
            target[:, other : other + size] = source[:, first : first + size]

    def check(arguments: Arguments, outputs: Any) -> None:
        source, target, *_ = arguments
        again = torch.zeros_like(target)
        by_torch(source, again)
        expect_equal(target, again)

    peers = {"kvcache": api.copy_slots, "torch": by_torch}
    name = f"{len(segments)} segments of a state to a checkpoint"
    return Problem("copy", name, count, slots * 2 * payload, draw, peers, check)


def _checksum(count: int) -> Problem:
    slots = _blocks(count, BLOCK_BYTES)

    def draw(seed: int, device: str) -> Arguments:
        pool = _pool(seed, device, slots, BLOCK_BYTES)
        return pool, torch.arange(slots, device=device), 0, BLOCK_BYTES

    def by_torch(pool: torch.Tensor, numbers: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        return pool.view(torch.int32).sum(1)

    def check(arguments: Arguments, outputs: torch.Tensor) -> None:
        pool, numbers, *range_ = arguments
        expect_equal(outputs[:4].cpu(), reference.checksum(pool[:4].cpu(), numbers[:4], *range_))

    peers = {"kvcache": api.checksum, "torch": by_torch}
    name = f"blocks of {BLOCK_BYTES} bytes, as many as rows of bf16"
    return Problem("checksum", name, count, slots * BLOCK_BYTES, draw, peers, check)


def _host(count: int, *, fetch: bool) -> Problem:
    slots = min(_blocks(count, BLOCK_BYTES), 64)

    def draw(seed: int, device: str) -> Arguments:
        pool = _pool(seed, device, slots, BLOCK_BYTES)
        host = torch.zeros(slots, BLOCK_BYTES, dtype=torch.uint8, pin_memory=device == "cuda")
        pairs = torch.stack((torch.arange(slots), torch.arange(slots).flip(0)), 1)
        pools = (host, pool) if fetch else (pool, host)
        return *pools, pairs.to(device), pairs.tolist()

    def ours(*arguments: Any) -> None:
        api.copy_slots(*arguments[:3])

    def by_torch(source: torch.Tensor, target: torch.Tensor, _: Any, numbers: list) -> None:
        for mine, other in numbers:
            target[other].copy_(source[mine], non_blocking=True)

    def check(arguments: Arguments, outputs: Any) -> None:
        source, target, pairs, _ = arguments
        torch.cuda.synchronize()
        order = pairs.cpu()
        expect_equal(target.cpu()[order[:, 1]], source.cpu()[order[:, 0]])

    name = f"blocks {'from' if fetch else 'to'} pinned memory"
    peers = {"kvcache": ours, "memcpy": by_torch}
    return Problem("host", name, count, slots * 2 * BLOCK_BYTES, draw, peers, check)
