"""A model as a cache sees it: what its layers write, and what attention reads.

The numbers that a token leaves are a function of all tokens up to it. Everything is written by
kernels; what no kernel writes yet is left out of the layout, and `reduced` says what that is.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

import fmha
import fmha.reference
import gqa_lowlatency
import gqa_lowlatency.reference
from fmha.config import PAGE_SIZES
from kernelkit.call.launch import written_for
from kvcache.books.requests import Request
from kvcache.books.step import Step
from kvcache.layouts.layout import Layout, Ring, Stream
from kvcache.layouts.records import BF16_512, FP8_584
from kvcache.layouts.rows import Rows
from kvcache.memory.cache import Cache
from kvcache.movement import reference
from kvcache.movement.api import append_rows, append_swa, gather
from lab.measure.accuracy import errors_of

LATENTS = (BF16_512, FP8_584)
LATENT, ANGLES, ROPE_BASE = 512, 32, 10000.0
VARIETY = 509  # rows of numbers that tokens draw from
MASK, SEED, FACTOR = (1 << 63) - 1, 0x243F6A8885A308D3, 6364136223846793005
Array = Stream | Ring


def reduced(layout: Layout, layers: int) -> tuple[Layout, list[str]]:
    """At most `layers` copies of every array that kernels write, and the names of the others."""
    kept: dict[str, list[Any]] = {"streams": [], "rings": []}
    left = [tail.name for tail in layout.tails]
    for kind, arrays in kept.items():
        for array in getattr(layout, kind):
            if array.record.scale_bytes and array.record not in LATENTS:
                left.append(array.name)
                continue
            copies = min(layers, array.copies)
            arrays.append(dataclasses.replace(array, copies=copies, of_layer=()))
    if not kept["streams"]:
        raise ValueError(f"{layout.name}: no kernel writes any of its streams yet")
    changes = {kind: tuple(arrays) for kind, arrays in kept.items()}
    return dataclasses.replace(layout, tails=(), model_layers=0, **changes), left


class Model:
    """Layers over `cache`. heads: of plain keys; group: query heads of each; seed: of numbers."""

    def __init__(self, cache: Cache, heads: int, group: int, seed: int, place: dict) -> None:
        self.cache, self.layout, self.device = cache, cache.layout, cache.device
        self.heads, self.group, self.seed, self.place = heads, group, seed, place
        self.arrays: list[Array] = [*self.layout.streams, *self.layout.rings]
        self._numbers: dict[tuple[str, int], torch.Tensor] = {}

    # -- what tokens leave -------------------------------------------------------------------

    def chain(self, tokens: Sequence[int]) -> np.ndarray:
        """int64: a number for every beginning of `tokens`."""
        steps = itertools.accumulate(
            map(int, tokens), lambda last, token: (last * FACTOR + token + 1) & MASK, initial=SEED
        )
        return np.fromiter(steps, np.int64, len(tokens) + 1)[1:]

    def values(self, array: Array, copy: int, chain: np.ndarray) -> torch.Tensor:
        """bf16 [n, columns], close to normal."""
        key = array.name, copy
        if key not in self._numbers:
            number = self.seed + 97 * copy + sum(map(ord, array.name))
            generator = torch.Generator().manual_seed(number)
            size = VARIETY, array.record.data_bytes // 2
            size = (VARIETY, LATENT) if array.record in LATENTS else size
            self._numbers[key] = torch.randn(size, generator=generator)
        rows = self._numbers[key][torch.from_numpy(chain % VARIETY)]
        share = torch.from_numpy(1 + chain // VARIETY % 11 / 8).float()
        return (rows * share[:, None]).bfloat16()

    def angles(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, fp32 [tokens, ANGLES]."""
        speed = ROPE_BASE ** (-torch.arange(ANGLES, dtype=torch.float64) / ANGLES)
        turns = torch.arange(tokens, dtype=torch.float64)[:, None] * speed
        return turns.cos().float(), turns.sin().float()

    # -- steps -------------------------------------------------------------------------------

    def write(self, step: Step) -> dict[str, torch.Tensor]:
        """Entries of all layers, by the append kernels; the tables of the step."""
        tables = step.tensors(self.device)
        new = [
            self.chain(request.tokens)[start:]
            for request, start in zip(step.requests, step.starts.tolist(), strict=True)
        ]
        chain = np.concatenate(new)
        rope = [x.to(self.device) for x in self.angles(int(step.lengths.max()))]
        for array in self.arrays:
            slots = tables[f"rows_of.{array.name}"]
            ratio = getattr(array, "ratio", 1)
            first = tables["positions"] // ratio * ratio  # an entry stands where its window begins
            for copy in range(array.copies):
                rows = self.cache.rows(array.name, copy)
                values = self.values(array, copy, chain).to(self.device)
                if array.record in LATENTS:
                    append_swa(rows, values, first, slots, *rope, **self.place)
                else:
                    append_rows((rows, values), None, slots, **self.place)
        return tables

    # -- reading back ------------------------------------------------------------------------

    def wrong_entries(self, request: Request) -> tuple[int, int]:
        """(entries that differ in a byte from what the reference writes, entries) of a request."""
        wrong = count = 0
        for array in self.arrays:
            positions = self._positions(request, array)
            slots = self._slots(request, array, positions)
            for copy in range(array.copies):
                rows = self.cache.rows(array.name, copy)
                expected = self._expected(request, array, copy, positions)
                place = slots // rows.rows, slots % rows.rows
                differ = torch.zeros(len(slots), dtype=torch.bool)
                for view in ("data", "scales"):
                    found = getattr(rows, view)()[tuple(x.to(self.device) for x in place)].cpu()
                    differ |= (found != getattr(expected, view)()[0, : len(slots)]).any(1)
                wrong, count = wrong + int(differ.sum()), count + len(slots)
        return wrong, count

    def _positions(self, request: Request, array: Array, *, seen: bool = False) -> list[int]:
        """Of the tokens that left entries which the next token needs, or (seen) the newest sees."""
        length = request.length
        if isinstance(array, Ring):
            return [*range(max(0, length - array.window + (not seen)), length)]
        return [*range(array.ratio - 1, length, array.ratio)]

    def _slots(self, request: Request, array: Array, positions: Sequence[int]) -> torch.Tensor:
        """The entries that tokens at these positions left."""
        if isinstance(array, Ring):
            rows = array.rows(self.layout.draft)
            slots = [request.state * rows + position % rows for position in positions]
        else:
            size, tokens = self.layout.entries(array), self.layout.block_tokens
            slots = [request.blocks[p // tokens] * size + p // array.ratio % size
                     for p in positions]  # fmt: skip
        return torch.tensor(slots, dtype=torch.int64)

    def _expected(
        self, request: Request, array: Array, copy: int, positions: Sequence[int]
    ) -> Rows:
        """What `kvcache.movement.reference` writes, in a pool of its own."""
        record, count = array.record, max(1, len(positions))
        pool = torch.zeros(1, record.page_bytes(count), dtype=torch.uint8)
        rows = Rows(pool, 0, count * record.data_bytes, count, record)
        values = self.values(array, copy, self.chain(request.tokens)[list(positions)])
        slots = torch.arange(len(positions))
        if record not in LATENTS:
            reference.append_rows([(rows, values)], slots)
            return rows
        ratio = getattr(array, "ratio", 1)
        first = torch.tensor(positions, dtype=torch.int64) // ratio * ratio
        reference.append_swa(rows, values, first, slots, *self.angles(request.length))
        return rows

    # -- attention ---------------------------------------------------------------------------

    def attend(self, step: Step, tables: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
        """Errors of attention over every array that it can read, for the newest tokens."""
        found = []
        for array in self.arrays:
            if array.name.startswith("v"):
                continue  # read together with its keys
            if array.record in LATENTS:
                found += self._attend_latents(step, tables, array)
            elif array.name.startswith("k"):
                found += self._attend_plain(step, tables, array)
        return found

    def _tables_of(self, array: Array, tables: dict[str, torch.Tensor]) -> tuple:
        """(page table, lengths) of a stream or a ring."""
        if isinstance(array, Ring):
            return tables["state_slots"][:, None], tables["lengths"].clamp(max=array.window)
        return tables["block_tables"], tables["lengths"] // array.ratio

    def _attend_plain(self, step: Step, tables: dict, array: Array) -> list[dict[str, Any]]:
        """`gqa_lowlatency.decode` over pages of keys and values."""
        if self._is_no_page(array):
            return []
        dim = array.record.data_bytes // (2 * self.heads)
        q = self._queries(len(step.requests), self.heads * self.group, dim)
        table, lens = self._tables_of(array, tables)
        names, found = (array.name, "v" + array.name[1:]), []
        for copy in range(array.copies):
            k, v = (self.cache.pages(n, copy, torch.bfloat16, (self.heads, dim)) for n in names)
            given = {"kv_lens": lens, "page_table": table, **self.place}
            o, lse = gqa_lowlatency.decode(q, k, v, return_lse=True, **given)
            arrays = [self.layout.find(n) for n in names]
            arch = written_for(self.place["arch"])
            found += self._judged(step, arrays, copy, q, (o, lse), gqa_lowlatency, arch=arch)
        return found

    def _attend_latents(self, step: Step, tables: dict, array: Array) -> list[dict[str, Any]]:
        """`fmha.attention` over pages of bf16, or over what `gather` made of records of FP8."""
        if written_for(self.place["arch"]) != "sm_100a":
            return []
        table, lens = self._tables_of(array, tables)
        q, found = self._queries(len(step.requests), 4, LATENT)[:, None], []
        for copy in range(array.copies):
            if array.record == FP8_584 or self._is_no_page(array):
                keys, where = self._gathered(step, array, copy), {"kv_lens": lens}
            else:
                keys = self.cache.pages(array.name, copy, torch.bfloat16, (1, LATENT))
                where = {"kv_lens": lens, "page_table": table}
            outputs = fmha.attention(q, keys, keys, return_lse=True, **where, **self.place)
            found += self._judged(step, (array, array), copy, q, outputs, fmha)
        return found

    def _judged(
        self,
        step: Step,
        arrays: Sequence[Array],
        copy: int,
        q: torch.Tensor,
        outputs: tuple[torch.Tensor, ...],
        family: ModuleType,
        **options: str,
    ) -> list[dict[str, Any]]:
        """Errors of (O, LSE), request by request; arrays: of keys and of values."""
        judges, found = (family.reference.definition, family.reference.rounded), []
        dense = [self._dense(step, array, copy) for array in arrays]
        for index, pair in enumerate(zip(*dense, strict=True)):
            mine, o, lse = (x[index : index + 1] for x in (q, *outputs))
            keys = [x.view(1, len(x), -1, q.shape[-1]) for x in pair]
            exact, rounded = (judge(mine.cpu(), *keys, **options) for judge in judges)
            errors = errors_of(
                (o, lse), (exact.o, exact.lse), (rounded.o, rounded.lse), torch.bfloat16
            )
            found.append(errors | {"array": arrays[0].name})
        return found

    def _is_no_page(self, array: Array) -> bool:
        """Attention takes it from a copy alone, or not at all."""
        ring = isinstance(array, Ring)
        rows = array.rows(self.layout.draft) if ring else self.layout.entries(array)
        return (ring and rows != array.window) or rows not in PAGE_SIZES

    def _gathered(self, step: Step, array: Array, copy: int) -> torch.Tensor:
        """bf16 [B, most entries, 1, LATENT], zeros behind the last one."""
        slots = [self._slots(request, array, self._positions(request, array, seen=True))
                 for request in step.requests]  # fmt: skip
        most = max(1, *map(len, slots))
        indices = torch.full((len(slots), most), -1)
        for row, mine in zip(indices, slots, strict=True):
            row[: len(mine)] = mine
        out = torch.empty(indices.numel(), LATENT, dtype=torch.bfloat16, device=self.device)
        rows = self.cache.rows(array.name, copy)
        gather(rows, indices.flatten().to(self.device), out, **self.place)
        return out.view(len(slots), most, 1, LATENT)

    def _dense(self, step: Step, array: Array, copy: int) -> list[torch.Tensor]:
        """What the newest token of each request sees, by the reference."""
        found = []
        for request in step.requests:
            positions = self._positions(request, array, seen=True)
            rows = self._expected(request, array, copy, positions)
            data, scales = (view[0, : len(positions)] for view in (rows.data(), rows.scales()))
            if array.record == FP8_584:
                found.append(reference.dequantised(data, scales))
            else:
                found.append(data.contiguous().view(torch.bfloat16))
        return found

    def _queries(self, count: int, heads: int, dim: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + count)
        q = torch.randn(count, heads, dim, generator=generator)
        return q.bfloat16().to(self.device)


def worst(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The largest of each error; empty without any."""
    if not rows:
        return {}
    return {name: max(row[name] for row in rows) for name in ("max_error", "of_limit")}
