"""Gather role: four warps fetch the entries of a tile, convert them to bf16, and store them as TMA
would (device code).

A warp has 16 entries of a tile: lane l has entries l % 8 and l % 8 + 8 of them, and of each every
fourth chunk of 16 bytes, from chunk l / 8 on. So eight lanes that store at a time have eight rows,
whose swizzled units are in different banks, and four lanes read 64 bytes side by side.

All bytes of a tile are in flight before the first is converted, and before the buffer is free.
Entries in bf16 go to shared memory by cp.async instead; the consumers then order the proxies.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from kernelkit.device.pipelines import producer_state_at
from kernelkit.device.shared_words import store
from kernelkit.device.warp_mma import copy_chunk
from kernelkit.device.words import float_of, four_words_if
from mla.attention.config import Keys
from mla.attention.kernel_arguments import Source
from mla.attention.sm90.args import Scope
from mla.attention.sm90.dequantise import from_e4m3, from_ue8m0, scaled_e2m1, scaled_e4m3
from mla.attention.sm90.plan import (
    BUFFER_BYTES,
    BUFFERS,
    HALF,
    KEYS,
    PANEL,
    PANEL_BYTES,
    PANELS,
    Plan90,
)

CHUNK = 16  # bytes that a lane moves at a time
LANES = 4  # that share an entry
ENTRIES = 2  # of a lane
WARP_KEYS = 16


@dataclass(frozen=True)
class Entry:
    """An entry of the cache: its addresses, and whether it is one."""

    data: Int64
    scales: Int64
    valid: Boolean


@dataclass(frozen=True)
class Held:
    """Bytes of an entry that a lane holds.

    codes: quantised chunks, four words each; wide: chunks in bf16; scales: words.
    """

    codes: tuple[tuple[Uint32, ...], ...]
    wide: tuple[tuple[Uint32, ...], ...]
    scales: tuple[Uint32, ...]


class Gather:
    """Fills both pieces of every buffer."""

    def __init__(self, plan: Plan90) -> None:
        self.plan = plan
        self.role = plan.roles["gather"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        work, config = scope.work, self.plan.config
        for number in cutlass.range(work.count, unroll=1):
            tile = work.begin + number
            if cutlass.const_expr(config.extra is None):
                self.fill(scope, 0, number, tile * KEYS)
            elif tile < work.own_tiles:
                self.fill(scope, 0, number, tile * KEYS)
            else:
                self.fill(scope, 1, number, (tile - work.own_tiles) * KEYS)

    @cute.jit
    def fill(self, scope: Scope, which: cutlass.Constexpr, number: Int32, first: Int32) -> None:
        """Fill the buffer of tile `number` of this CTA. first: its first key in its source."""
        keys = self.plan.config.sources[which]
        source = scope.given.keys if cutlass.const_expr(which == 0) else scope.given.extra
        count = scope.work.keys if cutlass.const_expr(which == 0) else scope.work.extra
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx() - self.role.first_warp
        entries = []
        for each in cutlass.range_constexpr(ENTRIES):
            key = first + warp * WARP_KEYS + each * 8 + lane % 8
            entries.append(find(keys, source, scope.work.entry, key, count))
        if cutlass.const_expr(keys.form.plain and not keys.form.code):
            self.copy(scope, entries, number)
        else:
            held = [hold(keys.form, entry, lane // 8) for entry in entries]
            self.convert(scope, keys, held, entries, number)

    @cute.jit
    def convert(
        self, scope: Scope, keys: cutlass.Constexpr, held: list, entries: list, number: Int32
    ) -> None:
        """Convert what the lane holds, half by half, once the buffer's halves are free."""
        form, buffer = keys.form, number % BUFFERS
        state, pipes = producer_state_at(BUFFERS, number), scope.pipes
        place = Place.of(scope, buffer)
        pipes.left.wait_free(state)
        self.mark(scope, entries, buffer)
        for each in cutlass.range_constexpr(ENTRIES):
            store_panels(scope, form, held[each], place, each, range(HALF))
        if cutlass.const_expr(self.plan.panels > PANELS):
            if buffer == 1:
                for each in cutlass.range_constexpr(ENTRIES):
                    store_panels(scope, form, held[each], place, each, range(PANELS, PANELS + 1))
        cute.arch.fence_proxy("async.shared", space="cta")
        pipes.left.signal(buffer)
        pipes.right.wait_free(state)
        for each in cutlass.range_constexpr(ENTRIES):
            store_panels(scope, form, held[each], place, each, range(HALF, PANELS))
        if cutlass.const_expr(self.plan.panels > PANELS):
            if buffer == 0:
                for each in cutlass.range_constexpr(ENTRIES):
                    store_panels(scope, form, held[each], place, each, range(PANELS, PANELS + 1))
        cute.arch.fence_proxy("async.shared", space="cta")
        pipes.right.signal(buffer)

    @cute.jit
    def copy(self, scope: Scope, entries: list, number: Int32) -> None:
        """Copy entries in bf16 to shared memory; the barriers complete when the copies have."""
        buffer = number % BUFFERS
        state, pipes = producer_state_at(BUFFERS, number), scope.pipes
        place = Place.of(scope, buffer)
        pipes.left.wait_free(state)
        self.mark(scope, entries, buffer)
        for each in cutlass.range_constexpr(ENTRIES):
            copy_panels(entries[each], place, each, range(HALF))
        if cutlass.const_expr(self.plan.panels > PANELS):
            if buffer == 1:
                for each in cutlass.range_constexpr(ENTRIES):
                    copy_panels(entries[each], place, each, range(PANELS, PANELS + 1))
        arrive_after_copies(pipes.left.barrier(buffer))
        pipes.right.wait_free(state)
        for each in cutlass.range_constexpr(ENTRIES):
            copy_panels(entries[each], place, each, range(HALF, PANELS))
        if cutlass.const_expr(self.plan.panels > PANELS):
            if buffer == 0:
                for each in cutlass.range_constexpr(ENTRIES):
                    copy_panels(entries[each], place, each, range(PANELS, PANELS + 1))
        arrive_after_copies(pipes.right.barrier(buffer))

    @cute.jit
    def mark(self, scope: Scope, entries: list, buffer: Int32) -> None:
        """Store which keys of the tile are entries, a bit each."""
        bits = Int32(0)
        for each in cutlass.range_constexpr(ENTRIES):
            found = cute.arch.vote_ballot_sync(entries[each].valid) & 0xFF
            bits = bits | (found << (8 * each))
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx() - self.role.first_warp
        if lane == 0:
            cute.arch.inline_ptx(
                "{ .reg .b16 low, high; mov.b32 {low, high}, {$r1}; st.shared.b16 [{$r0}], low; }",
                read_only_args=[scope.buffers.valid + buffer * 8 + warp * 2, bits],
            )


@dataclass(frozen=True)
class Place:
    """Where a lane stores: the address of its first entry in panel 0, and its unit of a line."""

    line: Int32
    row: Int32  # in the group of eight
    lane: Int32  # among those that share an entry

    @staticmethod
    def of(scope: Scope, buffer: Int32) -> "Place":
        """Return the place of this thread in a buffer."""
        thread, _, _ = cute.arch.thread_idx()
        warp, lane = thread % 128 // 32, thread % 32
        start = scope.buffers.k.toint() + buffer * BUFFER_BYTES
        line = start + (warp * WARP_KEYS + lane % 8) * (PANEL * 2)
        return Place(line, lane % 8, lane // 8)

    def unit(self, panel: int, each: int, number: Int32 | int) -> Int32:
        """Return the address of a unit of 16 bytes of entry `each` in a panel."""
        return self.line + (panel * PANEL_BYTES + each * 8 * PANEL * 2) + (number ^ self.row) * 16


@cute.jit
def find(keys: cutlass.Constexpr, source: Source, row: Int32, key: Int32, count: Int32) -> Entry:
    """Return the entry of a key of query entry `row`; a key from `count` on is none."""
    valid, number = key < count, Int64(0)
    if cutlass.const_expr(keys.listed):
        if valid:
            number = Int64(source.places[row, key])
        valid = valid and number >= 0 and number < Int64(source.store.shape[0]) * keys.rows
        slot, line = Int32(number) // keys.rows, Int32(number) % keys.rows
    else:
        if valid:
            number = Int64(source.places[row, key // keys.rows])
        valid = valid and number >= 0 and number < Int64(source.store.shape[0])
        slot, line = Int32(number), key % keys.rows
    form, begin = keys.form, source.store.iterator.toint()
    strides = source.store.stride
    if cutlass.const_expr(form.plain):
        item = source.store.element_type.width // 8
        data = begin + (Int64(slot) * strides[0] + Int64(line) * strides[1]) * item
        return Entry(data, data, valid)
    begin = begin + Int64(slot) * strides[0]
    data = begin + source.data_offset + line * form.data_bytes
    scales = data + form.scale_at
    if cutlass.const_expr(form.scale_at < 0):
        scales = begin + source.scale_offset + line * form.scale_bytes
    return Entry(data, scales, valid)


@cute.jit
def hold(form: cutlass.Constexpr, entry: Entry, lane: Int32) -> Held:
    """Load all bytes of an entry that this lane converts; zeros of what is no entry."""
    bits = 4 if form.code == "e2m1" else 8
    codes = [
        four_words_if(entry.valid, entry.data + (LANES * k + lane) * CHUNK)
        for k in range(form.coded * bits // 8 // (LANES * CHUNK))
    ]
    wide = [
        four_words_if(entry.valid, entry.data + form.wide_at + (LANES * k + lane) * CHUNK)
        for k in range(form.wide * 2 // (LANES * CHUNK))
    ]
    return Held(tuple(codes), tuple(wide), scale_words(form, entry, lane))


@cute.jit
def scale_words(form: cutlass.Constexpr, entry: Entry, lane: Int32) -> tuple[Uint32, ...]:
    """Load the scales of an entry."""
    size = {"fp32": 4, "ue8m0": 1, "e4m3": 1}.get(form.scale, 0) * form.groups
    words: list[Uint32] = []
    for k in cutlass.range_constexpr(-(-size // CHUNK)):
        if cutlass.const_expr(size - k * CHUNK >= CHUNK):
            words += four_words_if(entry.valid, entry.scales + k * CHUNK)
        else:
            words += two_words_if(entry.valid, entry.scales + k * CHUNK)
    return tuple(words)


@cute.jit
def two_words_if(is_there: Boolean, address: Int64) -> tuple[Uint32, Uint32]:
    """8 bytes in global memory, aligned to them, zeros unless they are there."""
    return cute.arch.inline_ptx(
        "{ .reg .pred there; .reg .b32 w<2>; mov.b32 w0, 0; mov.b32 w1, 0; "
        "setp.ne.s32 there, {$r1}, 0; @there ld.global.v2.b32 {w0, w1}, [{$r0}]; "
        "mov.b32 {$w0}, w0; mov.b32 {$w1}, w1; }",
        write_only_types=[Uint32] * 2,
        read_only_args=[address, Int32(is_there)],
    )


@cute.jit
def store_panels(
    scope: Scope,
    form: cutlass.Constexpr,
    held: Held,
    place: Place,
    each: cutlass.Constexpr,
    panels: cutlass.Constexpr,
) -> None:
    """Convert and store the lane's part of some panels of its entry `each`."""
    coded = form.coded // PANEL
    for panel in panels:
        if cutlass.const_expr(panel >= coded):
            for k in cutlass.range_constexpr(2):
                four = held.wide[2 * (panel - coded) + k]
                store(place.unit(panel, each, 4 * k + place.lane), Uint32, four)
        elif cutlass.const_expr(form.code == "e4m3"):
            scale = scale_of(scope, form, held.scales, panel, place.lane)
            words = held.codes[panel]
            for k in cutlass.range_constexpr(2):
                low = scaled_e4m3(words[2 * k], scale)
                high = scaled_e4m3(words[2 * k + 1], scale)
                store(place.unit(panel, each, 2 * place.lane + k), Uint32, (*low, *high))
        else:
            store_e2m1(held, place, each, panel)


@cute.jit
def scale_of(
    scope: Scope,
    form: cutlass.Constexpr,
    words: tuple[Uint32, ...],
    panel: cutlass.Constexpr,
    lane: Int32,
) -> Float32:
    """Return the scale of the lane's chunk of a panel in e4m3."""
    if cutlass.const_expr(form.scale == ""):
        scale = Float32(1.0)
        if cutlass.const_expr(scope.given.tables.key_scale is not None):
            scale = scope.given.tables.key_scale[0]
        return scale
    if cutlass.const_expr(form.scale == "fp32"):
        return float_of(words[panel * PANEL // form.group])
    of_panel = PANEL // form.group  # scales: 1, or 2 of which the lane's chunk has one
    first = panel * of_panel
    code = words[first // 4] >> (first % 4 * 8)
    if cutlass.const_expr(of_panel == 2):
        code = code >> Uint32(lane // 2 * 8)
    return from_ue8m0(code & 0xFF)


@cute.jit
def store_e2m1(held: Held, place: Place, each: cutlass.Constexpr, panel: cutlass.Constexpr) -> None:
    """Convert and store the lane's part of a panel in e2m1.

    A chunk is half a panel, so that two of the four lanes have a part of this one.
    """
    if place.lane // 2 == panel % 2:
        words = held.codes[panel // 2]
        # Two scales for each chunk of the entry: bytes 8 (panel / 2) + 2 lane, and the next.
        low, high = held.scales[panel // 2 * 2], held.scales[panel // 2 * 2 + 1]
        pair = (high if place.lane >= 2 else low) >> Uint32(place.lane % 2 * 16)
        scales = (from_e4m3(pair & 0xFF), from_e4m3((pair >> 8) & 0xFF))
        for k in cutlass.range_constexpr(4):
            scale = scales[k // 2]
            four = scaled_e2m1(words[k], scale, scale)
            store(place.unit(panel, each, place.lane % 2 * 4 + k), Uint32, four)


@cute.jit
def copy_panels(
    entry: Entry, place: Place, each: cutlass.Constexpr, panels: cutlass.Constexpr
) -> None:
    """Start the copies of the lane's part of some panels; zeros of what is no entry."""
    for panel in panels:
        for k in cutlass.range_constexpr(2):
            source = entry.data + panel * PANEL * 2 + (LANES * k + place.lane) * CHUNK
            target = place.unit(panel, each, 4 * k + place.lane)
            copy_chunk(target, source, entry.valid)


@cute.jit
def arrive_after_copies(barrier: cute.Pointer) -> None:
    """Arrive at the barrier once the thread's copies so far have completed."""
    cute.arch.inline_ptx(
        "cp.async.mbarrier.arrive.noinc.shared.b64 [{$r0}];", read_only_args=[barrier.toint()]
    )


__all__ = ["Gather", "Keys"]
