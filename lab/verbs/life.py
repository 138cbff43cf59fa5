"""What `run.py kvcache` does: the life of some requests on a model that writes and attends, and
what happened at every step."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import ModuleType
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

import fmha
import fmha.reference
import gqa_lowlatency
import gqa_lowlatency.reference
from fmha.config import PAGE_SIZES
from kernelkit.call.launch import written_for
from kvcache.books.errors import CacheError
from kvcache.books.requests import Request
from kvcache.books.slot_pool import Sizes
from kvcache.books.step import Step
from kvcache.books.work import Copy, Pool, Work
from kvcache.layouts.layout import Layout, Ring, Stream
from kvcache.layouts.models import gqa
from kvcache.layouts.presets import CONFIGS
from kvcache.layouts.records import BF16_512, FP8_584
from kvcache.layouts.rows import Rows
from kvcache.memory.cache import Cache
from kvcache.movement import reference
from kvcache.movement.api import append_rows, append_swa, gather
from lab.flags import kvcache as _kv_args
from lab.measure.accuracy import errors_of
from lab.tools import tables
from lab.tools.common import finish, refuse
from lab.tools.place import Place, choose_place, emulated
from ptxemu.host.command_line import checking

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
    """Layers over `cache`.

    heads: heads of plain keys.
    group: query heads per KV head.
    seed: seed of numbers."""

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
        """Positions of the tokens that left entries which the next token needs, or (seen) the
        newest sees."""
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
        """Return what `kvcache.movement.reference` writes, in a separate pool."""
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
        """Return what the newest token of each request sees, by the reference."""
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


HEAD_DIM = 64  # of plain keys where nothing says it
MOST_FULL = 1.0  # of a tolerance
VOCABULARY = 1 << 17


class Life:
    """A cache, a model on it, and a row for everything that happens."""

    def __init__(self, cache: Cache, model: Model, seed: int) -> None:
        self.cache, self.model = cache, model
        self.requests: dict[str, Request] = {}
        self.rows: list[dict[str, Any]] = []
        self._random = np.random.default_rng(seed)
        self.prompts: dict[str, np.ndarray] = {}

    def ids(self, count: int) -> np.ndarray:
        """New tokens."""
        return self._random.integers(0, VOCABULARY, count)

    def note(self, what: str, works: Sequence[Work] = (), **found: Any) -> None:
        """A row: what was done, its copies, and whether everything is as it should be."""
        copies = [copy for work in works for copy in (*work.copies, *getattr(work, "after", ()))]
        wrong = entries = 0
        for request in self.requests.values():
            if request.resident:
                mine = self.model.wrong_entries(request)
                wrong, entries = wrong + mine[0], entries + mine[1]
        self.cache.manager.check()
        if self.cache.canary:
            self.cache.verify()
        moved = sum(self._bytes(copy) for copy in copies)
        row = {"what": what, "copies": len(copies), "moved": moved, "entries": entries}
        self.rows.append(row | {"wrong": wrong} | found)

    def _bytes(self, copy: Copy) -> int:
        layout = self.cache.layout
        if copy.position is None:
            return layout.block_payload if copy.source in _BLOCKS else layout.state_payload
        return sum(size for _, size in layout.live(copy.position))

    # -- what happens ------------------------------------------------------------------------

    def admit(self, name: str, prompt: np.ndarray, chunk: int) -> None:
        """A request, and its prompt in chunks behind what is there."""
        self.prompts[name] = prompt
        admission = self.cache.admit(name, prompt)
        request, works = admission.request, [admission]
        self.requests[name] = request
        attended: list[dict] = []
        while request.length < len(prompt):
            wanted = min(chunk, len(prompt) - request.length)
            room = self.cache.manager.room(request, wanted)
            step, found = self._step({request: prompt[request.length :][:room]})
            works.append(step)
            attended = found
        self.note(f"admit {name}, {len(prompt)} tokens", works, hit=admission.hit,
                  tokens=len(prompt) - admission.hit, **worst(attended))  # fmt: skip

    def decode(self, what: str, tokens: int = 1, only: Sequence[str] = ()) -> None:
        """Tokens for every request that is there."""
        batch = {
            request: self.ids(tokens)
            for name, request in self.requests.items()
            if request.resident and (not only or name in only)
        }
        step, found = self._step(batch)
        self.note(what, [step], tokens=len(batch) * tokens, **worst(found))

    def _step(self, batch: dict[Request, np.ndarray]) -> tuple[Work, list[dict]]:
        with self.cache.step(batch) as step:
            tables = self.model.write(step)
            found = self.model.attend(step, tables)
        return step, found

    def fork(self, name: str, child: str) -> None:
        admission = self.cache.fork(self.requests[name], child)
        self.requests[child] = admission.request
        self.note(f"fork {name} to {child}", [admission])

    def rollback(self, name: str, tokens: int) -> None:
        self.cache.rollback(self.requests[name], tokens)
        self.note(f"roll back {tokens} tokens of {name}")

    def offload(self, name: str) -> None:
        self.note(f"offload {name}", [self.cache.offload(self.requests[name])])

    def fetch(self, name: str) -> None:
        work = self.cache.fetch(self.requests[name])
        if self.cache.device.type == "cuda":
            torch.cuda.synchronize()  # the next line reads what is on its way
        self.note(f"fetch {name}", [work])

    def free(self, name: str) -> None:
        self.cache.free(self.requests.pop(name))
        self.note(f"free {name}")

    def preempt(self, name: str, chunk: int) -> None:
        """Preempt a request and admit its tokens again as a prompt."""
        tokens = self.cache.preempt(self.requests.pop(name))
        self.note(f"preempt {name}")
        self.admit(name, tokens, chunk)

    def refused(self, what: str, call: Callable[[], Any]) -> None:
        """Something that the cache has to refuse, and be as it was."""
        try:
            call()
        except CacheError as error:
            self.note(f"{what}: {type(error).__name__}")
            return
        raise AssertionError(f"{what} was not refused")


_BLOCKS = (Pool.BLOCKS, Pool.HOST_BLOCKS)


def story(life: Life, options: argparse.Namespace) -> list[tuple[Callable, tuple]]:
    """Return the events in order."""
    size, draft = life.cache.layout.block_tokens, life.cache.layout.draft
    shared = life.ids(2 * size)
    chunk = options.chunk or size + size // 2
    first, second = (np.concatenate([shared, life.ids(size // 2 + 3)]) for _ in range(2))
    happening: list[tuple[Callable, tuple]] = [
        (life.admit, ("A", first, chunk)),
        (life.admit, ("B", second, chunk)),
        *[(life.decode, (f"a token for each, step {n + 1}",)) for n in range(options.steps)],
        (life.fork, ("A", "C")),
        (life.decode, ("a token for each, after the fork",)),
    ]
    if draft:
        happening += [
            (life.decode, (f"{draft} draft tokens for B", draft, ("B",))),
            (life.rollback, ("B", draft)),
        ]
    happening += [
        (life.offload, ("B",)),
        (life.decode, ("a token for each, B is away",)),
        (life.refused, ("a step of B", lambda: life.cache.begin({life.requests["B"]: [1]}))),
        (life.fetch, ("B",)),
        (life.free, ("A",)),
        (life.admit, ("D", first, chunk)),
        (life.preempt, ("C", chunk)),
        (life.refused, ("a request that needs everything", lambda: _too_much(life))),
        (life.decode, ("a token for each, at the end",)),
    ]
    return happening


def _too_much(life: Life) -> None:
    request = next(iter(life.requests.values()))
    life.cache.begin({request: life.ids(life.cache.layout.block_tokens * 1000)})


def build(options: argparse.Namespace, place: Place) -> tuple[Life, list[str]]:
    """The cache of what the flags spell, and the names of what its layout lacks."""
    layout, left = reduced(layout_of(options), options.layers)
    sizes = Sizes(24, 6 * layout.has_state, 6 * layout.has_state, 8, 2 * layout.has_state)
    where = {"backend": place.backend, "arch": place.arch}
    cache = Cache(
        layout, sizes, device=place.device, canary=options.canary, keep_events=True, **where
    )
    elements = layout.streams[0].record.data_bytes // 2
    heads = max(1, elements // head_dim(options))
    model = Model(cache, heads, options.group, options.seed, where)
    return Life(cache, model, options.seed), left


def head_dim(options: argparse.Namespace) -> int:
    """Columns of a plain head: as asked for, as the model has them, else 64."""
    return options.head_dim or CONFIGS.get(options.model, {}).get("head_dim") or HEAD_DIM


def layout_of(options: argparse.Namespace) -> Layout:
    """ValueError for what there is not."""
    if options.model == _kv_args.PLAIN:
        window = {"window": options.window, "windowed": (True, False)} if options.window else {}
        return gqa(2, options.kv_heads, head_dim(options), block_tokens=options.block_tokens or 16,
                   draft=options.draft, **window)  # fmt: skip
    more = {"block_tokens": options.block_tokens} if options.block_tokens else {}
    return _kv_args.layout(options.model, options.record, draft=options.draft, **more)


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """A line for each thing that happened."""
    columns = (
        ("what happened", "{what}"), ("tokens", "{tokens}"), ("hit", "{hit}"),
        ("copies", "{copies}"), ("bytes\nmoved", "{moved:,}"),
        ("attention\nerror", "{max_error:.1e}"), ("of\nlimit", "{of_limit:.0%}"),
        ("entries", "{entries:,}"), ("wrong", "{wrong}"), ("seconds", "{seconds:.1f}"),
    )  # fmt: skip
    tables.show(*tables.table("", columns, rows), console)


def show_books(life: Life, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Metrics, and events on request."""
    metrics = asdict(life.cache.manager.metrics)
    counters = {name: value for name, value in metrics.pop("counters").items() if value}
    for title, numbers in (("now", metrics), ("since the beginning", counters)):
        words = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in numbers.items())
        console.print(f"{title}: {words}")
    events = [
        (type(event).__name__, getattr(event, "digest", b"").hex()[:12])
        for event in life.cache.manager.events()
    ]
    if options.events:
        for name, digest in events:
            console.print(f"{name} {digest}")
    return {"metrics": metrics, "counters": counters, "events": events}


def run(options: argparse.Namespace, place: Place) -> tuple[Life, list[str]]:
    """The whole story, with a bar on a terminal."""
    life, left = build(options, place)
    happening = story(life, options)
    bar = Console(stderr=True)
    with emulated(options):
        for call, given in track(happening, "living", console=bar, transient=True,
                                 disable=not bar.is_terminal):  # fmt: skip
            start, before = time.perf_counter(), len(life.rows)
            call(*given)
            for row in life.rows[before:]:
                row["seconds"] = (time.perf_counter() - start) / (len(life.rows) - before)
    return life, left


def perform(options: argparse.Namespace) -> int:
    console = Console()
    try:
        place = choose_place(options)
        if options.layers < 1 or options.chunk < 0:
            raise ValueError(
                f"--layers {options.layers} at least 1, --chunk {options.chunk} at least 0"
            )
        with checking(options) as report:
            life, left = run(options, place)
    except (ValueError, NotImplementedError) as refused:
        return refuse(refused)
    layout = life.cache.layout
    console.print(f"{_kv_args.label(layout)}, blocks of {layout.block_tokens} tokens and "
                  f"{layout.block_bytes:,} bytes, states of {layout.state_bytes:,} bytes; "
                  f"{place}")  # fmt: skip
    if left:
        console.print(f"left out, because no kernel writes them yet: {', '.join(left)}")
    show(life.rows, console)
    books = show_books(life, options, console)
    exact = not any(row["wrong"] for row in life.rows)
    close = all(row.get("of_limit", 0.0) <= MOST_FULL for row in life.rows)
    console.print("every entry equals the reference, byte for byte" if exact else "wrong bytes")
    attended = any("of_limit" in row for row in life.rows)
    words = f"attention is {'within' if close else 'out of'} tolerance"
    console.print(words if attended else "no attention here: it has no kernel for this place")
    ok = exact and close
    document = {"layout": layout.name, "rows": life.rows, "ok": ok, **books}
    return finish(options, report, document, ok=ok)
