"""The router with its linear layer, from tokens to experts in one launch (device code).

A cluster has eight tokens: the columns of products with mma.sync, whose rows are 16 experts. Its
warps partition H and, if there are many, the experts. A lane loads 16 bytes of a row at a time, of
the same elements of H for experts and for tokens. Every warp sends its sums to the CTA that routes
the token: CTA t of the cluster has token t. There a separate warp adds the sums in the order of
their shares, so that bits are always the same. It rounds logits as a linear layer does, and chooses
(`choice.py`).

If weights are older than the previous kernel, they are loaded while that kernel ends. Weights for
which there are no registers are prefetched to L2.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from kernelkit.device.dependent import follow
from kernelkit.device.fake import fake_tensor
from kernelkit.device.warp_mma import multiply
from kernelkit.device.words import four_words_if
from kernelkit.plan.hw import WARP_THREADS
from moe.routing.choice import (
    TYPES,
    Candidates,
    Choice,
    Outputs,
    candidates_of,
    fake_outputs,
    order_of,
)
from moe.routing.config import (
    BLOCK_TOKENS,
    EXPERT_ROWS,
    LANE_ELEMENTS,
    LINEAR_WARPS,
    STEP_ELEMENTS,
    VECTOR_BYTES,
    LinearConfig,
)
from moe.routing.warp import Mail, open_mail, send, wait

ROW_LANES = STEP_ELEMENTS // LANE_ELEMENTS  # lanes that share a row
STEP_BYTES = ROW_LANES * VECTOR_BYTES
HALVES = 2  # products of a step, 16 elements of H each


@dataclass(frozen=True)
class Given:
    """Inputs: x (T, H), weight (E, H) and its bias (E,) in one dtype; biases of the choice and of
    logits (E,) fp32. Missing inputs are None."""

    x: cute.Tensor
    weight: cute.Tensor
    weight_bias: cute.Tensor | None
    bias: cute.Tensor | None
    logit_bias: cute.Tensor | None


@dataclass(frozen=True)
class Share:
    """Part of the product that a warp computes."""

    first_step: Int32  # its first step of H
    first_block: Int32  # its first block of experts
    number: Int32  # index of its part of H, and of its partial sums
    first_token: Int32  # first token of the cluster
    tokens: Int32  # number of tokens of the cluster


class RouteLinear:
    """Host function and kernel of one LinearConfig."""

    def __init__(self, config: LinearConfig) -> None:
        self.config = config
        self.choice = Choice(config.route)

    @cute.jit
    def __call__(
        self,
        tensors: tuple[cute.Tensor | None, ...],
        outputs: tuple[cute.Tensor, ...],
        scales: tuple[Float32, Float32 | None],
        order: tuple[cute.Tensor | Int32 | None, ...] | None,
        cleared: cute.Tensor | None,
        stream: CUstream,
    ) -> None:
        """Launch the kernel.

        Args:
            tensors: fields of `Given`.
            outputs: ids int32 and weights fp32, (T * slots,).
            scales: of the weights, and the weight of shared experts, None without any.
            order: fields of `Order`; None for more than one token.
            cleared: int32, which become zeros, or None.
        """
        cluster, (tokens, _) = self.config.cluster, tensors[0].shape
        blocks = (tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS
        written = Outputs(*outputs, *scales, order_of(order), cleared)
        self.kernel(Given(*tensors), written).launch(
            grid=(blocks * cluster, 1, 1),
            block=((LINEAR_WARPS + 1) * WARP_THREADS, 1, 1),
            cluster=(cluster, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, given: Given, outputs: Outputs) -> None:
        """Grid (CTAs of a cluster x tokens by BLOCK_TOKENS,); see `__call__`."""
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        share = self.share_of(given, rank, warp)
        mail = open_mail(self.config, rank < share.tokens)
        found = candidates_of(Int32(0), 1)
        if warp < LINEAR_WARPS:
            sums = self.multiply_share(given, share)
            cute.arch.cluster_wait()  # all CTAs have initialised their mail
            self.send_sums(mail, share, sums)
        else:
            self.route(given, mail, rank, share, found, outputs)

    @cute.jit
    def share_of(self, given: Given, rank: Int32, warp: Int32) -> Share:
        """Return the share of a warp."""
        config = self.config
        block, _, _ = cute.arch.block_idx()
        tokens, _ = given.x.shape
        number = rank * (LINEAR_WARPS // config.expert_ways) + warp // config.expert_ways
        first = block // config.cluster * BLOCK_TOKENS
        return Share(
            number * config.steps,
            warp % config.expert_ways,
            number,
            first,
            cutlass.min(tokens - first, BLOCK_TOKENS),
        )

    @cute.jit
    def multiply_share(self, given: Given, share: Share) -> cute.Tensor:
        """Return the sums of a warp over its share of H: (blocks, HALVES, 4)."""
        config = self.config
        rows = [self.row_of(given.weight, share, block, half) for block, half in config.rows]
        row = self.row_of_token(given.x, share)
        ahead = range(config.in_flight)
        if cutlass.const_expr(not config.ready):
            cute.arch.griddepcontrol_wait()
        weights = [[self.load(each, share, step) for each in rows] for step in ahead]
        self.prefetch(rows, share)
        if cutlass.const_expr(config.ready):
            cute.arch.griddepcontrol_wait()
        tokens = [self.load(row, share, step) for step in ahead]
        # Here, since ptxas moves loads down to their use, but not past this.
        cute.arch.griddepcontrol_launch_dependents()
        sums = registers_of(Float32, (config.blocks, HALVES, 4))
        sums.fill(0.0)
        for step in cutlass.range_constexpr(config.steps):
            self.multiply(weights[step], tokens[step], sums)
            if cutlass.const_expr(step + config.in_flight < config.steps):
                weights.append([self.load(each, share, len(weights)) for each in rows])
                tokens.append(self.load(row, share, len(tokens)))
        return sums

    @cute.jit
    def row_of(
        self,
        weight: cute.Tensor,
        share: Share,
        block: cutlass.Constexpr[int],
        half: cutlass.Constexpr[int],
    ) -> Int64:
        """Return the address of a lane's first vector of an expert: of a row of a block, or of the
        row eight further. Past the last expert it is that expert's again; those sums are not used.
        """
        first = (share.first_block + block * self.config.expert_ways) * EXPERT_ROWS
        row = first + half * 8 + cute.arch.lane_idx() // ROW_LANES
        expert = cutlass.min(row, self.config.route.experts - 1)
        return vector_of(weight[expert, None], first_vector(share))

    @cute.jit
    def row_of_token(self, x: cute.Tensor, share: Share) -> Int64:
        """Return the address of a lane's first vector of a token. Rows past the last token read
        that token again."""
        token = cutlass.min(cute.arch.lane_idx() // ROW_LANES, share.tokens - 1)
        return vector_of(x[share.first_token + token, None], first_vector(share))

    @cute.jit
    def load(self, row: Int64, share: Share, step: cutlass.Constexpr[int]) -> tuple[Uint32, ...]:
        """Load four words of a row, `step` steps after the first; zeros past its end."""
        is_there = Boolean(True)
        if cutlass.const_expr(not self.config.is_whole):
            is_there = first_vector(share) < self.config.vectors - step * ROW_LANES
        return four_words_if(is_there, row + step * STEP_BYTES)

    @cute.jit
    def prefetch(self, rows: list[Int64], share: Share) -> None:
        """Prefetch steps of a warp that are not yet loaded to L2. The lanes that share a row
        prefetch different steps."""
        config, place = self.config, cute.arch.lane_idx() % ROW_LANES
        for first in cutlass.range_constexpr(config.in_flight, config.steps, ROW_LANES):
            step = first + place
            vector = (share.first_step + step) * ROW_LANES
            if step < config.steps and vector < config.vectors:
                for row in rows:
                    # Address of the row at the elements that this lane reads.
                    address = row + (first * STEP_BYTES + place * (STEP_BYTES - VECTOR_BYTES))
                    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])

    @cute.jit
    def multiply(
        self,
        weights: list[tuple[Uint32, ...]],
        token: tuple[Uint32, ...],
        sums: cute.Tensor,
    ) -> None:
        """Compute sums (blocks, HALVES, 4) += a step of H. weights: words of `LinearConfig.rows`.

        The columns of a product may be any elements of H, as long as both operands have the same
        ones: two words of the four that a lane loaded.
        """
        for block in cutlass.range_constexpr(self.config.blocks):
            upper, lower = weights[2 * block], weights[2 * block + 1]
            for half in cutlass.range_constexpr(HALVES):
                low, high = 2 * half, 2 * half + 1
                words = (upper[low], lower[low], upper[high], lower[high])
                pair = (token[low], token[high])
                multiply(sums[block, half, None], words, pair, self.config.route.dtype)

    @cute.jit
    def send_sums(self, mail: Mail, share: Share, sums: cute.Tensor) -> None:
        """Send a warp's sums, each to the CTA that routes its token."""
        config, lane = self.config, cute.arch.lane_idx()
        for block in cutlass.range_constexpr(config.blocks):
            first = (share.first_block + block * config.expert_ways) * EXPERT_ROWS
            for number in cutlass.range_constexpr(4):
                expert = first + lane // ROW_LANES + number // 2 * 8
                token = lane % ROW_LANES * 2 + number % 2
                if expert < config.route.experts and token < share.tokens:
                    total = sums[block, 0, number] + sums[block, 1, number]
                    send(mail, share.number, expert, total, token)

    @cute.jit
    def route(
        self,
        given: Given,
        mail: Mail,
        rank: Int32,
        share: Share,
        found: Candidates,
        outputs: Outputs,
    ) -> None:
        """Choose the experts of this CTA's token, if it has one. Runs in the last warp."""
        lane = cute.arch.lane_idx()
        if cutlass.const_expr(not self.config.ready):
            follow()
        weight_bias = self.choice.read_if_any(given.weight_bias, lane)
        logit_bias = self.choice.read_if_any(given.logit_bias, lane)
        biases = self.choice.read_if_any(given.bias, lane)
        if cutlass.const_expr(self.config.ready):
            follow()
        cute.arch.cluster_wait()
        if rank < share.tokens:
            wait(mail)
            logits = self.choice.read(mail.sums[0, None], lane)
            for number in cutlass.range_constexpr(1, self.config.shares):
                part = self.choice.read(mail.sums[number, None], lane)
                logits.store(logits.load() + part.load())
            if cutlass.const_expr(weight_bias is not None):
                logits.store(logits.load() + weight_bias.load())
            logits.store(logits.load().to(given.x.element_type).to(Float32))
            if cutlass.const_expr(logit_bias is not None):
                logits.store(logits.load() + logit_bias.load())
            token = share.first_token + rank
            self.choice.choose_experts(logits, biases, token, lane, found, outputs)


@cute.jit
def first_vector(share: Share) -> Int32:
    """Return the first vector (LANE_ELEMENTS) of a row that a lane loads."""
    return share.first_step * ROW_LANES + cute.arch.lane_idx() % ROW_LANES


@cute.jit
def vector_of(row: cute.Tensor, vector: Int32) -> Int64:
    """Return the address of a vector. All loads of a row are then at constant distances, and in
    flight at once."""
    return cute.local_tile(row, (LANE_ELEMENTS,), (vector,)).iterator.toint()


@cute.jit
def registers_of(dtype: cutlass.Constexpr, shape: cutlass.Constexpr) -> cute.Tensor:
    """Allocate registers whose last dimension is contiguous."""
    order = tuple(range(len(shape) - 1, -1, -1))
    return cute.make_rmem_tensor(cute.make_ordered_layout(shape, order=order), dtype)


def host_function(config: LinearConfig, _arch: str) -> tuple:
    """Return the host function to compile for `config`, and example arguments."""
    route, dtype = config.route, TYPES[config.route.dtype]
    x = fake_tensor(dtype, cute.sym_int32(), config.hidden, align=VECTOR_BYTES)
    weight = fake_tensor(dtype, route.experts, config.hidden, align=VECTOR_BYTES)
    align = VECTOR_BYTES if route.vectors else None
    biases = (
        fake_tensor(kind, route.experts, align=align) if there else None
        for there, kind in (
            (config.weight_bias, dtype), (route.bias, Float32), (route.logit_bias, Float32),
        )
    )  # fmt: skip
    return RouteLinear(config), (x, weight, *biases), *fake_outputs(route), CUstream(0)
