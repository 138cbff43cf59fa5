"""The router: scores of all experts, the k best of them and their weights (device code).

A warp routes one token. Lane l holds experts l, l + 32, ..., so that loads are coalesced. What is
chosen by is kept as integers that compare like the numbers (`warp.key_of`): one redux.sync finds
the best key of the warp, another one the lowest expert that has it.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from kernelkit.compile import compile_once
from kernelkit.hw import WARP_THREADS
from kernelkit.log2 import LOG2_E
from kernelkit.online_softmax import finite
from moe.routing.config import ROUTE_WARPS, RouteConfig
from moe.routing.warp import LOWEST, is_first, key_of, value_of

TYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": Float32}
LARGEST = 3.4028234663852886e38  # of fp32
NOBODY = (1 << 31) - 1  # above any expert


class Route:
    """Host function and kernel of one RouteConfig."""

    def __init__(self, config: RouteConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        logits: cute.Tensor,
        bias: cute.Tensor | None,
        outputs: tuple,
        scale: Float32,
        stream: CUstream,
    ) -> None:
        """logits (T, E); bias (E,) fp32 or None; outputs: ids int32 and weights fp32, (T, k)."""
        tokens, _ = logits.shape
        self.kernel(logits, bias, outputs, scale).launch(
            grid=((tokens + ROUTE_WARPS - 1) // ROUTE_WARPS, 1, 1),
            block=(ROUTE_WARPS * WARP_THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, logits: cute.Tensor, bias: cute.Tensor | None, outputs: tuple, scale: Float32
    ) -> None:
        """Grid (tokens by ROUTE_WARPS,); see `__call__`."""
        config = self.config
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % WARP_THREADS
        token = block * ROUTE_WARPS + thread // WARP_THREADS
        tokens, _ = logits.shape
        if token < tokens:
            scores = cute.make_rmem_tensor(config.per_lane, Float32)
            keys = cute.make_rmem_tensor(config.per_lane, Int32)
            self.read(logits[token, None], lane, scores)
            if cutlass.const_expr(config.scoring == "softmax"):
                self.softmax(scores)
            else:
                self.sigmoid(scores)
            self.make_keys(scores, bias, lane, keys)
            if cutlass.const_expr(config.topk_group < config.n_group):
                self.drop_groups(keys, lane)
            expert, weight = self.choose(scores, keys, lane)
            if cutlass.const_expr(config.renormalize):
                total = cute.arch.warp_reduction_sum(weight)
                weight = Float32(0.0) if total == 0.0 else weight / total
            if lane < config.top_k:
                ids, weights = outputs
                ids[token, lane] = expert
                weights[token, lane] = weight * scale

    @cute.jit
    def read(self, row: cute.Tensor, lane: Int32, scores: cute.Tensor) -> None:
        """Logits as they are scored: NaN and what is no expert are -inf, +inf becomes finite."""
        config = self.config
        for index in cutlass.range_constexpr(config.per_lane):
            expert = lane + index * WARP_THREADS
            logit = -Float32.inf
            if expert < config.experts:
                logit = Float32(row[expert])
            logit = -Float32.inf if logit != logit else logit
            scores[index] = cutlass.min(logit, Float32(LARGEST))

    @cute.jit
    def softmax(self, scores: cute.Tensor) -> None:
        """In place, over the warp; zeros where no logit is above -inf."""
        top = -Float32.inf
        for index in cutlass.range_constexpr(self.config.per_lane):
            top = cutlass.max(top, scores[index])
        base = finite(cute.arch.warp_reduction_max(top))
        total = Float32(0.0)
        for index in cutlass.range_constexpr(self.config.per_lane):
            scores[index] = cute.math.exp2((scores[index] - base) * LOG2_E, fastmath=True)
            total += scores[index]
        total = cute.arch.warp_reduction_sum(total)
        norm = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total)
        for index in cutlass.range_constexpr(self.config.per_lane):
            scores[index] = scores[index] * norm

    @cute.jit
    def sigmoid(self, scores: cute.Tensor) -> None:
        """In place."""
        for index in cutlass.range_constexpr(self.config.per_lane):
            power = cute.math.exp2(scores[index] * -LOG2_E, fastmath=True)
            scores[index] = cute.arch.rcp_approx(1.0 + power)

    @cute.jit
    def make_keys(
        self, scores: cute.Tensor, bias: cute.Tensor | None, lane: Int32, keys: cute.Tensor
    ) -> None:
        """What experts are chosen by: score + bias."""
        config = self.config
        for index in cutlass.range_constexpr(config.per_lane):
            expert = lane + index * WARP_THREADS
            key = Int32(LOWEST)
            if expert < config.experts:
                selection = scores[index]
                if cutlass.const_expr(bias is not None):
                    selection = selection + bias[expert]
                key = key_of(selection)
            keys[index] = key

    @cute.jit
    def drop_groups(self, keys: cute.Tensor, lane: Int32) -> None:
        """Experts outside the topk_group best groups can no longer be chosen."""
        config = self.config
        mine = Int32(LOWEST)  # of the group of this lane
        for group in cutlass.range_constexpr(config.n_group):
            key = self.score_group(keys, lane, group)
            mine = key if lane == group else mine
        chosen = Int32(0)
        for _ in cutlass.range_constexpr(config.topk_group):
            holders = cute.arch.vote_ballot_sync(mine == cute.arch.warp_redux_sync(mine, "max"))
            winner = holders & -holders
            chosen = chosen | winner
            mine = Int32(LOWEST) if (winner >> lane) & 1 else mine
        for index in cutlass.range_constexpr(config.per_lane):
            group = (lane + index * WARP_THREADS) // config.group_size
            # Lanes without an expert there have the lowest key anyway.
            keys[index] = keys[index] if (chosen >> group) & 1 else Int32(LOWEST)

    @cute.jit
    def score_group(self, keys: cute.Tensor, lane: Int32, group: cutlass.Constexpr) -> Int32:
        """Key of the sum of the group's two best, or of its only one."""
        config = self.config
        best, second = Int32(LOWEST), Int32(LOWEST)
        for index in cutlass.range_constexpr(config.per_lane):
            if cutlass.const_expr(config.may_hold(index, group)):
                expert = lane + index * WARP_THREADS
                key = keys[index] if expert // config.group_size == group else Int32(LOWEST)
                second = cutlass.max(second, cutlass.min(best, key))
                best = cutlass.max(best, key)
        first = cute.arch.warp_redux_sync(best, "max")
        result = first
        if cutlass.const_expr(config.group_size > 1):
            holders = cute.arch.vote_ballot_sync(best == first)
            if best == first and is_first(holders, lane):
                best = second
            runner_up = cute.arch.warp_redux_sync(best, "max")
            result = key_of(value_of(first) + value_of(runner_up))
        return result

    @cute.jit
    def choose(self, scores: cute.Tensor, keys: cute.Tensor, lane: Int32) -> tuple:
        """(expert, its score) of choice `lane`, the best first; score 0 in the lanes behind."""
        config = self.config
        my_expert, my_score = Int32(0), Float32(0.0)
        for choice in cutlass.range(config.top_k, unroll=1):
            best = keys[0]
            for index in cutlass.range_constexpr(1, config.per_lane):
                best = cutlass.max(best, keys[index])
            top = cute.arch.warp_redux_sync(best, "max")
            candidate = Int32(NOBODY)
            for index in cutlass.range_constexpr(config.per_lane - 1, -1, -1):
                expert = lane + index * WARP_THREADS
                candidate = expert if keys[index] == top else candidate
            winner = cute.arch.warp_redux_sync(candidate, "min")
            score = Float32(0.0)
            for index in cutlass.range_constexpr(config.per_lane):
                won = winner == lane + index * WARP_THREADS
                score = scores[index] if won else score
                keys[index] = Int32(LOWEST) if won else keys[index]
            score = cute.arch.shuffle_sync(score, winner % WARP_THREADS)
            my_expert = winner if lane == choice else my_expert
            my_score = score if lane == choice else my_score
        return my_expert, my_score


def compile_route(config: RouteConfig, arch: str) -> Any:
    """The compiled `Route.__call__` of `config`; compiled once per process."""
    return compile_once(config, arch, lambda: (Route(config), *_arguments(config)))


def _arguments(config: RouteConfig) -> tuple:
    tokens = cute.sym_int32()

    def matrix(dtype: type[cutlass.Numeric], columns: int) -> Any:
        return make_fake_tensor(dtype, (tokens, columns), (cute.sym_int64(), 1))

    logits = matrix(TYPES[config.dtype], config.experts)
    bias = make_fake_tensor(Float32, (config.experts,), (1,)) if config.bias else None
    outputs = matrix(Int32, config.top_k), matrix(Float32, config.top_k)
    return logits, bias, outputs, Float32(0.0), CUstream(0)
