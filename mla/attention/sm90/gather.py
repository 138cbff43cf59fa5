"""Gather role: four warps fetch the entries of a tile, convert them to bf16, and store them as TMA
would (device code).

A warp has 16 entries of a tile. Eight lanes share an entry: they read 128 bytes of it side by side,
16 each, and a warp reads four entries at a time. Two panels in e4m3, or four in e2m1, come with one
such line. Lanes of different panels store their units in different orders, so that eight lanes
never meet in a bank.

A lane holds half a tile of codes in registers. As soon as it has converted a chunk it loads the one
of the next half in its place, so that half a tile is always in flight. Numbers of the next tile's
entries are loaded a tile ahead. Columns in bf16 go to shared memory by cp.async.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernelkit.device.pipelines import Ring, producer_state_at
from kernelkit.device.shared_words import store
from kernelkit.device.warp_mma import copy_chunk
from kernelkit.device.words import float_of, four_words_if
from mla.attention.formats import LATENT
from mla.attention.kernel_arguments import Source
from mla.attention.sm90.args import Entries, Held, Scope
from mla.attention.sm90.dequantise import (
    Scale,
    from_e4m3,
    power_scale,
    scaled_e2m1,
    scaled_e4m3,
    split_scale,
)
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
LANES = 8  # that share an entry
LINE = LANES * CHUNK
AT_ONCE = 4  # entries that a warp reads at a time
WARP_KEYS = 16
TURNS = WARP_KEYS // AT_ONCE  # entries of a lane
LINE_BYTES = PANEL * 2  # of a panel


class Gather:
    """Fills both pieces of every buffer."""

    def __init__(self, plan: Plan90) -> None:
        self.plan = plan
        self.role = plan.roles["gather"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        work = scope.work
        middle = cutlass.min(cutlass.max(work.own_tiles - work.begin, 0), work.count)
        self.stream(scope, 0, Int32(0), middle)
        if cutlass.const_expr(self.plan.config.extra is not None):
            self.stream(scope, 1, middle, work.count)

    @cute.jit
    def stream(self, scope: Scope, which: cutlass.Constexpr, begin: Int32, end: Int32) -> None:
        """Fill the buffers of this CTA's tiles [begin, end), whose keys are of one source."""
        form = self.plan.config.sources[which].form
        if cutlass.const_expr(form.plain and not form.code):
            for number in cutlass.range(begin, end, unroll=1):
                self.copy(scope, which, number)
        elif begin < end:
            held, last = make_held(form), make_last()
            entries, numbers = make_entries(), cute.make_rmem_tensor(TURNS, Int64)
            self.look_up(scope, which, begin, end, numbers)
            resolve(self.plan.config.sources[which], source_of(scope, which), numbers, entries)
            self.look_up(scope, which, begin + 1, end, numbers)
            fetch_half(form, entries, held, False)
            for number in cutlass.range(begin, end, unroll=1):
                fetch_last(form, entries, last)
                self.convert(scope, which, number, entries, (held, last), entries, False)
                later = make_entries()
                resolve(self.plan.config.sources[which], source_of(scope, which), numbers, later)
                self.look_up(scope, which, number + 2, end, numbers)
                self.convert(scope, which, number, entries, (held, last), later, True)
                take_over(entries, later)

    @cute.jit
    def look_up(
        self,
        scope: Scope,
        which: cutlass.Constexpr,
        number: Int32,
        end: Int32,
        numbers: cute.Tensor,
    ) -> None:
        """Load the numbers of this lane's entries in tile `number`; -1 from tile `end` on.

        A listed key has the number of an entry, another one that of its page times the rows of a
        page, plus its row.
        """
        keys, source = self.plan.config.sources[which], source_of(scope, which)
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx() - self.role.first_warp
        count = scope.work.keys if cutlass.const_expr(which == 0) else scope.work.extra
        tile = scope.work.begin + number
        if cutlass.const_expr(which == 1):
            tile = tile - scope.work.own_tiles
        count = count if number < end else Int32(0)
        for turn in cutlass.range_constexpr(TURNS):
            key = tile * KEYS + warp * WARP_KEYS + turn * AT_ONCE + lane // LANES
            found = Int64(-1)
            if key < count:
                if cutlass.const_expr(keys.listed):
                    found = Int64(source.places[scope.work.entry, key])
                else:
                    page = Int64(source.places[scope.work.entry, key // keys.rows])
                    found = page * keys.rows + key % keys.rows
            numbers[turn] = found

    @cute.jit
    def convert(
        self,
        scope: Scope,
        which: cutlass.Constexpr,
        number: Int32,
        entries: Entries,
        held: tuple[Held, Held],
        later: Entries,
        right: cutlass.Constexpr,
    ) -> None:
        """Convert what the lane holds of one half, once its buffer is free, and load the next half.

        Args:
            held: the half, and the ninth panel if it is in e4m3.
            later: entries of the next half.
        """
        form, buffer = self.plan.config.sources[which].form, number % BUFFERS
        ring = scope.pipes.right if cutlass.const_expr(right) else scope.pipes.left
        ring.wait_free(producer_state_at(BUFFERS, number))
        line = line_of(scope, buffer)
        if cutlass.const_expr(not right):
            self.mark(scope, entries, buffer)
        self.copy_wide(form, entries, line, buffer, right)
        for turn in cutlass.range_constexpr(TURNS):
            scales = tuple(held[0].scales[k, turn] for k in range(scale_words(form)))
            fetch_scales(form, later, held[0], turn, not right)
            for chunk in cutlass.range_constexpr(lines_of(form)):
                store_chunk(scope, form, held[0], scales, line, (turn, chunk), right)
                fetch_chunk(form, later, held[0], (turn, chunk), not right)
        if cutlass.const_expr(form.coded > LATENT):
            if buffer == (0 if right else 1):
                store_last(scope, form, held[1], line)
        if cutlass.const_expr(form.wide > 0):
            cute.arch.cp_async_wait_group(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        ring.signal(buffer)

    @cute.jit
    def copy_wide(
        self,
        form: cutlass.Constexpr,
        entries: Entries,
        line: Int32,
        buffer: Int32,
        right: cutlass.Constexpr,
    ) -> None:
        """Start the copies of the columns in bf16, if they belong to this half."""
        if cutlass.const_expr(form.wide > 0):
            panel = form.coded // PANEL
            if cutlass.const_expr(panel < PANELS):
                if cutlass.const_expr(right):
                    copy_panel(entries, line, panel, form.wide_at)
            elif buffer == (0 if right else 1):
                copy_panel(entries, line, panel, form.wide_at)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def copy(self, scope: Scope, which: cutlass.Constexpr, number: Int32) -> None:
        """Copy entries in bf16 to shared memory; the barriers complete when the copies have."""
        buffer, pipes, entries = number % BUFFERS, scope.pipes, make_entries()
        numbers = cute.make_rmem_tensor(TURNS, Int64)
        self.look_up(scope, which, number, number + 1, numbers)
        resolve(self.plan.config.sources[which], source_of(scope, which), numbers, entries)
        line = line_of(scope, buffer)
        for right in cutlass.range_constexpr(2):
            ring = pipes.right if cutlass.const_expr(right) else pipes.left
            ring.wait_free(producer_state_at(BUFFERS, number))
            if cutlass.const_expr(not right):
                self.mark(scope, entries, buffer)
            for panel in cutlass.range_constexpr(right * HALF, (right + 1) * HALF):
                copy_panel(entries, line, panel, panel * LINE_BYTES)
            if cutlass.const_expr(self.plan.panels > PANELS):
                if buffer == 1 - right:
                    copy_panel(entries, line, PANELS, PANELS * LINE_BYTES)
            arrive_after_copies(ring, buffer)

    @cute.jit
    def mark(self, scope: Scope, entries: Entries, buffer: Int32) -> None:
        """Store which keys of the warp are entries, a bit each."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx() - self.role.first_warp
        bits = Int32(0)
        for turn in cutlass.range_constexpr(TURNS):
            found = cute.arch.vote_ballot_sync(entries.valid[turn] != 0)
            for entry in cutlass.range_constexpr(AT_ONCE):
                bits = bits | (found >> (LANES * entry) & 1) << (turn * AT_ONCE + entry)
        if lane == 0:
            cute.arch.inline_ptx(
                "{ .reg .b16 low, high; mov.b32 {low, high}, {$r1}; st.shared.b16 [{$r0}], low; }",
                read_only_args=[scope.buffers.valid + buffer * 8 + warp * 2, bits],
            )


@cute.jit
def source_of(scope: Scope, which: cutlass.Constexpr) -> Source:
    return scope.given.keys if cutlass.const_expr(which == 0) else scope.given.extra


@cute.jit
def line_of(scope: Scope, buffer: Int32) -> Int32:
    """Return the address of the lane's first row in panel 0 of a buffer."""
    thread, _, _ = cute.arch.thread_idx()
    row = thread % 128 // 32 * WARP_KEYS + thread % 32 // LANES
    return scope.buffers.k.toint() + buffer * BUFFER_BYTES + row * LINE_BYTES


@cute.jit
def unit_at(line: Int32, panel: Int32 | int, turn: cutlass.Constexpr, unit: Int32) -> Int32:
    """Return the address of a unit of 16 bytes in a panel, of the lane's row of this turn."""
    row = cute.arch.lane_idx() // LANES + turn * AT_ONCE % 8  # among eight
    return line + panel * PANEL_BYTES + turn * AT_ONCE * LINE_BYTES + (unit ^ row) * CHUNK


# ---- entries


def make_entries() -> Entries:
    return Entries(
        cute.make_rmem_tensor(TURNS, Int64),
        cute.make_rmem_tensor(TURNS, Int64),
        cute.make_rmem_tensor(TURNS, Int32),
    )


@cute.jit
def take_over(entries: Entries, others: Entries) -> None:
    entries.data.store(others.data.load())
    entries.scales.store(others.scales.load())
    entries.valid.store(others.valid.load())


@cute.jit
def resolve(
    keys: cutlass.Constexpr, source: Source, numbers: cute.Tensor, entries: Entries
) -> None:
    """Find the entries with these numbers; a number out of range is none."""
    form, strides = keys.form, source.store.stride
    most = Int64(source.store.shape[0]) * keys.rows
    for turn in cutlass.range_constexpr(TURNS):
        number = numbers[turn]
        slot, row = Int32(number) // keys.rows, Int32(number) % keys.rows
        begin = source.store.iterator.toint()
        if cutlass.const_expr(form.plain):
            item = source.store.element_type.width // 8
            data = begin + (Int64(slot) * strides[0] + Int64(row) * strides[1]) * item
            entries.data[turn], entries.scales[turn] = data, data
        else:
            begin = begin + Int64(slot) * strides[0]
            data = begin + source.data_offset + row * form.data_bytes
            entries.data[turn], entries.scales[turn] = data, data + form.scale_at
            if cutlass.const_expr(form.scale_at < 0):
                scales = begin + source.scale_offset + row * form.scale_bytes
                entries.scales[turn] = scales
        entries.valid[turn] = Int32(number >= 0 and number < most)


# ---- codes in registers


def make_held(form: cutlass.Constexpr) -> Held:
    """Return the registers of a lane for one half of its entries."""
    lines, scales = lines_of(form), scale_words(form)
    codes = cute.make_rmem_tensor((4, lines, TURNS), Uint32)
    return Held(codes, cute.make_rmem_tensor((max(scales, 1), TURNS), Uint32))


def lines_of(form: cutlass.Constexpr) -> int:
    """Lines of codes of a half, in each of two halves."""
    bits = 4 if form.code == "e2m1" else 8
    return HALF * PANEL * bits // 8 // LINE


def scale_words(form: cutlass.Constexpr) -> int:
    """Words that hold the scales of a half of an entry, as `fetch` loads them."""
    return {"": 0, "fp32": 2, "ue8m0": 1 if form.group == 64 else 2, "e4m3": 1}[form.scale]


@cute.jit
def fetch_half(
    form: cutlass.Constexpr, entries: Entries, held: Held, right: cutlass.Constexpr
) -> None:
    """Load codes and scales of a half of the lane's entries."""
    for turn in cutlass.range_constexpr(TURNS):
        fetch_scales(form, entries, held, turn, right)
        for chunk in cutlass.range_constexpr(lines_of(form)):
            fetch_chunk(form, entries, held, (turn, chunk), right)


@cute.jit
def fetch_chunk(
    form: cutlass.Constexpr,
    entries: Entries,
    held: Held,
    place: cutlass.Constexpr,
    right: cutlass.Constexpr,
) -> None:
    """Load the lane's chunk of a line of a half of an entry; zeros of what is no entry.

    place: (turn, line).
    """
    turn, number = place
    lane = cute.arch.lane_idx() % LANES
    nbytes = form.coded * (4 if form.code == "e2m1" else 8) // 8
    begin = (right * lines_of(form) + number) * LINE
    there = entries.valid[turn] != 0
    if cutlass.const_expr(begin + LINE > nbytes):
        there = there and begin + lane * CHUNK < nbytes
    four = four_words_if(there, entries.data[turn] + begin + lane * CHUNK)
    for k in cutlass.range_constexpr(4):
        held.codes[k, number, turn] = four[k]


def make_last() -> Held:
    """Return the registers of a lane for its part of the ninth panels of its entries."""
    return Held(
        cute.make_rmem_tensor((4, 1, TURNS), Uint32), cute.make_rmem_tensor((1, TURNS), Uint32)
    )


@cute.jit
def fetch_last(form: cutlass.Constexpr, entries: Entries, last: Held) -> None:
    """Load the ninth panels in e4m3, if there are any: four lanes of an entry have a chunk."""
    if cutlass.const_expr(form.coded > LATENT):
        lane = cute.arch.lane_idx() % LANES
        for turn in cutlass.range_constexpr(TURNS):
            there = entries.valid[turn] != 0 and lane < LANES // 2
            four = four_words_if(there, entries.data[turn] + LATENT + lane * CHUNK)
            for k in cutlass.range_constexpr(4):
                last.codes[k, 0, turn] = four[k]


@cute.jit
def store_last(scope: Scope, form: cutlass.Constexpr, last: Held, line: Int32) -> None:
    """Convert and store the ninth panels."""
    for turn in cutlass.range_constexpr(TURNS):
        words = tuple(last.codes[k, 0, turn] for k in range(4))
        scale = scale_of(scope, form, (), 0)
        store_e4m3(form, words, scale, line, turn, PANELS)


@cute.jit
def fetch_scales(
    form: cutlass.Constexpr,
    entries: Entries,
    held: Held,
    turn: cutlass.Constexpr,
    right: cutlass.Constexpr,
) -> None:
    """Load the scales of a half of one entry: all of them, or the lane's own in e2m1."""
    valid, start = entries.valid[turn] != 0, entries.scales[turn]
    size = {"": 0, "fp32": 8, "ue8m0": HALF * PANEL // max(form.group, 1), "e4m3": 0}[form.scale]
    if cutlass.const_expr(size == 8):
        held.scales[0, turn], held.scales[1, turn] = words_if(valid, start + right * size, 2)
    elif cutlass.const_expr(size == 4):
        (held.scales[0, turn],) = words_if(valid, start + right * size, 1)
    elif cutlass.const_expr(form.scale == "e4m3"):
        # Two of a chunk of 32 columns; the word of two lanes.
        lane = cute.arch.lane_idx() % LANES
        (held.scales[0, turn],) = words_if(valid, start + right * 16 + lane // 2 * 4, 1)


@cute.jit
def words_if(
    is_there: cutlass.Boolean, address: Int64, count: cutlass.Constexpr
) -> tuple[Uint32, ...]:
    """One or two words in global memory, aligned to all their bytes; zeros if not `is_there`."""
    names = ["w0", "w1"][:count]
    zeros = " ".join(f"mov.b32 {name}, 0;" for name in names)
    results = " ".join(f"mov.b32 {{$w{k}}}, {name};" for k, name in enumerate(names))
    vector, words = (".v2", "{w0, w1}") if count == 2 else ("", "w0")
    found = cute.arch.inline_ptx(
        f"{{ .reg .pred there; .reg .b32 w<2>; {zeros} setp.ne.s32 there, {{$r1}}, 0; "
        f"@there ld.global{vector}.b32 {words}, [{{$r0}}]; {results} }}",
        write_only_types=[Uint32] * count,
        read_only_args=[address, Int32(is_there)],
    )
    return found if cutlass.const_expr(count > 1) else (found,)


@cute.jit
def store_chunk(
    scope: Scope,
    form: cutlass.Constexpr,
    held: Held,
    scales: tuple[Uint32, ...],
    line: Int32,
    place: cutlass.Constexpr,
    right: cutlass.Constexpr,
) -> None:
    """Convert and store the lane's chunk of a line of a half of an entry. place: (turn, line)."""
    turn, number = place
    words = tuple(held.codes[k, number, turn] for k in range(4))
    if cutlass.const_expr(form.code == "e2m1"):
        store_e2m1(words, scales[0], line, turn, right)
    else:
        scale = scale_of(scope, form, scales, number)
        store_e4m3(form, words, scale, line, turn, right * HALF + 2 * number)


@cute.jit
def store_e4m3(
    form: cutlass.Constexpr,
    words: tuple[Uint32, ...],
    scale: Scale,
    line: Int32,
    turn: cutlass.Constexpr,
    first: cutlass.Constexpr,
) -> None:
    """Store a chunk of 16 columns: two units of panel `first`, or of the next one by lanes 4 to 7,
    which store the second unit first.
    """
    lane = cute.arch.lane_idx() % LANES
    upper = lane >= LANES // 2
    panel = first + lane // 4
    near = (words[2], words[3]) if upper else (words[0], words[1])
    far = (words[0], words[1]) if upper else (words[2], words[3])
    there = True
    if cutlass.const_expr((first + 2) * PANEL > form.coded):
        there = panel * PANEL < form.coded
    if there:
        for k in cutlass.range_constexpr(2):
            pair = near if cutlass.const_expr(k == 0) else far
            unit = 2 * (lane % 4) + (lane // 4 ^ k)
            store(unit_at(line, panel, turn, unit), Uint32, scaled_e4m3(pair, scale))


@cute.jit
def scale_of(
    scope: Scope,
    form: cutlass.Constexpr,
    scales: tuple[Uint32, ...],
    number: cutlass.Constexpr,
) -> Scale:
    """Return the scale of the lane's chunk of line `number` of a half in e4m3."""
    if cutlass.const_expr(form.scale == ""):
        scale = Float32(1.0)
        if cutlass.const_expr(scope.given.tables.key_scale is not None):
            scale = scope.given.tables.key_scale[0]
        return split_scale(scale)
    if cutlass.const_expr(form.scale == "fp32"):
        return split_scale(float_of(scales[number]))
    lane = cute.arch.lane_idx() % LANES
    if cutlass.const_expr(form.group == PANEL):  # two of a line, four in a word
        code = scales[0] >> Uint32(16 * number + lane // 4 * 8)
    else:  # four of a line
        code = scales[number] >> Uint32(lane // 2 * 8)
    return power_scale(code & 0xFF)


@cute.jit
def store_e2m1(
    words: tuple[Uint32, ...],
    scales: Uint32,
    line: Int32,
    turn: cutlass.Constexpr,
    right: cutlass.Constexpr,
) -> None:
    """Store a chunk of 32 columns: four units of half a panel, in an order of its panel's own."""
    lane = cute.arch.lane_idx() % LANES
    pair = scales >> Uint32(lane % 2 * 16)
    low, high = from_e4m3(pair & 0xFF), from_e4m3((pair >> 8) & 0xFF)
    panel = right * HALF + lane // 2
    for k in cutlass.range_constexpr(4):
        unit = (k + lane // 2) % 4
        word = words[0]
        for other in cutlass.range_constexpr(1, 4):
            word = words[other] if unit == other else word
        scale = high if unit >= 2 else low
        four = scaled_e2m1(word, scale, scale)
        store(unit_at(line, panel, turn, lane % 2 * 4 + unit), Uint32, four)


# ---- columns in bf16


@cute.jit
def copy_panel(
    entries: Entries, line: Int32, panel: cutlass.Constexpr, begin: cutlass.Constexpr
) -> None:
    """Start the copies of a panel, at byte `begin` of an entry; zeros of what is no entry."""
    lane = cute.arch.lane_idx() % LANES
    for turn in cutlass.range_constexpr(TURNS):
        source = entries.data[turn] + begin + lane * CHUNK
        copy_chunk(unit_at(line, panel, turn, lane), source, entries.valid[turn] != 0)


@cute.jit
def arrive_after_copies(ring: Ring, buffer: Int32) -> None:
    """Arrive at the full barrier of a piece once the thread's copies so far have completed."""
    cute.arch.inline_ptx(
        "cp.async.mbarrier.arrive.noinc.shared.b64 [{$r0}];",
        read_only_args=[ring.barrier(buffer).toint()],
    )
