"""What both score kernels have in common: their numbers, runs of tokens, places of keys, results
(device code)."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64

from kernelkit.device_table import DeviceTable
from kernelkit.words import vector_at
from kvcache.movement.device import numbers_of

NOBODY = -1  # owner of a token that sees nothing


@dataclass(frozen=True)
class Problem:
    """int64 each; addresses, and strides in bytes: of slots, tokens, heads, requests.

    rows: of a slot. blocks: of a request, in its block table. keys: columns of out.
    """

    data: Int64
    scales: Int64
    slot_bytes: Int64
    rows: Int64
    slots: Int64
    q: Int64
    q_token: Int64
    q_head: Int64
    q_scales: Int64
    q_scales_token: Int64
    q_scales_head: Int64
    weights: Int64
    weights_token: Int64
    owners: Int64
    counts: Int64
    tables: Int64
    table_bytes: Int64
    blocks: Int64
    requests: Int64
    out: Int64
    out_token: Int64
    keys: Int64
    tokens: Int64


FIELDS = len(Problem.__dataclass_fields__)


def problem_of(table: DeviceTable) -> Problem:
    """The numbers of a running kernel."""
    return Problem(*numbers_of(table, FIELDS))


@dataclass(frozen=True)
class Run:
    """Tokens begin to end - 1 of a CTA, of one owner; most: keys that one of them sees."""

    begin: Int32
    end: Int32
    owner: Int32
    most: Int32


@cute.jit
def note_spans(problem: Problem, spans: cute.Tensor, first: Int32) -> None:
    """(owner, count) of the CTA's tokens to shared memory, a token a thread, and one of nobody.

    spans: (tokens + 1, 2). A token that there is not, or whose owner is none, sees no key.
    """
    thread, _, _ = cute.arch.thread_idx()
    tokens = cute.size(spans, mode=[0]) - 1
    if thread <= tokens:
        token, owner, count = Int64(first + thread), Int32(NOBODY), Int32(0)
        if (thread < tokens) & (token < problem.tokens):
            owner = vector_at(problem.owners + token * 4, Int32, 1)[0]
            count = vector_at(problem.counts + token * 4, Int32, 1)[0]
        limit = cutlass.min(problem.keys, problem.blocks * problem.rows)
        if (owner < 0) | (Int64(owner) >= problem.requests):
            owner, count = Int32(NOBODY), Int32(0)
        spans[thread, 0] = owner
        spans[thread, 1] = cutlass.min(count, Int32(limit))


@cute.jit
def most_of(spans: cute.Tensor) -> Int32:
    """Keys that one of the CTA's tokens sees."""
    most = spans[0, 1]
    for token in cutlass.range_constexpr(1, cute.size(spans, mode=[0]) - 1):
        most = cutlass.max(most, spans[token, 1])
    return most


@cute.jit
def run_from(spans: cute.Tensor, begin: Int32) -> Run:
    """The run that begins at a token of the CTA."""
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
def slot_of(problem: Problem, owner: Int32, block: Int32) -> Int32:
    """Where a block of a request lies; -1 where its table names no slot of the pool."""
    row = problem.tables + Int64(owner) * problem.table_bytes
    slot = vector_at(row + Int64(block) * 4, Int32, 1)[0]
    return slot if (slot >= 0) & (Int64(slot) < problem.slots) else Int32(-1)


@cute.jit
def relu(value: Float32) -> Float32:
    """max(0, value), NaN of NaN."""
    return cute.arch.fmax(value, Float32(0.0), nan=True)


@cute.jit
def store_score(
    problem: Problem, place: tuple, value: Float32, exists: Boolean, out: cutlass.Constexpr[str]
) -> None:
    """place: (token, key), where `exists`."""
    token, key = place
    if exists:
        row = problem.out + Int64(token) * problem.out_token
        if cutlass.const_expr(out == "bf16"):
            vector_at(row + Int64(key) * 2, BFloat16, 1)[0] = value.to(BFloat16)
        else:
            vector_at(row + Int64(key) * 4, Float32, 1)[0] = value
