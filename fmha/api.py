"""`attention` and `attention_plan`: the public functions that call the operator or make a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, Any, Literal, overload

import torch

from fmha.blocks import block_lists
from fmha.config import TUNABLE, AttentionConfig
from fmha.launch import ATTENTION
from fmha.mods import Mod, trace_mask_mod, trace_score_mod
from kernelkit.attention import (
    SHARED_NAMES,
    Scale,
    SharedOptions,
    WithLse,
    shared_fields,
    spread_scales,
)
from kernelkit.call.front import defaults_of, fronted, given_options, require_names, spelled
from kernelkit.call.prepared import Plan
from kernelkit.call.tensors import require_type
from kernelkit.plan.limits import MAX_POSITION

if TYPE_CHECKING:
    from typing_extensions import Unpack

MaskMod = Mod | Callable[[Any, Any, Any, Any], Any]
ScoreMod = Mod | Callable[[Any, Any, Any, Any, Any], Any]
Raw = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # (O_raw, LSE, row_max)


OTHER_NAMES = {
    name: hint
    for name, hint in SHARED_NAMES.items()
    if name not in ("mask_mod", "score_mod", "block_mask")
} | {
    "max_seqlen_k": "drop it: k, kv_lens or cu_seqlens_k have the lengths",
    "max_seq_len": "drop it: k, kv_lens or cu_seqlens_k have the lengths",
    "num_splits": "drop it: split keys yourself and merge, or use gqa_lowlatency.decode(parts=)",
    "cache_leftpad": "gqa_lowlatency.decode has first_keys=",
    "pack_gqa": "pack_heads",
    "attn_mask": "write it as mask_mod, see docs/masks.md",
    "custom_mask": "write it as mask_mod, see docs/masks.md",
    "attn_bias": "write it as score_mod, see docs/masks.md",
    "alibi_slopes": "write it as score_mod, see docs/masks.md",
    "attention_chunk": "write it as mask_mod, see docs/masks.md",
    "block_sparse_tensors": "block_mask",
    "aux_tensors": "drop it: mask_mod and score_mod read tensors of their closure",
}


class AttentionPlanOptions(SharedOptions, total=False):
    """Options of `attention_plan`, and of `attention` but for `out`."""

    causal: Annotated[bool, False]
    q_scale: Annotated[Scale | None, None]
    q_offset: Annotated[int | torch.Tensor | None, None]
    cu_seqlens_q: Annotated[torch.Tensor | None, None]
    cu_seqlens_k: Annotated[torch.Tensor | None, None]
    max_seqlen_q: Annotated[int | None, None]
    rope: Annotated[tuple[torch.Tensor, torch.Tensor] | None, None]
    mask_mod: Annotated[MaskMod | None, None]
    score_mod: Annotated[ScoreMod | None, None]
    block_mask: Annotated[Any, None]
    pack_heads: Annotated[bool | None, None]
    config: Annotated[AttentionConfig | None, None]


class AttentionOptions(AttentionPlanOptions, total=False):
    """Options of `attention` that its overloads have in common."""

    out: Annotated[torch.Tensor | None, None]


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    normalize: Literal[True] = True, return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor: ...  # fmt: skip


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    normalize: Literal[True] = True, return_lse: Literal[True], **options: Unpack[AttentionOptions],
) -> WithLse: ...  # fmt: skip


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    normalize: Literal[False], return_lse: bool = False, **options: Unpack[AttentionOptions],
) -> Raw: ...  # fmt: skip


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    normalize: bool = True, return_lse: bool = False, **options: Unpack[AttentionOptions],
) -> torch.Tensor | WithLse | Raw: ...  # fmt: skip


@fronted(OTHER_NAMES)
@spelled(AttentionOptions)
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    normalize: bool = True, return_lse: bool = False, **options: Unpack[AttentionOptions],
) -> torch.Tensor | WithLse | Raw:  # fmt: skip
    """softmax(scale Q K^T + mask) V, as `fmha.reference.definition` defines it.

    The last dimension of every tensor is contiguous, other strides of q, k, v and out are multiples
    of 16 bytes: views are read in place. Query head h reads key head h // (Hq // Hkv).

    Row r of an entry of n_q queries and n_k keys has position q_offset + r. The row sees key c if
    begin <= c < end, or c < min(sink_tokens, end). With a window (left, right):
    begin = max(0, q_offset + r - left) and end = min(n_k, q_offset + r + right + 1).

    Args:
        q: [B, Sq, Hq, D], or packed [T, Hq, D] with cu_seqlens_q; bfloat16, float16 or
            float8_e4m3fn. (D, Dv) is one of `fmha.config.HEAD_DIMS`, or with mma.sync each is
            a multiple of 16 up to 512.
        k, v: [B, Skv, Hkv, D] and [B, Skv, Hkv, Dv] of q's dtype; packed [Tk, Hkv, ..] with
            cu_seqlens_k; or pages [pages, page_size, Hkv, ..] with page_table, page_size a
            multiple of 8, with mma.sync any number. Queries and keys choose independently. k and v
            may be float8_e4m3fn for D <= 256. q may then be float8_e4m3fn, or bfloat16: a bfloat16
            row is split into two e4m3 terms, exact for elements above 2^-9 of the row's maximum.
        causal: equivalent to right = 0.
        window: (left, right), keys visible before and after the query's position, None or
            -1 for unbounded; a number is left.
        tree: int64 [B, Sq], packed [T], where an entry has at most 64 queries, which are keys
            q_offset + j: bit j of a query's word says whether it sees query j. Keys before
            q_offset are visible within the window; causal says nothing more. The queries' own keys
            hold numbers, seen or not. The window's position of a query is q_offset plus the number
            of earlier queries that it sees, its depth. `kernelkit.trees` makes words of parents or
            of a mask.
        mask_mod: a function (b, h, q, k) that says whether query head h of entry b sees position k
            from position q, among the keys that other masks leave; q is at least 0. It is traced
            into the kernel: operators and functions of torch instead of Python's `if`, `and`, `or`
            and `not`. Tensors that it reads by index are read in place; indices are clamped to
            their shape. Values of keys that only a function hides are finite. A function is traced
            by every call; `fmha.trace_mask_mod` does it once. See docs/masks.md.
        score_mod: a function (score, b, h, q, k) of scale q.k that returns the score to use
            instead, in natural-log units, -inf to hide the key; `fmha.trace_score_mod` traces it
            once. It replaces softcap.
        block_mask: lists of key blocks that blocks of queries see as a whole or in part:
            FlexAttention's BlockMask, FlashAttention-4's block-sparse tensors, or
            `fmha.BlockLists`. Only listed blocks are read. A mask_mod, by default that of the
            BlockMask, is applied in blocks that are seen in part. Functions then count queries
            from 0. Sizes of blocks are multiples of the kernel's tiles: 256 x 128 fits all, 128 x
            128 all but head dim 256 on Blackwell. q, k and v are dense, and there is no other mask.
            A GPU does not check the numbers: a block is listed once, and one that ends behind the
            last key is seen in part.
        sink_tokens: number of first keys that are visible in addition to a left window.
        softcap: c > 0 turns a score s into c tanh(s / c); None or 0 does not.
        sinks: [Hq], any floating dtype, for each head a logit whose value is zero, below +inf; fp32
            is read in place, others are converted first. Beyond 2.36e38 in magnitude they act like
            that number, or like -inf.
        scale: multiplies q.k, from 1e-12 to 1e12; 1 / sqrt(D) by default.
        q_scale, k_scale, v_scale: scale factors of e4m3 queries, keys and values, a number or
            fp32 [1], or [Hq] or [Hkv], 1 by default; only the last is read in place: a number takes
            a small fill before the kernel, [1] a copy. Finite and of any sign: a factor of scores
            that is 0 gives all visible keys the same weight, a negative one negates the scores.
            An LSE beyond +-2^64 is right in sign only, and finite.
        q_offset: an int, or int32 [B]; n_k - n_q by default: the last query at the last key, not
            the first at the first. Where k is longer than what is filled, kv_lens or q_offset has
            to say so. Given without a right edge, end = min(n_k, q_offset + n_q): a prefix and a
            block of queries.
        kv_lens: int32 [B], keys that exist; what lies past them is never used.
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1], where each packed entry begins, and the last one
            ends.
        max_seqlen_q: queries of the longest packed entry, or a bound; None is T on a GPU, where the
            host does not wait for cu_seqlens_q. Rows of an entry beyond it stay unwritten.
        page_table: int32 [B, pages of an entry], with kv_lens.
        rope: (cos, sin), fp32 [positions, rope_dim / 2]: the last rope_dim columns of O are turned
            back by the angle of the row's position, pairs (x, y) of neighbours becoming
            (x cos + y sin, y cos - x sin).
        normalize: False returns raw sums, of which `fmha.merge` makes an O.
        return_lse: whether the LSE is returned, too.
        out: like q with Dv columns, where O is written.
        out_dtype: of O: bfloat16, float16, float32, float8_e4m3fn; by default that of out, else of
            q, or bfloat16 where q is e4m3, or float32 where O is raw.
        out_scale: divisor of an O in float8_e4m3fn, 1 by default. O / out_scale is rounded once, to
            nearest even, and saturated to +-448; NaN stays NaN. A number from 2^-126 on, which
            takes a small fill, or fp32 [] or [1], read in place; on a GPU a smaller one counts as
            2^-126. An O in float8_e4m3fn is not raw and needs compute capability 8.9.
        pack_heads: all query heads of a key head share query tiles; None: where that makes fewer.
        pdl: programmatic dependent launch: the kernel may begin before the previous kernel on the
            stream has ended.
        backend, arch: see `kernelkit.call.launch.choose_target`.
        config: its tunable fields (`fmha.config.TUNABLE`) replace those chosen by sizes; the
            arguments decide the other fields.

    Returns:
        O like q with Dv columns; with return_lse (O, LSE); with normalize=False (O_raw, LSE,
        row_max), where O_raw = sum exp(s - row_max) V and O = O_raw / exp(LSE - row_max). LSE and
        row_max are fp32 [B, Hq, Sq], packed [Hq, T], in natural log. The LSE includes sinks;
        row_max is the reference maximum that was used, which may lag the true one. A row that sees
        no key has O = 0, LSE = row_max = -inf, or LSE = its sink.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the value and the limit, before anything
            is compiled. The contents of integer tensors are checked on the CPU. On a GPU, where
            the host does not wait, kv_lens and positions in the rope tables are clamped, pages
            outside the pool read as zeros, and cu_seqlens and q_offset are taken as they are.

    Forward only. torch.compile sees one operator, `blackwell_kernels::attention`; CUDA graphs
    capture it.
    """
    if return_lse is not True and return_lse is not False:
        raise TypeError(f"return_lse is {return_lse!r}, expected bool")
    given = given_options(attention, {"normalize": normalize, **options}, _DEFAULTS)
    o, lse, row_max = ATTENTION(fields_of(q, k, v, given))
    if not normalize:
        return o, lse, row_max
    return (o, lse) if return_lse else o


_DEFAULTS = defaults_of(attention)
SCALES = {"q_scale": "q", "k_scale": "k", "v_scale": "k"}  # scale -> tensor with as many heads


@spelled(AttentionPlanOptions)
def attention_plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    normalize: bool = True, **options: Unpack[AttentionPlanOptions],
) -> Plan:  # fmt: skip
    """Prepare calls with these shapes: plan(q, k, v, kv_lens=, page_table=, ..., out=, lse=).

    The kernel is compiled here. A call of the plan then costs a few microseconds of host time: it
    compares shapes, strides, dtypes and devices with those planned, and launches.

    Args:
        q, k, v: as for `attention`. Without kv_lens and q_offset the last query is at the position
            of the last key of k.
        normalize, options: as for `attention`, without return_lse and out. Tables (kv_lens,
            q_offset, cu_seqlens_q, cu_seqlens_k, page_table, tree) are passed to each call by these
            names; sinks, scales and rope tables belong to the plan.

    Returns:
        The plan. A call of it returns (O, LSE, row_max); row_max is empty if O is normalised.

    Raises:
        TypeError, ValueError, NotImplementedError: as `attention`, and TypeError for return_lse and
            out.
    """
    for name in ("return_lse", "out"):
        if name in options:
            raise TypeError(
                f"attention_plan does not accept {name}: a call returns (O, LSE, row_max)"
            )
    require_names(attention, options, OTHER_NAMES)
    moves = (
        "q", "k", "v", "kv_lens", "q_offset", "cu_seqlens_q", "cu_seqlens_k", "page_table", "tree",
    )  # fmt: skip
    fields = fields_of(q, k, v, {"normalize": normalize, **options})
    return Plan(ATTENTION, fields, moves=moves, results=("out", "lse", "row_max"))


def fields_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Convert arguments of `attention` to fields of `fmha.arguments.Arguments`."""
    fields = shared_fields({"q": q, "k": k, "v": v, **options}, AttentionConfig, TUNABLE)
    spread_scales(fields, SCALES)
    rope = fields.pop("rope", None)
    if rope is not None:
        fields["cos"], fields["sin"] = _rope_tables(rope)
    if fields.get("block_mask") is not None:
        lists, function = block_lists(fields["block_mask"])
        given = dict(vars(lists))
        fields |= {"block_order": given.pop("order"), **given}
        if fields.get("mask_mod") is None:
            fields["mask_mod"] = function
    fields.pop("block_mask", None)
    for name, trace in (("mask", trace_mask_mod), ("score", trace_score_mod)):
        function = fields.pop(f"{name}_mod", None)
        if function is not None:
            mod = trace(function)
            fields[f"{name}_mod"], fields[f"{name}_tables"] = mod.program, mod.tables
    if "q_offset" in fields:
        fields["q_offset"] = _offsets(fields["q_offset"], q, fields.get("cu_seqlens_q"))
    return fields


def _rope_tables(rope: object) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(rope, tuple | list) or len(rope) != 2:
        raise TypeError(f"rope is {type(rope).__name__}, expected two tables (cos, sin)")
    if rope[0] is None and rope[1] is None:
        raise TypeError("rope is (None, None), expected two tables (cos, sin), or None for no rope")
    return rope[0], rope[1]


def _offsets(
    q_offset: int | torch.Tensor | None, q: torch.Tensor, cu_seqlens_q: torch.Tensor | None
) -> torch.Tensor | None:
    """Return int32 [B]; a number is filled in on the device, so no host memory is copied."""
    if q_offset is None or isinstance(q_offset, torch.Tensor):
        return q_offset
    if not isinstance(q_offset, Integral) or isinstance(q_offset, bool):
        raise TypeError(f"q_offset is {type(q_offset).__name__}, expected an int or a tensor")
    q_offset = int(q_offset)
    if not -MAX_POSITION < q_offset < MAX_POSITION:
        raise ValueError(f"q_offset {q_offset}: within +-{MAX_POSITION - 1}")
    counted, name = (q, "q") if cu_seqlens_q is None else (cu_seqlens_q, "cu_seqlens_q")
    require_type(name, counted, torch.Tensor)
    entries = counted.shape[0] if counted.ndim else 0  # what is no table is refused by its rank
    batch = entries if cu_seqlens_q is None else max(entries - 1, 0)
    return torch.full((batch,), q_offset, dtype=torch.int32, device=q.device)
