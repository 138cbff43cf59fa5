"""Load roles by TMA: Q and own keys, and the peer's keys (device code)."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint32
from cutlass.cute.nvgpu import cpasync

from kernelkit.device.boxes import Box, BoxPosition, copy_in
from kernelkit.device.pipelines import consumer_state_at, producer_state_at
from kernelkit.device.shared_words import store
from kernelkit.device.umma import shared
from mla.attention.sm90.args import Key
from mla.attention.sm90.load import partition_box
from mla.attention.sm100.args import Buffers, Scope
from mla.attention.sm100.finish import mailbox_of
from mla.attention.sm100.plan import (
    COLUMNS,
    GROUP,
    HALF,
    KEY_STAGES,
    KEYS,
    OWN_GROUPS,
    OWN_KEYS,
    OWN_STAGES,
    OWN_TILES,
    PAIR,
    PANEL,
    PANEL_BYTES,
    PIECE_BYTES,
    PIECE_KEYS,
    PIECES,
    ROWS,
    STAGE_BYTES,
    Plan100,
)

PANEL_ITEMS, STAGE_ITEMS, PIECE_ITEMS = PANEL_BYTES // 2, STAGE_BYTES // 2, PIECE_BYTES // 2


def q_box(plan: Plan100) -> Box:
    """Return the box of Q: the heads of a token in a row tile."""
    return Box(plan.tiles.heads, PANEL, BFloat16)


def k_box(plan: Plan100) -> Box:
    """Return the box of own keys: 64, or as many of them as one page holds."""
    return Box(plan.box_rows, PANEL, BFloat16)


def piece_box(plan: Plan100) -> Box:
    """Return the box of the peer's keys: a piece, or as much of it as one page holds."""
    return Box(plan.piece_box_rows, PANEL, BFloat16)


@cute.jit
def key_column(plan: Plan100, half: Int32, panel: cutlass.Constexpr) -> Int32:
    """Return the first column of a panel outside the CTA's own columns: the peer's, then RoPE."""
    if cutlass.const_expr(panel == HALF):
        return Int32(2 * COLUMNS)
    return (1 - half) * COLUMNS + panel * PANEL


@dataclass(frozen=True)
class Boxes:
    """Boxes of a tile that cover the same keys: (box,) registers."""

    rows: cute.Tensor
    pages: cute.Tensor


def make_boxes(keys: int, box: Box) -> Boxes:
    """Return the registers for the places of so many keys."""
    return Boxes(*(cute.make_rmem_tensor(keys // box.rows, Int32) for _ in range(2)))


@cute.jit
def find(plan: Plan100, scope: Scope, box: Box, first: Int32, boxes: Boxes) -> None:
    """Find the rows and pages of the boxes from key `first` on."""
    for part in cutlass.range_constexpr(cute.size(boxes.rows)):
        boxes.rows[part], boxes.pages[part] = place_of(plan, scope, first + part * box.rows)


class LoadK:
    """Loads Q, and the CTA's own keys."""

    def __init__(self, plan: Plan100) -> None:
        self.plan = plan
        self.role = plan.roles["load_k"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        cpasync.prefetch_descriptor(scope.q.atom)
        if mailbox_of(self.plan, scope.work, scope.buffers).senders > 0:
            self.load_q(scope)
        if cutlass.const_expr(self.plan.by_tma):
            self.load_keys(scope)

    @cute.jit
    def load_q(self, scope: Scope) -> None:
        """Load the rows of Q. Heads and tokens that the tensor lacks arrive as zeros.

        The ranks of a cluster have the same rows: each brings some panels to the CTAs with the same
        own columns.
        """
        plan, work, tiles = self.plan, scope.work, self.plan.tiles
        box, cluster, mask = q_box(plan), plan.config.cluster, None
        if cutlass.const_expr(cluster > 1):
            every = sum(1 << (rank * PAIR) for rank in range(cluster))
            mask = Int32(every) << work.half
        scope.pipes.q.signal(Int32(0))
        barrier = scope.pipes.q.barrier(Int32(0))
        # In the order of the products.
        for panel in cutlass.range_constexpr(plan.panels):
            if panel % cluster == work.rank:
                column = work.half * COLUMNS + (panel - plan.key_panels) * PANEL
                if cutlass.const_expr(panel < plan.key_panels):
                    column = key_column(plan, work.half, panel)
                for token in cutlass.range_constexpr(tiles.tokens):
                    place = q_panel(plan, scope.buffers, panel) + token * tiles.heads * PANEL
                    target = shared(place, box.layout())
                    position = BoxPosition(work.head, column, work.token + token, work.entry)
                    copy_in(scope.q, box, position, target, barrier, mask)

    @cute.jit
    def load_keys(self, scope: Scope) -> None:
        """Load all tiles: panels outside the own columns, then the own columns."""
        plan, pipes, work = self.plan, scope.pipes, scope.work
        box = k_box(plan)
        now, boxes = make_boxes(OWN_KEYS, box), make_boxes(OWN_KEYS, box)
        begin = work.begin * KEYS + work.half * OWN_KEYS
        find(plan, scope, box, begin, boxes)
        for number in cutlass.range(work.count, unroll=1):
            now.rows.store(boxes.rows.load())
            now.pages.store(boxes.pages.load())
            first = begin + number * KEYS
            find(plan, scope, box, first + KEYS, boxes)  # while buffers are still in use
            for group in cutlass.range_constexpr(len(plan.key_groups)):
                panels = plan.key_groups[group]
                state = producer_state_at(KEY_STAGES, number * len(plan.key_groups) + group)
                pipes.key.acquire_bytes(state, len(panels) * PANEL_BYTES)
                for panel in panels:
                    place = state.index * GROUP + panel % GROUP
                    target = scope.buffers.key + place * PANEL_ITEMS
                    column = key_column(plan, work.half, panel)
                    load_panel(scope, box, now, column, target, pipes.key.barrier(state.index))
            if number == 1:
                pipes.lent.wait(consumer_state_at(1, Int32(0)))
            for panel in cutlass.range_constexpr(HALF):
                state = producer_state_at(OWN_STAGES, number * OWN_GROUPS + panel // GROUP)
                if cutlass.const_expr(panel % GROUP == 0):
                    pipes.own.wait_free(state)
                    if cutlass.const_expr(panel == 0):
                        self.mark(scope, first, now, number % OWN_TILES)
                    pipes.own.signal(state.index)
                place = number % OWN_TILES * HALF + panel
                target = scope.buffers.own + place * PANEL_ITEMS
                column = work.half * COLUMNS + panel * PANEL
                load_panel(scope, box, now, column, target, pipes.own.barrier(state.index))

    @cute.jit
    def mark(self, scope: Scope, first: Int32, boxes: Boxes, stage: Int32) -> None:
        """Store which own keys have a page: bits for those past the last key are set."""
        rows, pages = k_box(self.plan).rows, scope.given.keys.store.shape[0]
        words = [Uint32(0), Uint32(0)]
        for part in cutlass.range_constexpr(OWN_KEYS // rows):
            page = boxes.pages[part]
            there = (page >= 0 and page < pages) or first + part * rows >= scope.work.keys
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
        box = piece_box(plan)
        boxes = make_boxes(PIECE_KEYS, box)
        begin = work.begin * KEYS + (1 - work.half) * OWN_KEYS
        if work.count > 0:
            scope.pipes.lent.wait(consumer_state_at(1, Int32(0)))
        for number in cutlass.range(work.count, unroll=1):
            for piece in cutlass.range_constexpr(PIECES):
                first = begin + number * KEYS + piece * PIECE_KEYS
                find(plan, scope, box, first, boxes)  # while the buffer is still in use
                ring.acquire(producer_state_at(PIECES, number * PIECES + piece))
                for panel in cutlass.range_constexpr(HALF):
                    place = piece * PIECE_ITEMS + panel * (PIECE_ITEMS // HALF)
                    column = work.half * COLUMNS + panel * PANEL
                    target = scope.buffers.peer + place
                    load_panel(scope, box, boxes, column, target, ring.barrier(Int32(piece)))


@cute.jit
def q_panel(plan: Plan100, buffers: Buffers, panel: cutlass.Constexpr) -> cute.Pointer:
    """Return where a panel of Q arrives, numbered in the order of the products.

    Panels for tensor memory come to the buffers of P, of the second stage of own columns, and of
    the peer's keys.
    """
    in_tmem = plan.key_panels - plan.q_smem_panels
    if cutlass.const_expr(in_tmem <= panel < plan.key_panels):
        return buffers.q + (panel - in_tmem) * (ROWS * PANEL)
    number = panel if panel < in_tmem else panel - plan.q_smem_panels
    place = number % 2 * (ROWS * PANEL)
    return (buffers.p, buffers.own + STAGE_ITEMS, buffers.peer)[number // 2] + place


def bits_of_part(part: int, rows: int, half: int) -> int:
    """Return the bits of a box's keys within half of the own keys."""
    return ((1 << rows) - 1) << (part * rows) >> (half * OWN_KEYS // 2) & 0xFFFFFFFF


@cute.jit
def load_panel(
    scope: Scope,
    box: Box,
    boxes: Boxes,
    column: Int32,
    target: cute.Pointer,
    barrier: cute.Pointer,
) -> None:
    """Start the boxes of 64 columns of some keys."""
    tma = scope.k if cutlass.const_expr(box.rows > PIECE_KEYS) else scope.pieces
    for part in cutlass.range_constexpr(cute.size(boxes.rows)):
        place = Key(boxes.rows[part], boxes.pages[part], column)
        to = shared(target + part * (box.rows * PANEL), box.layout())
        to_shared, from_global = partition_box(tma, box, place, to)
        cute.copy(tma.atom, from_global, to_shared, tma_bar_ptr=barrier)


@cute.jit
def place_of(plan: Plan100, scope: Scope, key: Int32) -> tuple[Int32, Int32]:
    """Return (row, page) of a key. Past the last key the page does not exist: zeros arrive."""
    rows, source = plan.config.keys.rows, scope.given.keys
    page = Int32(source.store.shape[0])
    if key < scope.work.keys:
        page = Int32(source.places[scope.work.entry, key // rows])
    return key % rows, page
