"""`bench.py kvcache-host`: times the manager's calls and compares them with vLLM's BlockPool."""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import logging
import os
import platform
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from kvcache.books.manager import Manager
from kvcache.books.slot_pool import Sizes, SlotPool
from kvcache.layouts.models import gqa
from kvcache.layouts.presets import preset
from lab.measure.timing import heading
from lab.tools.common import read_rows, refuse, save_rows
from lab.tools.tables import show, table

CONTEXT = 8192  # tokens of a request of the manager's rows
LAYOUTS = {
    "gqa": lambda: gqa(2, 8, 128),
    "deepseek-v4-pro": lambda: preset("deepseek-v4-pro"),
}
OURS, KEPT, PEER = "kvcache", "kvcache, kept", "vllm"


def medians(
    repeats: int, first: Callable[[], Any], second: Callable[[Any], Any]
) -> tuple[float, float]:
    """Microseconds of `first`, and of `second` with what it returned, taking turns."""
    gc.collect()
    parts: tuple[list[float], list[float]] = ([], [])
    clock = time.perf_counter
    for _ in range(repeats):
        start = clock()
        found = first()
        middle = clock()
        second(found)
        end = clock()
        parts[0].append(middle - start)
        parts[1].append(end - middle)
    take, give = (statistics.median(part) * 1e6 for part in parts)
    return take, give


def pool_rows(options: argparse.Namespace) -> Iterator[dict]:
    """A row for each pool and batch."""
    make, said = block_pool(options.vllm)
    if make is None:
        yield {"kind": "pool", "peer": PEER, "refused": said}
    for batch in options.batches:
        repeats = max(20, min(options.repeats, 2_000_000 // batch))
        for name in (OURS, KEPT):
            pool = SlotPool("blocks", options.blocks, first=1)
            if name == KEPT:
                _register_all(pool)
            give = partial(_keep, pool) if name == KEPT else pool.release
            found = medians(repeats, partial(pool.take, batch), give)
            yield _pool_row(name, "", batch, found)
        if make is not None:
            peer = make(options.blocks)
            found = medians(repeats, partial(peer.get_new_blocks, batch), peer.free_blocks)
            yield _pool_row(PEER, said, batch, found)


def _register_all(pool: SlotPool) -> None:
    _keep(pool, pool.take(pool.slots))


def _keep(pool: SlotPool, slots: list[int]) -> None:
    """Give slots back that can be found by a content that no other has had."""
    for slot in slots:
        pool.register(slot, next(_CONTENTS))
    pool.release(slots)


_CONTENTS = (number.to_bytes(16, "little") for number in itertools.count())


def _pool_row(peer: str, version: str, batch: int, found: tuple[float, float]) -> dict:
    take, give = found
    row = {"kind": "pool", "peer": peer, "batch": batch, "take_us": take, "give_us": give}
    row["million_per_s"] = batch / (take + give)
    return row | ({"version": version} if version else {})


def manager_rows(options: argparse.Namespace) -> Iterator[dict]:
    """A row for each layout and number of requests."""
    for name, make in LAYOUTS.items():
        layout = make()
        for count in options.requests:
            repeats = max(10, options.repeats // (20 * count))
            yield {"kind": "manager", "layout": name, "requests": count, "context": CONTEXT,
                   **_manager_row(layout, count, repeats)}  # fmt: skip


def _manager_row(layout: Any, count: int, repeats: int) -> dict[str, float]:
    """Microseconds: of a step per request, of its arrays, of admissions, of the walk."""
    blocks = count * (CONTEXT // layout.block_tokens + repeats // layout.block_tokens + 4)
    # Each request has a prompt of its own, and one more comes and goes.
    sizes = Sizes(2 * blocks + 200, states=count + 2, checkpoints=2 * count + 4)
    manager, generator = Manager(layout, sizes), np.random.default_rng(0)
    prompts = generator.integers(0, 1 << 17, (count, CONTEXT))
    requests = []
    for index, prompt in enumerate(prompts):
        requests.append(manager.admit(f"r{index}", prompt).request)
        _fill(manager, requests[-1], prompt)
    batch = dict.fromkeys(requests, np.zeros(1, np.int64))
    append, arrays = medians(repeats, lambda: manager.append(batch), _arrays)
    others = iter(generator.integers(0, 1 << 17, (repeats, CONTEXT)))

    def leave(admission: Any) -> None:
        manager.free(admission.request)

    hit, free = medians(repeats, lambda: manager.admit("again", prompts[0]), leave)
    cold, _ = medians(repeats, lambda: manager.admit("new", next(others)), leave)
    check, _ = medians(3, manager.check, lambda found: None)
    return {
        "append_us_per_request": append / count, "arrays_us_per_request": arrays / count,
        "admit_hit_us": hit, "free_us": free, "admit_miss_us": cold, "check_us": check,
    }  # fmt: skip


def _fill(manager: Manager, request: Any, prompt: np.ndarray) -> None:
    while request.length < len(prompt):
        room = manager.room(request, len(prompt) - request.length)
        manager.append({request: prompt[request.length : request.length + room]})


def _arrays(step: Any) -> None:
    """Build the arguments that a step's kernels read."""
    layout = step.layout
    for array in (*layout.streams, *layout.rings, *layout.tails):
        step.rows_of(array.name)


POOLS = (
    ("peer", "{peer}"), ("batch", "{batch}"), ("take us", "{take_us:.2f}"),
    ("give us", "{give_us:.2f}"), ("M blocks/s", "{million_per_s:.2f}"),
)  # fmt: skip
MANAGERS = (
    ("layout", "{layout}"), ("requests", "{requests}"),
    ("append us each", "{append_us_per_request:.1f}"),
    ("arrays us each", "{arrays_us_per_request:.1f}"), ("hit us", "{admit_hit_us:.1f}"),
    ("free us", "{free_us:.1f}"), ("miss us", "{admit_miss_us:.1f}"),
    ("check us", "{check_us:.1f}"),
)  # fmt: skip


TABLES = (
    ("pool", "pools", POOLS),
    ("manager", f"manager, requests of {CONTEXT} tokens", MANAGERS),
)


def setting_of(options: argparse.Namespace) -> dict:
    """Machine, version, and how quiet it is."""
    found = {"cores": os.cpu_count(), "python": platform.python_version()}
    found["load"] = [round(x, 2) for x in os.getloadavg()]
    return heading(**found, blocks=options.blocks, repeats=options.repeats)


def show_rows(rows: list[dict]) -> None:
    setting = rows[0]
    print(f"Python {setting['python']}, {setting['machine']}, {setting['cores']} cores, "
          f"load {setting['load'][0]}, {setting['date']}")  # fmt: skip
    for kind, title, columns in TABLES:
        of_kind = [row for row in rows if row["kind"] == kind]
        if of_kind:
            show(*table(title, columns, of_kind))


def perform(options: argparse.Namespace) -> int:
    if options.show:
        show_rows(read_rows(options.show))
        return 0
    most = max(options.batches)
    if min(options.batches) < 1 or most >= options.blocks or options.repeats < 1:
        return refuse(f"batches {options.batches}: from 1 to fewer than --blocks {options.blocks}; "
                      f"--repeats {options.repeats}: at least 1")  # fmt: skip
    rows = [setting_of(options)]
    how = {"console": Console(stderr=True), "transient": True}
    rows += track(pool_rows(options), "pools", total=3 * len(options.batches), **how)
    if options.requests:
        total = len(LAYOUTS) * len(options.requests)
        rows += track(manager_rows(options), "manager", total=total, **how)
    show_rows(rows)
    if options.json:
        save_rows(options.json, rows)
    return 0


# vLLM's BlockPool for a comparison: the installed one, or the source of a checkout.
#
# Of a checkout its two modules about blocks are imported as they are; whatever else they import is
# replaced by names that can be asked for anything, since the loops here need none of it.


REAL = ("vllm.v1.core.block_pool", "vllm.v1.core.kv_cache_utils", "vllm.v1.core.kv_cache_metrics")
MODULE = REAL[0]


class _Stub(types.ModuleType):
    """A module or package in which every name is a class that nobody has to make an object of."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "init_logger":
            return logging.getLogger
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of `checkout` that are REAL, stubs for the rest of the package."""

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        if name.partition(".")[0] != "vllm":
            return None
        if name in REAL:
            file = self.checkout.joinpath(*name.split(".")).with_suffix(".py")
            if file.exists():
                return importlib.util.spec_from_file_location(name, file)
            if name == MODULE:
                return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: a stub module is empty."""


def block_pool(checkout: Path | None) -> tuple[Callable[[int], Any] | None, str]:
    """(what makes a pool of so many blocks, where it comes from), or (None, why not)."""
    if checkout is None:
        try:
            version = importlib.import_module("vllm").__version__
            made = importlib.import_module(MODULE).BlockPool
        except (ImportError, AttributeError) as error:
            return None, f"vllm is not importable: {error}"
        return _maker(made), f"vllm {version}"
    finder = _Finder(checkout)
    sys.meta_path.insert(0, finder)
    try:
        made = importlib.import_module(MODULE).BlockPool
    except (ImportError, AttributeError, TypeError) as error:
        return None, f"no BlockPool in {checkout.name}: {error}"
    finally:
        sys.meta_path.remove(finder)
    return _maker(made), f"vllm {_version(checkout)}, its imports replaced"


def _maker(pool: Callable[..., Any]) -> Callable[[int], Any]:
    """hash_block_size is what newer ones want to know."""

    def make(blocks: int) -> Any:
        try:
            return pool(num_gpu_blocks=blocks, enable_caching=True)
        except TypeError:
            return pool(num_gpu_blocks=blocks, enable_caching=True, hash_block_size=16)

    return make


def _version(checkout: Path) -> str:
    facts = checkout / "PKG-INFO"
    if facts.exists():
        for line in facts.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Version: "):
                return line.removeprefix("Version: ")
    return "of a checkout"
