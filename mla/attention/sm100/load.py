"""Load roles by TMA: Q and own keys, and the peer's keys (device code)."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint32
from cutlass.cute.nvgpu import cpasync

from kernelkit.device.boxes import Box, BoxPosition, TmaTensor, copy_in
from kernelkit.device.pipelines import producer_state_at
from kernelkit.device.shared_words import store
from kernelkit.device.umma import shared
from mla.attention.sm90.args import Key
from mla.attention.sm90.load import partition_box
from mla.attention.sm100.args import Scope
from mla.attention.sm100.plan import (
    COLUMNS,
    HALF,
    KEY_STAGES,
    KEYS,
    OWN_KEYS,
    OWN_STAGES,
    PANEL,
    PANEL_BYTES,
    PEER_STAGES,
    ROWS,
    STAGE_BYTES,
    Plan100,
)

PANEL_ITEMS, STAGE_ITEMS = PANEL_BYTES // 2, STAGE_BYTES // 2


@dataclass(frozen=True)
class Panel:
    """Panel to load: keys from `first` on, columns from `column` on, to a place."""

    first: Int32
    column: Int32
    target: cute.Pointer
    barrier: cute.Pointer


def q_box(plan: Plan100) -> Box:
    """Return the box of Q: the heads of a token in a row tile."""
    return Box(plan.tiles.heads, PANEL, BFloat16)


def k_box(plan: Plan100) -> Box:
    """Return the box of K: 64 keys, or as many of them as one page holds."""
    return Box(plan.box_rows, PANEL, BFloat16)


@cute.jit
def key_column(plan: Plan100, half: Int32, panel: cutlass.Constexpr) -> Int32:
    """Return the first column of a panel outside the CTA's own columns: the peer's, then RoPE."""
    if cutlass.const_expr(panel == HALF):
        return Int32(2 * COLUMNS)
    return (1 - half) * COLUMNS + panel * PANEL


class LoadK:
    """Loads panels of Q, and the CTA's own keys."""

    def __init__(self, plan: Plan100) -> None:
        self.plan = plan
        self.role = plan.roles["load_k"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        cpasync.prefetch_descriptor(scope.q.atom)
        if scope.work.count > 0:
            self.load_q(scope)
        if cutlass.const_expr(self.plan.by_tma):
            self.load_keys(scope)

    @cute.jit
    def load_q(self, scope: Scope) -> None:
        """Load the rows of Q. Heads and tokens that the tensor lacks arrive as zeros."""
        plan, work, tiles = self.plan, scope.work, self.plan.tiles
        box = q_box(plan)
        scope.pipes.q.signal(Int32(0))
        for panel in cutlass.range_constexpr(plan.q_smem_panels):
            column = key_column(plan, work.half, plan.key_panels - plan.q_smem_panels + panel)
            for token in cutlass.range_constexpr(tiles.tokens):
                place = (panel * ROWS + token * tiles.heads) * PANEL
                target = shared(scope.buffers.q + place, box.layout())
                position = BoxPosition(work.head, column, work.token + token, work.entry)
                copy_in(scope.q, box, position, target, scope.pipes.q.barrier(Int32(0)))

    @cute.jit
    def load_keys(self, scope: Scope) -> None:
        """Load all tiles: panels outside the own columns, then the own columns."""
        plan, pipes, work = self.plan, scope.pipes, scope.work
        panels = plan.key_panels
        for number in cutlass.range(work.count, unroll=1):
            first = (work.begin + number) * KEYS + work.half * OWN_KEYS
            for panel in cutlass.range_constexpr(panels):
                state = producer_state_at(KEY_STAGES, number * panels + panel)
                pipes.key.acquire(state)
                target = scope.buffers.key + state.index * PANEL_ITEMS
                column = key_column(plan, work.half, panel)
                barrier = pipes.key.barrier(state.index)
                load_panel(plan, scope, Panel(first, column, target, barrier))
            state = producer_state_at(OWN_STAGES, number)
            pipes.own.wait_free(state)
            self.mark(scope, first, state.index)
            pipes.own.signal(state.index)
            for panel in cutlass.range_constexpr(HALF):
                target = scope.buffers.own + state.index * STAGE_ITEMS + panel * PANEL_ITEMS
                column = work.half * COLUMNS + panel * PANEL
                barrier = pipes.own.barrier(state.index)
                load_panel(plan, scope, Panel(first, column, target, barrier))

    @cute.jit
    def mark(self, scope: Scope, first: Int32, stage: Int32) -> None:
        """Store which own keys have a page: bits for those past the last key are set."""
        rows, pages = k_box(self.plan).rows, scope.given.keys.store.shape[0]
        words = [Uint32(0), Uint32(0)]
        for part in cutlass.range_constexpr(OWN_KEYS // rows):
            key = first + part * rows
            _, page = place_of(self.plan, scope, key)
            there = (page >= 0 and page < pages) or key >= scope.work.keys
            for half in cutlass.range_constexpr(2):
                bits = bits_of_part(part, rows, half)
                words[half] = words[half] | (Uint32(bits) if there else Uint32(0))
        with cute.arch.elect_one():
            store(scope.buffers.valid + stage * 8, Uint32, (words[0], words[1]))


class LoadV:
    """Loads the own columns of the peer's keys."""

    def __init__(self, plan: Plan100) -> None:
        self.plan = plan
        self.role = plan.roles["load_v"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        plan, ring, work = self.plan, scope.pipes.peer, scope.work
        cpasync.prefetch_descriptor(scope.k.atom)
        for number in cutlass.range(work.count, unroll=1):
            first = (work.begin + number) * KEYS + (1 - work.half) * OWN_KEYS
            state = producer_state_at(PEER_STAGES, number)
            ring.acquire(state)
            for panel in cutlass.range_constexpr(HALF):
                target = scope.buffers.peer + state.index * STAGE_ITEMS + panel * PANEL_ITEMS
                column = work.half * COLUMNS + panel * PANEL
                barrier = ring.barrier(state.index)
                load_panel(plan, scope, Panel(first, column, target, barrier))


def bits_of_part(part: int, rows: int, half: int) -> int:
    """Return the bits of a box's keys within half of the own keys."""
    return ((1 << rows) - 1) << (part * rows) >> (half * OWN_KEYS // 2) & 0xFFFFFFFF


@cute.jit
def load_panel(plan: Plan100, scope: Scope, panel: Panel) -> None:
    """Start the boxes of a panel of 64 keys."""
    box = k_box(plan)
    for part in cutlass.range(OWN_KEYS // box.rows, unroll=1):
        row, page = place_of(plan, scope, panel.first + part * box.rows)
        target = shared(panel.target + part * (box.rows * PANEL), box.layout())
        to_shared, from_global = partition_box(scope.k, box, Key(row, page, panel.column), target)
        cute.copy(scope.k.atom, from_global, to_shared, tma_bar_ptr=panel.barrier)


@cute.jit
def place_of(plan: Plan100, scope: Scope, key: Int32) -> tuple[Int32, Int32]:
    """Return (row, page) of a key. Past the last key the page does not exist: zeros arrive."""
    rows, source = plan.config.keys.rows, scope.given.keys
    page = Int32(source.store.shape[0])
    if key < scope.work.keys:
        page = Int32(source.places[scope.work.entry, key // rows])
    return key % rows, page


__all__ = ["LoadK", "LoadV", "TmaTensor", "k_box", "q_box"]
