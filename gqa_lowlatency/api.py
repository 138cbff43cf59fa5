"""`decode` and `decode_plan`: the public functions that call the operator or make a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, overload

import torch

from gqa_lowlatency.config import TUNABLE, DecodeConfig
from gqa_lowlatency.launch import DECODE, launched, prepare
from kernelkit.attention import (
    SHARED_NAMES,
    SharedOptions,
    WithLse,
    shared_fields,
    spread_scales,
)
from kernelkit.call.front import defaults_of, fronted, given_options, require_names, spelled
from kernelkit.call.operator import Operator
from kernelkit.call.prepared import Plan
from kernelkit.call.tape import Results

if TYPE_CHECKING:
    from typing_extensions import Unpack

SCALES = {"k_scale": "k", "v_scale": "k"}  # scale -> the input with as many heads


OTHER_NAMES = SHARED_NAMES | {
    "max_seqlen_k": "max_kv_len",
    "max_seq_len": "max_kv_len",
    "num_splits": "parts",
    "cache_leftpad": "first_keys",
    "q_descale": "multiply scale= by it",
    "q_scale": "multiply scale= by it",
    "pack_gqa": "drop it: query heads of a KV head always share its keys",
}


class DecodePlanOptions(SharedOptions, total=False):
    """Options of `decode_plan`, and of `decode` but for `out`."""

    causal: Annotated[bool, True]
    first_keys: Annotated[torch.Tensor | None, None]
    max_kv_len: Annotated[int | None, None]
    kv_ready_before_pdl: Annotated[bool, False]
    batch_invariant: Annotated[bool, False]
    parts: Annotated[int, 0]
    config: Annotated[DecodeConfig | None, None]


class DecodeOptions(DecodePlanOptions, total=False):
    """Options of `decode` that its overloads have in common."""

    out: Annotated[torch.Tensor | None, None]


@overload
def decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    return_lse: Literal[False] = False, **options: Unpack[DecodeOptions],
) -> torch.Tensor: ...  # fmt: skip


@overload
def decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    return_lse: Literal[True], **options: Unpack[DecodeOptions],
) -> WithLse: ...  # fmt: skip


@overload
def decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    return_lse: bool = False, **options: Unpack[DecodeOptions],
) -> torch.Tensor | WithLse: ...  # fmt: skip


@fronted(OTHER_NAMES)
@spelled(DecodeOptions)
def decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    return_lse: bool = False, **options: Unpack[DecodeOptions],
) -> torch.Tensor | WithLse:  # fmt: skip
    """softmax(scale Q K^T + mask) V of the newest tokens over a cache of keys and values.

    The last dimension of every tensor is contiguous, other strides of q, k, v and out are multiples
    of 16 bytes: views are read in place. Query head h reads KV head h // (Hq // Hkv).

    Args:
        q: [B, T, Hq, D], T from 1 to 8 tokens, or [B, Hq, D] for one; bfloat16 or float16, D one
            of `gqa_lowlatency.config.HEAD_DIMS`.
        k, v: [B, S, Hkv, D] of q's dtype or, from compute capability 8.9 on, float8_e4m3fn; with
            page_table pages [pages, page_size, Hkv, D], page_size any number; on sm_100a an even
            one for e4m3 with D = 64.
        kv_lens: int32 [B], keys of each entry, including the T query tokens: token t has position
            kv_lens - T + t. The cache may be longer; the rest is never used. None is all of S, and
            the last token then has position S - 1: pass kv_lens if less of a cache is filled. An
            entry may have no keys, or fewer than T.
        first_keys: int32 [B], first key of each entry, for example after padding on the left. No
            token sees earlier keys. They are not read, nor are pages that hold only such keys. Not
            with sink_tokens.
        page_table: int32 [B, pages of an entry], with kv_lens.
        max_kv_len: a bound on kv_lens that decides how many CTAs share the keys of a KV head; None
            is what the cache can hold. A captured launch is right for all lengths up to S.
        causal: a token sees no key after its position; False: it sees all keys of the entry.
        tree: int64 [B, T], or [B] where q has no T: bit j of a token's word says whether it sees
            query token j. Keys before the query tokens are visible within the window; causal says
            nothing more. The tokens' keys hold numbers, seen or not. The window's position of a
            token is kv_lens - T plus the number of earlier query tokens that it sees, its depth.
            `kernelkit.trees` makes words of parents or of a mask; `fmha.attention` takes up to 64
            tokens.
        window: keys visible before the token's position, or (left, right) as for
            `fmha.attention`, where right is None or, with causal, 0; None or -1 for all. Keys
            and pages that no token sees are not read and may hold NaN.
        sink_tokens: number of first keys that are visible in addition to a window.
        softcap: c > 0 turns a score s into c tanh(s / c); None or 0 does not.
        sinks: [Hq], any floating dtype, for each head a logit whose value is zero, below +inf; fp32
            is read in place, others are converted first. Beyond 2.36e38 in magnitude they act like
            that number, or like -inf.
        scale: multiplies q.k, from 1e-12 to 1e12; 1 / sqrt(D) by default.
        k_scale, v_scale: scale factors of e4m3 keys and values, a number or fp32 [1] or [Hkv], 1
            by default. Only [Hkv] is read in place: a number costs a small fill before the kernel,
            [1] a copy. Finite and of any sign, see `fmha.attention`.
        return_lse: whether the LSE is returned, too.
        out: like q, where O is written.
        out_dtype: of O: bfloat16, float16, float32 or, from compute capability 8.9 on,
            float8_e4m3fn; by default that of out, else of q.
        out_scale: divisor of an O in float8_e4m3fn, 1 by default, see `fmha.attention`.
        pdl: programmatic dependent launch: the kernel may begin before the previous kernel on the
            stream has ended; from compute capability 9.0 on.
        kv_ready_before_pdl: the previous kernel writes none of k, v, kv_lens, page_table and tree,
            so that they are read at once; all other inputs wait for it.
        batch_invariant: the bits of an entry depend on its own tensors, length and max_kv_len
            only, whatever else is in the batch.
        parts: num_splits of other libraries: clusters that share a KV head and merge through a
            workspace in global memory, up to 64; 0 chooses: 1 unless there are few KV heads and
            many keys, and on compute capabilities 8.x and 12.x as many as fill the GPU.
        backend, arch: see `kernelkit.call.launch.choose_target`.
        config: its tunable fields (`gqa_lowlatency.config.TUNABLE`) replace those chosen by sizes.
            The default cluster of 1 also counts as chosen; 0 leaves it to the sizes.

    Returns:
        O like q, or (O, LSE) with return_lse; LSE [B, Hq, T], or [B, Hq] where q has no T, fp32 in
        natural log, sinks included. A token that sees no key has O = 0 and LSE = -inf, or LSE = its
        sink.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the value and the limit, before anything
            is compiled. The contents of integer tensors are checked on the CPU; on a GPU, where
            the host does not wait, they are taken as they are.

    On a GPU a call whose layouts and options are those of one of the last 64 of its thread costs
    the host a tenth of the first. Forward only. torch.compile sees one operator,
    `blackwell_kernels::decode`; CUDA graphs capture it.
    """
    if return_lse is not True and return_lse is not False:
        raise TypeError(f"return_lse is {return_lse!r}, expected bool")
    o, lse = DECODE(fields_of(q, k, v, given_options(decode, options, _DEFAULTS)))
    return (o, lse) if return_lse else o


_DEFAULTS = defaults_of(decode)


class DecodePlan(Plan):
    """Plan of a decode step with fixed sizes, made by `decode_plan`.

    config: the compiled config.
    """

    config: DecodeConfig

    def first_call(self, operator: Operator, flat: dict[str, Any]) -> Results:
        """Run all checks, and keep the resulting config."""
        arguments = operator.schema.build(flat)
        arguments, target, decision = prepare(arguments)
        self.config = decision.config
        return launched(arguments, target, decision)


@spelled(DecodePlanOptions)
def decode_plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Unpack[DecodePlanOptions]
) -> DecodePlan:
    """Prepare decode steps with these shapes. Calling the plan then costs a few microseconds of
    host time.

    A call compares shapes, strides, dtypes and devices with those planned, puts the new addresses
    into arguments that were made here, and launches.

    Args:
        q, k, v: as for `decode`. Without kv_lens the last token has the position of the last key of
            k.
        options: as for `decode`, without return_lse and out, which belong to a call. Sinks and
            scales belong to the plan. Their contents may change in place, except those of a number.

    Returns:
        The plan. plan(q, k, v, kv_lens=, page_table=, out=, lse=) returns (O, LSE) like `decode`,
        in out and lse if given. A call needs the tables that the plan was made with, and raises
        ValueError for a tensor with a different layout.

    Raises:
        TypeError, ValueError, NotImplementedError: as `decode`, all of whose checks are made here;
            the kernel is compiled here.
    """
    for name in ("return_lse", "out"):
        if name in options:
            raise TypeError(
                f"decode_plan does not accept {name}: a call of the plan returns (O, LSE)"
            )
    require_names(decode, options, OTHER_NAMES)
    moves = ("q", "k", "v", "kv_lens", "first_keys", "page_table", "tree")
    return DecodePlan(DECODE, fields_of(q, k, v, options), moves=moves, results=("out", "lse"))


def fields_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Convert arguments of `decode` to fields of `gqa_lowlatency.arguments.Arguments`."""
    fields = shared_fields({"q": q, "k": k, "v": v, **options}, DecodeConfig, TUNABLE)
    if isinstance(options.get("config"), DecodeConfig):
        fields["cluster"] = options["config"].cluster  # the default, 1, also counts as chosen
    spread_scales(fields, SCALES)
    return fields
