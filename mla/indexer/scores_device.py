"""Device code of all score kernels: runs of tokens, locations of keys, results."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64

from kernelkit.device.words import vector_at
from mla.indexer.params import ScoresParams

NOBODY = -1  # owner of a token that sees no key


@dataclass(frozen=True)
class Run:
    """Tokens begin to end - 1 of a CTA, which have one owner.

    most: the largest number of keys that one of them sees.
    """

    begin: Int32
    end: Int32
    owner: Int32
    most: Int32


@cute.jit
def note_spans(params: ScoresParams, spans: cute.Tensor, first: Int32) -> None:
    """Write (owner, count) of the CTA's tokens to shared memory, one token in each thread.

    A last entry has no owner. A token that does not exist or has no valid owner sees no key.

    spans: (tokens + 1, 2).
    """
    thread, _, _ = cute.arch.thread_idx()
    tokens = cute.size(spans, mode=[0]) - 1
    if thread <= tokens:
        token, owner, count = Int64(first + thread), Int32(NOBODY), Int32(0)
        if (thread < tokens) & (token < params.tokens):
            owner = vector_at(params.owners + token * 4, Int32, 1)[0]
            count = vector_at(params.counts + token * 4, Int32, 1)[0]
        limit = cutlass.min(params.keys, params.blocks * params.rows)
        if (owner < 0) | (Int64(owner) >= params.requests):
            owner, count = Int32(NOBODY), Int32(0)
        spans[thread, 0] = owner
        spans[thread, 1] = cutlass.min(count, Int32(limit))


@cute.jit
def most_of(spans: cute.Tensor) -> Int32:
    """Return the largest number of keys that one of the CTA's tokens sees."""
    most = spans[0, 1]
    for token in cutlass.range_constexpr(1, cute.size(spans, mode=[0]) - 1):
        most = cutlass.max(most, spans[token, 1])
    return most


@cute.jit
def run_from(spans: cute.Tensor, begin: Int32) -> Run:
    """Return the run that begins at a token of the CTA."""
    tokens = cute.size(spans, mode=[0]) - 1
    owner, most = spans[begin, 0], spans[begin, 1]
    end, going = begin + 1, Int32(1)
    while going > 0:
        going = Int32(0)
        if end < tokens:
            if spans[end, 0] == owner:
                most = cutlass.max(most, spans[end, 1])
                end, going = end + 1, Int32(1)
    return Run(begin, end, owner, most)


@cute.jit
def slot_of(params: ScoresParams, owner: Int32, block: Int32) -> Int32:
    """Return the slot of a request's block, or -1 if its table names no slot of the pool."""
    row = params.block_tables + Int64(owner) * params.table_stride
    slot = vector_at(row + Int64(block) * 4, Int32, 1)[0]
    return slot if (slot >= 0) & (Int64(slot) < params.slots) else Int32(-1)


@cute.jit
def relu(value: Float32) -> Float32:
    """Return max(0, value), and NaN for NaN."""
    return cute.arch.fmax(value, Float32(0.0), nan=True)


@cute.jit
def store_score(
    params: ScoresParams,
    token: Int32,
    key: Int32,
    value: Float32,
    exists: Boolean,
    out: cutlass.Constexpr[str],
) -> None:
    """Store the score of a key for a token; `exists` says whether the token sees the key."""
    if exists:
        row = params.out + Int64(token) * params.out_stride
        if cutlass.const_expr(out == "bf16"):
            vector_at(row + Int64(key) * 2, BFloat16, 1)[0] = value.to(BFloat16)
        else:
            vector_at(row + Int64(key) * 4, Float32, 1)[0] = value
