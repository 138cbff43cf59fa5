"""A product of few tokens with the norm before it, and what follows it (device code).

A warp multiplies its share of the columns of all rows of its CTA, with mma.sync. Its A fragments
are octets of rows, its B fragments tokens. Both are loaded from global memory into registers,
weights before the previous kernel ends.

RMSNorm is a factor of a token that all columns share. So tokens are multiplied without it, each
warp sums the squares of its share, and the factor is applied after the sum over warps.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint16, Uint32
from cutlass.memory import SmemAllocator

from examples.gpt_oss.few.config import (
    OCTET,
    ROW_LANES,
    STEP,
    VECTOR_BYTES,
    ProductConfig,
    ProductParams,
    RowWords,
)
from kernelkit.device.device_table import DeviceTable
from kernelkit.device.shared_words import load
from kernelkit.device.table_kernel import TableKernel
from kernelkit.device.warp_mma import copy_chunk, multiply, pack
from kernelkit.device.words import float_of, four_words_if, two_of_bf16, vector_at
from kernelkit.plan.hw import WARP_THREADS

Loaded = tuple[tuple[Uint32, ...], ...]  # of a token: words of x, and of what is added to it
STEP_BYTES = 2 * STEP
HALVES = 2  # products of a step
PAIRS = OCTET // 2  # of rows of an octet
WORDS = 4  # of a vector


@dataclass(frozen=True)
class Share:
    """A warp's share of the columns.

    column_bytes: byte of a row where it begins.
    tokens: shared address of its columns of all tokens.
    scales: shared address of its part of the norm's weight.
    """

    column_bytes: Int32
    tokens: Int32
    scales: Int32


@dataclass(frozen=True)
class Item:
    """A pair of results of a thread.

    is_there: whether this thread stores it.
    token: its token.
    row: its first row in the sums of a CTA; the second is PAIRS further.
    low: first row of the weight.
    high: second row.
    """

    is_there: Boolean
    token: Int32
    row: Int32
    low: Int32
    high: Int32


class Product(TableKernel):
    """The kernel of one ProductConfig; table: `ProductParams`."""

    config: ProductConfig
    pdl = True

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """A CTA has `octets` octets of rows."""
        config, params = self.config, table.unpack(ProductParams)
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        words = cute.make_layout(config.smem_bytes // 4)
        sTokens = smem.allocate_tensor(Float32, words, byte_alignment=128)
        squares = cute.make_ordered_layout((config.warps, config.tokens), (1, 0))
        sSquares = smem.allocate_tensor(Float32, squares, byte_alignment=VECTOR_BYTES)
        scales = cute.make_layout(max(config.scale_bytes, VECTOR_BYTES) // 4)
        sScales = smem.allocate_tensor(Float32, scales, byte_alignment=128)
        sums = cute.make_ordered_layout((config.warps, config.rows, config.tokens), (2, 1, 0))
        sSums = cute.make_tensor(sTokens.iterator, sums)  # after the tokens
        share = Share(
            warp * config.steps * STEP_BYTES,
            sTokens.iterator.toint() + warp * config.share_bytes,
            sScales.iterator.toint() + warp * config.steps * STEP_BYTES,
        )
        items = self.items(params, cta * config.octets)
        places = [self.place(params, item) for item in items]
        biases = [self.biases(params, item) for item in items]
        weights, rows = self.begin(params, cta * config.octets, share)
        angles = [self.angles(params, *both) for both in zip(items, places, strict=True)]
        cute.arch.griddepcontrol_wait()
        tokens = self.begin_tokens(params, share)
        stream = [self.stream(params, item) for item in items]
        # Here, since ptxas moves loads down to their use, but not past this.
        cute.arch.griddepcontrol_launch_dependents()
        sums, square = self.multiply_share(params, share, rows, weights, tokens)
        if cutlass.const_expr(config.later):
            request_later(params, cta, warp)
        if cutlass.const_expr(config.staged):
            cute.arch.sync_threads()
        self.store_sums(sSums, sums, warp)
        if cutlass.const_expr(config.normed):
            self.store_squares(sSquares, square, warp)
        cute.arch.sync_threads()
        for turn in cutlass.range_constexpr(config.turns):
            low, high = self.summed(params, items[turn], sSums, sSquares)
            low, high = low + wide(biases[turn][0]), high + wide(biases[turn][1])
            if items[turn].is_there:
                if cutlass.const_expr(config.head_dim > 0):
                    self.store_heads(params, items[turn], places[turn][1], angles[turn], low, high)
                else:
                    self.store_stream(params, items[turn], stream[turn], low, high)

    @cute.jit
    def begin(
        self, params: ProductParams, first: Int32, share: Share
    ) -> tuple[list[list[tuple[Uint32, ...]]], list[Int64]]:
        """Load what is older than the previous kernel; return weights of the first steps, and a
        lane's address in each row."""
        config, lane = self.config, cute.arch.lane_idx()
        offset = share.column_bytes + lane % ROW_LANES * VECTOR_BYTES
        if cutlass.const_expr(config.normed):
            self.stage_scales(params, share)
        rows = []
        for octet in cutlass.range_constexpr(config.octets):
            row = self.row_of(params, first + octet, lane // ROW_LANES)
            rows.append(params.weight + Int64(row) * (2 * config.columns) + offset)
        ahead = range(config.in_flight)
        weights = [[four_words(row + step * STEP_BYTES) for row in rows] for step in ahead]
        return weights, rows

    @cute.jit
    def begin_tokens(self, params: ProductParams, share: Share) -> list[list[Loaded]]:
        """Begin to bring tokens; return those of the first steps if they are not staged."""
        if cutlass.const_expr(self.config.staged):
            self.stage_tokens(params, share)
            return []
        return [self.load_tokens(params, share, step) for step in range(self.config.in_flight)]

    @cute.jit
    def multiply_share(
        self,
        params: ProductParams,
        share: Share,
        rows: list[Int64],
        weights: list[list[tuple[Uint32, ...]]],
        tokens: list[list[Loaded]],
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Return a warp's sums (pairs, blocks, 4), and sums of squares (blocks,) of a lane."""
        config = self.config
        if cutlass.const_expr(config.staged):
            wait_for_copies()
        shape = (config.pairs, config.blocks, 4)
        sums = cute.make_rmem_tensor(cute.make_ordered_layout(shape, order=(2, 1, 0)), Float32)
        sums.fill(0.0)
        squares = cute.make_rmem_tensor(config.blocks, Float32)
        squares.fill(0.0)
        for step in cutlass.range_constexpr(config.steps):
            found = self.staged_tokens(params, share, step) if config.staged else tokens[step]
            if cutlass.const_expr(config.normed):
                found = self.prepared(params, share, found, squares, step)
            self.multiply_step(weights[step], found, sums)
            if cutlass.const_expr(step + config.in_flight < config.steps):
                later = len(weights)
                weights.append([four_words(row + later * STEP_BYTES) for row in rows])
                if cutlass.const_expr(not config.staged):
                    tokens.append(self.load_tokens(params, share, later))
        return sums, squares

    @cute.jit
    def stage_scales(self, params: ProductParams, share: Share) -> None:
        """Begin to copy a part of the norm's weight to shared memory."""
        vectors = self.config.steps * ROW_LANES
        for first in cutlass.range_constexpr(0, vectors, WARP_THREADS):
            vector = first + cute.arch.lane_idx()
            place = vector * VECTOR_BYTES
            if first + WARP_THREADS <= vectors or vector < vectors:
                source = params.norm.weight + share.column_bytes + place
                copy_chunk(share.scales + place, source, Boolean(True))

    @cute.jit
    def stage_tokens(self, params: ProductParams, share: Share) -> None:
        """Begin to copy a part of all tokens to shared memory; zeros for none.

        Not in a loop, in which a warp would wait for weights.
        """
        config = self.config
        vectors = config.steps * ROW_LANES
        for first in cutlass.range_constexpr(0, config.room * vectors, WARP_THREADS):
            item = first + cute.arch.lane_idx()
            token, place = item // vectors, item % vectors * VECTOR_BYTES
            is_there = Boolean(token < Int32(params.tokens))
            source = Int64(token) * (2 * config.columns) + share.column_bytes + place
            target = share.tokens + token * config.token_bytes + place
            if first + WARP_THREADS <= config.room * vectors or token < config.room:
                copy_chunk(target, params.x + source, is_there)
                if cutlass.const_expr(config.adds):
                    more = target + config.room * config.token_bytes
                    copy_chunk(more, params.more + source, is_there)

    @cute.jit
    def staged_tokens(
        self, params: ProductParams, share: Share, step: cutlass.Constexpr[int]
    ) -> list[Loaded]:
        """Load a step of the tokens of all blocks from shared memory.

        Past the last token it is that one; nobody uses its sums.
        """
        config, lane = self.config, cute.arch.lane_idx()
        found: list[Loaded] = []
        for block in cutlass.range_constexpr(config.blocks):
            token = cutlass.min(block * OCTET + lane // ROW_LANES, Int32(params.tokens) - 1)
            place = share.tokens + token * config.token_bytes
            place = place + (step * STEP_BYTES + lane % ROW_LANES * VECTOR_BYTES)
            loaded = [load(place, Uint32, WORDS)]
            if cutlass.const_expr(config.adds):
                loaded.append(load(place + config.room * config.token_bytes, Uint32, WORDS))
            found.append(tuple(loaded))
        return found

    @cute.jit
    def row_of(self, params: ProductParams, octet: Int32, place: Int32) -> Int32:
        """Return a row of an octet. Past the last octet it is one of that; nobody uses its sum."""
        octet = cutlass.min(octet, Int32(params.octets) - 1)
        return row_in(octet, place, self.config.head_dim)

    @cute.jit
    def load_tokens(
        self, params: ProductParams, share: Share, step: cutlass.Constexpr[int]
    ) -> list[Loaded]:
        """Load a step of the tokens of all blocks from global memory; zeros for none."""
        config = self.config
        found: list[Loaded] = []
        for block in cutlass.range_constexpr(config.blocks):
            token = block * OCTET + cute.arch.lane_idx() // ROW_LANES
            is_there = Boolean(token < Int32(params.tokens))
            inside = step * STEP_BYTES + cute.arch.lane_idx() % ROW_LANES * VECTOR_BYTES
            place = Int64(token) * (2 * config.columns) + share.column_bytes + inside
            found.append((four_words_if(is_there, params.x + place),))
        return found

    @cute.jit
    def prepared(
        self,
        params: ProductParams,
        share: Share,
        tokens: list[Loaded],
        squares: cute.Tensor,
        step: cutlass.Constexpr[int],
    ) -> list[Loaded]:
        """Add to the stream, keep it, add up squares, and multiply by the norm's weight."""
        config = self.config
        found: list[Loaded] = []
        cta, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        inside = step * STEP_BYTES + lane % ROW_LANES * VECTOR_BYTES
        scales = load(share.scales + inside, Uint32, WORDS)
        for block in cutlass.range_constexpr(config.blocks):
            words = tokens[block][0]
            if cutlass.const_expr(config.adds):
                words = tuple(added(*both) for both in zip(*tokens[block], strict=True))
                token = block * OCTET + lane // ROW_LANES
                if cta == 0 and token < Int32(params.tokens):
                    place = Int64(token) * (2 * config.columns) + share.column_bytes + inside
                    target = vector_at(params.out + place, Uint32, WORDS)
                    for index in cutlass.range_constexpr(WORDS):
                        target[index] = words[index]
            scaled = []
            for index in cutlass.range_constexpr(WORDS):
                low, high = two_of_bf16(words[index])
                squares[block] = squares[block] + low * low + high * high
                scale_low, scale_high = two_of_bf16(scales[index])
                scaled.append(pack(low * scale_low, high * scale_high, "bf16"))
            found.append((tuple(scaled),))
        return found

    @cute.jit
    def multiply_step(
        self,
        weights: list[tuple[Uint32, ...]],
        tokens: list[Loaded],
        sums: cute.Tensor,
    ) -> None:
        """Compute sums (pairs, blocks, 4) += a step of columns.

        The columns of a product may be any, as long as both operands have the same ones: two words
        of the four that a lane loaded.
        """
        for pair in cutlass.range_constexpr(self.config.pairs):
            upper, lower = weights[2 * pair], (Uint32(0),) * WORDS
            if cutlass.const_expr(2 * pair + 1 < self.config.octets):
                lower = weights[2 * pair + 1]
            for half in cutlass.range_constexpr(HALVES):
                low, high = 2 * half, 2 * half + 1
                words = (upper[low], lower[low], upper[high], lower[high])
                for block in cutlass.range_constexpr(self.config.blocks):
                    token = tokens[block][0]
                    multiply(sums[pair, block, None], words, (token[low], token[high]), "bf16")

    @cute.jit
    def store_sums(self, sSums: cute.Tensor, sums: cute.Tensor, warp: Int32) -> None:
        """Store a warp's sums."""
        config, lane = self.config, cute.arch.lane_idx()
        for pair in cutlass.range_constexpr(config.pairs):
            for block in cutlass.range_constexpr(config.blocks):
                for number in cutlass.range_constexpr(4):
                    octet = 2 * pair + number // 2
                    if cutlass.const_expr(octet < config.octets):
                        row = octet * OCTET + lane // ROW_LANES
                        token = block * OCTET + lane % ROW_LANES * 2 + number % 2
                        sSums[warp, row, token] = sums[pair, block, number]

    @cute.jit
    def store_squares(self, sSquares: cute.Tensor, squares: cute.Tensor, warp: Int32) -> None:
        """Store a warp's sums of squares."""
        lane = cute.arch.lane_idx()
        for block in cutlass.range_constexpr(self.config.blocks):
            total = squares[block]
            for step in (1, 2):
                total = total + cute.arch.shuffle_sync_bfly(total, step)
            if lane % ROW_LANES == 0:
                sSquares[warp, block * OCTET + lane // ROW_LANES] = total

    @cute.jit
    def items(self, params: ProductParams, first: Int32) -> list[Item]:
        """Return what a thread sums up and stores: of each turn two rows of an octet, and a token.

        Past the last item it is that one again, which another thread stores.
        """
        config, tokens = self.config, Int32(params.tokens)
        thread, _, _ = cute.arch.thread_idx()
        found = []
        count = cutlass.min(Int32(params.octets) - first, config.octets) * PAIRS * tokens
        for turn in cutlass.range_constexpr(config.turns):
            number = thread + turn * config.threads
            is_there = Boolean(number < count)
            number = cutlass.min(number, count - 1)
            rest, place = number // PAIRS, number % PAIRS
            octet = rest // tokens
            rows = [row_in(first + octet, place + k * PAIRS, config.head_dim) for k in (0, 1)]
            found.append(Item(is_there, rest % tokens, octet * OCTET + place, *rows))
        return found

    @cute.jit
    def place(self, params: ProductParams, item: Item) -> tuple[Int64, Int64]:
        """Load the position of a token, and its entry of the cache, which are older than the
        previous kernel."""
        if cutlass.const_expr(self.config.head_dim == 0):
            return Int64(0), Int64(-1)
        heads, offset = params.heads, Int64(item.token) * 8
        position = vector_at(heads.positions + offset, Int64, 1)[0]
        return position, vector_at(heads.mapping + offset, Int64, 1)[0]

    @cute.jit
    def biases(self, params: ProductParams, item: Item) -> tuple[Uint16, Uint16]:
        """Load the bits of the biases of both rows."""
        return bits_at(params.bias, item.low), bits_at(params.bias, item.high)

    @cute.jit
    def angles(
        self, params: ProductParams, item: Item, place: tuple[Int64, Int64]
    ) -> tuple[Float32, Float32]:
        """Load the cosine and the sine of a pair of rows."""
        dim = self.config.head_dim
        if cutlass.const_expr(dim == 0):
            return Float32(1.0), Float32(0.0)
        table = params.heads.angles + (place[0] * (2 * dim) + item.low % dim) * 4
        cos, sin = (vector_at(table + k * (dim // 2) * 4, Float32, 1)[0] for k in (0, 3))
        return cos, sin

    @cute.jit
    def stream(self, params: ProductParams, item: Item) -> tuple[Uint16, Uint16]:
        """Load the bits of the residual stream at both rows."""
        if cutlass.const_expr(self.config.head_dim > 0):
            return Uint16(0), Uint16(0)
        begin = params.residual + Int64(item.token) * (params.octets * (2 * OCTET))
        return bits_at(begin, item.low), bits_at(begin, item.high)

    @cute.jit
    def summed(
        self, params: ProductParams, item: Item, sSums: cute.Tensor, sSquares: cute.Tensor
    ) -> tuple[Float32, Float32]:
        """Return the sums over all warps of both rows, with the factor of the norm."""
        config = self.config
        low, high = Float32(0.0), Float32(0.0)
        for warp in cutlass.range_constexpr(config.warps):
            low = low + sSums[warp, item.row, item.token]
            high = high + sSums[warp, item.row + PAIRS, item.token]
        if cutlass.const_expr(config.normed):
            factor = self.factor(params, sSquares, item.token)
            low, high = low * factor, high * factor
        return low, high

    @cute.jit
    def factor(self, params: ProductParams, sSquares: cute.Tensor, token: Int32) -> Float32:
        """Return the factor of RMSNorm."""
        total = Float32(0.0)
        for warp in cutlass.range_constexpr(self.config.warps):
            total = total + sSquares[warp, token]
        eps = float_of(Uint32(params.norm.eps_bits))
        return cute.math.rsqrt(total * (1.0 / self.config.columns) + eps)

    @cute.jit
    def store_stream(
        self,
        params: ProductParams,
        item: Item,
        stream: tuple[Uint16, Uint16],
        low: Float32,
        high: Float32,
    ) -> None:
        """Add to the residual stream."""
        begin = params.out + Int64(item.token) * (params.octets * (2 * OCTET))
        store_bf16(low + wide(stream[0]), begin + Int64(item.low) * 2)
        store_bf16(high + wide(stream[1]), begin + Int64(item.high) * 2)

    @cute.jit
    def store_heads(
        self,
        params: ProductParams,
        item: Item,
        entry: Int64,
        angles: tuple[Float32, Float32],
        low: Float32,
        high: Float32,
    ) -> None:
        """Rotate a pair of a query or key, and store it or a pair of a value."""
        heads, dim = params.heads, self.config.head_dim
        half, q_heads = dim // 2, Int32(heads.q_heads)
        kv_heads = Int32(heads.kv_heads)
        head, index = item.low // dim, item.low % dim
        if head < q_heads + kv_heads:
            cos, sin = angles
            low, high = low * cos - high * sin, high * cos + low * sin
        if head < q_heads:
            place = (Int64(item.token) * q_heads + head) * dim + index
            store_pair(low, high, heads.queries + 2 * place, half)
        elif entry >= 0:
            cache, inside = heads.cache, entry_offset(heads.cache, entry)
            if head < q_heads + kv_heads:
                column = (head - q_heads) * dim + index
                store_pair(low, high, cache.keys + inside + 2 * column, half)
            else:
                column = (head - q_heads - kv_heads) * dim + index
                store_pair(low, high, cache.values + inside + 2 * column, half)


@cute.jit
def entry_offset(cache: RowWords, entry: Int64) -> Int64:
    """Return the bytes from entry 0 to an entry."""
    slot = Int64(Uint32(entry) // Uint32(cache.rows))
    return slot * cache.slot_stride + (entry - slot * cache.rows) * cache.row_bytes


@cute.jit
def row_in(octet: Int32, place: Int32, head_dim: cutlass.Constexpr[int]) -> Int32:
    """Return row `place` of an octet of the weight; see `ProductConfig.head_dim`."""
    if cutlass.const_expr(head_dim == 0):
        return octet * OCTET + place
    of_head, half = head_dim // OCTET, OCTET // 2
    head = octet // of_head
    pairs = octet % of_head * half + place % half
    return head * head_dim + place // half * (head_dim // 2) + pairs


@cute.jit
def wait_for_copies() -> None:
    """Wait until the copies of this warp to shared memory are there."""
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    cute.arch.sync_warp()


@cute.jit
def request_later(params: ProductParams, cta: Int32, warp: Int32) -> None:
    """Request this CTA's part of the weight of a later kernel to L2."""
    begin = Int64(cta * WARP_THREADS + cute.arch.lane_idx()) * params.later_piece
    rest = params.later_bytes - begin
    if warp == 0 and rest > 0:
        cute.arch.inline_ptx(
            "cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};",
            read_only_args=[params.later + begin, Int32(cutlass.min(rest, params.later_piece))],
        )


@cute.jit
def four_words(address: Int64) -> tuple[Uint32, ...]:
    """Load 16 bytes, aligned to them.

    Not with `.nc`, which ptxas moves past the wait for the previous kernel.
    """
    return cute.arch.inline_ptx(
        "ld.global.L1::no_allocate.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * WORDS,
        read_only_args=[address],
    )


@cute.jit
def added(one: Uint32, other: Uint32) -> Uint32:
    """Add two pairs of bf16, rounded once."""
    (low, high), (low_more, high_more) = two_of_bf16(one), two_of_bf16(other)
    return pack(low + low_more, high + high_more, "bf16")


@cute.jit
def bits_at(base: Int64, index: Int32) -> Uint16:
    """Return the bits of element `index` of a vector in bf16. They are widened where they are used:
    earlier, a warp would wait for them."""
    return vector_at(base + Int64(index) * 2, Uint16, 1)[0]


@cute.jit
def wide(bits: Uint16) -> Float32:
    """Return bf16 of these bits in fp32."""
    return float_of(Uint32(bits) << 16)


@cute.jit
def store_bf16(value: Float32, address: Int64) -> None:
    """Store a number in bf16."""
    vector_at(address, BFloat16, 1)[0] = value.to(BFloat16)


@cute.jit
def store_pair(low: Float32, high: Float32, address: Int64, apart: cutlass.Constexpr[int]) -> None:
    """Store two numbers in bf16, `apart` elements apart."""
    store_bf16(low, address)
    store_bf16(high, address + 2 * apart)


def host_function(config: ProductConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return Product(config).with_table(ProductParams)
