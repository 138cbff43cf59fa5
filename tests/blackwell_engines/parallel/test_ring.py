"""Attention over shared sequences: the parts of each rank, and that together they are attention."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from blackwell_engines.parallel import join, own_positions, own_tokens, ring_attention
from blackwell_engines.parallel.ring import attend_all, steps
from fmha import reference
from kernelkit.numerics.tolerance import compare_output
from tests.support.hostile.calls import hostile, refused

SHAPE = (2, 48, (4, 2), 64)  # entries, tokens of all ranks, heads, head dim


def definition(q, k, v, causal):
    """(O, LSE) in fp64; the last query is at the position of the last key."""
    found = reference.definition(q, k, v, causal=causal)
    return found.o, found.lse


def tensors(seed=0):
    batch, tokens, (heads, kv_heads), dim = SHAPE
    generator = torch.Generator().manual_seed(seed)
    sizes = [(batch, tokens, count, dim) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(size, generator=generator).bfloat16() for size in sizes]


@pytest.mark.parametrize("world", range(1, 9))
def test_every_pair_is_computed_once_and_ranks_have_the_same_work(world):
    tokens = 4 * world
    seen, work = torch.zeros(tokens, tokens, dtype=torch.int), []
    places = [own_positions(tokens, rank, world) for rank in range(world)]
    for rank in range(world):
        before = seen.sum().item()
        for step in steps(rank, world, causal=True):
            rows, keys = places[rank], places[step.source]
            rows, keys = rows[2 if step.late else 0 :], keys[: 2 if step.early else None]
            pairs = torch.ones(len(rows), len(keys), dtype=torch.int)
            seen[rows[:, None], keys[None]] += pairs.tril() if step.causal else pairs
        work.append(seen.sum().item() - before)
    assert torch.equal(seen, torch.ones_like(seen).tril())
    assert len(set(work)) == 1


@pytest.mark.parametrize("world", [1, 2, 3])
def test_parts_of_a_sequence_are_joined_again(world):
    x = torch.arange(5 * 12 * 2).view(5, 12, 2)
    assert torch.equal(join([own_tokens(x, rank, world) for rank in range(world)]), x)


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        hostile(lambda: own_positions(8, 2, 2), "rank 2: at most 1"),
        hostile(lambda: own_positions(8, -1, 2), "rank -1: at least 0"),
        hostile(lambda: own_positions(8.0, 0, 2), "tokens is 8.0"),
        hostile(lambda: own_positions(8, 0, 0), "world 0: at least 1"),
        hostile(lambda: own_positions(1 << 31, 0, 1), "tokens 2147483648: at most"),
        hostile(lambda: own_tokens(3, 0, 1), "x is int"),
        hostile(lambda: own_tokens(torch.ones(8), 0, 2), r"dim 1: x has shape \(8,\)"),
        hostile(lambda: join(3), "parts is int"),
        hostile(lambda: join([]), "0 parts"),
        hostile(lambda: join([torch.ones(1, 4), torch.ones(1, 2)]), r"parts\[1\] is .* \(1, 2\)"),
        hostile(lambda: join([torch.ones(1, 3)]), "3 tokens over 1 ranks"),
    ],
)
def test_a_named_error(attempt, words):
    refused(attempt, words)


def test_what_does_not_come_out_even_is_refused():
    with pytest.raises(ValueError, match="50 tokens over 4 ranks: a multiple of 8"):
        own_positions(50, 0, 4)
    with pytest.raises(ValueError, match="3 tokens: an even number"):
        ring_attention(*(torch.zeros(1, 3, 1, 64) for _ in range(3)))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("world", [2, 4])
def test_parts_are_merged_to_attention(world, causal):
    """Each part is computed by the definition, without kernels."""
    q, k, v = (x.double() for x in tensors())
    split = [[own_tokens(x, rank, world) for x in (q, k, v)] for rank in range(world)]
    found = []
    for rank in range(world):
        plan = steps(rank, world, causal=causal)

        def attend(queries, keys, step, out):
            o, lse = definition(queries, *keys, step.causal)
            out.copy_(o)
            return lse

        parts = attend_all(plan, split[rank][0], [split[s.source][1:] for s in plan], attend)
        weights = torch.stack([lse for _, lse in parts]).softmax(0)
        each = [o * w.transpose(1, 2)[..., None] for (o, _), w in zip(parts, weights, strict=True)]
        found.append(sum(torch.nan_to_num(x) for x in each))
    torch.testing.assert_close(join(found), definition(q, k, v, causal)[0])


def on_a_rank(rank, world, folder, causal):
    address = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    q, k, v = (own_tokens(x, rank, world) for x in tensors())
    o, lse = ring_attention(q, k, v, causal=causal, sinks=torch.ones(4), return_lse=True)
    torch.save((o, lse), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(("world", "causal"), [(2, True), (3, True), (2, False)])
def test_ranks_that_talk_by_gloo(world, causal, tmp_path):
    mp.spawn(on_a_rank, (world, str(tmp_path), causal), nprocs=world)
    parts = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(world)]
    o, lse = join([o for o, _ in parts]), join([lse for _, lse in parts], dim=2)
    exact, plain = definition(*tensors(), causal)
    exact_lse = torch.logaddexp(plain, torch.ones_like(plain))
    exact = exact * (plain - exact_lse).exp().transpose(1, 2)[..., None]
    report = compare_output(o, exact, exact.bfloat16(), torch.bfloat16)
    assert report.ok, str(report)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-4)
