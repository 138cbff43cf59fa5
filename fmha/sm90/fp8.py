"""K and V in e4m3 on Hopper: terms of Q, another math role, V transposed (device code).

Terms: Q in bf16 is split into two tiles of e4m3, in place in shared memory. Two lanes share a row:
each reads every other unit, eight elements, and writes eight bytes of a unit of each term.

Math role: P V of a tile is a sum of few bits, and is added to O in fp32. With enough registers P V
has separate ones: then S of the next tile is issued first, and P V is added during the softmax.
Otherwise P V is written, some columns of O at a time, to the registers of S, whose weights are P by
then, and S is issued after these parts have been added. Either way a warpgroup's products do not
overlap its softmax, but those of the others do.

Transposition: products of e4m3 need both operands K-major, and V comes as [key, column]. A warp
moves 32 keys of 16 columns at a time. ldmatrix, transposed, gives a lane two keys of two adjacent
columns in each word; bytes are picked so that a word has four keys of one column; stmatrix writes
lines of a column. The order of sixteen keys is that of the words of the A operand, see
`products.py`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineState

from fmha.shared.args import Lane, Scope, Walk
from fmha.shared.fp8 import anew, largest_of, place_of, power_of, two_terms
from fmha.shared.two_rows import exponentiate, round_weights, tile_sums
from fmha.shared.walk import count_rounds, first_key, locate, plan_walk
from fmha.sm90.layout import VT_STAGES, Layout
from fmha.sm90.math import Math, Tile
from fmha.sm90.plan import Plan90
from fmha.sm90.products import issue_pv, issue_qk
from kernelkit.device.barriers import meet
from kernelkit.device.boxes import swizzled
from kernelkit.device.online_softmax import bounded_factor, lowest_bits
from kernelkit.device.pipelines import consumer_state, producer_state
from kernelkit.device.shared_words import load, store
from kernelkit.device.warp_mma import load_fragment, pick, store_fragment
from kernelkit.plan import hw

LANES = 2  # lanes that share a row
UNIT = hw.SMEM_UNIT_BYTES
WORDS = UNIT // 4


@cute.jit
def split_q(plan: Plan90, lane: Lane, buffer: cute.Pointer) -> tuple[Float32, Float32]:
    """Split the warpgroup's query tile in `buffer` into two terms, the larger one first.

    Return the factors of the scores of this thread's two rows.
    """
    layout, head_dim, rows = plan.layout, plan.config.head_dim, plan.layout.rows
    start, own = buffer.toint() + lane.tile * layout.q_bytes, anew(cute.arch.lane_idx())
    row, half = lane.warp * 16 + own // LANES, own % LANES
    units = head_dim * plan.config.q_item_bytes // UNIT // LANES
    words = cute.make_rmem_tensor(units * WORDS, Uint32)
    line = layout.panel(head_dim, plan.config.q_item_bytes) * plan.config.q_item_bytes
    for unit in cutlass.range_constexpr(units):
        place = place_of(line, rows, row, LANES * unit) ^ half * UNIT
        found = load(start + place, Uint32, WORDS)
        for word in cutlass.range_constexpr(WORDS):
            words[unit * WORDS + word] = found[word]
    if cutlass.const_expr(layout.q_rows < rows):
        if row >= layout.q_rows:  # these rows hold arbitrary data
            words.fill(0)
    largest = largest_of(words)
    largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, offset=1))
    factor, power = power_of(largest)
    meet(plan.barriers, "warpgroup", lane.team)  # all of Q is in registers
    for unit in cutlass.range_constexpr(units):
        terms = two_terms(tuple(words[unit * WORDS + word] for word in range(WORDS)), factor)
        place = start + place_of(layout.panel(head_dim), rows, row, unit) + half * (UNIT // LANES)
        store(place, Uint32, terms[:2])
        store(place + rows * head_dim, Uint32, terms[2:])
    cute.arch.fence_proxy("async.shared", space="cta")
    meet(plan.barriers, "warpgroup", lane.team)
    source = own // 4 * LANES  # a lane that read the row
    return (
        cute.arch.shuffle_sync(power, source),
        cute.arch.shuffle_sync(power, source + 8 * LANES),
    )


def waits_for_parts(layout: Layout, following: bool) -> list[int]:
    """Return for each part of P V how many product groups may be in flight when it is added to O.

    following: whether S of another tile is issued, too.
    """
    shape, waits = layout.shape, []
    for part in range(layout.o_parts):
        behind = min(shape.products - 1, layout.o_parts - 1 - part)
        waits.append(behind + (following and shape.before_s <= part))
    return waits


class MathFp8(Math):
    """S = Q K^T, softmax, O += P V, in e4m3."""

    @cute.jit
    def sweep(
        self,
        scope: Scope,
        lane: Lane,
        walk: Walk,
        hidden: Int32,
        tile: Tile,
        k_state: PipelineState,
        v_state: PipelineState,
    ) -> tuple[PipelineState, PipelineState]:
        """Process all tiles from `hidden` on, like `Math.sweep`."""
        plan, pipes, reference = self.plan, scope.pipes, tile.reference
        if cutlass.const_expr(plan.config.q_terms == 2):
            powers = split_q(plan, lane, scope.buffers.q)
            for half in cutlass.range_constexpr(2):
                reference.factor[half] = bounded_factor(reference.factor[half], powers[half])
        pipes.k.wait(k_state)
        self.take_first(scope, lane, walk, hidden, tile, k_state.index)
        k_state.advance()
        for step in cutlass.range(hidden + 1, walk.tiles, unroll=1):
            pipes.k.wait(k_state)
            self.wait_turn(lane.team)
            if cutlass.const_expr(self.s_first):
                issue_qk(plan, tile.scores, tile.q, tile.k[None, None, None, k_state.index])
                pipes.vt.wait(v_state)
                self.issue_part(tile, 0, v_state.index)
                self.pass_turn(lane.team)
                warpgroup.wait_group(1)
            else:
                pipes.vt.wait(v_state)
                self.add_pv(lane, tile, v_state.index, k_state.index)
                warpgroup.wait_group(0)
                pipes.vt.release(v_state.index)
            sums = self.weigh(scope, lane, walk, step, tile)
            if cutlass.const_expr(self.s_first):
                pipes.vt.release(v_state.index)
            v_state.advance()
            self.settle(scope, lane, walk, step, tile, k_state.index, sums)
            k_state.advance()
        pipes.q.release(lane.tile)
        pipes.vt.wait(v_state)
        self.add_pv(lane, tile, v_state.index, None)
        pipes.vt.release(v_state.index)
        v_state.advance()
        return k_state, v_state

    @property
    def s_first(self) -> bool:
        """Whether S of the next tile is issued before P V, which then is one part."""
        return self.plan.layout.shape.before_s == 0

    @cute.jit
    def add_pv(
        self, lane: Lane, tile: Tile, stage: Int32, k_stage: cutlass.Constexpr | Int32
    ) -> None:
        """Add P V of a stage of V to O. With a `k_stage`, also issue its S, without
        waiting for it.
        """
        layout, ahead = self.plan.layout, len(tile.products)
        waits = waits_for_parts(layout, k_stage is not None)
        for part in cutlass.range_constexpr(ahead):
            self.issue_part(tile, part, stage)
        for part in cutlass.range_constexpr(layout.o_parts):
            warpgroup.wait_group(waits[part])
            self.add_part(tile, part)
            if cutlass.const_expr(part + ahead < layout.o_parts):
                self.issue_part(tile, part + ahead, stage)
            if cutlass.const_expr(part + 1 == layout.shape.before_s):
                self.issue_s(lane, tile, k_stage)

    @cute.jit
    def issue_s(self, lane: Lane, tile: Tile, k_stage: cutlass.Constexpr | Int32) -> None:
        """Issue S of a stage of K, if there is one, and pass the turn to the next warpgroup."""
        if cutlass.const_expr(k_stage is not None):
            issue_qk(self.plan, tile.scores, tile.q, tile.k[None, None, None, k_stage])
            self.pass_turn(lane.team)

    @cute.jit
    def issue_part(self, tile: Tile, part: cutlass.Constexpr, stage: Int32) -> None:
        """Issue P V of the columns of part `part`. stage: stage of V."""
        product = tile.products[part % len(tile.products)]
        issue_pv(self.plan, product, tile.p, tile.v[part][None, None, None, stage])

    @cute.jit
    def add_part(self, tile: Tile, part: cutlass.Constexpr) -> None:
        """Add the completed P V of these columns to O."""
        product = tile.products[part % len(tile.products)]
        size = cute.size(product)
        for index in cutlass.range_constexpr(size):
            tile.o[part * size + index] = tile.o[part * size + index] + product[index]

    @cute.jit
    def weigh(
        self, scope: Scope, lane: Lane, walk: Walk, step: Int32, tile: Tile
    ) -> tuple[Float32, Float32]:
        """Weigh the tile with the present maxima; return the sums of the weights."""
        every = cute.size(tile.scores)
        self.prepare(scope, lane, walk, step, tile, 0, every)
        if cutlass.const_expr(self.s_first):
            warpgroup.wait_group(0)
            self.add_part(tile, 0)  # after the branch: overlaps the exponentials
        exponentiate(self.plan, tile.scores, tile.reference, scope.scalars, 0, every)
        round_weights(self.plan, tile.scores, tile.p)
        return tile_sums(self.plan, tile.scores, tile.p)


KEYS, COLUMNS = 32, 16  # per warp and step: a row of a matrix is the 16 bytes of 16 columns
EVEN, ODD = 0x6420, 0x7531  # bytes of one column, of two words
AT_ONCE = 2  # loads in flight: registers for their words


class Turn:
    """Role that transposes every tile of the V ring into the ring of transposed V."""

    def __init__(self, plan: Plan90) -> None:
        self.plan = plan
        self.role = plan.roles["turn"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        pipes, plan = scope.pipes, self.plan
        v_state, vt_state = consumer_state(plan.layout.stages[1]), producer_state(VT_STAGES)
        for turn in cutlass.range(count_rounds(plan, scope.tensors.order), unroll=1):
            work = locate(plan, scope.tensors, turn)
            walk = plan_walk(plan, work, scope.scalars)
            for step in cutlass.range(walk.tiles, unroll=1):
                pipes.v.wait(v_state)
                pipes.vt.wait_free(vt_state)
                self.turn_tile(scope, v_state.index, vt_state.index, self.valid_keys(walk, step))
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                pipes.v.release(v_state.index)
                pipes.vt.signal(vt_state.index)
                v_state.advance()
                vt_state.advance()

    @cute.jit
    def valid_keys(self, walk: Walk, step: Int32) -> Int32:
        """Return the number of valid keys of the tile.

        Memory that a length or an offset excludes may be NaN, and 0 * NaN is NaN. Only the first
        tile of a block has such keys.
        """
        valid = Int32(self.plan.layout.tile_n)
        if cutlass.const_expr(self.plan.config.ragged_keys):
            if step == 0:
                valid = walk.seen_end - first_key(self.plan, walk, step)
        return valid

    @cute.jit
    def turn_tile(self, scope: Scope, source: Int32, target: Int32, valid: Int32) -> None:
        """Transpose tile `source` of the V ring to tile `target` of the other ring; keys from
        `valid` on are 0.

        Each warp transposes 32 keys at a time.
        """
        layout, lane = self.plan.layout, cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - self.role.first_warp
        own = warp * KEYS
        v = scope.buffers.v.toint() + source * layout.vt_bytes
        vt = scope.buffers.vt.toint() + target * layout.vt_bytes
        # Lanes 4 g .. hold row g of a matrix. Rows of one parity are two lines apart, so writing
        # rows 0 to 3 of one matrix and 4 to 7 of the other uses every bank once.
        upper = Boolean(lane // 4 >= 4)
        first = Int32(ODD) if upper else Int32(EVEN)
        second = Int32(EVEN) if upper else Int32(ODD)
        row = lane % 8
        column = row * 2 + (lane // 8 % 2 ^ row // 4)
        from_here, to_here = self.own_places(own, lane, column)
        patches = [
            (keys, block)
            for block in range(self.plan.config.v_dim // COLUMNS)
            for keys in range(0, layout.tile_n, self.role.warps * KEYS)
        ]
        for begin in cutlass.range_constexpr(0, len(patches), AT_ONCE):
            some, loaded = patches[begin : begin + AT_ONCE], []
            for keys, block in some:
                words = load_fragment(v + self.v_place(from_here, keys, block), True)
                if cutlass.const_expr(self.plan.config.ragged_keys):
                    words = self.kept(words, valid - own - keys - lane % 4 * 2)
                loaded.append(words)
            for (keys, block), words in zip(some, loaded, strict=True):
                turned = (
                    pick(words[0], words[1], first),
                    pick(words[0], words[1], second),
                    pick(words[2], words[3], first),
                    pick(words[2], words[3], second),
                )
                store_fragment(vt + self.vt_place(to_here, keys, block), turned)

    @cute.jit
    def kept(self, words: tuple[Uint32, ...], valid: Int32) -> tuple[Uint32, ...]:
        """Pairs of keys 0, 8, 16 and 24, of each those below `valid`."""
        return tuple(
            word & lowest_bits((valid - 8 * number) * 16) for number, word in enumerate(words)
        )

    def own_places(self, first: Int32, lane: Int32, column: Int32) -> tuple[Int32, Int32]:
        """Return a lane's bytes in a tile and in a transposed one, in the first block of columns.

        They belong to a key from `first` on, and to 16 keys of `column`.
        """
        layout = self.plan.layout
        line, line_t = layout.panel(layout.v_columns), layout.panel(layout.tile_n)
        place = column * line_t + first + lane // 16 * 16
        return swizzled((first + lane) * line, line), swizzled(place, line_t)

    def v_place(self, own: Int32, keys: int, block: int) -> Int32:
        """Return `own` moved by so many keys and blocks of columns.

        32 lines are swizzled like the next 32, so the place in a line is `own` with some bits
        flipped, and the rest is a constant.
        """
        layout = self.plan.layout
        line = layout.panel(layout.v_columns)
        panel, inside = divmod(block * COLUMNS, line)
        return (own ^ inside) + (panel * layout.tile_n + keys) * line

    def vt_place(self, own: Int32, keys: int, block: int) -> Int32:
        """Return `own` moved by so many keys and blocks of a transposed tile.

        16 lines of such a tile are swizzled like the next 16.
        """
        line = self.plan.layout.panel(self.plan.layout.tile_n)
        panel, inside = divmod(keys, line)
        return (own ^ inside) + (panel * self.plan.config.v_dim + block * COLUMNS) * line
