"""Load roles: one warp fetches K and V, another fills Q (device code).

K and V come by TMA in pieces, in the order in which the MMA warp uses them: K of a tile, then V of
the tile before. So no depth of the ring can deadlock. A piece consists of panels: all its keys, 128
bytes of each. K is the K-major A operand of S, V the MN-major A operand of O^T, and both use this
arrangement.

Q is written once, with zeros for missing rows. Row r of a KV head is head r mod group of token
r / group, for any group; no TMA box has that shape. Rows of 16 bits are copied by cp.async. With
e4m3 keys `quantise_row` converts each row to e4m3 with a scale per row.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from gqa_lowlatency.shared.args import Place, Tensors
from gqa_lowlatency.shared.signature import TYPES
from gqa_lowlatency.shared.split import tile_start
from gqa_lowlatency.sm100.args import Scope
from gqa_lowlatency.sm100.plan import ROLES, TILE, Plan100
from kernelkit.device import warp_mma
from kernelkit.device.boxes import Box, BoxPosition, TmaTensor, copy_in, swizzled
from kernelkit.device.online_softmax import bounded_factor
from kernelkit.device.pipelines import producer_state
from kernelkit.device.shared_words import store
from kernelkit.device.warp_mma import pack_e4m3
from kernelkit.plan import hw


def kv_box(plan: Plan100) -> Box:
    """Return the box of K and V: the keys of a tile, or as many of them as one page holds."""
    return Box(plan.box_rows, plan.panel, TYPES[plan.config.keys_dtype])


LARGEST = 448.0  # e4m3
SMALLEST = 2.0**-100  # row maximum below which the row counts as zeros


@cute.jit
def quantise_row(
    plan: Plan100, scope: Scope, source: cute.Tensor, column: Int32, valid: Boolean
) -> None:
    """Quantise a row of Q to sQ, by a whole warp, and store the factor of its products in
    `row_scales`.

    The factor combines the scales of the row, of K and of the softmax. valid: whether the row
    exists.
    """
    config = plan.config
    lane, count = cute.arch.lane_idx(), config.head_dim // hw.WARP_THREADS
    values = cute.make_rmem_tensor(count, TYPES[config.dtype])
    values.fill(0.0)
    if valid:
        aligned = min(count * config.io_bytes, hw.SMEM_UNIT_BYTES)  # as rows of Q are
        begin = (source.iterator + lane * count).align(aligned)
        part = cute.make_tensor(begin, cute.make_layout(count))
        cute.autovec_copy(part, values)
    numbers = values.load().to(Float32)
    top = Float32(0.0)
    for k in cutlass.range_constexpr(count):
        top = cutlass.max(top, cutlass.max(numbers[k], -numbers[k]))
    top = cute.arch.warp_redux_sync(top, "fmax", nan=True)
    factor = LARGEST * cute.arch.rcp_approx(top) if top > SMALLEST else Float32(0.0)
    offset = lane * count // plan.panel * (plan.columns * plan.line_bytes)
    offset += column * plan.line_bytes + lane * count % plan.panel
    target = scope.buffers.q.toint() + swizzled(offset, plan.line_bytes)
    for first in cutlass.range_constexpr(0, count, 4):
        scaled = [numbers[first + k] * factor for k in range(min(count, 4))]
        store_bits(target + first, pack_e4m3(*scaled), 8 * len(scaled))
    if lane == 0:
        scalars = scope.scalars
        factor = scalars.softcap_log2 if config.softcap else scalars.scale_log2
        scale = top * (1.0 / LARGEST)
        if cutlass.const_expr(config.k_scale):
            scale = bounded_factor(
                scale * bounded_factor(factor * scope.tables.k_scale[scope.place.head])
            )
        else:
            scale *= factor
        store(scope.buffers.row_scales + column * 4, Float32, (scale,))


@cute.jit
def store_bits(address: Int32, word: Uint32, bits: cutlass.Constexpr) -> None:
    """Store the lowest 8, 16 or 32 bits of a word to shared memory."""
    cute.arch.inline_ptx(f"st.shared.b{bits} [{{$r0}}], {{$r1}};", read_only_args=[address, word])


class LoadKV:
    """Role that fills the ring."""

    def __init__(self, plan: Plan100) -> None:
        self.plan = plan
        self.role = ROLES["load_kv"]
        self.boxes = TILE // plan.box_rows
        self.words = -(-self.boxes // hw.WARP_THREADS)  # words per lane that hold the boxes

    @cute.jit
    def begin(self, scope: Scope) -> None:
        """Fetch K of the first tile before the CTA's first barrier, so that memory latency overlaps
        it.

        Called by the warp that has initialised the barriers.
        """
        if scope.share.count > 0:
            where = cute.make_rmem_tensor(self.words, Int32)
            self.look_up(scope, Int32(0), where)
            for piece in cutlass.range_constexpr(self.plan.pieces):
                scope.pipes.kv.signal(piece)
                self.fetch(scope, scope.k, Int32(0), piece, where, Int32(piece))

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp. Pages are looked up a step before they are needed."""
        plan, pipes, share = self.plan, scope.pipes, scope.share
        state = producer_state(plan.stages)
        k_where = cute.make_rmem_tensor(self.words, Int32)
        v_where = cute.make_rmem_tensor(self.words, Int32)
        self.look_up(scope, Int32(0), v_where)
        self.look_up(scope, Int32(1), k_where)
        for _ in cutlass.range_constexpr(plan.pieces):  # K of the first tile is on its way
            state.advance()
        for step in cutlass.range(1, share.count + 1, unroll=1):
            if step < share.count:
                for piece in cutlass.range_constexpr(plan.pieces):
                    pipes.kv.acquire(state)
                    self.fetch(scope, scope.k, step, piece, k_where, state.index)
                    state.advance()
            for piece in cutlass.range_constexpr(plan.pieces):
                pipes.kv.acquire(state)
                self.fetch(scope, scope.v, step - 1, piece, v_where, state.index)
                state.advance()
            v_where.store(k_where.load())
            self.look_up(scope, step + 1, k_where)
        if cutlass.const_expr(plan.config.pdl):
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def fetch(
        self,
        scope: Scope,
        source: TmaTensor,
        step: Int32,
        piece: cutlass.Constexpr,
        where: cute.Tensor,
        stage: Int32,
    ) -> None:
        """Fetch a piece of tile `step` of the share. where: result of `look_up` for the tile."""
        plan = self.plan
        box, panels = kv_box(plan), plan.piece_columns // plan.panel
        barrier = scope.pipes.kv.barrier(stage)
        for word in cutlass.range_constexpr(self.words):
            for lane in cutlass.range(min(self.boxes, hw.WARP_THREADS), unroll=1):
                index = word * hw.WARP_THREADS + lane
                row, entry = self.first_key(scope, step), where[word]
                if cutlass.const_expr(plan.config.page_size > 0):
                    row = self.row_in_page(row, index)
                    entry = cute.arch.shuffle_sync(where[word], lane)
                for panel in cutlass.range_constexpr(panels):
                    column = piece * plan.piece_columns + panel * plan.panel
                    slot = (stage * panels + panel) * self.boxes + index
                    position = BoxPosition(row, column, scope.place.head, entry)
                    copy_in(source, box, position, box.at(scope.buffers.ring, slot), barrier)

    @cute.jit
    def row_in_page(self, first: Int32, index: Int32) -> Int32:
        """Return the row in its page at which box `index` begins, for a tile with first key
        `first`.
        """
        row = Int32(0)
        if cutlass.const_expr(self.plan.box_rows < self.plan.config.page_size):
            row = (first + index * self.plan.box_rows) % self.plan.config.page_size
        return row

    @cute.jit
    def first_key(self, scope: Scope, step: Int32) -> Int32:
        """Return the first key of tile `step` of the share."""
        return tile_start(scope.share, scope.share.begin + step, TILE)

    @cute.jit
    def look_up(self, scope: Scope, step: Int32, where: cute.Tensor) -> None:
        """Look up the batch entry of a tile, or in lane l the pages of boxes l, l + 32, ...

        A page that no row sees is not looked up: a page that does not exist arrives as zeros.
        """
        config, share = self.plan.config, scope.share
        where.fill(scope.place.entry)
        if cutlass.const_expr(config.page_size > 0):
            for word in cutlass.range_constexpr(self.words):
                index = word * hw.WARP_THREADS + cute.arch.lane_idx()
                key = self.first_key(scope, step) + index * self.plan.box_rows
                seen = (step < share.count) & (index < self.boxes) & (key < share.n_keys)
                if cutlass.const_expr(config.has_begin):
                    inside = key + self.plan.box_rows > share.lowest
                    if cutlass.const_expr(config.sink_tokens):
                        inside = inside | (key < share.sink_end)
                    seen = seen & inside
                where[word] = cute.size(scope.k.tensor, mode=[3])
                if seen:
                    where[word] = scope.tables.pages[scope.place.entry, key // config.page_size]


class LoadQ:
    """Role that fills sQ."""

    def __init__(self, plan: Plan100) -> None:
        self.plan = plan
        self.role = ROLES["load_q"]

    @property
    def begins_early(self) -> bool:
        """Whether copies begin before the CTA's first barrier.

        Not if they wait for a previous grid that nothing else waits for.
        """
        return not self.plan.is_fp8 and not self.plan.config.kv_ready

    @cute.jit
    def begin(self, tensors: Tensors, place: Place, target: Int32) -> None:
        """Issue the copies of Q first in the CTA: copies issued after K and V would arrive after
        them.
        """
        if cutlass.const_expr(self.plan.config.pdl):
            cute.arch.griddepcontrol_wait()
        self.copy_rows(tensors, place, target)

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Rest of the warp's life. With PDL the previous grid may still write Q."""
        if cutlass.const_expr(self.plan.config.pdl and not self.begins_early):
            cute.arch.griddepcontrol_wait()
        if scope.share.count > 0:
            if cutlass.const_expr(self.plan.is_fp8):
                for column in cutlass.range(self.plan.columns, unroll=4):
                    row, valid = self.row_of(scope.tensors, scope.place, column)
                    quantise_row(self.plan, scope, row, column, valid)
            elif cutlass.const_expr(not self.begins_early):
                self.copy_rows(scope.tensors, scope.place, scope.buffers.q.toint())
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        scope.pipes.q.signal(0)

    @cute.jit
    def copy_rows(self, tensors: Tensors, place: Place, target: Int32) -> None:
        """Copy the rows of Q; adjacent lanes copy adjacent 16 bytes of a row."""
        plan, config = self.plan, self.plan.config
        line_bytes, unit_bytes = hw.SMEM_LINE_BYTES, hw.SMEM_UNIT_BYTES
        per_row = config.head_dim * config.io_bytes // unit_bytes
        per_line = line_bytes // unit_bytes
        for turn in cutlass.range(plan.columns * per_row // hw.WARP_THREADS, unroll=4):
            index = turn * hw.WARP_THREADS + cute.arch.lane_idx()
            column, unit = index // per_row, index % per_row
            row, valid = self.row_of(tensors, place, column)
            panel, line = unit // per_line, unit % per_line
            offset = (panel * plan.columns + column) * line_bytes + line * unit_bytes
            warp_mma.copy_chunk(
                target + swizzled(offset, line_bytes),
                row.iterator.toint() + Int64(unit * unit_bytes),
                valid,
            )
        cute.arch.cp_async_commit_group()

    @cute.jit
    def row_of(self, tensors: Tensors, place: Place, column: Int32) -> tuple[cute.Tensor, Boolean]:
        """Return (row of Q of a column, whether it exists)."""
        config = self.plan.config
        row = place.row_tile * self.plan.columns + column
        valid = row < config.rows
        existing = row if valid else 0
        head = place.head * config.group + existing % config.group
        return tensors.q[place.entry, existing // config.group, head, None], valid
