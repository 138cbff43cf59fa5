"""Load roles by TMA: Q and panels of K, and pieces of V (device code)."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Uint16, Uint32
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import PipelineState

from kernelkit.device.boxes import Box, BoxPosition, TmaTensor, partition
from kernelkit.device.pipelines import Ring, consumer_state_at, producer_state_at
from kernelkit.device.shared_words import store
from kernelkit.device.umma import shared
from kernelkit.plan import hw
from mla.attention.shared.intake import HALF, PANEL, PANEL_BYTES
from mla.attention.shared.pages import Key, partition_box, place_of
from mla.attention.sm100.args import Scope
from mla.attention.sm100.finish import mailbox_of
from mla.attention.sm100.plan import (
    COLUMNS,
    KEYS,
    OWN_KEYS,
    PAIR,
    PIECE_BYTES,
    PIECES,
    S_STAGES,
    Plan100,
)

PANEL_ITEMS, PIECE_ITEMS = PANEL_BYTES // 2, PIECE_BYTES // 2


def q_box(plan: Plan100) -> Box:
    """Return the box of Q: the heads of a token in a row tile."""
    return Box(plan.tiles.heads, PANEL, BFloat16)


def k_box(plan: Plan100) -> Box:
    """Return the box of keys: half of a tile's, or as many of them as one page holds."""
    return Box(plan.box_rows, PANEL, BFloat16)


@dataclass(frozen=True)
class Boxes:
    """Boxes that cover some keys: (box,) registers."""

    rows: cute.Tensor
    pages: cute.Tensor


def make_boxes(keys: int, box: Box) -> Boxes:
    """Return the registers for the places of so many keys."""
    return Boxes(*(cute.make_rmem_tensor(keys // box.rows, Int32) for _ in range(2)))


@cute.jit
def find(plan: Plan100, scope: Scope, box: Box, first: Int32, boxes: Boxes) -> None:
    """Find the rows and pages of the boxes from key `first` on."""
    for part in cutlass.range_constexpr(cute.size(boxes.rows)):
        boxes.rows[part], boxes.pages[part] = place_of(plan.config, scope, first + part * box.rows)


class LoadK:
    """Loads Q, and the CTA's keys for Q K^T."""

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

        The ranks of a cluster have the same rows: each brings some panels to all of them.
        """
        plan, work, tiles, cluster = (
            self.plan,
            scope.work,
            self.plan.tiles,
            self.plan.config.cluster,
        )
        box, barrier = q_box(plan), scope.pipes.q.barrier(Int32(0))
        mask = Int32(sum(1 << (rank * PAIR) for rank in range(cluster))) << work.sharer
        scope.pipes.q.signal(Int32(0))
        for panel in cutlass.range_constexpr(plan.panels):
            if panel % cluster == work.rank:
                for token in cutlass.range_constexpr(tiles.tokens):
                    place = panel * PANEL_ITEMS + token * tiles.heads * PANEL
                    target = shared(scope.buffers.q + place, box.layout())
                    position = BoxPosition(work.head, panel * PANEL, work.token + token, work.entry)
                    to, source = partition(scope.q, box, position, target)
                    if cutlass.const_expr(cluster == 1):
                        cute.copy(scope.q.atom, source, to, tma_bar_ptr=barrier)
                    else:
                        every = Uint16(mask)
                        cute.copy(scope.q.atom, source, to, tma_bar_ptr=barrier, mcast_mask=every)

    @cute.jit
    def load_keys(self, scope: Scope) -> None:
        """Load all tiles, a group of panels at a time."""
        plan, ring, work = self.plan, scope.pipes.k, scope.work
        box, groups = k_box(plan), plan.groups
        now, boxes = make_boxes(OWN_KEYS, box), make_boxes(OWN_KEYS, box)
        begin = work.begin * KEYS + work.sharer * OWN_KEYS
        find(plan, scope, box, begin, boxes)
        for number in cutlass.range(work.count, unroll=1):
            now.rows.store(boxes.rows.load())
            now.pages.store(boxes.pages.load())
            find(plan, scope, box, begin + (number + 1) * KEYS, boxes)  # buffers are still in use
            for group in cutlass.range_constexpr(len(groups)):
                ring.acquire_bytes(free(group, number), len(groups[group]) * PANEL_BYTES)
                for panel in groups[group]:
                    target = scope.buffers.k + panel * PANEL_ITEMS
                    barrier = ring.barrier(Int32(group))
                    load_panel(scope.k, box, now, panel * PANEL, target, barrier)
        leave(ring, len(groups), work.count)


class LoadV:
    """Loads half of the columns of all keys, and marks which keys exist."""

    def __init__(self, plan: Plan100) -> None:
        self.plan = plan
        self.role = plan.roles["load_v"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp. Rows past the last key are cleared in the last tile."""
        plan, ring, work = self.plan, scope.pipes.v, scope.work
        cpasync.prefetch_descriptor(scope.last_v.atom)
        boxes = make_boxes(KEYS, k_box(plan))
        for number in cutlass.range(work.count, unroll=1):
            first = (work.begin + number) * KEYS
            find(plan, scope, k_box(plan), first, boxes)  # while buffers are still in use
            self.mark(scope, first, boxes, number)
            if first + KEYS <= work.keys:
                for piece in cutlass.range_constexpr(PIECES):
                    ring.acquire(free(piece, number))
                    self.load_piece(scope, scope.k, boxes, piece, ring.barrier(Int32(piece)))
            else:
                self.load_last(scope, first, boxes, number)
        leave(ring, PIECES, work.count)

    @cute.jit
    def load_piece(
        self,
        scope: Scope,
        tma: TmaTensor,
        boxes: Boxes,
        piece: cutlass.Constexpr,
        barrier: cute.Pointer,
    ) -> None:
        """Start the boxes of a piece."""
        box = k_box(self.plan)
        count = OWN_KEYS // box.rows
        own = Boxes(*(part_of(each, piece * count, count) for each in (boxes.rows, boxes.pages)))
        for panel in cutlass.range_constexpr(HALF):
            target = scope.buffers.v + piece * PIECE_ITEMS + panel * PANEL_ITEMS
            column = scope.work.sharer * COLUMNS + panel * PANEL
            load_panel(tma, box, own, column, target, barrier)

    @cute.jit
    def load_last(self, scope: Scope, first: Int32, boxes: Boxes, number: Int32) -> None:
        """Load a tile that ends past the last key, and zero rows of keys that do not exist: their
        weight is 0, but 0 * NaN is NaN, and their memory may hold anything.
        """
        pipes = scope.pipes
        for piece in cutlass.range_constexpr(PIECES):
            pipes.v.wait_free(free(piece, number))
        pipes.landed.signal(Int32(0))
        for piece in cutlass.range_constexpr(PIECES):
            self.load_piece(scope, scope.last_v, boxes, piece, pipes.landed.barrier(Int32(0)))
        pipes.landed.wait(consumer_state_at(1, Int32(0)))
        zeros = cute.make_rmem_tensor(PANEL, BFloat16)
        zeros.fill(0.0)
        lane = cute.arch.lane_idx()
        for turn in cutlass.range_constexpr(KEYS // hw.WARP_THREADS):
            key = turn * hw.WARP_THREADS + lane
            if first + key >= scope.work.keys:
                for panel in cutlass.range_constexpr(HALF):
                    # A line of zeros needs no swizzle: it stays within the line.
                    place = key // OWN_KEYS * PIECE_ITEMS + panel * PANEL_ITEMS
                    line = scope.buffers.v + (place + key % OWN_KEYS * PANEL)
                    target = cute.make_tensor(line.align(16), cute.make_layout(PANEL))
                    cute.autovec_copy(zeros, target)
        cute.arch.fence_proxy("async.shared", space="cta")
        pipes.cleared.signal(Int32(0))
        for piece in cutlass.range_constexpr(PIECES):
            pipes.v.signal_without_bytes(Int32(piece))

    @cute.jit
    def mark(self, scope: Scope, first: Int32, boxes: Boxes, number: Int32) -> None:
        """Store which keys of a tile have a page: bits for those past the last key are set."""
        rows, pages = k_box(self.plan).rows, scope.given.keys.store.shape[0]
        words = [Uint32(0)] * (KEYS // 32)
        for part in cutlass.range_constexpr(KEYS // rows):
            page = boxes.pages[part]
            there = (page >= 0 and page < pages) or first + part * rows >= scope.work.keys
            for word in cutlass.range_constexpr(KEYS // 32):
                bits = bits_of_part(part, rows, word)
                if cutlass.const_expr(bits != 0):
                    words[word] = words[word] | (Uint32(bits) if there else Uint32(0))
        state = producer_state_at(S_STAGES, number)
        scope.pipes.marks.wait_free(state)
        with cute.arch.elect_one():
            store(scope.buffers.marks + state.index * (KEYS // 8), Uint32, tuple(words))
        cute.arch.sync_warp()
        scope.pipes.marks.signal(state.index)


def bits_of_part(part: int, rows: int, word: int) -> int:
    """Return the bits of a box's keys in a word of 32 keys."""
    return ((1 << rows) - 1) << (part * rows) >> (32 * word) & 0xFFFFFFFF


def free(stage: int, number: Int32) -> PipelineState:
    """Return the state of who fills a stage for the time `number`."""
    return PipelineState(0, number, Int32(stage), number % 2 ^ 1)


@cute.jit
def leave(ring: Ring, stages: cutlass.Constexpr, count: Int32) -> None:
    """Wait until the leader has released all stages, so that its releases find this CTA.

    count: how many times each stage was filled.
    """
    for stage in cutlass.range_constexpr(stages):
        ring.wait_free(free(stage, count))


@cute.jit
def ring_of(scope: Scope, values: cutlass.Constexpr) -> Ring:
    """Return the ring of V or of K."""
    return scope.pipes.v if cutlass.const_expr(values) else scope.pipes.k


@cute.jit
def part_of(tensor: cute.Tensor, first: cutlass.Constexpr, count: cutlass.Constexpr) -> cute.Tensor:
    """Return `count` registers from `first` on."""
    return cute.make_tensor(tensor.iterator + first, cute.make_layout(count))


@cute.jit
def load_panel(
    tma: TmaTensor,
    box: Box,
    boxes: Boxes,
    column: Int32,
    target: cute.Pointer,
    barrier: cute.Pointer,
) -> None:
    """Start the boxes of 64 columns of some keys."""
    for part in cutlass.range_constexpr(cute.size(boxes.rows)):
        place = Key(boxes.rows[part], boxes.pages[part], column)
        to = shared(target + part * (box.rows * PANEL), box.layout())
        to_shared, from_global = partition_box(tma, box, place, to)
        cute.copy(tma.atom, from_global, to_shared, tma_bar_ptr=barrier)
