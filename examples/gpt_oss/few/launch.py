"""Launches of the kernels of few tokens: check, choose a config, allocate, launch once.

Tensors are in bf16 without gaps. On the CPU they run in the emulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from examples.gpt_oss.few.config import (
    LANE_ELEMENTS,
    MOST_INPUT,
    MOST_OUTPUT,
    MOST_TOKENS,
    NORM_THREADS,
    OCTET,
    STEP,
    ArgmaxConfig,
    ArgmaxParams,
    HeadsConfig,
    HeadsParams,
    HeadWords,
    NormConfig,
    NormParams,
    NormWords,
    ProductConfig,
    ProductParams,
    RowWords,
    octets_for,
    parts_for,
    room_for,
    warps_for,
)
from kernelkit.call.launch import choose_target, launch, sms_of
from kernelkit.compile.compiler import compile_once
from kernelkit.device.param_table import ParamTable
from kernelkit.device.param_words import fp32_bits, nothing
from kernelkit.plan.hw import WARP_THREADS
from kvcache import Rows
from kvcache.layouts.records import round_up

ARCHS = ("sm_100a", "sm_90a")
FOLDER = "examples.gpt_oss.few"
LINE_BYTES = 128  # of L2


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMSNorm: its weight, bf16 [K], and its epsilon."""

    weight: torch.Tensor
    eps: float

    @property
    def words(self) -> NormWords:
        """Words of a launch."""
        return NormWords(weight=self.weight, eps_bits=fp32_bits(self.eps))


@dataclass(frozen=True, eq=False)
class Heads:
    """Where queries, keys and values of new tokens go.

    Attributes:
        q_heads, kv_heads, head_dim: Of the layer.
        positions: int64 [T].
        angles: fp32 [positions, 2, 2, D / 2]; see `model.angle_table`.
        rows: Entries of keys and of values in the cache; both pools have the same slots.
        mapping: int64 [T], the entry of each token, -1 for none.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    positions: torch.Tensor
    angles: torch.Tensor
    rows: tuple[Rows, Rows]
    mapping: torch.Tensor

    def words(self, queries: torch.Tensor) -> HeadWords:
        """Words of a launch."""
        k, v = self.rows
        kv = RowWords(
            keys=(k.pool, k.data_offset),
            values=(v.pool, v.data_offset),
            slot_stride=k.pool.stride(0),
            rows=k.rows,
            row_bytes=k.record.data_bytes,
        )
        return HeadWords(
            queries=queries,
            q_heads=self.q_heads,
            kv_heads=self.kv_heads,
            positions=self.positions,
            angles=self.angles,
            mapping=self.mapping,
            cache=kv,
        )


def attention_input(
    x: torch.Tensor,
    more: torch.Tensor | None,
    norm: Norm,
    linear: tuple[torch.Tensor, torch.Tensor],
    heads: Heads,
    later: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm of x + more, the product of queries, keys and values, rotation, and append.

    Args:
        x, more: bf16 [T, K], the residual stream and what is added to it.
        norm: RMSNorm of the sum.
        linear: Weight bf16 [(Hq + 2 Hkv) D, K] and bias.
        heads: Where the results go; keys and values are written to the cache.
        later: Weight of a later product, which is requested to L2.

    Returns:
        (x + more, rounded once; queries bf16 [T, Hq, D]).
    """
    _check_tokens(x)
    if len(x) > MOST_INPUT:
        x, normed = add_norm(x, more, norm)
        return x, _rotated(torch.nn.functional.linear(normed, *linear), heads)
    queries = x.new_empty(len(x), heads.q_heads, heads.head_dim)
    summed = x if more is None else torch.empty_like(x)
    options = {"head_dim": heads.head_dim, "normed": True, "adds": more is not None}
    params = {
        "more": 0 if more is None else more,
        "residual": 0,
        "out": 0 if more is None else summed,
        "norm": norm.words,
        "heads": heads.words(queries),
    }
    _product(x, linear, options, params, later)
    return summed, queries


def _rotated(product: torch.Tensor, heads: Heads) -> torch.Tensor:
    """Rotate queries and keys of a product, [T, (Hq + 2 Hkv) D], and append keys and values."""
    tokens, config = len(product), HeadsConfig(heads.head_dim)
    queries = product.new_empty(tokens, heads.q_heads, heads.head_dim)
    params = HeadsParams(tokens=tokens, x=product, heads=heads.words(queries))
    items = tokens * (heads.q_heads + 2 * heads.kv_heads) * config.vectors
    _launch(config, "heads_kernel", params, -(-items // config.threads), product.device)
    return queries


def attention_output(
    o: torch.Tensor,
    x: torch.Tensor,
    norm: Norm,
    linear: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product after attention, added to the residual stream x, and the norm of the sum.

    Args:
        o: bf16 [T, Hq D].
        x: bf16 [T, H].
        linear: Weight bf16 [H, Hq D] and bias.

    Returns:
        (x plus the product, rounded once; its norm), both bf16 [T, H].
    """
    _check_tokens(o)
    if len(o) > MOST_OUTPUT:
        return add_norm(x, torch.nn.functional.linear(o, *linear), norm)
    out = torch.empty_like(x)
    params = {
        "more": 0, "residual": x, "out": out, "norm": nothing(NormWords),
        "heads": nothing(HeadWords),
    }  # fmt: skip
    _product(o, linear, {}, params, None)
    return add_norm(out, None, norm)


def add_norm(
    x: torch.Tensor, more: torch.Tensor | None, norm: Norm
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + more, rounded once, and its RMSNorm; bf16 [T, K]."""
    columns = x.shape[1]
    normed = torch.empty_like(x)
    summed = x if more is None else torch.empty_like(x)
    params = NormParams(
        x=x, more=0 if more is None else more, summed=summed, out=normed, norm=norm.words
    )
    threads = min(NORM_THREADS, -(-columns // 256) * 32)
    config = NormConfig(columns, more is not None, threads)
    _launch(config, "norm_kernel", params, len(x), x.device)
    return summed, normed


def most_likely(logits: torch.Tensor, out: torch.Tensor) -> None:
    """Write the index of the largest of each row of logits, bf16 [T, V], to out, int64 [T].

    V is a multiple of 8. Of equal logits the first one counts.
    """
    tokens, count = logits.shape
    if logits.dtype != torch.bfloat16 or count % LANE_ELEMENTS or not logits.is_contiguous():
        raise ValueError(
            f"logits are {logits.dtype} {tuple(logits.shape)} with strides {logits.stride()}: bf16 "
            f"without gaps, a multiple of {LANE_ELEMENTS} for a token"
        )
    vectors = count // LANE_ELEMENTS
    parts = parts_for(tokens, vectors)
    best = logits.new_empty(tokens, parts, dtype=torch.float32)
    index = torch.empty_like(best, dtype=torch.int32)
    params = ArgmaxParams(
        logits=logits, vectors=vectors, parts=parts, best=best, index=index, ids=out
    )
    _launch(ArgmaxConfig(False), "argmax_kernel", params, tokens * parts, out.device)
    _launch(ArgmaxConfig(True), "argmax_kernel", params, tokens, out.device)


def _product(
    x: torch.Tensor,
    linear: tuple[torch.Tensor, torch.Tensor],
    options: dict[str, Any],
    params: dict[str, Any],
    later: torch.Tensor | None,
) -> None:
    (rows, columns), tokens = linear[0].shape, len(x)
    octets = octets_for(rows, columns, sms_of(x.device))
    warps = warps_for(columns)
    ctas = -(-rows // OCTET // octets)
    nbytes = 0 if later is None else later.nbytes
    config = ProductConfig(
        columns, octets, room_for(tokens), warps, later=nbytes > 0, **options,
    )  # fmt: skip
    given = ProductParams(
        tokens=tokens, octets=rows // OCTET, weight=linear[0], bias=linear[1], x=x,
        later=0 if later is None else later, later_bytes=nbytes,
        later_piece=round_up(-(-nbytes // (ctas * WARP_THREADS)), LINE_BYTES), **params,
    )  # fmt: skip
    _launch(config, "product_kernel", given, ctas, x.device)


def _launch(config: Any, kernel: str, params: Any, ctas: int, device: torch.device) -> None:
    target = choose_target(device, "auto", None, ARCHS)
    compiled = compile_once(config, target.arch, f"{FOLDER}.{kernel}")
    launch(compiled, (ParamTable.of(params), ctas), target, device)


def _check_tokens(x: torch.Tensor) -> None:
    if not 1 <= len(x) <= MOST_TOKENS or x.dtype != torch.bfloat16 or not x.is_contiguous():
        raise ValueError(
            f"x is {x.dtype} {tuple(x.shape)} with strides {x.stride()}: bf16 of 1 to "
            f"{MOST_TOKENS} tokens, without gaps"
        )
    if x.shape[1] % STEP:
        raise ValueError(f"{x.shape[1]} columns: a multiple of {STEP}")
