"""`decode`, `sparse_decode`, `sparse_prefill`, and `decode_plan`: the public functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, overload

import torch

from kernelkit.attention import SHARED_NAMES, WithLse
from kernelkit.call.front import defaults_of, fronted, given_options, require_names, spelled
from kernelkit.call.operator import Operator
from kernelkit.call.prepared import Plan
from kernelkit.call.tape import Results
from kernelkit.call.tensors import require_type
from kvcache.checks import require
from kvcache.layouts.records import Record
from kvcache.layouts.rows import Rows
from mla.attention.arguments import Listed
from mla.attention.choose import Decision
from mla.attention.codec import form_of
from mla.attention.launch import DECODE, SPARSE, launched, prepare

if TYPE_CHECKING:
    from typing_extensions import Unpack

OTHER_NAMES = SHARED_NAMES | {
    "attn_sink": "sinks",
    "max_seqlen_k": "max_kv_len",
    "max_seq_len": "max_kv_len",
    "num_splits": "parts",
    "softcap": "attention to latent keys has no softcap",
    "logits_soft_cap": "attention to latent keys has no softcap",
    "soft_cap": "attention to latent keys has no softcap",
    "topk_length": "counts",
    "extra_k_cache": "extra",
    "extra_indices_in_kvcache": "extra_indices",
    "extra_topk_length": "extra_counts",
    "indices_in_kvcache": "indices",
    "head_dim_v": "drop it: V is the first 512 columns of an entry",
    "tile_scheduler_metadata": "drop it: decode_plan prepares calls",
    "k_scale": "kv_scale",
    "v_scale": "kv_scale",
    "window": "attention to latent keys has no window: list the entries, or shorten kv_lens",
}


class CommonOptions(TypedDict, total=False):
    """Options of all functions but for `out`."""

    sinks: Annotated[torch.Tensor | None, None]
    scale: Annotated[float | None, None]
    batch_invariant: Annotated[bool, False]
    cluster: Annotated[int, 0]
    parts: Annotated[int, 0]
    kernel: Annotated[str, "auto"]
    pdl: Annotated[bool, False]
    backend: Annotated[str, "auto"]
    arch: Annotated[str | None, None]


class DecodePlanOptions(CommonOptions, total=False):
    """Options of `decode_plan`, and of `decode` but for `out`."""

    page_table: Annotated[torch.Tensor | None, None]
    kv_lens: Annotated[torch.Tensor | None, None]
    causal: Annotated[bool, True]
    kv_scale: Annotated[torch.Tensor | None, None]
    max_kv_len: Annotated[int | None, None]


class DecodeOptions(DecodePlanOptions, total=False):
    """Options of `decode`."""

    out: Annotated[torch.Tensor | None, None]


class SparseOptions(CommonOptions, total=False):
    """Options of `sparse_decode` and `sparse_prefill`."""

    counts: Annotated[torch.Tensor | None, None]
    extra: Annotated[Rows | torch.Tensor | None, None]
    extra_indices: Annotated[torch.Tensor | None, None]
    extra_counts: Annotated[torch.Tensor | None, None]
    rope: Annotated[tuple[torch.Tensor, torch.Tensor] | None, None]
    positions: Annotated[torch.Tensor | None, None]
    out: Annotated[torch.Tensor | None, None]


@overload
def decode(
    q: torch.Tensor, kv: torch.Tensor, *,
    return_lse: Literal[False] = False, **options: Unpack[DecodeOptions],
) -> torch.Tensor: ...  # fmt: skip


@overload
def decode(
    q: torch.Tensor, kv: torch.Tensor, *,
    return_lse: Literal[True], **options: Unpack[DecodeOptions],
) -> WithLse: ...  # fmt: skip


@overload
def decode(
    q: torch.Tensor, kv: torch.Tensor, *,
    return_lse: bool = False, **options: Unpack[DecodeOptions],
) -> torch.Tensor | WithLse: ...  # fmt: skip


@fronted(OTHER_NAMES)
@spelled(DecodeOptions)
def decode(
    q: torch.Tensor, kv: torch.Tensor, *,
    return_lse: bool = False, **options: Unpack[DecodeOptions],
) -> torch.Tensor | WithLse:  # fmt: skip
    """softmax(scale Q K^T + mask) V of the newest tokens over a paged cache of latent entries.

    An entry has 576 columns, one for all heads: K is all of them, V the first 512 (DeepSeek-V3,
    Kimi K2, GLM). One launch. The last dimension of every tensor is contiguous, other strides of q,
    kv and out are multiples of 16 bytes.

    Args:
        q: bf16 [B, T, H, 576], or [B, H, 576] for one token; T from 1 to 64, H from 1 to 128.
        kv: [pages, page_size, 576] or [pages, page_size, 1, 576], bf16 or, from compute capability
            8.9 on, float8_e4m3fn; page_size from 1 to 256.
        page_table: int32 [B, pages of an entry]; required. A page that kv does not have holds no
            keys on a GPU, and raises ValueError on the CPU.
        kv_lens: int32 [B], keys of each entry, including the T query tokens: token t has position
            kv_lens - T + t. None is all that the table has room for. An entry may have no keys.
        causal: a token sees no key after its position; False: it sees all keys of the entry.
        scale: multiplies q.k, from 1e-12 to 1e12; 576 ** -0.5 by default, which models replace.
        sinks: fp32 [H], for each head a logit whose value is zero, below +inf.
        kv_scale: fp32 [1], factor of entries in e4m3, above 0.
        max_kv_len: a bound on kv_lens that decides how many CTAs share the keys of an entry; None
            is what the table has room for.
        batch_invariant: the bits of an entry depend on its own tensors, length and max_kv_len
            only, whatever else is in the batch.
        cluster: CTAs of a cluster that share the keys of an entry; 0 chooses; 1 for kernel 'warp'.
        parts: clusters that share an entry and merge through a workspace, up to 64; 0 chooses.
        kernel: 'auto', 'warp' (mma.sync, any GPU) or 'wgmma' (Hopper).
        pdl: programmatic dependent launch; from compute capability 9.0 on.
        return_lse: whether the LSE is returned, too.
        out: bf16 [B, T, H, 512] or [B, H, 512], where O is written.
        backend, arch: see `kernelkit.call.launch.choose_target`.

    Returns:
        O, bf16 [B, T, H, 512] or [B, H, 512], or (O, LSE) with return_lse; LSE [B, H, T] or [B, H],
        fp32 in natural log, of the keys alone: sinks change O and not the LSE. A token that sees no
        key has O = 0 and LSE = -inf.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the value and the limit, before anything
            is compiled. The contents of integer tensors are checked on the CPU.
    """
    _require_flag(return_lse)
    o, lse = DECODE(dense_fields(q, kv, given_options(decode, options, _DENSE)))
    return (o, lse) if return_lse else o


@overload
def sparse_decode(
    q: torch.Tensor, rows: Rows | torch.Tensor, indices: torch.Tensor, *,
    return_lse: Literal[False] = False, **options: Unpack[SparseOptions],
) -> torch.Tensor: ...  # fmt: skip


@overload
def sparse_decode(
    q: torch.Tensor, rows: Rows | torch.Tensor, indices: torch.Tensor, *,
    return_lse: Literal[True], **options: Unpack[SparseOptions],
) -> WithLse: ...  # fmt: skip


@overload
def sparse_decode(
    q: torch.Tensor, rows: Rows | torch.Tensor, indices: torch.Tensor, *,
    return_lse: bool = False, **options: Unpack[SparseOptions],
) -> torch.Tensor | WithLse: ...  # fmt: skip


@fronted(OTHER_NAMES)
@spelled(SparseOptions)
def sparse_decode(
    q: torch.Tensor, rows: Rows | torch.Tensor, indices: torch.Tensor, *,
    return_lse: bool = False, **options: Unpack[SparseOptions],
) -> torch.Tensor | WithLse:  # fmt: skip
    """softmax(scale Q K^T, sink) V of each token over the entries that it lists.

    Entries are read as they are stored and dequantised in the kernel, in one launch. An optional
    second cache takes part in the same softmax.

    Args:
        q: bf16 [T, H, D] or [B, T, H, D], H from 1 to 128; D is the number of columns of an entry.
        rows: the cache. `kvcache.Rows` of BF16_512, FP8_584, FP8_528 or FP4_288 (D = 512), or of
            FP8_656 or a bf16 record of 1,152 bytes (D = 576); or bf16 [pages, page_size, D] or
            [pages, page_size, 1, D]. Records in e4m3 need compute capability 8.9.
        indices: int32 or int64 [T, k] or [B, T, k], entries page * page_size + row in any order.
            Any number that is no entry of the cache, such as -1, is skipped; an entry that is
            listed twice counts twice.
        counts: int32 [T] or [B, T]: token t reads the first counts[t] of its indices; None: all k.
        extra, extra_indices, extra_counts: a second cache with as many columns, perhaps of another
            record and page size, and the entries that each token lists of it.
        rope: (cos, sin), fp32 [positions, 32]: the last 64 columns of O are rotated back.
        positions: int64 [T] or [B, T], rows of these tables; with rope. On a GPU others count as
            the first or the last row.
        scale: multiplies q.k, from 1e-12 to 1e12; D ** -0.5 by default.
        sinks: fp32 [H], for each head a logit whose value is zero, below +inf.
        batch_invariant, cluster, parts, kernel, pdl, return_lse, backend, arch: as of `decode`; the
            split of a token depends on k alone if batch_invariant.
        out: bf16, like q with 512 columns, where O is written.

    Returns:
        O, bf16 like q with 512 columns, or (O, LSE) with return_lse; LSE [T, H] or [B, H, T], fp32
        in natural log, of the keys alone. A token without entries has O = 0 and LSE = -inf.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the value and the limit, before anything
            is compiled. Counts and positions are checked on the CPU.
    """
    _require_flag(return_lse)
    given = given_options(sparse_decode, options, _SPARSE)
    o, lse = SPARSE(sparse_fields(q, rows, indices, given))
    return (o, lse) if return_lse else o


@overload
def sparse_prefill(
    q: torch.Tensor, rows: Rows | torch.Tensor, indices: torch.Tensor, *,
    return_lse: Literal[False] = False, **options: Unpack[SparseOptions],
) -> torch.Tensor: ...  # fmt: skip


@overload
def sparse_prefill(
    q: torch.Tensor, rows: Rows | torch.Tensor, indices: torch.Tensor, *,
    return_lse: Literal[True], **options: Unpack[SparseOptions],
) -> WithLse: ...  # fmt: skip


@overload
def sparse_prefill(
    q: torch.Tensor, rows: Rows | torch.Tensor, indices: torch.Tensor, *,
    return_lse: bool = False, **options: Unpack[SparseOptions],
) -> torch.Tensor | WithLse: ...  # fmt: skip


@fronted(OTHER_NAMES)
@spelled(SparseOptions)
def sparse_prefill(
    q: torch.Tensor, rows: Rows | torch.Tensor, indices: torch.Tensor, *,
    return_lse: bool = False, **options: Unpack[SparseOptions],
) -> torch.Tensor | WithLse:  # fmt: skip
    """`sparse_decode` for many tokens: no token's entries are divided over CTAs.

    Args:
        q, rows, indices, return_lse, options: as of `sparse_decode`.

    Returns:
        O, or (O, LSE), as of `sparse_decode`.

    Raises:
        TypeError, ValueError, NotImplementedError: as `sparse_decode`.
    """
    _require_flag(return_lse)
    given = given_options(sparse_prefill, options, _SPARSE)
    o, lse = SPARSE(sparse_fields(q, rows, indices, given) | {"many": True})
    return (o, lse) if return_lse else o


_DENSE, _SPARSE = defaults_of(decode), defaults_of(sparse_decode)


class DecodePlan(Plan):
    """Plan of a decode step with fixed sizes, made by `decode_plan`.

    decision: the compiled config, the kernel, and the division of the keys.
    """

    decision: Decision

    def first_call(self, operator: Operator, flat: dict[str, Any]) -> Results:
        """Run all checks, and keep the resulting decision."""
        arguments = operator.schema.build(flat)
        target, self.decision = prepare(arguments)
        return launched(arguments, target, self.decision)

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.decision.config.cluster

    @property
    def parts(self) -> int:
        """Clusters that share an entry."""
        return self.decision.parts

    @property
    def grid(self) -> int:
        """CTAs of the launch."""
        return self.decision.grid

    @property
    def workspace_bytes(self) -> int:
        """Bytes of memory besides arguments and results."""
        return self.decision.workspace_bytes


@spelled(DecodePlanOptions)
def decode_plan(
    q: torch.Tensor, kv: torch.Tensor, **options: Unpack[DecodePlanOptions]
) -> DecodePlan:
    """Prepare decode steps with these shapes. Calling the plan then costs a few microseconds of
    host time.

    Args:
        q, kv: as for `decode`.
        options: as for `decode`, without return_lse and out, which belong to a call. Sinks and
            kv_scale belong to the plan; their contents may change in place.

    Returns:
        The plan. plan(q, kv, page_table=, kv_lens=, out=, lse=) returns (O, LSE) like `decode`, in
        out and lse if given. `plan.cluster`, `plan.parts`, `plan.grid` and `plan.workspace_bytes`
        describe the launch.

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
    moves = ("q", "kv", "page_table", "kv_lens")
    return DecodePlan(DECODE, dense_fields(q, kv, options), moves=moves, results=("out", "lse"))


def dense_fields(q: torch.Tensor, kv: torch.Tensor, options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments of `decode` to fields of `arguments.Dense`."""
    if options.get("page_table") is None:
        raise TypeError("decode needs page_table=: int32 [B, pages of an entry]")
    return {"q": q, "kv": kv, **options}


def sparse_fields(
    q: torch.Tensor,
    rows: Rows | torch.Tensor,
    indices: torch.Tensor,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Convert arguments of `sparse_decode` to fields of `arguments.Sparse`."""
    fields = dict(options)
    fields |= {"q": q, "keys": _listed("rows", rows, indices, fields.pop("counts", None))}
    extra, others = fields.pop("extra", None), ("extra_indices", "extra_counts")
    extra_indices, extra_counts = (fields.pop(name, None) for name in others)
    if extra is None and (extra_indices is not None or extra_counts is not None):
        raise TypeError("extra_indices and extra_counts belong to extra, which is None")
    if extra is not None:
        if extra_indices is None:
            raise TypeError("extra needs extra_indices")
        fields["extra"] = _listed("extra", extra, extra_indices, extra_counts)
    rope = fields.pop("rope", None)
    if rope is not None:
        if not isinstance(rope, tuple | list) or len(rope) != 2:
            raise TypeError(f"rope is {type(rope).__name__}, expected two tables (cos, sin)")
        fields["cos"], fields["sin"] = rope
    return fields


def _listed(
    name: str, rows: Rows | torch.Tensor, indices: torch.Tensor, counts: torch.Tensor | None
) -> Listed:
    """Return a cache and its entries as fields of an operator."""
    prefix = "" if name == "rows" else f"{name}_"
    require_type(f"{prefix}indices", indices, torch.Tensor)
    require_type(f"{prefix}counts", counts, torch.Tensor, optional=True)
    if isinstance(rows, torch.Tensor):
        return Listed(rows, indices, counts)
    if not isinstance(rows, Rows):
        raise TypeError(f"{name} is {type(rows).__name__}, expected kvcache.Rows or torch.Tensor")
    require(f"{name}.record", rows.record, Record)
    form_of(rows.record)
    offsets = rows.data_offset, rows.scale_offset
    return Listed(rows.pool, indices, counts, rows.record.name, rows.rows, *offsets)


def _require_flag(return_lse: object) -> None:
    """Raise TypeError for a return_lse that is no bool."""
    if return_lse is not True and return_lse is not False:
        raise TypeError(f"return_lse is {return_lse!r}, expected bool")
