"""What `run.py kvcache` does: the life of some requests, and what happened at every step."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from kvcache.books.errors import CacheError
from kvcache.books.requests import Request
from kvcache.books.slot_pool import Sizes
from kvcache.books.work import Copy, Pool, Work
from kvcache.layouts.layout import Layout
from kvcache.layouts.models import gqa
from kvcache.layouts.presets import CONFIGS
from kvcache.memory.cache import Cache
from lab.flags import kvcache as _kv_args
from lab.problems.kvcache_model import Model, reduced, worst
from lab.tools import tables
from lab.tools.common import finish, refuse
from lab.tools.place import Place, choose_place, emulated
from ptxemu.host.command_line import checking

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
        self.note(f"take {tokens} tokens of {name} back")

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
        """Its tokens are a prompt that is admitted again."""
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
    """What happens, in order."""
    size, draft = life.cache.layout.block_tokens, life.cache.layout.draft
    shared = life.ids(2 * size)
    chunk = options.chunk or size + size // 2
    first, second = (np.concatenate([shared, life.ids(size // 2 + 3)]) for _ in range(2))
    happening: list[tuple[Callable, tuple]] = [
        (life.admit, ("A", first, chunk)),
        (life.admit, ("B", second, chunk)),
        *[(life.decode, (f"a token for each, step {n + 1}",)) for n in range(options.steps)],
        (life.fork, ("A", "C")),
        (life.decode, ("a token for each, behind the fork",)),
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
        (life.refused, ("a request for everything", lambda: _too_much(life))),
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
            raise ValueError(f"--layers {options.layers} at least 1, --chunk {options.chunk} 0")
        with checking(options) as report:
            life, left = run(options, place)
    except (ValueError, NotImplementedError) as refused:
        return refuse(refused)
    layout = life.cache.layout
    console.print(f"{_kv_args.label(layout)}, blocks of {layout.block_tokens} tokens and "
                  f"{layout.block_bytes:,} bytes, states of {layout.state_bytes:,} bytes; "
                  f"{place}")  # fmt: skip
    if left:
        console.print(f"left out, since no kernel writes them yet: {', '.join(left)}")
    show(life.rows, console)
    books = show_books(life, options, console)
    exact = not any(row["wrong"] for row in life.rows)
    close = all(row.get("of_limit", 0.0) <= MOST_FULL for row in life.rows)
    console.print("every entry is the reference's, byte for byte" if exact else "wrong bytes")
    attended = any("of_limit" in row for row in life.rows)
    words = f"attention is {'within' if close else 'out of'} tolerance"
    console.print(words if attended else "no attention here: it has no kernel for this place")
    ok = exact and close
    document = {"layout": layout.name, "rows": life.rows, "ok": ok, **books}
    return finish(options, report, document, ok=ok)
