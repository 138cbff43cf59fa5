"""What vLLM 0.33.0 derives from a backend's builder, in a few lines: for layers with chunks, layers
that share keys, encoders, and decoders over the keys of an encoder. Each changes the batch before
the builder sees it, or writes to what the builder returns.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import accumulate, pairwise
from typing import Any

import torch

CHUNK = 32  # tokens of a chunk, two pages


def chunked(builder: type) -> type:
    """Requests are cut where chunks begin: each piece is a request of its own, with its pages."""

    class Chunked(builder):  # type: ignore[misc,valid-type]
        def build(self, common_prefix_len: int, given: Any, fast_build: bool = False) -> Any:
            page = self.kv_cache_spec.block_size
            new, keys, tables = [], [], []
            starts = given.query_start_loc_cpu.tolist()
            for row, (begin, end) in enumerate(pairwise(starts)):
                last = int(given.seq_lens[row])
                first = last - (end - begin)
                while first < last:
                    chunk = first // CHUNK
                    stop = min(last, (chunk + 1) * CHUNK)
                    new.append(stop - first)
                    keys.append(stop - chunk * CHUNK)
                    pages = [chunk * CHUNK // page + n for n in range(CHUNK // page)]
                    tables.append(given.block_table_tensor[row, pages])
                    first = stop
            bounds = torch.tensor([0, *accumulate(new)], dtype=torch.int32)
            made = super().build(common_prefix_len, replace(
                given, query_start_loc=bounds, query_start_loc_cpu=bounds, num_reqs=len(new),
                seq_lens=torch.tensor(keys, dtype=torch.int32), max_query_len=max(new),
                max_seq_len=max(keys), block_table_tensor=torch.stack(tables),
            ), fast_build)  # fmt: skip
            made.make_virtual_batches_block_table = lambda table: table
            return made

    return Chunked


def sharing(builder: type) -> type:
    """The layers after the last one with keys of its own see the tokens alone whose logits are
    wanted: the last one of each request."""

    class Sharing(builder):  # type: ignore[misc,valid-type]
        def build(self, common_prefix_len: int, given: Any, fast_build: bool = False) -> Any:
            starts = torch.arange(given.num_reqs + 1, dtype=torch.int32)
            nowhere = torch.full_like(starts, 1 << 20)  # a copy from the GPU that has not ended
            made = super().build(common_prefix_len, replace(
                given, query_start_loc=starts, query_start_loc_cpu=nowhere, max_query_len=1,
                num_actual_tokens=given.num_reqs,
            ), fast_build)  # fmt: skip

            class Metadata(type(made)):  # type: ignore[misc]
                def __init__(self) -> None:
                    for field in fields(made):
                        setattr(self, field.name, getattr(made, field.name))
                    self.num_logits_indices = given.num_reqs

            return Metadata()

    return Sharing


def encoding(builder: type) -> type:
    """Tokens of an encoder see one another."""

    class Encoding(builder):  # type: ignore[misc,valid-type]
        def build(self, common_prefix_len: int, given: Any, fast_build: bool = False) -> Any:
            return super().build(common_prefix_len, replace(given, causal=False), fast_build)

    return Encoding


def crossing(builder: type, keys: list[int], slots: torch.Tensor) -> type:
    """Tokens of a decoder see the keys of an encoder, which are written once, to `slots`."""

    class Crossing(builder):  # type: ignore[misc,valid-type]
        def build(self, common_prefix_len: int, given: Any, fast_build: bool = False) -> Any:
            lengths = torch.tensor(keys, dtype=torch.int32)
            made = super().build(common_prefix_len, replace(
                given, causal=False, seq_lens=lengths, max_seq_len=max(keys)
            ), fast_build)  # fmt: skip
            made.slot_mapping = slots
            return made

    return Crossing
