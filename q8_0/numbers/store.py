"""From sums to the result (device code).

Element c + 2 h + 4 j of a thread's fragment of sums:

    row 16 w + g + 8 h of its warpgroup's rows of weights
    token 8 j + 2 t + c

Rows of weights are columns of the result. Results of 16 bits go through shared memory, transposed,
some tokens at a time: lines of 64 columns, whose 16-byte units are swizzled.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernelkit.device.barriers import meet
from kernelkit.device.shared_words import load, operands
from kernelkit.device.warp_mma import pack, store_transposed
from kernelkit.device.words import vector_at
from kernelkit.plan import hw
from q8_0.numbers.config import TEAM_ROWS, TILE_ROWS, NumbersConfig
from q8_0.numbers.plan import LINE, NumbersPlan
from q8_0.numbers.scope import TYPES, Item, Scope
from q8_0.product.tile import store_words

UNIT = hw.SMEM_UNIT_BYTES
UNITS = LINE // UNIT  # of a line
THREADS = hw.WARPGROUP_WARPS * hw.WARP_THREADS
VECTOR = 4  # sums of a thread for eight tokens
BLOCK_BYTES = TILE_ROWS * 8 * 4  # all threads' sums of eight tokens


class Store:
    """Results of a warpgroup."""

    def __init__(self, plan: NumbersPlan) -> None:
        self.plan, self.config = plan, plan.config

    @cute.jit
    def store(self, scope: Scope, item: Item, end: Int32, team: Int32, sums: cute.Tensor) -> None:
        """Store the sums of tokens from `item.token` on, before `end`."""
        own = cute.size(sums) // VECTOR * 8
        self.add_bias(scope, item, team, sums)
        if cutlass.const_expr(self.config.staged):
            chunk = self.plan.chunk
            if cutlass.const_expr(self.config.split == 1):
                meet(self.plan.barriers, "stored", team)  # the previous tile's results are read
            for number in cutlass.range_constexpr(own // chunk):
                buffer = scope.out + (team * 2 + number % 2) * self.plan.out_bytes
                first = number * chunk
                if item.token + first < end:
                    self.put(buffer, sums, first)
                    meet(self.plan.barriers, "stored", team)
                    self.take(scope, item, end, team, buffer, first)
        else:
            self.scatter(scope, item, end, team, sums)

    def rows(self, item: Item, team: Int32) -> Int32:
        """The thread's first row."""
        thread = cute.arch.thread_idx()[0] % THREADS
        return item.row + team * TEAM_ROWS + thread // 32 * 16 + thread % 32 // 4

    @cute.jit
    def add_bias(self, scope: Scope, item: Item, team: Int32, sums: cute.Tensor) -> None:
        """sums += those of both rows."""
        if cutlass.const_expr(self.config.bias):
            dtype = TYPES[self.config.out_dtype]
            for half in cutlass.range_constexpr(2):
                row = cutlass.min(self.rows(item, team) + 8 * half, Int32(scope.params.rows) - 1)
                address = scope.params.bias + Int64(row) * self.config.out_bytes
                added = vector_at(address, dtype, 1)[0].to(Float32)
                for number in cutlass.range_constexpr(cute.size(sums) // VECTOR):
                    for token in cutlass.range_constexpr(2):
                        place = VECTOR * number + 2 * half + token
                        sums[place] = sums[place] + added

    # ---- 16 bits, through shared memory

    @cute.jit
    def put(self, buffer: Int32, sums: cute.Tensor, first: cutlass.Constexpr[int]) -> None:
        """Write this warp's rows of a chunk of tokens to shared memory."""
        blocks = self.plan.chunk // 8
        thread = cute.arch.thread_idx()[0] % THREADS
        warp, lane = thread // 32, thread % 32
        for half in cutlass.range_constexpr(2):
            words = []
            for block in cutlass.range_constexpr(blocks):
                at = VECTOR * (first // 8 + block) + 2 * half
                words.append(pack(sums[at], sums[at + 1], self.config.out_dtype))
            place = buffer + placed(lane % (8 * blocks), warp * 2 + half)
            store_transposed(place, tuple(words))

    @cute.jit
    def take(
        self,
        scope: Scope,
        item: Item,
        end: Int32,
        team: Int32,
        buffer: Int32,
        first: cutlass.Constexpr[int],
    ) -> None:
        """Copy a chunk of tokens from shared to global memory, 16 bytes a thread."""
        params = scope.params
        thread = cute.arch.thread_idx()[0] % THREADS
        unit, line = thread % UNITS, thread // UNITS
        row = item.row + team * TEAM_ROWS + unit * 8
        for begin in cutlass.range_constexpr(0, self.plan.chunk, THREADS // UNITS):
            token = item.token + first + begin + line
            if (begin + line < self.plan.chunk) & (token < end) & (row < Int32(params.rows)):
                words = load(buffer + placed(begin + line, unit), Uint32, 4)
                address = params.out + Int64(token) * params.out_stride + Int64(row) * 2
                store_words(address, words)

    # ---- Any dtype and alignment, directly

    @cute.jit
    def scatter(self, scope: Scope, item: Item, end: Int32, team: Int32, sums: cute.Tensor) -> None:
        """Store each number by itself: eight lanes have neighbouring columns."""
        params = scope.params
        first = item.token + cute.arch.lane_idx() % 4 * 2
        row = self.rows(item, team)
        start = params.out + Int64(row) * self.config.out_bytes
        for number in cutlass.range_constexpr(cute.size(sums) // VECTOR):
            for place in cutlass.range_constexpr(VECTOR):
                token = first + 8 * number + place % 2
                own = row + place // 2 * 8
                if (token < end) & (own < Int32(params.rows)):
                    address = start + Int64(token) * params.out_stride
                    address = address + place // 2 * 8 * self.config.out_bytes
                    self.store_number(address, sums[VECTOR * number + place])

    @cute.jit
    def store_number(self, address: Int64, value: Float32) -> None:
        """A number, rounded to the dtype of the result, to global memory."""
        dtype = TYPES[self.config.out_dtype]
        vector_at(address, dtype, 1)[0] = dtype(value)

    # ---- Sums of all CTAs that share a tile
    #
    # Each CTA stores the results of some of the tile's tokens. All send it their sums by st.async,
    # to slots of its own: fp32 [CTA that sends][8 tokens][thread][4]. An mbarrier counts the bytes.
    # It adds them up in the order of CTAs.

    @cute.jit
    def store_shared(self, scope: Scope, item: Item, team: Int32, sums: cute.Tensor) -> None:
        """Complete the sums of this CTA's tokens over all of K, and store them."""
        config, rank = self.config, scope.share.rank
        blocks = config.own_blocks
        thread = cute.arch.thread_idx()[0]
        slot = scope.mail + rank * (blocks * BLOCK_BYTES) + thread * (4 * VECTOR)
        for cta in cutlass.range_constexpr(config.split):
            first = config.first_block(cta)
            for block in cutlass.range_constexpr(first, config.first_block(cta + 1)):
                values = [sums[VECTOR * block + k] for k in range(VECTOR)]
                address = slot + (block - first) * BLOCK_BYTES
                send(address, scope.mail_barrier, self.peer(scope, cta), values)
        wait_for_mail(scope.mail_barrier)
        total = cute.make_rmem_tensor(VECTOR * blocks, Float32)
        total.fill(0.0)
        for cta in cutlass.range_constexpr(config.split):
            for block in cutlass.range_constexpr(blocks):
                place = (cta * blocks + block) * BLOCK_BYTES + thread * (4 * VECTOR)
                sent = load(scope.mail + place, Float32, VECTOR)
                for k in cutlass.range_constexpr(VECTOR):
                    total[VECTOR * block + k] = total[VECTOR * block + k] + sent[k]
        every = config.tile_tokens // 8
        first, behind = every * rank // config.split, every * (rank + 1) // config.split
        end = cutlass.min(item.token + 8 * behind, Int32(scope.params.tokens))
        self.store(scope, Item(item.token + 8 * first, item.row), end, team, total)

    def peer(self, scope: Scope, share: int) -> Int32:
        """Return the rank in the cluster of who has part `share` of K of this CTA's tile."""
        return Int32(share) if not self.config.pair else scope.member + 2 * share


@cute.jit
def open_mail(config: cutlass.Constexpr[NumbersConfig], barrier: cute.Pointer) -> None:
    """Initialise the mbarrier of sums, which expects those of all CTAs that share the tile. Others
    may use it after the barrier of the cluster."""
    thread, _, _ = cute.arch.thread_idx()
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    share = rank // 2 if config.pair else rank
    every = config.tile_tokens // 8
    blocks = every * (share + 1) // config.split - every * share // config.split
    if thread == 0:
        cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, blocks * config.split * BLOCK_BYTES)


@cute.jit
def meet_cluster() -> None:
    """All threads of the cluster: all CTAs run, and their mbarriers are initialised."""
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()


@cute.jit
def send(address: Int32, barrier: Int32, cta: Int32, values: list[Float32]) -> None:
    """Store a vector at the same shared address of a CTA of the cluster; its mbarrier counts it."""
    vector, words = operands("r", 3, VECTOR)
    cute.arch.inline_ptx(
        "{ .reg .b32 to, box; mapa.shared::cluster.u32 to, {$r0}, {$r2}; "
        "mapa.shared::cluster.u32 box, {$r1}, {$r2}; "
        "st.async.shared::cluster.mbarrier::complete_tx::bytes"
        f"{vector}.f32 [to], {words}, [box]; }}",
        read_only_args=[address, barrier, cta, *values],
    )


@cute.jit
def wait_for_mail(barrier: Int32) -> None:
    """Wait for all sums, with an acquire of cluster scope."""
    cute.arch.inline_ptx(
        "{ .reg .pred done; "
        "WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], 0; "
        "@done bra DONE; bra WAIT; DONE: }",
        read_only_args=[barrier],
    )


@cute.jit
def placed(line: Int32, unit: Int32) -> Int32:
    """Return the byte offset of a 16-byte unit of a line, swizzled: eight lanes that move
    neighbouring lines use all banks."""
    return line * LINE + (unit ^ line % UNITS) * UNIT
