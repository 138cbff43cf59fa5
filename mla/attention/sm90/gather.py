"""Gather role: four warps fetch the entries of a tile, convert them to bf16, and store them as TMA
would (device code).

A warp has 16 entries of a tile. Eight lanes share an entry: they read 128 bytes of it side by side,
16 each, and a warp reads four entries at a time. Two panels in e4m3, or four in e2m1, come with one
such line. Lanes of different panels store their units in different orders, so that eight lanes
never meet in a bank.

A lane holds half a tile of codes in registers. As soon as it has converted a chunk it loads the one
of the next half in its place, so that half a tile is always in flight. Numbers of the next tile's
entries are loaded a tile ahead. Columns in bf16 go to shared memory by cp.async.

Registers are scarce: what is spilled has to arrive first. So an entry is a word, the distance from
the cache's begin in units of 16 bytes, and its scales are words with what this lane needs of them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from kernelkit.device.pipelines import Ring, producer_state_at
from kernelkit.device.shared_words import store
from kernelkit.device.warp_mma import copy_chunk, pick
from kernelkit.device.words import float_of, four_words_if
from mla.attention.formats import LATENT
from mla.attention.kernel_arguments import Source
from mla.attention.sm90.args import Entries, Scope
from mla.attention.sm90.dequantise import (
    NAN_BITS,
    Scale,
    exact_scale,
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
NOWHERE = 0xFFFFFFFF  # place of what is no entry
BF16_NANS = 0x7FFF7FFF


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
            numbers = cute.make_rmem_tensor(TURNS, Int32)
            self.look_up(scope, which, begin, end, numbers)
            for number in cutlass.range(begin, end, unroll=1):
                self.copy(scope, which, number, end, numbers)
        elif begin < end:
            self.convert_all(scope, which, begin, end)

    @cute.jit
    def convert_all(self, scope: Scope, which: cutlass.Constexpr, begin: Int32, end: Int32) -> None:
        """Fill the buffers of tiles [begin, end) of a source with codes, half by half.

        One copy of the code serves both halves: an SM's caches of instructions are small.
        """
        keys, source = self.plan.config.sources[which], source_of(scope, which)
        held, last = make_held(keys.form), make_last()
        entries, following = make_entries(keys.form), make_entries(keys.form)
        numbers = cute.make_rmem_tensor(TURNS, Int32)
        self.look_up(scope, which, begin, end, numbers)
        resolve(keys, source, numbers, entries)
        self.look_up(scope, which, begin + 1, end, numbers)
        for turn in cutlass.range_constexpr(TURNS):
            for chunk in cutlass.range_constexpr(lines_of(keys.form)):
                fetch_chunk(keys.form, source, entries, held, (turn, chunk), Int32(0))
        for step in cutlass.range(2 * begin, 2 * end, unroll=1):
            number, half = step // 2, step % 2
            if half == 0:
                same_entries(keys.form, source, entries, following)
                fetch_last(keys.form, source, entries, last)
            else:
                resolve(keys, source, numbers, following)
                self.look_up(scope, which, number + 2, end, numbers)
            self.convert(scope, which, (number, half), entries, (held, last), following)
            take_over(entries, following)

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
            found = Int32(-1)
            if key < count:
                if cutlass.const_expr(keys.listed):
                    found = within(source.places[scope.work.entry, key], keys, source)
                else:
                    page = source.places[scope.work.entry, key // keys.rows]
                    if page >= 0 and page < source.store.shape[0]:
                        found = page * keys.rows + key % keys.rows
            numbers[turn] = found

    @cute.jit
    def convert(
        self,
        scope: Scope,
        which: cutlass.Constexpr,
        place: tuple[Int32, Int32],
        entries: Entries,
        held: tuple[cute.Tensor, cute.Tensor],
        following: Entries,
    ) -> None:
        """Convert what the lane holds of one half, once its buffer is free, and load the next half.

        Args:
            place: (tile of this CTA, half).
            held: the half, and the ninth panel if it is in e4m3.
            following: entries of the next half.
        """
        form, source = self.plan.config.sources[which].form, source_of(scope, which)
        (number, half), pipes = place, scope.pipes
        buffer, state = number % BUFFERS, producer_state_at(BUFFERS, number)
        line = line_of(scope, buffer)
        if half == 0:
            pipes.left.wait_free(state)
            self.mark(scope, entries, buffer)
        else:
            pipes.right.wait_free(state)
        self.copy_wide(form, source, entries, line, (buffer, half))
        for turn in cutlass.range_constexpr(TURNS):
            found = Uint32(0)
            for chunk in cutlass.range_constexpr(lines_of(form)):
                found = found | store_chunk(form, held[0], entries, line, (turn, chunk), half)
                fetch_chunk(form, source, following, held[0], (turn, chunk), 1 - half)
            spoil(line, turn, half, found)
        if cutlass.const_expr(form.coded > LATENT):
            if half != buffer:
                store_last(form, held[1], line)
        if cutlass.const_expr(form.wide > 0):
            cute.arch.cp_async_wait_group(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        if half == 0:
            pipes.left.signal(buffer)
        else:
            pipes.right.signal(buffer)

    @cute.jit
    def copy_wide(
        self,
        form: cutlass.Constexpr,
        source: Source,
        entries: Entries,
        line: Int32,
        piece: tuple[Int32, Int32],
    ) -> None:
        """Start the copies of the columns in bf16, if they belong to this piece: (buffer, half)."""
        buffer, half = piece
        if cutlass.const_expr(form.wide > 0):
            panel = form.coded // PANEL
            mine = half == 1 if cutlass.const_expr(panel < PANELS) else half != buffer
            if mine:
                copy_panel(source, entries, line, panel, form.wide_at)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def copy(
        self,
        scope: Scope,
        which: cutlass.Constexpr,
        number: Int32,
        end: Int32,
        numbers: cute.Tensor,
    ) -> None:
        """Copy entries in bf16 to shared memory; the barriers complete when the copies have."""
        keys, source = self.plan.config.sources[which], source_of(scope, which)
        buffer, pipes, entries = number % BUFFERS, scope.pipes, make_entries(keys.form)
        resolve(keys, source, numbers, entries)
        self.look_up(scope, which, number + 1, end, numbers)
        line = line_of(scope, buffer)
        for right in cutlass.range_constexpr(2):
            ring = pipes.right if cutlass.const_expr(right) else pipes.left
            ring.wait_free(producer_state_at(BUFFERS, number))
            if cutlass.const_expr(not right):
                self.mark(scope, entries, buffer)
            for panel in cutlass.range_constexpr(right * HALF, (right + 1) * HALF):
                copy_panel(source, entries, line, panel, panel * LINE_BYTES)
            if cutlass.const_expr(self.plan.panels > PANELS):
                if buffer == 1 - right:
                    copy_panel(source, entries, line, PANELS, PANELS * LINE_BYTES)
            arrive_after_copies(ring, buffer)

    @cute.jit
    def mark(self, scope: Scope, entries: Entries, buffer: Int32) -> None:
        """Store which keys of the warp are entries, a bit each."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx() - self.role.first_warp
        bits = Int32(0)
        for turn in cutlass.range_constexpr(TURNS):
            found = cute.arch.vote_ballot_sync(entries.places[turn] != NOWHERE)
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


def make_entries(form: cutlass.Constexpr) -> Entries:
    words = max(scale_words(form), 1)
    return Entries(
        cute.make_rmem_tensor(TURNS, Uint32), cute.make_rmem_tensor((words, TURNS), Uint32)
    )


@cute.jit
def within(number: Int32 | Int64, keys: cutlass.Constexpr, source: Source) -> Int32:
    """Return the number of an entry, -1 for one out of range."""
    inside = number >= 0 and number < Int64(source.store.shape[0]) * keys.rows
    return Int32(number) if inside else Int32(-1)


@cute.jit
def resolve(
    keys: cutlass.Constexpr, source: Source, numbers: cute.Tensor, entries: Entries
) -> None:
    """Find the entries with these numbers, and load their scales."""
    form, strides = keys.form, source.store.stride
    for turn in cutlass.range_constexpr(TURNS):
        number = numbers[turn]
        slot, row = number // keys.rows, number % keys.rows
        if cutlass.const_expr(form.plain):
            item = source.store.element_type.width // 8
            data = (Int64(slot) * strides[0] + Int64(row) * strides[1]) * item
            scales = data
        else:
            begin = Int64(slot) * strides[0]
            data = begin + source.data_offset + row * form.data_bytes
            scales = data + form.scale_at
            if cutlass.const_expr(form.scale_at < 0):
                scales = begin + source.scale_offset + row * form.scale_bytes
        entries.places[turn] = Uint32(data >> 4) if number >= 0 else Uint32(NOWHERE)
        if cutlass.const_expr(form.scale != ""):
            address = source.store.iterator.toint() + scales
            fetch_scales(form, address, number >= 0, entries, turn)


@cute.jit
def same_entries(
    form: cutlass.Constexpr, source: Source, entries: Entries, others: Entries
) -> None:
    """Copy entries for their right half; scales in fp32 are loaded, since a lane has those of one
    half.
    """
    take_over(others, entries)
    if cutlass.const_expr(form.scale == "fp32"):
        for turn in cutlass.range_constexpr(TURNS):
            place = entries.places[turn]
            address = data_of(source, place) + form.scale_at + 8
            found = words_if(place != NOWHERE, address, 2)
            others.scales[0, turn], others.scales[1, turn] = found


@cute.jit
def take_over(entries: Entries, others: Entries) -> None:
    entries.places.store(others.places.load())
    entries.scales.store(others.scales.load())


@cute.jit
def data_of(source: Source, place: Uint32) -> Int64:
    """Return the address of an entry's data."""
    return source.store.iterator.toint() + (Int64(place) << 4)


# ---- codes in registers


def make_held(form: cutlass.Constexpr) -> cute.Tensor:
    """Return the registers of a lane for the codes of half a tile: (word, line, entry)."""
    return cute.make_rmem_tensor((4, lines_of(form), TURNS), Uint32)


def lines_of(form: cutlass.Constexpr) -> int:
    """Lines of codes of a half."""
    bits = 4 if form.code == "e2m1" else 8
    return HALF * PANEL * bits // 8 // LINE


def scale_words(form: cutlass.Constexpr) -> int:
    """Words of an entry's scales that a lane holds."""
    return {"": 0, "fp32": 2, "ue8m0": 1, "e4m3": 1}[form.scale]


@cute.jit
def fetch_chunk(
    form: cutlass.Constexpr,
    source: Source,
    entries: Entries,
    held: cute.Tensor,
    place: cutlass.Constexpr,
    half: Int32,
) -> None:
    """Load the lane's chunk of a line of a half of an entry; zeros of what is no entry.

    place: (turn, line).
    """
    turn, number = place
    lane, lines = cute.arch.lane_idx() % LANES, lines_of(form)
    nbytes = form.coded * (4 if form.code == "e2m1" else 8) // 8
    begin = (half * lines + number) * LINE + lane * CHUNK
    there = entries.places[turn] != NOWHERE
    if cutlass.const_expr(nbytes < 2 * lines * LINE and number == lines - 1):
        there = there and begin < nbytes
    four = four_words_if(there, data_of(source, entries.places[turn]) + begin)
    for k in cutlass.range_constexpr(4):
        held[k, number, turn] = four[k]


def make_last() -> cute.Tensor:
    """Return the registers of a lane for its part of the ninth panels: (word, entry)."""
    return cute.make_rmem_tensor((4, TURNS), Uint32)


@cute.jit
def fetch_last(
    form: cutlass.Constexpr, source: Source, entries: Entries, last: cute.Tensor
) -> None:
    """Load the ninth panels in e4m3, if there are any: four lanes of an entry have a chunk."""
    if cutlass.const_expr(form.coded > LATENT):
        lane = cute.arch.lane_idx() % LANES
        for turn in cutlass.range_constexpr(TURNS):
            there = entries.places[turn] != NOWHERE and lane < LANES // 2
            address = data_of(source, entries.places[turn]) + LATENT + lane * CHUNK
            four = four_words_if(there, address)
            for k in cutlass.range_constexpr(4):
                last[k, turn] = four[k]


@cute.jit
def store_last(form: cutlass.Constexpr, last: cute.Tensor, line: Int32) -> None:
    """Convert and store the ninth panels."""
    for turn in cutlass.range_constexpr(TURNS):
        words = tuple(last[k, turn] for k in range(4))
        found = store_e4m3(form, words, exact_scale(), line, turn, Int32(PANELS))
        spoil(line, turn, Int32(0), found)


@cute.jit
def fetch_scales(
    form: cutlass.Constexpr,
    address: Int64,
    valid: cutlass.Boolean,
    entries: Entries,
    turn: cutlass.Constexpr,
) -> None:
    """Load the scales of an entry, and keep what this lane needs.

    fp32: the two of the left half. UE8M0: byte j is the scale of the lane's chunk of line j. e4m3,
    for e2m1: two bytes for the lane's chunk of the left half, then two of the right half.
    """
    lane = cute.arch.lane_idx() % LANES
    if cutlass.const_expr(form.scale == "fp32"):
        entries.scales[0, turn], entries.scales[1, turn] = words_if(valid, address, 2)
    elif cutlass.const_expr(form.scale == "ue8m0" and form.group == PANEL):
        low, high = words_if(valid, address, 2)  # two scales of a line
        entries.scales[0, turn] = pick(low, high, 0x6420 + lane // 4 * 0x1111)
    elif cutlass.const_expr(form.scale == "ue8m0"):
        words = four_words_if(valid, address)  # four scales of a line
        low = pick(words[0], words[1], 0x40 + lane // 2 * 0x11)
        high = pick(words[2], words[3], 0x40 + lane // 2 * 0x11)
        entries.scales[0, turn] = pick(low, high, Int32(0x5410))
    else:
        (low,) = words_if(valid, address + lane // 2 * 4, 1)
        (high,) = words_if(valid, address + 16 + lane // 2 * 4, 1)
        entries.scales[0, turn] = pick(low, high, 0x5410 + lane % 2 * 0x2222)


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
    form: cutlass.Constexpr,
    held: cute.Tensor,
    entries: Entries,
    line: Int32,
    place: cutlass.Constexpr,
    half: Int32,
) -> Uint32:
    """Convert and store the lane's chunk of a line of a half of an entry.

    Return a word that has one of NAN_BITS if a code is NaN. place: (turn, line).
    """
    turn, number = place
    words = tuple(held[k, number, turn] for k in range(4))
    if cutlass.const_expr(form.code == "e2m1"):
        scales = entries.scales[0, turn] >> Uint32(16 * half)
        return store_e2m1(words, scales, line, turn, half)
    scale = scale_of(form, entries, place, half)
    return store_e4m3(form, words, scale, line, turn, half * HALF + 2 * number)


@cute.jit
def spoil(line: Int32, turn: cutlass.Constexpr, half: Int32, found: Uint32) -> None:
    """Make an entry with a NaN NaN: one of its columns is enough, as its scores are NaN then."""
    if found & NAN_BITS != 0:
        lane = cute.arch.lane_idx() % LANES
        store(unit_at(line, half * HALF, turn, lane), Uint32, (Uint32(BF16_NANS),) * 4)


@cute.jit
def store_e4m3(
    form: cutlass.Constexpr,
    words: tuple[Uint32, ...],
    scale: Scale,
    line: Int32,
    turn: cutlass.Constexpr,
    first: Int32,
) -> Uint32:
    """Store a chunk of 16 columns: two units of panel `first`, or of the next one by lanes 4 to 7,
    which store the second unit first. Return what `store_chunk` does.
    """
    lane = cute.arch.lane_idx() % LANES
    upper, found = lane >= LANES // 2, Uint32(0)
    panel = first + lane // 4
    near = (words[2], words[3]) if upper else (words[0], words[1])
    far = (words[0], words[1]) if upper else (words[2], words[3])
    there = cutlass.Boolean(True)
    if cutlass.const_expr(form.coded % (2 * PANEL) != 0):
        there = panel * PANEL < form.coded
    for k in cutlass.range_constexpr(2):
        pair = near if cutlass.const_expr(k == 0) else far
        unit = 2 * (lane % 4) + (lane // 4 ^ k)
        four, check = scaled_e4m3(pair, scale)
        found = found | check
        if there:
            store(unit_at(line, panel, turn, unit), Uint32, four)
    return found if there else Uint32(0)


@cute.jit
def scale_of(
    form: cutlass.Constexpr, entries: Entries, place: cutlass.Constexpr, half: Int32
) -> Scale:
    """Return the scale of the lane's chunk of a line of a half in e4m3. place: (turn, line)."""
    turn, number = place
    if cutlass.const_expr(form.scale == ""):
        return exact_scale()
    if cutlass.const_expr(form.scale == "fp32"):
        return split_scale(float_of(entries.scales[number, turn]))
    shift = Uint32(8 * (number + lines_of(form) * half))
    return power_scale((entries.scales[0, turn] >> shift) & 0xFF)


@cute.jit
def store_e2m1(
    words: tuple[Uint32, ...], scales: Uint32, line: Int32, turn: cutlass.Constexpr, half: Int32
) -> Uint32:
    """Store a chunk of 32 columns: four units of half a panel, in an order of its panel's own.

    Return what `store_chunk` does; only scales can be NaN.
    """
    lane = cute.arch.lane_idx() % LANES
    low, high = from_e4m3(scales & 0xFF), from_e4m3((scales >> 8) & 0xFF)
    panel = half * HALF + lane // 2
    for k in cutlass.range_constexpr(4):
        unit = (k + lane // 2) % 4
        word = words[0]
        for other in cutlass.range_constexpr(1, 4):
            word = words[other] if unit == other else word
        four = scaled_e2m1(word, high if unit >= 2 else low)
        store(unit_at(line, panel, turn, lane % 2 * 4 + unit), Uint32, four)
    return Uint32(0)


# ---- columns in bf16


@cute.jit
def copy_panel(
    source: Source,
    entries: Entries,
    line: Int32,
    panel: cutlass.Constexpr,
    begin: cutlass.Constexpr,
) -> None:
    """Start the copies of a panel, at byte `begin` of an entry; zeros of what is no entry."""
    lane = cute.arch.lane_idx() % LANES
    for turn in cutlass.range_constexpr(TURNS):
        place = entries.places[turn]
        address = data_of(source, place) + begin + lane * CHUNK
        copy_chunk(unit_at(line, panel, turn, lane), address, place != NOWHERE)


@cute.jit
def arrive_after_copies(ring: Ring, buffer: Int32) -> None:
    """Arrive at the full barrier of a piece once the thread's copies so far have completed."""
    cute.arch.inline_ptx(
        "cp.async.mbarrier.arrive.noinc.shared.b64 [{$r0}];",
        read_only_args=[ring.barrier(buffer).toint()],
    )
