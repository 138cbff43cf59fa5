"""Turn role: tiles of V in e4m3, [key, column] as they come, to [column, key] (device code).

Products of e4m3 take both operands along their sum. A warp moves 32 keys of 16 columns at a time:
ldmatrix, transposed, gives a lane two keys of two neighbouring columns in each word; bytes are
picked so that a word has four keys of one column; stmatrix writes lines of a column. Of sixteen
keys those stand together that the A operand has in one word, see `products.py`.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint32

from fmha.shared.args import Scope, Walk
from fmha.shared.order import count_rounds
from fmha.shared.walk import first_key, locate, plan_walk
from fmha.sm90.layout import VT_STAGES
from fmha.sm90.plan import Plan90
from kernelkit.device.online_softmax import lowest_bits
from kernelkit.device.pipelines import consumer_state, producer_state
from kernelkit.device.swizzle import swizzled
from kernelkit.device.warp_mma import load_fragment, pick, store_fragment

KEYS, COLUMNS = 32, 16  # of a warp at a time: one row of a matrix is the 16 bytes of 16 columns
EVEN, ODD = 0x6420, 0x7531  # bytes of one column, of two words
AT_ONCE = 2  # loads in flight: registers for their words


class Turn:
    """Copies every tile of the V ring to the ring of V turned."""

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
        """Keys of the tile whose rows of V count. What a length or an offset excludes may be NaN,
        and 0 * NaN is NaN; only the first tile of a block has such keys."""
        valid = Int32(self.plan.layout.tile_n)
        if cutlass.const_expr(self.plan.config.ragged_keys):
            if step == 0:
                valid = walk.seen_end - first_key(self.plan, walk, step)
        return valid

    @cute.jit
    def turn_tile(self, scope: Scope, source: Int32, target: Int32, valid: Int32) -> None:
        """Tile `source` of the V ring to tile `target` of the other; keys from `valid` on as 0.
        Warps take turns, 32 keys each."""
        layout, lane = self.plan.layout, cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - self.role.first_warp
        own = warp * KEYS
        v = scope.buffers.v.toint() + source * layout.vt_bytes
        vt = scope.buffers.vt.toint() + target * layout.vt_bytes
        # Rows of a matrix come from lanes 4 g ..; those of one parity are two lines apart, and to
        # write rows 0 to 3 of one and 4 to 7 of the other meets every bank once.
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
        """A lane's bytes of a tile and of a turned one, in the first block of columns: those of a
        key from `first` on, and 16 keys of `column`."""
        layout = self.plan.layout
        line, line_t = layout.panel(layout.v_columns), layout.panel(layout.tile_n)
        place = column * line_t + first + lane // 16 * 16
        return swizzled((first + lane) * line, line), swizzled(place, line_t)

    def v_place(self, own: Int32, keys: int, block: int) -> Int32:
        """`own`, so many keys and blocks of columns further. 32 lines are swizzled like the next
        32, so that the place in a line is `own` but for some bits, and the rest is a number."""
        layout = self.plan.layout
        line = layout.panel(layout.v_columns)
        panel, inside = divmod(block * COLUMNS, line)
        return (own ^ inside) + (panel * layout.tile_n + keys) * line

    def vt_place(self, own: Int32, keys: int, block: int) -> Int32:
        """The same of a turned tile, in which 16 lines are swizzled like the next 16."""
        line = self.plan.layout.panel(self.plan.layout.tile_n)
        panel, inside = divmod(keys, line)
        return (own ^ inside) + (panel * self.plan.config.v_dim + block * COLUMNS) * line
