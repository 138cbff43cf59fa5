"""Arguments of `attention`, and every check that needs no config.

Shapes, dtypes and options are checked everywhere. The contents of tensors (lengths, offsets, page
numbers) are checked only on the CPU; on a GPU the check would make the host wait. On a GPU the
kernel clamps lengths and rope positions, pages outside the pool read as zeros, and offsets are
used as they are. No check makes a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from fmha.blocks import seen_blocks
from fmha.config import (
    FP8,
    IO_DTYPES,
    PORTABLE_DIMS,
    Q_DTYPES_OF_FP8,
    Tuning,
    check_head_dims,
)
from kernelkit.attention import AttentionArguments
from kernelkit.call.tensors import INPUT_NAMES, require_pages, require_rank, require_table
from kernelkit.plan.limits import MAX_POSITION


@dataclass(frozen=True)
class Arguments(Tuning, AttentionArguments):
    """Arguments of the op `blackwell_kernels::attention`, documented at `fmha.attention`.

    q_offset: always a tensor.
    cos, sin: the tables of `rope`.
    mask_mod, score_mod: programs of `fmha.mods`, '' for none.
    mask_tables, score_tables: tensors that the programs read.
    block_counts to block_order: see `fmha.blocks.BlockLists`; None and 0 without a block mask.
    """

    q_scale: torch.Tensor | None = None
    q_offset: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    normalize: bool = True
    pack_heads: bool | None = None
    mask_mod: str = ""
    score_mod: str = ""
    mask_tables: tuple[torch.Tensor, ...] = ()
    score_tables: tuple[torch.Tensor, ...] = ()
    block_counts: torch.Tensor | None = None
    block_indices: torch.Tensor | None = None
    full_counts: torch.Tensor | None = None
    full_indices: torch.Tensor | None = None
    block_rows: int = 0
    block_keys: int = 0
    block_order: torch.Tensor | None = None

    @property
    def batch(self) -> int:
        """Batch entries."""
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def heads_of_blocks(self) -> int:
        """Heads with block lists of their own; 1 if all heads share them."""
        if self.block_counts is None or self.full_counts is None:
            return 1
        return max(self.block_counts.shape[1], self.full_counts.shape[1])

    @property
    def queries(self) -> int:
        """Queries of an entry, or of all entries together if they are packed."""
        return self.q.shape[-3]

    @property
    def o_dtype(self) -> torch.dtype:
        """dtype of O."""
        if self.out is not None:
            return self.out.dtype
        return self.own_o_dtype if self.out_dtype is None else self.out_dtype

    @property
    def own_o_dtype(self) -> torch.dtype:
        """Default dtype of O: raw sums leave the range of fp16."""
        if not self.normalize:
            return torch.float32
        return torch.bfloat16 if self.q.dtype == torch.float8_e4m3fn else self.q.dtype

    def check(self) -> None:
        """Raise TypeError, ValueError or NotImplementedError, naming the value and the limit."""
        q, k, v = self.q, self.k, self.v
        _check_tokens(self)
        q_heads, kv_heads = q.shape[-2], k.shape[-2]
        scaled = {"q_scale": (q, q_heads), "k_scale": (k, kv_heads), "v_scale": (v, kv_heads)}
        self.check_shared(self.batch, (*q.shape[:-1], v.shape[-1]), self.o_dtype, scaled)
        capacity = self.capacity
        _check_sizes(self, capacity)
        _check_tables(self)
        _check_options(self)
        if self.block_counts is not None:
            _check_blocks(self)
        if q.device.type == "cpu":
            _check_contents(self, capacity)


def token_layouts(arguments: Arguments) -> dict[str, str]:
    """Return the dimensions of q, k and v as text."""
    keys = "[B, Skv, Hkv, {}]"
    if arguments.page_table is not None:
        keys = "[pages, page_size, Hkv, {}]"
    elif arguments.cu_seqlens_k is not None:
        keys = "[Tk, Hkv, {}]"
    queries = "[B, Sq, Hq, D]" if arguments.cu_seqlens_q is None else "[T, Hq, D]"
    return {"q": queries, "k": keys.format("D"), "v": keys.format("Dv")}


def _check_tokens(arguments: Arguments) -> None:
    q, k, v = arguments.q, arguments.k, arguments.v
    if arguments.page_table is not None and arguments.cu_seqlens_k is not None:
        raise ValueError("page_table conflicts with cu_seqlens_k: both locate the keys. Pass one")
    for name, layout in token_layouts(arguments).items():
        require_rank(name, getattr(arguments, name), layout)
    is_fp8 = k.dtype == torch.float8_e4m3fn
    q_dtypes = Q_DTYPES_OF_FP8 if is_fp8 else IO_DTYPES
    if len({k.dtype, v.dtype} if is_fp8 else {q.dtype, k.dtype, v.dtype}) > 1:
        raise TypeError(f"q {q.dtype}, k {k.dtype} and v {v.dtype} differ in dtype")
    if INPUT_NAMES.get(q.dtype) not in q_dtypes:
        with_keys = f" with keys in {FP8}" if is_fp8 else ""
        raise NotImplementedError(f"dtype {q.dtype} of q{with_keys}: supported are {q_dtypes}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} differ in shape")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q has head_dim {q.shape[-1]}, k has {k.shape[-1]}")
    if q.shape[-1] not in PORTABLE_DIMS or v.shape[-1] not in PORTABLE_DIMS:
        check_head_dims(q.shape[-1], v.shape[-1])
    if arguments.page_table is not None and not k.shape[1]:
        raise ValueError("pages of 0 rows: at least 1")
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        starts = getattr(arguments, name)
        if starts is not None:
            require_table(name, starts, torch.int32, (None,))
            if starts.shape[0] == 0:
                raise ValueError(f"{name} is empty, expected the B + 1 starts of B entries")


def _check_sizes(arguments: Arguments, capacity: int) -> None:
    """Check that all arguments agree on the number of entries, and that positions fit in int32."""
    batch = arguments.batch
    if arguments.cu_seqlens_k is not None:
        require_table("cu_seqlens_k", arguments.cu_seqlens_k, torch.int32, (batch + 1,))
    elif arguments.page_table is None and arguments.k.shape[0] != batch:
        raise ValueError(f"q has batch {batch}, k and v have {arguments.k.shape[0]}")
    if arguments.q_offset is not None:
        require_table("q_offset", arguments.q_offset, torch.int32, (batch,))
    sizes = {"queries": arguments.queries, "keys of an entry": capacity}
    for name, size in sizes.items():
        if size >= MAX_POSITION:
            raise ValueError(f"{size} {name}, limit {MAX_POSITION - 1} (int32 positions)")


def _check_tables(arguments: Arguments) -> None:
    if arguments.o_dtype == torch.float8_e4m3fn and not arguments.normalize:
        raise ValueError(
            f"out_dtype {arguments.o_dtype} with normalize=False: raw sums leave its range. Pass "
            "float32, and quantise the merged O"
        )
    if arguments.sinks is not None and not arguments.normalize:
        raise ValueError("sinks with normalize=False: sinks add to a denominator, a raw O has none")
    cos, sin = arguments.cos, arguments.sin
    if (cos is None) != (sin is None):
        raise ValueError("rope has two tables (cos, sin), one of them is None")
    if cos is not None and sin is not None:
        require_table("cos", cos, torch.float32, (None, None))
        require_table("sin", sin, torch.float32, tuple(cos.shape))
        if cos.numel() == 0:
            raise ValueError(f"rope tables of shape {tuple(cos.shape)} hold no position")


def _check_options(arguments: Arguments) -> None:
    longest = arguments.max_seqlen_q
    if longest is not None and arguments.cu_seqlens_q is None:
        raise ValueError(f"max_seqlen_q {longest} without cu_seqlens_q: only for packed queries")
    if longest is not None and longest < 0:
        raise ValueError(f"max_seqlen_q {longest}: at least 0")
    if arguments.tree is not None:
        _check_tree(arguments)


def _check_tree(arguments: Arguments) -> None:
    """Raise for words of a tree that are no table, or for too many queries of an entry."""
    tokens, remedy = arguments.queries, ""
    if arguments.cu_seqlens_q is not None:
        remedy = "; max_seqlen_q says how many the longest entry has"
        if arguments.max_seqlen_q is not None:
            tokens = min(tokens, arguments.max_seqlen_q)
        elif arguments.on_host:
            lengths = entry_lengths("cu_seqlens_q", arguments.cu_seqlens_q, tokens)
            tokens = max(lengths, default=0)
    arguments.check_tree(tuple(arguments.q.shape[:-2]), tokens, remedy)
    if arguments.cos is not None:
        raise NotImplementedError("tree with rope: rows of O are turned back by their number")


# Arguments that say what a row sees, or where keys are, as a block mask does.
WITHOUT_BLOCKS = (
    *("causal", "window_left", "window_right", "tree", "sink_tokens", "q_offset", "kv_lens"),
    *("page_table", "cu_seqlens_q", "cu_seqlens_k"),
)


def _check_blocks(arguments: Arguments) -> None:
    """Raise for a block mask whose lists do not fit, or that another argument contradicts."""
    for name in WITHOUT_BLOCKS:
        value = getattr(arguments, name)
        if value is not None and value is not False and not (name == "sink_tokens" and value == 0):
            raise NotImplementedError(
                f"block_mask with {name}: express it by mask_mod and the lists of blocks"
            )
    rows, keys = arguments.block_rows, arguments.block_keys
    if min(rows, keys) < 1:
        raise ValueError(f"block_mask with blocks of {rows} x {keys}: at least 1 x 1")
    heads, batch = arguments.q_heads, arguments.batch
    blocks = -(-arguments.queries // rows)
    for kind in ("block", "full"):
        counts, indices = (getattr(arguments, f"{kind}_{name}") for name in ("counts", "indices"))
        require_table(f"{kind}_counts", counts, torch.int32, (None, None, None))
        require_table(f"{kind}_indices", indices, torch.int32, (*counts.shape, None))
        b, h, n = counts.shape
        if b not in (1, batch) or h not in (1, heads) or n != blocks or not indices.shape[-1]:
            raise ValueError(
                f"block_mask with lists of shape {tuple(indices.shape)}: expected [1 or {batch}, "
                f"1 or {heads}, {blocks}, at least 1] for blocks of {rows} x {keys}"
            )
    assert arguments.block_order is not None
    require_table("order", arguments.block_order, torch.int32, (None, None, blocks))
    if arguments.pack_heads and arguments.heads_of_blocks > 1:
        raise NotImplementedError("pack_heads with a block_mask for each head: heads share tiles")
    if arguments.on_host:
        _check_lists(arguments)


def _check_lists(arguments: Arguments) -> None:
    """Raise ValueError for counts and block numbers outside their range, on the CPU."""
    last = arguments.capacity // arguments.block_keys
    blocks, seen = -(-arguments.capacity // arguments.block_keys), []
    for kind, end in (("block", blocks), ("full", last)):
        counts, indices = (getattr(arguments, f"{kind}_{name}") for name in ("counts", "indices"))
        if ((counts < 0) | (counts > indices.shape[-1])).any():
            raise ValueError(f"{kind}_counts: from 0 to {indices.shape[-1]}")
        listed = torch.arange(indices.shape[-1]) < counts[..., None]
        wrong = indices[listed & ((indices < 0) | (indices >= end))]
        if wrong.numel():
            raise ValueError(
                f"{kind}_indices {int(wrong[0])}: from 0 to {end - 1}; a block that ends behind "
                "the last key is seen in part"
            )
        seen.append(seen_blocks(counts, indices, max(blocks, 1)))
    order = arguments.block_order
    assert order is not None
    if (order.sort(-1).values != torch.arange(order.shape[-1])).any():
        raise ValueError("order of a block_mask: each block of queries once")
    if (seen[0] + seen[1] > 1).any():
        raise ValueError("block_mask with a block of keys that is listed twice")


def _check_contents(arguments: Arguments, capacity: int) -> None:
    """Check values of the tables, on the CPU."""
    q_lens = [arguments.queries] * arguments.batch
    if arguments.cu_seqlens_q is not None:
        q_lens = entry_lengths("cu_seqlens_q", arguments.cu_seqlens_q, arguments.queries)
    longest = arguments.max_seqlen_q
    if longest is not None and max(q_lens, default=0) > longest:
        raise ValueError(f"max_seqlen_q {longest}, but an entry has {max(q_lens)} queries")
    kv_lens = _key_lengths(arguments, capacity)
    _check_pages(arguments, kv_lens)
    _check_positions(arguments, q_lens, kv_lens)


def entry_lengths(name: str, starts: torch.Tensor, total: int) -> list[int]:
    """Return the length of each entry from its starts, which must partition `total` rows."""
    values = starts.tolist()
    lengths = [end - begin for begin, end in pairwise(values)]
    if values[0] != 0 or values[-1] != total or min(lengths, default=0) < 0:
        raise ValueError(f"{name} {values}: not ascending from 0 to {total}, the packed rows")
    return lengths


def _key_lengths(arguments: Arguments, capacity: int) -> list[int]:
    """Return the number of keys of each entry."""
    limits = [capacity] * arguments.batch
    if arguments.cu_seqlens_k is not None:
        limits = entry_lengths("cu_seqlens_k", arguments.cu_seqlens_k, arguments.k.shape[0])
    if arguments.kv_lens is None:
        return limits
    lengths = arguments.kv_lens.tolist()
    for entry, (length, limit) in enumerate(zip(lengths, limits, strict=True)):
        if not 0 <= length <= limit:
            raise ValueError(f"kv_lens {length} of entry {entry}: from 0 to Skv = {limit}")
    return lengths


def _check_pages(arguments: Arguments, kv_lens: list[int]) -> None:
    if arguments.page_table is None:
        return
    pages, page_size = arguments.k.shape[:2]
    for entry, (row, length) in enumerate(zip(arguments.page_table, kv_lens, strict=True)):
        require_pages(entry, row[: -(-length // page_size)].tolist(), pages)


def _check_positions(arguments: Arguments, q_lens: list[int], kv_lens: list[int]) -> None:
    if arguments.q_offset is None:
        offsets = [n_k - n_q for n_q, n_k in zip(q_lens, kv_lens, strict=True)]
    else:
        offsets = arguments.q_offset.tolist()
    for entry, (offset, n_q) in enumerate(zip(offsets, q_lens, strict=True)):
        if abs(offset) >= MAX_POSITION:
            raise ValueError(f"q_offset {offset} of entry {entry}: within +-{MAX_POSITION - 1}")
        if arguments.cos is None or n_q == 0:
            continue
        positions = arguments.cos.shape[0]
        if offset < 0 or offset + n_q > positions:
            raise ValueError(
                f"queries of entry {entry} have positions {offset} to {offset + n_q - 1}, "
                f"the rope tables end at {positions - 1}; without q_offset the last query has "
                "the position of the last key"
            )
