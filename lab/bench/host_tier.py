"""`bench.py kvcache-tier`: times transfers to the host, alone and concurrent with decode."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import torch

from gqa_lowlatency import decode
from kvcache.books.slot_pool import Sizes
from kvcache.books.work import Pool
from kvcache.layouts.models import gqa
from kvcache.memory.cache import Cache
from kvcache.movement import launch as forward
from kvcache.movement.api import copy_slots
from lab.measure.timing import elapsed, heading
from lab.tools.common import read_rows, save_rows
from lab.tools.tables import show, table

LAYERS, HEADS, Q_HEADS, DIM, PAGE = 4, 8, 32, 128, 64  # a block of 1 MiB
BATCH, PAGES = 8, 48  # of the decode step
ROUNDS = 12  # of transfers that decode runs beside
STEPS = 5  # in a graph
BESIDE = 0.8  # of the time of the transfers, for the steps beside them
COLUMNS = (
    ("way", "{way}"), ("direction", "{direction}"), ("GB/s alone", "{alone_gbs:.1f}"),
    ("beside decode", "{beside_gbs:.1f}"), ("step us", "{step_us:.0f}"),
    ("beside", "{step_beside_us:.0f}"), ("slower", "x{slowdown:.2f}"),
)  # fmt: skip
NO_GPU = "No CUDA GPU here: there is no bus to measure."


class Tier:
    """A pool with its host pool, and decode steps over blocks that nobody moves."""

    def __init__(self, blocks: int) -> None:
        layout = gqa(LAYERS, HEADS, DIM, block_tokens=PAGE)
        sizes = Sizes(blocks + BATCH * PAGES + 1, host_blocks=blocks)
        cache = Cache(layout, sizes, device="cuda")
        pools = cache.storage.pools
        self.blocks, self.pools = blocks, {True: pools[Pool.BLOCKS], False: pools[Pool.HOST_BLOCKS]}
        self.nbytes = blocks * layout.block_bytes
        self.pools[True].view(torch.int32).random_(0, 1 << 10)
        self.pairs = torch.arange(blocks, device="cuda")[:, None].expand(-1, 2).contiguous()
        self.side = torch.cuda.Stream()
        self.graph = self._graph(cache)
        self.alone = elapsed(self.graph, 100) / STEPS

    def _graph(self, cache: Cache) -> torch.cuda.CUDAGraph:
        q = torch.randn(BATCH, Q_HEADS, DIM, device="cuda").bfloat16()
        first = self.blocks + 1
        table = torch.arange(first, first + BATCH * PAGES, dtype=torch.int32, device="cuda")
        given = {
            "page_table": table.view(BATCH, PAGES),
            "kv_lens": torch.full((BATCH,), PAGES * PAGE, dtype=torch.int32, device="cuda"),
        }
        pages = [
            [cache.pages(name, layer, torch.bfloat16, (HEADS, DIM)) for name in "kv"]
            for layer in range(LAYERS)
        ]

        def step() -> None:
            for k, v in pages:
                decode(q, k, v, **given)

        step()
        torch.cuda.synchronize()
        self.kept = q, given, pages  # the graph has their addresses
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(STEPS):
                step()
        return graph

    def kernel(self, *, offload: bool) -> None:
        """Copy all blocks with one launch."""
        copy_slots(self.pools[offload], self.pools[not offload], self.pairs)

    def memcpy(self, *, offload: bool) -> None:
        """A copy for each."""
        source, target = self.pools[offload], self.pools[not offload]
        for block in range(self.blocks):
            target[block].copy_(source[block], non_blocking=True)

    def check(self, move: Callable) -> None:
        """ValueError unless blocks come back as they were."""
        before = self.pools[True][: self.blocks].clone()
        move(offload=True)
        torch.cuda.synchronize()
        self.pools[True][: self.blocks] = 0
        move(offload=False)
        torch.cuda.synchronize()
        if not torch.equal(self.pools[True][: self.blocks], before):
            raise ValueError("blocks came back with other bytes")

    def measure(self, move: Callable[[], None]) -> dict[str, float]:
        """GB/s of transfers alone and beside decode, and the steps' time beside them."""
        with torch.cuda.stream(self.side):
            move()
            alone = self._transfers(move)
        torch.cuda.synchronize()
        seconds = events_between(*alone)
        with torch.cuda.stream(self.side):
            beside = self._transfers(move)
        replays = max(1, int(seconds * BESIDE / (self.alone * STEPS)))
        step = elapsed(self.graph, replays) / STEPS
        total = ROUNDS * self.nbytes * 1e-9
        return {
            "alone_gbs": total / seconds, "beside_gbs": total / events_between(*beside),
            "step_us": self.alone * 1e6, "step_beside_us": step * 1e6,
            "slowdown": step / self.alone,
        }  # fmt: skip

    def _transfers(self, move: Callable[[], None]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(ROUNDS):
            move()
        end.record()
        return begin, end


def events_between(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """Seconds; waits for the second one."""
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def rows_of(options: argparse.Namespace) -> Iterator[dict]:
    """A row for each way and direction."""
    tier = Tier(options.blocks)
    elapsed(tier.graph)
    ways: dict[str, tuple[Callable, int]] = {"memcpy": (tier.memcpy, 0)}
    ways |= {f"kernel {ctas}": (tier.kernel, ctas) for ctas in options.ctas}
    for way, (move, ctas) in ways.items():
        limit = partial(_at_most, ctas) if ctas else forward.ctas_for
        with mock.patch.object(forward, "ctas_for", limit):
            tier.check(move)
            for offload in (True, False):
                found = tier.measure(partial(move, offload=offload))
                names = {"way": way, "direction": "offload" if offload else "fetch"}
                yield {"kind": "tier", **names, "blocks": options.blocks,
                       "block_bytes": tier.nbytes // options.blocks, **found}  # fmt: skip


def _at_most(ctas: int, items: int, at_once: int = 1) -> int:
    return min(-(-items // at_once), ctas)


def show_rows(rows: list[dict]) -> None:
    setting_row, *found = rows
    gpu = setting_row.get("gpu", {}).get("name", "no GPU")
    show(*table(f"{gpu}, {setting_row['date']}", COLUMNS, found))


def perform(options: argparse.Namespace) -> int:
    if options.show:
        show_rows(read_rows(options.show))
        return 0
    if not torch.cuda.is_available():
        print(NO_GPU)
        return 0
    rows = [heading(), *rows_of(options)]
    show_rows(rows)
    if options.json:
        save_rows(options.json, rows)
    return 0
