"""The arguments of `decode`, and every check that needs no config.

Shapes, dtypes and options are checked everywhere. What tensors say (lengths, page numbers) is
checked on the CPU, where reading it costs nothing; on a GPU that would make the host wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gqa_lowlatency.config import IO_DTYPES, KV_DTYPES, MAX_Q_TOKENS, Tuning
from gqa_lowlatency.split import reach
from kernelkit.attention import AttentionArguments
from kernelkit.call.tensors import (
    DTYPE_NAMES,
    INPUT_NAMES,
    is_broadcast,
    require_grid,
    require_pages,
    require_rank,
    require_table,
)
from kernelkit.plan.limits import MAX_POSITION

MAX_PARTS = 64  # clusters of a KV head; the last one to finish adds up their sums


@dataclass(frozen=True)
class Arguments(Tuning, AttentionArguments):
    """Arguments of the op `blackwell_kernels::decode`; `gqa_lowlatency.decode` explains them.

    parts: clusters that share a KV head, 0 chooses.
    """

    causal: bool = True
    max_kv_len: int | None = None
    first_keys: torch.Tensor | None = None
    kv_ready_before_pdl: bool = False
    batch_invariant: bool = False
    parts: int = 0
    cluster: int = field(default=0, kw_only=True)  # 1 in a config

    @property
    def q_tokens(self) -> int:
        return self.q.shape[1] if self.q.ndim == 4 else 1

    @property
    def longest(self) -> int:
        """Keys that the launch is laid out for."""
        return self.capacity if self.max_kv_len is None else self.max_kv_len

    @property
    def most_seen(self) -> int:
        """Keys that the tokens of an entry see at most."""
        if self.window_left is None:
            return self.longest
        return min(self.longest, self.window_left + self.q_tokens + self.sink_tokens)

    def check(self) -> None:
        """Raise TypeError, ValueError or NotImplementedError, naming the value and the limit."""
        q, heads = self.q, self.k.shape[-2:-1]
        _check_tensors(self)
        scaled = {"k_scale": (self.k, *heads), "v_scale": (self.v, *heads)}
        self.check_shared(q.shape[0], tuple(q.shape), self.o_dtype, scaled)
        capacity = self.capacity
        require_grid(batch=q.shape[0])
        _check_tables(self, capacity)
        _check_options(self)
        if q.device.type == "cpu":
            _check_contents(self)


def _check_tensors(arguments: Arguments) -> None:
    q, k, v = arguments.q, arguments.k, arguments.v
    keys = "[B, S, Hkv, D]" if arguments.page_table is None else "[pages, page_size, Hkv, D]"
    if q.ndim != 3:
        require_rank("q", q, "[B, T, Hq, D]")
    for name, tensor in (("k", k), ("v", v)):
        require_rank(name, tensor, keys)
    if k.shape != v.shape or k.dtype != v.dtype:
        raise ValueError(f"k {k.dtype} {tuple(k.shape)} and v {v.dtype} {tuple(v.shape)} differ")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q has head_dim {q.shape[-1]}, k has {k.shape[-1]}")
    if DTYPE_NAMES.get(q.dtype) not in IO_DTYPES:
        raise NotImplementedError(f"dtype {q.dtype} of q: supported are {IO_DTYPES}")
    if INPUT_NAMES.get(k.dtype) not in KV_DTYPES:
        raise NotImplementedError(f"dtype {k.dtype} of k and v: supported are {KV_DTYPES}")
    if k.dtype != torch.float8_e4m3fn and k.dtype != q.dtype:
        raise TypeError(f"q {q.dtype}, k and v {k.dtype} differ in dtype, and k is not in e4m3")
    if not 1 <= arguments.q_tokens <= MAX_Q_TOKENS:
        raise ValueError(
            f"{arguments.q_tokens} query tokens: from 1 to {MAX_Q_TOKENS}; fmha.attention takes "
            "more"
        )
    if arguments.page_table is None and k.shape[0] != q.shape[0]:
        raise ValueError(f"q has batch {q.shape[0]}, k has {k.shape[0]}")
    if arguments.page_table is not None and not k.shape[1]:
        raise ValueError("pages of 0 rows: at least 1")


def _check_tables(arguments: Arguments, capacity: int) -> None:
    if capacity >= MAX_POSITION:
        raise ValueError(f"{capacity} keys of an entry, limit {MAX_POSITION - 1}")
    if arguments.first_keys is not None:
        require_table("first_keys", arguments.first_keys, torch.int32, (arguments.q.shape[0],))
    longest = arguments.max_kv_len
    if not 0 <= arguments.parts <= MAX_PARTS:
        raise ValueError(f"{arguments.parts} parts: from 1 to {MAX_PARTS}, 0 for automatic")
    if longest is not None and not 0 <= longest <= capacity:
        raise ValueError(f"max_kv_len {longest}: from 0 to S = {capacity}")
    if arguments.kv_lens is None and longest is not None and longest < capacity:
        raise ValueError(f"max_kv_len {longest} without kv_lens: entries have all {capacity} keys")


def _check_options(arguments: Arguments) -> None:
    if arguments.tree is not None:
        arguments.check_tree(tuple(arguments.q.shape[:-2]), arguments.q_tokens)
    if arguments.window_right not in (None, 0):
        raise NotImplementedError(
            f"window right {arguments.window_right}: right is 0 with causal=True and None with "
            "causal=False; fmha.attention supports other windows"
        )
    if arguments.window_right == 0 and not arguments.causal:
        window = arguments.window_left, 0
        raise ValueError(
            f"causal=False conflicts with window={window}: right = 0 is a causal mask. Pass "
            "causal=True, or right = None"
        )
    if arguments.kv_ready_before_pdl and not arguments.pdl:
        raise ValueError("kv_ready_before_pdl without pdl: there is no earlier kernel to wait for")
    if arguments.kv_ready_before_pdl:
        _check_early_tables(arguments)


def _check_early_tables(arguments: Arguments) -> None:
    """Raise for a table that is copied, since decode would read the copy before it is written."""
    table, tree = arguments.page_table, arguments.tree
    copied = {
        "page_table": table if table is not None and is_broadcast(table) else None,
        "tree": None if tree is None or tree.is_contiguous() else tree,
    }
    for name, tensor in copied.items():
        if tensor is not None:
            raise ValueError(
                f"kv_ready_before_pdl with {name} of strides {tensor.stride()}: decode would not "
                "wait for the kernel that copies it. Pass a contiguous table"
            )


def _check_contents(arguments: Arguments) -> None:
    """Values of the tables, on the CPU."""
    firsts = [0] * arguments.q.shape[0]
    if arguments.first_keys is not None:
        firsts = arguments.first_keys.tolist()
    for entry, first in enumerate(firsts):
        if first < 0:
            raise ValueError(f"first_keys {first} of entry {entry}: at least 0")
    if arguments.kv_lens is None:
        return
    for entry, length in enumerate(arguments.kv_lens.tolist()):
        if not 0 <= length <= arguments.longest:
            raise ValueError(
                f"kv_lens {length} of entry {entry}: from 0 to max_kv_len = {arguments.longest}"
            )
        if arguments.page_table is not None:
            row = arguments.page_table[entry].tolist()
            _check_pages(arguments, entry, (firsts[entry], length), row)


def _check_pages(arguments: Arguments, entry: int, ends: tuple[int, int], row: list[int]) -> None:
    """Pages with keys that a token sees; others may have been given back to the pool. ends: of the
    entry's keys, the first one and the one behind the last."""
    pages, page_size = arguments.k.shape[:2]
    window = arguments.window_left, arguments.sink_tokens
    seen = reach(ends[1], arguments.q_tokens, page_size, *window, first_key=ends[0])
    require_pages(entry, [row[seen.tile(index)] for index in range(seen.tiles)], pages)
